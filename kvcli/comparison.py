"""Several policies on many pictures, each against the full cache: one record for every picture and policy.

Knows sessions, fidelity and the record schema, nothing of files and the terminal. A record is that of a described
picture with two more keys: `fidelity` and `bytes_by_step`.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from kvcli import fidelity, records
from kvcli.engine.recording import Trace, record
from kvcli.engine.session import Decoding, Outcome, Prepared, Request, Session
from kvcli.engine.shared import Reading
from kvcli.errors import PictureError, UsageError
from kvcli.policies.base import Policy
from kvcli.policies.full import Full
from kvcli.reading import failure_of

STEPS = 100
"""The search for the smallest budget looks at hundredths."""


@dataclass(frozen=True)
class Subject:
    """A picture, or several in one prompt, and what is asked. answer: the text to measure perplexity on, None for the
    full cache's own. failure: why there is nothing to run."""

    index: int
    id: str
    request: Request
    images: tuple[records.ImageFacts, ...]
    answer: str | None = None
    failure: records.Failure | None = None


@dataclass(frozen=True)
class Measured:
    """A record, and whether it was made now or taken from an earlier run."""

    record: records.JSON
    fresh: bool


@dataclass(frozen=True)
class Comparison:
    """What is done with every subject. together: subjects in one batch; seconds are then of the batch."""

    policies: tuple[Policy, ...]
    decoding: Decoding
    together: int = 1


def run(
    session: Session,
    subjects: Iterable[Subject],
    work: Comparison,
    *,
    done: Mapping[bytes, records.JSON] = MappingProxyType({}),
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Measured]:
    """Records as they come. done: successes of an earlier run by `records.key`; they are given as they are. Ends
    between two policies when asked.

    Where a batch fails, for want of memory or otherwise, its subjects are tried one by one; one that fails alone has
    failed with that policy, and the run goes on.
    """
    group: list[tuple[Subject, Prepared]] = []
    warm = False
    for subject in subjects:
        if stop():
            return
        entries = [_record(session, subject, policy, work) for policy in work.policies]
        known = [done.get(records.key(entry)) for entry in entries]
        if subject.failure or all(known):
            yield from (Measured(k or e, k is None) for k, e in zip(known, entries, strict=True))
            continue
        try:
            group.append((subject, session.prepare(subject.request)))
        except PictureError as error:
            refused = dataclasses.replace(subject, failure=records.Failure("PictureError", str(error)))
            yield from (Measured(_record(session, refused, policy, work), True) for policy in work.policies)
        if len(group) == work.together:
            warm = warm or _warm_up(session, group[0][1])
            yield from _together(session, group, work, done, stop)
            group = []
    if group and not stop():
        if not warm:
            _warm_up(session, group[0][1])
        yield from _together(session, group, work, done, stop)


def _warm_up(session: Session, prepared: Prepared) -> bool:
    """Run two tokens, so that what a first run costs is not laid to the full cache. True when they could be run."""
    try:
        session.run([prepared], Full(), Decoding(max_new_tokens=2))
    except Exception:
        return False  # the run itself will say what is wrong
    return True


def _together(
    session: Session,
    group: Sequence[tuple[Subject, Prepared]],
    work: Comparison,
    done: Mapping[bytes, records.JSON],
    stop: Callable[[], bool],
) -> Iterator[Measured]:
    """All policies on subjects that share a batch."""
    measure = _Measure(session, group, work)
    for number, policy in enumerate(work.policies):
        if stop():
            return
        subjects = [subject for subject, _ in group]
        known = [done.get(records.key(_record(session, subject, policy, work))) for subject in subjects]
        found = [None] * len(subjects) if all(known) else measure(policy)
        if isinstance(found, records.Failure):
            if len(group) > 1:
                rest = dataclasses.replace(work, policies=work.policies[number:], together=1)
                for each in group:
                    yield from _together(session, [each], rest, done, stop)
                return
            subjects, found = [dataclasses.replace(subjects[0], failure=found)], [None]
        for subject, result, before in zip(subjects, found, known, strict=True):
            yield Measured(before or _record(session, subject, policy, work, result), before is None)


class _Measure:
    """Measures policies on one batch; what they share is made when first needed."""

    def __init__(self, session: Session, group: Sequence[tuple[Subject, Prepared]], work: Comparison) -> None:
        self.session, self.work = session, work
        self.batch = [prepared for _, prepared in group]
        self.texts = [subject.answer for subject, _ in group if subject.answer is not None]
        self.reading: Reading | None = None

    @cached_property
    def references(self) -> list[fidelity.Reference]:
        return fidelity.look_up(self.session, self.batch, self.work.decoding, self.texts or None)

    def __call__(self, policy: Policy) -> Sequence[fidelity.Fidelity | None] | records.Failure:
        """Results in the order of the batch, or why there are none."""
        try:
            if policy.name == "full" and not self.session.int8:
                return [fidelity.itself(reference) for reference in self.references]
            self.reading = self.reading or fidelity.read(self.session, self.references, self.work.policies)
            return fidelity.measure(self.session, self.references, policy, self.work.decoding, self.reading)
        except UsageError:
            raise
        except Exception as error:
            # Only words leave this block: the traceback would hold on to the tensors that are to be freed.
            failure = failure_of(error)
        self.reading = None
        gc.collect()
        return failure


