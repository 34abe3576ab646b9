"""Which decoder layers of a model keep a cache, and of what kind: part of the seam with transformers.

Knows configs and the library's own cache layers; nothing of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from kvcli.engine.stored import SCALE


def layout(config: Any) -> list[tuple[str, Any]]:
    """(kind, stock cache layer) for each decoder layer of a model's config."""
    text = config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(text)
    stock = DynamicCache(config=config).layers
    cross = set(getattr(text, "cross_attention_layers", None) or ())
    named = ["cross_attention" if i in cross else kind for i, kind in enumerate(kinds)]
    for kind, layer in zip(named, stock, strict=True):
        layer.holds_picture = kind == "cross_attention"
    return list(zip(named, stock, strict=True))


def compressible(stock: Any) -> bool:
    """Whether our layer can take the place of a stock one."""
    return type(stock) in (DynamicLayer, DynamicSlidingWindowLayer)


def layer_report(config: Any) -> list[tuple[int, str, bool, str]]:
    """(index, kind, compressible, why not) for each decoder layer."""
    report = []
    for index, (kind, stock) in enumerate(layout(config)):
        if compressible(stock):
            why = ""
        elif kind == "dummy":
            why = "reads the keys of an earlier layer, and shrinks with them"
        elif isinstance(stock, LinearAttentionCacheLayerMixin):
            why = "keeps a state of fixed size, not a cache that grows"
        else:
            why = f"its cache is a {type(stock).__name__}"
        report.append((index, kind, not why, why))
    return report


def entry_bytes(config: Any, dtype: torch.dtype, int8: bool = False) -> list[int]:
    """KV bytes of one token in each of our layers, as numbers of a type or as int8; what holds pictures beside
    the text does not grow with it."""
    text = config.get_text_config(decoder=True)
    sizes = []
    for index, (kind, stock) in enumerate(layout(config)):
        if compressible(stock) and kind != "cross_attention":
            layer = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
            heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
            sizes.append(2 * heads * (width + SCALE if int8 else width * dtype.itemsize))
    return sizes


def picture_bytes(config: Any, dtype: torch.dtype) -> list[int]:
    """KV bytes of one picture, at most, in each layer that holds pictures beside the text."""
    text, tower = config.get_text_config(decoder=True), getattr(config, "vision_config", None)
    layers = [index for index, (kind, _) in enumerate(layout(config)) if kind == "cross_attention"]
    if not layers or tower is None:
        return []
    entries = tower.max_num_tiles * ((tower.image_size // tower.patch_size) ** 2 + 1)
    width = text.hidden_size // text.num_attention_heads
    return [2 * entries * text.num_key_value_heads * width * dtype.itemsize for _ in layers]
