"""Several policies on many pictures, each against the full cache: one record for every picture and policy.

Knows sessions, fidelity and the record schema, nothing of files and the terminal. A record is that of a described
picture with two more keys: `fidelity` and `bytes_by_step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvcli import fidelity, records
from kvcli.engine.recording import Trace, record
from kvcli.engine.session import Decoding, Outcome, Prepared, Request, Session
from kvcli.errors import PictureError
from kvcli.policies.base import Policy
from kvcli.policies.full import Full

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
    between two policies when asked."""
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
            if not warm:
                _warm_up(session, group[0][1])
                warm = True
            yield from _together(session, group, work, done, stop)
            group = []
    if group and not stop():
        yield from _together(session, group, work, done, stop)


def _warm_up(session: Session, prepared: Prepared) -> None:
    """Run two tokens, so that what a first run costs is not laid to the full cache."""
    session.run([prepared], Full(), Decoding(max_new_tokens=2))


def _together(
    session: Session,
    group: Sequence[tuple[Subject, Prepared]],
    work: Comparison,
    done: Mapping[bytes, records.JSON],
    stop: Callable[[], bool],
) -> Iterator[Measured]:
    """All policies on subjects that share a batch."""
    subjects = [subject for subject, _ in group]
    texts = [subject.answer for subject in subjects if subject.answer is not None]
    references = fidelity.look_up(session, [prepared for _, prepared in group], work.decoding, texts or None)
    reading = None
    for policy in work.policies:
        if stop():
            return
        known = [done.get(records.key(_record(session, subject, policy, work))) for subject in subjects]
        if all(known):
            results: Sequence[fidelity.Fidelity | None] = [None] * len(subjects)
        elif policy.name == "full" and not session.int8:
            results = [fidelity.itself(reference) for reference in references]
        else:
            reading = reading or fidelity.read(session, references, work.policies)
            results = fidelity.measure(session, references, policy, work.decoding, reading)
        for subject, result, before in zip(subjects, results, known, strict=True):
            yield Measured(before or _record(session, subject, policy, work, result), before is None)


def held_after_prompt(session: Session, prepared: Prepared, policies: Sequence[Policy]) -> list[Trace]:
    """What each policy holds once the prompt is in."""
    traces = []
    for policy in policies:
        recording = record(policy)
        session.run([prepared], recording, Decoding(max_new_tokens=1))
        traces.append(recording.trace())
    return traces


def smallest_budget(
    session: Session,
    references: Sequence[fidelity.Reference],
    make: Callable[[float], Policy],
    tolerance: float,
) -> tuple[float, dict[float, float]]:
    """The smallest share kept whose loss stays within the tolerance, by bisection, and the loss at all budgets tried.

    The loss is how much perplexity grows against the full cache, as a share: 0.05 is five percent more. Bisection
    takes the loss to fall as the budget grows; where it does not, the answer is one crossing of several.
    """
    base = fidelity.perplexity([fidelity.itself(reference) for reference in references])
    losses, reading = {1.0: 0.0}, fidelity.read(session, references, [make(0.5)])

    def fits(share: float) -> bool:
        scores = fidelity.score(session, references, make(share), reading)
        losses[share] = fidelity.perplexity(scores) / base - 1
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
