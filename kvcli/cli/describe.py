"""`kvcli describe`: pictures in, texts or records out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvcli.cli import errors, run
from kvcli.cli.options import picture_command
from kvcli.cli.settings import Resolved
from kvcli.cli.terminal import Interrupts, Terminal, count_of, duration
from kvcli.report import units
from kvcli.report.units import size

if TYPE_CHECKING:
    from kvcli.batch import Event, Work
    from kvcli.cli.outputs import Output
    from kvcli.engine.session import Session
    from kvcli.jobs import Job, Stray
    from kvcli.records import JSON


@picture_command()
def describe(inputs: list[str], settings: Resolved) -> int:
    """Describe pictures, keeping only a part of the KV cache.

    kvcli describe cat.jpg

    kvcli describe photos/ -r --budget 0.2 -o captions.jsonl --resume

    Every switch has a --no- form, every setting a KVCLI_ variable and a line in kvcli.yaml: see `kvcli config`.
    """
    from kvcli.inputs import comes_piped

    screen, clock = run.terminal(settings), run.Clock()
    prompt = run.read_prompt(inputs, settings)
    policy = run.make_policy(settings)
    jobs = run.find_jobs(inputs, settings)
    # what a pipe will bring is not waited for: it counts as several pictures
    first = [] if comes_piped(inputs, settings.from_file) else list(itertools.islice(jobs, 2))
    alone = len(first) == 1
    jobs = itertools.chain(first, jobs)
    if settings.dry_run and not settings.resume:
        return _list_jobs(jobs, screen)
    from kvcli.cli import outputs

    output = outputs.choose(settings, screen, alone=alone)
    tally = Tally()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: output.close(tally.summary() if tally.started else None))
        with run.stdout_is_data():
            session = run.load_session(settings, screen, clock)
            work = make_work(session, policy, prompt, settings)
        if settings.dry_run:
            return _list_jobs(_undone(jobs, session, work, output), screen)
        tally.started = time.monotonic()
        count = None if alone else (lambda: run.count_jobs(inputs, settings))
        asked = _describe_all(jobs, session, work, output, tally, screen, clock, settings, count)
    _close(tally, screen, output, alone)
    return errors.INTERRUPTED if asked else tally.exit_code()


def make_work(session: Session, policy: Any, prompt: str, settings: Resolved) -> Work:
    """What the batch run needs to know."""
    from kvcli import images
    from kvcli.batch import Work
    from kvcli.records import RunFacts

    decoding = run.make_decoding(settings)
    facts = RunFacts(
        model=session.model_name,
        revision=session.revision,
        device=str(session.device),
        dtype=str(session.dtype).removeprefix("torch."),
        kv_dtype=session.kv_dtype,
        policy={"name": settings.policy, **policy.resolved()},
        decoding=dataclasses.asdict(decoding),
        load_seconds=session.load_seconds,
    )
    return Work(
        policy,
        decoding,
        prompt,
        settings.system,
        facts,
        batch_size=settings.batch_size,
        max_pixels=settings.max_pixels or images.DEFAULT_MAX_PIXELS,
        max_errors=1 if settings.fail_fast else settings.max_errors,
    )


@dataclasses.dataclass
class Tally:
    """Counts of a run."""

    started: float | None = None
    done: int = 0
    skipped: int = 0
    strays: int = 0
    failed: int = 0
    generated: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    halted: str | None = None

    def add(self, job: Job, entry: JSON | None) -> None:
        if entry is None:
            self.skipped += 1
        elif entry["error"]:
            self.failed += 1
            self.failures = [*self.failures, job.id][:3]
        else:
            self.done += 1
            self.generated += entry["tokens"]["generated"]

    @property
    def seconds(self) -> float:
        """Since the first picture was taken up."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def exit_code(self) -> int:
        if not self.failed:
            return errors.OK
        return errors.SOME_FAILED if self.done or self.skipped else errors.ALL_FAILED

    def summary(self) -> JSON:
        from kvcli.records import SCHEMA

        counts = {name: getattr(self, name) for name in ("done", "skipped", "strays", "failed")}
        return {
            "schema": SCHEMA,
            **counts,
            "generated_tokens": self.generated,
            "seconds": round(self.seconds, 3),
            "halted": self.halted,
        }


def _describe_all(
    jobs: Iterator[Job | Stray],
    session: Session,
    work: Work,
    output: Output,
    tally: Tally,
    screen: Terminal,
    clock: run.Clock,
    settings: Resolved,
    count: Callable[[], int | None] | None,
) -> bool:
    """Run all jobs into the output; True when the user asked to stop."""
    from kvcli import batch
    from kvcli.cli.outputs import Text

    # an answer that ends before a stop text is known only when that text is complete
    streams = count is None and settings.num_beams == 1 and not settings.stop
    first_token = _FirstToken(output.piece) if streams and isinstance(output, Text) else None
    with Interrupts(screen) as interrupts, screen.progress(count), run.stdout_is_data():
        events = batch.run(
            session, jobs, work, done=output.done, admit=output.admit,
            stop=lambda: interrupts.asked, on_text=first_token,
        )  # fmt: skip
        with contextlib.closing(events):
            for event in batch.in_order(events) if settings.ordered else events:
                _take(event, output, tally, screen, text=isinstance(output, Text))
                _tell_times(event, clock, first_token, screen)
    return interrupts.asked


