"""Numbers of visual tokens laid over the picture that they see.

Knows pictures and boxes ((x0, y0, x1, y1) in the picture's pixels, NaN for a token that sees no part of it), nothing of
models. All pictures that come back are RGB.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from PIL import Image

from kvcli.engine.recording import DROPPED, KEPT, LEFT, MERGED

Floats = npt.NDArray[np.float64]

HEAT = "inferno"
TINTS = {MERGED: ((30, 100, 255), 0.6), DROPPED: ((8, 8, 12), 0.82), LEFT: ((110, 40, 130), 0.7)}
"""Colour and strength of what covers the parts of a picture whose entries left; what was kept stays as it is."""
BRIGHTEST = 98
"""Percentile at which the colours end, so that one or two attention sinks don't leave all others black."""


def thumbnail(picture: Image.Image, longest: int) -> Image.Image:
    """The picture scaled so that its longer side has at most this many pixels."""
    scale = min(1.0, longest / max(picture.size))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def density(values: Floats, boxes: Floats, picture: tuple[int, int], canvas: tuple[int, int]) -> Floats:
    """[height, width] of the canvas: each value spread evenly over its box, sums where boxes overlap.

    values: [n]; boxes: [n, 4] in pixels of a picture of size `picture` (width, height).
    """
    total = np.zeros(canvas[::-1])
    for index, (rows, columns) in _areas(boxes, picture, canvas):
        area = total[rows, columns]
        area += values[index] / max(1, area.size)
    return total


def blend(picture: Image.Image, heat: Floats, top: float | None = None) -> Image.Image:
    """The picture in dark grey, glowing where the heat [height, width] is. top: the heat of the brightest colour."""
    top = brightest(heat) if top is None else top
    level = np.clip(heat / top, 0, 1) if top > 0 else np.zeros_like(heat)
    grey = np.asarray(picture.convert("L"), dtype=np.float64)[..., None] / 255
    glow = colormaps[HEAT](level)[..., :3]
    strength = 0.15 + 0.55 * level[..., None]
    mixed = grey * 0.8 * (1 - strength) + glow * strength + 0.12 * level[..., None] * grey
    return Image.fromarray((np.clip(mixed, 0, 1) * 255).astype(np.uint8))


def brightest(heat: Floats) -> float:
    """Where the colours of a heat end."""
    return float(np.percentile(heat, BRIGHTEST))


def fates(picture: Image.Image, fate: npt.NDArray[np.int64], boxes: Floats, size: tuple[int, int]) -> Image.Image:
    """The picture with what left covered: merged parts blue, dropped ones nearly black; pale where no token sees it.
    Where boxes overlap, the best fate shows. size: of the original picture, which `boxes` is about."""
    worst = np.full(picture.size[::-1], KEPT)
    seen = np.zeros(picture.size[::-1], dtype=bool)
    for index, (rows, columns) in _areas(boxes, size, picture.size):
        worst[rows, columns] = np.where(seen[rows, columns], np.minimum(worst[rows, columns], fate[index]), fate[index])
        seen[rows, columns] = True
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    pale = _pale(pixels)
    for code, (colour, strength) in TINTS.items():
        covered = pixels * (1 - strength) + np.array(colour) * strength
        pixels = np.where((worst == code)[..., None], covered, pixels)
    return Image.fromarray(np.where(seen[..., None], pixels, pale).astype(np.uint8))


def kept(picture: Image.Image, share: Floats, boxes: Floats, size: tuple[int, int]) -> Image.Image:
    """The picture as clear as its entries were kept: share [n], 1 clear to 0 pale; where boxes overlap, the highest
    shows. size: of the original picture, which `boxes` is about."""
    level = np.zeros(picture.size[::-1])
    for index, (rows, columns) in _areas(boxes, size, picture.size):
        level[rows, columns] = np.maximum(level[rows, columns], share[index])
    pixels, clear = np.asarray(picture.convert("RGB"), dtype=np.float64), level[..., None]
    return Image.fromarray((pixels * clear + _pale(pixels) * (1 - clear)).astype(np.uint8))


def _pale(pixels: Floats) -> Floats:
    """Without colour and nearly without contrast, so that it shows beside dark and bright pictures."""
    return np.asarray(pixels.mean(-1, keepdims=True) * 0.25 + 150)


def _areas(
    boxes: Floats, picture: tuple[int, int], canvas: tuple[int, int]
) -> Iterator[tuple[int, tuple[slice, slice]]]:
    """(index, rows and columns of the canvas) of each box that sees something: one pixel at least."""
    scale = np.array([canvas[0] / picture[0], canvas[1] / picture[1]] * 2)
    for index, box in enumerate(boxes * scale):
        if not np.isnan(box).any():
            x0, y0, x1, y1 = np.round(box).astype(int)
            yield index, (slice(y0, max(y1, y0 + 1)), slice(x0, max(x1, x0 + 1)))
