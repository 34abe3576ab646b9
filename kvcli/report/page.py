"""One self-contained page of a comparison: text is escaped, pictures and plots are inside, nothing is fetched.

Knows records, tables and pictures, neither models nor files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from kvcli.engine.recording import VISUAL, Trace
from kvcli.report import figures, heat, units
from kvcli.report.differences import spans
from kvcli.report.portrait import Portrait
from kvcli.report.side_by_side import remarks
from kvcli.report.summary import MEASURES, Row, cell, label

TILE, LARGE = 200, 560


@dataclass(frozen=True)
class Shown:
    """A picture of the comparison: its records, and what the model looked at, where that is known.

    looked: a portrait of the full cache's run. kept: traces of the policies after the prompt, by label.
    """

    picture: Image.Image
    entries: Sequence[Mapping[str, Any]]
    looked: Portrait | None = None
    kept: Mapping[str, Trace] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """The smallest budgets within a tolerance, and the losses on the way, by policy."""

    tolerance: float
    found: Mapping[str, tuple[float, Mapping[float, float]]]


def render(
    title: str,
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    shown: Sequence[Shown],
    *,
    given: bool = False,
    more: int = 0,
    search: Search | None = None,
) -> str:
    """The page. given: perplexity is that of given answers. more: pictures that are not shown."""
    environment = Environment(loader=PackageLoader("kvcli.report", ""), autoescape=True, trim_blocks=True)
    css = environment.loader.get_source(environment, "page.css")[0]  # type: ignore[union-attr]
    found = search.found if search else {}
    return environment.get_template("page.html").render(
        title=title,
        settings=settings,
        css=Markup(css),
        rows=rows,
        measures=MEASURES,
        cell=cell,
        remarks=remarks(rows),
        given=given,
        sections=[_section(each) for each in shown],
        more=more,
        curves=_curves(search) if search else None,
        searches=[(name, f"{share:.3g}", units.plain(losses[share], 3)) for name, (share, losses) in found.items()],
        plot=_plot,
    )


def _section(shown: Shown) -> dict[str, Any]:
    first = shown.entries[0]
    full = next((e["text"] for e in shown.entries if e["policy"]["name"] == "full"), "")
    others = [e for e in shown.entries if e["policy"]["name"] != "full"]
    return {
        "id": first["id"],
        "prompt": first["prompt"],
        "picture": _uri(heat.thumbnail(shown.picture, LARGE)),
        "full": full,
        "texts": [
            {
                "label": label(e["policy"]),
                "same": e["text"] == full,
                "spans": spans(full, e["text"]),
                "facts": _facts(e),
            }
            for e in others
        ],
        "layers": _layers(shown.looked),
        "kept": _kept(shown),
        "timeline": _both({label(e["policy"]): e["bytes_by_step"] for e in shown.entries}, figures.timeline),
    }


def _facts(entry: Mapping[str, Any]) -> str:
    """One line about an answer."""
    scores, first = entry["fidelity"], entry["fidelity"]["first_divergence"]
    where = "never differs" if first is None else f"differs from token {first + 1} on"
    return (
        f"perplexity {units.plain(scores['perplexity'])} (full {units.plain(scores['perplexity_full'])}), "
        f"ROUGE-L {units.plain(scores['rouge_l'])}, {where}; "
        f"keeps {entry['kept']} of {entry['seen']} entries, {units.size(entry['cache_bytes']['held'])}"
    )


def _layers(looked: Portrait | None) -> list[dict[str, str]]:
    if looked is None or looked.boxes is None:
        return []
    numbers = range(len(looked.looked.layers))
    tiles = [{"caption": "all layers", "image": _uri(looked.looks(numbers, TILE))}]
    for number in numbers:
        caption = f"layer {looked.looked.layers[number].layer}"
        tiles.append({"caption": caption, "image": _uri(looked.looks([number], TILE))})
    return tiles


def _kept(shown: Shown) -> list[dict[str, str]]:
    if shown.looked is None or shown.looked.boxes is None:
        return []
    tiles, columns, boxes = [], shown.looked.columns, shown.looked.boxes
    for name, trace in shown.kept.items():
        share = np.mean([layer.present(trace.prompt)[columns] for layer in trace.layers], axis=0)
        small = heat.thumbnail(shown.picture, TILE)
        visual = float(trace.held()[:, 0, VISUAL].mean()) / max(1, int((trace.kinds == VISUAL).sum()))
        image = _uri(heat.kept(small, share, boxes, shown.picture.size))
        tiles.append({"caption": f"{name}: {visual:.0%} of the visual tokens", "image": image})
    return tiles


def _curves(search: Search) -> dict[str, str]:
    series = {name: sorted(losses.items()) for name, (_, losses) in search.found.items()}
    return _both(series, lambda s, theme: figures.curve(s, "loss of perplexity", theme, limit=search.tolerance))


def _both(numbers: Any, draw: Callable[[Any, figures.Theme], Figure]) -> dict[str, str]:
    """A plot for light and for dark pages."""
    return {
        name: "data:image/png;base64," + base64.b64encode(figures.png(draw(numbers, theme))).decode()
        for name, theme in (("light", figures.LIGHT), ("dark", figures.DARK))
    }


def _plot(uris: Mapping[str, str], alt: str) -> Markup:
    template = (
        '<picture class="plot"><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        '<img src="{light}" alt="{alt}"></picture>'
    )
    return Markup(template).format(**uris, alt=alt)


def _uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
