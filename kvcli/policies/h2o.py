"""H2O, the heavy-hitter oracle (Zhang et al., NeurIPS 2023, arXiv 2306.14048).

A token's score is the attention it got from all queries so far, the prompt's and each generated one's, per head. The
cache holds the most recent entries and, of all others, those of the highest score (section 4, Algorithm 1). While
generating its size is constant: each new token drives out the lowest score that is not recent; an entry that leaves
takes its score with it.

Defaults: budget 0.2, half of it recent (the released scripts' equal halves), `decode = "bounded"`.

Departures, with reasons:
- With grouped queries a KV head has several query heads: their scores are averaged, since one cache serves them all
  (`group = "sum"` differs in nothing but the scale; `"max"` lets one head's need decide).
- The released code drops whole batches by the first row's mask; here each row has its own.
- Keys and queries keep their true positions, as in its non-streaming variant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import evict_one, keep_where, oldest, option, recent, top
from kvcli.policies.budgeted import Budgeted
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Statistic
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class H2O(Budgeted):
    """Heavy hitters and recent entries, per KV head, in a cache of constant size."""

    name: ClassVar[str] = "h2o"
    source: ClassVar[str] = "Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, NeurIPS 2023"
    sees_question: ClassVar[bool] = True
    smallest: ClassVar[int] = 2

    recent: float = option(0.5, "share of the kept entries that are the most recent ones", low=0.0, high=1.0)
    group: Literal["mean", "sum", "max"] = option("mean", "how query heads that share a KV head agree on a score")

    def statistics(self) -> tuple[Statistic, ...]:
        heads: dict[str, Literal["group-mean", "group-sum", "group-max"]] = {
            "mean": "group-mean",
            "sum": "group-sum",
            "max": "group-max",
        }
        return (Columns("score", queries="all", heads=heads[self.group], decode=True),)

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        score = view.statistics["score"]
        latest = recent(view, self._recent_counts(targets)).expand_as(score)
        heavy = [n - r for n, r in zip(targets, self._recent_counts(targets), strict=True)]
        kept = latest | top(score, heavy, view.occupied & ~latest)
        return keep_where(kept, view.positions.expand_as(kept), targets)

    def evict(self, view: LayerView) -> Evict | None:
        score = view.statistics["score"]
        latest = recent(view, self._recent_counts([math.floor(limit) for limit in self.limits(view)]))
        others = (view.occupied & ~latest).expand_as(score)
        lightest = score.masked_fill(~others, math.inf).argmin(-1)
        # where all are recent (a share of 1), the window itself moves on
        slots = torch.where(others.any(-1), lightest, oldest(view, view.occupied).expand_as(lightest))
        return evict_one(slots, self.over(view))

    def _recent_counts(self, held: tuple[int, ...] | list[int]) -> list[int]:
        """Of this many entries how many are the recent ones: the newest always."""
        return [min(n, max(1, math.floor(self.recent * n + 0.5))) for n in held]
