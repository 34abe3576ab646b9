"""Where texts and records go: stdout in one of three forms, a record file, text files. One is chosen per run.

Each output takes records as they come (`put`) and is told the summary at the end (`close`). Knows the record schema,
no model.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import IO, Any, Protocol

from kvcli.cli.options import Settings
from kvcli.cli.terminal import Terminal, clean, one_line
from kvcli.errors import PictureError, UsageError
from kvcli.jobs import Job
from kvcli.records import JSON, RecordFile, encode, replacing

LOG = "kvcli.jsonl"
"""The record file inside an output folder."""


class Output(Protocol):
    """What a run writes to. `done`: keys of records that need no repeating."""

    done: Collection[bytes]
    name: str

    def admit(self, job: Job) -> None:
        """Raise `PictureError` when this job's output can't be taken. Called from several threads."""

    def put(self, job: Job, entry: JSON) -> None:
        """Take the record of a job. Raises `PictureError` when only this one can't be written."""

    def close(self, summary: JSON | None) -> None:
        """The run is over; without a summary it never began."""


def choose(settings: Settings, terminal: Terminal, *, alone: bool) -> Output:
    """The output that the settings ask for. alone: there is one picture. Raises `UsageError`."""
    _check(settings)
    target = settings.output
    records = None
    if target is not None and not _is_folder(target):
        records = RecordFile(Path(target), overwrite=settings.overwrite, resume=settings.resume)
    if settings.sidecar:
        return TextFiles(None, records, replace=settings.overwrite or settings.resume)
    if records is not None:
        return Records(records)
    if target is not None:
        return _text_folder(Path(target), settings)
    if settings.json:
        return JsonDocument()
    return JsonLines() if settings.jsonl else Text(terminal, alone=alone)


def _check(settings: Settings) -> None:
    if settings.json and (settings.jsonl or settings.output):
        raise UsageError("--json goes to stdout alone: leave out " + ("--jsonl" if settings.jsonl else "-o"))
    if settings.overwrite and settings.resume:
        raise UsageError("--overwrite and --resume exclude each other")
    if settings.sidecar and settings.output and _is_folder(settings.output):
        raise UsageError("--sidecar puts the texts beside the pictures: with it, -o can only be a FILE.jsonl")
    if settings.sidecar and settings.resume and not settings.output:
        raise UsageError("--sidecar --resume needs -o FILE.jsonl, to know with which settings a text was made")
    if settings.resume and not settings.output:
        raise UsageError("--resume needs -o, the file or folder to go on with")
    if settings.overwrite and not (settings.output or settings.sidecar):
        raise UsageError("--overwrite needs -o or --sidecar: there is nothing to overwrite")


def _is_folder(target: str) -> bool:
    if target.endswith((".jsonl", ".ndjson")) and not os.path.isdir(target):
        return False
    if target.endswith(("/", os.sep)) or os.path.isdir(target):
        return True
    raise UsageError(f"-o {target}: give FILE.jsonl for records, or FOLDER/ (with the slash) for text files")


def _text_folder(folder: Path, settings: Settings) -> Output:
    if folder.is_dir() and any(folder.iterdir()) and not (settings.overwrite or settings.resume):
        raise UsageError(f"{folder} is not empty: --resume goes on with it, --overwrite replaces what is there")
    log = RecordFile(folder / LOG, overwrite=settings.overwrite, resume=settings.resume)
    return TextFiles(folder, log, replace=True)


class Stdout:
    """Bytes to the real stdout, flushed with every piece."""

    done: Collection[bytes] = ()
    name = "stdout"

    def __init__(self) -> None:
        stream = sys.__stdout__ if sys.stdout is sys.stderr else sys.stdout
        assert stream is not None
        self._binary: IO[bytes] = stream.buffer
        self._encoding = stream.encoding or "utf-8"

    def admit(self, job: Job) -> None:
        """Anything may go to stdout."""

    def close(self, summary: JSON | None) -> None:
        """Nothing is left to write."""

    def _write(self, data: bytes) -> None:
        self._binary.write(data)
        self._binary.flush()


