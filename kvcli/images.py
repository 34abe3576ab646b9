"""The one picture loader: the same pixels however a file arrives (a path, bytes from stdin, a folder walk).

It knows files, formats and colour; it does not know models, and it never resizes. Everything that can be
wrong with a picture leaves as one `PictureError`. It is called from several threads at once, so it holds no
state of its own, and of Pillow's it touches one, briefly and under a lock.
"""

import hashlib
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from kvcli import formats, pixels
from kvcli.errors import PictureError

DEFAULT_MAX_PIXELS = 100_000_000
"""Pictures of more pixels (width times height) are refused unless `--max-pixels` allows them."""

MAX_BYTES = 1 << 30
"""Files of more bytes are refused: they would have to be held in memory whole."""

# Pillow warns and logs about odd files in many places. What a user should know is in the record; the rest
# would only tear the progress bar. `warnings.catch_warnings` is not safe in threads, a filter set once is.
warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif)(\.|$)")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_pillow_limit = threading.Lock()


@dataclass(frozen=True)
class Picture:
    """One decoded picture: upright RGB pixels, and what its file was.

    `sha256` and `size_bytes` are those of the file, not of the pixels; `format` is Pillow's name of it.
    """

    image: Image.Image
    sha256: str
    size_bytes: int
    format: str
    warnings: tuple[str, ...] = ()


def load(source: bytes | Path, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture:
    """Read and decode one picture, from a path or from the bytes of a file.

    The image is RGB and fully loaded: EXIF orientation applied, transparency laid on white, deep greys
    scaled to 8 bits, the first frame of an animation. The size that the header states is checked before any
    decoding.

    Raises PictureError, one line, for whatever is wrong with the file.
    """
    data = read(source)
    image, format_name, notes = _decode(data, max_pixels)
    return Picture(image, hashlib.sha256(data).hexdigest(), len(data), format_name, tuple(notes))


def read(source: bytes | Path) -> bytes:
    """The bytes of a picture's file, unread if they can't be one. Raises PictureError.

    Named pipes and devices are refused without being opened: reading them could wait for ever.
    """
    if isinstance(source, bytes):
        _check_head(source)
        _check_bytes(len(source))
        return source
    try:
        status = os.stat(source)
        if stat.S_ISDIR(status.st_mode):
            raise PictureError("is a folder, not a picture; name it as an input of its own")
        if not stat.S_ISREG(status.st_mode):
            raise PictureError("is no regular file (a pipe or a device); use - to read a picture from stdin")
        _check_bytes(status.st_size)
        with open(source, "rb") as file:
            head = file.read(formats.HEAD_BYTES)
            _check_head(head)
            return head + file.read()
    except FileNotFoundError:
        dangling = os.path.islink(source)
        raise PictureError("a link to a file that is gone" if dangling else "no such file") from None
    except PermissionError:
        raise PictureError("permission denied; make the file readable") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise PictureError(f"can't be read: {_one_line(error)}") from error


def _check_head(head: bytes) -> None:
    if not head:
        raise PictureError("the file is empty")
    if formats.signature(head[: formats.HEAD_BYTES]) is None:
        raise PictureError("not a picture: its first bytes are those of no known image format")


def _check_bytes(count: int) -> None:
    if count > MAX_BYTES:
        raise PictureError(f"the file has {count:,} bytes, over the limit of {MAX_BYTES:,}; make it smaller")


def _decode(data: bytes, max_pixels: int) -> tuple[Image.Image, str, list[str]]:
    """Decode under our limit. Pillow's own, lower than what a user may allow, steps aside if it must."""
    kind = formats.signature(data[: formats.HEAD_BYTES])
    assert kind is not None  # read() has checked it
    if kind == "HEIF" and not _register_heif():
        raise PictureError("a HEIC picture needs an extra package: pip install 'kvcli[heic]'")
    try:
        try:
            return _decode_as(kind, data, max_pixels)
        except Image.DecompressionBombError as error:
            found = re.search(r"\d+", str(error))
            claimed = int(found[0]) if found else max_pixels + 1
            if claimed > max_pixels:
                raise _too_large(f"{claimed:,} pixels", max_pixels) from None
        with _pillow_allows(max_pixels):
            return _decode_as(kind, data, max_pixels)
    except PictureError:
        raise
    except MemoryError:
        raise PictureError(f"not enough memory to decode this {kind}; make it smaller") from None
    except UnidentifiedImageError as error:
        raise PictureError(f"begins like {kind} but is broken or truncated") from error
    except Exception as error:  # decoders raise nearly every type on damaged files
        raise PictureError(f"broken or truncated {kind}: {_one_line(error)}") from error


def _decode_as(kind: str, data: bytes, max_pixels: int) -> tuple[Image.Image, str, list[str]]:
    notes: list[str] = []
    with Image.open(BytesIO(data), formats=[kind]) as image:
        _check_size(image.size, max_pixels)
        raw = pixels.raw_mode(image)
        image.load()
        _check_size(image.size, max_pixels)  # an icon's header and the picture in it may disagree
        rgb = pixels.to_rgb(image, raw, notes)
        orientation = _orientation(image, notes)
        if note := _frames_note(image):  # last: counting the frames moves the file on
            notes.append(note)
    rgb.info.clear()  # a stale `transparency` or `exif` must not be applied again by whoever gets the image
    if orientation != 1:
        rgb.getexif()[ExifTags.Base.Orientation] = orientation
        rgb = ImageOps.exif_transpose(rgb)
    return rgb, image.format or kind, notes


def _orientation(image: Image.Image, notes: list[str]) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) where there is none or where it can't be read."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # the pixels are good even where the metadata is not
        notes.append("unreadable EXIF data: the picture is taken as upright")
        return 1
    return value if value in range(1, 9) else 1


def _frames_note(image: Image.Image) -> str | None:
    # In an MPO the further pictures are previews or depth maps, in a PSD they are layers: nothing is left
    # out.
    if image.format in ("MPO", "PSD"):
        return None
    try:
        frames = int(getattr(image, "n_frames", 1))
    except Exception:  # a damaged later frame is no fault of the first
        return "several frames, of which a later one is damaged: only the first is used"
    return f"only the first of {frames} frames is used" if frames > 1 else None


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise PictureError(f"a picture of {width}x{height} has no pixels")
    if width * height > max_pixels:
        raise _too_large(f"{width}x{height} = {width * height:,} pixels", max_pixels)


def _too_large(size: str, max_pixels: int) -> PictureError:
    return PictureError(f"{size}, over the limit of {max_pixels:,}; raise it with --max-pixels")


@contextmanager
def _pillow_allows(pixel_count: int) -> Iterator[None]:
    """Lift Pillow's own limit for one picture at a time. Meanwhile other threads still keep ours."""
    with _pillow_limit:
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = pixel_count
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


@cache
def _register_heif() -> bool:
    """Teach Pillow HEIC, if the optional package is there."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
