"""SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469).

Once, at the end of the prompt (section 4): the last `window` prompt tokens vote with their attention for all earlier
ones; the sum of the votes is smoothed over neighbours; the highest stay, together with the window itself. Entries that
are generated later all stay.

Defaults of the released code: window 32, average pooling of width 5.

Departures, with reasons:
- One choice per KV head, by the mean over its query heads; the released code repeats keys for every query head first
  and so gives up what grouped queries save.
- The paper's budgets are far larger than its window. Where they are not, the window takes no more than half of the
  budget, so that the vote still decides something; all `window` tokens vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import Policy, keep_where, option, recent, top
from kvcli.policies.contract import Columns, Keep, LayerView, Statistic
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class SnapKV(Policy):
    """What the last tokens of the prompt look at stays, with its neighbours."""

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, NeurIPS 2024"
    sees_question: ClassVar[bool] = True
    smallest: ClassVar[int] = 2

    window: int = option(32, "how many of the last prompt tokens vote", low=1)
    pooling: Literal["average", "max"] = option("average", "how votes are smoothed over neighbours")
    kernel: int = option(5, "neighbours that are smoothed over, an odd number; 1 for none", low=1)

    def statistics(self) -> tuple[Statistic, ...]:
        return (Columns("votes", queries="last", window=self.window, heads="group-mean"),)

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        votes = view.statistics["votes"]
        voters = recent(view, [min(self.window, n) for n in view.held])
        votes = self._smoothed(view, votes.masked_fill(~view.occupied | voters, 0.0))
        stay = [min(self.window, max(1, n // 2)) for n in targets]
        latest = recent(view, stay).expand_as(votes)
        elected = [n - s for n, s in zip(targets, stay, strict=True)]
        # entries in the window but not among the latest come last: nobody voted on them
        votes = votes.masked_fill(voters, -1.0)
        kept = latest | top(votes, elected, view.occupied & ~latest)
        keep = keep_where(kept, view.positions.expand_as(kept), targets)
        keep.side["votes"] = votes.new_zeros(keep.index.shape)  # the next prompt has voters of its own
        return keep

    def _smoothed(self, view: LayerView, votes: torch.Tensor) -> torch.Tensor:
        """[B, P, S], each averaged with (or the largest of) its neighbours by position; beyond the ends there is 0."""
        width = self.kernel + 1 - self.kernel % 2
        last = torch.iinfo(view.positions.dtype).max
        order = view.positions.masked_fill(~view.occupied, last).argsort(dim=-1, stable=True).expand_as(votes)
        ordered = votes.gather(-1, order)
        if self.pooling == "average":
            pooled = torch.nn.functional.avg_pool1d(ordered, width, stride=1, padding=width // 2)
        else:
            pooled = torch.nn.functional.max_pool1d(ordered, width, stride=1, padding=width // 2)
        return torch.zeros_like(votes).scatter(-1, order, pooled)
