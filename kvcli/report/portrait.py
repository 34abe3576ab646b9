"""A recorded run as files: what each layer looked at, what left, and all numbers.

Takes a full run, which shows where the model looks, and the run of a policy, which shows what left. Knows pictures,
traces and figures, neither models nor the terminal.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from PIL import Image

from kvcli.engine.recording import FATES, KINDS, VISUAL, LayerTrace, Trace
from kvcli.report import figures, heat

THUMBNAIL, LARGE = 280, 640


@dataclass(frozen=True)
class Portrait:
    """One picture seen by one model.

    picture: the picture. boxes: [n, 4], what each of its visual tokens sees, or None when that is not known. first:
    how many visual tokens of the prompt come before this picture's. looked: the trace of the full cache; blank: that of
    the same answer over a grey picture. acted: the trace of the policy. steps: for each policy, bytes of the cache
    after each step.
    """

    picture: Image.Image
    boxes: npt.NDArray[np.float64] | None
    first: int
    looked: Trace
    blank: Trace
    acted: Trace
    steps: Mapping[str, Sequence[int]]

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        """The columns of this picture's visual tokens."""
        assert self.boxes is not None
        return np.flatnonzero(self.looked.kinds == VISUAL)[self.first : self.first + len(self.boxes)]

    def looks(self, layers: Sequence[int], longest: int) -> Image.Image:
        """The picture, bright where the answer looks more than it would at a grey one; mean of the layers."""
        small = heat.thumbnail(self.picture, longest)
        seen, empty = (self._density(trace, layers, "answer", small.size) for trace in (self.looked, self.blank))
        return heat.blend(small, np.divide(seen, empty, out=np.zeros_like(seen), where=empty > 0))

    def attention(self, layer: int, longest: int, what: str) -> Image.Image:
        """The picture, bright where attention goes: that of the answer, or of all queries (`what = "importance"`)."""
        small = heat.thumbnail(self.picture, longest)
        return heat.blend(small, self._density(self.looked, [layer], what, small.size))

    def _density(self, trace: Trace, layers: Sequence[int], what: str, size: tuple[int, int]) -> heat.Floats:
        """Attention per pixel, each layer's as shares of what this picture gets."""
        assert self.boxes is not None
        values = np.stack([getattr(trace.layers[layer], what)[self.columns] for layer in layers])
        shares = values / values.sum(1, keepdims=True).clip(1e-30)
        return heat.density(shares.mean(0), self.boxes, self.picture.size, size)

    def fates(self, layer: LayerTrace, *, longest: int) -> Image.Image:
        """The picture with what left one layer covered."""
        assert self.boxes is not None
        small = heat.thumbnail(self.picture, longest)
        return heat.fates(small, layer.fate()[self.columns], self.boxes, self.picture.size)


def looked_sheet(portrait: Portrait, theme: figures.Theme = figures.LIGHT) -> Figure:
    """All layers: where the answer looked."""
    numbers = range(len(portrait.looked.layers))
    whole = [
        ("the picture", heat.thumbnail(portrait.picture, THUMBNAIL)),
        ("all layers", portrait.looks(numbers, THUMBNAIL)),
    ]
    tiles = [(f"layer {portrait.looked.layers[n].layer}", portrait.looks([n], THUMBNAIL)) for n in numbers]
    title = "where the answer looks, layer by layer\nbright: gets more attention than the same place of a grey picture"
    return figures.sheet(title, whole + tiles, theme)


def fates_sheet(portrait: Portrait, theme: figures.Theme = figures.LIGHT) -> Figure:
    """All layers: what the policy kept of the picture."""
    name = portrait.acted.policy["name"]
    title = (
        f"what {name} keeps of the picture\nclear: kept, blue: merged into a kept one, black: dropped, pale: never seen"
    )
    shares = portrait.acted.kept_share()[:, VISUAL]
    return figures.sheet(
        title,
        [
            (f"layer {layer.layer}: {share:.0%}", portrait.fates(layer, longest=THUMBNAIL))
            for layer, share in zip(portrait.acted.layers, shares, strict=True)
        ],
        theme,
    )


