"""Finds and loads everything below a folder, and prints path, outcome and message, one JSON array a line.

It is a program of its own so that a test can see what leaks to stderr, from C libraries as well.
"""

import json
import sys

from kvcli import images
from kvcli.errors import PictureError
from kvcli.inputs import Stray, find

for item in find([sys.argv[1]], recursive=True):
    if isinstance(item, Stray):
        print(json.dumps([item.path, "stray", ""]))
        continue
    outcome, message = "described", item.error or ""
    try:
        for source in item.sources:
            images.load(source)
    except PictureError as error:
        outcome, message = "error", str(error)
    print(json.dumps([item.id, outcome, message]))
