"""The batch run: pictures are read ahead by threads, grouped by length, described, and reported as events.

`run` is a generator and knows no terminal and no file that it writes to: whoever consumes the events does. Each job
ends in exactly one `Settled`, whatever happens to it or to its neighbours.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
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

WINDOW = 4
"""Batches' worth of pictures among which those of like length are put together."""
MOST_AT_A_TIME = {"cpu": 16}
"""Pictures in an automatic batch, by device: beyond it a step gains little (CPU: 12.8 ms a picture at 16)."""
OTHER_DEVICES = 64
SHARE_OF_FREE_MEMORY = 0.5
"""How much of what is free an automatic batch's cache may take; the rest is for activations."""


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
class Settled:
    """A job's end: its record (described or failed), or None when it was done before. `order` counts jobs as they
    were taken, without gaps."""

    job: Job
    order: int
    record: JSON | None

    @property
    def failed(self) -> bool:
        return self.record is not None and self.record["error"] is not None


@dataclass(frozen=True)
class Notice:
    """Something that the user should know, in one line."""

    text: str


@dataclass(frozen=True)
class Halted:
    """The run ends early: too many failures, or it was asked to stop."""

    reason: str


Event = Settled | Notice | Halted | Stray


@dataclass(frozen=True)
class _Ready:
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


