"""Attention output, and the statistics that a policy asked for, in one pass.

Knows tensors and `kvcli.policies.contract`, nothing of transformers. Masks are boolean (True: may attend) or additive,
[B, P, T, S]; grouped queries are packed, never expanded. All sums are taken in float32 at least. Keys and values may
be stored as int8 (`stored`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcli.engine import flex
from kvcli.engine.stored import dot, exact, mix, read
from kvcli.policies.contract import Columns, Rows, RowSummary, Statistic

WEIGHTS = {"cpu": 2**19, "cuda": 2**26}
"""Attention weights that exist at a time, about: on a CPU they should stay near its caches, being read three times."""
ROWS = 16
"""Query rows in a block are a multiple of this."""


@dataclass
class Gather:
    """One statistic being gathered over S slots. chosen: bool [B, T], which of the queries at hand it counts. value:
    what was gathered before, over the same S slots, or None."""

    statistic: Statistic
    chosen: Tensor
    slots: int
    value: Tensor | None = None

    def add(self, weights: Tensor, start: int, visible: Tensor | None) -> None:
        """Take in the attention weights [B, Hkv, G, b, n] of the queries from `start` on, over the first n slots.

        visible: bool, broadcastable to weights, or None when every key could be seen.
        """
        chosen = self.chosen[:, start : start + weights.shape[3]]
        if isinstance(self.statistic, Columns):
            if self.statistic.decay != 1.0:
                chosen = self._fade(chosen, weights.dtype)
            self._take(_columns(self.statistic, weights, chosen))
        elif isinstance(self.statistic, RowSummary):
            new = _summary(self.statistic, weights, chosen, visible)
            self.value = new if self.value is None else self.value + new
        else:
            wide = torch.nn.functional.pad(weights, (0, self.slots - weights.shape[-1]))
            self.value = _last_rows(self.statistic, self.value, wide, chosen)

    @property
    def sums_alone(self) -> bool:
        """Whether the column sums of each query head over the chosen queries are all that is wanted."""
        asked = self.statistic
        return isinstance(asked, Columns) and asked.decay == 1.0 and _linear(asked)

    def add_sums(self, sums: Tensor, kv_heads: int) -> None:
        """Take in column sums [B, H, S] over the chosen queries: a row of weights like any other, to those who add."""
        assert isinstance(self.statistic, Columns)
        row = sums.view(len(sums), kv_heads, -1, 1, sums.shape[-1])
        self._take(_columns(self.statistic, row, self.chosen.new_ones(len(sums), 1)))

    def _take(self, new: Tensor) -> None:
        """Join new columns [B, A, n], of the first n slots, with those before."""
        assert isinstance(self.statistic, Columns)
        if self.value is None:
            self.value = new.new_zeros(*new.shape[:2], self.slots)
        reached = self.value[..., : new.shape[-1]]
        if self.statistic.reduce == "max":
            torch.maximum(reached, new, out=reached)
        else:
            reached += new

    def _fade(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights [B, b] of the rows at hand, after what was gathered before has lost its share."""
        assert isinstance(self.statistic, Columns)
        counted = chosen.to(dtype)
        later = counted.flip(-1).cumsum(-1).flip(-1) - counted
        if self.value is not None:
            self.value *= (self.statistic.decay ** counted.sum(-1))[:, None, None]
        return counted * self.statistic.decay**later


class Listener(Protocol):
    """Anything that is shown the attention weights block by block, as `Gather.add`."""

    def add(self, weights: Tensor, start: int, visible: Tensor | None) -> None: ...


class Latest:
    """Keeps the weights of the last query: [B, H, S]."""

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def add(self, weights: Tensor, start: int, visible: Tensor | None) -> None:
        self.weights = weights[:, :, :, -1].flatten(1, 2)


