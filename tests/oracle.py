"""The oracle of the engine: a recorded plan replayed on a full, plain cache with masked softmax.

Knows what a policy answered, in columns of the text rather than slots of a buffer, and does the same with the simplest
means: nothing is ever moved or freed, what left is masked with -inf, merges are loops over entries. It shares no code
with the engine's cache, masks and attention, only the words of `kvcli.policies.contract`.

Axis names as there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import architectures
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from kvcli.engine.adapter import KVCache, attached
from kvcli.engine.rotary import Rotator
from kvcli.policies.base import Policy
from kvcli.policies.contract import Evict, Keep, LayerView, Prompt
from kvcli.policies.full import Full

NAME = "oracle"


# --- the plan


@dataclass
class Decision:
    """What one layer was told after `seen` columns, with a column in the place of every slot (-1 for none)."""

    layer: int
    seen: int
    answer: Keep | Evict


def recorded(policy: Policy) -> tuple[Policy, list[Decision]]:
    """A policy that decides as the given one, and the plan that its decisions will be written to."""
    plan: list[Decision] = []

    class Recorded(type(policy)):  # type: ignore[misc]
        def compress(self, view: LayerView) -> Keep | None:
            return note_kept(plan, view, policy.compress(view))

        def compress_model(self, views: Sequence[LayerView]) -> list[Keep | None]:
            answers = policy.compress_model(views)
            return [note_kept(plan, view, answer) for view, answer in zip(views, answers, strict=True)]

        def evict(self, view: LayerView) -> Evict | None:
            return note_evicted(plan, view, policy.evict(view))

    told: Policy = object.__new__(Recorded)
    told.__dict__.update(policy.__dict__)
    return told, plan


def note_kept(plan: list[Decision], view: LayerView, answer: Keep | None) -> Keep | None:
    if answer is not None:
        index = columns(view, answer.index)
        told = Keep(index, answer.held, answer.keys, answer.values, answer.counts, answer.bias)
        plan.append(Decision(view.layer, view.prompt.columns, told))
    return answer


def note_evicted(plan: list[Decision], view: LayerView, answer: Evict | None) -> Evict | None:
    if answer is not None:
        into = None if answer.into is None else columns(view, answer.into)
        rewrite = answer.rewrite and (columns(view, answer.rewrite[0]), answer.rewrite[1].clone())
        told = Evict(columns(view, answer.slots), answer.leaving, into, rewrite)
        plan.append(Decision(view.layer, view.prompt.columns + view.step, told))
    return answer


def columns(view: LayerView, slots: Tensor) -> Tensor:
    """The columns that these slots [B, P, n] hold; asking for a slot that holds nothing is an error of the policy."""
    heads = max(slots.shape[1], view.positions.shape[1])
    slots = slots.expand(-1, heads, -1)
    found = view.positions.expand(-1, heads, -1).gather(-1, slots.clamp(min=0))
    assert (found[slots >= 0] >= 0).all(), "a policy named a slot that holds no entry"
    return found.masked_fill(slots < 0, -1)


# --- the plain cache


@dataclass
class Seen:
    """What a query may use of a layer's columns: bool and float [B, Hkv, L]. Travels with the key tensor. lag: how far
    [B, 1, 1] the newest tokens stand from their true positions, or None."""

    layer: OracleLayer
    visible: Tensor
    bias: Tensor
    fresh: bool = True
    lag: Tensor | None = None


class OracleLayer(DynamicLayer):
    """Every key and value that ever came, and what the plan did to each."""

    def __init__(self, owner: OracleCache, index: int, window: int | None, plan: list[Decision]) -> None:
        super().__init__()
        self.owner, self.index, self.is_sliding = owner, index, window is not None
        self.window = window or sys.maxsize
        self.plan = [decision for decision in plan if decision.layer == index]
        self.visible = self.bias = self.counts = torch.empty(0)
        self.rounded = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new, lag = torch.ones(key_states.shape[:3]), None
        if not self.is_initialized:
            self.visible, self.bias, self.counts = new[..., :0] > 0, new[..., :0], new[..., :0]
        elif self.owner.policy.renumbers:
            lag = self.owner.lag(self)
            key_states = self.owner.rotator.turn(key_states, lag, self.index)
        self.visible = torch.cat([self.visible, new > 0], -1)
        self.bias = torch.cat([self.bias, new * 0], -1)
        self.counts = torch.cat([self.counts, new], -1)
        if self.owner.hidden is not None:
            self.visible[..., : self.owner.hidden.shape[-1]] &= ~self.owner.hidden
        if self.rounded:
            key_states, value_states = to_int8_and_back(key_states), to_int8_and_back(value_states)
        super().update(key_states, value_states)
        self._show(fresh=True, lag=lag)
        return self.keys, self.values

    def _show(self, fresh: bool, lag: Tensor | None = None) -> None:
        self.keys._oracle = Seen(self, self.visible, self.bias, fresh, lag)

    def act(self) -> None:
        """Do what the plan says for this moment, if anything."""
        while self.plan and self.plan[0].seen == self.keys.shape[2]:
            answer = self.plan.pop(0).answer
            # Layers that share these keys keep what they were handed.
            self.keys, self.values, self.visible = self.keys.clone(), self.values.clone(), self.visible.clone()
            self.bias, self.counts = self.bias.clone(), self.counts.clone()
            if isinstance(answer, Keep):
                self._keep(answer)
                if self.owner.policy.hides_tokens and self is self.owner.layers[0]:
                    self.owner.hidden = ~self.visible[:, :1]
                    self.owner.hidden[..., -1] = False  # the next token is read off its state
            else:
                self._evict(answer)
            if self.rounded:
                self._round()
            self._show(fresh=False)  # layers that hold pictures are read again as they are
        if self.owner.int8_from == self.keys.shape[2] or (self.owner.int8_from and self.index in self.owner.cross):
            self._round()
            self._show(fresh=False)

    def _round(self) -> None:
        """Hold from now on what int8 can hold."""
        self.keys, self.values, self.rounded = to_int8_and_back(self.keys), to_int8_and_back(self.values), True

    def _keep(self, told: Keep) -> None:
        before = self.visible.clone()
        self.visible[:] = False
        for row, head, entry, column in self._each(told.index):
            self.visible[row, head, column] = before[row, head, column]
            shared = min(head, told.index.shape[1] - 1)
            if told.keys is not None:
                self.keys[row, head, column] = told.keys[row, head, entry]
            if told.values is not None:
                self.values[row, head, column] = told.values[row, head, entry]
            if told.counts is not None:
                self.counts[row, head, column] = told.counts[row, min(shared, told.counts.shape[1] - 1), entry]
            if told.bias is not None:
                self.bias[row, head, column] = told.bias[row, min(shared, told.bias.shape[1] - 1), entry]

    def _evict(self, told: Evict) -> None:
        for row, head, entry, column in self._each(told.slots):
            if told.into is not None:
                target = told.into[row, min(head, told.into.shape[1] - 1), entry]
                own, weight = self.counts[row, head, target], self.counts[row, head, column]
                for held in (self.keys, self.values):
                    mixed = held[row, head, target] * own + held[row, head, column] * weight
                    held[row, head, target] = mixed / (own + weight)
                self.counts[row, head, target] = own + weight
        if told.rewrite is not None:
            for row, head, entry, column in self._each(told.rewrite[0]):
                self.keys[row, head, column] = told.rewrite[1][row, head, entry]
        for row, head, _, column in self._each(told.slots):
            self.visible[row, head, column] = False

    def _each(self, told: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """(row, KV head, place in the answer, column) of everything named in [B, P, n]."""
        spread = told.expand(-1, self.keys.shape[1], -1)
        for row, head, entry in (spread >= 0).nonzero().tolist():
            yield row, head, entry, int(spread[row, head, entry])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def _map(self, rows: Any) -> None:
        if self.is_initialized:
            self.visible, self.bias, self.counts = rows(self.visible), rows(self.bias), rows(self.counts)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map(lambda t: t[beam_idx])
        self._show(fresh=False)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self._map(lambda t: t[..., : -abs(tokens_to_remove)])


class OracleCache(Cache):
    """The stock layout with plain layers where the engine has its own.

    padding: of each row of the first prompt. hidden: bool [B, 1, L], columns that left the hidden states of all layers
    after the first, which is the same as being invisible there. int8_from: columns after which everything is rounded to
    what int8 holds, None for never.
    """

    def __init__(
        self,
        config: Any,
        plan: list[Decision],
        policy: Policy | None = None,
        padding: Sequence[int] = (),
        rotator: Any = None,
        int8_from: int | None = None,
    ) -> None:
        self.int8_from = int8_from
        self.policy, self.padding, self.rotator = policy or Full(), padding, rotator
        self.hidden: Tensor | None = None
        layers: list[Any] = []
        self.cross = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
        for index, stock in enumerate(DynamicCache(config=config).layers):
            plain = type(stock) in (DynamicLayer, DynamicSlidingWindowLayer)
            layers.append(OracleLayer(self, index, getattr(stock, "sliding_window", None), plan) if plain else stock)
        super().__init__(layers=layers)

    def lag(self, layer: OracleLayer) -> Tensor:
        """Where tokens are numbered by the entries held: [B, 1, 1], the number of entries less the true position."""
        rows = layer.visible.shape[0]
        padding = torch.tensor(self.padding).repeat_interleave(rows // len(self.padding))
        length = layer.visible.shape[-1]
        held = layer.visible[..., max(0, length - layer.window + 1) :].sum(-1).amax(-1)
        return (held + padding - length).clamp(max=0)[:, None, None]

    def crop(self, tokens_to_remove: int) -> None:
        """Layers that hold pictures beside the text lose nothing."""
        for index, layer in enumerate(self.layers):
            if index not in self.cross:
                layer.crop(tokens_to_remove)

    def done(self) -> bool:
        """Whether the whole plan was carried out."""
        return not any(layer.plan for layer in self.layers if isinstance(layer, OracleLayer))


def to_int8_and_back(entries: Tensor) -> Tensor:
    """Whole multiples, -127 to 127, of a float32 scale for each row, head and column."""
    scale = (entries.abs().amax(-1, keepdim=True) / 127).float()
    return ((entries / scale).nan_to_num().round() * scale).to(entries.dtype)  # nan: nothing but zeros, as padding


def oracle_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(Q K^T) V over all columns, with -inf wherever the model's mask or the plan says no."""
    seen: Seen | None = getattr(key, "_oracle", None)
    if seen is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if seen.lag is not None:
        query = seen.layer.owner.rotator.turn(query, seen.lag, seen.layer.index)
    group = query.shape[1] // key.shape[1]
    keys, values, visible, bias = (
        t.repeat_interleave(group, 1) for t in (key, value, seen.visible[:, :, None], seen.bias[:, :, None])
    )
    logits = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    allowed = visible  # without a mask, which only a picture beside the text comes without
    if attention_mask is not None:
        allowed = (attention_mask > torch.finfo(attention_mask.dtype).min / 2) & visible
    weights = torch.softmax((logits + bias).masked_fill(~allowed, -torch.inf), -1).nan_to_num()  # nan: padding rows
    if seen.fresh:
        seen.fresh = False
        seen.layer.act()
    return (weights.to(values.dtype) @ values).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, oracle_attention)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def routed(model: Any) -> Iterator[None]:
    """Attention of the text model through the oracle inside the block."""
    nested = "text_config" in model.config.sub_configs
    text = model.config.text_config if nested else model.config
    before = text._attn_implementation
    deltas = {m: m.rope_deltas for m in model.modules() if "rope_deltas" in vars(m)}
    model.set_attn_implementation({"text_config" if nested else "": NAME})
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config" if nested else "": before})
        for module, value in deltas.items():
            module.rope_deltas = value


