"""From comparison records to a table: one row for each policy, means and spread over pictures, the best marked.

Knows the record schema, nothing of how it is shown.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvcli.report import units

JSON = dict[str, Any]
LIKE = 1.25
"""Policies are rivals when they hold like bytes: at most so many times those of the leanest."""


@dataclass(frozen=True)
class Measure:
    """One column. read: its value in a record, None where there is none. better: which end is the better one."""

    name: str
    heading: str
    better: Literal["low", "high", None]
    read: Callable[[JSON], float | None]
    show: Callable[[float], str]


def _speed(entry: JSON) -> float | None:
    return units.speed(entry["tokens"]["generated"], entry["seconds"]["decode"])


def _until_divergence(entry: JSON) -> float | None:
    """Tokens before the first that differs; all of them when none does."""
    first = entry["fidelity"]["first_divergence"]
    return float(entry["tokens"]["generated"] if first is None else first)


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: units.plain(float(value), digits)


MEASURES = (
    Measure("perplexity", "PPL", "low", lambda e: e["fidelity"]["perplexity"], _fixed(2)),
    Measure("rouge_l", "ROUGE-L", "high", lambda e: e["fidelity"]["rouge_l"], _fixed(2)),
    Measure("tokens_until_divergence", "same tokens", "high", _until_divergence, _fixed(0)),
    Measure("agreement", "top-1", "high", lambda e: e["fidelity"]["agreement"], units.share),
    Measure("kl", "KL", "low", lambda e: e["fidelity"]["kl"], _fixed(3)),
    Measure("bytes_held", "cache", "low", lambda e: e["cache_bytes"]["held"], units.size),
    Measure("bytes_peak", "peak", "low", lambda e: e["cache_bytes"]["peak"], units.size),
    Measure("prefill_seconds", "prefill s", "low", lambda e: e["seconds"]["prefill"], _fixed(2)),
    Measure("decode_seconds", "decode s", None, lambda e: e["seconds"]["decode"], _fixed(2)),
    Measure("tokens_per_second", "tokens/s", "high", _speed, _fixed(1)),
)


@dataclass(frozen=True)
class Row:
    """One policy with one budget over all pictures. means, spreads (standard deviation; 0 for one picture): by measure;
    perplexity is over all tokens of all pictures. best: measures in which it leads among policies of its budget.
    slower: its tokens/s are below the full cache's. heavier: it held more than `LIKE` times the bytes of the leanest
    policy of its budget, so that it can't lead."""

    policy: JSON
    label: str
    sees_question: bool
    pictures: int
    means: Mapping[str, float]
    spreads: Mapping[str, float]
    best: frozenset[str] = frozenset()
    slower: bool = False
    heavier: bool = False

    @property
    def is_full(self) -> bool:
        return bool(self.policy["name"] == "full")


def label(policy: Mapping[str, Any]) -> str:
    """`elastic 0.2`; `full`."""
    return "full" if policy["name"] == "full" else f"{policy['name']} {units.budget(policy['budget'])}"


def rows(entries: Iterable[JSON]) -> list[Row]:
    """The table, in the order in which policies first come; failures are left out."""
    groups: dict[str, list[JSON]] = {}
    for entry in entries:
        if not entry["error"]:
            groups.setdefault(repr(sorted(entry["policy"].items())), []).append(entry)
    return _marked([_row(group) for group in groups.values()])


def _row(group: Sequence[JSON]) -> Row:
    means, spreads = {}, {}
    for measure in MEASURES:
        values = [float(v) for v in (measure.read(entry) for entry in group) if v is not None]
        if values:
            means[measure.name] = statistics.fmean(values)
            spreads[measure.name] = statistics.stdev(values) if len(values) > 1 else 0.0
    scores = [entry["fidelity"] for entry in group]
    means["perplexity"] = math.exp(sum(s["nll"] * s["tokens"] for s in scores) / sum(s["tokens"] for s in scores))
    policy = group[0]["policy"]
    return Row(policy, label(policy), group[0]["sees_question"], len(group), means, spreads)


def _marked(found: Sequence[Row]) -> list[Row]:
    """Rows with the best of each budget marked, where there is a choice, and the slow ones."""
    full = next((row for row in found if row.is_full), None)
    result = []
    for row in found:
        rivals = [r for r in found if not r.is_full and r.policy["budget"] == row.policy["budget"]]
        most = LIKE * min((r.means["bytes_held"] for r in rivals), default=math.inf)
        heavier = not row.is_full and row.means["bytes_held"] > most
        rivals = [] if heavier else [r for r in rivals if r.means["bytes_held"] <= most]
        best = frozenset(m.name for m in MEASURES if len(rivals) > 1 and not row.is_full and _leads(row, rivals, m))
        speeds = [r.means.get("tokens_per_second") for r in (row, full or row)]
        slower = None not in speeds and speeds[0] < speeds[1]  # type: ignore[operator]
        result.append(dataclasses.replace(row, best=best, slower=slower, heavier=heavier))
    return result


def _leads(row: Row, rivals: Sequence[Row], measure: Measure) -> bool:
    values = [r.means[measure.name] for r in rivals if measure.name in r.means]
    own = row.means.get(measure.name)
    if own is None or measure.better is None or min(values) == max(values):
        return False
    return own == (min(values) if measure.better == "low" else max(values))


def cell(row: Row, measure: Measure) -> tuple[str, str]:
    """A mean as it is shown, and its spread; empty where there is one picture."""
    if measure.name not in row.means:
        return "-", ""
    spread = f"±{measure.show(row.spreads[measure.name])}" if row.pictures > 1 else ""
    return measure.show(row.means[measure.name]), spread


def as_json(found: Sequence[Row]) -> list[JSON]:
    """The table as JSON."""
    return [
        {
            "policy": row.policy,
            "label": row.label,
            "sees_question": row.sees_question,
            "pictures": row.pictures,
            "mean": dict(row.means),
            "spread": dict(row.spreads),
            "best": sorted(row.best),
            "slower_than_full": row.slower,
        }
        for row in found
    ]


def as_csv(found: Sequence[Row]) -> str:
    """The table as CSV: a column for each mean and spread."""
    out = io.StringIO()
    names = [name for m in MEASURES for name in (m.name, f"{m.name}_spread")]
    writer = csv.DictWriter(out, ["policy", "budget", "sees_question", "pictures", *names], lineterminator="\n")
    writer.writeheader()
    for row in found:
        values = {m.name: row.means.get(m.name, "") for m in MEASURES}
        spreads = {f"{m.name}_spread": row.spreads.get(m.name, "") for m in MEASURES}
        facts = {"policy": row.policy["name"], "budget": row.policy["budget"], "sees_question": row.sees_question}
        writer.writerow({**facts, "pictures": row.pictures, **values, **spreads})
    return out.getvalue()
