"""What a value of a setting may look like, whether it comes from a flag, the environment or a YAML file.

Each `Kind` turns text or a YAML value into the typed value, or raises ValueError with the end of a sentence that
begins with the setting's name ("... must be a whole number of at least 1"). Knows no setting by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """`convert` is strict; `label` stands in the help; `form` is how the flag is given."""

    label: str
    convert: Callable[[Any], Any]
    form: str = "value"  # "value", "many" (a flag that may be repeated), "switch", "count"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("must be text (put it in quotes)")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off", ""}:
        return False
    raise ValueError("must be true or false")


def integer(low: int, high: int | None = None) -> Kind:
    """A whole number from `low` to `high`, both included."""
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

    def convert(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d[\d_]*\s*", value):
            value = int(value)
        good = isinstance(value, int) and not isinstance(value, bool)
        if good and value >= low and (high is None or value <= high):
            return int(value)
        raise ValueError(f"must be a whole number {bounds}")

    return Kind("N", convert)


def number(low: float, high: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number from `low` (not included when `above`) to `high`."""
    start = f"above {low:g}" if above else f"of at least {low:g}"
    bounds = start if high == math.inf else f"{start} and at most {high:g}"

    def convert(value: Any) -> float:
        try:
            result = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            result = math.nan
        if math.isfinite(result) and (result > low if above else result >= low) and result <= high:
            return result
        raise ValueError(f"must be a number {bounds}")

    return Kind("X", convert)


def choice(*words: str) -> Kind:
    """One of a few words."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and value.lower() in words:
            return value.lower()
        raise ValueError(f"must be one of {', '.join(words)}")

    return Kind("WORD", convert)


def _budget(value: Any) -> float | int:
    from kvcli.errors import UsageError
    from kvcli.policies.base import parse_budget

    try:
        return parse_budget(math.nan if isinstance(value, bool) else value)
    except UsageError as error:
        raise ValueError("must be a share kept (0 < b <= 1, as 0.2) or a number of entries kept (2 or more)") from error


def _batch(value: Any) -> int | None:
    if value == "auto":
        return None
    try:
        return int(integer(1).convert(value))
    except ValueError:
        raise ValueError("must be auto or a whole number of at least 1") from None


def _shard(value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", value) if isinstance(value, str) else None
    if match:
        part, parts = int(match[1]), int(match[2])
        if 1 <= part <= parts:
            return part, parts
    raise ValueError("must be i/n with 1 <= i <= n, as 1/8 .. 8/8")


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be text or a list of texts")


def _options(value: Any) -> dict[str, Any]:
    """`{name: value}`, `["name=value", ...]` or `"name=value,name=value"`."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key.replace("-", "_"): item for key, item in value.items()}
        raise ValueError("must have names as its keys")
    pairs = value.split(",") if isinstance(value, str) else value
    result: dict[str, Any] = {}
    if not isinstance(pairs, list | tuple):
        raise ValueError("must be name=value")
    for pair in pairs:
        name, equals, text = pair.partition("=") if isinstance(pair, str) else ("", "", "")
        if not equals or not name.strip():
            raise ValueError(f"must be name=value, not {pair!r}")
        result[name.strip().replace("-", "_")] = text.strip()
    return result


TEXT = Kind("TEXT", _text)
PATH = Kind("PATH", _text)
SWITCH = Kind("", _boolean, form="switch")
COUNT = Kind("", integer(0).convert, form="count")
DTYPE = choice("auto", "float32", "bfloat16", "float16", "float64")
COLOR = choice("auto", "always", "never")
BUDGET = Kind("KEPT", _budget)
BATCH = Kind("N|auto", _batch)
SHARD = Kind("I/N", _shard)
TEXTS = Kind("TEXT", _texts, form="many")
OPTIONS = Kind("NAME=VALUE", _options, form="many")
