"""The command as people meet it: what goes to stdout and stderr, exit codes, files, interruptions.

A dozen tests start the real process; the others run the same application in this one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
from conftest import command_environment
from typer.testing import CliRunner, Result

from kvcli.cli import errors
from kvcli.cli.app import app, main
from kvcli.errors import StartError

Command = Callable[..., subprocess.CompletedProcess[bytes]]
TINY = ("--max-new-tokens", "6", "--budget", "0.3")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> Callable[..., Result]:
    """The application in this process, with the tiny model, in an empty folder."""
    for name in [name for name in os.environ if name.startswith("KVCLI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    monkeypatch.setenv("KVCLI_MODEL", str(tiny_checkpoint))
    monkeypatch.setenv("KVCLI_MAX_NEW_TOKENS", "6")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object, **options: Any) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)

    return invoke


def objects(text: str | bytes) -> list[dict[str, Any]]:
    """JSON lines, strictly."""
    raw = text.encode() if isinstance(text, str) else text
    return [json.loads(line, parse_constant=pytest.fail) for line in raw.decode("utf-8").splitlines()]


def one_line(text: str) -> str:
    """The only line of stderr, without traceback."""
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


# --- without a model


@pytest.mark.parametrize("arguments", [["--help"], ["describe", "--help"], ["policies"], ["--version"], ["config"]])
def test_quick_commands_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'matplotlib'):\n"
        "            raise ImportError('blocked ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from kvcli.cli.app import main\n"
        f"sys.argv = ['kvcli', *{arguments!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=command_environment(), timeout=60, check=False
    )
    assert (done.returncode, b"blocked" in done.stderr) == (0, False), done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe"], "no picture is named"),
        (["describe", "nothing*.jpg"], "no picture found"),
        (["describe", "x.jpg", "--bugdet", "1"], "--budget"),
        (["describe", "x.jpg", "--budget", "0"], "--budget must be a share kept"),
        (["describe", "x.jpg", "--budget", "2"], "at least 3 entries"),
        (["describe", "x.jpg", "-0"], "--from-file"),
        (["describe", "x.jpg", "--temperature", "1", "--num-beams", "3"], "don't mix"),
        (["describe", "x.jpg", "--policy", "elastik"], "did you mean 'elastic'"),
        (["describe", "x.jpg", "--set", "distanse=3"], "did you mean 'distance'"),
        (["describe", "x.jpg", "--set", "distance"], "--set must be name=value"),
        (["describe", "x.jpg", "--profile", "fasst"], "did you mean fast"),
        (["describe", "x.jpg", "--json", "--jsonl"], "--json goes to stdout alone"),
        (["describe", "x.jpg", "--resume"], "--resume needs -o"),
        (["describe", "x.jpg", "-o", "out"], "give FILE.jsonl"),
        (["describe", "x.jpg", "-o", "o.jsonl", "--resume", "--overwrite"], "exclude each other"),
        (["describe", "x.jpg", "--ordered", "--no-ordered"], "exclude each other"),
        (["describe", "x.jpg", "--prompt", "a", "--prompt-file", "b"], "exclude each other"),
        (["describe", "x.jpg", "--prompt-file", "gone.txt"], "can't be read"),
        (["policies", "show", "elastik"], "did you mean 'elastic'"),
        (["policies", "show"], "which one"),
        (["frob"], "No such command"),
    ],
)
def test_a_usage_error_is_one_line_and_2(run: Callable[..., Result], arguments: list[str], message: str) -> None:
    done = main_in_process(arguments)
    assert done[0] == 2
    assert message in one_line(done[2])
    assert done[1] == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StartError("no model"), 1, "kvcli: no model\n"),
        (OSError(errno.ENOSPC, "No space left on device", "r.jsonl"), 1, "kvcli: r.jsonl: No space left on device"),
        (KeyboardInterrupt(), 130, "kvcli: interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (RuntimeError("two\nlines"), 1, "kvcli: RuntimeError: two lines"),
    ],
)
def test_what_ends_a_run_has_its_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    assert errors.report(error) == code
    stderr = capsys.readouterr().err
    assert stderr.startswith(said)
    assert stderr.count("\n") == bool(said)


def main_in_process(arguments: list[str]) -> tuple[int, str, str]:
    """`kvcli` with its own error handling, in this process: (exit code, stdout, stderr)."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    before, sys.argv = sys.argv, ["kvcli", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = errors.main(app)
    finally:
        sys.argv = before
    for stream in (out, err):
        stream.seek(0)
    return code, out.read(), err.read()


