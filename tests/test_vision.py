"""Boxes of visual tokens, proved by perturbation: change a small square and see which visual tokens move.

The tower's attention and feed-forward layers are switched off, so that a patch's feature depends on its own
pixels alone. Image processors are the library's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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
        with torch.no_grad():
            return self.look(self.model, self.processor(image, return_tensors="pt"))


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
POSITIONED = by_get_image_features("pixel_values", "image_position_ids")


def cross_states(model: hf.PreTrainedModel, features: dict[str, Any]) -> Tensor:
    """What Mllama's cross-attention layers keep."""
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    states: Tensor = model.model.vision_model(**{name: features[name] for name in names}).last_hidden_state
    return states.reshape(-1, states.shape[-1])


def phi4_embeddings(model: hf.PreTrainedModel, features: dict[str, Any]) -> Tensor:
    names = ("image_pixel_values", "image_sizes", "image_attention_mask")
    count = features["tokens"]
    embed = model.model.embed_tokens_extend.image_embed
    filled: Tensor = embed(
        torch.full((1, count), IMAGE), torch.zeros(1, count, 64), *(features[name] for name in names)
    )
    return filled[0]


class Phi4Crops:
    """Phi-4-multimodal's way to cut a picture; the library's own needs a package that few have.

    The picture fills as many squares of 32 as it needs, padding is white and to the right or at the bottom.
    Crops come after a small view of the whole canvas; a mask tells which patches show some picture.
    """

    edge, patch = 32, 8

    def __call__(self, image: Image.Image, return_tensors: str) -> dict[str, Any]:
        columns, rows = (-(-length // self.edge) for length in image.size)
        width, height = columns * self.edge, rows * self.edge
        scale = min(width / image.width, height / image.height)
        used = (int(image.width * scale), int(image.height * scale))
        canvas = Image.new("RGB", (width, height), "white")
        canvas.paste(image.resize(used), (0, 0))
        views = [canvas.resize((self.edge, self.edge))]
        views += [
            canvas.crop((left, top, left + self.edge, top + self.edge))
            for top in range(0, height, self.edge)
            for left in range(0, width, self.edge)
        ]
        mask = torch.ones(height // self.patch, width // self.patch)
        mask[mask.shape[0] - (height - used[1]) // self.patch :] = 0
        mask[:, mask.shape[1] - (width - used[0]) // self.patch :] = 0
        side = self.edge // self.patch
        masks = mask.reshape(rows, side, columns, side).transpose(1, 2).reshape(-1, side, side)
        down, across = (int(count) for count in (mask[::2, 0].sum(), mask[0, ::2].sum()))
        pixels = torch.stack([torch.from_numpy(np.array(view)).permute(2, 0, 1) / 127.5 - 1 for view in views])
        return {
            "image_pixel_values": pixels[None],
            "image_sizes": torch.tensor([[height, width]]),
            "image_attention_mask": torch.cat((torch.ones(1, side, side), masks))[None],
            "tokens": down * (across + 1) + 1 + (side // 2) * (side // 2 + 1),
        }


@dataclass(frozen=True)
class Case:
    """A family, an image processor for it, what to read from the model, and sizes of pictures."""

    model: str
    processor: Any
    look: Callable[[hf.PreTrainedModel, dict[str, Any]], Tensor]
    sizes: tuple[tuple[int, int], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes to the model's configuration."""

    def family(self) -> Family:
        model = local(build(self.model).model)
        for name, value in self.settings.items():
            setattr(model.config, name, value)
        return Family(model, self.processor, self.look)


QWEN = hf.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64})
GLM = hf.Glm4vImageProcessorPil(
    patch_size=8, merge_size=2, size={"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 64 * 64}
)
TILES: dict[str, Any] = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
PAN: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SHORT: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": SMALL}
CASES = {
    "llava cropped": Case("llava_gqa", hf.CLIPImageProcessorPil(**SHORT), PIXELS, ((64, 64), (96, 64), (40, 110))),
    "llava squeezed": Case(
        "llava_gqa", hf.CLIPImageProcessorPil(size=SMALL, do_center_crop=False), PIXELS, ((96, 64),)
    ),
    "llava padded": Case("llava_gqa", hf.LlavaImageProcessorPil(**SHORT, do_pad=True), PIXELS, ((96, 64), (40, 110))),
    "llava with class token": Case(
        "llava_gqa",
        hf.CLIPImageProcessorPil(**SHORT),
        PIXELS,
        ((96, 64),),
        {"vision_feature_select_strategy": "full"},
    ),
    "llava_next": Case(
        "llava_next",
        hf.LlavaNextImageProcessorPil(**SHORT, image_grid_pinpoints=ANYRES),
        SIZED,
        ((96, 64), (60, 40), (40, 90)),
    ),
    "llava_onevision": Case(
        "llava_onevision",
        hf.LlavaOnevisionImageProcessorPil(size=SMALL, image_grid_pinpoints=ANYRES),
        SIZED,
        ((96, 64), (40, 90)),
    ),
    "llava_onevision shrunk": Case(
        "llava_onevision",
        hf.LlavaOnevisionImageProcessorPil(size=SMALL, image_grid_pinpoints=ANYRES),
        SIZED,
        ((96, 96), (90, 60)),
        {"vision_aspect_ratio": "anyres_max_1"},
    ),
    "qwen2_vl": Case("qwen2_vl", QWEN, GRID, ((128, 80),)),
    "qwen2_5_vl": Case("qwen2_5_vl", QWEN, GRID, ((128, 80),)),
    "qwen3_vl": Case("qwen3_vl", QWEN, GRID, ((128, 80),)),
    "qwen3_5": Case("qwen3_5", QWEN, GRID, ((80, 128),)),
    "glm4v": Case("glm4v", GLM, GRID, ((128, 80),)),
    "smolvlm": Case("smolvlm", hf.SmolVLMImageProcessorPil(**TILES), MASKED, ((120, 70),)),
    "smolvlm whole": Case(
        "smolvlm", hf.SmolVLMImageProcessorPil(**TILES, do_image_splitting=False), MASKED, ((120, 70),)
    ),
    "idefics3": Case("idefics3", hf.Idefics3ImageProcessorPil(**TILES), MASKED, ((70, 120),)),
    "internvl": Case(
        "internvl",
        hf.GotOcr2ImageProcessorPil(size=SMALL, crop_to_patches=True, min_patches=1, max_patches=6),
        PIXELS,
        ((120, 70), (50, 140)),
    ),
    "gemma3": Case("gemma3", hf.Gemma3ImageProcessorPil(size=SMALL), PIXELS, ((96, 64),)),
    "gemma3 pan and scan": Case("gemma3", hf.Gemma3ImageProcessorPil(size=SMALL, **PAN), PIXELS, ((120, 60),)),
    "gemma4": Case(
        "gemma4",
        hf.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
        POSITIONED,
        ((120, 70), (60, 130)),
    ),
    "paligemma": Case("paligemma", hf.SiglipImageProcessorPil(size=SMALL), PIXELS, ((96, 64),)),
    "paligemma2": Case("paligemma2", hf.SiglipImageProcessorPil(size=SMALL), PIXELS, ((64, 96),)),
    "mistral3": Case(
        "mistral3",
        hf.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}),
        SIZED,
        ((100, 60),),
    ),
    "llava_pixtral": Case(
        "llava_pixtral",
        hf.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}),
        SIZED,
        ((60, 100),),
    ),
    "phi4_multimodal": Case("phi4_multimodal", Phi4Crops(), phi4_embeddings, ((96, 64), (70, 40), (30, 110))),
    "mllama": Case(
        "mllama",
        hf.MllamaImageProcessorPil(size=SMALL, max_image_tiles=2),
        cross_states,
        ((40, 40), (90, 40), (30, 80)),
    ),
}


def assert_boxes_show_what_moves(
    features: Callable[[Image.Image], Tensor], found: Tensor, size: tuple[int, int]
) -> None:
    """Every token that moves much sees the changed square; every token that sees it well inside moves."""
    random = np.random.default_rng(0)
    width, height = size
    base = random.integers(0, 255, (height, width, 3)).astype(np.uint8)
    before = features(Image.fromarray(base))
    assert len(found) == len(before)
    seen_moving = 0
    for _ in range(POINTS):
        left, top = int(random.integers(0, width - SQUARE)), int(random.integers(0, height - SQUARE))
        changed = base.copy()
        changed[top : top + SQUARE, left : left + SQUARE] ^= 255
        moved = (features(Image.fromarray(changed)) - before).abs().amax(-1)
        at = (left + SQUARE / 2, top + SQUARE / 2)
        inside = holds(found, at, -SQUARE / 2)
        assert bool((moved[inside] > 1e-6).all()), f"{at}: a token whose box holds it did not move"
        if moved.max() > 1e-5:
            seen_moving += 1
            seeing = moved > 0.25 * moved.max()
            assert bool(holds(found, at, BLUR)[seeing].all()), f"{at}: a token moved whose box is elsewhere"
    assert seen_moving > POINTS // 4


def holds(found: Tensor, at: tuple[float, float], margin: float) -> Tensor:
    """Which boxes, grown by `margin` on every side, hold the point."""
    x0, y0, x1, y1 = found.unbind(-1)
    return (x0 - margin <= at[0]) & (at[0] <= x1 + margin) & (y0 - margin <= at[1]) & (at[1] <= y1 + margin)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name, case in CASES.items() for size in case.sizes],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_boxes_of_every_family(name: str, size: tuple[int, int]) -> None:
    family = CASES[name].family()
    count = len(family.features(Image.new("RGB", size)))
    found = boxes(family.model, family.processor, [Image.new("RGB", size)], count)
    assert found is not None
    assert_boxes_show_what_moves(family.features, found[0], size)


@pytest.mark.parametrize(
    ("name", "size", "separators"),
    [
        ("llava cropped", (96, 64), 0),
        ("llava with class token", (96, 64), 1),
        ("llava_next", (96, 64), 6),
        ("phi4_multimodal", (96, 64), 7),
        ("mllama", (90, 40), 2),
    ],
)
def test_only_tokens_that_see_nothing_have_no_box(name: str, size: tuple[int, int], separators: int) -> None:
    family = CASES[name].family()
    count = len(family.features(Image.new("RGB", size)))
    (found,) = boxes(family.model, family.processor, [Image.new("RGB", size)], count) or [torch.empty(0, 4)]
    assert int(found.isnan().all(-1).sum()) == separators
    assert bool((found.isnan().all(-1) == found.isnan().any(-1)).all())


def test_boxes_of_a_real_size() -> None:
    """LLaVA-1.5 cuts the middle square of 640 x 480, resized to 336, in 24 x 24 patches: 20 pixels each."""
    model = build("llava_gqa").model
    model.config.vision_config.patch_size = 14
    processor = hf.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    (found,) = boxes(model, processor, [Image.new("RGB", (640, 480))], 576) or [torch.empty(0, 4)]
    y, x = torch.meshgrid(20.0 * torch.arange(24), 80 + 20.0 * torch.arange(24), indexing="ij")
    torch.testing.assert_close(found, torch.stack([x, y, x + 20, y + 20], -1).reshape(-1, 4), rtol=0, atol=0.5)


def test_pixels_after_the_last_whole_patch_are_seen_by_no_token() -> None:
    """SigLIP's 384 pixels hold 27 patches of 14; the last six pixels on each axis are left out."""
    model = build("llava_onevision").model
    model.config.vision_config.patch_size = 14
    model.config.vision_config.image_size = 384
    model.config.image_grid_pinpoints = [[384, 768]]
    size = {"height": 384, "width": 384}
    processor = hf.LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=[[384, 768]])
    count = 27 * 27 + 27 * (2 * 27 + 1)
    (found,) = boxes(model, processor, [Image.new("RGB", (768, 384))], count) or [torch.empty(0, 4)]
    rows = found[27 * 27 :].reshape(27, 55, 4)
    expected = torch.cat((14.0 * torch.arange(27), 384 + 14.0 * torch.arange(27)))
    torch.testing.assert_close(rows[0, :54, 0], expected, rtol=0, atol=0.8)
    torch.testing.assert_close(rows[0, :54, 2], expected + 14, rtol=0, atol=0.8)


