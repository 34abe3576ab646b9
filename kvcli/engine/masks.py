"""From the model's own mask, over logical columns, to the slots that a layer really has.

Knows tensors only. This is what makes padding, sliding windows, bidirectional picture blocks, per-head eviction and
beams come out right with no code per architecture: the model says which columns a query may see, `positions` says
which column each slot holds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def physical_mask(
    mask: Tensor | None,
    positions: Tensor | None,
    holes: bool,
    queries: int,
    seen: int,
    columns: Tensor | None = None,
) -> Tensor | None:
    """[B or 1, 1, T, L] over columns -> [B, P, T, S] over slots; None for plain causality in the order of the slots.

    mask: bool or additive, or None when the model relies on plain causality. positions: int64 [B, P, S] with -1 for
    empty, or None when slot and column are the same. holes: whether any slot may be empty. queries: T, the newest of
    the `seen` columns, unless `columns` (int64 [B, 1, T], -1 for none) says which they are. A slot at -1 is masked
    always.
    """
    if positions is None:
        return mask
    occupied = (positions >= 0)[:, :, None]
    if mask is None:
        if queries == 1:
            return occupied if holes else None
        if columns is None:
            columns = torch.arange(seen - queries, seen, device=positions.device)
        return occupied & (positions[:, :, None] <= columns[..., None])
    if columns is not None:
        fed = columns[:, :, :, None] - seen + mask.shape[2]  # the mask's rows are all columns fed
        mask = mask.expand(len(columns), -1, -1, -1)
        mask = mask.gather(2, fed.clamp(min=0).expand(-1, -1, -1, mask.shape[3]))
    batch, heads, slots = positions.shape
    if mask.shape[1] != 1:
        raise ValueError("a mask that differs between heads is not served")
    wide = mask.expand(batch, heads, queries, -1)
    index = positions.clamp(min=0)[:, :, None].expand(-1, -1, queries, slots)
    gathered = wide.gather(-1, index)
    if mask.dtype == torch.bool:
        return gathered & occupied
    return gathered.masked_fill(~occupied, torch.finfo(mask.dtype).min)
