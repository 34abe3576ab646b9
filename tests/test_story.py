"""`kvcli story`: one conversation from picture to picture, streamed, with every step of the cache on record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from kvcli.cli.app import app
from kvcli.cli.story import TIRED

Run = Callable[..., Any]


@pytest.fixture
def run(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object) -> Any:
        model = ("--model", tiny_checkpoint, "--device", "cpu", "--dtype", "float64")
        return CliRunner().invoke(app, ["story", *map(str, (*arguments, *model))])

    return invoke


def test_a_count_is_kept_from_picture_to_picture(run: Run, pictures: Path) -> None:
    shown = [pictures / f"photo{n}.png" for n in (1, 2, 3)]
    found = json.loads(run(*shown, "--policy", "h2o", "--budget", "24", "--words", "60", "--json").stdout)
    assert found["policy"]["decode"] == "bounded"
    assert {Path(turn["id"]).name for turn in found["turns"]} == {"photo1.png", "photo2.png", "photo3.png"}
    assert found["turns"][-1]["visual_tokens"] == 3 * 16, "the conversation holds all pictures"
    assert max(step["held"] for step in found["steps"]) <= 25
    assert found["steps"][-1]["seen"] == found["turns"][-1]["seen"] > 100
    seen = [step["seen"] for step in found["steps"]]
    assert seen == sorted(seen)


def test_the_text_streams_and_is_saved(run: Run, pictures: Path, tmp_path: Path) -> None:
    result = run(pictures / "photo1.png", "--words", "30", "-o", "story.txt")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == (tmp_path / "story.txt").read_text().strip()
    assert "words" in result.stderr
    assert run(pictures / "photo1.png", "--words", "30", "-o", "story.txt").exit_code == 2, "never over another"


def test_style_and_length_are_asked_for(run: Run, pictures: Path) -> None:
    found = json.loads(run(pictures / "photo1.png", "--words", "40", "--style", "noir", "--json").stdout)
    first = found["turns"][0]["prompt"]
    assert "noir" in first
    assert "40 words" in first
    own = json.loads(run(pictures / "photo1.png", "--prompt", "tell a story", "--words", "20", "--json").stdout)
    assert own["turns"][0]["prompt"] == "tell a story"


def test_a_model_that_stops_early_is_asked_to_go_on_but_not_for_ever(run: Run, pictures: Path) -> None:
    found = json.loads(run(pictures / "photo1.png", "--words", "100", "--max-new-tokens", "300", "--json").stdout)
    assert 1 < len(found["turns"]) <= TIRED
    assert {turn["prompt"] for turn in found["turns"][1:]} == {"Go on with the story."}


def test_the_length_in_tokens_is_the_users_to_say(run: Run, pictures: Path) -> None:
    found = json.loads(run(pictures / "photo1.png", "--max-new-tokens", "5", "--json").stdout)
    assert all(turn["generated_tokens"] <= 5 for turn in found["turns"])


def test_the_users_choice_for_decode_stands(run: Run, pictures: Path) -> None:
    common = (pictures / "photo1.png", "--policy", "elastic", "--words", "12", "--json")
    assert json.loads(run(*common).stdout)["policy"]["decode"] == "bounded"
    assert json.loads(run(*common, "--set", "decode=grow").stdout)["policy"]["decode"] == "grow"


def test_the_timeline_is_drawn(run: Run, pictures: Path, tmp_path: Path) -> None:
    shown = (pictures / "photo1.png", pictures / "photo2.png")
    assert run(*shown, "--words", "20", "--timeline", "cache.png", "-q").exit_code == 0
    with Image.open(tmp_path / "cache.png") as image:
        assert image.format == "PNG"
        assert image.size[0] > 800


def test_a_broken_picture_is_named(run: Run, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    result = run(pictures / "photo1.png", "torn.png")
    assert result.exit_code == 4
    assert "torn.png" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--num-beams", "2"), "num-beams"),
        (("--timeline", "no/where.png"), "no folder"),
        (("--set", "budget=3"), "--budget"),
        (("--policy", "elastik"), "did you mean"),
    ],
)
def test_usage_errors_take_one_line(run: Run, pictures: Path, arguments: tuple[str, ...], says: str) -> None:
    result = run(pictures / "photo1.png", *arguments)
    assert result.exit_code == 2
    assert any(says in line for line in result.stderr.splitlines()), result.stderr
