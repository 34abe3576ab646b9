"""Elastic Cache (Liu et al., ECCV 2024, arXiv 2407.18121).

After the prompt (section 3.2): the importance of a token in a layer is its attention column sum, mean over heads; the
most important tokens are anchors; every other token joins the bucket of its nearest anchor by position (Eq. 2) and the
bucket's keys and values are averaged into the anchor, head by head, keys as they are cached (rotated). While
generating (section 3.3): when kept / seen exceeds the budget after a token was appended, the entry at a fixed
truncation index leaves; no scores are used.

Defaults: budget 0.2 kept, distance 25 (section 4.1), first and last prompt token always kept.

Departures, with reasons:
- The printed last bucket overlaps its neighbour by one token and ends past the prompt; we read Eq. 2 as "nearest
  anchor, ties to the lower position".
- The released code compares indices with ranks, so that its selection is close to random; we select by rank.
- The first and the last token of the prompt are kept and take nothing in, as the released code does.
- Queries stay at their true positions; the released evaluation numbers them by the compressed length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import Policy, evict_one, first, keep_where, oldest, option, recent, top
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Prompt, Statistic
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class Elastic(Policy):
    """Elastic Cache: merge unimportant entries into important anchors, then drop at a fixed point."""

    name: ClassVar[str] = "elastic"
    source: ClassVar[str] = "Liu et al., Efficient Inference of Vision Instruction-Following Models, ECCV 2024"
    sees_question: ClassVar[bool] = True
    smallest: ClassVar[int] = 3

    distance: int = option(25, "truncation point: this many entries before the end of what the prompt kept", low=1)
    decode: Literal["ratio", "grow"] = option(
        "ratio", "while generating: keep kept/seen at the budget, or touch nothing"
    )

    def statistics(self) -> tuple[Statistic, ...]:
        return (Columns("importance", queries="all", heads="mean"),)

    @property
    def acts_in_decode(self) -> bool:
        return self.decode == "ratio"

    def growth(self, prompt: Prompt) -> int:
        if self.decode == "grow" or not isinstance(self.budget, float):
            return prompt.max_new_tokens
        return math.ceil(self.budget * prompt.max_new_tokens) + 2

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        ends = first(view, 1) | recent(view, 1)
        counts = [max(0, target - 2) for target in targets]
        anchors = top(view.statistics["importance"], counts, view.occupied & ~ends)
        kept = keep_where(anchors | ends, view.positions, targets)
        self._set_truncation_point(view, kept)
        return merge_into_nearest(view, kept, keep_where(anchors, view.positions, counts).index)

    def evict(self, view: LayerView) -> Evict | None:
        over = [held > share * seen for held, share, seen in zip(view.held, self.shares(view), view.seen, strict=True)]
        return evict_one(oldest(view, view.positions >= view.state["truncation"]), over)

    def shares(self, view: LayerView) -> list[float]:
        """The ratio kept / seen that each row is held to: the budget, or what a count was of the prompt."""
        if isinstance(self.budget, float):
            return [self.budget] * len(view.held)
        return [self.target(n) / n for n in view.prompt.lengths]

    def _set_truncation_point(self, view: LayerView, kept: Keep) -> None:
        """Remember the position of the entry at rank N - distance (never the first entry; in a prompt of one token
        that is the next token).

        Everything from that position on is a queue from which the oldest leaves, which deletes what index
        N - distance holds at each step without counting entries.
        """
        ranks = [max(1, n - self.distance) for n in kept.held]
        rank = torch.tensor([min(r, n - 1) for r, n in zip(ranks, kept.held, strict=True)], device=kept.index.device)
        slot = kept.index.gather(-1, rank[:, None, None].expand(-1, kept.index.shape[1], 1))
        beyond = torch.tensor([r >= n for r, n in zip(ranks, kept.held, strict=True)], device=kept.index.device)
        located = view.positions.gather(-1, slot)
        view.state["truncation"] = located.masked_fill(beyond[:, None, None], view.prompt.columns)


def merge_into_nearest(view: LayerView, kept: Keep, anchors: torch.Tensor) -> Keep:
    """Average every entry that leaves into its nearest anchor by position, ties to the lower (Eq. 2 and 3).

    anchors: int64 [B, P, A], slots of the anchors in ascending position, -1 for none. Means are weighted by
    `view.counts`, so that an entry that was merged before weighs as many tokens as it stands for; right after a
    first prompt that is the plain mean.
    """
    positions, slots = view.positions, torch.arange(view.positions.shape[-1], device=view.positions.device)
    far = torch.iinfo(positions.dtype).max // 4
    at = positions.gather(-1, anchors.clamp(min=0)).masked_fill(anchors < 0, far)
    boundaries = (at[..., :-1] + at[..., 1:]) // 2  # the floored midpoints of Eq. 2; each belongs to the lower bucket
    bucket = torch.searchsorted(boundaries.contiguous(), positions.contiguous())
    is_kept = (slots[:, None] == kept.index[..., None, :]).any(-1)
    target = torch.where(is_kept, slots, anchors.gather(-1, bucket)).clamp(min=0)

    weight = view.counts * view.occupied
    counts = torch.zeros_like(weight).scatter_add(-1, target, weight)
    index = kept.index.clamp(min=0)
    keys = _means(view.keys, target, weight, counts, index)
    values = _means(view.values, target, weight, counts, index)
    return Keep(kept.index, kept.held, keys=keys, values=values, counts=counts.gather(-1, index))


def _means(
    entries: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    counts: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """[B, Hkv, S, D] -> [B, Hkv, K, D]: the weighted mean of all entries that share the target `index`."""

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t[..., None].expand(-1, entries.shape[1], -1, entries.shape[-1])

    exact = entries.to(torch.promote_types(entries.dtype, torch.float32))
    exact = torch.zeros_like(exact).scatter_add(2, spread(target), exact * weight[..., None])
    return (exact.gather(2, spread(index)) / spread(counts.gather(-1, index).clamp(min=1))).to(entries.dtype)
