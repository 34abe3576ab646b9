"""From what the user typed to a stream of jobs: files, folders, patterns, lists, stdin and job files.

It finds pictures but opens none beyond its first bytes. Nothing is listed ahead: the first job comes out
while most folders are still unread. The index of a job is its place in the whole input, also when only a
shard of it is run.
"""

import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from kvcli import formats, images, jobs, pathlist, walk
from kvcli.errors import UsageError
from kvcli.jobs import Job, Shard, Stray
from kvcli.names import display, restore

__all__ = ["Job", "Shard", "Stray", "comes_piped", "find"]


def find(
    arguments: Iterable[str],
    *,
    recursive: bool = False,
    from_file: str | None = None,
    null_separated: bool = False,
    stdin: BinaryIO | None = None,
    together: bool = False,
    shard: Shard | None = None,
) -> Iterator[Job | Stray]:
    """The jobs that the arguments and the list name, in order, as they are found.

    Each picture is one job; `together` makes one job of all of them. A path that was found already is left
    out; another name of the same file, as a link gives it, is another job. A named file that is missing or no
    picture is a job all the same, and fails when it is loaded. A job file gives its own jobs (`kvcli.jobs`).

    arguments: paths of files, folders and `.jsonl` job files, patterns (`photos/**/*.jpg`), or `-` for one
        picture's bytes on stdin.
    from_file: a file that lists paths, one a line, or ended by NUL bytes if `null_separated`; `-` is stdin.
        Nothing in it is a pattern. Relative paths start at the current folder.
    stdin: what `-` reads, sys.stdin's bytes by default.

    Raises UsageError from this call if nothing is named or nothing is found.
    """
    typed = list(arguments)
    _check(typed, from_file)
    single = len(typed) == 1 and from_file is None
    search = _Search(recursive, together, single, stdin or sys.stdin.buffer)
    listed = pathlist.read(from_file, null_separated, search.stdin) if from_file else iter(())
    named = itertools.chain(zip(typed, itertools.repeat(True)), zip(listed, itertools.repeat(False)))
    found = itertools.chain.from_iterable(itertools.starmap(search.one, named))
    ahead = _until_first_job(found)
    if not (ahead and isinstance(ahead[-1], Job)):
        raise UsageError(search.nothing(typed, from_file))
    items = search.ending(itertools.chain(ahead, found))
    return _numbered(_together(items) if together else items, shard)


def comes_piped(arguments: Iterable[str], from_file: str | None) -> bool:
    """Does a list or a job file come through a pipe? It can be read only once, and may be written for hours."""
    lists = [*filter(_is_job_file, arguments), *([from_file] if from_file else [])]
    return any(path == "-" or not os.path.isfile(path) for path in lists)


def _check(typed: list[str], from_file: str | None) -> None:
    """What can be known to be wrong before anything is looked at."""
    if not typed and from_file is None:
        raise UsageError("no picture is named; give files, folders, patterns, --from-file or -")
    if "" in typed:
        raise UsageError("an input is an empty text; is a shell variable unset?")
    if typed.count("-") + (from_file == "-") > 1:
        raise UsageError("stdin can be read only once; name - only once")
    for path in [from_file] if from_file not in (None, "-") else []:
        if os.path.isdir(path) or not os.access(path, os.R_OK):
            raise UsageError(f"--from-file {display(path)} can't be read; give a file that lists paths, or -")
    for path in filter(_is_job_file, typed):
        if not os.access(path, os.R_OK):
            raise UsageError(f"job file {display(path)} can't be read")


