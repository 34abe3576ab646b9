"""Finding pictures: what each kind of input names, in which order, and what is said of the rest."""

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
from forbidden import forbidden
from PIL import Image

from kvcli.errors import UsageError
from kvcli.inputs import Job, Shard, Stray, comes_piped, find
from kvcli.names import display, restore

# Pillow warns of what is meant to be damaged here.
pytestmark = pytest.mark.filterwarnings("ignore:::PIL")

__all__ = ["forbidden"]  # a fixture

PICTURE = hostile.png(1, 1, 8, 2, bytes(4))


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PICTURE)


def jobs(*arguments: object, stdin: bytes = b"", **options: Any) -> list[Job]:
    found = find(map(str, arguments), stdin=io.BytesIO(stdin), **options)
    return [item for item in found if isinstance(item, Job)]


def paths(*arguments: object, **options: Any) -> list[str]:
    return [path for job in jobs(*arguments, **options) for path in job.paths]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_walked_in_natural_order_files_first(here: Path) -> None:
    put(here, "in/a10.png", "in/a2.png", "in/B1.png", "in/sub2/x.png", "in/sub10/x.png", "in/sub2/.hidden.png")
    put(here, "in/.hidden/x.png", "in/sub2/deep/x.png")
    assert paths("in") == ["in/a2.png", "in/a10.png", "in/B1.png"]
    assert paths("in", recursive=True) == [
        *["in/a2.png", "in/a10.png", "in/B1.png"],
        *["in/sub2/x.png", "in/sub2/deep/x.png", "in/sub10/x.png"],
    ]


def test_content_or_name_makes_a_picture_and_the_rest_is_stray(here: Path) -> None:
    put(here, "in/no suffix", "in/wrong.txt")
    for name in ("notes.txt", "fake.JPG", "python"):
        (here / "in" / name).write_text("Python, P5 and BM are only letters")
    found = list(find(["in"], stdin=io.BytesIO()))
    assert [item.paths[0] for item in found if isinstance(item, Job)] == ["in/fake.JPG", "in/no suffix", "in/wrong.txt"]
    assert [item.path for item in found if isinstance(item, Stray)] == ["in/notes.txt", "in/python"]


def test_what_is_named_is_a_job_even_if_it_is_missing_or_no_picture(here: Path) -> None:
    (here / "notes.txt").write_text("text")
    assert paths("notes.txt", "gone.jpg") == ["notes.txt", "gone.jpg"]


def test_the_same_path_is_done_once_and_another_name_is_another_job(here: Path) -> None:
    put(here, "in/a.png", "in/b.png", "other/c.png")
    (here / "in/same bytes.png").symlink_to("a.png")
    (here / "link").symlink_to("in")
    found = paths("in/b.png", "./in/../in/b.png", "in", "in/*.png", here / "in/a.png", "link", "link/a.png")
    assert found == ["in/b.png", "in/a.png", "in/same bytes.png"]


def test_links_to_folders_are_followed_but_not_upwards_and_loops_end(here: Path) -> None:
    put(here, "in/a.png", "elsewhere/b.png", "outside.png")
    (here / "in/up").symlink_to("..")
    (here / "in/self").symlink_to(".")
    (here / "in/side").symlink_to("../elsewhere")
    (here / "elsewhere/back").symlink_to("../in")
    assert paths("in", recursive=True) == ["in/a.png", "in/side/b.png"]
    assert paths("in/**/*.png") == ["in/a.png", "in/side/b.png"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/*.png", ["in/a2.png", "in/a10.png"]),
        ("in/a?.png", ["in/a2.png"]),
        ("*/s[tuv]b/*", ["in/sub/c.png", "in/sub/deep/d.png"]),
        ("in/**/*.png", ["in/a2.png", "in/a10.png", "in/sub/c.png", "in/sub/deep/d.png"]),
        ("in/**", ["in/a2.png", "in/a10.png", "in/sub/c.png", "in/sub/deep/d.png"]),
        ("**/deep/*.png", ["in/sub/deep/d.png"]),
        ("**/sub/**/d.png", ["in/sub/deep/d.png"]),
        ("in/*/", ["in/sub/c.png"]),
        ("in/s*", ["in/sub/c.png"]),
        ("./in/a2*", ["./in/a2.png"]),
    ],
)
def test_patterns_are_expanded_here(here: Path, pattern: str, expected: list[str]) -> None:
    put(here, "in/a10.png", "in/a2.png", "in/sub/c.png", "in/sub/deep/d.png", "in/.hidden.png")
    assert paths(pattern) == expected
    assert paths(f"{here}/{pattern}") == [f"{here}/{path}" for path in expected]


def test_a_name_that_looks_like_a_pattern_is_a_name(here: Path) -> None:
    put(here, "[a].png", "a.png")
    assert paths("[a].png") == ["[a].png"]


