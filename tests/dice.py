"""A policy that decides by dice, so that the engine is tried on everything a policy may say.

Answers depend on the seed, the layer and the number of columns alone. Row by row and head by head it keeps, drops,
merges and rewrites different entries and different numbers of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcli.policies.base import Policy, option
from kvcli.policies.contract import Evict, Keep, LayerView


@dataclass(frozen=True)
class Dice(Policy):
    """Everything at random.

    keep, leave: whether the choice after the prompt, and while generating, is one for all heads or one for each.
    """

    name: ClassVar[str] = "dice"

    seed: int = option(0, "of the dice")
    keep: Literal["shared", "per-head"] = option("shared", "the choice after a prompt")
    leave: Literal["shared", "per-head"] = option("shared", "the choice while generating")
    decode: Literal["grow", "drop", "merge"] = option("drop", "what happens while generating")
    changes: bool = option(True, "also new keys, values, counts, biases")
    most: int = option(3, "entries that leave a row in one step")
    at_once: bool = option(False, "all layers are decided together, after the last one")

    @property
    def served_at_once(self) -> bool:
        return self.at_once

    @property
    def acts_in_decode(self) -> bool:
        return self.decode != "grow"

    def compress(self, view: LayerView) -> Keep:
        dice = self._dice(view)
        occupied = view.occupied.expand(-1, self._heads(view, self.keep), -1)
        present = occupied.sum(-1)
        counts = (present * torch.empty(present.shape).uniform_(0.2, 0.7, generator=dice)).long().clamp(min=1)
        counts = torch.minimum(counts, present)
        kept = _pick(occupied, counts, dice)
        index = _ascending(kept, view.positions)
        held = tuple(counts.amax(-1).tolist())
        if not self.changes:
            return Keep(index, held)
        batch, heads, width = index.shape
        return Keep(
            index,
            held,
            keys=_shaken(view.keys, index, dice),
            values=_shaken(view.values, index, dice),
            counts=torch.randint(1, 4, (batch, heads, width), generator=dice).float(),
            bias=torch.randn(batch, heads, width, generator=dice),
        )

    def evict(self, view: LayerView) -> Evict | None:
        dice = self._dice(view)
        occupied = view.occupied.expand(-1, self._heads(view, self.leave), -1)
        room = (occupied.sum(-1) - 4).clamp(min=0)  # who stays: something to merge into, something to see
        counts = torch.minimum(torch.randint(0, self.most + 1, room.shape, generator=dice), room)
        if not int(counts.max()):
            return None
        leaving = _pick(occupied, counts, dice)
        slots = _ascending(leaving, view.positions)
        stay = _pick(occupied & ~leaving, torch.full_like(counts, 2), dice)
        safe = bool((occupied.sum(-1) >= 4).all())
        targets = _ascending(stay, view.positions) if safe else None
        into = rewrite = None
        if self.decode == "merge" and targets is not None:
            into = targets.gather(-1, torch.randint(0, 2, slots.shape, generator=dice))
        if self.changes and targets is not None:
            rewrite = (targets, _shaken(view.keys, targets, dice))
        return Evict(slots, counts.amin(-1).tolist(), into, rewrite)

    def _dice(self, view: LayerView) -> torch.Generator:
        seen = view.prompt.columns + view.step
        return torch.Generator().manual_seed(self.seed * 1_000_003 + view.layer * 1009 + seen)

    def _heads(self, view: LayerView, choice: str) -> int:
        return max(view.positions.shape[1], view.keys.shape[1] if choice == "per-head" else 1)


def _pick(candidates: Tensor, counts: Tensor, dice: torch.Generator) -> Tensor:
    """bool [B, P, S]: `counts` [B, P] of the candidates."""
    rank = torch.rand(candidates.shape, generator=dice).masked_fill(~candidates, -1).argsort(-1, descending=True)
    first = torch.arange(candidates.shape[-1]) < counts[..., None]
    return torch.zeros_like(candidates).scatter(-1, rank, first) & candidates


def _ascending(chosen: Tensor, positions: Tensor) -> Tensor:
    """int64 [B, P, n]: the chosen slots by position, -1 where a row or head has fewer."""
    width = max(1, int(chosen.sum(-1).max()))
    order = positions.expand(chosen.shape).masked_fill(~chosen, torch.iinfo(torch.int64).max)
    order = order.sort(-1).indices[..., :width]
    return order.masked_fill(~chosen.gather(-1, order), -1)


def _shaken(entries: Tensor, index: Tensor, dice: torch.Generator) -> Tensor:
    """Entries [B, Hkv, K, D] at slots [B, P, K], each moved a little."""
    index = index.clamp(min=0).expand(-1, entries.shape[1], -1)[..., None].expand(-1, -1, -1, entries.shape[-1])
    found = entries.gather(2, index)
    return found * (1 + 0.2 * torch.randn(found.shape, generator=dice, dtype=found.dtype))
