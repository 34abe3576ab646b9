"""Which tokens of a prompt are visual, and which box of the picture each of them sees.

Knows how to tell model families apart. In which order their tokens come is in `boxes`, where their pixels
come from in `geometry`. Knows nothing of caches and policies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from kvcli.engine import boxes as order
from kvcli.engine.geometry import Survey, survey, to_pixels

_TOKEN_SETTINGS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def visual_token_ids(config: Any) -> frozenset[int]:
    """Ids of the placeholder tokens whose embeddings are replaced by visual features.

    Empty for models that see pictures in cross-attention layers only.
    """
    if _has_cross_attention(config):
        return frozenset()
    places = (config, getattr(config, "vision_config", None))
    ids = {getattr(place, name, None) for place in places for name in _TOKEN_SETTINGS}
    return frozenset(token for token in ids if isinstance(token, int) and token >= 0)


def visual_mask(model: Any, input_ids: Tensor) -> Tensor:
    """Bool `[B, T]`: which tokens of `input_ids` `[B, T]` are visual."""
    ids = torch.tensor(sorted(visual_token_ids(model.config)), dtype=input_ids.dtype, device=input_ids.device)
    return torch.isin(input_ids, ids)


def boxes(
    model: Any, processor: Any, images: Sequence[Image.Image], visual_tokens: int, **images_kwargs: Any
) -> list[Tensor] | None:
    """The part of its picture that each visual token of one prompt sees.

    Costs three runs of the image processor a picture; depends on nothing but the sizes of the pictures.

    Args:
        model: the vision-language model.
        processor: its processor, or the image processor alone.
        images: the pictures of this prompt, in order.
        visual_tokens: how many visual tokens the prompt has (not used for models with cross-attention).
        images_kwargs: what else the image processor is called with.

    Returns:
        For each picture float32 `[tokens, 4]`, (x0, y0, x1, y1) in its pixels, in the order of the tokens;
        NaN for tokens that see no part of it (separators, class tokens, padding). For models with
        cross-attention one box for each entry of those layers' cache. None if the order is not known.
    """
    image_processor = getattr(processor, "image_processor", processor)
    settings = {**getattr(type(processor), "images_kwargs", {}), **images_kwargs, "return_tensors": "pt"}

    def prepare(picture: Image.Image) -> Mapping[str, Any]:
        features: Mapping[str, Any] = image_processor(picture, **settings)
        return features

    surveys = [survey(prepare, image.size) for image in images]
    for shares in _candidates(model, image_processor, surveys, visual_tokens):
        fits = _has_cross_attention(model.config) or sum(map(len, shares)) == visual_tokens
        if fits and not any(share.isnan().all() for share in shares):
            return [to_pixels(share, image.size) for share, image in zip(shares, images, strict=True)]
    return None


def _candidates(model: Any, image_processor: Any, surveys: Sequence[Survey], visual_tokens: int) -> list[list[Tensor]]:
    """Boxes of every picture, as shares of its size, for each order that the tokens of this model may have."""
    features = surveys[0].features if surveys else {}
    if _has_cross_attention(model.config):
        return [[order.cross_attended(model, seen) for seen in surveys]]
    if "image_grid_thw" in features and hasattr(image_processor, "merge_size"):
        return [[order.merged_patches(image_processor, seen) for seen in surveys]]
    if "image_position_ids" in features:
        return [[order.pooled_patches(image_processor, seen) for seen in surveys]]
    if "image_attention_mask" in features:
        return [[order.crops_then_whole(model, seen) for seen in surveys]]
    if hasattr(getattr(model, "model", None), "pack_image_features"):
        return [[order.packed(model, seen, tiled) for seen in surveys] for tiled in (True, False)]
    if "image_sizes" in features:
        return [[order.any_size(model, seen) for seen in surveys]]
    return order.square_tiles(model, surveys, visual_tokens)


def _has_cross_attention(config: Any) -> bool:
    return bool(getattr(config.get_text_config(), "cross_attention_layers", None))