class JsonLines(Stdout):
    """One record a line."""

    def put(self, job: Job, entry: JSON) -> None:
        self._write(encode(entry) + b"\n")


class JsonDocument(Stdout):
    """`{"schema", "records": [...], "summary": {...}}` on one line, written piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def put(self, job: Job, entry: JSON) -> None:
        self._write((b", " if self._count else self._head(entry["schema"])) + encode(entry))
        self._count += 1

    def close(self, summary: JSON | None) -> None:
        if summary is None:
            return
        head = b"" if self._count else self._head(summary["schema"])
        self._write(head + b'], "summary": ' + encode(summary) + b"}\n")

    @staticmethod
    def _head(schema: int) -> bytes:
        return b'{"schema": %d, "records": [' % schema


class Text(Stdout):
    """Readable text; with several pictures each has its path above it. `piece` streams a single answer."""

    def __init__(self, terminal: Terminal, *, alone: bool) -> None:
        super().__init__()
        self._terminal, self._alone, self._streamed = terminal, alone, False
        self._first = True

    def piece(self, text: str) -> None:
        """A piece of the one answer, as soon as it is there."""
        if not self._streamed:
            text = text.lstrip()
        self._streamed = self._streamed or bool(text)
        self._write(self._encoded(clean(text)))

    def put(self, job: Job, entry: JSON) -> None:
        if entry["text"] is None:
            return
        with self._terminal.aside():
            if self._streamed:
                self._write(b"\n")
                return
            heading = "" if self._alone else f"{one_line(' + '.join(job.paths))}\n"
            gap = "" if self._first else "\n"
            self._write(self._encoded(f"{gap}{heading}{clean(entry['text'])}\n"))
            self._first = False

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._encoding, "replace")


class Records:
    """A record file and nothing else."""

    def __init__(self, file: RecordFile) -> None:
        self._file, self.name = file, str(file.path)
        self.done: Collection[bytes] = file.done

    def admit(self, job: Job) -> None:
        """A record can always be added."""

    def put(self, job: Job, entry: JSON) -> None:
        self._file.write(entry)

    def close(self, summary: JSON | None) -> None:
        self._file.close()


class TextFiles:
    """One text file per picture, below `folder` as the pictures' own tree, or beside each picture (`folder` None).

    Each is written under a temporary name and renamed, so that a file that is there is whole. With a record file
    every picture has a record too, failures as well.
    """

    def __init__(self, folder: Path | None, records: RecordFile | None, *, replace: bool) -> None:
        self._folder, self._records, self._replace = folder, records, replace
        self._taken: dict[Path, int] = {}
        self.done: Collection[bytes] = records.done if records else ()
        self.name = str(folder) if folder else str(records.path) if records else "beside the pictures"

    def admit(self, job: Job) -> None:
        path = self._path(job)
        if self._taken.setdefault(path, job.index) != job.index:
            raise PictureError(f"{path} is taken by another picture of this run; use -o FILE.jsonl")
        if not self._replace and path.exists():
            raise PictureError(f"{path} exists; --overwrite replaces it")

    def put(self, job: Job, entry: JSON) -> None:
        if entry["text"] is not None:
            self._write_text(self._path(job), entry["text"])
        if self._records:
            self._records.write(entry)

    def close(self, summary: JSON | None) -> None:
        if self._records:
            self._records.close()

    def _write_text(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write((text + "\n").encode("utf-8", "replace"))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise PictureError(f"{path} can't be written: {error.strerror}") from error

    def _path(self, job: Job) -> Path:
        if self._folder is None:
            source: Any = job.sources[0] if len(job.sources) == 1 else None
            if not isinstance(source, Path):
                raise PictureError("has no place for a text beside it; use -o")
            return source.with_name(source.name + ".txt")
        name = job.relative if job.relative and job.id == ", ".join(job.paths) else job.id
        parts = ["__" if part == ".." else part for part in PurePath(name).parts if part not in ("/", "\\", ".")]
        return self._folder.joinpath(*parts[:-1], (parts[-1] if parts else "stdin") + ".txt")
