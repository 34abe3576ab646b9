"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118).

Important tokens stay important: over a window of recent queries a token's counter goes up each time its attention is
below that of a uniform query, 1 / t (t: the keys that the query sees). When the cache is full, the tokens that were
unimportant most often leave, several at once; recent ones always stay. Per head.

Defaults: `decode = "bounded"` with `drop` = 16 entries at once, a history of 64 queries, 10 recent entries.

Departures, with reasons:
- The original code was never seen by us; constants are ours, chosen for prompts of hundreds of tokens. The paper's text
  fixes the counter, the threshold, the recent tokens and the batched drop.
- The history ends with the newest query: it begins with the last `history` ones of the prompt and then grows by each
  generated token, while the paper lets old ones leave. Over an answer the two differ little, and a counter needs no
  memory of every query.
- With grouped queries the mean over the heads of a group is compared with 1 / t.
- Equal counters are frequent: of two, the older entry leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import Policy, keep_where, option, recent, top
from kvcli.policies.contract import Evict, Keep, LayerView, Prompt, Rows, Statistic
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Entries that were often below average attention leave in batches, per KV head."""

    name: ClassVar[str] = "scissorhands"
    source: ClassVar[str] = (
        "Liu et al., Scissorhands: Exploiting the Persistence of Importance Hypothesis, NeurIPS 2023"
    )
    sees_question: ClassVar[bool] = True
    smallest: ClassVar[int] = 2

    history: int = option(64, "queries of the prompt that count, from its end", low=1)
    recent: int = option(10, "most recent entries that always stay, at most half of those kept", low=1)
    drop: int = option(16, "entries that leave together while generating", low=1)
    decode: Literal["bounded", "grow"] = option("bounded", "while generating: drop in batches, or touch nothing")

    def statistics(self) -> tuple[Statistic, ...]:
        return (Rows("rows", queries="last", window=self.history),)

    @property
    def needs_weights(self) -> bool:
        return self.acts_in_decode

    @property
    def acts_in_decode(self) -> bool:
        return self.decode == "bounded" and self.budget != 1.0

    def growth(self, prompt: Prompt) -> int:
        if not self.acts_in_decode:
            return prompt.max_new_tokens
        room = max(self.bound(kept) - kept for kept in map(self.target, prompt.lengths))
        return min(prompt.max_new_tokens, room + self.drop)

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        rows = self._by_group(view.statistics["rows"], view.keys.shape[1])
        queries = view.prompt.columns - self.history + torch.arange(self.history, device=rows.device)
        sees = (view.positions[:, :, None] <= queries[:, None]) & view.occupied[:, :, None] | (rows > 0)
        uniform = 1 / sees.sum(-1, keepdim=True).clamp(min=1)
        asked = rows.sum(-1, keepdim=True) > 0  # a short row has fewer queries than the history
        counter = ((rows < uniform) & sees & asked).sum(2)
        self._note(view, counter)
        latest = recent(view, self._recent(targets)).expand_as(counter)
        others = [n - r for n, r in zip(targets, self._recent(targets), strict=True)]
        kept = latest | top(self._persistence(view, counter), others, view.occupied & ~latest)
        return keep_where(kept, view.positions.expand_as(kept), targets)

    def evict(self, view: LayerView) -> Evict | None:
        assert view.weights is not None
        weights = self._by_group(view.weights[:, :, None], view.state["counter"].shape[1])[:, :, 0]
        occupied = view.occupied.expand_as(weights)
        below = (weights < 1 / occupied.sum(-1, keepdim=True).clamp(min=1)) & occupied
        index = view.positions.clamp(min=0).expand_as(weights)
        view.state["counter"] = view.state["counter"].scatter_add(-1, index, below.to(torch.int32))
        full = [held >= self.bound(n) + self.drop for held, n in zip(view.held, view.kept, strict=True)]
        if not any(full):
            return None
        latest = recent(view, self._recent(view.kept))
        persistence = self._persistence(view, view.state["counter"].gather(-1, index))
        leaves = persistence.masked_fill(~(occupied & ~latest), math.inf)
        lowest, slots = leaves.topk(self.drop, -1, largest=False)
        rows = torch.tensor(full, device=slots.device)[:, None, None]
        slots = slots.masked_fill(~rows | lowest.isinf(), -1)  # a head whose window slid on may have fewer to give
        return Evict(slots=slots, leaving=[self.drop if f else 0 for f in full])

    def _recent(self, held: tuple[int, ...]) -> list[int]:
        return [max(1, min(self.recent, n // 2)) for n in held]

    def _note(self, view: LayerView, counter: torch.Tensor) -> None:
        """Keep counters by column, since that is what an entry is known by from now on: [B, Hkv, columns]."""
        room = view.prompt.columns + view.prompt.max_new_tokens
        columns = counter.new_zeros(*counter.shape[:2], room, dtype=torch.int32)
        index = view.positions.clamp(min=0).expand_as(counter)
        view.state["counter"] = columns.scatter_add(-1, index, (counter * view.occupied).to(torch.int32))

    def _persistence(self, view: LayerView, counter: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, S]: higher for what was less often unimportant, then for what is younger."""
        return view.positions.double() / 2**32 - counter.double()

    def _by_group(self, rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[B, H, w, S] -> [B, Hkv, w, S]."""
        return rows.reshape(len(rows), kv_heads, -1, *rows.shape[2:]).mean(2)
