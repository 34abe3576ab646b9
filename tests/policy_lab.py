"""What the tests of the policies share: views made by hand, runs of tiny models, and a record of what a run showed.

Knows the policy contract and how a cache is driven; holds no policy's rules. Those are written again, as plain loops,
in each test file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import architectures
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

from kvcli.engine.adapter import KVCache, attached
from kvcli.engine.rotary import Rotator
from kvcli.policies.base import Policy
from kvcli.policies.contract import Evict, Keep, LayerView, Prompt

NEW_TOKENS = 12


@dataclass
class Seen:
    """One call of a policy: what it was shown (copied), and what it answered."""

    view: LayerView
    answer: Keep | Evict | None


@dataclass
class Run:
    """One generation: token ids, logits [B, V] of each step, the cache as it was left, scores of beams if any."""

    sequences: Tensor
    logits: list[Tensor]
    cache: KVCache
    scores: list[float] = field(default_factory=list)

    def kept(self, layer: int = 0) -> list[list[list[int]]]:
        """The positions that a layer holds at the end, of each row and head, ascending."""
        located = self.cache.ours[layer].store.located()
        return [[sorted(p for p in head.tolist() if p >= 0) for head in row] for row in located]


@cache
def tiny(name: str, batch: int = 1) -> architectures.Tiny:
    """A tiny model in float64, where equal means equal."""
    return architectures.build(name, batch=batch, dtype=torch.float64)


@cache
def rotator(name: str) -> Rotator:
    return Rotator(tiny(name).model)


def prompt_of(model: architectures.Tiny, new_tokens: int = NEW_TOKENS) -> Prompt:
    ids, real = model.inputs["input_ids"], model.inputs["attention_mask"].bool()
    return Prompt(real, ids == model.image_token, tuple(real.sum(1).tolist()), new_tokens)


def settings(model: architectures.Tiny, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    return {
        **model.inputs,
        **model.generate_kwargs,
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }


def generate(
    model: architectures.Tiny, policy: Policy, new_tokens: int = NEW_TOKENS, processors: Sequence[Any] = (), **more: Any
) -> Run:
    """Generation under a policy, greedy unless `more` says otherwise."""
    held = KVCache(model.model.config, policy, rotator(model.name) if policy.needs_rotation else None)
    held.announce(prompt_of(model, new_tokens))
    with torch.inference_mode(), attached(model.model, held):
        out = model.model.generate(
            **settings(model, new_tokens), cache=held, logits_processor=LogitsProcessorList(processors), **more
        )
    assert out.cache is held
    scores = getattr(out, "sequences_scores", None)
    return Run(out.sequences, list(out.logits), held, [] if scores is None else scores.tolist())


@cache
def stock(name: str, batch: int = 1) -> Tensor:
    """The token ids of the library's own greedy generation."""
    model = tiny(name, batch)
    with torch.inference_mode():
        return model.model.generate(**settings(model)).sequences


@cache
def prompt_pass(name: str, batch: int = 1) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The library's own pass over the prompt: attention [B, H, T, T], keys and values [B, Hkv, T, D] of each layer.

    In float32, which its softmax is whatever the model is: compare with a tolerance. Padding holds nonsense.
    """
    model = architectures.build(name, batch=batch)
    model.model.set_attn_implementation("eager")
    cache = DynamicCache()
    with torch.inference_mode():
        out = model.model.generate(**settings(model, 1), output_attentions=True, cache=cache)
    return list(out.attentions[0]), [x.keys for x in cache.layers], [x.values for x in cache.layers]


def recording(policy: Policy) -> tuple[Policy, list[Seen]]:
    """The same policy, keeping a copy of everything it is shown, weights of the newest query included."""
    kind, log = type(policy), list[Seen]()

    class Recording(kind):  # type: ignore[valid-type, misc]
        needs_weights = property(lambda self: True)
        acts_in_decode = property(lambda self: True)

        def compress(self, view: LayerView) -> Keep | None:
            before = copied(view)
            answer = super().compress(view)
            log.append(Seen(before, answer))
            return answer

        def evict(self, view: LayerView) -> Evict | None:
            before = copied(view)
            answer = super().evict(view) if policy.acts_in_decode else None
            log.append(Seen(before, answer))
            return answer

    return Recording(**policy.resolved()), log


def copied(view: LayerView) -> LayerView:
    return replace(
        view,
        keys=view.keys.clone(),
        values=view.values.clone(),
        positions=view.positions.clone(),
        counts=view.counts.clone(),
        statistics={name: t.clone() for name, t in view.statistics.items()},
        state={name: t.clone() for name, t in view.state.items()},
        weights=None if view.weights is None else view.weights.clone(),
    )


def steps_of(log: Sequence[Seen], layer: int) -> list[Seen]:
    """The calls of one layer in order: the prompt first, then each generated token."""
    return [seen for seen in log if seen.view.layer == layer]


# --- views made by hand


def causal(lengths: Sequence[int], heads: int, seed: int = 0) -> Tensor:
    """Random attention [B, H, T, T] over left-padded rows of the given lengths; padding rows hold nonsense."""
    generator = torch.Generator().manual_seed(seed)
    columns = max(lengths)
    logits = torch.randn(len(lengths), heads, columns, columns, generator=generator, dtype=torch.float64) * 2
    visible = torch.ones(columns, columns, dtype=torch.bool).tril()[None] & real_of(lengths)[:, None]
    weights = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return weights.nan_to_num(1 / columns)


def real_of(lengths: Sequence[int]) -> Tensor:
    columns = torch.arange(max(lengths))
    return torch.stack([columns >= max(lengths) - n for n in lengths])


def hand_view(
    lengths: Sequence[int],
    statistics: dict[str, Tensor],
    *,
    kv_heads: int = 2,
    width: int = 4,
    visual: Tensor | None = None,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    layer: int = 0,
    seed: int = 0,
    new_tokens: int = NEW_TOKENS,
) -> LayerView:
    """A view right after a prompt of left-padded rows. positions: [B, P, S] where some entries left before."""
    generator = torch.Generator().manual_seed(100 + seed)
    real = real_of(lengths)
    if positions is None:
        positions = torch.arange(max(lengths)).masked_fill(~real, -1)[:, None]
    shape = (len(lengths), kv_heads, positions.shape[-1], width)
    keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    held = tuple(int(n) for n in (positions >= 0).sum(-1).amax(-1))
    visual = torch.zeros_like(real) if visual is None else visual
    return LayerView(
        layer=layer,
        layers=4,
        keys=keys,
        values=values,
        positions=positions,
        statistics=statistics,
        counts=torch.ones_like(positions, dtype=torch.float32) if counts is None else counts,
        prompt=Prompt(real, visual, tuple(lengths), new_tokens),
        step=0,
        held=held,
        state={},
    )


def positions_of(view: LayerView, keep: Keep) -> list[list[list[int]]]:
    """The positions kept, of each row and head, in the order of the answer."""
    at = view.positions.expand(-1, keep.index.shape[1], -1).gather(-1, keep.index.clamp(min=0))
    return [
        [[int(p) for p, i in zip(ps, ix, strict=True) if i >= 0] for ps, ix in zip(*both, strict=True)]
        for both in zip(at.tolist(), keep.index.tolist(), strict=True)
    ]
