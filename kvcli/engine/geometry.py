"""Where the pixels that a vision tower gets come from in the original picture.

Knows how to find this out for any image processor, whatever it resizes, crops, pads or cuts in tiles: it
sends three pictures of the same size through it, a black one, a white one and one whose colours say where a
pixel is. Black and white tell padding from picture and undo any normalisation. Knows no model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

_PIXELS = ("pixel_values", "image_pixel_values")
_LOW, _HIGH, _NOISE = 24, 231, 6
"""Values that stand for the two borders of a picture, and noise (plus or minus) that undoes rounding to bytes."""
_ASTRAY = 0.3
"""How far pixels may lie off their line, as a share of how far they spread along it."""

Prepare = Callable[[Image.Image], Mapping[str, Any]]
"""An image processor for one picture: its named tensors."""


@dataclass(frozen=True)
class Survey:
    """What an image processor makes of pictures of one size.

    Attributes:
        features: its tensors for such a picture.
        places: shaped like the pixels among `features`. The first colour channel says how far right, the
            second how far down in the original a pixel lies (0 to 1); NaN where it is padding. Empty if no tensor
            of pixels is known by name.
    """

    features: Mapping[str, Any]
    places: Tensor


@dataclass(frozen=True)
class Placement:
    """The straight lines from the pixels of a tile to shares of the original's width and height."""

    across: tuple[float, float]  # slope, start
    down: tuple[float, float]

    def raster(self, rows: int, columns: int, cell: tuple[float, float], corner: tuple[int, int] = (0, 0)) -> Tensor:
        """Boxes `[rows * columns, 4]` (x0, y0, x1, y1) of cells, row by row; padding lies outside 0 to 1.

        `cell` is the (height, width) and `corner` the (top, left) of the first one, in pixels of the tile.
        """
        down = corner[0] + cell[0] * torch.arange(rows + 1, dtype=torch.float64)
        across = corner[1] + cell[1] * torch.arange(columns + 1, dtype=torch.float64)
        y = (self.down[0] * down + self.down[1])[:, None].expand(-1, columns)
        x = (self.across[0] * across + self.across[1])[None].expand(rows, -1)
        return torch.stack([x[:, :-1], y[:-1], x[:, 1:], y[1:]], -1).reshape(-1, 4)


def survey(prepare: Prepare, size: tuple[int, int]) -> Survey:
    """Send the three pictures of `size` (width, height) through `prepare`."""
    pictures = (Image.new("RGB", size, "black"), Image.new("RGB", size, "white"), _coloured(*size))
    features = [prepare(picture) for picture in pictures]
    name = next((name for name in _PIXELS if name in features[0]), None)
    if name is None:
        return Survey(features[-1], torch.empty(0))
    zero, one, value = (torch.as_tensor(made[name]).double() for made in features)
    contrast = one - zero
    inside = contrast.abs() > 0.5 * contrast.abs().max()
    bytes_seen = torch.where(inside, (value - zero) / contrast * 255, torch.nan)
    return Survey(features[-1], (bytes_seen - _LOW) / (_HIGH - _LOW))


def place(tile: Tensor) -> Placement:
    """Fit the lines of a tile `[at least 2, h, w]` of `Survey.places`.

    All NaN if it shows no picture, or pixels that lie on no line: then the tile was put together wrongly.
    """
    return Placement(_line(tile[0].nanmean(0)), _line(tile[1].nanmean(1)))


def to_pixels(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes of shares as float32 pixels of a picture of `size`, cut at its border; NaN where nothing is left."""
    cut = boxes.clamp(0, 1)
    empty = ~((cut[:, 2] > cut[:, 0]) & (cut[:, 3] > cut[:, 1]))
    scale = torch.tensor([*size, *size], dtype=boxes.dtype)
    return (cut * scale).masked_fill(empty[:, None], torch.nan).float()


def _coloured(width: int, height: int) -> Image.Image:
    """Red says how far right the centre of a pixel lies, green how far down; on average over many pixels."""
    across = ((torch.arange(width) + 0.5) / width).expand(height, width)
    down = ((torch.arange(height) + 0.5) / height)[:, None].expand(height, width)
    noise = 2 * torch.rand(2, height, width, generator=torch.Generator().manual_seed(0)) - 1
    red, green = _LOW + (_HIGH - _LOW) * torch.stack([across, down]) + _NOISE * noise
    colours = torch.stack([red, green, torch.zeros_like(red)], -1)
    return Image.fromarray(colours.round().to(torch.uint8).numpy())


def _line(profile: Tensor) -> tuple[float, float]:
    """Least-squares slope and start of a profile over pixel centres, where it is known.

    Filters bend the line near the border of the picture, so the outer eighths are left out.
    """
    known = profile.isfinite().nonzero()[:, 0]
    margin = len(known) // 8
    known = known[margin : len(known) - margin]
    if len(known) < 2:
        return math.nan, math.nan
    at, value = known + 0.5, profile[known]
    spread = at - at.mean()
    slope = (spread * value).sum() / spread.square().sum()
    astray = (value - value.mean() - slope * spread).square().mean().sqrt()
    if astray > _ASTRAY * value.std():
        return math.nan, math.nan
    return float(slope), float(value.mean() - slope * at.mean())
