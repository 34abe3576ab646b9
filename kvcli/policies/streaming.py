"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453).

The first `sinks` entries and the most recent ones stay, whatever they hold (section 3.2); no scores are used. Positions
are re-assigned within the cache, so that sinks and recent entries are neighbours to the model.

Defaults: 4 sinks (section 3.2), `decode = "bounded"`: the cache never grows.

How positions are re-assigned: the released code caches keys without rotation and rotates them at every step by their
place in the cache. Rotary attention knows differences only, so it is the same to leave all recent keys and queries at
their true positions and to turn the sinks forward by the number of entries that left between them and the rest. The
turn always starts from the sinks as they were first cached, so that no error adds up.

Departures, with reasons:
- `positions = "original"` leaves sinks where they were (as a press without re-assignment does).
- In layers with a sliding window the model itself forgets the first tokens: there only recent entries stay.
- On models whose rope has several axes a picture takes fewer positions than tokens; the engine says how far columns
  really lie apart, and the sinks move next to the first entry after the gap.
- A budget that is smaller than the sinks and one entry takes sinks away, not the newest entry.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvcli.policies.base import first, keep_where, oldest, option, recent
from kvcli.policies.budgeted import Budgeted
from kvcli.policies.contract import Evict, Keep, LayerView
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class Streaming(Budgeted):
    """StreamingLLM: the first few entries and the most recent ones, moved next to each other."""

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024"

    sinks: int = option(4, "first entries that always stay", low=0)
    positions: Literal["reassigned", "original"] = option("reassigned", "whether sinks move next to the recent entries")

    @property
    def needs_rotation(self) -> bool:
        return self.positions == "reassigned" and self.sinks > 0

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        sinks = self._sinks(view, targets)
        others = [n - s for n, s in zip(targets, sinks, strict=True)]
        kept = first(view, sinks) | recent(view, others)
        keep = keep_where(kept, view.positions, targets)
        if self.needs_rotation and max(sinks):
            index = keep.index.clamp(min=0)
            keys = view.keys.gather(2, _wide(index, view.keys))
            after = dataclasses.replace(view, keys=keys, positions=view.positions.gather(-1, index))
            after.positions = after.positions.masked_fill(keep.index < 0, -1)
            view.state.setdefault("sinks", keys[:, :, : max(sinks)].clone())
            slots, turned = self._moved(after, sinks)
            keep.keys = keys.scatter(2, _wide(slots, turned), turned)
        return keep

    def evict(self, view: LayerView) -> Evict | None:
        over = self.over(view)
        if not any(over):
            return None
        sinks = self._sinks(view, [math.floor(limit) for limit in self.limits(view)])
        others = view.occupied & ~first(view, sinks)
        slots = oldest(view, others)
        leaving = torch.tensor(over, device=slots.device)
        slots = slots.masked_fill(~leaving[:, None], -1)[..., None]
        answer = Evict(slots=slots, leaving=[int(x) for x in over])
        if self.needs_rotation and max(sinks):
            gone = torch.arange(view.positions.shape[-1], device=slots.device) == slots
            after = copy.copy(view)
            after.positions = view.positions.masked_fill(gone, -1)
            answer.rewrite = self._moved(after, sinks)
        return answer

    def _sinks(self, view: LayerView, held: Sequence[int]) -> list[int]:
        """Sinks of each row when it keeps that many entries."""
        return [0 if view.window is not None else min(self.sinks, max(0, n - 1)) for n in held]

    def _moved(self, view: LayerView, sinks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [B, 1, s] and keys [B, Hkv, s, D] of the sinks, moved next to the oldest other entry.

        Sinks are the first slots of a compressed cache. A row with fewer of them writes back what it has.
        """
        assert view.turn is not None
        originals = view.state["sinks"]
        width = originals.shape[2]
        counts = torch.tensor(list(sinks), device=originals.device)[:, None]
        others = view.occupied[:, 0] & ~first(view, sinks)[:, 0]
        column = view.positions[:, 0]
        after = column.masked_fill(~others, torch.iinfo(column.dtype).max).argmin(-1, keepdim=True)
        start = self._place(view, column.gather(-1, after), low=True)
        end = self._place(view, column[:, :width].gather(-1, (counts - 1).clamp(min=0)), low=False)
        steps = (start - end - 1).clamp(min=0)
        number = torch.arange(width, device=originals.device).expand(len(sinks), width)
        turned = view.turn(originals, steps[:, None].expand(-1, 1, width))
        if min(sinks) < width:
            mine = (number < counts)[:, None, :, None]
            turned = torch.where(mine, turned, view.keys[:, :, :width])
        return number[:, None], turned

    def _place(self, view: LayerView, column: torch.Tensor, low: bool) -> torch.Tensor:
        """The rotary coordinate of a column [B, 1]: the lowest or highest of its axes."""
        if view.coordinates is None:
            return column
        axes = view.coordinates.shape[1]
        at = view.coordinates.gather(-1, column.clamp(min=0)[:, None].expand(-1, axes, -1))
        return at.amin(1) if low else at.amax(1)


def _wide(index: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    return index.expand(-1, entries.shape[1], -1)[..., None].expand(-1, -1, -1, entries.shape[-1])
