"""A folder of at least 300 files that try to break a batch run, and what each of them must come to.

`make` is a pure function of its arguments: the same seed gives the same bytes. The sound pictures are small, so
that a model can be run over all of them.
"""

import io
import os
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, features

SIZE = (40, 24)

_SUFFIX = {
    "JPEG": ".jpg",
    "PNG": ".png",
    "GIF": ".gif",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "PPM": ".ppm",
    "ICO": ".ico",
    "JPEG2000": ".jp2",
    "AVIF": ".avif",
}
_NEEDS = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}
_ODD_NAMES = (
    "new\nline.png",
    "tab\tand\rreturn.png",
    "escape\x1b[31mred\x1b[0m.png",
    'double"quote.png',
    "single'quote.png",
    "back\\slash.png",
    "looks\\xfflike an escape.png",
    "-rf.png",
    "--help.png",
    "-",
    " leading and trailing .png ",
    "$(touch pwned).png",
    "`id`;&|<>.png",
    "100%s%n{0}{name}.png",
    "[a-z]*?.png",
    "**",
    "[bold red]markup[/].png",
    "smile\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467.png",
    "\u65e5\u672c\u8a9e.png",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629\u202e.png",
    "e\u0301.png",
    "\u00e9.png",
    "caf\udce9.png",
    "\udcff\udcfe\udc80.png",
    "UPPER.PNG",
    "two.dots..png",
    "a.jpg.txt.png",
    "no suffix at all",
    "x" * 251 + ".png",
    ",comma;semicolon.png",
    "~home.png",
    "#hash.png",
    "con.png",
)


@dataclass(frozen=True)
class Manifest:
    """What a recursive run over `folder` must make of each path below it.

    `expected` maps a relative path (str, undecodable bytes as surrogates) to "described", "error", "stray", or
    "nothing" for what is silently passed over: hidden files, loops, folders.
    """

    folder: Path
    expected: dict[str, str] = field(default_factory=dict)

    def paths(self, outcome: str) -> list[str]:
        """The relative paths with this outcome, in the order in which they were made."""
        return [path for path, expected in self.expected.items() if expected == outcome]


def make(folder: Path, count: int = 300, seed: int = 0) -> Manifest:
    """Fill `folder`, which is created, with at least `count` files. Everything is below `folder`."""
    suite = Manifest(folder)
    rng = random.Random(seed)
    sound = dict(sound_pictures())
    for path, data in sound.items():
        _add(suite, f"sound/{path}", data, "described")
    _add_odd_names(suite, sound["colour.png"])
    _add_strays_and_fakes(suite, sound)
    _add_bombs(suite, sound)
    _add_links_and_specials(suite, sound["colour.png"])
    _add_truncations(suite, sound)
    while len(suite.expected) < count:
        for path, data in sound.items():
            mutant = mutate(data, rng)
            outcome = "described" if _plain_pillow_reads(mutant, path) else "error"
            _add(suite, f"mutated/{len(suite.expected):04d}-{path}", mutant, outcome)
    return suite