@pytest.mark.parametrize("name", ["llava cropped", "qwen2_5_vl", "llava_next", "smolvlm", "internvl", "mistral3"])
def test_several_pictures_in_a_prompt(name: str) -> None:
    family = CASES[name].family()
    pictures = [Image.new("RGB", size) for size in ((96, 64), (50, 90), (64, 64))]
    counts = [len(family.features(picture)) for picture in pictures]
    together = boxes(family.model, family.processor, pictures, sum(counts))
    assert together is not None
    for picture, count, found in zip(pictures, counts, together, strict=True):
        (alone,) = boxes(family.model, family.processor, [picture], count) or [torch.empty(0, 4)]
        torch.testing.assert_close(found, alone, equal_nan=True)


def test_onevision_sees_several_pictures_whole() -> None:
    family = CASES["llava_onevision"].family()
    pictures = [Image.new("RGB", (96, 64)), Image.new("RGB", (50, 90))]
    features = family.processor([pictures], return_tensors="pt")
    with torch.no_grad():
        tokens = family.model.model.get_image_features(**features, return_dict=True).pooler_output
    found = boxes(family.model, family.processor, pictures, sum(map(len, tokens)))
    assert found is not None
    for picture, box in zip(pictures, found, strict=True):
        assert bool(box[16].isnan().all())
        torch.testing.assert_close(box[15, 2:], torch.tensor(picture.size).float(), rtol=0, atol=0.5)


