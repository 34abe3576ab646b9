"""Tokens that leave the hidden states: after the first layer's decision, later layers compute without them.

This is what makes pruning pay in the prompt too, not only in the cache (FastV, HAE with `broadcast = "hidden"`). Beside
`adapter`, the one place that reaches into a model: hooks on its decoder layers, for the length of a run. Survivors keep
their positions; the caches of later layers know which columns arrived (`Survivors`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.errors import UsageError

FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "gemma", "gemma2", "gemma3_text"}
)
"""Text models whose decoder layers all get the same shared inputs, and nothing else of the prompt's length."""


@dataclass(frozen=True)
class Survivors:
    """The part of a prompt that goes on after a layer.

    columns: int64 [B, 1, K], ascending, -1 first where a row has fewer. held: how many each row has, on the host.
    start, length: the columns that were fed are start .. start + length - 1.
    """

    columns: Tensor
    held: tuple[int, ...]
    start: int
    length: int


def survivors(positions: Tensor, start: int, length: int) -> Survivors:
    """Those of the cached positions [B, 1, S] that belong to the columns being fed, and the newest column in any case:
    the next token is read off its state."""
    if positions.shape[1] != 1:
        raise UsageError("tokens can leave the hidden states only when all heads agree on them")
    newest = start + length - 1
    inside = positions.masked_fill((positions < start) | (positions == newest), -1)
    inside = torch.cat([inside, inside.new_full((*inside.shape[:2], 1), newest)], -1)
    held = (inside >= 0).sum(-1)[:, 0].tolist()
    columns = inside.sort(dim=-1).values[..., -max(held) :]
    return Survivors(columns, tuple(held), start, length)


@contextmanager
def hiding(model: Any, cache: Any) -> Iterator[None]:
    """Inside the block, tokens that `cache.survivors` does not name leave the hidden states.

    Raises `UsageError` for a model whose layers share more than is known here.
    """
    if cache is None or not cache.policy.hides_tokens:
        yield
        return
    kind = model.config.get_text_config(decoder=True).model_type
    if kind not in FAMILIES:
        raise UsageError(f"tokens can't leave the hidden states of a {kind} model; use --set broadcast=cache")
    hooks = [
        layer.register_forward_pre_hook(partial(_prune, cache), with_kwargs=True)
        for layer in model.get_decoder().layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _prune(cache: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found: Survivors | None = cache.survivors
    if found is None:
        return None
    index = (found.columns[:, 0] - found.start).clamp(min=0)
    states, *rest = args
    if states.shape[1] == found.length and found.length != index.shape[1]:
        states = _take(states, index, -2)
    kwargs = dict(kwargs)
    if isinstance(kwargs.get("position_ids"), Tensor):
        kwargs["position_ids"] = _take(kwargs["position_ids"], index, -1)
    if isinstance(kwargs.get("position_embeddings"), tuple):
        kwargs["position_embeddings"] = tuple(_take(t, index, -2) for t in kwargs["position_embeddings"])
    return (states, *rest), kwargs


def _take(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    """Entries `index` [B, K] of the token axis; the axis before it is the batch, or 1 for all rows alike."""
    batch = axis - 1
    shape = list(tensor.shape)
    shape[batch] = index.shape[0]
    tensor = tensor.expand(shape)
    shape[axis] = index.shape[1]
    wide = index if axis == -1 else index[..., None]
    return torch.gather(tensor, axis, wide.expand(shape))
