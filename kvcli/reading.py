"""What becomes of one job before the model sees it: its pictures are read, decoded and prepared.

Knows files, the processor and the schema of records; runs no model. Nothing that is wrong with one picture leaves
here as an exception: it becomes that picture's `Failure`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil

from kvcli import images, records
from kvcli.errors import PictureError
from kvcli.jobs import Job
from kvcli.records import JSON, Answer, Failure, ImageFacts, RunFacts

if TYPE_CHECKING:
    from kvcli.engine.session import Decoding, Outcome, Prepared, Session
    from kvcli.policies.base import Policy

OUT_OF_MEMORY = "OutOfMemory"
SHARE_OF_HOST_MEMORY = 0.25
"""How much of the host's free memory pictures that wait for the model may take."""
MOST_AHEAD = 8 * 2**30
"""And how many bytes at most: what is free is not always ours, as in a container."""


@dataclass(frozen=True)
class Work:
    """What is to be done with every picture. `batch_size` None is automatic, `max_errors` None unlimited; `ahead`:
    bytes of pictures that may wait for the model."""

    policy: Policy
    decoding: Decoding
    prompt: str
    system: str | None
    facts: RunFacts
    batch_size: int | None = None
    max_pixels: int = images.DEFAULT_MAX_PIXELS
    max_errors: int | None = None
    workers: int = field(default_factory=lambda: min(8, os.cpu_count() or 1))
    ahead: int = field(
        default_factory=lambda: min(MOST_AHEAD, int(psutil.virtual_memory().available * SHARE_OF_HOST_MEMORY))
    )


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
    def nbytes(self) -> int:
        """What it holds in memory: the processor's tensors, and pictures that are still needed."""
        if self.prepared is None:
            return 0
        pictures = (p.width * p.height * len(p.getbands()) for p in self.prepared.request.images)
        return sum(pictures) + sum(map(_nbytes, self.prepared.inputs.values()))

    @cached_property
    def shape(self) -> frozenset[tuple[Any, ...]]:
        """What the processor made, but for the length of the prompt: inputs of one shape can be joined."""
        from kvcli.engine.prompts import PER_TOKEN

        assert self.prepared is not None
        inputs = self.prepared.inputs.items()
        return frozenset((name, *getattr(value, "shape", ())[1:]) for name, value in inputs if name not in PER_TOKEN)


def _nbytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))


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