# --- running both


@dataclass
class Result:
    """tokens: int64 [B, L]. logits: [steps, rows, vocabulary]."""

    tokens: Tensor
    logits: Tensor
    cache: Any


def prompt_of(tiny: architectures.Tiny, steps: int) -> Prompt:
    """What a session would announce for the inputs of a tiny model."""
    ids, mask = tiny.inputs["input_ids"], tiny.inputs["attention_mask"].bool()
    return Prompt(mask, ids == tiny.image_token, tuple(mask.sum(1).tolist()), steps)


def compressed(
    tiny: architectures.Tiny, policy: Policy, steps: int = 8, *, int8: bool = False, **options: Any
) -> Result:
    """One run through the engine."""
    rotator = Rotator(tiny.model) if policy.needs_rotation else None
    cache = KVCache(tiny.model.config, policy, rotator, int8)
    cache.announce(prompt_of(tiny, steps))
    with attached(tiny.model, cache):
        return generate(tiny, cache, steps, **options)


def replayed(
    tiny: architectures.Tiny,
    plan: list[Decision],
    steps: int = 8,
    policy: Policy | None = None,
    *,
    int8: bool = False,
    **options: Any,
) -> Result:
    """The same run through the oracle. policy: asked only whether it hides or renumbers tokens."""
    rotator = Rotator(tiny.model) if policy is not None and policy.renumbers else None
    padding = (tiny.inputs["attention_mask"] == 0).sum(-1).tolist()
    int8_from = tiny.inputs["input_ids"].shape[1] if int8 else None
    cache = OracleCache(tiny.model.config, plan, policy, padding, rotator, int8_from)
    with routed(tiny.model):
        result = generate(tiny, cache, steps, **options)
    assert cache.done(), "the oracle did not reach the end of the plan"
    return result


@torch.inference_mode()
def generate(tiny: architectures.Tiny, cache: Any, steps: int, **options: Any) -> Result:
    """Stock `generate` over a cache."""
    told = {"max_new_tokens": steps, "return_dict_in_generate": True, "output_logits": True}
    out = tiny.model.generate(**{**tiny.inputs, **tiny.generate_kwargs, **told, **options}, cache=cache)
    assert out.cache is cache, "the library replaced the cache"
    return Result(out.sequences, torch.stack(out.logits), cache)


def difference(ours: Result, reference: Result) -> float:
    """Largest difference of logits as a share of the largest logit; tokens must be the same."""
    assert torch.equal(ours.tokens, reference.tokens), "the tokens differ"
    return float((ours.logits - reference.logits).abs().max() / reference.logits.abs().max())


def error(tiny: architectures.Tiny, policy: Policy, steps: int = 8, **options: Any) -> float:
    """How far the engine is from the oracle under one policy; 1e-5 at most in float32."""
    told, plan = recorded(policy)
    ours = compressed(tiny, told, steps, **options)
    return difference(ours, replayed(tiny, plan, steps, policy, **options))
