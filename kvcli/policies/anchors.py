"""Which entries stay and which of them are anchors, for policies that merge.

Knows ranks and positions. What then happens to the others is in `merging`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvcli.policies.base import first, recent, top
from kvcli.policies.contract import LayerView
from kvcli.policies.lazy import torch


class Choice(NamedTuple):
    """anchors: entries that take others in. stays: they and the protected ones. sources: entries whose contents are
    to be merged. All bool [B, P, S]. held: how many stay in each row."""

    anchors: torch.Tensor
    stays: torch.Tensor
    sources: torch.Tensor
    held: Sequence[int]


def by_rank(view: LayerView, scores: torch.Tensor, held: Sequence[int], protect_ends: bool) -> Choice:
    """The highest scores [B, P, S] are anchors; with `protect_ends` the first and the last entry stay beside them."""
    occupied = view.occupied.expand_as(scores)
    if protect_ends:
        ends = (first(view, 1) | recent(view, 1)).expand_as(scores)
        anchors = top(scores, [max(0, n - 2) for n in held], occupied & ~ends)
        stays = anchors | ends
    else:
        anchors = stays = top(scores, held, occupied)
    return Choice(anchors, stays, occupied & ~stays, held)


def as_released(view: LayerView, scores: torch.Tensor, remove: Sequence[int]) -> Choice:
    """The choice of Elastic Cache's released code, which takes `argsort(x)[i] > remove` for a comparison of ranks.

    Of a row's entries in order of position, 0 .. n - 1, the middle ones 1 .. n - 2 are sorted by score, ascending.
    Entry i stays if the one *at rank* i - 1 has a number above `remove`, counted from the first middle entry; where
    not, entry i - 1 (not i) is what gets merged. Both ends stay. A row with fewer than two to remove keeps all.
    """
    occupied = view.occupied.expand_as(scores)
    last = torch.iinfo(view.positions.dtype).max
    sequence = view.positions.masked_fill(~view.occupied, last).argsort(dim=-1, stable=True).expand_as(scores)
    remove = [n if n >= 2 else -1 for n in remove]
    middle = torch.tensor([n - 2 for n in view.held], device=scores.device)[:, None, None]
    limit = torch.tensor(remove, device=scores.device)[:, None, None]
    number = torch.arange(scores.shape[-1] - 1, device=scores.device)
    ranked = scores.gather(-1, sequence)[..., 1:].masked_fill(number >= middle, math.inf)
    above = ranked.argsort(dim=-1, stable=True) > limit
    anchors, sources = torch.zeros_like(occupied), torch.zeros_like(occupied)
    anchors = anchors.scatter(-1, sequence[..., 1:], above & (number < middle))
    sources = sources.scatter(-1, sequence[..., :-1], ~above & (number < middle))
    held = [n if r < 0 else max(min(n, 2), n - r - 1) for n, r in zip(view.held, remove, strict=True)]
    return Choice(anchors, anchors | first(view, 1) | recent(view, 1), sources, held)


def over_layers(views: Sequence[LayerView], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each layer [B, P, S]: the mean score of the same column over all layers that hold it."""
    columns = views[0].prompt.columns
    total = scores[0].new_zeros(scores[0].shape[0], 1, columns)
    count = torch.zeros_like(total)
    for view, score in zip(views, scores, strict=True):
        index = view.positions.clamp(min=0).to(total.device)  # layers may be spread over several devices
        held = view.occupied.to(total)
        total = total.scatter_add(-1, index, score.to(total) * held)
        count = count.scatter_add(-1, index, held)
    mean = total / count.clamp(min=1)
    return [mean.to(view.positions.device).gather(-1, view.positions.clamp(min=0)) for view in views]