def test_settings_that_a_processor_gives_its_image_processor_count() -> None:
    """InternVL's processor asks for tiles; its image processor alone would not cut any."""

    @dataclass
    class Processor:
        image_processor: Any
        images_kwargs = {"crop_to_patches": True}  # noqa: RUF012

    plain = hf.GotOcr2ImageProcessorPil(size=SMALL, max_patches=6)
    model, picture = build("internvl").model, Image.new("RGB", (120, 60))
    tiled = boxes(model, Processor(plain), [picture], 12)
    assert tiled is not None
    assert tiled[0][5].tolist() == pytest.approx([90, 0, 120, 30], abs=0.5)
    assert boxes(model, plain, [picture], 12, crop_to_patches=True) is not None
    assert boxes(model, plain, [picture], 12) is None


def test_an_order_that_is_not_known_gives_no_boxes() -> None:
    model, picture = build("llava_gqa").model, Image.new("RGB", (64, 64))
    assert boxes(model, hf.CLIPImageProcessorPil(**SHORT), [picture], 15) is None
    assert boxes(model, lambda image, return_tensors: {"audio": torch.zeros(3)}, [picture], 16) is None


def test_patches_in_another_order_give_no_boxes() -> None:
    """A processor that lists patches column by column, where Qwen's lists squares row by row."""

    class Shuffled:
        merge_size, patch_size = QWEN.merge_size, QWEN.patch_size

        def __call__(self, image: Image.Image, return_tensors: str) -> dict[str, Any]:
            features = QWEN(image, return_tensors=return_tensors)
            _, rows, columns = features["image_grid_thw"][0].tolist()
            pixels = features["pixel_values"]
            pixels = pixels.reshape(rows, columns, -1).transpose(0, 1).reshape(pixels.shape)
            return {**features, "pixel_values": pixels}

    model, picture = build("qwen2_5_vl").model, Image.new("RGB", (128, 80))
    count = len(CASES["qwen2_5_vl"].family().features(picture))
    assert boxes(model, QWEN, [picture], count) is not None
    assert boxes(model, Shuffled(), [picture], count) is None


@pytest.mark.parametrize("name", names("picture"))
def test_visual_tokens_are_found(name: str) -> None:
    tiny: Tiny = build(name, batch=3)
    ids = tiny.inputs["input_ids"]
    expected = torch.zeros_like(ids, dtype=torch.bool) if "cross" in tiny.tags else ids == IMAGE
    assert torch.equal(visual_mask(tiny.model, ids), expected)


def test_frames_of_a_video_are_visual() -> None:
    ids = torch.tensor([[7, VIDEO, VIDEO, 8], [IMAGE, 7, 7, VIDEO]])
    expected = torch.tensor([[False, True, True, False], [True, False, False, True]])
    assert torch.equal(visual_mask(build("qwen2_5_vl").model, ids), expected)


def test_a_text_model_has_no_visual_tokens() -> None:
    assert not visual_mask(build("lfm2").model, torch.tensor([[7, IMAGE, VIDEO]])).any()
