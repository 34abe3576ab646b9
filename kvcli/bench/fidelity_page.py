"""The page of the fidelity bench: tables, and each claim with its verdict. Knows records and arms, runs nothing."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.bench.arms import BUDGETS, CLAIMS, ELASTIC, HAE, POLICIES, Arm, Claim, all_arms, arm

Record = Mapping[str, Any]
SURE = 2.0
"""Standard errors that a mean difference must exceed to count as a difference."""


@dataclass(frozen=True)
class Setting:
    """How the records came about."""

    command: str
    facts: str
    prompt: str
    tokens: int


def write(records: Sequence[Record], setting: Setting) -> str:
    """The whole page, as Markdown."""
    by_arm: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        by_arm[record["arm"]][record["photo"]] = record
    photos = len({record["photo"] for record in records})
    total = sum(int(r["tokens"]) for r in next(iter(by_arm.values())).values()) if by_arm else 0
    parts = [
        "# How true each policy is to the full cache",
        f"`{setting.command}` on {setting.facts}; {photos} photos, {total} tokens of answers of at most "
        f'{setting.tokens} tokens each, prompt "{setting.prompt}". No labels: the yardstick is what the full cache '
        "of the same model wrote. PPL: perplexity of that answer, fed token by token while the policy evicts (the "
        "full cache's own is in the first line). Top-1: steps at which both rank the same token first. KL: nats a "
        "token. ROUGE-L and first divergence: the policy's own greedy answer against the full cache's; the median "
        "photo's. Kept: entries at the end of the answer over tokens seen. Bytes: KV bytes over those of the full "
        "cache.",
        "This is one small model and one kind of answer. What holds here need not hold elsewhere, and the other "
        "way round. A PPL below the full cache's is not better, only surer of the same text: KL and top-1 tell how far "
        "a policy is from the full cache. Arms keep slightly different shares by nature: compare with the column at "
        "hand.",
        *_tables(by_arm),
        "## Claims",
        "Difference: mean over photos of (better - worse) in nats a token, with its standard error; below zero means "
        f"that the claim's better side lost less. A claim holds or fails where that is more than {SURE:g} standard "
        "errors from zero.",
        _claims(by_arm),
        *_notes(by_arm),
        *_missing(by_arm),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _missing(by_arm: Mapping[str, Mapping[str, Record]]) -> list[str]:
    """What the bench would measure and these records do not have."""
    missing = [f"- {a.key}" for a in all_arms() if a.key not in by_arm]
    return ["## Not measured in this run", "\n".join(missing)] if missing else []


def _tables(by_arm: Mapping[str, Mapping[str, Record]]) -> list[str]:
    parts = []
    for budget in BUDGETS:
        arms = [arm(name, options, budget) for name, options in POLICIES]
        parts += [f"## Keeping {budget:.0%}", _table(by_arm, arms, with_full=True)]
    for budget in (0.5, 0.2):
        arms = [arm("elastic", options, budget) for options in ({}, *ELASTIC)]
        parts += [f"## Elastic Cache's options, keeping {budget:.0%}", _table(by_arm, arms)]
    arms = [arm("hae", options, 0.2) for options in (POLICIES[7][1], *HAE)]
    arms += [a for a in all_arms() if a.budget is None]
    parts += ["## HAE's options, and policies with thresholds of their own", _table(by_arm, arms)]
    return parts


def _table(by_arm: Mapping[str, Mapping[str, Record]], arms: Sequence[Arm], with_full: bool = False) -> str:
    rows = []
    found = [(a, list(by_arm[a.key].values())) for a in arms if a.key in by_arm]
    if not found:
        return "Not measured."
    if with_full:
        full = _perplexity(found[0][1], "nll_full")
        rows.append(f"| full | | {full:.3f} | 100 % | 0 | 1.000 | none | 100 % | 100 % |")
    for each, records in found:
        free = [r for r in records if "rouge_l" in r]
        rouge = f"{statistics.mean(r['rouge_l'] for r in free):.3f}" if free else ""
        cells = [
            each.policy,
            each.options_text + (" (own thresholds)" if each.budget is None else ""),
            f"{_perplexity(records, 'nll'):.3f}",
            f"{_mean(records, 'agreement'):.1%}".replace("%", " %"),
            f"{_mean(records, 'kl'):.4f}",
            rouge,
            _median_divergence(free),
            f"{statistics.mean(r['kept'] / r['seen'] for r in records):.1%}".replace("%", " %"),
            f"{statistics.mean(r['bytes'] / r['bytes_full'] for r in records):.1%}".replace("%", " %"),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    head = "| policy | options | PPL | top-1 | KL | ROUGE-L | diverges at | kept | bytes |\n" + "|---" * 9 + "|"
    return "\n".join([head, *rows])


def _perplexity(records: Sequence[Record], name: str) -> float:
    return math.exp(_mean(records, name))


def _mean(records: Sequence[Record], name: str) -> float:
    """Mean over tokens."""
    return float(sum(r[name] * r["tokens"] for r in records) / sum(r["tokens"] for r in records))


def _median_divergence(records: Sequence[Record]) -> str:
    if not records:
        return ""
    ends = [math.inf if r["first_divergence"] is None else r["first_divergence"] for r in records]
    middle = statistics.median_low(ends)
    return "none" if math.isinf(middle) else f"{middle:.0f}"


def _claims(by_arm: Mapping[str, Mapping[str, Record]]) -> str:
    rows = ["| claim | source | kept | difference | verdict |\n" + "|---" * 5 + "|"]
    for claim in CLAIMS:
        for budget in claim.budgets:
            found = difference(by_arm, claim, budget)
            text = "" if found is None else f"{found[0]:+.4f} ± {found[1]:.4f}"
            rows.append(f"| {claim.text} | {claim.source} | {budget:.0%} | {text} | {verdict(claim, found)} |")
    return "\n".join(rows)


def difference(by_arm: Mapping[str, Mapping[str, Record]], claim: Claim, budget: float) -> tuple[float, float] | None:
    """(mean, standard error) over photos of the better side's loss less the worse side's; None if not measured."""
    better, worse = (by_arm.get(a.key, {}) for a in claim.arms(budget))
    both = sorted(set(better) & set(worse))
    if len(both) < 2:
        return None
    each = [better[photo]["nll"] - worse[photo]["nll"] for photo in both]
    return statistics.mean(each), statistics.stdev(each) / math.sqrt(len(each))


def verdict(claim: Claim, found: tuple[float, float] | None) -> str:
    """What the difference says of a claim: that one side loses less, or that it loses no more."""
    if found is None:
        return "not measured"
    mean, error = found
    if mean < -SURE * error:
        return "holds"
    if mean > SURE * error:
        return "fails: the other way round"
    return "holds: no difference" if "no more" in claim.text else "no difference seen"


def _notes(by_arm: Mapping[str, Mapping[str, Record]]) -> list[str]:
    lines = []
    for key, records in by_arm.items():
        agreements = [r["agreement_of_layers"] for r in records.values() if "agreement_of_layers" in r]
        if agreements:
            lines.append(
                f"- {key}: of what the first layer lets go, all would let go {statistics.mean(agreements):.1%} "
                "(mean of all layers and photos, the first included; HAE's paper reports 90.4 % at its r = 0.0015)"
            )
    return ["## HAE: agreement of the layers", "\n".join(lines)] if lines else []
