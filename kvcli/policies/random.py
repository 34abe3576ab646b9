"""The floor: entries leave by chance.

Any policy that does no better than this has learned nothing about importance. The draws depend on the seed, the layer
and the number of tokens that the row itself has seen, never on its neighbours in the batch, so that a run can be
repeated.

After the prompt each row keeps a uniform choice, the same for all heads of a layer; while generating, one of all but
the newest entry leaves when the cache is over its budget. Nothing is protected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvcli.policies.base import evict_one, keep_where, option, recent, top
from kvcli.policies.budgeted import Budgeted
from kvcli.policies.contract import Evict, Keep, LayerView
from kvcli.policies.lazy import torch


@dataclass(frozen=True)
class Random(Budgeted):
    """Keep entries by chance: the floor that other policies must beat."""

    name: ClassVar[str] = "random"
    source: ClassVar[str] = "none: a control"

    seed: int = option(0, "draws are the same for the same seed, layer and length", low=0)

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        return keep_where(top(self._draws(view), targets, view.occupied), view.positions, targets)

    def evict(self, view: LayerView) -> Evict | None:
        candidates = view.occupied & ~recent(view, 1)
        return evict_one(self._draws(view).masked_fill(~candidates, math.inf).argmin(-1), self.over(view))

    def _draws(self, view: LayerView) -> torch.Tensor:
        """[B, 1, S]: numbers in [0, 1) that go with the entries of each row in order of position."""
        last = torch.iinfo(view.positions.dtype).max
        order = view.positions.masked_fill(~view.occupied, last).argsort(dim=-1, stable=True)
        rows = []
        for seen, held in zip(view.seen, view.held, strict=True):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + view.layer) * 1_000_003 + seen)
            drawn = torch.rand(held, generator=generator, dtype=torch.float64)
            rows.append(torch.nn.functional.pad(drawn, (0, order.shape[-1] - held)))
        drawn = torch.stack(rows)[:, None].to(order.device)
        return torch.zeros_like(drawn).scatter(-1, order, drawn)
