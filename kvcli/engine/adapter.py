"""The seam with transformers: the attention function that reads our caches, and how a model is lent to a run.

With `kvcache`, `layers` and `layout` the only code that knows the library's internals. `generate` itself stays stock. A
model is prepared for the length of a run by `attached`, which takes back everything it changed.

How a policy gets its turn: the attention function runs right after a layer's `update`, so it is where the statistics
are gathered, where a finished prompt is compressed, and where entries leave while generating. Phases are announced
(`KVCache.announce`), never guessed: a later turn and a chunk of a prompt also come with several queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcli.engine.attention import attend
from kvcli.engine.coordinates import locating
from kvcli.engine.hidden import hiding, survivors
from kvcli.engine.kvcache import KVCache
from kvcli.engine.layers import Handle, KVLayer, PictureLayer
from kvcli.engine.layout import entry_bytes, layer_report, picture_bytes
from kvcli.engine.masks import physical_mask
from kvcli.engine.run import Turn
from kvcli.engine.stored import read
from kvcli.errors import StartError

__all__ = ["KVCache", "after_attention", "attached", "entry_bytes", "layer_report", "picture_bytes"]

NAME = "kvcli"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a run: ours where the keys come from a `KVLayer`, stock everywhere else."""
    handle: Handle | None = getattr(key, "_kvcli", None)
    if handle is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return output, None
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise StartError(f"{type(module).__name__} uses learned attention sinks or biases, which kvcli does not serve")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if key.dtype == torch.int8 and query.shape[2] > 1:  # a later prompt, whose blocks of queries read all of it again
        key, value = read(key, query.dtype), read(value, query.dtype)
    if handle.lag is not None:
        query = handle.layer.owner.turned(query, handle.lag, handle.layer.index)
    owner, handle.fresh = handle.fresh, False
    cache, turn = handle.layer.owner, None
    if isinstance(handle.layer, PictureLayer):
        turn = cache.picture_turn(handle.layer, attention_mask) if owner else None
        if attention_mask is None and handle.positions is not None:
            attention_mask = query.new_ones(1, 1, query.shape[2], handle.seen, dtype=torch.bool)  # all of the picture
        elif attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask > torch.finfo(attention_mask.dtype).min / 2
    elif owner:
        turn = cache.turn(handle.layer)
    if turn is not None:
        turn.columns = handle.columns
    softcap = kwargs.get("softcap")
    plain = handle.positions is None and handle.bias is None and softcap is None and query.shape[2] > 1
    if plain and (turn is None or not turn.wants_all_rows):
        # A first prompt without statistics over all rows: exactly the library's own arithmetic.
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        if turn is not None:
            turn.observe(query, key, attention_mask, scale)
    else:
        mask = physical_mask(
            attention_mask, handle.positions, handle.holes, query.shape[2], handle.seen, handle.columns
        )
        run = attend if turn is None else turn.attend
        output = run(query, key, value, mask, scale, softcap=softcap, bias=handle.bias)
        output = output.transpose(1, 2).contiguous()
    if owner and turn is not None:
        after_attention(handle.layer, turn, query.shape[2], handle.columns)
    return output, None


def after_attention(layer: KVLayer, turn: Turn, queries: int, columns: Tensor | None) -> None:
    """Let the policy act on a layer whose attention is done."""
    cache = layer.owner
    if columns is not None and layer is cache.ours[-1]:
        cache.survivors = None
    if turn.prompt_ends_now:
        _compress(layer, turn)
        if cache.policy.hides_tokens and layer is cache.ours[0]:
            cache.survivors = survivors(layer.store.located(), layer.store.seen - queries, queries)
    elif turn.step > 0:
        cache.slide(turn, queries)
        if queries == 1 and cache.policy.acts_in_decode:
            turn.evict()


def _compress(layer: KVLayer, turn: Turn) -> None:
    """What the policy says at the end of a prompt: layer by layer, or after the last one for all that are alike."""
    cache, done = layer.owner, [layer]
    if not cache.policy.served_at_once:
        turn.apply(cache.policy.compress(turn.view()))
    else:
        alike: Sequence[KVLayer] = cache.pictures if isinstance(layer, PictureLayer) else cache.ours
        if layer is not alike[-1]:
            return
        done = [each for each in alike if each.turn is not None]
        turns = [each.turn for each in done if each.turn is not None]
        for each, answer in zip(turns, cache.policy.compress_model([t.view() for t in turns]), strict=True):
            each.apply(answer)
    for changed in done:
        if cache.int8:
            changed.store.quantise()
        cache.account(changed)
        if isinstance(changed, PictureLayer):
            changed.read_again()
        else:
            changed.keys, changed.values = changed.store.view()  # what was shown to the model is let go of


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def attached(model: Any, cache: KVCache | None = None) -> Iterator[None]:
    """Route the text model's attention through kvcli inside the block; leave the model as it was found."""
    nested = "text_config" in model.config.sub_configs
    text = model.config.text_config if nested else model.config
    before = text._attn_implementation
    deltas = {m: m.rope_deltas for m in model.modules() if "rope_deltas" in vars(m)}
    model.set_attn_implementation({"text_config" if nested else "": NAME})
    try:
        with hiding(model, cache), locating(model, cache):
            yield
    finally:
        model.set_attn_implementation({"text_config" if nested else "": before})
        for module, value in deltas.items():
            module.rope_deltas = value
