"""Lists of paths, as other programs write them. Knows bytes and names, not what lies there."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import BinaryIO

from kvcli.errors import UsageError
from kvcli.names import display


def read(list_file: str, null_separated: bool, stdin: BinaryIO) -> Iterator[str]:
    """The paths that a file (or `stdin`, for `-`) lists, one a line or ended by NUL, each at once.

    Raises UsageError if the list can't be read.
    """
    try:
        # Unbuffered: a thread that waits in a buffered stdin holds its lock, and Python can't end without that.
        raw = nullcontext(getattr(stdin, "raw", stdin))
        with raw if list_file == "-" else open(list_file, "rb", buffering=0) as file:
            for name in _split(file, b"\0" if null_separated else b"\n"):
                if name := name if null_separated else name.removesuffix(b"\r"):
                    yield os.fsdecode(name)
    except OSError as error:
        raise UsageError(f"--from-file {display(list_file)} can't be read: {error.strerror}") from error


def _split(file: BinaryIO, end: bytes) -> Iterator[bytes]:
    """The pieces of a stream between end marks, each as soon as it is there: a pipe may stay open for
    hours.
    """
    read_some = getattr(file, "read1", file.read)
    rest = b""
    while chunk := read_some(1 << 16):
        *whole, rest = (rest + chunk).split(end)
        yield from whole
    if rest:
        yield rest