def test_config_names_the_source_of_each_value(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "kvcli.yaml").write_text("seed: 7\n")
    shown = json.loads(run("config", "--json", "--budget", "0.5", "--profile", "faithful").stdout)
    assert shown["budget"] == {"value": 0.5, "source": "flag"}
    assert shown["max-new-tokens"] == {"value": 6, "source": "environment"}
    assert shown["policy"]["value"] == "full"
    assert shown["policy"]["source"].endswith("faithful.yaml")
    assert shown["seed"] == {"value": 7, "source": "kvcli.yaml"}
    assert shown["top-p"] == {"value": 1.0, "source": "default"}
    assert {line.split()[0] for line in run("config").stdout.splitlines()} == set(shown)


def test_policies_show_every_option_with_its_default(run: Callable[..., Result]) -> None:
    found = {info["name"]: info for info in json.loads(run("policies", "--json").stdout)}
    assert {"full", "elastic"} <= set(found)
    shown = run("policies", "show", "elastic").stdout
    for option in found["elastic"]["options"]:
        default = "none" if option["default"] is None else option["default"]
        assert f"{option['name']} = {default}" in shown.splitlines()
        assert " ".join(option["help"].split()) in " ".join(shown.split())
    assert "source:" in shown


# --- outputs


def test_one_picture_is_its_text_and_a_line_of_facts(run: Callable[..., Result], pictures: Path) -> None:
    done = run("describe", pictures / "photo1.png", "--budget", "0.2")
    assert done.exit_code == 0
    assert done.stdout.strip()
    assert "photo1" not in done.stdout
    facts = [line for line in done.stderr.splitlines() if "prompt tokens" in line]
    assert len(facts) == 1
    words = facts[0].split()
    kept, seen = int(words[words.index("kept") + 1]), int(words[words.index("of") + 1])
    assert kept / seen <= 0.21
    assert "saved" in facts[0]
    assert "on cpu (float32" in done.stderr


def test_several_pictures_have_their_paths_above(run: Callable[..., Result], pictures: Path) -> None:
    done = run("describe", pictures / "photo1.png", pictures / "photo2.png")
    assert done.stdout.splitlines()[0] == str(pictures / "photo1.png")
    assert str(pictures / "photo2.png") in done.stdout.splitlines()
    assert "2 done" in done.stderr


def test_records_have_the_same_text_in_every_form(run: Callable[..., Result], pictures: Path, tmp_path: Path) -> None:
    inputs = ["describe", pictures, "-r", "--ordered"]
    lines = objects(run(*inputs, "--jsonl").stdout)
    document = objects(run(*inputs, "--json").stdout)
    assert len(document) == 1
    assert [r["text"] for r in document[0]["records"]] == [r["text"] for r in lines]
    assert document[0]["summary"]["done"] == 12
    assert document[0]["summary"]["strays"] == 1
    done = run(*inputs, "-o", "r.jsonl")
    assert (done.exit_code, done.stdout) == (0, "")
    assert [r["text"] for r in objects((tmp_path / "r.jsonl").read_bytes())] == [r["text"] for r in lines]
    assert [r["index"] for r in lines] == list(range(12))
    assert run(*inputs, "-o", "out/").exit_code == 0
    got = {p.relative_to(tmp_path / "out").as_posix(): p.read_text() for p in (tmp_path / "out").rglob("*.txt")}
    wanted = {os.path.relpath(r["path"], pictures) + ".txt": r["text"] + "\n" for r in lines}
    assert got == wanted
    assert "sub/photo11.png.txt" in got


def test_a_record_says_how_it_was_made(run: Callable[..., Result], pictures: Path) -> None:
    arguments = ("--set", "distance=9", "--system", "Be short.", "--prompt", "Why?", "--seed", "5", "--jsonl")
    (entry,) = objects(run("describe", pictures / "photo1.png", *arguments).stdout)
    assert entry["policy"] == {"name": "elastic", "budget": 0.2, "distance": 9} | {
        k: v for k, v in entry["policy"].items() if k not in ("name", "budget", "distance")
    }
    assert (entry["system"], entry["prompt"], entry["seed"]) == ("Be short.", "Why?", 5)
    assert entry["kept"] < entry["seen"] == entry["tokens"]["prompt"] + entry["tokens"]["generated"] - 1
    assert 0 < entry["cache_bytes"]["held"] < entry["cache_bytes"]["full"]
    assert entry["tokens"]["visual"] == 16
    assert entry["error"] is None


