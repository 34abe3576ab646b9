"""A recorded run on a terminal (rich): maps of layers and positions, a table of layers, timelines, the forecast.

Every function takes `plain`: characters of ASCII alone. Without colour nothing is lost: token kinds also stand as
letters under each map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from kvcli.engine.recording import GENERATED, KINDS, Trace
from kvcli.report import forecast, units

SHADES = {False: " ░▒▓█", True: " .:+#"}
BARS = {False: "▁▂▃▄▅▆▇█", True: "_.-:=+*#"}
STYLES = {"text": "yellow", "visual": "cyan", "generated": "green"}
RANKS = (0.5, 0.75, 0.9, 0.97)
"""A cell of the attention map gets its shade by the share of its layer's cells that get less."""


def attention_map(trace: Trace, width: int, plain: bool) -> Text:
    """Layers x positions: which tokens get the most attention of a layer, by rank, so that no sink blots out the rest.

    From all queries of the prompt, or, for a generated token, from those that came after it.
    """
    values = [np.where(trace.kinds == GENERATED, layer.answer, layer.importance) for layer in trace.layers]
    edges = _edges(len(trace.kinds), width)
    cells = np.array([[row[a:b].max() for a, b in edges] for row in values])
    ranks = cells.argsort(1).argsort(1) / max(1, cells.shape[1] - 1)
    title = "attention each token gets (darkest: the top 3 % of a layer, then 10, 25, 50 %)"
    return _map(title, trace, edges, np.searchsorted(RANKS, ranks, side="right"), plain)


def kept_map(trace: Trace, width: int, plain: bool) -> Text:
    """Layers x positions: what is held at the end."""
    rows = [layer.present(len(trace.kinds)) for layer in trace.layers]
    edges = _edges(len(trace.kinds), width)
    cells = np.array([[row[a:b].mean() for a, b in edges] for row in rows])
    shades = np.ceil(cells * (len(SHADES[plain]) - 1) - 1e-9).astype(int)
    return _map(f"what {trace.policy['name']} holds at the end", trace, edges, shades, plain)


def layer_table(trace: Trace, plain: bool) -> Table:
    """Entropy, sparsity, entries, and the share kept of each kind of token, layer by layer."""
    table = _table(plain)
    table.add_column("layer", justify="right", overflow="fold")
    for name in ("entropy", "sparsity", "entries"):
        table.add_column(name, justify="right", overflow="fold")
    for name in KINDS:
        table.add_column(f"{name} kept", justify="right", style=STYLES[name], overflow="fold")
    entries = trace.held()[:, -1].sum(-1)
    for layer, held, shares in zip(trace.layers, entries, trace.kept_share(), strict=True):
        numbers = (f"{layer.entropy:.2f}", units.share(layer.sparsity), f"{held:.0f}")
        table.add_row(str(layer.layer), *numbers, *(units.share(float(s)) for s in shares))
    return table


def timeline(series: Mapping[str, Sequence[float]], width: int, plain: bool) -> Text:
    """Bytes of the cache step by step, one line for each name, all on one scale that begins at zero."""
    result = Text("cache after each step (first, highest, last)\n", style="bold")
    longest = max(map(len, series))
    largest = max(max(values) for values in series.values())
    for name, values in series.items():
        facts = ", ".join(units.size(v) for v in (values[0], max(values), values[-1]))
        room = max(10, width - longest - len(facts) - 4)
        bars = BARS[plain]
        picked = [max(part) for part in np.array_split(np.asarray(values, dtype=float), min(room, len(values)))]
        line = "".join(bars[round(v / max(largest, 1) * (len(bars) - 1))] for v in picked)
        result.append(f"{name:{longest}}  ").append(line, style="magenta").append(f"  {facts}\n")
    return result


def forecast_table(load: forecast.Load, batch: int, memory: int, plain: bool) -> Table:
    """What compression will bring for one row of this length, and in batches."""
    table = _table(plain)
    table.add_column("forecast", overflow="fold")
    table.add_column("full", justify="right", overflow="fold")
    table.add_column("compressed", justify="right", overflow="fold")
    kept = load.kept + min(load.growth, load.new_tokens)
    table.add_row("entries at the end", f"{load.prompt + load.new_tokens:,}", f"{kept:,}")
    table.add_row("cache of one row, peak", units.size(load.peak_full), units.size(load.peak))
    largest = [f"{forecast.largest_batch(load, memory, compressed=c):,}" for c in (False, True)]
    table.add_row(f"largest batch in {units.size(memory)}", *largest)
    for n in sorted({batch, *forecast.BATCHES}):
        traffic = forecast.cache_share(load, n)
        table.add_row(f"batch {n}: cache is {traffic:.1%} of a step", "1.00 x", f"{forecast.gain(load, n):.2f} x")
    return table


def _table(plain: bool) -> Table:
    from rich import box

    return Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, header_style="bold", pad_edge=False)


def _map(title: str, trace: Trace, edges: list[tuple[int, int]], shades: npt.NDArray[Any], plain: bool) -> Text:
    """Rows of shaded cells, one for each layer; shades: [layers, cells], places in `SHADES`."""
    kinds = [KINDS[np.bincount(trace.kinds[a:b], minlength=len(KINDS)).argmax()] for a, b in edges]
    result = Text(f"{title}\n", style="bold")
    for layer, row in zip(trace.layers, shades, strict=True):
        result.append(f"{layer.layer:3}  ", style="dim")
        for shade, kind in zip(row, kinds, strict=True):
            result.append(SHADES[plain][shade], style=STYLES[kind])
        result.append("\n")
    result.append("     ")
    for kind in kinds:
        result.append(kind[0], style=STYLES[kind])
    legend = ", ".join(f"{kind[0]} {kind}" for kind in dict.fromkeys(kinds))
    return result.append(f"\n     {legend}\n", style="dim")


def _edges(columns: int, width: int) -> list[tuple[int, int]]:
    """The columns that fall into each cell: as many cells as fit beside the layer, all of nearly the same width."""
    cells = min(max(10, width - 5), columns)
    marks = np.linspace(0, columns, cells + 1).round().astype(int)
    return list(zip(marks[:-1].tolist(), marks[1:].tolist(), strict=True))
