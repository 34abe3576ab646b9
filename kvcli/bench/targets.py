"""What the project set out to reach in speed and memory, and whether it did: one row for each promise.

Ratios, not seconds, on the 30-layer 576-wide grouped-query shape, at a fifth of the cache kept. Knows which work must
be measured for which row and how to read it off the results; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcli.bench import results
from kvcli.bench.results import JSON
from kvcli.bench.speed import (
    FULL,
    PREALLOCATED,
    STOCK,
    Arm,
    Work,
    column_sums,
    compressed,
    full,
    last_rows,
    stock_arms,
)

SHAPE = "smollm2-135m"
BUDGET = 0.2
OURS = f"elastic {BUDGET:g}"
SUMS, LAST = "column sums", "last 32"
PEERS = "peers"

Spread = tuple[float, float, float]
"""Median, smallest, largest."""


@dataclass(frozen=True)
class Case:
    """Work that is measured for some of the rows."""

    name: str
    work: Work
    decode: bool
    """Whether steps are timed; otherwise the reading of a prompt is."""
    more: int = 1
    """How many times as many rounds as usual: what is short is disturbed more easily."""

    def arms(self) -> list[Arm]:
        ours = compressed("elastic", BUDGET)
        if self.decode:
            return [*stock_arms(), Arm(PREALLOCATED), full(), ours, compressed("snapkv", BUDGET)]
        return [*stock_arms(static=False), full(), column_sums(), last_rows(), ours, compressed("snapkv", BUDGET)]


CASES = {
    case.name: case
    for case in (
        Case("decode-16x1024", Work(16, 1024), decode=True),
        Case("decode-8x4096", Work(8, 4096), decode=True),
        Case("prefill-1k", Work(1, 1024), decode=False, more=3),
        Case("prefill-4k", Work(1, 4096), decode=False),
    )
}


@dataclass(frozen=True)
class Target:
    """One promise. read: the measured value of a case's section (and its spread), None where it is missing."""

    case: str
    text: str
    bound: Literal["at least", "at most"]
    limit: float
    read: Callable[[JSON], Spread | float | None]
    unit: Literal["x", "%", "bytes"] = "x"

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.bound == "at least" else value <= self.limit


@dataclass(frozen=True)
class Row:
    """A promise and what came of it. verdict: pass, falls short, or not measured."""

    target: Target
    value: float | None
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "pass" if self.target.holds(self.value) else "falls short"


def judged(sections: Mapping[str, JSON], targets: Sequence[Target] | None = None) -> list[Row]:
    """A row for each promise, from the sections measured, by case."""
    rows = []
    for target in TARGETS if targets is None else targets:
        found = target.read(sections[target.case]) if target.case in sections else None
        value, low, high = found if isinstance(found, tuple | list) else (found, found, found)
        rows.append(Row(target, value, low, high))
    return rows


def as_json(row: Row) -> JSON:
    target = row.target
    return {
        "case": target.case,
        "target": target.text,
        "bound": target.bound,
        "limit": target.limit,
        "unit": target.unit,
        "measured": row.value,
        "low": row.low,
        "high": row.high,
        "verdict": row.verdict,
    }


# --- reading values off a section


def _gain(name: str) -> Callable[[JSON], Spread | None]:
    def read(found: JSON) -> Spread | None:
        value: Spread | None = found["gains"].get(OURS, {}).get(name)
        return value

    return read


def _over_limit(name: str) -> Callable[[JSON], Spread | None]:
    def read(found: JSON) -> Spread | None:
        arm = results.arm(found, name)
        return None if arm is None else arm.get("over_limit")

    return read


def _prefill_on_top(name: str) -> Callable[[JSON], Spread | None]:
    """Percent that reading a prompt takes on top of the library's own, with the same weights."""

    def read(found: JSON) -> Spread | None:
        gain = found["gains"].get(name, {}).get("prefill_over_same_weights")
        if gain is None:
            return None
        middle, low, high = ((1 / value - 1) * 100 for value in gain)
        return middle, high, low

    return read