@dataclass
class _Search:
    """What one run has found so far, and how each kind of argument is looked up."""

    recursive: bool
    together: bool
    single: bool
    stdin: BinaryIO
    visits: walk.Visits = field(default_factory=walk.Visits)
    seen: set[bytes] = field(default_factory=set)
    strays: int = 0
    unmatched: list[str] = field(default_factory=list)
    # Neighbours share a folder. The memory is this run's own: relative paths mean another place in the next.
    real: Callable[[str], str] = field(default_factory=lambda: lru_cache(maxsize=256)(_real))

    def one(self, text: str, typed: bool) -> Iterator[Job | Stray]:
        """All that one argument or one line of a list names. Only what was typed can be `-` or a pattern."""
        if not os.path.lexists(text) and os.path.lexists(restore(text)):
            text = restore(text)  # copied from a record
        if text == "-" and typed:
            yield self._piped()
        elif os.path.isdir(text):
            yield from self._folder(text, text)
        elif _is_job_file(text):
            yield from self._job_file(text)
        elif typed and walk.is_pattern(text) and not os.path.lexists(text):
            yield from self._pattern(text)
        else:
            yield from self._file(text, os.path.dirname(text))

    def ending(self, found: Iterator[Job | Stray]) -> Iterator[Job | Stray]:
        """What was found, then a failure for each pattern without a match: a slip is not passed over."""
        yield from found
        for pattern in self.unmatched:
            yield _failed(pattern, "no file matches this pattern")

    def nothing(self, typed: list[str], from_file: str | None) -> str:
        """Why the run has no picture, in one line."""
        named = typed + ([f"--from-file {from_file}"] if from_file else [])
        strays = f" ({self.strays} other files)" if self.strays else ""
        hint = "" if self.recursive else "; -r looks into subfolders as well"
        return f"no picture found in {', '.join(map(display, named))}{strays}{hint}"

    def _piped(self) -> Job:
        if self.stdin.isatty():
            raise UsageError("- reads a picture from stdin, and nothing is piped in")
        return Job(0, "-", ("-",), (self.stdin.read(images.MAX_BYTES + 1),), relative="stdin")

    def _folder(self, folder: str, base: str) -> Iterator[Job | Stray]:
        for path in walk.files(folder, self.recursive, self.visits):
            if isinstance(path, walk.Unreadable):
                yield _failed(path.path, f"folder can't be read: {path.reason}")
            else:
                yield from self._judged(path, base)

    def _pattern(self, pattern: str) -> Iterator[Job | Stray]:
        base = os.path.dirname(re.split(r"[*?[]", pattern, maxsplit=1)[0])
        empty = True
        for path in walk.expand(pattern):
            empty = False
            yield from self._folder(path, base) if os.path.isdir(path) else self._judged(path, base)
        if empty:
            self.unmatched.append(pattern)

    def _job_file(self, path: str) -> Iterator[Job]:
        if self.together:
            raise UsageError(f"job file {display(path)} says itself what goes together; name it alone")
        try:
            yield from jobs.read(path)
        except OSError as error:
            yield _failed(path, f"job file can't be read: {error.strerror}")

    def _judged(self, path: str, base: str) -> Iterator[Job | Stray]:
        """A file that nobody named: a picture by its name or its first bytes, or a stray."""
        if formats.has_image_name(path) or _begins_like_a_picture(path):
            yield from self._file(path, base)
        elif self._is_new(path):
            self.strays += 1
            yield Stray(display(path))

    def _file(self, path: str, base: str) -> Iterator[Job]:
        if self._is_new(path):
            shown = display(path)
            yield Job(0, shown, (shown,), (Path(path),), relative=display(self._relative(path, base)))

    def _relative(self, path: str, base: str) -> str:
        """Below the one folder that was named; with several inputs, where two may hold the same, as typed."""
        place = os.path.relpath(path, base or os.curdir) if self.single else os.path.normpath(path)
        parts = [part for part in place.split(os.sep) if part not in ("", os.pardir)]
        return os.path.join(*parts or ["-"])

    def _is_new(self, path: str) -> bool:
        """The place in the resolved folder is what counts; a link to a file has a place of its own.

        Hashes keep a million paths within about 100 MB.
        """
        folder, name = os.path.split(path)
        place = os.path.join(self.real(folder), name).encode("utf-8", "surrogatepass")
        key = hashlib.sha256(place).digest()[:16]
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


def _real(folder: str) -> str:
    try:
        return os.path.realpath(folder)
    except (OSError, ValueError):  # a name that no folder can have
        return folder


def _is_job_file(path: str) -> bool:
    return path.lower().endswith(".jsonl") and not os.path.isdir(path)


def _begins_like_a_picture(path: str) -> bool:
    """Only a regular file is opened: a pipe would wait for a writer."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return formats.signature(file.read(formats.HEAD_BYTES)) is not None
    except OSError:
        return False


def _failed(path: str, reason: str) -> Job:
    shown = display(path)
    return Job(0, shown, (shown,), (), relative=os.path.basename(shown), error=reason)


def _until_first_job(found: Iterator[Job | Stray]) -> list[Job | Stray]:
    """Takes items up to and with the first job, so that an empty input is known before a model is loaded."""
    ahead: list[Job | Stray] = []
    for item in found:
        ahead.append(item)
        if isinstance(item, Job):
            break
    return ahead


def _together(found: Iterator[Job | Stray]) -> Iterator[Job | Stray]:
    """One job of all pictures, after the strays."""
    parts: list[Job] = []
    for item in found:
        if isinstance(item, Job):
            parts.append(item)
        else:
            yield item
    paths = tuple(path for part in parts for path in part.paths)
    sources = tuple(source for part in parts for source in part.sources)
    errors = [f"{part.id}: {part.error}" for part in parts if part.error]
    error = errors[0] if errors else None
    yield Job(0, ", ".join(paths), paths, sources, relative=parts[0].relative, error=error)


def _numbered(found: Iterator[Job | Stray], shard: Shard | None) -> Iterator[Job | Stray]:
    index = itertools.count()
    for item in found:
        if isinstance(item, Job):
            item = replace(item, index=next(index))
        if shard is None or shard.holds(item.id if isinstance(item, Job) else item.path):
            yield item
