"""Merging entries that leave into entries that stay: who takes whom in, and with what mean.

Knows shapes and arithmetic. Which entries stay is the policy's to say. In all of it a `target` is int64 [B, P, S]: for
each slot the slot that takes it in, or -1 where nothing is handed over.
"""

from __future__ import annotations

import math
from typing import Literal

from kvcli.policies.contract import Keep, LayerView
from kvcli.policies.lazy import torch

MergeKeys = Literal["average", "no", "rerotate"]


def nearest(positions: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """For each slot the anchor that is nearest by position, of two as near the lower; -1 in a row without anchors.

    positions: int64 [B, P, S]; anchors: bool [B, P, S]. Elastic Cache, Eq. 2.
    """
    far = torch.iinfo(positions.dtype).max // 4
    at, slots = positions.masked_fill(~anchors, far).sort(dim=-1, stable=True)
    boundaries = (at[..., :-1] + at[..., 1:]) // 2  # floored midpoints; each belongs to the bucket below it
    bucket = torch.searchsorted(boundaries.contiguous(), positions.contiguous())
    return slots.gather(-1, bucket).masked_fill(~anchors.any(-1, keepdim=True), -1)


def nearest_alike(view: LayerView, anchors: torch.Tensor) -> torch.Tensor:
    """The same among anchors of the entry's own modality: visual tokens join visual anchors, text joins text."""
    visual = view.visual
    of_picture, of_text = nearest(view.positions, anchors & visual), nearest(view.positions, anchors & ~visual)
    return torch.where(visual, of_picture, of_text)


def clustered(view: LayerView, anchors: torch.Tensor, leaving: torch.Tensor, rounds: int) -> torch.Tensor:
    """For each slot the anchor whose cluster of keys it falls in after `rounds` of k-means that starts at the anchors.

    anchors, leaving: bool [B, P, S]. With one choice for all heads (P = 1) the distance is over the keys of all heads
    together. A centre is the mean of its anchor and the leaving entries nearest to it.
    """
    keys = view.keys.to(torch.promote_types(view.keys.dtype, torch.float32))
    if anchors.shape[1] == 1:
        keys = keys.transpose(1, 2).flatten(2)[:, None]
    count = max(1, int(anchors.sum(-1).max()))
    chosen, slots = anchors.to(torch.uint8).sort(dim=-1, descending=True, stable=True)
    missing, slots = chosen[..., :count] == 0, slots[..., :count]
    own = _rows(keys, slots)
    centres = own
    for _ in range(rounds):
        distances = torch.cdist(keys, centres).masked_fill(missing[..., None, :], math.inf)
        cluster = distances.argmin(-1)
        members = leaving.to(keys.dtype)
        sizes = torch.ones_like(own[..., 0]).scatter_add(-1, cluster, members)
        sums = own.scatter_add(2, cluster[..., None].expand_as(keys), keys * members[..., None])
        centres = sums / sizes[..., None]
    return slots.gather(-1, cluster).masked_fill(~anchors.any(-1, keepdim=True), -1)


def merge(
    view: LayerView,
    kept: Keep,
    target: torch.Tensor,
    weight: torch.Tensor,
    merge_keys: MergeKeys = "average",
) -> Keep:
    """`kept` with keys, values and counts in which each entry is the weighted mean of itself and of what it takes in.

    weight: [B, P, S], not negative. merge_keys: "average" takes the mean of keys as they are cached (rotated), "no"
    leaves keys alone, "rerotate" first turns each key to the position of the one that takes it in.
    """
    index = kept.index.clamp(min=0)
    gives, into = target >= 0, target.clamp(min=0)
    weight = (weight.clamp(min=torch.finfo(weight.dtype).tiny) * view.occupied).expand_as(target)
    handed = weight * gives
    counts = view.counts.expand_as(target)
    counts = counts + torch.zeros_like(counts).scatter_add(-1, into, counts * gives)
    mean = _Mean(weight, handed, into, index)
    keys = None
    if merge_keys == "average":
        keys = mean.of(view.keys, view.keys)
    elif merge_keys == "rerotate":
        assert view.turn is not None, "a policy that turns keys says so in needs_rotation"
        keys = mean.of(view.keys, view.turn(view.keys, _steps(view, into).masked_fill(~gives, 0)))
    values = mean.of(view.values, view.values)
    return Keep(kept.index, kept.held, keys=keys, values=values, counts=counts.gather(-1, index))


def _steps(view: LayerView, into: torch.Tensor) -> torch.Tensor:
    """int64 [B, P, S]: how far each entry is from the one that takes it in. On multi-axis rope a turn moves all axes
    alike, so an entry that differs from its anchor in some axes only is not turned: 0."""
    located = view.positions.expand_as(into)
    if view.coordinates is None:
        return located.gather(-1, into) - located
    axes = view.coordinates.shape[1]
    index = located.clamp(min=0)[:, :, None].expand(-1, -1, axes, -1)
    places = view.coordinates[:, None].expand(-1, into.shape[1], -1, -1).gather(-1, index)
    moves = places.gather(-1, into[:, :, None].expand_as(places)) - places
    return moves[:, :, 0].masked_fill((moves != moves[:, :, :1]).any(2), 0)


class _Mean:
    """Weighted means of entries and of what they take in. weight, handed, into: [B, P, S]; index: [B, P, K]."""

    def __init__(self, weight: torch.Tensor, handed: torch.Tensor, into: torch.Tensor, index: torch.Tensor) -> None:
        total = weight + torch.zeros_like(weight).scatter_add(-1, into, handed)
        self.weight, self.handed, self.into, self.index = weight, handed, into, index
        self.total = total.gather(-1, index)

    def of(self, own: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, S, D] -> [B, Hkv, K, D]; `moved`: entries as they are handed over."""
        exact = torch.promote_types(own.dtype, torch.float32)
        into = self.into.expand(-1, own.shape[1], -1)[..., None].expand_as(own)
        sums = own.to(exact) * self.weight[..., None]
        sums = sums.scatter_add(2, into, (moved.to(exact) * self.handed[..., None]).to(sums.dtype))
        kept = _rows(sums, self.index.expand(-1, own.shape[1], -1))
        return (kept / self.total[..., None].clamp(min=torch.finfo(self.total.dtype).tiny)).to(own.dtype)


def _rows(entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return entries.gather(2, index[..., None].expand(-1, -1, -1, entries.shape[-1]))