def write(portrait: Portrait, folder: Path, facts: Mapping[str, Any]) -> list[Path]:
    """All figures and numbers of a portrait, in an existing folder: the files written."""
    plots = {
        "attention-map.png": figures.attention_map(portrait.looked),
        "layers.png": figures.layer_bars(portrait.acted),
        "timeline.png": figures.timeline(portrait.steps),
    }
    if portrait.boxes is not None:
        plots |= {"contact-sheet.png": looked_sheet(portrait), "kept.png": fates_sheet(portrait)}
    for name, figure in plots.items():
        figures.save(figure, folder / name)
    written = [folder / name for name in plots]
    if portrait.boxes is not None:
        written += _layers(portrait, folder / "layers")
    (folder / "profile.json").write_text(json.dumps(numbers(portrait, facts), indent=1) + "\n", encoding="utf-8")
    _table(folder / "tokens.csv", tokens(portrait))
    _table(folder / "steps.csv", steps(portrait))
    return [*written, *(folder / name for name in ("profile.json", "tokens.csv", "steps.csv"))]


def _layers(portrait: Portrait, folder: Path) -> list[Path]:
    """For every layer four pictures: where the answer looks, two kinds of attention as they are, what left."""
    folder.mkdir(exist_ok=True)
    written = []
    name = portrait.acted.policy["name"]
    for number, acted in enumerate(portrait.acted.layers):
        tiles = [
            ("where the answer looks, against a grey picture", portrait.looks([number], LARGE)),
            ("attention of the answer", portrait.attention(number, LARGE, "answer")),
            ("attention of all queries", portrait.attention(number, LARGE, "importance")),
            (f"what {name} keeps", portrait.fates(acted, longest=LARGE)),
        ]
        written.append(folder / f"layer-{acted.layer:02d}.png")
        figures.save(figures.sheet(f"layer {acted.layer}", tiles, columns=2, cell=4.2), written[-1])
    return written


def numbers(portrait: Portrait, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the tokens, as JSON."""
    shares, held = portrait.acted.kept_share(), portrait.acted.held()
    layers = [
        {
            "layer": layer.layer,
            "entropy": layer.entropy,
            "sparsity": layer.sparsity,
            "kept_share": {k: None if np.isnan(s) else float(s) for k, s in zip(KINDS, row, strict=True)},
            "held_by_step": {k: entries[:, kind].tolist() for kind, k in enumerate(KINDS)},
        }
        for layer, row, entries in zip(portrait.acted.layers, shares, held, strict=True)
    ]
    return {
        **facts,
        "policy": portrait.acted.policy,
        "prompt_tokens": portrait.acted.prompt,
        "visual_tokens": int((portrait.acted.kinds == VISUAL).sum()),
        "layers": layers,
        "bytes_by_step": {name: list(values) for name, values in portrait.steps.items()},
    }


def tokens(portrait: Portrait) -> list[dict[str, Any]]:
    """A row for each layer and token: the attention it got with the full cache, its fate under the policy, and the
    step after which it left (0: with the prompt), empty when it stayed. Runs may differ in length: a token that only
    one of them wrote lacks the other's numbers."""
    rows = []
    for looked, acted in zip(portrait.looked.layers, portrait.acted.layers, strict=True):
        fate, left = acted.fate(), acted.left.max(0)
        for position in range(max(len(looked.answer), len(fate))):
            seen, done = position < len(looked.answer), position < len(fate)
            kinds = portrait.looked.kinds if seen else portrait.acted.kinds
            rows.append(
                {
                    "layer": looked.layer,
                    "position": position,
                    "kind": KINDS[kinds[position]],
                    "importance": f"{looked.importance[position]:.6g}" if seen else "",
                    "answer": f"{looked.answer[position]:.6g}" if seen else "",
                    "fate": FATES[fate[position]] if done else "",
                    "left_at_step": int(left[position] - portrait.acted.prompt) if done and fate[position] else "",
                }
            )
    return rows


def steps(portrait: Portrait) -> list[dict[str, Any]]:
    """A row for each policy and step: bytes of the cache."""
    return [
        {"policy": name, "step": step, "bytes": value}
        for name, values in portrait.steps.items()
        for step, value in enumerate(values)
    ]


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
