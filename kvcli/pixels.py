"""From any of Pillow's modes to 8-bit RGB on white. Knows colour and depth, not files or their faults.

Pillow's plain `convert("RGB")` turns transparent pixels black, lets a `tRNS` colour show through, and
saturates everything deeper than 8 bits. A picture and its lossless twin must give the same pixels, so none
of this may happen. Colour profiles are ignored, as the models' own processors ignore them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_PHOTOMETRIC, _BITS = 262, 258  # TIFF tags
_PNG_BITS = {"1": 1, "L;2": 2, "L;4": 4, "L": 8, "RGB": 8, "I;16B": 16, "RGB;16B": 16}


def raw_mode(image: Image.Image) -> str:
    """How the file stores its pixels in Pillow's words (`L;4`, `RGB;16B`), "" if unknown. Ask before load."""
    tiles: list[Any] = getattr(image, "tile", [])
    args = tiles[0][3] if tiles else ""
    first = args[0] if isinstance(args, tuple) and args else args
    return first if isinstance(first, str) else ""


def to_rgb(image: Image.Image, raw: str, notes: list[str]) -> Image.Image:
    """A new RGB image: transparency on white, 8 bits. What had to be guessed is added to `notes`.

    `image` is loaded; `raw` is its `raw_mode` from before that.
    """
    transparent = image.info.get("transparency")
    if image.format == "PNG" and isinstance(transparent, int | tuple) and raw in _PNG_BITS and image.mode != "1":
        image.info["transparency"] = _in_pixel_units(transparent, raw)
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey(image, notes)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _in_pixel_units(value: int | tuple[int, ...], raw: str) -> int | tuple[int, ...]:
    """A PNG's transparent colour as the decoded pixels show it.

    The file gives it in its own depth (PNG specification, section tRNS), Pillow leaves it so, while it
    widens 2 and 4 bits to 8 and keeps only the high byte of 16-bit colour.
    """
    bits = _PNG_BITS[raw]
    top: int = 2**bits - 1
    if isinstance(value, int):
        return (value & top) * 255 // top if bits < 8 else value & top
    return tuple(part >> 8 if bits == 16 else part & top for part in value)


def _grey(image: Image.Image, notes: list[str]) -> NDArray[np.uint8]:
    """Deep or floating grey, [height, width], as 8 bits."""
    values = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    if image.mode == "F":
        grey = _from_float(values, notes)
    elif image.mode == "I":
        grey = _from_int32(values, image.format, notes)
    else:
        # The high byte, as Pillow does for 16-bit colour: grey with and without colour or alpha agree.
        bits = next(iter(tags.get(_BITS, (16,))), 16)
        grey = (values >> max(bits - 8, 0)).astype(np.uint8)
    if image.mode != "I" and tags.get(_PHOTOMETRIC) == 0:  # white is zero
        grey = 255 - grey
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey = np.where(values == transparent, np.uint8(255), grey)
    return grey


def _from_int32(values: NDArray[Any], format_name: str | None, notes: list[str]) -> NDArray[np.uint8]:
    """32-bit containers: a PNG or PGM holds 16 bits in it; elsewhere the values tell the depth."""
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high <= 65535:
        eight_bits = high <= 255 and format_name not in ("PNG", "PPM")
        return (values if eight_bits else values >> 8).astype(np.uint8)
    return _stretched(values.astype(np.float64), notes)


def _from_float(values: NDArray[Any], notes: list[str]) -> NDArray[np.uint8]:
    """Floats are taken as 0 to 1, or as 0 to 255, if they lie there; if not, stretched from lowest to
    highest.
    """
    real = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    if np.isnan(real).any():
        notes.append("pixels that are no number are shown as the darkest")
        real = np.nan_to_num(real, nan=float(np.nanmin(real)) if not np.isnan(real).all() else 0.0)
    low, high = float(real.min()), float(real.max())
    if low >= 0 and high <= 255:
        return np.rint(real * 255 if high <= 1 else real).astype(np.uint8)
    return _stretched(real, notes)


def _stretched(values: NDArray[np.float64], notes: list[str]) -> NDArray[np.uint8]:
    low, high = float(values.min()), float(values.max())
    notes.append(f"grey values from {low:g} to {high:g} are stretched to black and white")
    span = (high - low) or 1.0
    return np.rint((values - low) / span * 255).astype(np.uint8)
