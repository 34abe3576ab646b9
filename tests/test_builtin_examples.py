"""What the built-in model is trained on: photos seen again, cropped, with classes set into them, and what is said."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pupil import material, random_trunk, student

from kvcli.builtin import class_texts, prompts
from kvcli.builtin.examples import Example
from kvcli.builtin.features import Features
from kvcli.builtin.pasting import Paste
from kvcli.builtin.tower import Trunk


@torch.no_grad()
@pytest.mark.parametrize("told", [False, True])
def test_a_pasted_class_is_what_the_classifier_then_sees(
    small: tuple[Features, list[str], Path], *, told: bool
) -> None:
    pupil = student()
    examples = material(pupil, small)
    top, left, high, wide = 2, 1, 6, 7
    drawn = Example("What?", ("A thing.",), small[1][2], (Paste(5, (top, left, high, wide), told),), seed=8)
    _, plain, _ = examples.maps([replace(drawn, pastes=())])
    _, coarse, words = examples.maps([drawn])
    inside = torch.zeros(12, 12, dtype=torch.bool)
    inside[top : top + high, left : left + wide] = True
    chance = [pupil.neck.classifier(m[0][:, inside].T)[:, 5].mean() for m in (words, plain)]
    assert chance[0] > chance[1]
    ratio = words[0][:, ~inside].norm() / plain[0][:, ~inside].norm()
    torch.testing.assert_close(words[0][:, ~inside], ratio * plain[0][:, ~inside])  # dimmed, nothing else
    assert torch.equal(coarse, plain if told else words)


def test_features_go_on_where_they_stopped(small: tuple[Features, list[str], Path]) -> None:
    features, names, folder = small
    other = Features(folder / "features", names[:3])
    with pytest.raises(ValueError, match="other photos"):
        other.compute(folder, Trunk())
    again = Features(folder / "features", names)
    again.compute(folder, Trunk())  # another trunk, and nothing left to do
    assert torch.equal(again.maps(names)[1], features.maps(names)[1])


def test_a_photo_is_seen_again_in_another_way_and_always_in_the_same(
    small: tuple[Features, list[str], Path], tmp_path: Path
) -> None:
    _, names, folder = small

    def maps(view: int, chosen: list[str], place: str) -> torch.Tensor:
        features = Features(tmp_path / place, chosen, view)
        features.compute(folder, random_trunk())
        return features.maps(names[:1])[1]

    plain, first, second = (maps(view, names, f"view{view}") for view in range(3))
    assert (plain - first).abs().mean() > 0.1
    assert (first - second).abs().mean() > 0.1
    assert (maps(1, names[:2], "fewer") - first).abs().mean() < 1e-2  # half precision


def test_every_view_of_a_photo_is_drawn(small: tuple[Features, list[str], Path], tmp_path: Path) -> None:
    features, names, folder = small
    pupil, again = student(), Features(tmp_path, names, 1)
    again.compute(folder, random_trunk())
    examples = material(pupil, small, again)
    rng = random.Random(0)
    drawn = [examples.draw("caption", rng) for _ in range(20)]
    assert {example.view for example in drawn} == {0, 1}
    chosen = [Example("What?", ("Dots.",), names[2], view=view) for view in (0, 1)]
    for made, stored in zip(examples.maps(chosen)[1], (features, again), strict=True):
        assert torch.equal(made, stored.maps([names[2]])[1][0])


def test_only_a_long_detail_teaches_where_to_stop(small: tuple[Features, list[str], Path]) -> None:
    examples, rng = material(student(), small), random.Random(0)
    name = small[1][0]
    for kind, length, stops in (("detail", 60, True), ("detail", 20, False), ("story", 60, False)):
        examples.long = [{"n": name, "k": kind, "s": "word " * length}]
        assert examples.draw("long", rng).stop is stops, (kind, length)


def test_a_text_about_a_class_is_told_of_a_picture_of_it(small: tuple[Features, list[str], Path]) -> None:
    examples, rng = material(student(), small), random.Random(0)
    examples.long = [{"c": 7, "k": "detail", "s": "The photo shows a cock."}]
    drawn = examples.draw("long", rng)
    assert [paste.label for paste in drawn.pastes] == [7]
    assert drawn.question in prompts.DETAIL
    assert not drawn.stop


def test_no_astronaut_without_a_person(small: tuple[Features, list[str], Path]) -> None:
    examples, rng = material(student(), small), random.Random(0)
    empty = small[1][3]
    examples.captions = examples.captions | {empty: ["A beach."] * 3}
    examples.people, examples.deserted = [n for n in small[1] if n != empty], [empty]
    for _ in range(60):
        drawn = examples.draw("space", rng)
        assert ("astronaut" in drawn.answers[0]) == (drawn.photo != empty), drawn


def test_every_class_gets_a_detail_and_a_story() -> None:
    rows = class_texts.rows(seed=1)
    assert sorted((label, kind) for label, kind, _ in rows) == [
        (n, k) for n in range(1000) for k in ("detail", "story")
    ]
    assert rows == class_texts.rows(seed=1) != class_texts.rows(seed=2)
    assert all(thing.split()[0] in ("a", "an") for *_, thing in rows)


def test_a_crop_is_drawn_as_large_as_the_photo(
    small: tuple[Features, list[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On maps that hold their own row and column the corners tell which crop was taken."""
    examples = material(student(), small)

    def places(side: int, channels: int) -> torch.Tensor:
        grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).float()
        return grid.repeat(1, channels // 2, 1, 1)

    monkeypatch.setattr(examples.views[0], "maps", lambda _: (places(24, 112), places(12, 1280)))
    drawn = Example("What?", ("Dots.",), small[1][1], crop=(2, 3, 9))
    fine, coarse, told = examples.maps([drawn])
    assert fine.shape == (1, 112, 24, 24)
    assert coarse[0, :2, 0, 0].tolist() == [2, 3]
    assert coarse[0, :2, -1, -1].tolist() == [2 + 8, 3 + 8]
    assert fine[0, :2, 0, 0].tolist() == [4, 6]
    assert fine[0, :2, -1, -1].tolist() == [4 + 17, 6 + 17]
    assert torch.equal(coarse, told)
    assert torch.equal(examples.maps([replace(drawn, crop=(0, 0, 12))])[0], places(24, 112))


def test_crops_lie_inside_the_photo_and_differ(small: tuple[Features, list[str], Path]) -> None:
    examples, rng = material(student(), small), random.Random(0)
    crops = {examples.draw("caption", rng).crop for _ in range(200)}
    assert len(crops) > 20
    assert all(w and min(w) >= 0 and max(w[0], w[1]) + w[2] <= 12 for w in crops)
