"""One picture stored losslessly in many ways, and the pixels that each file must give.

Besides what Pillow writes there are files made by hand, of kinds that it reads but doesn't write.
"""

import io
import struct
from typing import Any

import hostile
import numpy as np
from PIL import Image

WIDTH, HEIGHT = 48, 32
GREY = (np.arange(WIDTH * HEIGHT) % 256).astype(np.uint8).reshape(HEIGHT, WIDTH)
COLOUR = np.stack([GREY, GREY[::-1, ::-1], 255 - GREY // 2], -1)
GREY_RGB = np.stack([GREY] * 3, -1)
HOLE = GREY > 99
"""Where the transparent twins are transparent."""

UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera held so would have stored an upright picture."""


def saved(image: Image.Image, format_name: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


def on_white(rgb: np.ndarray, hole: np.ndarray) -> np.ndarray:
    return np.where(hole[..., None], 255, rgb).astype(np.uint8)


def turned(orientation: int, format_name: str) -> bytes:
    image = Image.fromarray(COLOUR)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if format_name == "WEBP" else {}
    stored = image.transpose(UNDO[orientation]) if orientation in UNDO else image
    return saved(stored, format_name, exif=exif, **lossless)


def rows(pixels: np.ndarray) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def see_through_png(bits: int, colour_type: int, pixels: np.ndarray, *colour: int) -> bytes:
    chunk = hostile.png_chunk(b"tRNS", struct.pack(f">{len(colour)}H", *colour))
    return hostile.png(WIDTH, HEIGHT, bits, colour_type, rows(pixels), chunk)


def grey_tiff(bits: int, photometric: int, pixels: bytes) -> bytes:
    """A little-endian TIFF of one strip, of a kind that Pillow reads but does not write."""
    tags = [(256, WIDTH), (257, HEIGHT), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1)]
    tags += [(278, HEIGHT), (279, len(pixels))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    start = struct.pack("<I", 8 + len(pixels))
    return b"II*\0" + start + pixels + struct.pack("<H", len(tags)) + directory + bytes(4)


def twins() -> dict[str, tuple[bytes, np.ndarray]]:
    """Files that hold one picture losslessly in many ways, and the pixels that each must give."""
    colour, grey = Image.fromarray(COLOUR), Image.fromarray(GREY)
    alpha = Image.fromarray(np.where(HOLE, 0, 255).astype(np.uint8))
    deep = GREY.astype(np.uint16) * 257
    palette = colour.quantize(64)
    indexes, palette_rgb = np.asarray(palette), np.asarray(palette.convert("RGB"))
    cmyk = colour.convert("CMYK")
    rgba, la = Image.merge("RGBA", (*colour.split(), alpha)), Image.merge("LA", (grey, alpha))
    packed4 = (GREY[:, ::2] >> 4 << 4) | (GREY[:, 1::2] >> 4)
    grey4 = np.stack([(GREY >> 4) * 17] * 3, -1)
    twelve = (GREY.astype(np.uint16) << 4 | GREY >> 4).reshape(-1, 2)
    packed12 = np.stack([twelve[:, 0] >> 4, (twelve[:, 0] & 15) << 4 | twelve[:, 1] >> 8, twelve[:, 1] & 255], -1)
    red, green, blue = (int(value) for value in COLOUR[4, 5])
    key = (COLOUR[4, 5] == COLOUR).all(-1)
    made = {
        f"turned {orientation} {name}": (turned(orientation, name), COLOUR)
        for orientation in range(1, 9)
        for name in ("PNG", "TIFF", "WEBP")
    }
    for name in ("PNG", "TIFF", "BMP", "PPM"):
        made[f"RGB {name}"] = saved(colour, name), COLOUR
    for name in ("PNG", "TIFF"):
        made[f"RGBA {name}"] = saved(rgba, name), on_white(COLOUR, HOLE)
        made[f"LA {name}"] = saved(la, name), on_white(GREY_RGB, HOLE)
        made[f"16-bit {name}"] = saved(Image.fromarray(deep), name), GREY_RGB
    for name in ("PNG", "TIFF", "GIF", "BMP"):
        made[f"palette {name}"] = saved(palette, name), palette_rgb
    for name in ("PNG", "GIF"):
        made[f"palette, one clear {name}"] = (
            saved(palette, name, transparency=7),
            on_white(palette_rgb, indexes == 7),
        )
    clear = bytes(0 if index % 2 else 255 for index in range(64))
    big_endian = Image.frombytes("I;16B", (WIDTH, HEIGHT), deep.astype(">u2").tobytes())
    return made | {
        "palette, many clear": (saved(palette, "PNG", transparency=clear), on_white(palette_rgb, indexes % 2 == 1)),
        "RGBA WEBP": (saved(rgba, "WEBP", lossless=True), on_white(COLOUR, HOLE)),
        "CMYK TIFF": (saved(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))),
        "16-bit PGM": (saved(Image.fromarray(deep), "PPM"), GREY_RGB),
        "16-bit big-endian": (saved(big_endian, "TIFF"), GREY_RGB),
        "16 bits in 32": (saved(Image.fromarray(deep.astype(np.int32)), "TIFF"), GREY_RGB),
        "8 bits in 32": (saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"), GREY_RGB),
        "16-bit, white is zero": (grey_tiff(16, 0, (65535 - deep).astype("<u2").tobytes()), GREY_RGB),
        "12-bit": (grey_tiff(12, 1, packed12.astype(np.uint8).tobytes()), GREY_RGB),
        "float 0 to 1": (saved(Image.fromarray(np.float32(GREY / 255)), "TIFF"), GREY_RGB),
        "float 0 to 255": (saved(Image.fromarray(np.float32(GREY)), "TIFF"), GREY_RGB),
        "L tRNS": (see_through_png(8, 0, GREY, 9), on_white(GREY_RGB, GREY == 9)),
        "4-bit tRNS": (see_through_png(4, 0, packed4.astype(np.uint8), 5), on_white(grey4, GREY >> 4 == 5)),
        "16-bit tRNS": (see_through_png(16, 0, deep.astype(">u2"), 9 * 257), on_white(GREY_RGB, GREY == 9)),
        "RGB tRNS": (see_through_png(8, 2, COLOUR, red, green, blue), on_white(COLOUR, key)),
        "16-bit RGB tRNS": (
            see_through_png(16, 2, (COLOUR.astype(np.uint16) * 257).astype(">u2"), red * 257, green * 257, blue * 257),
            on_white(COLOUR, key),
        ),
        "16-bit LA": (
            hostile.png(WIDTH, HEIGHT, 16, 4, rows(np.stack([deep, np.where(HOLE, 0, 65535)], -1).astype(">u2"))),
            on_white(GREY_RGB, HOLE),
        ),
    }
