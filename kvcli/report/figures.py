"""Plots of recorded runs (matplotlib). Each function takes numbers and gives a figure; `save` and `png` render it.

Text is drawn in the colours of a theme, so that a page can show a light and a dark rendering of the same plot.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from kvcli.engine.recording import KINDS, Trace

KIND_COLOURS = {"text": "#e69f00", "visual": "#56b4e9", "generated": "#009e73"}
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Theme:
    """Colours of text, grid and paper."""

    ink: str
    faint: str
    paper: str


LIGHT = Theme("#1b1b1f", "#d8d8de", "#ffffff")
DARK = Theme("#e8e8ee", "#3a3a44", "#17171c")


def timeline(
    series: Mapping[str, Sequence[float]],
    theme: Theme = LIGHT,
    *,
    title: str = "KV cache",
    starts: Sequence[int] = (),
) -> Figure:
    """Bytes of the cache after each step, one line for each name; step 0 is the prompt. starts: steps at which further
    prompts came in."""
    figure, axes = _paper(7.2, 3.4, theme)
    unit, scale = _unit(max((max(values) for values in series.values()), default=0))
    for index, (name, values) in enumerate(series.items()):
        style = {"color": LINES[index % len(LINES)], "linestyle": STYLES[index % len(STYLES)]}
        heights = [value / scale for value in values]
        axes.plot(
            range(len(values)), heights, linewidth=1.8, label=name, marker="" if len(values) > 1 else "o", **style
        )
    for place, start in enumerate(starts):
        note = "next prompt" if place == 0 else None
        axes.axvline(start, color=theme.ink, linewidth=0.8, linestyle=":", label=note)
    axes.set_title(title, color=theme.ink, loc="left", fontsize=11)
    axes.set_xlabel("steps: the prompt, then one for each token", color=theme.ink)
    axes.set_ylabel(unit, color=theme.ink)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, theme, len(series) + bool(starts))
    return figure


def curve(
    series: Mapping[str, Sequence[tuple[float, float]]], label: str, theme: Theme = LIGHT, *, limit: float | None = None
) -> Figure:
    """A measure against the share kept, one line for each name. limit: a line not to be crossed."""
    figure, axes = _paper(7.2, 3.4, theme)
    for index, (name, points) in enumerate(series.items()):
        kept, values = zip(*sorted(points), strict=True)
        axes.plot(kept, values, "o-", color=LINES[index % len(LINES)], linewidth=1.8, markersize=4, label=name)
    if limit is not None:
        axes.axhline(limit, color=theme.ink, linestyle=":", linewidth=1, label="tolerance")
    axes.set_xlabel("budget: what is kept", color=theme.ink)
    axes.set_ylabel(label, color=theme.ink)
    _legend(axes, theme, len(series) + (limit is not None))
    return figure


def attention_map(trace: Trace, theme: Theme = LIGHT) -> Figure:
    """Layers x positions: the attention that each prompt token got, and under it what kind of token it is."""
    values = np.stack([layer.importance[: trace.prompt] for layer in trace.layers])
    height = 0.16 * len(values) + 0.4
    figure = Figure(figsize=(7.2, height + 1.2), facecolor=theme.paper, layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[height, 0.14], hspace=0.02)
    axes, strip = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    _dress(axes, theme)
    _dress(strip, theme)
    smallest = max(float(values[values > 0].min(initial=1.0)), float(values.max()) * 1e-4)
    image = axes.imshow(values.clip(smallest), aspect="auto", cmap="inferno", norm=LogNorm(), interpolation="nearest")
    axes.set_title("attention that each prompt token gets", color=theme.ink, loc="left", fontsize=11)
    axes.set_ylabel("layer", color=theme.ink)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelbottom=False)
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.ax.tick_params(colors=theme.ink, labelsize=8)
    colours = ListedColormap([KIND_COLOURS[name] for name in KINDS])
    kinds = trace.kinds[None, : trace.prompt]
    strip.imshow(kinds, aspect="auto", cmap=colours, vmin=0, vmax=len(KINDS) - 1, interpolation="nearest")
    strip.set_yticks([])
    strip.grid(False)
    strip.set_xlabel("position in the prompt", color=theme.ink)
    strip.xaxis.set_major_locator(MaxNLocator(integer=True))
    marks = [Patch(color=KIND_COLOURS[name], label=name) for i, name in enumerate(KINDS) if (kinds == i).any()]
    axes.legend(
        handles=marks, frameon=False, labelcolor=theme.ink, fontsize=8, ncols=3, loc="lower right",
        bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2,
    )  # fmt: skip
    return figure


def layer_bars(trace: Trace, theme: Theme = LIGHT) -> Figure:
    """Entropy, sparsity, and the share kept of each kind of token, layer by layer."""
    figure = Figure(figsize=(7.2, 5.0), facecolor=theme.paper, layout="constrained")
    layers = [layer.layer for layer in trace.layers]
    panels: list[tuple[str, dict[str, Any]]] = [
        ("entropy of an attention row (nats)", {"": [layer.entropy for layer in trace.layers]}),
        ("sparsity: weights below 1 % of the row's largest", {"": [layer.sparsity for layer in trace.layers]}),
        ("share kept at the end", dict(zip(KINDS, trace.kept_share().T, strict=True))),
    ]
    for place, (title, lines) in enumerate(panels):
        axes = figure.add_subplot(3, 1, place + 1)
        _dress(axes, theme)
        for name, values in lines.items():
            if not np.isnan(values).all():
                axes.plot(
                    layers,
                    values,
                    "o-",
                    markersize=3.5,
                    clip_on=False,
                    color=KIND_COLOURS.get(name, LINES[0]),
                    label=name,
                )
        axes.set_title(title, color=theme.ink, loc="left", fontsize=9)
        axes.set_ylim(bottom=0, top=None if place == 0 else 1.05)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if place == len(panels) - 1:
            axes.set_xlabel("layer", color=theme.ink)
            _legend(axes, theme, 2)
    return figure


def sheet(
    title: str,
    tiles: Sequence[tuple[str, Image.Image]],
    theme: Theme = LIGHT,
    *,
    columns: int = 6,
    cell: float = 1.9,
) -> Figure:
    """Small pictures with a caption each, in a grid, in reading order. cell: width of each in inches."""
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    width, height = tiles[0][1].size
    tall, head = cell * height / width, 0.2 + 0.2 * len(title.splitlines())
    size_in = (columns * cell, rows * (tall + 0.28) + head)
    figure = Figure(figsize=size_in, facecolor=theme.paper)
    figure.text(0.06 / size_in[0], 1 - 0.1 / size_in[1], title, color=theme.ink, fontsize=10, va="top")
    for index, (caption, tile) in enumerate(tiles):
        row, column = divmod(index, columns)
        bottom = size_in[1] - head - (row + 1) * (tall + 0.28) + 0.04
        left, wide = (column * cell + 0.04) / size_in[0], (cell - 0.08) / size_in[0]
        axes = figure.add_axes((left, bottom / size_in[1], wide, (tall - 0.04) / size_in[1]))
        axes.imshow(np.asarray(tile), aspect="auto")
        axes.set_title(caption, color=theme.ink, fontsize=8, pad=3)
        axes.axis("off")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    figure.savefig(path, dpi=140, format="png")


def png(figure: Figure) -> bytes:
    """A PNG in memory."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=140, format="png")
    return buffer.getvalue()


def _paper(width: float, height: float, theme: Theme) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot()
    _dress(axes, theme)
    return figure, axes


def _dress(axes: Any, theme: Theme) -> None:
    axes.set_facecolor(theme.paper)
    axes.tick_params(colors=theme.ink, labelsize=8)
    axes.grid(color=theme.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.faint)


def _legend(axes: Any, theme: Theme, entries: int) -> None:
    if entries > 1:
        axes.legend(frameon=False, labelcolor=theme.ink, fontsize=8, ncols=1 if entries < 6 else 2)


def _unit(largest: float) -> tuple[str, int]:
    """The unit in which this many bytes make a handy number, and its bytes."""
    units = ("B", "KiB", "MiB", "GiB")
    power = next((i for i in range(3) if largest < 4 * 1024 ** (i + 1)), 3)
    return units[power], 1024**power
