"""A plot of a speed bench: what a step of each arm takes, and how little it could take. Knows its JSON document."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from kvcli.report.figures import LIGHT, LINES, Theme
from kvcli.report.speed import name

JSON = dict[str, Any]


def steps(document: JSON, theme: Theme = LIGHT) -> Figure | None:
    """Bars of milliseconds a step, one panel for each piece of work, with a mark at the limit of this machine; None
    when no step was timed."""
    panels = {
        title: arms
        for title, section in document["sections"].items()
        if (arms := [arm for arm in section.get("arms", []) if arm["step_seconds"]])
    }
    if not panels:
        return None
    heights = [len(arms) for arms in panels.values()]
    figure = Figure(figsize=(7.2, 0.34 * sum(heights) + 0.9 * len(panels)), facecolor=theme.paper, layout="constrained")
    axes_of = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, arms) in zip(axes_of, panels.items(), strict=True):
        axes.set_facecolor(theme.paper)
        axes.tick_params(colors=theme.ink, labelsize=8)
        axes.grid(color=theme.faint, linewidth=0.6, axis="x")
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
        labels = [name(arm) for arm in arms]
        middle = [arm["step_seconds"]["median"] * 1e3 for arm in arms]
        spread = [
            [(arm["step_seconds"]["median"] - arm["step_seconds"]["low"]) * 1e3 for arm in arms],
            [(arm["step_seconds"]["high"] - arm["step_seconds"]["median"]) * 1e3 for arm in arms],
        ]
        colours = [LINES[0] if arm["policy"] else LINES[6] for arm in arms]
        axes.barh(labels, middle, xerr=spread, color=colours, height=0.7, ecolor=theme.ink)
        for place, arm in enumerate(arms):
            if arm.get("limit_seconds"):
                axes.plot([arm["limit_seconds"] * 1e3] * 2, [place - 0.35, place + 0.35], color=LINES[1], linewidth=2)
        axes.invert_yaxis()
        axes.set_title(title, color=theme.ink, loc="left", fontsize=10)
    axes_of[-1].set_xlabel("ms a step; the mark is the limit of this machine", color=theme.ink)
    return figure
