"""Caches filled without a prompt: random keys and values, of which a policy keeps what it would keep.

Decoding costs what is held, not what it says, so a prompt need not be read before a step can be timed. Knows stock
caches and ours; measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

from kvcli.bench.shapes import Shape
from kvcli.engine import adapter
from kvcli.engine.attention import Gather
from kvcli.engine.rotary import Rotator
from kvcli.policies.base import Policy
from kvcli.policies.contract import Columns, Prompt


class Preallocated(DynamicLayer):
    """The stock growing layer without its copying: what is held lies in a buffer that is long enough."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.used = room, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            capacity = key_states.shape[2] + self.room
            states = (key_states, value_states)
            self.buffers = [s.new_empty(*s.shape[:2], capacity, s.shape[3]) for s in states]
        end = self.used + key_states.shape[2]
        self.buffers[0][:, :, self.used : end] = key_states
        self.buffers[1][:, :, self.used : end] = value_states
        self.used = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values


@dataclass(frozen=True)
class Entries:
    """Random keys and values of one layer [B, Hkv, S, D], and one row of attention weights [B, Hkv, G, 1, S]: the same
    for all layers."""

    keys: Tensor
    values: Tensor
    weights: Tensor

    @property
    def columns(self) -> int:
        return int(self.keys.shape[2])


def entries(shape: Shape, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> Entries:
    """Entries for a prompt of so many columns, the same at each call."""
    generator = torch.Generator(device).manual_seed(1)
    size = (batch, shape.kv_heads, columns, shape.width)
    keys, values = (torch.randn(size, generator=generator, dtype=dtype, device=device) for _ in range(2))
    logits = torch.randn(
        (batch, shape.kv_heads, shape.heads // shape.kv_heads, 1, columns), generator=generator, device=device
    )
    return Entries(keys, values, (2 * logits).softmax(-1))


def stock(kind: str, config: Any, room: int, columns: int) -> Any:
    """An empty stock cache: `dynamic`, `static`, or `preallocated`."""
    if kind == "static":
        return StaticCache(config=config, max_cache_len=columns + room)
    cache = DynamicCache(config=config)
    if kind == "preallocated":
        cache.layers = [Preallocated(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def fill_stock(cache: Any, given: Entries) -> None:
    """Let every layer hold the entries."""
    for index in range(len(cache.layers)):
        cache.update(given.keys, given.values, index)


def ours(
    model: Any, policy: Policy, batch: int, columns: int, new_tokens: int, rotator: Rotator | None = None
) -> adapter.KVCache:
    """An empty cache of ours that was told of prompts without padding and pictures."""
    real = torch.ones(batch, columns, dtype=torch.bool, device=model.device)
    cache = adapter.KVCache(model.config, policy, rotator if policy.needs_rotation else None)
    cache.announce(Prompt(real, torch.zeros_like(real), (columns,) * batch, new_tokens))
    return cache


def fill_ours(cache: adapter.KVCache, given: Entries) -> None:
    """Let every layer hold the entries, gather what the policy asks for from the row of weights, and let it act as if
    the prompt had just ended."""
    if cache.policy.needs_rotation:
        columns = torch.arange(given.columns, device=given.keys.device)
        cache.coordinates.known = columns.expand(len(given.keys), 1, -1)
    for layer in cache.ours:
        layer.lazy_initialization(given.keys, given.values)
        layer.store.append(given.keys, given.values, cache.room(layer, given.columns))
        cache.account(layer)
        turn = cache.turn(layer)
        assert turn is not None
        for statistic in cache.policy.statistics():
            if isinstance(statistic, Columns) and statistic.first_layer and not turn.first:
                continue
            chosen = torch.ones(len(given.keys), 1, dtype=torch.bool, device=given.keys.device)
            gather = Gather(statistic, chosen, given.columns)
            gather.add(given.weights, 0, None)
            assert gather.value is not None
            if isinstance(statistic, Columns):
                layer.store.set_side(statistic.name, gather.value)
            else:
                turn.gathered[statistic.name] = gather.value
        adapter.after_attention(layer, turn, given.columns, None)
