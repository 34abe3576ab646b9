"""`kvcli compare` and what it is made of: records per picture and policy, resumed, searched, reported."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from kvcli import comparison, fidelity, policies, records
from kvcli.cli.app import app
from kvcli.cli.subjects import read_references
from kvcli.comparison import Comparison, Subject
from kvcli.engine.session import Decoding, Request, Session
from kvcli.errors import UsageError
from kvcli.policies.base import Policy
from kvcli.policies.contract import LayerView
from kvcli.policies.full import Full

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def work() -> Comparison:
    three = ("full", {}), ("elastic", {"budget": 0.3}), ("elastic", {"budget": 0.6})
    return Comparison(tuple(policies.create(name, **o) for name, o in three), Decoding(max_new_tokens=10))


@pytest.fixture
def subjects(pictures: Path) -> list[Subject]:
    found = []
    for index in range(2):
        path = pictures / f"photo{index + 1}.png"
        request = Request((Image.open(path).convert("RGB"),), "describe this picture", key=path.name)
        found.append(Subject(index, path.name, request, (records.ImageFacts(str(path), f"hash-{index}"),)))
    return found


@pytest.fixture
def run(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in an empty folder, with the tiny model and short answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def invoke(*arguments: object) -> Any:
        model = ("--model", tiny_checkpoint, "--max-new-tokens", "8", "--device", "cpu")
        return CliRunner().invoke(app, ["compare", *map(str, (*arguments, *model))])

    return invoke


def test_records_say_what_fidelity_measures(session: Session, subjects: list[Subject], work: Comparison) -> None:
    found = [m.record for m in comparison.run(session, subjects, work)]
    assert [(r["id"], r["policy"]["name"]) for r in found[:3]] == [
        ("photo1.png", "full"), ("photo1.png", "elastic"), ("photo1.png", "elastic"),
    ]  # fmt: skip
    prepared = session.prepare(subjects[0].request)
    reference = fidelity.look_up(session, [prepared], work.decoding)[0]
    expected = fidelity.measure(session, [reference], work.policies[1], work.decoding)[0]
    scores = found[1]["fidelity"]
    for name in ("nll", "nll_full", "kl", "agreement", "rouge_l", "first_divergence", "perplexity", "tokens"):
        assert scores[name] == pytest.approx(getattr(expected, name)), name
    assert found[1]["text"] == expected.outcome.text
    assert found[1]["bytes_by_step"] == [step.bytes_used for step in expected.outcome.steps]


def test_a_batch_of_pictures_gives_the_same_numbers(
    session: Session, subjects: list[Subject], work: Comparison
) -> None:
    together = Comparison(work.policies, work.decoding, together=2)
    alone = {(r.record["id"], str(r.record["policy"])): r.record for r in comparison.run(session, subjects, work)}
    for each in comparison.run(session, subjects, together):
        expected = alone[each.record["id"], str(each.record["policy"])]
        assert each.record["text"] == expected["text"]
        assert each.record["fidelity"]["nll"] == pytest.approx(expected["fidelity"]["nll"], abs=1e-9)


def test_what_is_done_is_taken_as_it_is(session: Session, subjects: list[Subject], work: Comparison) -> None:
    first = [m.record for m in comparison.run(session, subjects, work)]
    done = {records.key(entry): entry for entry in first if entry["id"] == "photo1.png"}
    again = list(comparison.run(session, subjects, work, done=done))
    assert [m.fresh for m in again] == [False] * 3 + [True] * 3
    assert [m.record for m in again[:3]] == first[:3]

    changed = Comparison(work.policies, Decoding(max_new_tokens=9))
    assert all(m.fresh for m in comparison.run(session, subjects[:1], changed, done=done)), (
        "other settings are not done"
    )


def test_a_picture_that_fails_disturbs_no_other(session: Session, subjects: list[Subject], work: Comparison) -> None:
    broken = Subject(0, "x.png", Request((), "why"), (), failure=records.Failure("PictureError", "truncated"))
    found = [m.record for m in comparison.run(session, [broken, subjects[1]], work)]
    assert [bool(r["error"]) for r in found] == [True] * 3 + [False] * 3
    assert found[0].keys() == found[3].keys()


@dataclasses.dataclass(frozen=True)
class Hungry(Full):
    """Runs out of memory with more than one picture, and with a prompt of a certain length."""

    refused: int = 0

    def compress(self, view: LayerView) -> None:
        if len(view.prompt.lengths) > 1 or view.prompt.lengths[0] == self.refused:
            raise torch.OutOfMemoryError("out of memory")


def test_what_fails_in_the_run_fails_alone(session: Session, subjects: list[Subject]) -> None:
    asked = dataclasses.replace(subjects[1].request, prompt="describe this picture in many words")
    subjects[1] = dataclasses.replace(subjects[1], request=asked)
    hungry = Hungry(refused=session.prepare(asked).length)
    object.__setattr__(hungry, "name", "hungry")
    full, rest = policies.create("full"), policies.create("elastic", budget=0.5)
    work = Comparison((full, hungry, rest), Decoding(max_new_tokens=4), together=2)
    found = [m.record for m in comparison.run(session, subjects, work)]
    errors = {(r["id"], r["policy"]["name"]): r["error"] and r["error"]["type"] for r in found}
    assert len(found) == len(errors) == 6
    assert errors.pop(("photo2.png", "hungry")) == "OutOfMemory"
    assert not any(errors.values())


def test_stopping_ends_between_two_policies(session: Session, subjects: list[Subject], work: Comparison) -> None:
    seen: list[Any] = []
    for each in comparison.run(session, subjects, work, stop=lambda: len(seen) >= 2):
        seen.append(each)
    assert len(seen) == 2


def test_the_smallest_budget_is_the_first_within_the_tolerance(session: Session, subjects: list[Subject]) -> None:
    references = [
        fidelity.look_up(session, [session.prepare(s.request)], Decoding(max_new_tokens=10))[0] for s in subjects
    ]
    full = comparison.baseline(session, subjects, Comparison((), Decoding(max_new_tokens=10)))

    def make(share: float) -> Policy:
        return policies.create("elastic", budget=share)

    share, losses = comparison.smallest_budget(session, full, make, 0.5)
    base = fidelity.perplexity([fidelity.itself(r) for r in references])
    scores = [s for r in references for s in fidelity.score(session, [r], make(share))]
    assert losses[share] == pytest.approx(fidelity.perplexity(scores) / base - 1)
    assert losses[share] <= 0.5
    below = round(share - 0.01, 2)
    assert losses[below] > 0.5, "one hundredth less is too little"
    assert full.perplexity == pytest.approx(base)
    together = comparison.baseline(session, subjects, Comparison((), Decoding(max_new_tokens=10), together=2))
    assert comparison.smallest_budget(session, together, make, 0.5)[1] == pytest.approx(losses), "in one batch"
    assert comparison.smallest_budget(session, full, make, math.inf)[0] == 0.01
    assert len(losses) <= 8


# --- the command


def test_one_picture_shows_texts_and_tables(run: Run, pictures: Path) -> None:
    result = run(pictures / "photo1.png", "--policies", "elastic", "--budgets", "0.3,0.6")
    assert result.exit_code == 0, result.stderr
    for wanted in ("full", "elastic 0.3", "elastic 0.6", "PPL", "tokens/s", "sees question"):
        assert wanted in result.stdout
    assert "perplexity" in result.stderr


def test_json_has_the_table_and_all_records(run: Run, pictures: Path) -> None:
    result = run(
        pictures / "photo1.png", pictures / "photo2.png", "--policies", "elastic", "--budgets", "0.3", "--json"
    )
    found = json.loads(result.stdout)
    assert [row["label"] for row in found["table"]] == ["full", "elastic 0.3"]
    assert found["table"][1]["pictures"] == 2
    assert found["table"][0]["mean"]["rouge_l"] == 1
    assert len(found["records"]) == 4


def test_a_run_over_a_folder_goes_on_where_it_ended(run: Run, pictures: Path, tmp_path: Path) -> None:
    common = ("--policies", "elastic", "--budgets", "0.3", "-o", "out.jsonl")
    first = run(pictures / "photo1.png", *common)
    assert first.exit_code == 0, first.stderr
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(pictures / "photo1.png", *common).exit_code == 2, "an existing file is not touched"
    both = run(pictures / "photo1.png", pictures / "photo2.png", *common, "--resume", "--csv")
    after = (tmp_path / "out.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after.splitlines()) == 4, "only what was missing is done"
    assert both.stdout.splitlines()[1].split(",")[3] == "2", "the table has old and new"


def test_failures_are_named_and_counted(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes((pictures / "photo1.png").read_bytes()[:60])
    some = run(pictures / "photo1.png", "torn.png", "--policies", "elastic", "--budgets", "0.3", "--json")
    assert some.exit_code == 3
    assert "torn.png" in some.stderr
    assert run("torn.png", "--policies", "elastic", "--budgets", "0.3").exit_code == 4


def test_given_answers_are_measured(run: Run, pictures: Path, tmp_path: Path) -> None:
    lines = [{"path": "photo1.png", "answer": "a dog runs near the sea"}]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = ("--policies", "elastic", "--budgets", "0.3", "--references", "answers.jsonl", "--json")
    found = json.loads(run(pictures / "photo1.png", *common).stdout)
    assert {r["fidelity"]["tokens"] for r in found["records"]} == {6}
    missing = run(pictures / "photo2.png", *common)
    assert missing.exit_code == 4
    assert "no answer for" in missing.stderr


def test_auto_searches_and_compares_at_what_it_found(run: Run, pictures: Path) -> None:
    result = run(pictures / "photo1.png", "--policies", "elastic", "--auto", "0.5", "--json")
    found = json.loads(result.stdout)
    share, losses = found["auto"]["found"]["elastic"]
    assert found["table"][1]["policy"]["budget"] == share
    assert losses[str(share)] <= 0.5


def test_the_page_is_written_and_never_over_another(run: Run, pictures: Path, tmp_path: Path) -> None:
    common = (pictures / "photo1.png", "--policies", "elastic", "--budgets", "0.3", "--report", "out.html", "-q")
    assert run(*common).exit_code == 0
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "layer 2" in text
    assert "visual tokens" in text
    assert "elastic 0.3" in text
    assert run(*common).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policies", "elastik"), "did you mean"),
        (("--budgets", "0.3,7.5"), "7.5"),
        (("--json", "--csv"), "exclude"),
        (("--temperature", "1"), "greedy"),
        (("--auto", "-1"), "tolerance"),
        (("--resume",), "-o FILE.jsonl"),
        (("-o", "folder/"), ".jsonl"),
        (("--references", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--report", "no/where.html"), "no folder"),
        (("--dry-run",), "No such option"),
    ],
)
def test_usage_errors_take_one_line(run: Run, pictures: Path, arguments: tuple[str, ...], says: str) -> None:
    result = run(pictures / "photo1.png", *arguments)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if says in line]
    assert lines, result.stderr


@pytest.mark.parametrize("line", ["[1]", '{"id": "a"}', '{"answer": "x"}', '{"id": "a", "answer": " "}', "{"])
def test_bad_references_name_their_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "b", "text": "fine"}\n' + line)
    with pytest.raises(UsageError, match="line 2"):
        read_references(str(path))


@pytest.fixture
def chromium() -> str:

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page(
    run: Run, pictures: Path, tmp_path: Path, chromium: str, width: int, dark: bool
) -> None:
    run(pictures / "photo1.png", "--policies", "elastic", "--budgets", "0.3", "--report", "out.html", "-q")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},1500",
         *scheme, f"--screenshot={tmp_path / 'shot.png'}", (tmp_path / "out.html").as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    shot = Image.open(tmp_path / "shot.png").convert("L")
    assert shot.size[0] == width
    edge = shot.getpixel((2, 700))
    assert (edge < 60) if dark else (edge > 200)
