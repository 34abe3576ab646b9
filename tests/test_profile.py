"""`kvcli profile`: forecast, terminal, files; the numbers are those of the runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from kvcli import policies
from kvcli.cli import study
from kvcli.cli.app import app
from kvcli.cli.profile import weight_bytes
from kvcli.engine.session import Decoding, Request, Session
from kvcli.errors import UsageError

Run = Callable[..., Any]


@pytest.fixture
def run(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in an empty folder, with the tiny model and short answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*arguments: object, command: str = "profile") -> Any:
        model = ("--model", tiny_checkpoint, "--max-new-tokens", "8", "--device", "cpu", "--dtype", "float64")
        return CliRunner().invoke(app, [command, *map(str, (*arguments, *model))])

    return invoke


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


def test_files_hold_what_was_run(run: Run, pictures: Path, tmp_path: Path, session: Session) -> None:
    result = run(pictures / "photo2.png", "--budget", "0.3", "-o", "out", "--policies", "h2o", "--json")
    assert result.exit_code == 0, result.stderr
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names == {
        "attention-map.png", "contact-sheet.png", "kept.png", "layers.png", "timeline.png", "profile.json",
        "tokens.csv", "steps.csv", *(f"layers/layer-0{n}.png" for n in range(3)),
    }  # fmt: skip
    for path in (tmp_path / "out").rglob("*.png"):
        with Image.open(path) as image:
            assert image.size[0] > 250
            assert len(image.convert("L").getcolors(1 << 20) or ()) > 20, f"{path} is nearly empty"

    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "out" / "profile.json").read_text())
    request = Request((Image.open(pictures / "photo2.png").convert("RGB"),), "Describe the image.")
    prepared, steps = session.prepare(request), Decoding(max_new_tokens=8)
    for label, policy in (("full", policies.create("full")), ("elastic 0.3", policies.create("elastic", budget=0.3))):
        outcome = session.run([prepared], policy, steps)[0]
        assert found["bytes_by_step"][label] == [step.bytes_used for step in outcome.steps]
    assert "h2o 0.3" in found["bytes_by_step"]
    assert found["answer"] == outcome.text
    held = [layer["held_by_step"] for layer in found["layers"]]
    for step in outcome.steps:
        total = sum(sum(kind[step.index] for kind in layer.values()) for layer in held) / len(held)
        assert total == pytest.approx(step.held[0])


def test_the_token_table_has_every_token_of_every_layer(run: Run, pictures: Path, tmp_path: Path) -> None:
    run(pictures / "photo2.png", "--budget", "0.3", "-o", "out", "-q")
    with (tmp_path / "out" / "tokens.csv").open() as file:
        rows = list(csv.DictReader(file))
    layer = [row for row in rows if row["layer"] == "1"]
    assert [int(row["position"]) for row in layer] == list(range(len(layer)))
    assert sum(row["kind"] == "visual" for row in layer) == 16
    prompt = [row for row in layer if row["kind"] != "generated"]
    assert sum(float(row["importance"]) for row in prompt) == pytest.approx(len(prompt), rel=1e-4)
    assert {row["fate"] for row in layer} == {"kept", "merged", "dropped"}
    assert all((row["left_at_step"] == "") == (row["fate"] == "kept") for row in layer)
    assert all(row["left_at_step"] == "0" for row in layer if row["fate"] == "merged")


def test_the_terminal_shows_maps_tables_and_timelines(run: Run, pictures: Path) -> None:
    result = run(pictures / "photo2.png", "--budget", "0.3")
    for wanted in ("forecast", "attention each token gets", "what elastic holds", "entropy", "sparsity", "visual kept"):
        assert wanted in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_dumb_terminal_gets_ascii(run: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert run(pictures / "photo2.png", "--budget", "0.3").stdout.isascii()


def test_a_forecast_runs_nothing(run: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr(Session, "run", refuse)
    result = run(pictures / "photo2.png", "--forecast", "--memory", "1GiB", "--batch-size", "4", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["forecast"]
    assert found["memory"] == 2**30
    assert set(found["gain_at_most"]) == {"1", "4", "8", "32"}
    assert found["largest_batch"]["compressed"] > found["largest_batch"]["full"] > 0


def test_the_forecast_fits_what_a_run_holds(run: Run, pictures: Path) -> None:
    found = json.loads(run(pictures / "photo2.png", "--budget", "0.3", "--json").stdout)
    told, steps = found["forecast"], found["bytes_by_step"]
    assert max(steps["elastic 0.3"]) <= told["peak"] <= told["peak_full"]
    assert max(steps["full"]) <= told["peak_full"]
    assert told["prompt"] == found["prompt_tokens"]
    assert told["kept"] * told["bytes_per_token"] == steps["elastic 0.3"][0]


def test_a_step_reads_the_text_model_and_the_output_layer_only(session: Session) -> None:
    everything, read = weight_bytes(session.model)
    table = session.model.get_input_embeddings().weight
    vision = [*session.model.model.vision_tower.parameters(), *session.model.model.multi_modal_projector.parameters()]
    assert everything - read == sum(p.numel() for p in [table, *vision]) * 8


def test_several_pictures_in_one_prompt_each_get_a_folder(run: Run, pictures: Path, tmp_path: Path) -> None:
    both = (pictures / "photo1.png", pictures / "photo2.png")
    assert run(*both, "--together", "-o", "out", "-q").exit_code == 0
    assert (tmp_path / "out" / "picture-2" / "contact-sheet.png").is_file()
    refused = run(*both)
    assert refused.exit_code == 2
    assert "--together" in refused.stderr


def test_a_folder_with_files_is_not_written_into(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    result = run(pictures / "photo1.png", "-o", "out")
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_broken_picture_is_an_error_of_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    result = run("torn.png")
    assert result.exit_code == 4
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "count"), [("24GiB", 24 * 2**30), ("800M", 800 * 2**20), ("1.5g", 3 * 2**29), ("4096", 4096)]
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert study.memory(text) == count


@pytest.mark.parametrize("text", ["", "many", "-1G", "4 apples"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="24GiB"):
        study.memory(text)
