"""Which files are pictures, told by their first bytes and by their names. Opens nothing, decodes nothing."""

import os
import re

HEAD_BYTES = 64
"""How many of a file's first bytes `signature` wants to see."""

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".webp", ".avif", ".bmp", ".dib"}
    | {".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".heic", ".heif", ".hif", ".ico", ".psd"}
    | {".jp2", ".j2k", ".jpx", ".j2c", ".qoi"}
)

# Tighter than a decoder's own test where that is only two letters long ("BM", "P5"), since plain text
# may begin with those. The names are Pillow's.
_SIGNATURES = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "GIF": rb"GIF8[79]a",
    "WEBP": rb"RIFF....WEBP",
    "BMP": rb"BM....\0\0\0\0",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "PPM": rb"P[1-6fF]\s",
    "AVIF": rb"....ftyp(?:avi[fs]|m(?:if|sf)[12].{4}(?:.{4})*?avi[fs])",
    "HEIF": rb"....ftyp(?:he[iv][cxms]|m(?:if|sf)[12])",
    "JPEG2000": rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",
    "ICO": rb"\0\0\x01\0[^\0]\0",
    "PSD": rb"8BPS\0\x01",
    "QOI": rb"qoif",
}
_PATTERNS = {name: re.compile(pattern, re.DOTALL) for name, pattern in _SIGNATURES.items()}


def signature(head: bytes) -> str | None:
    """The format that the first `HEAD_BYTES` bytes of a file announce, by Pillow's name, or None."""
    return next((name for name, pattern in _PATTERNS.items() if pattern.match(head)), None)


def has_image_name(path: str) -> bool:
    """Does the name end like a picture's? Upper and lower case are the same."""
    return os.path.splitext(path)[1].lower() in EXTENSIONS
