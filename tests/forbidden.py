"""A fixture for what the rights of files forbid, which must also be tested where the tests run as root."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """An empty folder, and a user who is not root for as long as the test runs."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path in [folder, *folder.iterdir()]:
            path.chmod(0o700)
        shutil.rmtree(folder)