def _take(event: Event, output: Output, tally: Tally, screen: Terminal, *, text: bool) -> None:
    from kvcli import batch
    from kvcli.errors import PictureError

    if isinstance(event, batch.Notice):
        screen.note(event.text)
    elif isinstance(event, batch.Halted):
        tally.halted = event.reason
    elif isinstance(event, batch.Settled):
        entry = event.record
        if entry is not None:
            try:
                output.put(event.job, entry)
            except PictureError as error:
                entry = entry | {"text": None, "error": {"type": "PictureError", "message": str(error)}}
                output.put(event.job, entry)
            _tell(entry, screen, text=text)
        tally.add(event.job, entry)
        screen.settled(failed=bool(entry and entry["error"]))
    else:
        tally.strays += 1
        screen.detail(f"{event.path}: no picture, skipped")


def _tell(entry: JSON, screen: Terminal, *, text: bool) -> None:
    """What stderr says about one picture."""
    if entry["error"]:
        screen.error(f"{entry['id']}: {entry['error']['message']}")
        return
    for warning in entry["warnings"]:
        screen.note(f"{entry['id']}: {warning}")
    if text:
        screen.note(facts(entry))
    else:
        screen.detail(f"{entry['id']}: {facts(entry)}")


def facts(entry: JSON) -> str:
    """Tokens, kept of seen, bytes held and saved, times: one line."""
    tokens, cache, seconds = entry["tokens"], entry["cache_bytes"], entry["seconds"]
    prompt, generated, kept = tokens["prompt"], tokens["generated"], entry["kept_after_prefill"]
    saved = max(0, cache["full"] - cache["held"])  # a batch also holds the padding of its shorter rows
    share = saved / cache["full"] if cache["full"] else 0.0
    # the times are those of the batch, and a batch has no speed that is one picture's
    speed = units.speed(generated, seconds["decode"]) if entry["batch_size"] == 1 else None
    rate = "" if speed is None else f" ({speed:.1f} tokens/s)"
    batch = "" if entry["batch_size"] == 1 else f", {entry['batch_size']} pictures at a time"
    return (
        f"kept {kept} of {prompt} prompt tokens ({kept / max(1, prompt):.2f}), "
        f"{entry['kept']} of {entry['seen']} at the end; "
        f"cache {size(cache['held'])}, {size(saved)} saved ({share:.0%}); "
        f"prefill {duration(seconds['prefill'])}, {generated} tokens in {duration(seconds['decode'])}{rate}{batch}"
    )


class _FirstToken:
    """Passes pieces of text on, and knows when the first came."""

    def __init__(self, piece: Callable[[str], None]) -> None:
        self._piece = piece
        self.at: float | None = None

    def __call__(self, text: str) -> None:
        if self.at is None and text:
            self.at = time.perf_counter()
        self._piece(text)


def _tell_times(event: Event, clock: run.Clock, first: _FirstToken | None, screen: Terminal) -> None:
    """With -v: what the time until the first token went into, once."""
    record = getattr(event, "record", None)
    if not clock.spans or not record or record["error"]:
        return
    clock.spans |= {"image": record["seconds"]["image"], "prefill": record["seconds"]["prefill"]}
    if first is not None and first.at is not None:
        clock.spans["first token after"] = first.at - run.BORN
    screen.detail(f"times: {clock}")
    clock.spans.clear()


def _close(tally: Tally, screen: Terminal, output: Output, alone: bool) -> None:
    """The closing summary; a single picture needs none."""
    if alone and not tally.halted and not tally.skipped:
        return
    seconds = max(1e-9, tally.seconds)
    parts = [
        f"{tally.done} done",
        f"{tally.skipped} skipped",
        count_of(tally.strays, "stray"),
        f"{tally.failed} failed",
    ]
    rates = f"{duration(seconds)}, {tally.done / seconds:.2f} pictures/s, {tally.generated / seconds:.1f} tokens/s"
    screen.note(f"{', '.join(parts)} in {rates}; results: {output.name}")
    if tally.failures:
        more = tally.failed - len(tally.failures)
        screen.note(f"failed: {', '.join(tally.failures)}" + (f" and {more} more" if more else ""))
    if tally.halted:
        screen.note(tally.halted)


def _undone(jobs: Iterator[Job | Stray], session: Session, work: Work, output: Output) -> Iterator[Job | Stray]:
    """What a resumed run would still do. A picture that can't be read would be tried."""
    from kvcli import batch
    from kvcli.jobs import Job

    for item in jobs:
        if not (isinstance(item, Job) and batch.is_done(session, item, work, output.done)):
            yield item


def _list_jobs(jobs: Iterator[Job | Stray], screen: Terminal) -> int:
    """Print what would run, one name a line."""
    from kvcli.jobs import Stray

    count = strays = 0
    for item in jobs:
        if isinstance(item, Stray):
            strays += 1
        else:
            count += 1
            print(item.id)
    screen.note(f"{count} would run, {count_of(strays, 'stray')}")
    return errors.OK
