"""The batch run: pictures are read ahead by threads, grouped by length, described, and reported as events.

`run` is a generator and knows no terminal and no file that it writes to: whoever consumes the events does. Each job
ends in exactly one `Settled`, whatever happens to it or to its neighbours.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcli.ahead import Ahead
from kvcli.jobs import Job, Stray
from kvcli.reading import OUT_OF_MEMORY, Reader, Ready, Work, failure_of, record_of
from kvcli.records import JSON, Failure

if TYPE_CHECKING:
    from kvcli.engine.session import Outcome, Session

__all__ = ["Event", "Halted", "Notice", "Settled", "Work", "in_order", "is_done", "run"]

WINDOW = 4
"""Batches' worth of pictures among which those of like length are put together."""
MOST_AT_A_TIME = {"cpu": 16}
"""Pictures in an automatic batch, by device: beyond it a step gains little."""
OTHER_DEVICES = 64
SHARE_OF_FREE_MEMORY = 0.5
"""How much of what is free an automatic batch's cache may take; the rest is for activations."""


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

    reader = Reader(session, work, done, admit)
    runner = _Runner(session, work, over, on_text)
    depth = (WINDOW + 1) * runner.most + work.workers
    with contextlib.closing(Ahead(jobs, reader, work.workers, depth, work.ahead)) as ahead:
        window = _Window(ahead, runner, work)
        while window.waiting or not ahead.empty:
            for event in window.round():
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
    return Reader(session, work, done, None)(job, 0).done


class _Window:
    """The pictures that wait for the model, from which batches are picked.

    The first batch runs as soon as it can be full. Each later one is picked from one batch more, up to WINDOW of
    them, which are read while the model works. What is counted, not how fast it came, decides: a second run makes
    the same batches, unless the stream of jobs is slow or pictures fill the memory.
    """

    def __init__(self, ahead: Ahead, runner: _Runner, work: Work) -> None:
        self.ahead, self.runner, self.work = ahead, runner, work
        self.waiting: dict[int, Ready] = {}
        self.batches = 1

    def round(self) -> Iterator[Event]:
        """Take an item, and settle it if it needs no model; or run a batch if there is enough for one, or no more
        comes for now."""
        full = self._is_full()
        item = None if full else self.ahead.take()
        if item is None:
            if self.waiting and (full or not self.ahead.reading):
                yield from self._run()
        elif isinstance(item, Ready) and item.prepared is not None:
            self.waiting[item.order] = item
        else:
            self.ahead.let_go(item)
            if isinstance(item, Stray):
                yield item
            else:
                yield Settled(item.job, item.order, None if item.done else record_of(item, self.work))

    def _candidates(self) -> list[Ready]:
        """Those that can be in a batch with the oldest."""
        oldest = next(iter(self.waiting.values()))
        return [item for item in self.waiting.values() if item.shape == oldest.shape]

    def _is_full(self) -> bool:
        if not self.waiting:
            return False
        candidates = self._candidates()
        size = self.runner.size(candidates)
        return len(self.waiting) >= self.batches * self.runner.most or len(candidates) > self.batches * size

    def _run(self) -> Iterator[Event]:
        candidates = self._candidates()
        self.batches = min(self.batches + 1, WINDOW)
        for event in self.runner.run(_pick(candidates, self.runner.size(candidates))):
            if isinstance(event, Settled):
                self.ahead.let_go(self.waiting.pop(event.order))
            yield event


def _pick(waiting: list[Ready], size: int) -> list[Ready]:
    """The `size` pictures, the oldest among them, that need the least padding."""
    line = sorted(waiting, key=lambda item: (item.length, item.order))
    oldest = line.index(min(line, key=lambda item: item.order))
    starts = range(max(0, oldest - size + 1), min(oldest, max(0, len(line) - size)) + 1)
    return min((line[start : start + size] for start in starts), key=_padding)


def _padded(batch: list[Ready]) -> int:
    return len(batch) * max(item.length for item in batch)


def _padding(batch: list[Ready]) -> int:
    return _padded(batch) - sum(item.length for item in batch)


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

    def size(self, waiting: list[Ready]) -> int:
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

    def run(self, batch: list[Ready]) -> Iterator[Event]:
        """Settle every picture of a batch, unless asked to stop between its parts."""
        parts = deque([batch])
        while parts and not self.stop():
            part = parts.popleft()
            outcomes = self._attempt(part)
            if not isinstance(outcomes, Failure):
                for item, outcome in zip(part, outcomes, strict=True):
                    yield Settled(item.job, item.order, record_of(item, self.work, outcome, len(part)))
            elif len(part) == 1:
                item = replace(part[0], failure=outcomes)
                yield Settled(item.job, item.order, record_of(item, self.work))
            elif outcomes.type == OUT_OF_MEMORY:
                half = (len(part) + 1) // 2
                self.room = min(self.room, _padded(part[:half]))
                yield Notice(f"out of memory with {len(part)} pictures at a time, going on with {half}")
                parts.extendleft([part[half:], part[:half]])
            else:
                # One of them is at fault and nobody knows which: alone, each gets what it would have got alone.
                parts.extendleft([item] for item in reversed(part))

    def _attempt(self, part: list[Ready]) -> list[Outcome] | Failure:
        batch = [item.prepared for item in part if item.prepared is not None]
        try:
            return self.session.run(
                batch, self.work.policy, self.work.decoding, on_text=self.on_text if len(batch) == 1 else None
            )
        except Exception as error:
            # Only words leave this block: the traceback would hold on to the tensors that are to be freed.
            failure = failure_of(error)
        if failure.type == OUT_OF_MEMORY:
            _free_memory()
        return failure


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
