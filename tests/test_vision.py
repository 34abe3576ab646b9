"""Boxes of visual tokens, proved by perturbation: change a small square and see which visual tokens move.

The tower's attention and feed-forward layers are switched off, so that a patch's feature depends on its own
pixels alone. Image processors are the library's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import IMAGE, VIDEO, Tiny, build, names
from PIL import Image
from torch import Tensor

from kvcli.engine.vision import boxes, visual_mask

SQUARE = 3
"""Edge of the square that is changed, in pixels."""
BLUR = 3.5
"""How far from the square's centre, in pixels, a resampling filter may still show it."""
POINTS = 20
SMALL = {"height": 32, "width": 32}
TOWER_OUTPUTS = ("out_proj", "fc2", "attn.proj", "linear_fc2", "down_proj", "o_proj", "projection_layer")


@dataclass(frozen=True)
class Family:
    """A tiny model whose tower is local, an image processor for it, and how the two make features."""

    model: hf.PreTrainedModel
    processor: Any
    look: Callable[[hf.PreTrainedModel, dict[str, Any]], Tensor]

    def features(self, image: Image.Image) -> Tensor:
        """`[visual tokens, width]`, in the order in which the model puts them into the prompt."""
        settings = getattr(type(self.processor), "images_kwargs", {})
        image_processor = getattr(self.processor, "image_processor", self.processor)
        with torch.no_grad():
            return self.look(self.model, image_processor(image, return_tensors="pt", **settings))


def by_get_image_features(*keys: str) -> Callable[[hf.PreTrainedModel, dict[str, Any]], Tensor]:
    def look(model: hf.PreTrainedModel, features: dict[str, Any]) -> Tensor:
        output = model.model.get_image_features(**{key: features[key] for key in keys}, return_dict=True)
        found = output.pooler_output
        found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
        return found.reshape(-1, found.shape[-1])

    return look


