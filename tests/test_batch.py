"""The batch run: nobody's trouble is a neighbour's, memory decides the size of a batch, and the end is clean."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli import batch, inputs, policies, records
from kvcli.batch import Event, Halted, Notice, Settled, Work, in_order
from kvcli.engine.session import Decoding, Outcome, Prepared, Session
from kvcli.jobs import Job, Stray
from kvcli.reading import Reader


class Limited(Session):
    """The real session, which runs out of memory, really, above `most` rows, and can't do with one prompt."""

    most = 1000
    poison = "\0"
    runs: list[int]

    def run(self, prepared: Any, *args: Any, **options: Any) -> list[Outcome]:
        self.runs.append(len(prepared))
        if len(prepared) > self.most:
            torch.empty(2**60)
        if any(self.poison in item.request.prompt for item in prepared):
            raise ValueError("this one is poison")
        return super().run(prepared, *args, **options)


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path) -> Limited:
    return Limited.load(str(tiny_checkpoint), device="cpu")


@pytest.fixture
def session(loaded: Limited) -> Limited:
    loaded.most, loaded.poison, loaded.runs = 1000, "\0", []
    return loaded


def work(session: Session, **changes: Any) -> Work:
    policy = policies.create("elastic", budget=0.3)
    decoding = changes.pop("decoding", Decoding(max_new_tokens=6))
    facts = records.RunFacts(
        session.model_name, session.revision, "cpu", "float32", policy.resolved(), asdict(decoding)
    )
    return Work(policy, decoding, "describe this image", None, facts, **{"workers": 2} | changes)


def jobs(folder: Path, count: int = 10) -> list[Job]:
    """Pictures with prompts of very different lengths."""
    found = [item for item in inputs.find([str(folder)]) if isinstance(item, Job)]
    return [replace(job, prompt="describe " + "the red cat " * (3 * (job.index % 4))) for job in found[:count]]


def settled(events: Iterable[Event]) -> dict[int, dict[str, Any]]:
    return {e.job.index: e.record for e in events if isinstance(e, Settled) and e.record is not None}


def texts(events: Iterable[Event]) -> dict[int, str | None]:
    return {index: entry["text"] for index, entry in settled(events).items()}


@pytest.fixture
def alone(session: Limited, pictures: Path) -> dict[int, str | None]:
    """The text of each picture when it runs by itself."""
    return texts(batch.run(session, jobs(pictures), work(session, batch_size=1)))


def test_a_batch_gives_the_texts_of_single_runs(session: Limited, pictures: Path, alone: dict[int, str | None]) -> None:
    assert len(set(alone.values())) > 5, "texts that are all the same would prove nothing"
    assert texts(batch.run(session, jobs(pictures), work(session, batch_size=4))) == alone
    assert max(session.runs) == 4


def test_draws_do_not_depend_on_the_batch(session: Limited, pictures: Path) -> None:
    decoding = Decoding(max_new_tokens=6, temperature=1.0, seed=3)
    one = texts(batch.run(session, jobs(pictures), work(session, decoding=decoding, batch_size=1)))
    many = texts(batch.run(session, jobs(pictures)[::-1], work(session, decoding=decoding, batch_size=5)))
    other = texts(batch.run(session, jobs(pictures), work(session, decoding=replace(decoding, seed=4))))
    assert one == many
    assert one != other


def test_out_of_memory_halves_the_batch_and_says_so(
    session: Limited, pictures: Path, alone: dict[int, str | None]
) -> None:
    session.most, session.runs = 2, []
    events = list(batch.run(session, jobs(pictures), work(session, batch_size=8)))
    assert texts(events) == alone
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == [
        "out of memory with 8 pictures at a time, going on with 4",
        "out of memory with 4 pictures at a time, going on with 2",
        "out of memory with 4 pictures at a time, going on with 2",
    ]
    assert {entry["batch_size"] for entry in settled(events).values()} <= {1, 2}


