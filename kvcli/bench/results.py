"""From measurements to one JSON document: medians, spreads, gains and what follows from them by arithmetic.

Everything that is shown or judged later reads this document, never the measurements. Ratios are [median, smallest,
largest] over the rounds. Knows formulas; measures and prints nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvcli.bench import limits
from kvcli.bench.shapes import Shape
from kvcli.bench.speed import FULL, FULL_PLAIN, PREALLOCATED, STOCK, STOCK_PACKED, Arm, Measured, Work, ratio

JSON = dict[str, Any]
SCHEMA = 1


def section(
    work: Work,
    shape: Shape,
    itemsize: int,
    found: Sequence[Measured],
    machine: limits.Machine | None = None,
    memory: int | None = None,
) -> JSON:
    """All about one piece of work. memory: bytes for the largest batch; machine: for the limit of a step."""
    return {
        "batch": work.batch,
        "context": work.context,
        "new_tokens": work.new_tokens,
        "columns": work.columns,
        "steps": work.steps,
        "rounds": work.rounds,
        "prefill_rows": work.prefill_rows,
        "layers": shape.layers,
        "layers_of_model": shape.whole or shape.layers,
        "arms": [_arm(each, work, shape, itemsize, machine, memory) for each in found],
        "gains": {each.arm.name: gains(each, found) for each in found if not each.arm.is_stock},
    }


def gains(each: Measured, found: Sequence[Measured]) -> JSON:
    """How many times faster a step of this arm is than others, and what each part of that is due to.

    The default is stock `generate` with its growing cache; of it, preallocation is what not copying the cache gains,
    packing what reading it as grouped queries gains, weights what another order of them in memory gains (None where it
    is the stock one), compression what holding less gains. Their product is the whole.
    """
    by_name = {other.arm.name: other.step_seconds for other in found}
    stock = {name: by_name[name] for name in STOCK if by_name.get(name)}
    fastest = min(stock, key=lambda name: statistics.median(stock[name])) if stock else None
    default, preallocated, full = (by_name.get(name, []) for name in (STOCK[0], PREALLOCATED, FULL))
    return {
        "over_default": ratio(default, each.step_seconds),
        "fastest_stock": fastest,
        "over_fastest": ratio(stock[fastest], each.step_seconds) if fastest else None,
        "preallocation": ratio(default, preallocated),
        "packing": ratio(preallocated, by_name.get(FULL_PLAIN, full)),
        "weights": ratio(by_name[FULL_PLAIN], full) if FULL_PLAIN in by_name else None,
        "compression": ratio(full, each.step_seconds),
        "prefill_over_default": ratio(_prefill(found, STOCK[0]), each.prefill_seconds),
        "prefill_over_same_weights": ratio(
            _prefill(found, STOCK_PACKED if each.arm.packed else STOCK[0]), each.prefill_seconds
        ),
    }


def arm(document: JSON, name: str) -> JSON | None:
    """An arm of a section by name."""
    return next((each for each in document["arms"] if each["name"] == name), None)


def _prefill(found: Sequence[Measured], name: str) -> list[float]:
    return next((each.prefill_seconds for each in found if each.arm.name == name), [])


def _arm(
    each: Measured, work: Work, shape: Shape, itemsize: int, machine: limits.Machine | None, memory: int | None
) -> JSON:
    chosen = each.arm.policy
    result: JSON = {
        "name": each.arm.name,
        "policy": None if chosen is None else {"name": chosen.name, **_plain(chosen.resolved())},
        "packed_weights": each.arm.packed,
        "kept": each.kept,
        "kept_of_prompt": each.kept_of_prompt,
        "step_seconds": spread(each.step_seconds),
        "prefill_seconds": spread(each.prefill_seconds),
        "tokens_per_second": work.batch / statistics.median(each.step_seconds) if each.step_seconds else None,
        "bytes": _bytes(each, work, shape, itemsize),
    }
    if machine is not None and each.step_seconds and each.kept is not None:
        entries = each.kept - work.steps / 2 if _grows(each.arm) else each.kept
        least = limits.seconds(limits.step(shape, work.batch, entries, itemsize), machine)
        result["limit_seconds"] = least
        result["over_limit"] = ratio(each.step_seconds, [least] * len(each.step_seconds))
    row = _row_peak(each, work, shape, itemsize)
    if memory is not None and row is not None:
        whole = _whole_weights(shape, itemsize)
        result["row_peak"] = round(row)
        result["largest_batch"] = limits.largest_batch(memory, whole, row)
    return result


def _grows(arm: Arm) -> bool:
    """Whether the number of entries at the end of the steps is more than their mean."""
    return arm.policy is None or not arm.policy.acts_in_decode


def _bytes(each: Measured, work: Work, shape: Shape, itemsize: int) -> JSON:
    """Bytes above the weights; None for what was not counted."""
    formula = None
    if each.kept_of_prompt is not None:
        formula = round(work.prefill_rows * each.kept_of_prompt * shape.layers * shape.entry_numbers * itemsize)
    return {
        "prefill_peak": None if each.prefill is None else each.prefill.peak - each.prefill.before,
        "held_after_prefill": None if each.prefill is None else each.prefill.after - each.prefill.before,
        "decode_cache": None if each.decode is None else each.decode.before,
        "decode_peak": None if each.decode is None else each.decode.peak,
        "used": each.bytes_used,
        "reserved": each.bytes_reserved,
        "side": each.bytes_side,
        "formula": formula,
    }


def _row_peak(each: Measured, work: Work, shape: Shape, itemsize: int) -> float | None:
    """Bytes that one row needs at its highest, for the whole model: layers that were left out hold what others do."""
    if each.prefill is None or each.decode is None:
        return None
    missing = (shape.whole or shape.layers) - shape.layers
    held_prefill = (each.prefill.after - each.prefill.before) / work.prefill_rows / shape.layers
    held_decode = each.decode.before / work.batch / shape.layers
    in_prefill = (each.prefill.peak - each.prefill.before) / work.prefill_rows + missing * held_prefill
    return max(in_prefill, each.decode.peak / work.batch + missing * held_decode)


def _whole_weights(shape: Shape, itemsize: int) -> int:
    """Bytes of the model's layers, all of them, and of what is built besides."""
    missing = (shape.whole or shape.layers) - shape.layers
    return (shape.numbers + missing * shape.layer_numbers) * itemsize


def spread(values: Sequence[float]) -> JSON | None:
    """Median, smallest, largest, and all of them."""
    if not values:
        return None
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "rounds": list(values)}


def _plain(options: JSON) -> JSON:
    """Options as JSON can hold them."""
    return {
        name: value if isinstance(value, str | int | float | bool | None) else repr(value)
        for name, value in options.items()
    }
