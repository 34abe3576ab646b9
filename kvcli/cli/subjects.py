"""What `kvcli compare` reads and writes: pictures to compare on, given answers, and the file of records."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli import study
from kvcli.cli.options import Settings
from kvcli.cli.terminal import Terminal
from kvcli.errors import PictureError, UsageError

if TYPE_CHECKING:
    from kvcli.comparison import Subject
    from kvcli.jobs import Job
    from kvcli.records import JSON


def read_references(path: str) -> dict[str, str]:
    """Answers by id or path from a JSONL file: each line has `id` or `path` (or `image`), and `answer` or `text`."""
    answers: dict[str, str] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--references {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            text = fields.get("answer") or fields.get("text")
        except (ValueError, AttributeError) as error:
            raise UsageError(f"--references {path}, line {number} is no JSON object") from error
        names = [fields[k] for k in ("id", "path", "image") if isinstance(fields.get(k), str)]
        if not isinstance(text, str) or not text.strip() or not names:
            raise UsageError(f"--references {path}, line {number} needs `id` or `path`, and `answer` or `text`")
        answers |= dict.fromkeys(names, text)
    return answers


def opened(
    jobs: Iterable[Job], prompt: str, settings: Settings, screen: Terminal, given: Mapping[str, str] | None
) -> Iterator[Subject]:
    """The pictures, opened one by one; one that can't be read says why."""
    from kvcli.comparison import Subject
    from kvcli.engine.session import Request
    from kvcli.records import Failure, ImageFacts

    for job in jobs:
        answer = None if given is None else _answer(given, job.id, job.paths)
        try:
            read = study.open_job(job, prompt, settings, screen)
            if given is not None and answer is None:
                raise PictureError(f"--references has no answer for {job.id}")
            yield Subject(job.index, job.id, read.request, read.images, answer)
        except PictureError as error:
            request = Request((), *study.asked(job, prompt, settings))
            images = tuple(ImageFacts(path) for path in job.paths)
            yield Subject(job.index, job.id, request, images, answer, Failure("PictureError", str(error)))


def _answer(given: Mapping[str, str], name: str, paths: tuple[str, ...]) -> str | None:
    names = (name, *paths, *(Path(path).name for path in paths))
    return next((given[candidate] for candidate in names if candidate in given), None)


def record_file(settings: Settings, stack: contextlib.ExitStack) -> tuple[dict[bytes, JSON], Callable[[JSON], None]]:
    """Successes of an earlier run by key, and what takes each new record."""
    from kvcli import records

    if settings.output is None:
        if settings.resume:
            raise UsageError("--resume needs -o FILE.jsonl to go on with")
        return {}, (lambda entry: None)
    path = Path(settings.output)
    if path.suffix != ".jsonl":
        raise UsageError(f"--output {path} must end in .jsonl: compare writes records")
    file = records.RecordFile(path, overwrite=settings.overwrite, resume=settings.resume)
    stack.callback(file.close)
    known = {}
    if settings.resume:
        with path.open("rb") as lines:
            for entry in filter(None, map(records.parse, lines)):
                if not entry["error"] and entry.get("fidelity"):
                    known[records.key(entry)] = entry
    return known, file.write
