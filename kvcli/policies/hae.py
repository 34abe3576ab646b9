"""HAE, Hierarchical Adaptive Eviction (arXiv 2602.02197v1; no code was released).

After the prompt, dual-attention pruning (section 2.2.1, Eq. 1 to 3), in the first layer only: a visual token leaves if
its attention from text, summed, is below the share `r` of what all visual tokens get, and its largest single weight is
below `alpha`. How many leave depends on the picture. The set found there serves all layers. Text stays.

While generating, dynamic decoding eviction (section 2.2.2, Def. 2, Eq. 4 and 5): entries of low accumulated attention
are marked in a recycle bin of `bin` places and stay attended; when the bin is full they leave together, so that the
cache holds from l to l + bin - 1 entries, l being what the prompt kept (or `limit`).

Defaults: r = 0.69 of the mean share (the paper's 0.0012 at 576 visual tokens: `r` is divided by their number, since a
share means nothing without it), alpha = 0.001, bin 64 (Table 5, LLaVA-1.5-7B), no budget.

Departures and readings, with reasons:
- Heads are averaged before both scores, and the text that counts is what follows the picture, since text before it
  can't see it (both unsaid; as in the code of MustDrop, whose filter is the same). `queries = "text"` counts all.
- With a budget the two scores, each over its threshold, are ranked by the larger one: the order in which tokens would
  leave if both thresholds rose together. So it can be compared at equal bytes after the prompt; while generating the
  bin comes on top. Where text alone exceeds the budget, text of low score leaves too.
- `marks`: the text marks one entry a step for good ("fixed"), Eq. 4 picks the lowest when the bin is full ("lowest").
  The second spares a marked entry that regained weight, the "restoring" that the paper's figure shows; it is the
  default.
- Nothing is protected in the paper; new entries, which had little time to gather attention, would leave first. So
  `sinks` first entries stay and the `recent` last ones (by default as many as the bin holds, at most half of l).
- `criterion = "variance"`: a token leaves if the variance of its weights is below `r` of the mean variance. The paper
  motivates with it, and summaries of it describe it; none of its formulas uses it.
- `broadcast = "hidden"`: what leaves in the first layer also leaves the hidden states of later layers, which the
  paper's times suggest and its text leaves open. `"none"`: each layer decides for itself, and notes how far it agrees
  with the first (`state["agreement"]`, section 4.4).

`state["lost"]` is what Corollary 2.1 bounds the loss by: the scores of all that left while generating, summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import Policy, first, keep_where, option, recent, top
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Prompt, Statistic
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class HAE(Policy):
    """Prune visual tokens by two attention scores of the first layer, then evict in batches while generating."""

    name: ClassVar[str] = "hae"
    source: ClassVar[str] = "Hierarchical Adaptive Eviction (HAE), arXiv 2602.02197, 2026"
    sees_question: ClassVar[bool] = True

    budget: float | int | None = option(None, "none: the thresholds decide; else what is KEPT, a share or a number")
    r: float = option(0.69, "a visual token's sum must reach this part of the mean visual token's", low=0.0)
    alpha: float = option(0.001, "or its largest weight must reach this", low=0.0, high=1.0)
    criterion: Literal["attention", "variance"] = option("attention", "the paper's two scores, or their variance")
    queries: Literal["after-vision", "text"] = option("after-vision", "whose attention counts: later text, or all")
    broadcast: Literal["cache", "hidden", "none"] = option(
        "cache", "the first layer's choice: for all caches, for hidden states too, or only for itself"
    )
    decode: Literal["bounded", "grow"] = option("bounded", "while generating: evict in batches, or touch nothing")
    bin: int = option(64, "entries that are marked before they leave together", low=1)
    marks: Literal["lowest", "fixed"] = option("lowest", "what leaves: the lowest at that time, or one marked per step")
    limit: int | None = option(None, "entries at which marking begins; none: what the prompt kept", low=2)
    sinks: int = option(4, "first entries that are never marked", low=0)
    recent: int | None = option(None, "last entries that are never marked; none: as the bin, at most half", low=0)

    # --- what is asked of the engine

    def statistics(self) -> tuple[Statistic, ...]:
        once, where = self.broadcast != "none", self.queries
        pruning: list[Statistic] = [
            Columns("sum", queries=where, heads="mean", heads_first=True, first_layer=once),
            Columns("max", reduce="max", queries=where, heads="mean", heads_first=True, first_layer=once),
        ]
        if self.criterion == "variance":
            pruning[1] = Columns("squares", reduce="squares", queries=where, heads_first=True, first_layer=once)
        if not self.acts_in_decode:
            return tuple(pruning)
        return (*pruning, Columns("score", queries="all", heads="mean", decode=True))

    @property
    def hides_tokens(self) -> bool:
        return self.broadcast == "hidden"

    @property
    def acts_in_decode(self) -> bool:
        return self.decode == "bounded" and self.budget != 1.0

    def growth(self, prompt: Prompt) -> int:
        if not self.acts_in_decode or self.limit is not None:
            return prompt.max_new_tokens
        room = max(self.bound(kept) - kept for kept in map(self.target, prompt.lengths))
        return min(prompt.max_new_tokens, room + self.bin)

    # --- after the prompt

    def compress(self, view: LayerView) -> Keep:
        scores = self._scores(view)
        if self.budget is None:
            kept = view.occupied & ~(scores < 1)
            held = tuple(kept.sum(-1).amax(-1).tolist())
        else:
            held = self.targets(view)
            kept = top(scores, held, view.occupied)
        if self.broadcast == "none":
            self._compare(view, view.occupied & ~kept)
        if self.acts_in_decode:
            zero = view.positions.new_zeros(len(held), dtype=torch.float64)
            view.state["lost"] = view.state.get("lost", zero)
            view.state["marked"] = torch.full((len(held), 1, self.bin), -1, device=zero.device)
        return keep_where(kept, view.positions, held)

    def _scores(self, view: LayerView) -> torch.Tensor:
        """[B, 1, S]: below 1 for a visual token that the thresholds let go; text is above all visual tokens."""
        if "scores" not in view.shared:
            # by column, since layers with a sliding window have other slots; what was not judged counts as text
            columns = torch.full((len(view.held), 1, view.prompt.columns + 1), self._TEXT, dtype=torch.float64)
            columns = columns.to(view.positions.device)
            index = view.positions.masked_fill(~view.occupied, view.prompt.columns)
            view.shared["scores"] = columns.scatter(-1, index, self._judged(view))
        first_layer = view.shared["scores"].to(view.positions.device).gather(-1, view.positions.clamp(min=0))
        return first_layer if self.broadcast != "none" else self._judged(view)

    def _compare(self, view: LayerView, gone: torch.Tensor) -> None:
        """Note which share of what the first layer lets go this layer lets go too; 1 where that is nothing."""
        if "gone" not in view.shared:
            columns = torch.zeros(len(view.held), 1, view.prompt.columns + 1, device=gone.device, dtype=torch.bool)
            view.shared["gone"] = columns.scatter(-1, view.positions.masked_fill(~gone, view.prompt.columns), True)
        there = view.shared["gone"].to(gone.device).gather(-1, view.positions.clamp(min=0)) & view.occupied
        both, number = (there & gone).sum(-1)[:, 0], there.sum(-1)[:, 0]
        view.state["agreement"] = torch.where(number > 0, both / number.clamp(min=1), 1.0)

    _TEXT: ClassVar[float] = 1e9

    def _judged(self, view: LayerView) -> torch.Tensor:
        """The scores of one layer: for visual tokens the larger of the two, each over its threshold."""
        visual = view.visual
        total = view.statistics["sum"].double()
        number = visual.sum(-1, keepdim=True).clamp(min=1)
        if self.criterion == "variance":
            rows = view.prompt.chosen(self.queries, 0).sum(-1)[:, None, None].clamp(min=1)
            spread = (view.statistics["squares"].double() / rows - (total / rows).square()).clamp(min=0)
            return self._over(spread, visual, number) + self._TEXT * ~visual
        single = view.statistics["max"].double() / max(self.alpha, 1e-30)
        judged = torch.maximum(self._over(total, visual, number), single)
        return judged.clamp(max=self._TEXT / 2) + self._TEXT * ~visual

    def _over(self, amount: torch.Tensor, visual: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """`amount` as a multiple of its threshold, `r` of the mean visual token's."""
        mean = (amount * visual).sum(-1, keepdim=True) / number
        return amount / (self.r * mean).clamp(min=1e-30)

    # --- while generating

    def evict(self, view: LayerView) -> Evict | None:
        start = [self.bound(n) if self.limit is None else max(n, self.limit) for n in view.kept]
        excess = [held - n for held, n in zip(view.held, start, strict=True)]
        # In a sliding window marked entries go by themselves, so there the lowest leave.
        fixed = self.marks == "fixed" and view.window is None
        if fixed:
            self._mark(view, excess, start)
        full = [n >= self.bin for n in excess]
        if not any(full):
            return None
        scores = view.statistics["score"]
        if fixed:
            slots = self._slots_of_marked(view)
            view.state["marked"] = view.state["marked"].masked_fill(_rows(full, slots), -1)
        else:
            least = scores.masked_fill(~self._candidates(view, start), math.inf)
            slots = least.topk(self.bin, -1, largest=False).indices
        slots = slots.masked_fill(~_rows(full, slots), -1)
        lost = scores.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, 0)
        view.state["lost"] = view.state["lost"] + lost.sum(-1)[:, 0]
        return Evict(slots=slots, leaving=[self.bin if f else 0 for f in full])

    def _candidates(self, view: LayerView, start: list[int]) -> torch.Tensor:
        """bool [B, 1, S]: what may be marked. With the guards there are always as many as the bin holds."""
        sinks = [min(self.sinks, n - 1) for n in start]
        wanted = [min(self.bin, n // 2) if self.recent is None else self.recent for n in start]
        latest = [max(1, min(w, n - s)) for w, n, s in zip(wanted, start, sinks, strict=True)]
        return view.occupied & ~first(view, sinks) & ~recent(view, latest)

    def _mark(self, view: LayerView, excess: list[int], start: list[int]) -> None:
        """Put the lowest entry that is not in the bin yet into its next place, where the cache has grown."""
        marked = view.state["marked"]
        scores = view.statistics["score"].masked_fill(~self._candidates(view, start), math.inf)
        taken = (view.positions[..., None] == marked[..., None, :]).any(-1)
        lowest = view.positions.gather(-1, scores.masked_fill(taken, math.inf).argmin(-1, keepdim=True))
        place = torch.tensor([n - 1 for n in excess], device=marked.device)[:, None, None]
        here = torch.arange(self.bin, device=marked.device) == place
        view.state["marked"] = torch.where(here, lowest, marked)

    def _slots_of_marked(self, view: LayerView) -> torch.Tensor:
        """int64 [B, 1, bin]: where the marked entries lie; -1 for an empty place or one that is gone."""
        marked = view.state["marked"]
        same = (view.positions[..., None, :] == marked[..., None]) & (marked[..., None] >= 0)
        return same.to(torch.uint8).argmax(-1).masked_fill(~same.any(-1), -1)


def _rows(flags: list[bool], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(flags, device=like.device)[:, None, None]
