"""The picture loader: the same pixels however a file arrives, and one kind of error for whatever is wrong."""

import concurrent.futures
import contextlib
import hashlib
import io
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import hostile
import numpy as np
import pytest
from forbidden import forbidden
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from twins import COLOUR, GREY, UNDO, saved, turned, twins

from kvcli import images
from kvcli.errors import PictureError
from kvcli.inputs import Job, find

# Pillow warns of what is meant to be damaged here.
pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

__all__ = ["forbidden"]  # a fixture

TWINS = twins()


@pytest.mark.parametrize("name", TWINS)
def test_twins_are_byte_equal_by_bytes_path_and_folder(name: str, tmp_path: Path) -> None:
    data, expected = TWINS[name]
    (tmp_path / "picture").write_bytes(data)
    (job,) = find([str(tmp_path)], stdin=io.BytesIO())
    assert isinstance(job, Job)
    for source in (data, tmp_path / "picture", *job.sources):
        picture = images.load(source)
        assert picture.image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(picture.image), expected)
        assert picture.image.info == {}
        assert (picture.sha256, picture.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    half = Image.new("RGBA", (2, 2), (200, 0, 100, 128))
    assert images.load(saved(half, "PNG")).image.getpixel((0, 0)) == pytest.approx((227, 127, 177), abs=1)


def test_the_inverted_values_of_a_cmyk_jpeg_are_turned_back() -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 200, 200, 10))
    picture = images.load(saved(cmyk, "JPEG", quality=100))
    assert picture.image.getpixel((8, 8)) == pytest.approx(cmyk.convert("RGB").getpixel((8, 8)), abs=3)


def test_lab_colour_is_converted() -> None:
    red = Image.new("RGB", (8, 8), (200, 40, 40)).convert("LAB")
    assert images.load(saved(red, "TIFF")).image.getpixel((4, 4)) == pytest.approx((200, 40, 40), abs=3)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (np.float32(GREY) * 10 - 100, "stretched"),
        (np.int32(GREY) * 100_000 - 7, "stretched"),
        (np.where(GREY == 3, np.nan, np.float32(GREY) / 255).astype(np.float32), "no number"),
        (np.full((4, 4), np.nan, np.float32), "no number"),
        (np.full((4, 4), np.inf, np.float32), "no number"),
    ],
)
def test_grey_of_unknown_range_is_shown_and_noted(values: np.ndarray, note: str) -> None:
    picture = images.load(saved(Image.fromarray(values), "TIFF"))
    assert note in " ".join(picture.warnings)
    assert len(np.unique(np.asarray(picture.image))) >= min(len(np.unique(values)) - 1, 250)


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_frames_the_first_is_used_and_said(name: str) -> None:
    first, second = Image.new("RGB", (20, 10), "red"), Image.new("RGB", (20, 10), "blue")
    picture = images.load(saved(first, name, save_all=True, append_images=[second, first]))
    assert picture.warnings == ("only the first of 3 frames is used",)
    assert picture.image.getpixel((3, 3)) == (255, 0, 0) or name == "WEBP"
    red, _, blue = picture.image.getpixel((3, 3))
    assert red > 200 > 60 > blue


def test_a_single_frame_is_no_animation() -> None:
    assert images.load(saved(Image.fromarray(GREY), "GIF")).warnings == ()


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
def test_extreme_shapes_load(size: tuple[int, int]) -> None:
    assert images.load(saved(Image.new("RGB", size), "PNG")).image.size == size


def test_damaged_exif_does_not_cost_the_picture() -> None:
    picture = images.load(saved(Image.fromarray(COLOUR), "PNG", exif=b"Exif\0\0no TIFF at all"))
    np.testing.assert_array_equal(np.asarray(picture.image), COLOUR)
    assert "EXIF" in picture.warnings[0]


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_impossible_orientation_is_upright(orientation: int) -> None:
    np.testing.assert_array_equal(np.asarray(images.load(turned(orientation, "PNG")).image), COLOUR)


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = hostile.png(20_000, 7_000, 8, 2, b"")  # no pixels at all: decoding it would fail otherwise
    with pytest.raises(PictureError, match=r"20000x7000 = 140,000,000 pixels.*--max-pixels"):
        images.load(bomb)
    with pytest.raises(PictureError, match=r"10,000,000,000 pixels.*--max-pixels"):
        images.load(hostile.png(100_000, 100_000, 8, 2, b""))