def test_keys_and_values_can_be_stored_as_int8(run: Callable[..., Result], pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "kvcli.yaml").write_text("kv-dtype: int8\n")
    arguments = ("describe", pictures / "photo1.png", "--policy", "full", "--jsonl")
    (small,) = objects(run(*arguments).stdout)
    (plain,) = objects(run(*arguments, "--kv-dtype", "auto").stdout)
    assert (small["kv_dtype"], plain["kv_dtype"]) == ("int8", plain["dtype"])
    assert small["cache_bytes"]["full"] * plain["seen"] == plain["cache_bytes"]["full"] * small["seen"]
    assert small["cache_bytes"]["held"] < 0.6 * plain["cache_bytes"]["held"]
    assert run("describe", pictures / "photo1.png", "--kv-dtype", "int4").exit_code == 2
    assert json.loads(run("doctor", "--json").stdout)["cache"] == "int8"


def test_sidecars_lie_beside_the_pictures(run: Callable[..., Result], pictures: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes((pictures / "photo1.png").read_bytes())
    assert run("describe", picture, "--sidecar").exit_code == 0
    text = (tmp_path / "a.png.txt").read_text()
    assert text.strip()
    (tmp_path / "a.png.txt").write_text("mine")
    assert run("describe", picture, "--sidecar").exit_code == 4
    assert (tmp_path / "a.png.txt").read_text() == "mine"
    assert run("describe", picture, "--sidecar", "--overwrite").exit_code == 0
    assert (tmp_path / "a.png.txt").read_text() == text


@pytest.mark.parametrize("target", ["r.jsonl", "out/"])
def test_nothing_is_overwritten_without_a_word(run: Callable[..., Result], pictures: Path, target: str) -> None:
    arguments = ["describe", pictures / "photo1.png", "-o", target]
    assert run(*arguments).exit_code == 0
    assert run(*arguments).exit_code == 2
    assert run(*arguments, "--overwrite").exit_code == 0
    done = run(*arguments, "--resume")
    assert "1 skipped" in done.stderr


def test_resume_does_what_is_left_and_what_has_changed(
    run: Callable[..., Result], pictures: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "in" / "b.png"
    broken.parent.mkdir()
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "in" / "a.png").write_bytes((pictures / "photo1.png").read_bytes())
    arguments = ["describe", "in", "-o", "r.jsonl"]
    assert run(*arguments).exit_code == 3
    broken.write_bytes((pictures / "photo2.png").read_bytes())
    assert run(*arguments, "--resume", "--dry-run").stdout == "in/b.png\n"
    done = run(*arguments, "--resume")
    assert (done.exit_code, "1 done, 1 skipped" in done.stderr) == (0, True)
    got = objects((tmp_path / "r.jsonl").read_bytes())
    assert sorted((r["path"], r["error"]) for r in got) == [("in/a.png", None), ("in/b.png", None)]
    done = run(*arguments, "--resume", "--budget", "0.5")
    assert "2 done, 0 skipped" in done.stderr


def test_dry_run_lists_and_loads_nothing(run: Callable[..., Result], pictures: Path) -> None:
    done = run("describe", pictures, "-r", "--dry-run", "--model", "no/such-model")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 12


def test_jobs_and_together(run: Callable[..., Result], pictures: Path, tmp_path: Path) -> None:
    jobs = [
        {"id": "one", "image": str(pictures / "photo1.png"), "prompt": "Why?"},
        {"id": "two", "images": [str(pictures / f"photo{n}.png") for n in (1, 2)]},
        {"id": "three"},
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    done = run("describe", "jobs.jsonl", "--jsonl", "--ordered")
    one, two, three = objects(done.stdout)
    assert done.exit_code == 3
    assert (one["prompt"], two["prompt"]) == ("Why?", "Describe the image.")
    assert (two["tokens"]["visual"], len(two["images"])) == (32, 2)
    assert (three["id"], three["path"]) == ("three", None)
    pair = [pictures / "photo1.png", pictures / "photo2.png", "--jsonl"]
    (both,) = objects(run("describe", *pair, "--together").stdout)
    assert both["text"] == two["text"]
    assert len(objects(run("describe", *pair).stdout)) == 2


def test_shards_are_disjoint_and_complete(run: Callable[..., Result], pictures: Path) -> None:
    whole = run("describe", pictures, "-r", "--dry-run").stdout.splitlines()
    parts = [run("describe", pictures, "-r", "--dry-run", "--shard", f"{i}/3").stdout.splitlines() for i in (1, 2, 3)]
    assert sorted(path for part in parts for path in part) == sorted(whole)
    assert all(len(part) < len(whole) for part in parts)


@pytest.mark.parametrize(
    ("names", "code"), [(["photo1.png"], 0), (["photo1.png", "gone.png"], 3), (["gone.png", "notes.txt"], 4)]
)
def test_exit_codes_of_failures(run: Callable[..., Result], pictures: Path, names: list[str], code: int) -> None:
    done = run("describe", *(pictures / name for name in names), "--jsonl")
    assert done.exit_code == code
    assert len(objects(done.stdout)) == len(names)
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_had_is_1(run: Callable[..., Result], pictures: Path) -> None:
    done = run("describe", pictures / "photo1.png", "--model", "nobody/nothing", "--offline", "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "nobody/nothing" in one_line(done.stderr)


def test_fail_fast_stops(run: Callable[..., Result], pictures: Path) -> None:
    done = run("describe", "gone.png", pictures, "--fail-fast", "--batch-size", "1", "--jsonl")
    assert done.exit_code in (3, 4)
    assert len(objects(done.stdout)) < 11
    assert "stopped after 1 failed" in done.stderr


def test_quiet_leaves_errors_only(run: Callable[..., Result], pictures: Path) -> None:
    assert run("describe", pictures / "photo1.png", "-q").stderr == ""
    assert "gone.png" in one_line(run("describe", pictures / "photo1.png", "gone.png", "-q").stderr)


def test_verbose_breaks_the_time_down(run: Callable[..., Result], pictures: Path) -> None:
    times = [x for x in run("describe", pictures / "photo1.png", "-v").stderr.splitlines() if "times:" in x]
    assert len(times) == 1
    for word in ("imports", "load", "image", "prefill", "first token"):
        assert word in times[0]


def test_doctor_says_which_layers_can_be_compressed(run: Callable[..., Result], tiny_checkpoint: Path) -> None:
    report = json.loads(run("doctor", "--model", tiny_checkpoint, "--json").stdout)
    assert [layer["compressible"] for layer in report["model"]["layers"]] == [True] * 3
    assert report["packages"]["torch"]
    shown = run("doctor", "--model", tiny_checkpoint).stdout
    assert "3 of 3 layers can be compressed" in shown


@pytest.mark.slow
def test_a_hostile_folder(run: Callable[..., Result], tmp_path: Path) -> None:
    manifest = hostile.make(tmp_path / "in", count=320)
    done = run("describe", "in", "-r", "--jsonl", "--max-new-tokens", "2")
    assert done.exit_code == 3
    assert "Traceback" not in done.stderr
    entries = objects(done.stdout_bytes)
    good = [entry for entry in entries if entry["error"] is None]
    assert len(good) == len(manifest.paths("described"))
    assert len(entries) - len(good) == len(manifest.paths("error"))
    assert f"{len(manifest.paths('stray'))} stray" in done.stderr
    assert len({entry["path"] for entry in entries}) == len(entries)


def test_a_picture_on_stdin_gives_the_same_text(run: Callable[..., Result], pictures: Path) -> None:
    by_path = run("describe", pictures / "photo3.png", "--jsonl")
    piped = run("describe", "-", "--jsonl", input=(pictures / "photo3.png").read_bytes())
    (one,), (two,) = objects(by_path.stdout), objects(piped.stdout)
    assert (one["text"], one["sha256"]) == (two["text"], two["sha256"])
    assert two["path"] == "-"


def test_no_path_of_a_list_in_a_pipe_is_lost_to_counting(run: Callable[..., Result], tmp_path: Path) -> None:
    """More paths than a pipe holds, so that a second reader, were there one, would get some."""
    os.mkfifo(tmp_path / "list")
    names = [f"gone-{number:04}-{'x' * 120}.png" for number in range(2000)]
    writer = threading.Thread(target=(tmp_path / "list").write_text, args=("\n".join(names),), daemon=True)
    writer.start()
    done = run("describe", "--from-file", "list", "--jsonl", "--ordered")
    assert [entry["path"] for entry in objects(done.stdout)] == names


# --- the real process


def start(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvcli", "describe", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=command_environment(), **options
    )


def test_stdout_is_data_alone_in_a_narrow_pipe_without_colour(
    kvcli: Command, pictures: Path, tiny_checkpoint: Path
) -> None:
    done = kvcli(
        "describe", pictures, "-r", "--model", tiny_checkpoint, *TINY, "--json", "-vv",
        env={"NO_COLOR": "1", "COLUMNS": "40", "TERM": "dumb", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (document,) = objects(done.stdout)
    assert len(document["records"]) == 12
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_closed_pipe_ends_the_run_quietly(pictures: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    process = start(pictures, "--model", tiny_checkpoint, *TINY, "--jsonl", "-q", "--batch-size", "1", cwd=tmp_path)
    assert process.stdout
    assert process.stderr
    first = process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    assert objects(first)[0]["text"]


def many(folder: Path, count: int) -> Path:
    """A folder of `count` pictures, all different."""
    from PIL import Image

    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (20, 20), (number % 256, number // 256, 3 * number % 256)).save(folder / f"p{number}.png")
    return folder


def test_ctrl_c_once_keeps_what_is_finished(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder, out = many(tmp_path / "in", 60), tmp_path / "r.jsonl"
    arguments = (folder, "--model", tiny_checkpoint, "--max-new-tokens", 40, "--batch-size", 2, "-o", out)
    process = start(*arguments, cwd=tmp_path)
    end = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    done = objects(out.read_bytes())
    assert 0 < len(done) < 60
    assert all(entry["text"] is not None for entry in done)


def test_a_list_is_described_as_it_comes_and_ctrl_c_ends_the_wait(
    pictures: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    process = start(
        "--from-file", "-", "--jsonl", "--model", tiny_checkpoint, *TINY, cwd=tmp_path, stdin=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    guard = threading.Timer(60, process.kill)
    guard.start()
    for names in (["photo1.png", "photo2.png"], ["photo3.png"]):
        process.stdin.write("".join(f"{pictures / name}\n" for name in names).encode())
        process.stdin.flush()
        got = [objects(process.stdout.readline())[0] for _ in names]
        assert sorted(entry["path"] for entry in got) == [str(pictures / name) for name in names]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    guard.cancel()
    assert process.stderr
    stderr = process.stderr.read()
    assert b"3 done" in stderr
    assert b"interrupted" in stderr
    assert not any(word in stderr for word in (b"Traceback", b"Fatal"))


def test_ctrl_c_twice_stops_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    arguments = (many(tmp_path / "in", 40), "--model", tiny_checkpoint, "--batch-size", 20, "-o", out)
    process = start(*arguments, "--max-new-tokens", 3000, "--batch-size", 20, cwd=tmp_path)
    assert process.stderr
    seen = process.stderr.readline()
    assert b"compressible" in seen
    time.sleep(0.1)  # less than the first batch takes on any machine
    process.send_signal(signal.SIGINT)
    seen = process.stderr.readline()
    assert b"again" in seen
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert out.read_bytes() == b""


def test_a_folder_that_cannot_be_written_is_1_before_any_work(kvcli: Command, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = kvcli("describe", pictures, "-o", tmp_path / "file" / "r.jsonl")
    assert done.returncode == 1
    assert "can't be written" in one_line(done.stderr.decode())


def command_in_fork(arguments: list[str]) -> None:
    """The command line in a process forked from one that has torch loaded, to save thirty imports."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "XDG_CONFIG_HOME": os.devnull}
    sys.argv = ["kvcli", *arguments]
    main()


@pytest.mark.slow
def test_thirty_kills_and_resumes_lose_nothing_and_double_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcli.engine.session", "kvcli.cli.app"])
    folder, out, dice = many(tmp_path / "in", 400), tmp_path / "r.jsonl", random.Random(1)
    arguments = ["describe", str(folder), "--model", str(tiny_checkpoint), *TINY, "-q"]
    arguments += ["-o", str(out), "--resume", "--batch-size", "3"]
    finished: set[str] = set()
    for _ in range(30):
        size = out.stat().st_size if out.exists() else 0
        process = context.Process(target=command_in_fork, args=(arguments,))
        process.start()
        end = time.monotonic() + 60
        while process.is_alive() and not (out.exists() and out.stat().st_size > size):
            assert time.monotonic() < end
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
        paths = [entry["path"] for entry in objects(out.read_bytes().rpartition(b"\n")[0])]
        assert len(paths) == len(set(paths))
        assert finished <= set(paths), "a finished record was lost"
        finished = set(paths)
    process = context.Process(target=command_in_fork, args=(arguments,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert sorted(entry["path"] for entry in objects(out.read_bytes())) == sorted(map(str, folder.iterdir()))
