"""What is to be done for one record (`Job`), job files, and parts of a run (`Shard`). Opens no picture."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.names import display, restore

_KEYS = ("id", "image", "images", "prompt", "system")


@dataclass(frozen=True)
class Job:
    """One record to be: its pictures, and what a job file says about it.

    `paths` are the pictures' names as the user typed or would type them, valid UTF-8 (`kvcli.names`);
    `sources` are what `kvcli.images.load` takes. `relative` is the picture's place below the folder that
    was named, for outputs that mirror it. With an `error` there is nothing to load: the record says that
    this job failed.
    """

    index: int
    id: str
    paths: tuple[str, ...]
    sources: tuple[Path | bytes, ...]
    prompt: str | None = None
    system: str | None = None
    relative: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Stray:
    """A file that a folder or a pattern held and that is no picture; it is skipped and counted."""

    path: str


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of an input, `number` from 1.

    A job's part follows from its id alone, not from its place: the parts stay disjoint and complete also
    when files appear or vanish between the starts of an array's tasks. The price is that parts differ a
    little in size.
    """

    number: int
    count: int

    def holds(self, job_id: str) -> bool:
        """Is the job of this id in this part?"""
        digest = hashlib.sha256(job_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.number - 1


def read(path: str) -> Iterator[Job]:
    """The jobs of a `.jsonl` file, line by line; relative picture paths start at the file's own folder.

    A line that can't be understood is a job with an error, and the next line goes on. All indexes are 0;
    the caller numbers. Raises OSError if the file can't be opened.
    """
    folder = os.path.dirname(path)
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _job(line, f"{display(path)}:{number}", folder)


def _job(line: bytes, place: str, folder: str) -> Job:
    name = place
    try:
        fields = json.loads(line.decode("utf-8-sig"))
        if not isinstance(fields, dict):
            raise ValueError('a job is an object, such as {"image": "a.jpg"}')
        name = _id(fields, place)
        _check_keys(fields)
        images = _images(fields)
        prompt, system = _text(fields, "prompt"), _text(fields, "system")
    except RecursionError:
        return Job(0, name, (), (), error=f"{place}: nested too deeply")
    except UnicodeDecodeError:
        return Job(0, name, (), (), error=f"{place}: not UTF-8")
    except json.JSONDecodeError as error:
        return Job(0, name, (), (), error=f"{place}: not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return Job(0, name, (), (), error=f"{place}: {error}")
    found = [_find(os.path.join(folder, image)) for image in images]
    paths = tuple(display(path) for path in found)
    return Job(0, name, paths, tuple(map(Path, found)), prompt, system, relative=os.path.basename(paths[0]))


def _find(path: str) -> str:
    """The path itself, or what it stands for if it was copied from a record."""
    if not os.path.lexists(path) and os.path.lexists(restore(path)):
        return restore(path)
    return path


def _id(fields: dict[str, Any], default: str) -> str:
    value = fields.get("id", default)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("id must be a text or a whole number")
    return _whole(str(value), "id")


def _check_keys(fields: dict[str, Any]) -> None:
    """Other keys are the user's own; one that is nearly ours is a slip that would silently change the job."""
    for key in fields.keys() - set(_KEYS):
        if near := difflib.get_close_matches(key, _KEYS, 1, cutoff=0.85):
            raise ValueError(f"unknown key {key!r}; did you mean {near[0]!r}?")


def _images(fields: dict[str, Any]) -> list[str]:
    if ("image" in fields) == ("images" in fields):
        raise ValueError('give either "image" or "images"')
    images = [fields["image"]] if "image" in fields else fields["images"]
    if not isinstance(images, list) or not images or not all(isinstance(i, str) and i for i in images):
        raise ValueError('"image" is one path, "images" a list of at least one')
    return images


def _text(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} must be a text")
    return value if value is None else _whole(value, key)


def _whole(value: str, key: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key} holds half of a character (a lone surrogate)") from None
    return value
