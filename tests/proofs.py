"""What the engine tests proved, kept for the table of supported models.

Where the environment variable `KVCLI_PROOFS` names a file, every proof is added to it as a line of JSON;
`python -m tests.architectures_table` runs the tests with it and writes the table.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import architectures
import pytest

TOLERANCE = 1e-5
"""Allowed difference of logits as a share of the largest logit, in float32."""


def every_architecture(*by_default: str) -> list[Any]:
    """Names for `parametrize`: these in the default run, the others marked slow."""
    return [
        name if name in by_default else pytest.param(name, marks=pytest.mark.slow) for name in architectures.names()
    ]


def prove(architecture: str, what: str, error: float, limit: float = TOLERANCE) -> None:
    """Fail if an error is above its limit (or no number); otherwise note it."""
    assert error <= limit, f"{architecture}, {what}: off by {error:.1e} where {limit:.0e} is allowed"
    target = os.environ.get("KVCLI_PROOFS")
    if target:
        line = json.dumps({"architecture": architecture, "what": what, "error": error, "limit": limit})
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