def test_a_picture_that_never_fits_fails_alone(session: Limited, pictures: Path) -> None:
    session.most = 0
    entries = settled(batch.run(session, jobs(pictures, 2), work(session)))
    assert [entry["error"]["type"] for entry in entries.values()] == ["OutOfMemory"] * 2


def test_an_exception_is_one_pictures_own(session: Limited, pictures: Path, alone: dict[int, str | None]) -> None:
    session.poison = "poison"
    todo = jobs(pictures)
    todo[3] = replace(todo[3], prompt="poison")
    entries = settled(batch.run(session, todo, work(session, batch_size=5)))
    assert entries[3]["error"] == {"type": "ValueError", "message": "this one is poison"}
    assert {index: entry["text"] for index, entry in entries.items() if index != 3} == {
        index: text for index, text in alone.items() if index != 3
    }


def test_a_broken_file_is_one_pictures_own(
    session: Limited, pictures: Path, alone: dict[int, str | None], tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    todo = jobs(pictures)
    todo[5] = replace(todo[5], sources=(tmp_path / "broken.png",))
    entries = settled(batch.run(session, todo, work(session, batch_size=5)))
    assert entries[5]["error"]["type"] == "PictureError"
    assert {i: e["text"] for i, e in entries.items() if i != 5} == {i: t for i, t in alone.items() if i != 5}


def test_stop_ends_between_batches(session: Limited, pictures: Path) -> None:
    seen: list[Event] = []
    for event in batch.run(session, jobs(pictures), work(session, batch_size=2), stop=lambda: bool(settled(seen))):
        seen.append(event)
    assert len(settled(seen)) == 2
    assert seen[-1] == Halted("interrupted")


def test_max_errors_ends_the_run(session: Limited, pictures: Path) -> None:
    todo = [replace(job, sources=(pictures / "notes.txt",)) for job in jobs(pictures)]
    events = list(batch.run(session, todo, work(session, batch_size=1, max_errors=2)))
    assert events[-1] == Halted(f"stopped after {len(settled(events))} failed")
    assert len(settled(events)) < len(todo)


def test_order_is_restored_on_request(session: Limited, pictures: Path) -> None:
    run = batch.run(session, jobs(pictures), work(session, batch_size=3))
    assert list(settled(in_order(run))) == list(range(10))
    run = batch.run(session, jobs(pictures), work(session, batch_size=3))
    assert list(settled(run)) != list(range(10)), "grouped by length, so else it would prove nothing"


def test_done_work_is_skipped_and_changed_work_is_not(session: Limited, pictures: Path) -> None:
    todo = jobs(pictures, 4)
    done = {records.key(entry) for entry in settled(batch.run(session, todo, work(session))).values()}
    todo[1] = replace(todo[1], prompt="another question")
    events = list(batch.run(session, todo, work(session), done=done))
    assert list(settled(events)) == [1]
    assert len([e for e in events if isinstance(e, Settled) and e.record is None]) == 3


def test_an_error_of_the_stream_comes_after_what_was_taken(session: Limited, pictures: Path) -> None:
    def stream() -> Iterator[Job | Stray]:
        yield from jobs(pictures, 3)
        yield Stray("x.txt")
        raise OSError("the list broke off")

    seen: list[Event] = []

    def collect() -> None:
        for event in batch.run(session, stream(), work(session)):
            seen.append(event)

    with pytest.raises(OSError, match="broke off"):
        collect()
    assert len(settled(seen)) == 3
    assert Stray("x.txt") in seen


def test_an_endless_stream_is_read_a_bounded_way_ahead(session: Limited, pictures: Path) -> None:
    taken = itertools.count()
    first = jobs(pictures, 1)[0]

    def endless() -> Iterator[Job]:
        while True:
            yield replace(first, index=next(taken))

    run = batch.run(session, endless(), work(session, batch_size=2))
    for _ in range(4):
        next(run)
    run.close()
    assert next(taken) < 30


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_slow_stream_is_described_as_it_comes(session: Limited, pictures: Path, batch_size: int | None) -> None:
    """The stream goes on only when what it gave is described: who waits for more waits in vain."""
    described, in_time = threading.Event(), []

    def stream() -> Iterator[Job]:
        *first, last = jobs(pictures, 3)
        yield from first
        in_time.append(described.wait(20))
        yield last

    seen: list[Event] = []
    for event in batch.run(session, stream(), work(session, batch_size=batch_size)):
        seen.append(event)
        if len(settled(seen)) == 2:
            described.set()
    assert in_time == [True]
    assert len(settled(seen)) == 3
    assert session.runs == [2, 1]


def test_a_stop_breaks_the_wait_for_a_stream(session: Limited, pictures: Path) -> None:
    stopped, over = threading.Event(), threading.Event()

    def stream() -> Iterator[Job]:
        yield from jobs(pictures, 1)
        over.wait(20)

    threading.Timer(1.5, stopped.set).start()
    start = time.monotonic()
    events = list(batch.run(session, stream(), work(session), stop=stopped.is_set))
    seconds = time.monotonic() - start
    over.set()
    assert seconds < 15
    assert events[-1] == Halted("interrupted")
    assert len(settled(events)) == 1


def test_how_fast_pictures_are_read_does_not_change_the_batches(session: Limited, pictures: Path) -> None:
    def order(seed: int) -> list[int]:
        dice = random.Random(seed)
        events = batch.run(
            session, jobs(pictures), work(session, batch_size=2), admit=lambda job: time.sleep(dice.uniform(0, 0.05))
        )
        return list(settled(events))

    assert order(1) == order(2) == order(3)


@pytest.mark.parametrize("room", [0, 3.5])
def test_pictures_that_wait_are_bounded_in_bytes(session: Limited, pictures: Path, room: float) -> None:
    held, most, lock = 0, 0, threading.Lock()

    class Counting(Limited):
        def prepare(self, *args: Any) -> Prepared:
            nonlocal held, most
            with lock:
                held += 1
                most = max(most, held)
            return super().prepare(*args)

        def run(self, prepared: Any, *args: Any, **options: Any) -> list[Outcome]:
            nonlocal held
            outcomes = Session.run(self, prepared, *args, **options)
            with lock:
                held -= len(prepared)
            return outcomes

    plan = work(session, batch_size=8, workers=1)
    todo = jobs(pictures)
    prepared = Reader(session, plan, (), None)(todo[0], 0)
    assert prepared.nbytes > 3 * 32 * 32 * 4 - 1, "the pixels at least"
    counting = Counting(session.loaded)
    entries = settled(batch.run(counting, todo, replace(plan, ahead=int(room * prepared.nbytes))))
    assert sorted(entries) == list(range(10))
    assert {entry["error"] for entry in entries.values()} == {None}
    assert 1 <= most <= max(2, room + 1), "one more than has been measured may be on its way"


def test_an_automatic_batch_fits_what_is_free(
    session: Limited, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> set[int]:
        entries = settled(batch.run(session, jobs(pictures), work(session)))
        return {entry["batch_size"] for entry in entries.values()}

    assert run() == {10}
    plan = work(session)
    room = session.batch_bytes([100] * 3, plan.policy, plan.decoding) / batch.SHARE_OF_FREE_MEMORY
    monkeypatch.setattr(session, "free_bytes", lambda: int(room))
    assert 1 < max(run()) < 10
    monkeypatch.setattr(session, "free_bytes", lambda: 0)
    assert run() == {1}


def test_pictures_are_not_held_while_they_wait(session: Limited, pictures: Path) -> None:
    seen: list[Prepared] = []

    class Watching(Limited):
        def run(self, prepared: Any, *args: Any, **options: Any) -> list[Outcome]:
            seen.extend(prepared)
            return Session.run(self, prepared, *args, **options)

    watching = Watching(session.loaded)
    list(batch.run(watching, jobs(pictures, 3), work(session)))
    assert [item.request.images for item in seen] == [()] * 3