def _bytes_ratio(of: str, to: str, what: str) -> Callable[[JSON], float | None]:
    def read(found: JSON) -> float | None:
        arms = [results.arm(found, name) for name in (of, to)]
        values = [None if arm is None else arm["bytes"][what] for arm in arms]
        return None if None in values or not values[1] else values[0] / values[1]

    return read


def _off_formula(found: JSON) -> float | None:
    """Bytes by which the account of used slots differs from the formula, in the worst of our arms."""
    each = [arm["bytes"] for arm in found["arms"] if arm["bytes"]["formula"] is not None]
    return max((float(abs(b["used"] - b["formula"])) for b in each), default=None)


def _unaccounted(found: JSON) -> float | None:
    """Percent that the allocator holds after the prompt beyond what the accounts say (used, reserved, side)."""
    arm = results.arm(found, OURS)
    if arm is None or arm["bytes"]["held_after_prefill"] is None:
        return None
    said = sum(arm["bytes"][name] for name in ("used", "reserved", "side"))
    return float(arm["bytes"]["held_after_prefill"] / said - 1) * 100


def _peer(name: str) -> Callable[[JSON], Any]:
    return lambda found: found["ratios"].get(name)


TARGETS = (
    Target("decode-16x1024", "decode over stock's default, batch 16 x 1024", "at least", 3.0, _gain("over_default")),
    Target("decode-16x1024", "decode over the fastest stock cache, 16 x 1024", "at least", 1.8, _gain("over_fastest")),
    Target("decode-16x1024", "compression alone (over ours full), 16 x 1024", "at least", 1.6, _gain("compression")),
    Target("decode-16x1024", "decode over its limit, kept 0.2, 16 x 1024", "at most", 1.6, _over_limit(OURS)),
    Target("decode-16x1024", "decode over its limit, ours full, 16 x 1024", "at most", 1.6, _over_limit(FULL)),
    Target("decode-8x4096", "decode over stock's default, batch 8 x 4096", "at least", 4.5, _gain("over_default")),
    Target("decode-8x4096", "compression alone (over ours full), 8 x 4096", "at least", 2.3, _gain("compression")),
    Target("prefill-1k", "column sums, on top of plain sdpa prefill, 1k", "at most", 10, _prefill_on_top(SUMS), "%"),
    Target("prefill-4k", "column sums, on top of plain sdpa prefill, 4k", "at most", 15, _prefill_on_top(SUMS), "%"),
    Target("prefill-1k", "last 32 rows, on top of plain sdpa prefill, 1k", "at most", 3, _prefill_on_top(LAST), "%"),
    Target("prefill-4k", "last 32 rows, on top of plain sdpa prefill, 4k", "at most", 3, _prefill_on_top(LAST), "%"),
    Target(
        "prefill-1k", "prefill peak with column sums over plain sdpa, 1k", "at most", 1.5,
        _bytes_ratio(SUMS, STOCK[0], "prefill_peak"),
    ),
    Target(
        "prefill-4k", "prefill peak with column sums over plain sdpa, 4k", "at most", 1.5,
        _bytes_ratio(SUMS, STOCK[0], "prefill_peak"),
    ),
    Target("prefill-1k", "bytes used less the formula, 1k", "at most", 0, _off_formula, "bytes"),
    Target("prefill-4k", "bytes used less the formula, 4k", "at most", 0, _off_formula, "bytes"),
    Target("prefill-4k", "held after the prompt beyond the accounts, 4k", "at most", 5, _unaccounted, "%"),
    Target(
        "prefill-4k", "held after the prompt, kept 0.2 over ours full, 4k", "at most", 0.25,
        _bytes_ratio(OURS, FULL, "held_after_prefill"),
    ),
    Target(
        "decode-16x1024", "peak in decode, kept 0.2 over ours full, 16 x 1024", "at most", 0.3,
        _bytes_ratio(OURS, FULL, "decode_peak"),
    ),
    Target(PEERS, "kvpress's prefill and decode over ours, batch 1 (worst)", "at least", 1.0, _peer("batch_1")),
    Target(PEERS, "kvpress's decode over ours, batch 8 (worst)", "at least", 1.3, _peer("decode_8")),
    Target(PEERS, "kvpress's prefill over ours, observed attention", "at least", 2.0, _peer("observed_prefill")),
)  # fmt: skip