def held_after_prompt(session: Session, prepared: Prepared, policies: Sequence[Policy]) -> list[Trace]:
    """What each policy holds once the prompt is in."""
    traces = []
    for policy in policies:
        recording = record(policy)
        session.run([prepared], recording, Decoding(max_new_tokens=1))
        traces.append(recording.trace())
    return traces


@dataclass(frozen=True)
class Baseline:
    """What the full cache wrote about many pictures, without its scores: batches, and the perplexity of it all."""

    batches: tuple[tuple[fidelity.Reference, ...], ...]
    perplexity: float


def baseline(session: Session, subjects: Iterable[Subject], work: Comparison) -> Baseline:
    """Answer all subjects that can be read with the full cache, `work.together` at a time."""
    batches, nats, tokens = [], 0.0, 0
    good = (subject for subject in subjects if subject.failure is None)
    while group := list(itertools.islice(good, work.together)):
        texts = [subject.answer for subject in group if subject.answer is not None]
        prepared = [session.prepare(subject.request) for subject in group]
        found = fidelity.look_up(session, prepared, work.decoding, texts or None)
        for reference in found:
            nats += fidelity.itself(reference).nll_full * len(reference.answer)
            tokens += len(reference.answer)
        batches.append(tuple(dataclasses.replace(reference, logits=reference.logits[:0]) for reference in found))
    return Baseline(tuple(batches), math.exp(nats / tokens) if tokens else math.nan)


def smallest_budget(
    session: Session, full: Baseline, make: Callable[[float], Policy], tolerance: float
) -> tuple[float, dict[float, float]]:
    """The smallest share kept whose loss stays within the tolerance, by bisection, and the loss at all budgets tried.

    The loss is how much perplexity grows against the full cache, as a share: 0.05 is five percent more. Bisection
    takes the loss to fall as the budget grows; where it does not, the answer is one crossing of several.
    """
    losses = {1.0: 0.0}
    alone = len(full.batches) == 1  # more than one reading would be too much to hold
    reading = fidelity.read(session, full.batches[0], [make(0.5)]) if alone else None

    def fits(share: float) -> bool:
        found = [fidelity.surprise(session, batch, make(share), reading) for batch in full.batches]
        nats, tokens = (sum(column) for column in zip(*found, strict=True))
        losses[share] = math.exp(nats / tokens) / full.perplexity - 1
        return losses[share] <= tolerance

    low, high = 0, STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle / STEPS) else (middle, high)
    return high / STEPS, losses


def _record(
    session: Session, subject: Subject, policy: Policy, work: Comparison, result: fidelity.Fidelity | None = None
) -> records.JSON:
    """The record of one subject and policy; without a result that of a failure, or of what is to be done."""
    decoding = dataclasses.asdict(fidelity.greedy(work.decoding))
    entry = records.record(
        records.RunFacts(
            model=session.model_name,
            revision=session.revision,
            device=str(session.device),
            dtype=str(session.dtype).removeprefix("torch."),
            kv_dtype=session.kv_dtype,
            policy={"name": policy.name, **policy.resolved()},
            decoding={**decoding, "reference": subject.answer},
            load_seconds=session.load_seconds,
        ),
        index=subject.index,
        id=subject.id,
        prompt=subject.request.prompt,
        system=subject.request.system,
        images=subject.images,
        warnings=result.outcome.warnings if result else (),
        answer=None if result is None else _answer(result.outcome, work.together),
        failure=subject.failure,
    )
    scores = None if result is None else _scores(result)
    steps = None if result is None else [step.bytes_used for step in result.outcome.steps]
    return {**entry, "sees_question": policy.sees_question, "fidelity": scores, "bytes_by_step": steps}


def _answer(outcome: Outcome, together: int) -> records.Answer:
    names = [name for name in records.Answer.__dataclass_fields__ if name != "batch_size"]
    return records.Answer(**{name: getattr(outcome, name) for name in names}, batch_size=together)


def _scores(result: fidelity.Fidelity) -> dict[str, Any]:
    named = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "outcome"}
    return {"perplexity": result.perplexity, "perplexity_full": result.perplexity_full, **named}
