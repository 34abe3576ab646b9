"""Comparisons on a terminal (rich): answers with their differences, the table of policies, the search for a budget.

`plain`: characters of ASCII alone. Without colour, marks tell the same: +words+ that only the policy wrote, -words-
that only the full cache wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvcli.report import units
from kvcli.report.differences import spans
from kvcli.report.summary import MEASURES, Measure, Row, cell, label

STYLES = {"same": "", "added": "bold yellow", "missing": "dim red strike"}
MARKS = {"same": "", "added": "+", "missing": "-"}
TRUTH = ("perplexity", "rouge_l", "tokens_until_divergence", "agreement", "kl")


def answers(entries: Sequence[Mapping[str, Any]], coloured: bool) -> Text:
    """All answers to one picture, that of the full cache first and whole, the others with differences marked."""
    full = next((e["text"] for e in entries if e["policy"]["name"] == "full"), None)
    result = Text(f"{entries[0]['id']}\n", style="bold")
    for entry in sorted(entries, key=lambda e: e["policy"]["name"] != "full"):
        result.append(f"\n{label(entry['policy'])}\n", style="bold cyan")
        if full is None or entry["policy"]["name"] == "full":
            result.append(f"{entry['text']}\n")
        elif entry["text"] == full:
            result.append("the same\n", style="dim")
        else:
            result.append_text(marked(full, entry["text"], coloured)).append("\n")
    return result


def marked(reference: str, candidate: str, coloured: bool) -> Text:
    """A text with what it has and lacks against another."""
    result = Text()
    for span in spans(reference, candidate):
        words, space = span.text.rstrip(), span.text[len(span.text.rstrip()) :] or " "
        mark = "" if coloured else MARKS[span.kind]
        result.append(f"{mark}{words}{mark}", style=STYLES[span.kind]).append(space)
    return result


def tables(rows: Sequence[Row], plain: bool) -> list[Table]:
    """How true each policy is to the full cache, and what it takes: one row for each; the best of a budget in bold with
    a star."""
    true, cost = _table(plain), _table(plain)
    for table, wanted in ((true, True), (cost, False)):
        measures = [measure for measure in MEASURES if (measure.name in TRUTH) == wanted]
        table.add_column("policy", overflow="fold", min_width=max(len(row.label) for row in rows))
        for measure in measures:
            table.add_column(measure.heading, justify="right", overflow="fold")
        if wanted:
            table.add_column("sees question", overflow="fold")
        for row in rows:
            question = [Text("yes" if row.sees_question else "no")] * wanted
            table.add_row(Text(row.label), *(_cell(row, measure, plain) for measure in measures), *question)
    return [true, cost]


def _cell(row: Row, measure: Measure, plain: bool) -> Text:
    best = measure.name in row.best
    text = " ".join(filter(None, cell(row, measure))) + "*" * best
    return Text(text.replace("±", "+-") if plain else text, style="bold green" if best else "")


def remarks(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know."""
    found = []
    if any(row.pictures > 1 for row in rows):
        found.append(f"means over {max(row.pictures for row in rows)} pictures, ± standard deviation")
    slower = [row.label for row in rows if row.slower]
    if slower:
        found.append(f"slower than the full cache here: {', '.join(slower)}")
    heavier = [row.label for row in rows if row.heavier]
    if heavier:
        found.append(f"held more than others of the same budget, so never marked as the best: {', '.join(heavier)}")
    return found


def searches(found: Mapping[str, tuple[float, Mapping[float, float]]], tolerance: float, plain: bool) -> Table:
    """The smallest budget of each policy, the loss there, and the losses on the way."""
    result = _table(plain)
    result.add_column("policy")
    result.add_column(f"smallest budget, loss <= {tolerance:g}", justify="right")
    result.add_column("loss there", justify="right")
    result.add_column("budget: loss")
    for name, (share, losses) in found.items():
        tried = ", ".join(f"{b:.3g}: {units.plain(loss, 3)}" for b, loss in sorted(losses.items()))
        result.add_row(name, f"{share:.3g}", units.plain(losses[share], 3), tried)
    return result


def _table(plain: bool) -> Table:
    return Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
