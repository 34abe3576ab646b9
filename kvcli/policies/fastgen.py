"""FastGen (Ge et al., ICLR 2024, arXiv 2310.01801).

After the prompt each head is profiled: of a row of cache policies, each larger than the one before, it gets the first
that would have recovered the share `recovery` of its attention; it keeps to that policy while generating. Some heads
need the first tokens only, some need all.

The row of policies: special tokens; + frequency (the entries of most accumulated attention); + local (the most recent
ones); everything.

Defaults of the paper: recovery 0.95, frequency and local 0.3 of the prompt each, no budget.

Departures, with reasons:
- A policy is not told which tokens are special or punctuation: the first `special` entries stand for them, which is
  where attention without content goes, and the paper's step for punctuation is left out.
- A profile of the last `window` queries of the prompt stands for one of all, which would need the whole matrix.
- With grouped queries a KV head is profiled by the mean over its query heads.
- With a budget, frequency and local share what it leaves beside the special entries, and no head keeps everything: the
  last set is the largest. So it can be compared at equal bytes.
- Heads of a layer share one buffer here, which is as long as its longest head: where one head keeps everything, the
  others free no memory. Their entries are masked all the same, so that quality is what the paper's kernels would give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import Policy, first, keep_where, option, recent, top
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Rows, Statistic
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class FastGen(Policy):
    """Each head gets the smallest kind of cache that recovers its attention."""

    name: ClassVar[str] = "fastgen"
    source: ClassVar[str] = "Ge et al., Model Tells You What to Discard: Adaptive KV Cache Compression, ICLR 2024"
    sees_question: ClassVar[bool] = True
    smallest: ClassVar[int] = 4

    budget: float | int | None = option(None, "none: as the paper; else what the largest head may KEEP")
    recovery: float = option(0.95, "share of its attention that a head's cache must recover", low=0.0, high=1.0)
    special: int = option(4, "first entries, which stand for special tokens", low=1)
    frequency: float = option(0.3, "entries of most attention, a share of the prompt", low=0.0, high=1.0)
    local: float = option(0.3, "most recent entries, a share of the prompt", low=0.0, high=1.0)
    window: int = option(32, "queries at the end of the prompt that are profiled", low=1)
    decode: Literal["bounded", "grow"] = option("bounded", "while generating: heads keep to their size, or all grow")

    def statistics(self) -> tuple[Statistic, ...]:
        score = Columns("score", queries="all", heads="group-mean", decode=self.acts_in_decode)
        return (score, Rows("profile", queries="last", window=self.window))

    @property
    def acts_in_decode(self) -> bool:
        return self.decode == "bounded" and self.budget != 1.0

    def compress(self, view: LayerView) -> Keep:
        score = view.statistics["score"]
        sets = self._sets(view, score)
        rows = view.statistics["profile"]
        profile = rows.reshape(len(rows), score.shape[1], -1, *rows.shape[2:]).mean(2)
        total = profile.sum((2, 3)).clamp(min=1e-30)
        recovered = torch.stack([(profile * s[:, :, None]).sum((2, 3)) / total for s, _ in sets], -1)
        enough = recovered >= self.recovery
        enough[..., -1] = True
        kind = enough.to(torch.uint8).argmax(-1)  # the first that is enough: [B, Hkv]
        kept = torch.zeros_like(sets[0][0])
        window = torch.zeros_like(kind)
        for number, (chosen, latest) in enumerate(sets):
            mine = kind == number
            kept |= chosen & mine[..., None]
            window += mine * torch.tensor(latest, device=kind.device)[:, None]
        counts = kept.sum(-1)
        if self.acts_in_decode:
            everything = (kind == len(sets) - 1) & (self.budget is None)
            view.state["size"] = counts.masked_fill(everything, torch.iinfo(counts.dtype).max)
            view.state["window"] = torch.minimum(window, counts - sets[0][0].sum(-1))  # a head has to let one go
        return keep_where(kept, view.positions.expand_as(kept), counts.amax(-1).tolist())

    def _sets(self, view: LayerView, score: torch.Tensor) -> list[tuple[torch.Tensor, list[int]]]:
        """The row of policies: entries that each keeps, bool [B, Hkv, S], and how many recent ones that protects while
        generating (the newest at least, unless special tokens are all)."""
        if self.budget is None:
            counts = [(math.ceil(self.frequency * n), math.ceil(self.local * n)) for n in view.held]
        else:
            rest = [max(0, n - self.special) for n in self.targets(view)]
            counts = [(n - n // 2, n // 2) for n in rest]
        special = first(view, [min(self.special, n) for n in self.targets(view)]).expand_as(score)
        local = recent(view, [n for _, n in counts]) & ~special
        frequent = top(score, [n for n, _ in counts], view.occupied & ~special)
        beside = top(score, [n for n, _ in counts], view.occupied & ~special & ~local)
        sets = [
            (special, [0] * len(counts)),
            (special | frequent, [1] * len(counts)),
            (special | beside | local, [max(1, n) for _, n in counts]),
        ]
        if self.budget is None:
            sets.append((view.occupied.expand_as(score), [1] * len(counts)))
        return sets

    def evict(self, view: LayerView) -> Evict | None:
        score = view.statistics["score"]
        occupied = view.occupied.expand_as(score)
        over = occupied.sum(-1) > view.state["size"]
        age = view.positions.argsort(dim=-1, descending=True).argsort(dim=-1)  # 0 for the newest
        guarded = (age < view.state["window"][..., None]) | first(view, self.special)
        lightest, slots = score.masked_fill(~occupied | guarded, math.inf).min(-1)
        slots = slots.masked_fill(~over | lightest.isinf(), -1)
        return Evict(slots=slots[..., None], leaving=None)  # only the device knows which heads keep everything
