"""The vision tower of the built-in model: EfficientNet-Lite0 and a small neck that turns a picture into 576 tokens.

Knows pixels and features. Knows nothing of files, training or the language model, except the width of its embeddings.

Trunk: Tan and Le, "EfficientNet" (2019), in the Lite0 form (no squeeze-and-excite, ReLU6). Two of its maps are used:
stride 16 (112 channels, where things are) and stride 32 (1280 features, what they are).

Neck: every cell of the 24 x 24 grid gets `mlp(features) + words + words of the whole picture`. The words are the cell's
class probabilities (sharpened: a cell of a larger picture is less sure than a whole one) times one word embedding per
class, so that a class which the captions of the training photos never use keeps its name. Those of the whole picture
are of the mean of all cells, which is what the classifier was made for: where its cells waver, it is often sure.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

# expand, output channels, repeats, kernel, stride of the first block
STAGES = (
    (1, 16, 1, 3, 1),
    (6, 24, 2, 3, 2),
    (6, 40, 2, 5, 2),
    (6, 80, 3, 3, 2),
    (6, 112, 3, 5, 1),
    (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
)
STEM, FINE, COARSE, CLASSES = 32, 112, 1280, 1000
DROPOUT = 0.3  # share of the neck's inner features that a picture goes without while training
WORDS_ONLY = 0.15  # share of the pictures that training shows by their words alone


class TowerConfig(PretrainedConfig):
    """`hidden_size` is the width of one token, `neck_size` that of the neck's hidden layer."""

    model_type = "kvcli_tower"

    def __init__(
        self,
        image_size: int = 384,
        patch_size: int = 16,
        hidden_size: int = 576,
        neck_size: int = 1024,
        **kwargs: object,
    ) -> None:
        self.image_size = image_size
        self.patch_size = patch_size
        self.hidden_size = hidden_size
        self.neck_size = neck_size
        super().__init__(**kwargs)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
    ]
    return nn.Sequential(*layers, nn.ReLU6()) if act else nn.Sequential(*layers)


class Block(nn.Module):
    """Inverted residual: widen, depthwise convolution, project."""

    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expand
        self.expand = _conv(inputs, width, 1) if expand > 1 else nn.Identity()
        self.depthwise = _conv(width, width, kernel, stride, groups=width)
        self.project = _conv(width, outputs, 1, act=False)
        self.residual = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class Trunk(nn.Module):
    """EfficientNet-Lite0 without its pooling: pixels to a fine and a coarse map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, STEM, 3, 2)
        self.stages = nn.ModuleList()
        inputs = STEM
        for expand, outputs, repeats, kernel, stride in STAGES:
            blocks = [
                Block(outputs if i else inputs, outputs, expand, kernel, 1 if i else stride) for i in range(repeats)
            ]
            self.stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.head = _conv(inputs, COARSE, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, 3, H, W]`, (pixel - 127) / 128, to `[B, 112, H/16, W/16]` and `[B, 1280, H/32, W/32]`."""
        x = self.stem(pixels)
        for stage in self.stages[:5]:
            x = stage(x)
        fine = x
        for stage in self.stages[5:]:
            x = stage(x)
        return fine, self.head(x)