def test_max_pixels_lowers_and_raises_the_limit_and_leaves_pillow_alone() -> None:
    before = Image.MAX_IMAGE_PIXELS
    huge = saved(Image.new("1", (20_000, 9_500)), "PNG")  # more than Pillow itself allows
    with pytest.raises(PictureError, match=r"over the limit of 100,000,000"):
        images.load(huge)
    assert images.load(huge, max_pixels=190_000_000).image.size == (20_000, 9_500)
    assert before == Image.MAX_IMAGE_PIXELS
    with pytest.raises(PictureError, match=r"48x32 = 1,536 pixels, over the limit of 1,535"):
        images.load(saved(Image.fromarray(COLOUR), "PNG"), max_pixels=1535)


def test_the_picture_in_an_icon_counts_not_only_its_header() -> None:
    big = hostile.png(2000, 2000, 1, 0, bytes(2000 * 251))
    icon = b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + struct.pack("<II", len(big), 22) + big
    with pytest.raises(PictureError, match="2000x2000"):
        images.load(icon, max_pixels=1_000_000)


def test_what_is_no_picture_is_said_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "dangling.jpg").symlink_to("gone.jpg")
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.jpg").touch()
    with open(tmp_path / "endless.png", "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(images.MAX_BYTES + 1)
    for name, expected in {
        "gone.jpg": "no such file",
        "dangling.jpg": "a link to a file that is gone",
        "pipe.jpg": "use - to read",
        "": "is a folder",
        "text.jpg": "not a picture",
        "empty.jpg": "the file is empty",
        "endless.png": "over the limit of 1,073,741,824",
        "x" * 300: "can't be read",
        "nul\0.jpg": "can't be read",
        "half\ud800.jpg": "can't be read",
    }.items():
        with pytest.raises(PictureError, match=expected) as caught:
            images.load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_permission_denied_is_said(forbidden: Path) -> None:
    (forbidden / "locked.png").write_bytes(TWINS["RGB PNG"][0])
    (forbidden / "locked.png").chmod(0)
    with pytest.raises(PictureError, match="permission denied"):
        images.load(forbidden / "locked.png")


def test_heic_without_its_package_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['pillow_heif'] = None\n"
        "from kvcli import images\n"
        "from kvcli.errors import PictureError\n"
        "try: images.load(b'\\0\\0\\0\\x18ftypheic' + bytes(60))\n"
        "except PictureError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvcli[heic]" in result.stdout
    assert result.stderr == ""


def test_heic_is_read_upright() -> None:
    heif = pytest.importorskip("pillow_heif")
    image = Image.fromarray(GREY).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    heif.from_pillow(image.transpose(UNDO[6])).save(buffer, quality=-1, exif=exif.tobytes())
    picture = images.load(buffer.getvalue())
    assert (picture.format, picture.image.size) == ("HEIF", image.size)
    difference = np.asarray(picture.image).astype(int) - np.asarray(image)
    assert np.abs(difference).mean() < 4


SOUND = dict(hostile.sound_pictures())


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(name=st.sampled_from(sorted(SOUND)), seed=st.integers(0, 2**32), wounds=st.integers(1, 3))
def test_nothing_but_a_picture_error_comes_out_of_damaged_bytes(name: str, seed: int, wounds: int) -> None:
    rng, data = random.Random(seed), SOUND[name]
    for _ in range(wounds):
        data = hostile.mutate(data, rng)
    with contextlib.suppress(PictureError):
        picture = images.load(data, max_pixels=1_000_000)
        assert picture.image.mode == "RGB"
        assert len(picture.image.tobytes()) == 3 * picture.image.width * picture.image.height


def test_threads_get_what_one_thread_gets() -> None:
    work = [data for data, _ in TWINS.values()] * 3
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda data: images.load(data).image.tobytes(), work))
    assert loaded == [images.load(data).image.tobytes() for data in work]
