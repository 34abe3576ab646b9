"""Records: the same keys always, appended so that no crash costs a finished one, resumed by what they were made of."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcli.errors import StartError, UsageError
from kvcli.records import Answer, Failure, ImageFacts, RecordFile, RunFacts, encode, key, record, slot

RUN = RunFacts("tiny", "r1", "cpu", "float32", {"name": "elastic", "budget": 0.2}, {"max_new_tokens": 8, "seed": 0})
ANSWER = Answer("a cat", "stop", 30, 16, 8, 38, 9, 6, 3800, 900, 3000, 0.1, 0.2, 1)


def entry(name: str = "a.jpg", *, sha: str = "00", run: RunFacts = RUN, **changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {"answer": ANSWER} if "failure" not in changes else {}
    return record(
        run,
        index=0,
        id=name,
        images=(ImageFacts(name, sha, 10, "PNG", 1, 1),),
        **{"prompt": "Describe.", "system": None} | good | changes,
    )


def failed(name: str = "a.jpg", **changes: Any) -> dict[str, Any]:
    return entry(name, failure=Failure("PictureError", "broken"), **changes)


def shape(value: Any) -> Any:
    return {name: shape(item) for name, item in value.items()} if isinstance(value, dict) else None


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_success_and_failure_have_the_same_keys() -> None:
    good, bad = shape(entry()), shape(failed())
    good.pop("error"), bad.pop("error")
    assert good == bad


def test_json_has_no_nan_no_newline_and_valid_utf8() -> None:
    data = encode({"a": math.nan, "b": [math.inf, 1.5], "c": "two\nlines \udcff", "d": {"e": -math.inf}})
    assert b"\n" not in data
    got = json.loads(data.decode("utf-8"), parse_constant=lambda word: pytest.fail(word))
    assert (got["a"], got["b"], got["d"]["e"]) == (None, [None, 1.5], None)


def test_the_key_changes_with_everything_that_the_text_depends_on() -> None:
    from dataclasses import replace

    base = entry()
    others = [
        entry("b.jpg"),
        entry(sha="01"),
        entry(prompt="Why?"),
        entry(system="Be short."),
        entry(run=replace(RUN, model="other")),
        entry(run=replace(RUN, revision="r2")),
        entry(run=replace(RUN, policy={"name": "elastic", "budget": 0.3})),
        entry(run=replace(RUN, decoding={"max_new_tokens": 9, "seed": 0})),
        entry(run=replace(RUN, decoding={"max_new_tokens": 8, "seed": 1})),
        entry(run=replace(RUN, kv_dtype="int8")),
    ]
    assert len({key(base), *map(key, others)}) == 1 + len(others)
    assert key(entry(run=replace(RUN, device="cuda:0", load_seconds=9.0))) == key(base)
    assert key({name: value for name, value in base.items() if name != "kv_dtype"}) == key(base)  # of an older kvcli
    assert key(json.loads(encode(base))) == key(base)


def test_an_existing_file_needs_a_word(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious\n")
    with pytest.raises(UsageError, match="--resume"):
        RecordFile(path)
    assert path.read_text() == "precious\n"


def test_overwrite_keeps_the_old_until_there_is_something_new(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("old\n")
    RecordFile(path, overwrite=True).close()
    assert path.read_text() == "old\n"
    file = RecordFile(path, overwrite=True)
    file.write(entry())
    file.write(entry("b.jpg"))
    file.close()
    assert [got["id"] for got in lines(path)] == ["a.jpg", "b.jpg"]


def test_a_foreign_file_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"mine": 1}\n')
    with pytest.raises(UsageError, match="no records of kvcli"):
        RecordFile(path, resume=True)


@pytest.mark.parametrize(
    "content", [b"precious", b"two\nlines", b'{"mine": ', b"\x00\xff\n\x00", b'words\n{"schema": 1']
)
def test_a_foreign_file_is_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no records of kvcli"):
        RecordFile(path, resume=True)
    assert path.read_bytes() == content


def test_a_foreign_last_line_among_records_stays(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(encode(entry()) + b"\nmy note")
    file = RecordFile(path, resume=True)
    assert file.done == {key(entry())}
    file.write(entry("b.jpg"))
    file.close()
    assert path.read_bytes().splitlines() == [encode(entry()), b"my note", encode(entry("b.jpg"))]


def test_a_first_record_that_is_torn_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(encode(entry())[:30])
    RecordFile(path, resume=True).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.jsonl"
    whole = encode(entry()) + b"\n"
    path.write_bytes(whole + whole.replace(b"a.jpg", b"b.jpg")[:cut])
    file = RecordFile(path, resume=True)
    assert file.done == {key(entry())}
    file.write(entry("b.jpg"))
    file.close()
    assert [got["id"] for got in lines(path)] == ["a.jpg", "b.jpg"]


def test_a_last_line_that_only_lacks_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(encode(entry()))
    file = RecordFile(path, resume=True)
    assert file.done == {key(entry())}
    file.write(entry("b.jpg"))
    file.close()
    assert [got["id"] for got in lines(path)] == ["a.jpg", "b.jpg"]


def test_a_retried_failure_leaves_one_record(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(encode(e) + b"\n" for e in (failed(sha="bad"), entry("b.jpg"), failed("c.jpg"))))
    file = RecordFile(path, resume=True)
    assert file.done == {key(entry("b.jpg"))}
    file.write(entry(sha="repaired"))
    file.close()
    assert [(got["id"], got["error"] is None) for got in lines(path)] == [
        ("b.jpg", True),
        ("c.jpg", False),
        ("a.jpg", True),
    ]


def test_a_record_of_other_settings_stays(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(encode(entry()) + b"\n")
    file = RecordFile(path, resume=True)
    other = entry(prompt="Why?")
    assert key(other) not in file.done
    assert slot(other) != slot(entry())
    file.write(other)
    file.close()
    assert len(lines(path)) == 2


def test_two_runs_never_share_a_file(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    file = RecordFile(tmp_path / "r.jsonl")
    with pytest.raises(StartError, match="another run"):
        RecordFile(tmp_path / "r.jsonl", resume=True)
    file.close()
    RecordFile(tmp_path / "r.jsonl", resume=True).close()


def test_a_full_disk_leaves_whole_records_only(tmp_path: Path) -> None:
    """The file-size limit of the process stands for the disk: the write that hits it is partly done."""
    path = tmp_path / "r.jsonl"
    room = len(encode(entry()) + b"\n") * 3 // 2
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = RecordFile(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        file.write(entry())
        with pytest.raises(OSError, match="large"):
            file.write(entry("b.jpg"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        file.close()
    assert [got["id"] for got in lines(path)] == ["a.jpg"]


def test_every_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    """A process that is killed right after `write` has lost nothing."""
    path = tmp_path / "r.jsonl"
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from test_records import *\n"
        "f = RecordFile(Path(sys.argv[1]));"
        "f.write(entry()); f.write(entry('b.jpg')); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path), os.path.dirname(__file__)], check=False)
    assert done.returncode == -9
    assert [got["id"] for got in lines(path)] == ["a.jpg", "b.jpg"]
