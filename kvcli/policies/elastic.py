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
- The released code compares indices with ranks, so that its selection is close to random, and takes what it merges
  from one token to the left; we select by rank and merge what leaves. `select = "official"` does as the released code
  (it keeps one entry fewer, and lets decode exceed the budget by up to one); with `distance = 24` and
  `positions = "compressed"` that is the released evaluation. Not copied: its edge case of one entry to remove.
- The first and the last token of the prompt are kept and take nothing in, as the released code does
  (`ends = "ranked"`: they compete like all others).
- Queries stay at their true positions; the released evaluation numbers them by the compressed length, which puts them
  before keys that they should follow (`positions = "compressed"`).
- The paper names its ablations in a word each. Our readings: `score = "mean"` divides by the queries that could see
  the key in a causal prompt; `"moving-average"` discounts older queries by `momentum` each; `merge = "cluster"` is ten
  rounds of k-means over keys from the anchors; `scope = "shared"` averages scores over layers; `discard = "recent"`
  drops the entry before the newest, `"frequency"` the one of least accumulated attention.
- Means weigh an entry by the tokens it stands for, which differs from the paper only in later turns of a conversation.

What later work suggests, each off by default: `merge_keys = "no"` or `"rerotate"` (averaging keys of different rotation
shrinks them; on multi-axis rope a key is turned only where all axes move alike, text to text), `count_bias` (a merged
entry gets the logit of all its tokens, as ToMe's proportional attention), `weighting = "attention"`,
`within_modality`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.errors import UsageError
from kvcli.policies.anchors import as_released, by_rank, over_layers
from kvcli.policies.base import Decode, evict_one, first, keep_where, oldest, option, recent
from kvcli.policies.budgeted import DECODE_HELP, Budgeted
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Statistic
from kvcli.policies.lazy import torch
from kvcli.policies.merging import MergeKeys, clustered, merge, nearest, nearest_alike

CLUSTER_ROUNDS = 10


@dataclass(frozen=True)
class Elastic(Budgeted):
    """Elastic Cache: merge unimportant entries into important anchors, then drop at a fixed point."""

    name: ClassVar[str] = "elastic"
    source: ClassVar[str] = "Liu et al., Efficient Inference of Vision Instruction-Following Models, ECCV 2024"
    sees_question: ClassVar[bool] = True
    smallest: ClassVar[int] = 3

    select: Literal["topk", "official"] = option("topk", "anchors by rank, or as the released code picks them")
    ends: Literal["protected", "ranked"] = option("protected", "first and last prompt token: kept, or ranked like all")
    score: Literal["sum", "mean", "moving-average"] = option("sum", "importance from the attention column of a token")
    momentum: float = option(0.9, "weight of the past at each query of the moving average", low=0.0, high=1.0)
    scope: Literal["layer", "head", "shared"] = option("layer", "one choice per layer, per KV head, or for all layers")
    merge: Literal["mean", "none", "cluster"] = option("mean", "what leaves: joins by position, is dropped, by keys")
    merge_keys: MergeKeys = option("average", "keys of merged entries: mean as cached, untouched, or turned and mean")
    weighting: Literal["tokens", "attention"] = option("tokens", "weight of an entry in a mean: its tokens, its score")
    count_bias: bool = option(False, "add the log of the merge count to the logits of merged entries")
    within_modality: bool = option(False, "visual entries join visual anchors only, text joins text")
    discard: Literal["fixed", "recent", "frequency"] = option("fixed", "which entry leaves while generating")
    distance: int = option(25, "truncation point: this many entries before the end of what the prompt kept", low=1)
    anchor: Literal["fixed", "recent"] = option("fixed", "truncation point: stays, or moves so the last entries stay")
    decode: Decode = option("ratio", DECODE_HELP)
    positions: Literal["true", "compressed"] = option("true", "where new tokens stand: true, or by entries held")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select == "official" and self.ends == "ranked":
            raise UsageError("select = official always protects both ends: leave ends = protected")
        if self.merge == "cluster" and self.within_modality:
            raise UsageError("within_modality joins by position: use merge = mean with it")

    # --- what is asked of the engine

    def statistics(self) -> tuple[Statistic, ...]:
        return (
            Columns(
                "importance",
                queries="all",
                heads="group-mean" if self.scope == "head" else "mean",
                decode=self.discard == "frequency",
                decay=self.momentum if self.score == "moving-average" else 1.0,
            ),
        )

    @property
    def served_at_once(self) -> bool:
        return self.scope == "shared"

    @property
    def needs_rotation(self) -> bool:
        return self.renumbers or self.merge_keys == "rerotate"

    @property
    def renumbers(self) -> bool:
        return self.positions == "compressed"

    # --- after the prompt

    def compress(self, view: LayerView) -> Keep:
        return self._compress(view, self._scores(view))

    def compress_model(self, views: Sequence[LayerView]) -> list[Keep | None]:
        shared = over_layers(views, [self._scores(view) for view in views])
        return [self._compress(view, scores) for view, scores in zip(views, shared, strict=True)]

    def _scores(self, view: LayerView) -> torch.Tensor:
        """Importance of each entry: [B, P, S]."""
        scores = view.statistics["importance"]
        if self.score != "mean":
            return scores
        return scores / (view.prompt.columns - view.positions).clamp(min=1)

    def _compress(self, view: LayerView, scores: torch.Tensor) -> Keep:
        if self.select == "official":
            shares = zip(view.held, self.shares(view.prompt), view.seen, strict=True)
            choice = as_released(view, scores, [int(held - share * seen) for held, share, seen in shares])
        else:
            choice = by_rank(view, scores, self.targets(view), self.ends == "protected")
        kept = keep_where(choice.stays, view.positions.expand_as(choice.stays), choice.held)
        self._set_truncation_point(view, kept)
        if self.merge == "none":
            return kept
        if self.merge == "cluster":
            target = clustered(view, choice.anchors, choice.sources, CLUSTER_ROUNDS)
        elif self.within_modality:
            target = nearest_alike(view, choice.anchors)
        else:
            target = nearest(view.positions.expand_as(choice.anchors), choice.anchors)
        weight = view.counts if self.weighting == "tokens" else scores
        keep = merge(view, kept, target.masked_fill(~choice.sources, -1), weight, self.merge_keys)
        if self.count_bias:
            assert keep.counts is not None
            keep.bias = keep.counts.clamp(min=1).log()
        return keep

    # --- while generating

    def evict(self, view: LayerView) -> Evict | None:
        over = self.over(view)
        return evict_one(self._victim(view), over) if any(over) else None

    def over(self, view: LayerView) -> list[bool]:
        slack = 1 if self.select == "official" and self.decode == "ratio" else 0
        limits = zip(view.held, self.limits(view), strict=True)
        return [held - limit >= slack and held > limit for held, limit in limits]

    def _victim(self, view: LayerView) -> torch.Tensor:
        """The slot that leaves a row if one must: int64 [B, P]."""
        if self.discard == "fixed" and self.anchor == "fixed":
            return oldest(view, view.positions >= view.state["truncation"])
        inner = view.occupied & ~first(view, 1)
        if self.discard == "frequency":
            scores = self._scores(view)
            return scores.masked_fill(~(inner & ~recent(view, 1)), math.inf).argmin(-1)
        last = 2 if self.discard == "recent" else self.distance + 1
        return oldest(view, recent(view, last) & inner)

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
        located = view.positions.expand(-1, slot.shape[1], -1).gather(-1, slot)
        view.state["truncation"] = located.masked_fill(beyond[:, None, None], view.prompt.columns)