def finish(statistic: Statistic, value: Tensor, kv_heads: int) -> Tensor:
    """What a policy is given: a gathered value after the head reduction that had to wait for the last row."""
    if isinstance(statistic, Columns) and value.shape[1] > 1 and not _reduced_early(statistic):
        return _reduce_heads(value.view(value.shape[0], kv_heads, -1, *value.shape[2:]), statistic.heads)
    return value


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention output without statistics: [B, H, T, D] -> [B, H, T, Dv]. Masks as in `attend_and_gather`."""
    batch, heads, length, width = query.shape
    kv_heads = keys.shape[1]
    # sdpa takes 3 to 4 times as long over 16-bit floats of this kind on a CPU
    slow = query.dtype == torch.float16 and query.is_cpu
    if softcap is not None or length > 1 or keys.dtype == torch.int8 or slow:
        return attend_and_gather(query, keys, values, mask, scale, [], softcap=softcap, bias=bias)
    packed = query.reshape(batch, kv_heads, heads // kv_heads, width)
    mask = _with_bias(mask, bias, query.dtype)
    output = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(batch, heads, 1, values.shape[-1])


def attend_and_gather(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    scale: float,
    listeners: Sequence[Listener],
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """Attention output of the queries from `start` on, gathering along the way.

    query: [B, H, T, D]; keys, values: [B, Hkv, S, D]. Without a mask, query t sees the first S - T + t + 1 keys.
    values None: no output is wanted, and a tensor without columns is returned. bias: [B, P, S].
    """
    batch, heads, length, _ = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    sums = [each for each in listeners if isinstance(each, Gather) and each.sums_alone]
    plain = softcap is None and bias is None and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
    if query.device.type in flex.DEVICES and plain and length > 1 and start == 0 and len(sums) == len(listeners) > 0:
        return _fused(query, keys, values, mask, scale, sums)
    scaled = query.to(exact(query.dtype)) * scale
    if length > 1:  # every block of queries reads them again
        keys, values = read(keys, scaled.dtype), None if values is None else read(values, scaled.dtype)
    outputs = []
    block = WEIGHTS.get(query.device.type, WEIGHTS["cuda"]) // (batch * heads * slots)
    block = max(ROWS, block // ROWS * ROWS)
    for begin in range(start, length, block):
        end = min(begin + block, length)
        last = slots - length + end if mask is None else slots
        rows = scaled[:, :, begin:end].reshape(batch, kv_heads, group * (end - begin), -1)
        logits = dot(rows, keys[:, :, :last]).view(batch, kv_heads, group, end - begin, last)
        visible = _visible(mask, begin, end, slots - length, last, query.device)
        edge = end - begin if mask is None else last
        _mask(logits, visible, softcap, None if bias is None else bias[..., :last], edge)
        weights = torch.softmax(logits, -1)
        if values is not None:
            product = mix(weights.view(batch, kv_heads, -1, last), values[:, :, :last])
            outputs.append(product.view(batch, heads, end - begin, -1).to(query.dtype))
        seen = visible if visible is not None and visible.dtype == torch.bool else None
        for listener in listeners:
            listener.add(weights, begin, seen)
    return torch.cat(outputs, 2) if outputs else query[..., :0]


def _fused(
    query: Tensor, keys: Tensor, values: Tensor | None, mask: Tensor | None, scale: float, gathers: Sequence[Gather]
) -> Tensor:
    """The same by `flex`, where column sums are all that is gathered."""
    prompt = flex.Prompt(query, keys, keys if values is None else values, mask, scale)
    for gather in gathers:
        gather.add_sums(prompt.column_sums(gather.chosen), keys.shape[1])
    return query[..., :0] if values is None else prompt.output


def _visible(mask: Tensor | None, begin: int, end: int, before: int, last: int, device: torch.device) -> Tensor | None:
    """The mask of a block of queries, broadcastable to [B, Hkv, G, b, last]."""
    if mask is not None:
        return mask[:, :, None, begin:end, :last]
    if end - begin == 1:
        return None
    queries = torch.arange(before + begin, before + end, device=device)
    return (torch.arange(last, device=device) <= queries[:, None])[None, None, None]


def _mask(logits: Tensor, visible: Tensor | None, softcap: float | None, bias: Tensor | None, edge: int) -> None:
    """Cap, bias and mask logits in place: at 4k tokens a copy of them costs as much as half of the products. edge: how
    many of the last columns the mask can hide anything of."""
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        logits += bias[:, :, None, None].to(logits.dtype)
    if visible is None:
        return
    if visible.dtype == torch.bool:
        # the lowest number, not -inf: a padding row that may see nothing stays finite, as in stock attention
        logits[..., -edge:].masked_fill_(~visible[..., -edge:], torch.finfo(logits.dtype).min)
    else:
        logits += visible


def _with_bias(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return mask
    added = bias[:, :, None].to(dtype)
    if mask is None:
        return added
    if mask.dtype == torch.bool:
        return torch.where(mask, added, torch.finfo(dtype).min)
    return mask + added


def _reduced_early(statistic: Columns) -> bool:
    """Whether heads can be reduced row by row: sums over rows and over heads commute."""
    linear = statistic.reduce == "sum" and statistic.heads in ("mean", "sum", "group-mean", "group-sum")
    return linear or (statistic.heads_first and statistic.heads != "none")


def _linear(statistic: Columns) -> bool:
    """Whether column sums of each query head are all that it takes."""
    return statistic.reduce == "sum" and not (statistic.heads_first and statistic.heads.endswith("max"))


def _columns(statistic: Columns, weights: Tensor, chosen: Tensor) -> Tensor:
    """[B, Hkv, G, b, S] -> [B, A, S]."""
    batch, kv_heads, group, _, slots = weights.shape
    if _linear(statistic):
        # ones @ P: a matrix product is several times faster here than a sum over an axis
        picks = chosen.to(weights.dtype)[:, None, None, :]
        if _reduced_early(statistic):
            picks = picks.repeat(1, 1, 1, group)
            summed = torch.matmul(picks.expand(-1, kv_heads, -1, -1), weights.view(batch, kv_heads, -1, slots))
            return _after_group_sum(summed[:, :, 0], statistic.heads, group)
        summed = torch.matmul(picks[:, :, None].expand(-1, kv_heads, group, -1, -1), weights)
        return summed.view(batch, -1, slots)
    weights = _reduce_heads(weights, statistic.heads) if statistic.heads_first else weights.flatten(1, 2)
    weights = weights * chosen[:, None, :, None]
    if statistic.reduce == "max":
        return weights.amax(2)
    return weights.sum(2) if statistic.reduce == "sum" else weights.square().sum(2)


def _after_group_sum(summed: Tensor, heads: str, group: int) -> Tensor:
    """[B, Hkv, S], summed over each group, to what `heads` asks for."""
    if heads == "group-sum":
        return summed
    if heads == "group-mean":
        return summed / group
    total = summed.sum(1, keepdim=True)
    return total if heads == "sum" else total / (group * summed.shape[1])


def _reduce_heads(tensor: Tensor, heads: str) -> Tensor:
    """[B, Hkv, G, ...] -> [B, H, ...], [B, Hkv, ...] or [B, 1, ...]."""
    if heads == "none":
        return tensor.flatten(1, 2)
    grouped = heads.startswith("group-")
    tensor, axis = (tensor, 2) if grouped else (tensor.flatten(1, 2), 1)
    if heads.endswith("max"):
        return tensor.amax(axis, keepdim=not grouped)
    return tensor.mean(axis, keepdim=not grouped) if heads.endswith("mean") else tensor.sum(axis, keepdim=not grouped)


def _summary(statistic: RowSummary, weights: Tensor, chosen: Tensor, visible: Tensor | None) -> Tensor:
    entropy = torch.special.entr(weights).sum(-1)
    seen = torch.ones_like(weights, dtype=torch.bool) if visible is None else visible.expand_as(weights)
    small = (weights < statistic.below * weights.amax(-1, keepdim=True)) & seen
    sparsity = small.sum(-1) / seen.sum(-1).clamp(min=1)
    rows = torch.stack([entropy, sparsity, torch.ones_like(entropy)], -1)
    return (rows * chosen[:, None, None, :, None]).sum(3).flatten(1, 2)


def _last_rows(statistic: Rows, before: Tensor | None, weights: Tensor, chosen: Tensor) -> Tensor:
    """The last `window` chosen rows of what was gathered before and of this block: [B, H, window, S]."""
    batch, kv_heads, group, rows, slots = weights.shape
    flat = weights.reshape(batch, kv_heads * group, rows, slots)
    if before is None:
        before = flat.new_zeros(batch, kv_heads * group, statistic.window, slots)
    before = torch.nn.functional.pad(before, (0, slots - before.shape[-1]))  # a chunk of the prompt adds slots
    both = torch.cat([before, flat], 2)
    kept = torch.cat([chosen.new_ones(batch, statistic.window), chosen], 1)
    order = kept.to(torch.uint8).sort(dim=1, stable=True).indices[:, -statistic.window :]  # rows not chosen go first
    return both.gather(2, order[:, None, :, None].expand(-1, both.shape[1], -1, slots))