def test_a_pattern_without_a_match_fails_beside_others_and_is_usage_alone(here: Path) -> None:
    put(here, "cats/a.png")
    found = jobs("dgos/*.png", "cats")
    assert [(job.id, job.error is None) for job in found] == [("cats/a.png", True), ("dgos/*.png", False)]
    with pytest.raises(UsageError, match="dgos"):
        jobs("dgos/*.png")


def test_nothing_named_or_found_is_a_usage_error(here: Path) -> None:
    put(here, "in/sub/a.png")
    (here / "in/notes.txt").write_text("text")
    with pytest.raises(UsageError, match=r"in \(1 other files\); -r looks"):
        find(["in"], stdin=io.BytesIO())
    with pytest.raises(UsageError, match="no picture is named"):
        find([])
    with pytest.raises(UsageError, match="empty text"):
        find(["in", ""])


def test_one_picture_comes_from_stdin(here: Path) -> None:
    (job,) = jobs("-", stdin=PICTURE)
    assert (job.id, job.sources, job.relative) == ("-", (PICTURE,), "stdin")
    with pytest.raises(UsageError, match="only once"):
        jobs("-", "-")
    with pytest.raises(UsageError, match="only once"):
        jobs("-", from_file="-")


def test_a_list_holds_plain_paths(here: Path) -> None:
    put(here, "a.png", "in/b.png", "[c].png", "new\nline.png")
    (here / "list").write_bytes(b"a.png\r\n\n[c].png\nin\na.png\n*.png")
    assert paths(from_file="list") == ["a.png", "[c].png", "in/b.png", "*.png"]
    assert paths(from_file="-", stdin=b"new\nline.png\0a.png", null_separated=True) == ["new\nline.png", "a.png"]
    assert len(paths(from_file="-", stdin=b"a.png\0in/b.png")) == 1  # no name, but no crash
    with pytest.raises(UsageError, match="--from-file gone"):
        find([], from_file="gone")


def test_a_folder_that_cant_be_read_is_a_failure_not_a_silence(forbidden: Path) -> None:
    put(forbidden, "a.png", "locked/b.png")
    (forbidden / "locked").chmod(0)
    good, bad = jobs(forbidden, recursive=True)
    assert (good.error, bad.paths) == (None, (f"{forbidden}/locked",))
    assert bad.error == "folder can't be read: Permission denied"
    assert paths(f"{forbidden}/**/*.png") == [f"{forbidden}/a.png"]


def test_a_list_is_read_as_it_comes(here: Path) -> None:
    """The other side of the pipe stays open: waiting for its end would wait for ever."""
    put(here, "a.png", "b.png")
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as stdin, open(write_end, "wb", buffering=0) as writer:
        writer.write(b"a.png\n")
        found = find([], from_file="-", stdin=stdin)
        assert next(found).id == "a.png"  # type: ignore[union-attr]
        writer.write(b"b.png\n")
        assert next(found).id == "b.png"  # type: ignore[union-attr]


def test_a_list_or_job_file_that_is_a_pipe_is_known(here: Path) -> None:
    for name in ("pipe", "pipe.jsonl"):
        os.mkfifo(here / name)
    for name in ("list", "list.jsonl"):
        (here / name).touch()
    assert comes_piped(["pipe.jsonl"], None)
    assert comes_piped([], "pipe")
    assert comes_piped(["list.jsonl"], "-")
    assert not comes_piped(["list.jsonl", "pipe", "-"], "list")  # a picture from a pipe is one picture
    assert not comes_piped(["in"], None)


def test_a_walk_does_not_look_ahead(here: Path) -> None:
    put(here, "in/1/a.png", "in/2/a.png")
    found = find(["in"], recursive=True, stdin=io.BytesIO())
    assert next(found).id == "in/1/a.png"  # type: ignore[union-attr]
    put(here, "in/2/b.png")  # a listing made ahead would not know it
    assert [item.id for item in found if isinstance(item, Job)] == ["in/2/a.png", "in/2/b.png"]


