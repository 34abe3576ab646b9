"""Numbers as people read them."""

from __future__ import annotations

import math


def size(count: float) -> str:
    """Bytes: 512 B, 3.4 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def speed(tokens: int, seconds: float) -> float | None:
    """Generated tokens per second of decode; the first token came with the prompt. None where there was no other."""
    return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None


def plain(value: float | int | None, digits: int = 2) -> str:
    """A number of moderate length: 0.25, 1,234, 3.1e+06; a dash for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 10_000:
        return f"{value:.2g}"
    return f"{value:.{digits}f}"


def share(value: float) -> str:
    """A share in percent; a dash for none of nothing."""
    return "-" if math.isnan(value) else f"{value:.0%}"


def budget(value: float | int | None) -> str:
    """A budget as it is typed."""
    return "own" if value is None else f"{value:g}"
