"""The tower of the built-in model: the released trunk, the neck, and the mirror image."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from kvcli.builtin.features import image_processor
from kvcli.builtin.tower import STAGES, Neck, Tower, TowerConfig, trunk_weights


def released_weights(seed: int) -> dict[str, torch.Tensor]:
    """A state dict named and shaped like the released EfficientNet-Lite0, with random numbers."""
    draw = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}

    def conv(name: str, *shape: int) -> None:
        fan = shape[1] * shape[2] * shape[3]
        state[f"{name}.weight"] = torch.randn(shape, generator=draw) * (2 / fan) ** 0.5

    def norm(name: str, size: int) -> None:
        for leaf in ("weight", "running_var"):
            state[f"{name}.{leaf}"] = 0.5 + torch.rand(size, generator=draw)
        for leaf in ("bias", "running_mean"):
            state[f"{name}.{leaf}"] = 0.2 * torch.randn(size, generator=draw)
        state[f"{name}.num_batches_tracked"] = torch.tensor(1)

    conv("_conv_stem", 32, 3, 3, 3)
    norm("_bn0", 32)
    number, inputs = 0, 32
    for expand, outputs, repeats, kernel, _ in STAGES:
        for _ in range(repeats):
            name, width = f"_blocks.{number}", inputs * expand
            if expand > 1:
                conv(f"{name}._expand_conv", width, inputs, 1, 1)
                norm(f"{name}._bn0", width)
            conv(f"{name}._depthwise_conv", width, 1, kernel, kernel)
            norm(f"{name}._bn1", width)
            conv(f"{name}._project_conv", outputs, width, 1, 1)
            norm(f"{name}._bn2", outputs)
            number, inputs = number + 1, outputs
    conv("_conv_head", 1280, 320, 1, 1)
    norm("_bn1", 1280)
    state["_fc.weight"] = torch.randn(1000, 1280, generator=draw) / 36
    state["_fc.bias"] = torch.randn(1000, generator=draw)
    return state


def literal_lite0(w: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """EfficientNet-Lite0 as a table of plain operations: the map after stage 5 and the map before pooling."""

    def unit(x: torch.Tensor, conv: str, bn: str, stride: int, act: bool, depthwise: bool = False) -> torch.Tensor:
        weight = w[f"{conv}.weight"]
        groups = weight.shape[0] if depthwise else 1
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        scale = w[f"{bn}.weight"] / (w[f"{bn}.running_var"] + 1e-3).sqrt()
        shift = w[f"{bn}.bias"] - w[f"{bn}.running_mean"] * scale
        x = x * scale[:, None, None] + shift[:, None, None]
        return x.clamp(0, 6) if act else x

    x = unit(x, "_conv_stem", "_bn0", 2, True)
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    fine = x
    for i, stride in enumerate(strides):
        name, before = f"_blocks.{i}", x
        if i:
            x = unit(x, f"{name}._expand_conv", f"{name}._bn0", 1, True)
        x = unit(x, f"{name}._depthwise_conv", f"{name}._bn1", stride, True, depthwise=True)
        x = unit(x, f"{name}._project_conv", f"{name}._bn2", 1, False)
        if x.shape == before.shape:
            x = x + before
        if i == 10:
            fine = x
    return fine, unit(x, "_conv_head", "_bn1", 1, True)


@torch.no_grad()
def test_the_trunk_is_efficientnet_lite0() -> None:
    weights = {name: value.double() for name, value in released_weights(0).items()}
    tower = Tower(TowerConfig(hidden_size=8, neck_size=4)).double().eval()
    left = tower.load_state_dict(trunk_weights(weights), strict=False)
    pixels = torch.randn(2, 3, 96, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for ours, literal in zip(tower.trunk(pixels), literal_lite0(weights, pixels), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-6, atol=1e-6)
    assert not left.unexpected_keys
    assert all(key.startswith("neck.") for key in left.missing_keys)


@torch.no_grad()
def test_a_tower_gives_576_tokens_row_by_row() -> None:
    tower = Tower(TowerConfig(hidden_size=8, neck_size=4)).eval()
    tower.load_state_dict(trunk_weights(released_weights(0)), strict=False)
    out = tower(torch.randn(1, 3, 384, 384, generator=torch.Generator().manual_seed(1)))
    assert out.hidden_states[-1].shape == (1, 576, 8)
    fine = torch.zeros(1, 112, 24, 24)
    plain = tower.neck(fine, torch.zeros(1, 1280, 12, 12))
    fine[0, :, 3, 5] = 1
    changed = (tower.neck(fine, torch.zeros(1, 1280, 12, 12)) - plain).abs().sum(-1)[0]
    assert changed.nonzero().flatten().tolist() == [3 * 24 + 5]


@torch.no_grad()
def test_the_mirror_image_gives_the_tokens_of_the_same_places() -> None:
    """With kernels that are their own mirror image both give the same, but near the edges."""
    tower = Tower(TowerConfig(hidden_size=8, neck_size=4)).eval()
    tower.load_state_dict(trunk_weights(released_weights(0)), strict=False)
    for module in tower.trunk.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.weight.copy_((module.weight + module.weight.flip(-1)) / 2)
    tower.neck.coarse.weight.zero_()  # a coarse cell is two wide, and lies half of one beside
    tower.neck.words.weight.zero_()
    pixels = torch.randn(1, 3, 384, 384, generator=torch.Generator().manual_seed(1))
    both = tower(pixels).hidden_states[-1].unflatten(1, (24, 24))
    plain = tower.neck(*tower.trunk(pixels)).unflatten(1, (24, 24))
    middle = slice(11, 13)
    assert (plain - plain.mean((1, 2), keepdim=True)).abs().mean() > 1e-3
    torch.testing.assert_close(both[:, :, middle], plain[:, :, middle], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_picture_and_its_mirror_image_weigh_alike() -> None:
    tower = Tower(TowerConfig(hidden_size=8, neck_size=4)).eval()
    tower.load_state_dict(trunk_weights(released_weights(0)), strict=False)
    pixels = torch.randn(1, 3, 384, 384, generator=torch.Generator().manual_seed(1))
    pixels[..., 369:] = 0  # what the shift of the mirror image leaves out
    mirrored = torch.nn.functional.pad(pixels[..., :369].flip(-1), (0, 15))
    there, back = (tower(each).hidden_states[-1].unflatten(1, (24, 24)) for each in (pixels, mirrored))
    torch.testing.assert_close(there, back.flip(2), rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_sure_class_passes_its_word_on() -> None:
    neck = Neck(8, 4)
    torch.nn.init.zeros_(neck.out.weight)
    torch.nn.init.zeros_(neck.out.bias)
    neck.classifier.weight.zero_()
    neck.classifier.bias.zero_()
    neck.classifier.bias[7] = 100
    tokens = neck(torch.zeros(1, 112, 24, 24), torch.zeros(1, 1280, 12, 12))
    torch.testing.assert_close(tokens[0, 100], (neck.gain + neck.whole_gain) * neck.words.weight[:, 7])


@torch.no_grad()
def test_every_cell_hears_what_the_whole_picture_is_taken_for() -> None:
    """Of three classes each half of the picture takes one for its own and another for likely; both know the last."""
    neck = Neck(8, 4)
    torch.nn.init.zeros_(neck.out.weight)
    torch.nn.init.zeros_(neck.out.bias)
    torch.nn.init.zeros_(neck.gain)
    neck.classifier.weight.zero_()
    neck.classifier.bias.zero_()
    neck.classifier.weight[7, 0] = neck.classifier.weight[8, 1] = neck.classifier.weight[9, 2] = 20
    coarse = torch.zeros(1, 1280, 12, 12)
    coarse[0, 0, :, :6] = coarse[0, 1, :, 6:] = 6
    coarse[0, 2] = 5
    tokens = neck(torch.zeros(1, 112, 24, 24), coarse)
    torch.testing.assert_close(tokens, (neck.whole_gain * neck.words.weight[:, 9]).expand_as(tokens))


@torch.no_grad()
def test_some_pictures_are_shown_by_their_words_alone_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.builtin.tower.WORDS_ONLY", 1.0)
    torch.manual_seed(0)
    neck, coarse = Neck(8, 4), torch.rand(1, 1280, 12, 12)
    one, other = torch.zeros(1, 112, 24, 24), torch.ones(1, 112, 24, 24)
    assert not torch.equal(neck.eval()(one, coarse), neck(other, coarse))
    neck.train()
    assert torch.equal(neck(one, coarse), neck(other, coarse))
    assert not torch.equal(neck(one, coarse), neck(one, coarse.flip(1)))


def test_the_neck_trains_on_a_device_that_is_not_the_cpu() -> None:
    neck = Neck(8, 4).to("meta").train()
    tokens = neck(torch.empty(1, 112, 24, 24, device="meta"), torch.empty(1, 1280, 12, 12, device="meta"))
    assert tokens.device.type == "meta"
    assert tokens.shape == (1, 576, 8)


def test_pixels_are_scaled_as_the_tower_was_trained() -> None:
    picture = Image.new("RGB", (50, 31), (127, 255, 0))
    pixels = image_processor()(picture, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 384, 384)
    expected = torch.tensor([0.0, 1.0, -127 / 128])
    torch.testing.assert_close(pixels[0, :, 200, 100], expected, rtol=0, atol=1e-6)