def test_a_job_file_gives_pictures_prompts_and_names(here: Path) -> None:
    put(here, "jobs/a.png", "jobs/b.png")
    lines = [
        {"id": "one", "image": "a.png", "prompt": "What?", "system": "Be brief.", "mine": [1]},
        {"id": 2, "images": ["a.png", str(here / "jobs/b.png")]},
        {"image": "a.png"},
    ]
    (here / "jobs/list.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)))
    one, two, three = jobs("jobs/list.jsonl")
    assert (one.id, one.paths, one.prompt, one.system) == ("one", ("jobs/a.png",), "What?", "Be brief.")
    assert (two.id, len(two.sources), two.prompt) == ("2", 2, None)
    assert (three.id, three.index) == ("jobs/list.jsonl:5", 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "an object"),
        (b'"a.png"', "an object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", 'either "image" or "images"'),
        (b'{"image": "a.png", "images": []}', 'either "image" or "images"'),
        (b'{"images": []}', "at least one"),
        (b'{"image": 3}', "one path"),
        (b'{"image": "a.png", "prompt": 3}', "prompt must be a text"),
        (b'{"image": "a.png", "prompt": "\\ud800"}', "half of a character"),
        (b'{"image": "a.png", "id": null}', "id must be"),
        (b'{"image": "a.png", "promt": "What?"}', "did you mean 'prompt'"),
    ],
)
def test_a_bad_line_is_one_failed_job(here: Path, line: bytes, reason: str) -> None:
    put(here, "a.png")
    (here / "jobs.jsonl").write_bytes(line + b'\n{"image": "a.png"}\n')
    bad, good = jobs("jobs.jsonl")
    assert bad.error is not None
    assert bad.error.startswith("jobs.jsonl:1: ")
    assert reason in bad.error
    assert "\n" not in bad.error
    assert (bad.sources, good.error) == ((), None)


def test_pictures_go_together_only_when_asked(here: Path) -> None:
    put(here, "in/a.png", "in/b.png", "c.png")
    assert [len(job.sources) for job in jobs("in", "c.png")] == [1, 1, 1]
    (job,) = jobs("in", "c.png", together=True)
    assert job.paths == ("in/a.png", "in/b.png", "c.png")
    (here / "jobs.jsonl").write_text('{"image": "c.png"}')
    with pytest.raises(UsageError, match="name it alone"):
        jobs("in", "jobs.jsonl", together=True)


def test_the_place_below_the_named_folder_is_kept_for_mirrors(here: Path) -> None:
    put(here, "in/sub/a.png", "other/sub/a.png")
    assert [job.relative for job in jobs("in", recursive=True)] == ["sub/a.png"]
    assert [job.relative for job in jobs("in/**/*.png")] == ["sub/a.png"]
    assert [job.relative for job in jobs(here / "in/sub/a.png")] == ["a.png"]
    both = jobs("in", "./other", "../" + here.name, recursive=True)
    assert [job.relative for job in both] == ["in/sub/a.png", "other/sub/a.png"]


def test_shards_are_disjoint_complete_and_steady(here: Path) -> None:
    put(here, *(f"in/{number}.png" for number in range(60)))
    parts = [jobs("in", shard=Shard(number, 4)) for number in (1, 2, 3, 4)]
    everything = jobs("in")
    assert sorted(itertools.chain(*parts), key=lambda job: job.index) == everything
    assert all(parts)
    (here / "in/0.png").unlink()
    again = [job.id for job in jobs("in", shard=Shard(2, 4))]
    assert again == [job.id for job in parts[1] if job.id != "in/0.png"]


@pytest.mark.parametrize(
    "name",
    ["plain", "é", "caf\udce9", "a\\b", "a\\xe9", "\\\\xe9\udce9", "\ud800", "\\ud800", "new\nline", "\\", "\\\udcff"],
)
def test_display_names_are_utf8_and_come_back(name: str) -> None:
    text = display(name)
    text.encode("utf-8")
    assert restore(text) == name


def test_display_names_differ_where_names_do() -> None:
    names = ["a\udcff", "a\\xff", "a\\\\xff", "a\\udcff"]
    assert len({display(name) for name in names}) == len(names)


def test_a_name_that_is_no_utf8_round_trips_through_a_record(here: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    put(here, name)
    (job,) = jobs(".")
    recorded = json.loads(json.dumps(job.paths[0]).encode("utf-8"))
    assert recorded == "./caf\\xe9.png"
    (again,) = jobs(from_file="-", stdin=recorded.encode())
    assert again.sources == job.sources
    assert Image.open(again.sources[0]).size == (1, 1)  # type: ignore[arg-type]


def test_a_hostile_folder_comes_to_what_its_manifest_says(tmp_path: Path) -> None:
    manifest = hostile.make(tmp_path / "hostile", 330)
    assert len(manifest.expected) >= 330
    got: dict[str, str] = {}
    script = Path(__file__).with_name("hostile_run.py")
    result = subprocess.run(
        [sys.executable, str(script), str(manifest.folder)], capture_output=True, check=True, timeout=120
    )
    assert result.stderr == b""
    for line in result.stdout.splitlines():
        path, outcome, message = json.loads(line)
        assert path not in got
        assert "\n" not in message
        got[path] = outcome
    expected = {
        display(str(manifest.folder / path)): outcome
        for path, outcome in manifest.expected.items()
        if outcome != "nothing"
    }
    assert got == expected