def local(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """The model with a vision tower in which no patch sees another."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            in_block = "language_model" not in name and ("blocks." in name or "layers." in name)
            if in_block and any(part in name for part in TOWER_OUTPUTS):
                parameter.zero_()
    return model


ANYRES = [[32, 64], [64, 32], [64, 64]]
PIXELS = by_get_image_features("pixel_values")
SIZED = by_get_image_features("pixel_values", "image_sizes")
GRID = by_get_image_features("pixel_values", "image_grid_thw")
MASKED = by_get_image_features("pixel_values", "pixel_attention_mask")


def family(name: str) -> Family:
    """The families by name; a suffix after "/" chooses other settings of the image processor."""
    model = local(build(name.split("/")[0]).model)
    qwen = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    tiles = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    pixtral = {"size": {"longest_edge": 64}}
    pan = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    known: dict[str, tuple[Callable[[], Any], Any]] = {
        "llava_gqa": (lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SMALL), PIXELS),
        "llava_gqa/no crop": (lambda: hf.CLIPImageProcessorPil(size=SMALL, do_center_crop=False), PIXELS),
        "llava_gqa/padded": (
            lambda: hf.LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=SMALL, do_pad=True),
            PIXELS,
        ),
        "llava_next": (
            lambda: hf.LlavaNextImageProcessorPil(
                size={"shortest_edge": 32}, crop_size=SMALL, image_grid_pinpoints=ANYRES
            ),
            SIZED,
        ),
        "llava_onevision": (
            lambda: hf.LlavaOnevisionImageProcessorPil(size=SMALL, image_grid_pinpoints=ANYRES),
            SIZED,
        ),
        "qwen2_vl": (lambda: hf.Qwen2VLImageProcessorPil(**qwen), GRID),
        "qwen2_5_vl": (lambda: hf.Qwen2VLImageProcessorPil(**qwen), GRID),
        "qwen3_vl": (lambda: hf.Qwen2VLImageProcessorPil(**qwen), GRID),
        "qwen3_5": (lambda: hf.Qwen2VLImageProcessorPil(**qwen), GRID),
        "glm4v": (
            lambda: hf.Glm4vImageProcessorPil(
                patch_size=8, merge_size=2, size={"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64 * 2}
            ),
            GRID,
        ),
        "smolvlm": (lambda: hf.SmolVLMImageProcessorPil(**tiles), MASKED),
        "smolvlm/whole": (lambda: hf.SmolVLMImageProcessorPil(**tiles, do_image_splitting=False), MASKED),
        "idefics3": (lambda: hf.Idefics3ImageProcessorPil(**tiles), MASKED),
        "internvl": (
            lambda: hf.GotOcr2ImageProcessorPil(size=SMALL, crop_to_patches=True, min_patches=1, max_patches=6),
            PIXELS,
        ),
        "gemma3": (lambda: hf.Gemma3ImageProcessorPil(size=SMALL), PIXELS),
        "gemma3/pan and scan": (lambda: hf.Gemma3ImageProcessorPil(size=SMALL, **pan), PIXELS),
        "paligemma": (lambda: hf.SiglipImageProcessorPil(size=SMALL), PIXELS),
        "paligemma2": (lambda: hf.SiglipImageProcessorPil(size=SMALL), PIXELS),
        "mistral3": (
            lambda: hf.PixtralImageProcessorPil(**pixtral, patch_size={"height": 16, "width": 16}),
            SIZED,
        ),
        "llava_pixtral": (
            lambda: hf.PixtralImageProcessorPil(**pixtral, patch_size={"height": 8, "width": 8}),
            SIZED,
        ),
    }
    make, look = known[name]
    return Family(model, make(), look)


CASES = [
    ("llava_gqa", (64, 64)),
    ("llava_gqa", (96, 64)),
    ("llava_gqa", (40, 110)),
    ("llava_gqa/no crop", (96, 64)),
    ("llava_gqa/padded", (96, 64)),
    ("llava_next", (96, 64)),
    ("llava_next", (60, 40)),
    ("llava_next", (40, 90)),
    ("llava_onevision", (96, 64)),
    ("llava_onevision", (40, 90)),
    ("qwen2_vl", (128, 80)),
    ("qwen2_5_vl", (128, 80)),
    ("qwen3_vl", (128, 80)),
    ("qwen3_5", (80, 128)),
    ("glm4v", (128, 80)),
    ("smolvlm", (120, 70)),
    ("smolvlm/whole", (120, 70)),
    ("idefics3", (70, 120)),
    ("internvl", (120, 70)),
    ("internvl", (50, 140)),
    ("gemma3", (96, 64)),
    ("gemma3/pan and scan", (120, 60)),
    ("paligemma", (96, 64)),
    ("paligemma2", (64, 96)),
    ("mistral3", (100, 60)),
    ("llava_pixtral", (60, 100)),
]


def assert_boxes_show_what_moves(
    features: Callable[[Image.Image], Tensor], found: Tensor, size: tuple[int, int]
) -> None:
    """Every token that moves much sees the changed square; every token that sees it well inside moves."""
    random = np.random.default_rng(0)
    width, height = size
    base = random.integers(0, 255, (height, width, 3)).astype(np.uint8)
    before = features(Image.fromarray(base))
    assert len(found) == len(before)
    for _ in range(POINTS):
        left, top = int(random.integers(0, width - SQUARE)), int(random.integers(0, height - SQUARE))
        changed = base.copy()
        changed[top : top + SQUARE, left : left + SQUARE] ^= 255
        moved = (features(Image.fromarray(changed)) - before).abs().amax(-1)
        at = (left + SQUARE / 2, top + SQUARE / 2)
        inside = holds(found, at, -SQUARE / 2)
        assert bool((moved[inside] > 1e-6).all()), f"{at}: a token whose box holds it did not move"
        if moved.max() > 1e-5:
            seeing = moved > 0.25 * moved.max()
            assert bool(holds(found, at, BLUR)[seeing].all()), f"{at}: a token moved whose box is elsewhere"
        else:
            assert not inside.any()


def holds(found: Tensor, at: tuple[float, float], margin: float) -> Tensor:
    """Which boxes, grown by `margin` on every side, hold the point."""
    x0, y0, x1, y1 = found.unbind(-1)
    return (x0 - margin <= at[0]) & (at[0] <= x1 + margin) & (y0 - margin <= at[1]) & (at[1] <= y1 + margin)


@pytest.mark.parametrize(("name", "size"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_boxes_of_every_family(name: str, size: tuple[int, int]) -> None:
    one = family(name)
    count = len(one.features(Image.new("RGB", size)))
    found = boxes(one.model, one.processor, [Image.new("RGB", size)], count)
    assert found is not None
    assert_boxes_show_what_moves(one.features, found[0], size)