def run(
    session: Session,
    jobs: Iterable[Job | Stray],
    work: Work,
    *,
    done: Collection[bytes] = (),
    admit: Callable[[Job], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_text: Callable[[str], None] | None = None,
) -> Generator[Event, None, None]:
    """Describe all jobs.

    done: keys (`records.key`) of work that needs no repeating. admit: called before a job is read, raises
    `PictureError` for one that can't be taken. stop: asked between batches. on_text: pieces of text as they come,
    for a single job. An error of the job stream itself is raised after everything taken from it has settled.
    """
    failures = 0

    def over() -> bool:
        return stop() or (work.max_errors is not None and failures >= work.max_errors)

    reader = _Reader(session, work, done, admit)
    runner = _Runner(session, work, over, on_text)
    waiting: dict[int, _Ready] = {}
    with contextlib.closing(_Ahead(jobs, reader, work.workers, runner.window)) as ahead:
        while waiting or not ahead.empty:
            for event in _round(ahead, runner, waiting, work):
                failures += isinstance(event, Settled) and event.failed
                yield event
            if over():
                yield Halted("interrupted" if stop() else f"stopped after {failures} failed")
                return
        ahead.raise_error()


def in_order(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, with those of jobs in the order of the jobs."""
    held: dict[int, Settled] = {}
    expected = 0
    for event in events:
        if not isinstance(event, Settled):
            yield event
            continue
        held[event.order] = event
        while expected in held:
            yield held.pop(expected)
            expected += 1
    yield from (held[order] for order in sorted(held))


def is_done(session: Session, job: Job, work: Work, done: Collection[bytes]) -> bool:
    """Whether a resumed run would skip this job. Reads its pictures, decodes none that is done."""
    return _Reader(session, work, done, None)(job, 0).done


def _round(ahead: _Ahead, runner: _Runner, waiting: dict[int, _Ready], work: Work) -> Iterator[Event]:
    """Take what has been read, settle what needs no model, and run one batch of the rest."""
    for item in ahead.take(runner.window - len(waiting)):
        if isinstance(item, Stray):
            yield item
        elif item.prepared is None:
            yield Settled(item.job, item.order, None if item.done else _record(item, work))
        else:
            waiting[item.order] = item
    if waiting:
        oldest = next(iter(waiting.values()))
        candidates = [item for item in waiting.values() if item.shape == oldest.shape]
        for event in runner.run(_pick(candidates, runner.size(candidates))):
            if isinstance(event, Settled):
                del waiting[event.order]
            yield event


def _pick(waiting: list[_Ready], size: int) -> list[_Ready]:
    """The `size` pictures, the oldest among them, that need the least padding."""
    line = sorted(waiting, key=lambda item: (item.length, item.order))
    oldest = line.index(min(line, key=lambda item: item.order))
    starts = range(max(0, oldest - size + 1), min(oldest, max(0, len(line) - size)) + 1)
    return min((line[start : start + size] for start in starts), key=_padding)


def _padded(batch: list[_Ready]) -> int:
    return len(batch) * max(item.length for item in batch)


def _padding(batch: list[_Ready]) -> int:
    return _padded(batch) - sum(item.length for item in batch)


def _record(item: _Ready, work: Work, outcome: Outcome | None = None, batch_size: int = 0) -> JSON:
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


class _Reader:
    """Reads, decodes and prepares one job; called from several threads, never raises."""

    def __init__(
        self, session: Session, work: Work, done: Collection[bytes], admit: Callable[[Job], None] | None
    ) -> None:
        self.session, self.work, self.done, self.admit = session, work, done, admit

    def __call__(self, job: Job, order: int) -> _Ready:
        start = time.perf_counter()
        known = [ImageFacts(path) for path in job.paths]
        notes: list[str] = []
        item = _Ready(job, order, (), (), 0.0)
        try:
            done, prepared = self._read(item, known, notes)
            item = replace(item, done=done, prepared=prepared)
        except PictureError as error:
            item = replace(item, failure=Failure("PictureError", str(error)))
        except Exception as error:
            item = replace(item, failure=_failure(error))
        return replace(item, images=tuple(known), warnings=tuple(notes), seconds=time.perf_counter() - start)

    def _read(self, item: _Ready, known: list[ImageFacts], notes: list[str]) -> tuple[bool, Prepared | None]:
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
        wanted = _record(replace(item, images=tuple(known)), self.work)
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
        prepared = self.session.prepare(request)
        # The pixels have served: a window of large photographs would fill the memory.
        return False, replace(prepared, request=replace(request, images=()))


class _Ahead:
    """Takes jobs from their stream and has a bounded number of them read by threads, ahead of the model."""

    def __init__(self, jobs: Iterable[Job | Stray], reader: _Reader, workers: int, depth: int) -> None:
        self._jobs, self._reader, self._depth = iter(jobs), reader, depth + workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvcli-read")
        self._queue: deque[Future[_Ready] | Stray] = deque()
        self._taken = 0
        self._error: Exception | None = None
        self._ended = False

    @property
    def empty(self) -> bool:
        """Whether nothing is left to take."""
        self._fill()
        return not self._queue

    def take(self, count: int) -> list[_Ready | Stray]:
        """Up to `count` items in the order of the jobs; fewer only at the end."""
        result: list[_Ready | Stray] = []
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

    def _submit(self, job: Job) -> Future[_Ready]:
        future = self._pool.submit(self._reader, job, self._taken)
        self._taken += 1
        return future


class _Runner:
    """Runs batches, and makes them smaller when memory is short."""

    def __init__(
        self,
        session: Session,
        work: Work,
        stop: Callable[[], bool],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.session, self.work, self.stop, self.on_text = session, work, stop, on_text
        self.most = work.batch_size or MOST_AT_A_TIME.get(session.device.type, OTHER_DEVICES)
        self.room = math.inf  # padded tokens of a batch that memory is known to allow
        self.window = self.most * WINDOW

    def size(self, waiting: list[_Ready]) -> int:
        """How many pictures the next batch may have."""
        size = min(self.most, len(waiting))
        lengths = sorted((item.length for item in waiting), reverse=True)
        if self.work.batch_size is None and size > 1:
            free = self.session.free_bytes() * SHARE_OF_FREE_MEMORY
            work = self.work
            while size > 1 and self.session.batch_bytes(lengths[:size], work.policy, work.decoding) > free:
                size = (size + 1) // 2
        while size > 1 and size * lengths[0] > self.room:
            size = (size + 1) // 2
        return size

    def run(self, batch: list[_Ready]) -> Iterator[Event]:
        """Settle every picture of a batch, unless asked to stop between its parts."""
        parts = deque([batch])
        while parts and not self.stop():
            part = parts.popleft()
            outcomes = self._attempt(part)
            if not isinstance(outcomes, Failure):
                for item, outcome in zip(part, outcomes, strict=True):
                    yield Settled(item.job, item.order, _record(item, self.work, outcome, len(part)))
            elif len(part) == 1:
                item = replace(part[0], failure=outcomes)
                yield Settled(item.job, item.order, _record(item, self.work))
            elif outcomes.type == OUT_OF_MEMORY:
                half = (len(part) + 1) // 2
                self.room = min(self.room, _padded(part[:half]))
                yield Notice(f"out of memory with {len(part)} pictures at a time, going on with {half}")
                parts.extendleft([part[half:], part[:half]])
            else:
                # One of them is at fault and nobody knows which: alone, each gets what it would have got alone.
                parts.extendleft([item] for item in reversed(part))

    def _attempt(self, part: list[_Ready]) -> list[Outcome] | Failure:
        batch = [item.prepared for item in part if item.prepared is not None]
        try:
            return self.session.run(
                batch, self.work.policy, self.work.decoding, on_text=self.on_text if len(batch) == 1 else None
            )
        except Exception as error:
            # Only words leave this block: the traceback would hold on to the tensors that are to be freed.
            failure = _failure(error)
        if failure.type == OUT_OF_MEMORY:
            _free_memory()
        return failure


OUT_OF_MEMORY = "OutOfMemory"


def _failure(error: Exception) -> Failure:
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


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