class Neck(nn.Module):
    """Fine and coarse map to tokens `[B, cells, hidden]`, on the fine grid, row by row.

    Also takes maps that were pooled by the same factor, which is how most of the training runs, and there another
    coarse map for the words: `told`.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.fine_mean: Tensor
        self.fine_std: Tensor
        self.coarse_mean: Tensor
        self.coarse_std: Tensor
        self.sharpness = nn.Parameter(torch.tensor(2.0))
        self.gain = nn.Parameter(torch.tensor(10.0))
        self.whole_sharpness = nn.Parameter(torch.tensor(2.0))
        self.whole_gain = nn.Parameter(torch.tensor(4.0))
        for name, size in (("fine", FINE), ("coarse", COARSE)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.classifier = nn.Linear(COARSE, CLASSES)
        self.words = nn.Linear(CLASSES, hidden, bias=False)
        self.fine = nn.Linear(FINE, width, bias=False)
        self.coarse = nn.Linear(COARSE, width)
        self.out = nn.Linear(width, hidden)

    def forward(self, fine: Tensor, coarse: Tensor, told: Tensor | None = None) -> Tensor:
        cells = coarse.flatten(2).transpose(1, 2)
        named = cells if told is None else told.flatten(2).transpose(1, 2)
        chances = (self.sharpness * self.classifier(named).float()).softmax(-1)
        words = self.gain * self.words(chances.to(cells.dtype))
        chances = (self.whole_sharpness * self.classifier(named.mean(1, keepdim=True)).float()).softmax(-1)
        whole = self.whole_gain * self.words(chances.to(cells.dtype))
        inner = self.coarse((cells - self.coarse_mean) / self.coarse_std)
        both = torch.cat([inner, words], -1).transpose(1, 2).reshape(len(cells), -1, *coarse.shape[2:])
        both = nn.functional.interpolate(both, size=fine.shape[2:], mode="bilinear", align_corners=False)
        inner, words = torch.split(both.flatten(2).transpose(1, 2), [inner.shape[-1], words.shape[-1]], -1)
        edges = (fine.flatten(2).transpose(1, 2) - self.fine_mean) / self.fine_std
        inner = nn.functional.gelu(inner + self.fine(edges))
        if self.training:  # whole channels (Tompson et al., 2015), or the other cells would tell what is missing
            inner = inner * nn.functional.dropout(torch.ones_like(inner[:, :1]), DROPOUT)
            inner = inner * (torch.rand(len(inner), 1, 1, device=inner.device) >= WORDS_ONLY)
        tokens: Tensor = self.out(inner) + words + whole
        return tokens


class Tower(PreTrainedModel):
    """Pixels `[B, 3, 384, 384]` to `hidden_states = (tokens,)`, tokens `[B, 576, hidden_size]`.

    The tokens are the mean over the picture and its mirror image: what it shows is the same, what a convolution makes
    of it by chance is not.
    """

    config_class = TowerConfig
    main_input_name = "pixel_values"
    base_model_prefix = "tower"

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        self.trunk = Trunk()
        self.neck = Neck(config.hidden_size, config.neck_size)
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutput:
        tokens = (self._tokens(pixel_values) + self._mirrored(pixel_values)) / 2
        return BaseModelOutput(last_hidden_state=tokens, hidden_states=(tokens,))

    def _tokens(self, pixels: Tensor) -> Tensor:
        tokens: Tensor = self.neck(*self.trunk(pixels))
        return tokens

    def _mirrored(self, pixels: Tensor) -> Tensor:
        """What `_tokens` sees of the same places in the mirror image.

        A cell lies around the first pixel of its patch: the mirror image is shifted by the others, or its cells would
        lie around the last. The coarse cells can't be shifted as well: those of one image lie half a patch to the left
        of where they are interpolated from, those of the other as far to the right.
        """
        beside = self.config.patch_size - 1
        shifted = nn.functional.pad(pixels[..., : pixels.shape[-1] - beside].flip(-1), (0, beside))
        side = self.config.image_size // self.config.patch_size
        return self._tokens(shifted).view(len(pixels), side, side, -1).flip(2).flatten(1, 2)


def trunk_weights(released: dict[str, Tensor]) -> dict[str, Tensor]:
    """The released EfficientNet-Lite0 state dict under the names of `Tower` (trunk and classifier)."""
    units = {"_expand_conv": "expand.0", "_bn0": "expand.1", "_depthwise_conv": "depthwise.0"}
    units |= {"_bn1": "depthwise.1", "_project_conv": "project.0", "_bn2": "project.1"}
    places = [f"{s}.{i}" for s, stage in enumerate(STAGES) for i in range(stage[2])]
    tops = {"_conv_stem": "trunk.stem.0", "_bn0": "trunk.stem.1", "_conv_head": "trunk.head.0"}
    tops |= {"_bn1": "trunk.head.1", "_fc": "neck.classifier"}
    renamed = {}
    for name, value in released.items():
        parts = name.split(".")
        if parts[0] == "_blocks":
            renamed[f"trunk.stages.{places[int(parts[1])]}.{units[parts[2]]}.{parts[3]}"] = value
        else:
            renamed[f"{tops[parts[0]]}.{parts[1]}"] = value
    return renamed
