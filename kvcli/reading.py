"""Pictures read ahead of the model: decoded and prepared by threads, a bounded number at a time.

Knows files, the processor and the schema of records; runs no model. Nothing that is wrong with one picture leaves
here as an exception: it becomes that picture's `Failure`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcli import images, records
from kvcli.errors import PictureError
from kvcli.inputs import Job, Stray
from kvcli.records import JSON, Answer, Failure, ImageFacts, RunFacts

if TYPE_CHECKING:
    from kvcli.engine.session import Decoding, Outcome, Prepared, Session
    from kvcli.policies.base import Policy

OUT_OF_MEMORY = "OutOfMemory"


@dataclass(frozen=True)
class Work:
    """What is to be done with every picture. `batch_size` None is automatic, `max_errors` None unlimited."""

    policy: Policy
    decoding: Decoding
    prompt: str
    system: str | None
    facts: RunFacts
    batch_size: int | None = None
    max_pixels: int = images.DEFAULT_MAX_PIXELS
    max_errors: int | None = None
    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))


@dataclass(frozen=True)
class Ready:
    """A job that has been read: prepared for the model, or done before, or failed."""

    job: Job
    order: int
    images: tuple[ImageFacts, ...]
    warnings: tuple[str, ...]
    seconds: float
    prepared: Prepared | None = None
    failure: Failure | None = None
    done: bool = False

    @property
    def length(self) -> int:
        assert self.prepared is not None
        return self.prepared.length

    @cached_property
    def shape(self) -> frozenset[tuple[Any, ...]]:
        """What the processor made, but for the length of the prompt: inputs of one shape can be joined."""
        from kvcli.engine.prompts import PER_TOKEN

        assert self.prepared is not None
        inputs = self.prepared.inputs.items()
        return frozenset((name, *getattr(value, "shape", ())[1:]) for name, value in inputs if name not in PER_TOKEN)


def record_of(item: Ready, work: Work, outcome: Outcome | None = None, batch_size: int = 0) -> JSON:
    """The record of a job: with an outcome a described one, with a failure a failed one."""
    answer = None
    if outcome is not None:
        names = [name for name in Answer.__dataclass_fields__ if name != "batch_size"]
        answer = Answer(**{name: getattr(outcome, name) for name in names}, batch_size=batch_size)
    return records.record(
        work.facts,
        index=item.job.index,
        id=item.job.id,
        prompt=work.prompt if item.job.prompt is None else item.job.prompt,
        system=work.system if item.job.system is None else item.job.system,
        images=item.images,
        image_seconds=item.seconds,
        warnings=item.warnings + (outcome.warnings if outcome else ()),
        answer=answer,
        failure=item.failure,
    )


class Reader:
    """Reads, decodes and prepares one job; called from several threads, never raises."""

    def __init__(
        self, session: Session, work: Work, done: Collection[bytes], admit: Callable[[Job], None] | None
    ) -> None:
        self.session, self.work, self.done, self.admit = session, work, done, admit

    def __call__(self, job: Job, order: int) -> Ready:
        start = time.perf_counter()
        known = [ImageFacts(path) for path in job.paths]
        notes: list[str] = []
        item = Ready(job, order, (), (), 0.0)
        try:
            done, prepared = self._read(item, known, notes)
            item = replace(item, done=done, prepared=prepared)
        except PictureError as error:
            item = replace(item, failure=Failure("PictureError", str(error)))
        except Exception as error:
            item = replace(item, failure=failure_of(error))
        return replace(item, images=tuple(known), warnings=tuple(notes), seconds=time.perf_counter() - start)

    def _read(self, item: Ready, known: list[ImageFacts], notes: list[str]) -> tuple[bool, Prepared | None]:
        from kvcli.engine.session import Request

        if item.job.error:
            raise PictureError(item.job.error)
        if self.admit:
            self.admit(item.job)
        files = []
        for place, source in enumerate(item.job.sources):
            data = images.read(source)
            files.append(data)
            known[place] = replace(known[place], sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        wanted = record_of(replace(item, images=tuple(known)), self.work)
        if self.done and records.key(wanted) in self.done:
            return True, None
        pictures = []
        for place, data in enumerate(files):
            picture = images.load(data, max_pixels=self.work.max_pixels)
            width, height = picture.image.size
            known[place] = replace(known[place], format=picture.format, width=width, height=height)
            notes.extend(picture.warnings)
            pictures.append(picture.image)
        # Draws depend on the picture and what is asked about it, not on its name or place in the run.
        identity = "\n".join([*(str(image.sha256) for image in known), str(wanted["prompt"])])
        request = Request(tuple(pictures), wanted["prompt"], system=wanted["system"], key=identity)
        return False, _without_pixels(self.session.prepare(request))


def _without_pixels(prepared: Prepared) -> Prepared:
    """The same, without pictures that have served: a window of large photographs would fill the memory.

    Inputs that are no tensors can't be joined, so a batch of those needs its pictures again.
    """
    if all(hasattr(value, "shape") for value in prepared.inputs.values()):
        return replace(prepared, request=replace(prepared.request, images=()))
    return prepared


class Ahead:
    """Takes jobs from their stream and has a bounded number of them read by threads, ahead of the model."""

    def __init__(self, jobs: Iterable[Job | Stray], reader: Reader, workers: int, depth: int) -> None:
        self._jobs, self._reader, self._depth = iter(jobs), reader, depth + workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvcli-read")
        self._queue: deque[Future[Ready] | Stray] = deque()
        self._taken = 0
        self._error: Exception | None = None
        self._ended = False

    @property
    def empty(self) -> bool:
        """Whether nothing is left to take."""
        self._fill()
        return not self._queue

    def take(self, count: int) -> list[Ready | Stray]:
        """Up to `count` items in the order of the jobs; fewer only at the end."""
        result: list[Ready | Stray] = []
        while len(result) < count and not self.empty:
            item = self._queue.popleft()
            result.append(item if isinstance(item, Stray) else item.result())
        self._fill()
        return result

    def raise_error(self) -> None:
        """Raise what ended the stream of jobs, if that was an error."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Forget what has not been read yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while not self._ended and len(self._queue) < self._depth:
            try:
                item = next(self._jobs)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._error, self._ended = error, True
            else:
                self._queue.append(item if isinstance(item, Stray) else self._submit(item))

    def _submit(self, job: Job) -> Future[Ready]:
        future = self._pool.submit(self._reader, job, self._taken)
        self._taken += 1
        return future


def failure_of(error: Exception) -> Failure:
    """What a record says about an exception, in one line."""
    import torch

    text = " ".join(str(error).split())
    short = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "out of memory" in text)
    )
    if short:
        return Failure(OUT_OF_MEMORY, "not enough memory for this picture; try a smaller one or fewer tokens")
    name = type(error).__name__
    return Failure(name, text[:500] or name)
