"""Entries as a cache stores them: the model's own numbers, or int8 with a scale for each head and token.

Knows tensors only. A quantised entry of width D is D + 4 bytes long, int8 [B, Hkv, S, D + 4]: the numbers, then the
float32 scale that they are multiples of. So whatever moves an entry moves its scale, and bytes count themselves.

Numbers are symmetric and rounded to nearest, the scale is the entry's largest number over 127: what is read differs
from what was written by at most half a scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCALE = 4
"""Bytes of a scale."""

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of a cache that are turned into the type of the maths at a time."""


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of `dtype` are computed with: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def quantise(entries: Tensor) -> Tensor:
    """[..., D] -> int8 [..., D + 4]."""
    numbers = entries.to(exact(entries.dtype))
    scale = (numbers.abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    whole = (numbers / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([whole, scale.view(torch.int8)], -1)


def read(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """What stored entries say, as `dtype`: [..., D]."""
    if entries.dtype != torch.int8:
        return entries.to(dtype)
    return (entries[..., :-SCALE].to(exact(dtype)) * _scales(entries)).to(dtype)


def dot(rows: Tensor, keys: Tensor) -> Tensor:
    """Products of rows [B, Hkv, R, D] with stored keys: [B, Hkv, R, S] of the type of the rows."""
    if keys.dtype == rows.dtype:
        return torch.matmul(rows, keys.transpose(-1, -2))
    products = rows.new_empty(*rows.shape[:3], keys.shape[2])
    for part, own, out in _parts(keys, rows, products):
        torch.bmm(own, part.transpose(-1, -2), out=out)
    return products if keys.dtype != torch.int8 else products.mul_(_scales(keys).transpose(-1, -2))


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of stored values weighted by [B, Hkv, R, S]: [B, Hkv, R, D] of the type of the weights."""
    if values.dtype == weights.dtype:
        return torch.matmul(weights, values)
    width = values.shape[-1]
    if values.dtype == torch.int8:
        width, weights = width - SCALE, weights * _scales(values).transpose(-1, -2)
    sums = weights.new_empty(*weights.shape[:3], width)
    for part, own, out in _parts(values, weights, sums):
        torch.bmm(own, part, out=out)
    return sums


def _scales(entries: Tensor) -> Tensor:
    """[..., 1]."""
    return entries[..., -SCALE:].contiguous().view(torch.float32)


def _parts(entries: Tensor, *beside: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Stored numbers (without scales) of a few rows and heads at a time, [n, S, D] in the type of `beside[0]`, with
    the same rows and heads of the others: so the cache never exists as a whole in a wider type."""
    width = entries.shape[-1] - (SCALE if entries.dtype == torch.int8 else 0)
    flat, others = entries.flatten(0, 1), [t.flatten(0, 1) for t in beside]
    count = max(1, CHUNK.get(entries.device.type, CHUNK["cuda"]) // max(1, flat.shape[1] * width))
    for start in range(0, len(flat), count):
        part = flat[start : start + count, :, :width].to(beside[0].dtype)
        yield part, *(t[start : start + count] for t in others)
