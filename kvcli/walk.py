"""Walking folders and expanding patterns, one directory at a time. Knows directories, not pictures.

Within a directory names come in natural order (photo2 before photo10), its files before its subfolders.
Only one directory's names are held at once (per level of depth), so the first file comes long before the
last is found. Hidden names are skipped. Links to directories are followed, but never to one that holds the
place where the link is, and a `Visits` lets no directory be entered twice: loops end.
"""

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from natsort import natsort_keygen, ns

_natural: Callable[[str], Any] = natsort_keygen(alg=ns.IGNORECASE)


@dataclass(frozen=True)
class Unreadable:
    """A directory that could not be listed: what it holds is unknown, and a caller must say so."""

    path: str
    reason: str


@dataclass
class Visits:
    """The directories that one walk, or one run, has entered."""

    _seen: set[tuple[int, int]] = field(default_factory=set)

    def enter(self, path: str) -> bool:
        """True the first time for each directory, whatever names and links lead to it."""
        status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def files(folder: str, recursive: bool, visits: Visits) -> Iterator[str | Unreadable]:
    """Every visible entry below `folder` that is no directory: regular files, pipes, dangling links."""
    for path, names in _walk(folder, recursive, visits):
        if isinstance(names, OSError):
            yield Unreadable(path, names.strerror or str(names))
        else:
            yield from (os.path.join(path, name) for name in names)


def expand(pattern: str) -> Iterator[str]:
    """The files and directories that a pattern names: `*`, `?`, `[abc]`, and `**` for any number of folders.

    A name may come more than once if the pattern has more than one `**`.
    """
    start = os.sep if pattern.startswith(os.sep) else ""
    found = _expand(start, [part for part in pattern.split(os.sep) if part])
    return filter(os.path.isdir, found) if pattern.endswith(os.sep) else found


def is_pattern(text: str) -> bool:
    """Does the text hold a wildcard?"""
    return glob.has_magic(text)


def _expand(base: str, parts: list[str]) -> Iterator[str]:
    if not parts:
        yield base
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        for folder, _ in _walk(base, True, Visits()):
            found = _expand(folder, rest or ["*"])
            yield from found if rest else itertools.filterfalse(os.path.isdir, found)
    elif not glob.has_magic(part):
        path = os.path.join(base, part)
        if os.path.lexists(path):
            yield from _expand(path, rest)
    else:
        matches = re.compile(fnmatch.translate(part)).match
        try:
            names, subfolders = _listing(base or os.curdir)
        except OSError:
            return  # a pattern matches nothing in a folder that can't be read, as in every shell
        for name in subfolders if rest else [*names, *subfolders]:
            if matches(name):
                yield from _expand(os.path.join(base, name), rest)


def _walk(top: str, recursive: bool, visits: Visits) -> Iterator[tuple[str, list[str] | OSError]]:
    """`top` and, if recursive, every folder below it, parents first, each with its names or why it has
    none.
    """
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            if (folder != top and _leads_up(folder)) or not visits.enter(folder or os.curdir):
                continue
            names, subfolders = _listing(folder or os.curdir)
        except OSError as error:
            yield folder, error
            continue
        yield folder, names
        if recursive:
            waiting += [os.path.join(folder, name) for name in reversed(subfolders)]


def _listing(folder: str) -> tuple[list[str], list[str]]:
    """Visible names in natural order: those that are no directories, and the directories."""
    names: list[str] = []
    subfolders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                (subfolders if _is_directory(entry) else names).append(entry.name)
    for found in names, subfolders:
        found.sort()  # names that natural order holds equal keep one order
        found.sort(key=_natural)
    return names, subfolders


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _leads_up(path: str) -> bool:
    """Is it a link to a directory that holds the link? Following it would walk what nobody named."""
    if not os.path.islink(path):
        return False
    target, here = os.path.realpath(path), os.path.realpath(os.path.dirname(path) or os.curdir)
    return os.path.commonpath([target, here]) == target