def sound_pictures() -> Iterator[tuple[str, bytes]]:
    """Valid files, name and bytes, of each format that this Pillow writes and of each way to store pixels."""
    colour = _drawing()
    for name, suffix in _SUFFIX.items():
        if name not in _NEEDS or features.check(_NEEDS[name]):
            yield f"colour{suffix}", _saved(colour, name)
    grey = colour.convert("L")
    alpha = Image.linear_gradient("L").resize(SIZE)
    for mode, image in {
        "grey": grey,
        "bits": colour.convert("1"),
        "palette": colour.quantize(16),
        "rgba": Image.merge("RGBA", (*colour.split(), alpha)),
        "la": Image.merge("LA", (grey, alpha)),
        "deep": grey.convert("I").point(lambda value: value * 257).convert("I;16"),
    }.items():
        yield f"{mode}.png", _saved(image, "PNG")
        yield f"{mode}.tif", _saved(image, "TIFF")
    yield "cmyk.jpg", _saved(colour.convert("CMYK"), "JPEG")
    yield "cmyk.tif", _saved(colour.convert("CMYK"), "TIFF")
    yield "progressive.jpg", _saved(colour, "JPEG", progressive=True)
    yield "float.tif", _saved(grey.convert("F"), "TIFF")
    yield "see-through.png", _saved(grey, "PNG", transparency=0)
    yield "see-through.gif", _saved(colour.quantize(8), "GIF", transparency=3)
    for name in ("GIF", "PNG", "WEBP", "TIFF"):
        more = [colour.rotate(90 * turn) for turn in (1, 2)]
        yield f"frames{_SUFFIX[name]}", _saved(colour, name, save_all=True, append_images=more)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned{orientation}.jpg", _saved(colour, "JPEG", exif=exif)
    yield "one-pixel.png", _saved(Image.new("RGB", (1, 1), "red"), "PNG")
    yield "hair.png", _saved(Image.new("RGB", (1, 5000), "navy"), "PNG")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One random wound: flipped bits, a hole, zeros, a repeat, a cut, or junk at the end.

    The first bytes, which say what format it is, stay; damage to those is a case of its own.
    """
    keep = 64
    if len(data) <= keep + 8:
        return data[:-4]
    start = rng.randrange(keep, len(data) - 4)
    stop = min(len(data), start + rng.randint(1, max(2, len(data) // 4)))
    match rng.randrange(6):
        case 0:
            wounded = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                wounded[rng.randrange(keep, len(data))] ^= 1 << rng.randrange(8)
            return bytes(wounded)
        case 1:
            return data[:start] + data[stop:]
        case 2:
            return data[:start] + bytes(stop - start) + data[stop:]
        case 3:
            return data[:stop] + data[start:]
        case 4:
            return data[:start]
        case _:
            return data + rng.randbytes(200)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk with its length and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, bits: int, colour_type: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG from filtered rows; `chunks` come before the pixels. Nothing is checked."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + b"".join(chunks) + pixels + png_chunk(b"IEND", b"")


def _drawing() -> Image.Image:
    image = Image.linear_gradient("L").resize(SIZE).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.ellipse((4, 4, 20, 20), fill=(220, 40, 30))
    draw.rectangle((24, 8, 36, 20), fill=(20, 90, 200))
    return image


def _saved(image: Image.Image, format_name: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


def _add(suite: Manifest, path: str, data: bytes, outcome: str) -> None:
    target = suite.folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.write_bytes(data)
    except OSError:
        return  # a name that this file system can't hold
    suite.expected[path] = outcome


def _plain_pillow_reads(data: bytes, path: str) -> bool:
    """The second opinion on a random wound: Pillow alone, used in the plainest way."""
    kind = next(name for name, suffix in _SUFFIX.items() if path.endswith(suffix))
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            image.convert("RGB")
        return True
    except Exception:
        return False


def _add_odd_names(suite: Manifest, data: bytes) -> None:
    for name in _ODD_NAMES:
        _add(suite, f"names/{name}", data, "described")
    _add(suite, "names/" + "/".join(["down"] * 60) + "/deep.png", data, "described")
    _add(suite, "names/folder.jpg/inside.png", data, "described")
    _add(suite, "names/.hidden.png", data, "nothing")
    _add(suite, "names/.folder/inside.png", data, "nothing")


def _add_strays_and_fakes(suite: Manifest, sound: dict[str, bytes]) -> None:
    texts = {
        "notes.txt": b"Nothing to see.\n",
        "python": b"Python is a language\n",
        "cars": b"BMW and others, in some order\n",
        "page.html": b"<!doctype html><img src=a.jpg>",
        "jobs.jsonl": b'{"image": "../sound/colour.png"}\n',
        "caption.jpg.txt": b"A red disc.",
        "empty": b"",
        "zeros.bin": bytes(4096),
        "movie.mp4": b"\0\0\0\x18ftypisom\0\0\2\0isomiso2" + bytes(64),
        "paper.pdf": b"%PDF-1.7\n",
        "program": b"\x7fELF\2\1\1" + bytes(64),
        "sound.wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(32),
    }
    for name, data in texts.items():
        _add(suite, f"strays/{name}", data, "stray")
        _add(suite, f"fakes/{name}.jpg", data, "error")
    for path, data in sound.items():
        if path.startswith("colour"):
            suffix = Path(path).suffix
            _add(suite, f"fakes/empty{suffix}", b"", "error")
            _add(suite, f"fakes/signature only{suffix}", data[:16], "error")
            _add(suite, f"fakes/no signature{suffix}", bytes(16) + data[16:], "error")
            _add(suite, f"renamed/{suffix[1:]} inside", data, "described")
            _add(suite, f"renamed/{suffix[1:]} inside.jpg", data, "described")


def _add_truncations(suite: Manifest, sound: dict[str, bytes]) -> None:
    for path, data in sound.items():
        if path.startswith("colour"):
            for tenths in (3, 5, 7):
                _add(suite, f"truncated/{tenths}-{path}", data[: len(data) * tenths // 10], "error")


def _add_bombs(suite: Manifest, sound: dict[str, bytes]) -> None:
    jpeg = bytearray(sound["colour.jpg"])
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    gif = bytearray(sound["colour.gif"])
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    bmp = bytearray(sound["colour.bmp"])
    bmp[18:26] = struct.pack("<ii", 2**30, 2**30)
    samples_per_pixel = struct.pack("<HHI", 277, 3, 1)
    big = png(12000, 12000, 1, 0, bytes(12000 * 1501))
    text = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000), 9))
    for name, data in {
        "header.png": png(100_000, 100_000, 8, 2, b""),
        "sides.png": png(2**31 - 1, 2**31 - 1, 16, 6, b""),
        "zero.png": png(0, 0, 8, 2, b""),
        "real.png": big,
        "text.png": png(2, 2, 8, 0, bytes(6), text),
        "header.jpg": bytes(jpeg),
        "header.gif": bytes(gif),
        "header.bmp": bytes(bmp),
        "samples.tif": sound["colour.tif"].replace(samples_per_pixel + b"\3\0", samples_per_pixel + b"\2\x80"),
        "header.ppm": b"P6 99999 99999 255\n" + bytes(64),
        "endless.ppm": b"P6 " + b"9" * 5000,
        "icon.ico": b"\0\0\1\0\1\0\0\0\0\0\1\0\x20\0" + struct.pack("<II", len(big), 22) + big,
    }.items():
        _add(suite, f"bombs/{name}", data, "error")


def _add_links_and_specials(suite: Manifest, data: bytes) -> None:
    folder = suite.folder / "links"
    _add(suite, "links/target.png", data, "described")
    for name, target, outcome in (
        ("another name.png", "target.png", "described"),
        ("dangling.png", "gone.png", "error"),
        ("dangling", "gone", "stray"),
        ("self.png", "self.png", "error"),
        ("loop-here", ".", "nothing"),
        ("loop-up", "..", "nothing"),
        ("loop-down/again", "..", "nothing"),
        ("zz-same-folder", "loop-down", "nothing"),
        ("ping", "pong", "stray"),
        ("pong", "ping", "stray"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(target)
        suite.expected[f"links/{name}"] = outcome
    for name, outcome in (("pipe.png", "error"), ("pipe", "stray")):
        os.mkfifo(folder / name)
        suite.expected[f"links/{name}"] = outcome
    _add(suite, "links/locked.png", data, "described" if os.geteuid() == 0 else "error")
    (folder / "locked.png").chmod(0)
    (folder / "empty folder.jpg").mkdir()
    suite.expected["links/empty folder.jpg"] = "nothing"
