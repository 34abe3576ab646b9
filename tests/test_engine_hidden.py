"""Tokens that leave the hidden states after the first layer: equal to masking them in every later layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from architectures import Tiny, build
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from kvcli.engine.adapter import KVCache, attached
from kvcli.errors import UsageError
from kvcli.policies.base import Policy, keep_where
from kvcli.policies.contract import Keep, LayerView, Prompt


@dataclass(frozen=True)
class HideSome(Policy):
    """Drops about a third of the visual tokens, another third in each row."""

    name: ClassVar[str] = "hide-some"

    @property
    def hides_tokens(self) -> bool:
        return True

    def compress(self, view: LayerView) -> Keep:
        kept = view.occupied & ~(view.visual & chosen(view.positions))
        return keep_where(kept, view.positions, kept.sum(-1)[:, 0].tolist())


def chosen(columns: Tensor) -> Tensor:
    return (columns * 7919) % 3 == 0


def masking(dropped: Tensor) -> Any:
    """Plain attention in which `dropped` [B, L] is invisible in later layers, and everywhere while generating."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
        if (cap := kwargs.get("softcap")) is not None:
            logits = torch.tanh(logits / cap) * cap
        rows, columns = logits.shape[-2:]
        if mask is None:
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)[None, None]
        if module.layer_idx > 0 or rows == 1:
            gone = torch.nn.functional.pad(dropped, (0, columns - dropped.shape[1]))
            mask = mask & ~gone[:, None, None]
        weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
        return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    return attention


def generate(tiny: Tiny, cache: Any) -> Any:
    settings = {**tiny.generate_kwargs, "max_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        return tiny.model.generate(
            **tiny.inputs, **settings, cache=cache, return_dict_in_generate=True, output_logits=True
        )


FAMILIES = [
    "llava_gqa",
    "qwen2_5_vl",
    "gemma3",
    "paligemma2",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2_vl", "glm4v", "paligemma", "mistral3", "smolvlm")),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("internvl", "llava_next", "llava_pixtral", "llava_mha")),
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_hiding_equals_masking(name: str, batch: int) -> None:
    tiny = build(name, batch=batch)
    ids, real = tiny.inputs["input_ids"], tiny.inputs["attention_mask"].bool()
    visual = ids == tiny.image_token
    cache = KVCache(tiny.model.config, HideSome())
    cache.announce(Prompt(real, visual, tuple(real.sum(1).tolist()), 8))
    with attached(tiny.model, cache):
        found = generate(tiny, cache)
    dropped = visual & chosen(torch.arange(ids.shape[1]))
    assert dropped.any(), "nothing was dropped, so nothing is proved"
    AttentionInterface.register("masking", masking(dropped))
    AttentionMaskInterface.register("masking", sdpa_mask)
    tiny.model.set_attn_implementation({"text_config": "masking"})
    expected = generate(tiny, DynamicCache())
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert cache.ours[-1].store.extent < cache.ours[-1].store.seen, "later layers should hold survivors only"


@pytest.mark.parametrize("name", ["qwen3_vl", "mllama", "gemma3n"])
def test_models_that_share_more_are_refused(name: str) -> None:
    tiny = build(name)
    with (
        pytest.raises(UsageError, match="hidden states"),
        attached(tiny.model, KVCache(tiny.model.config, HideSome())),
    ):
        pass
