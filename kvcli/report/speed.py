"""Tables of a speed bench, for the terminal and for a page, from its JSON document.

Knows the document, nothing of how it came to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from kvcli.report import units

JSON = dict[str, Any]
OWN = ("full", "full, plain weights", "preallocated", "dynamic, packed weights")
"""Arms that compress nothing."""
MARKS = {"pass": "green", "falls short": "red", "not measured": "dim"}


@dataclass(frozen=True)
class Grid:
    """A table before it is drawn. notes: what must be said under it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def grids(document: JSON) -> list[Grid]:
    """All tables: each piece of work, the peers, and what was aimed at."""
    found = []
    for title, section in document["sections"].items():
        if "arms" in section:
            found += [grid for grid in (speed(title, section), memory(title, section)) if grid.rows]
        elif section.get("presses"):
            found.append(peers(section))
    if document["targets"]:
        found.append(targets(document))
    return found


def machine(document: JSON) -> str:
    """One line that names where the numbers hold."""
    facts = document["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    threads = f", {facts['threads']} of {facts['cores']} threads" if facts["device"] == "cpu" else ""
    packed = ", ours with packed weights" if facts["weights"] == "packed" else ""
    where = f"{facts['device']}: {facts['device_name']}{threads}, {facts['dtype']}{packed}"
    line = f"{where}; {versions}; {facts['date']}"
    measured = facts.get("measured")
    if measured:
        line += (
            f"; copies {measured['bandwidth'] / 1e9:.1f} GB/s, multiplies {measured['rate'] / 1e9:.0f} GFLOP/s, "
            f"an empty step takes {measured['dispatch'] * 1e3:.1f} ms"
        )
    return line


def speed(title: str, section: JSON) -> Grid:
    """Steps and prompts of each arm, and how many times faster than others."""
    cut = section["layers"] < section["layers_of_model"]
    step = "ms/step /layer" if cut else "ms/step"
    scale = 1e3 / section["layers"] if cut else 1e3
    headings = ["arm", step, "tok/s", "entries", "x default", "x fastest", "x full", "x limit", "prefill s"]
    rows = []
    for arm in section["arms"]:
        gain = section["gains"].get(arm["name"], {})
        if arm["step_seconds"] or arm["prefill_seconds"]:
            rows.append(
                [
                    name(arm),
                    spread(arm["step_seconds"], scale),
                    "-" if cut else units.plain(arm["tokens_per_second"], 1),
                    units.plain(arm["kept"] if arm["step_seconds"] else arm["kept_of_prompt"], 0),
                    _times(gain.get("over_default")),
                    _times(gain.get("over_fastest")),
                    _times(gain.get("compression") if arm["policy"] else None),
                    _times(arm.get("over_limit")),
                    spread(arm["prefill_seconds"], 1, 2),
                ]
            )
    titled = f"{title}: batch {section['batch']}, prompt {section['context']}, answer {section['new_tokens']}"
    return _compact(Grid(titled, headings, rows, _notes(section, cut)))


def memory(title: str, section: JSON) -> Grid:
    """The three peaks of each arm, the account beside them, and how many rows fit."""
    rows = []
    for arm in section["arms"]:
        sizes = arm["bytes"]
        if sizes["prefill_peak"] is None and sizes["decode_peak"] is None:
            continue
        keys = ("prefill_peak", "held_after_prefill", "decode_peak", "used", "reserved", "side")
        largest = arm.get("largest_batch")
        rows.append(
            [
                name(arm),
                *("-" if sizes[key] is None else units.size(sizes[key]) for key in keys),
                "-" if largest is None else f"{largest:,}",
            ]
        )
    headings = ["arm", "prefill peak", "held after", "decode peak", "used", "reserved", "side", "largest batch"]
    counted = {
        f"prefill of {_rows(section['prefill_rows'])}": "prefill_peak",
        f"decode of {_rows(section['batch'])}": "decode_peak",
    }
    parts = [text for text, key in counted.items() if any(arm["bytes"][key] is not None for arm in section["arms"])]
    note = f"live tensors above the weights: {', '.join(parts)}"
    if any(arm["bytes"]["used"] is not None for arm in section["arms"]):
        note += "; used, reserved and side are the cache's own accounts after the prompt"
    return _compact(Grid(f"{title}: memory", headings, rows, [note] if rows else []))


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _compact(grid: Grid) -> Grid:
    """The same without columns in which nothing was measured."""
    full = [place for place, _ in enumerate(grid.headings) if any(row[place] != "-" for row in grid.rows)]
    rows = [[row[place] for place in full] for row in grid.rows]
    return Grid(grid.title, [grid.headings[place] for place in full], rows, grid.notes)


def peers(section: JSON) -> Grid:
    """Ours beside kvpress: seconds of a prompt, milliseconds of a step."""
    headings = ["batch", "method", "prefill s, kvpress", "ours", "x", "ms a step, kvpress", "ours", "x"]
    rows = [
        [
            str(each["batch"]),
            f"{each['press']} / {each['policy']}",
            spread(each["theirs"]["prefill_seconds"], 1, 2),
            spread(each["ours"]["prefill_seconds"], 1, 2),
            _times(each["prefill"]),
            spread(each["theirs"]["step_seconds"], 1e3),
            spread(each["ours"]["step_seconds"], 1e3),
            _times(each["decode"]),
        ]
        for each in section["presses"]
    ]
    versions = ", ".join(f"{name} {number}" for name, number in section["versions"].items())
    note = f"{section['weights']}, prompt {section['context']}, kept {section['budget']:g}; theirs: {versions}"
    return Grid("beside kvpress, in turns", headings, rows, [note])


def targets(document: JSON) -> Grid:
    """Each promise, what was measured, and whether it holds."""
    rows = []
    for row in document["targets"]:
        sign = ">=" if row["bound"] == "at least" else "<="
        rows.append([row["target"], f"{sign} {_unit(row['limit'], row['unit'])}", _measured(row), row["verdict"]])
    return Grid("what was aimed at", ["target", "aim", "measured", "verdict"], rows)


def table(grid: Grid, plain: bool) -> Table:
    """A grid for the terminal."""
    style = box.ASCII2 if plain else box.SIMPLE_HEAD
    drawn = Table(
        box=style, header_style="bold", pad_edge=False, collapse_padding=True, title=grid.title, title_justify="left"
    )
    drawn.add_column(grid.headings[0], overflow="fold")
    for heading in grid.headings[1:]:
        drawn.add_column(heading.replace(" ", "\n"), justify="right", overflow="fold")  # as narrow as its words
    for row in grid.rows:
        drawn.add_row(*row, style=MARKS.get(row[-1]) if row[-1] != "pass" else None)
    return drawn


def markdown(document: JSON) -> str:
    """A page with everything that the document says."""
    lines = [
        "# Speed and memory, measured",
        "",
        f"Written by `{document['command']}`. Medians over rounds in which the arms take turns, with the smallest and",
        "largest round in brackets; ratios are taken within a round. Weights are random: speed depends on sizes only.",
        "",
        f"**Where:** {machine(document)}.",
        "",
    ]
    if not document.get("complete", True):
        lines += ["**The run was interrupted or failed: what is missing was not measured.**", ""]
    for grid in reversed(grids(document)):
        lines += [f"## {grid.title[0].upper()}{grid.title[1:]}", ""]
        lines += [f"| {' | '.join(grid.headings)} |", f"|{'---|' * len(grid.headings)}"]
        lines += [f"| {' | '.join(row)} |" for row in grid.rows]
        lines += ["", *(f"- {note}" for note in grid.notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def spread(value: JSON | None, scale: float, digits: int = 1) -> str:
    """Median, with smallest and largest where there are several."""
    if value is None:
        return "-"
    middle, low, high = (f"{value[name] * scale:.{digits}f}" for name in ("median", "low", "high"))
    return middle if len(value["rounds"]) < 2 else f"{middle} ({low}-{high})"


def name(arm: JSON) -> str:
    """What an arm is called in tables and plots."""
    if arm["policy"] is None and arm["name"] != "preallocated":
        return f"stock {arm['name']}"
    return str(arm["name"])


def _times(value: Sequence[float] | None) -> str:
    return "-" if value is None else f"{value[0]:.2f}"


def _measured(row: JSON) -> str:
    if row["measured"] is None:
        return "-"
    middle = _unit(row["measured"], row["unit"])
    if row["low"] == row["high"] or row["low"] is None:
        return middle
    return f"{middle} ({_unit(row['low'], row['unit'])} to {_unit(row['high'], row['unit'])})"


def _unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value:,.0f} B"
    digits = 1 if unit == "%" else 2
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".") if not math.isinf(value) else "-"
    return f"{text} %" if unit == "%" else f"{text} x"


def _notes(section: JSON, cut: bool) -> list[str]:
    notes = []
    if cut:
        notes.append(
            f"{section['layers']} of {section['layers_of_model']} layers and no vocabulary fit here: steps are given "
            "per layer, other numbers for the layers that ran; the largest batch is that of the whole model"
        )
    if section["columns"] != section["context"] and any(arm["step_seconds"] for arm in section["arms"]):
        notes.append(f"steps are timed in the middle of the answer, with {section['columns']} columns seen")
    if section["prefill_rows"] != section["batch"] and any(arm["prefill_seconds"] for arm in section["arms"]):
        notes.append(f"prefill is that of {section['prefill_rows']} of the {section['batch']} rows")
    for label, gain in section["gains"].items():
        parts = [part for part in ("preallocation", "packing", "weights", "compression") if gain[part]]
        if {"preallocation", "packing", "compression"} <= {*parts} and label not in OWN:
            notes.append(
                f"{label}: {' x '.join(parts)} = {' x '.join(f'{gain[part][0]:.2f}' for part in parts)}; the fastest "
                f"stock cache is {gain['fastest_stock']}, and over it the gain is {gain['over_fastest'][0]:.2f}"
            )
    return notes
