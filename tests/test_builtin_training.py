"""How the built-in model is trained: what is learned, what is written, and that a stopped run goes on."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pupil import language_model, material, student
from safetensors.torch import load_file

from kvcli import builtin
from kvcli.builtin import build, chats, class_texts, finish, lora, scored, train
from kvcli.builtin.examples import Example
from kvcli.builtin.features import Features
from kvcli.builtin.student import Student


def options(work: Path, steps: int, *more: str) -> argparse.Namespace:
    work.mkdir(exist_ok=True)
    unread = ["--photos", ".", "--captions", ".", "--split", "."]
    files = ["--work", str(work), "--out", str(work / "w.safetensors")]
    told = f"--steps {steps} --decay 2 --seed 3 --log 1 --evaluate 100 --save 99".split()
    return train.parser().parse_args([*unread, *files, *told, *more])


@pytest.mark.parametrize("more", [(), ("--scored",)], ids=["plain", "scored"])
def test_a_stopped_training_goes_on_bit_by_bit(
    small: tuple[Features, list[str], Path], tmp_path: Path, more: tuple[str, ...]
) -> None:
    whole, early, late = student(), student(), student()
    late.load({name: value + 1 for name, value in late.weights().items()})  # what is read back must replace this
    examples = material(whole, small)
    held_out = [Example("What?", ("Dots.",), small[1][0])]
    list(train.run(whole, examples, held_out, options(tmp_path / "whole", 6, *more)))
    first = options(tmp_path / "parts", 6, *more)
    first.save = 0  # a state after every step
    for line in train.run(early, examples, held_out, first):
        if line["step"] == 4:
            break
    list(train.run(late, examples, held_out, options(tmp_path / "parts", 6, *more)))
    ended = whole.weights()
    assert all(torch.equal(ended[name], value) for name, value in late.weights().items())


def test_every_kind_of_example_can_be_learned_from(small: tuple[Features, list[str], Path]) -> None:
    pupil = student()
    examples = material(pupil, small)
    rng = random.Random(0)
    for kind in ("caption", "long", "paste", "space"):
        drawn = [examples.draw(kind, rng) for _ in range(3)]
        loss = pupil.loss(drawn, examples.maps(drawn), 6)
        loss.backward()
        assert torch.isfinite(loss)
    assert all(p.grad is not None for name, p in pupil.trainable.items() if name.endswith(".b"))


@torch.no_grad()
def test_answers_that_share_a_picture_do_not_see_each_other(small: tuple[Features, list[str], Path]) -> None:
    pupil = student()
    examples = material(pupil, small)
    texts = ("A red dot.", "Nothing at all can be seen here.", "Dots.")
    together = [Example("What?", texts, small[1][0])]
    apart = [Example("What?", (text,), small[1][0]) for text in texts]
    one, all_ = (float(pupil.loss(e, examples.maps(e), 6)) for e in (together, apart))
    assert one == pytest.approx(all_, rel=2e-2)  # bfloat16
    swapped = [Example("What?", texts[::-1], small[1][0])]
    assert float(pupil.loss(swapped, examples.maps(swapped), 6)) == pytest.approx(one, rel=2e-2)


@torch.no_grad()
def test_merged_updates_equal_attached_ones() -> None:
    torch.manual_seed(0)
    plain, updated = language_model(), language_model()
    updated.load_state_dict(plain.state_dict())
    weights = lora.attach(updated.model)
    for value in weights.values():
        value.copy_(0.1 * torch.randn(value.shape))
    ids = torch.arange(20)[None]
    before = plain(ids).logits
    state = plain.state_dict()
    lora.merge(state, dict(weights))
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(ids).logits, updated(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain(ids).logits, before, atol=1e-3)


@torch.no_grad()
def test_rows_of_different_width_give_the_loss_of_one_batch(small: tuple[Features, list[str], Path]) -> None:
    pupil = student()
    examples, rng = material(pupil, small), random.Random(0)
    drawn = [examples.draw(kind, rng) for kind in ("caption", "paste", "caption", "long", "paste")]
    together = float(pupil.loss(drawn, examples.maps(drawn), 6, True))
    assert float(train.picture_loss(pupil, examples, drawn, 6)) == pytest.approx(together, rel=2e-2)  # bfloat16


@torch.no_grad()
def test_dropout_only_while_training(small: tuple[Features, list[str], Path]) -> None:
    pupil = student()
    for name, value in pupil.trainable.items():
        if name.endswith(".b"):
            value.copy_(torch.randn(value.shape))
    visual = [pupil.visual(small[0].maps(small[1][:1]), 6) for _ in range(2)]
    ids = torch.arange(20)[None]
    plain = [pupil.lm(ids).logits for _ in range(2)]
    pupil.train()
    assert not torch.equal(pupil.visual(small[0].maps(small[1][:1]), 6), visual[0])
    assert not torch.equal(pupil.lm(ids).logits, plain[0])
    assert torch.equal(*visual)
    assert torch.equal(*plain)


@torch.no_grad()
def test_hidden_words_are_those_of_the_answer(
    small: tuple[Features, list[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of them hidden, two answers of one length look alike, and the question still counts."""
    monkeypatch.setattr("kvcli.builtin.student.WORD_DROPOUT", 1.0)
    pupil = student()
    maps = small[0].maps(small[1][:1])

    def states(question: str, answer: str) -> torch.Tensor:
        return pupil.hidden([Example(question, (answer,), small[1][0])], pupil.visual(maps, 6))[0]

    assert not torch.equal(states("What?", "Dots."), states("What?", "Rain."))
    pupil.training = True  # the student alone: no dropout in its parts
    assert torch.equal(states("What?", "Dots."), states("What?", "Rain."))
    assert not torch.equal(states("What?", "Dots."), states("Who??", "Dots."))


def test_what_is_written_is_the_average(small: tuple[Features, list[str], Path], tmp_path: Path) -> None:
    pupil = student()
    examples = material(pupil, small)
    held_out = [Example("What?", ("Dots.",), small[1][0])]
    each = options(tmp_path, 3)
    each.save, each.decay, each.rate = 0, 0, 30.0
    seen = [pupil.weights() for _ in train.run(pupil, examples, held_out, each)][:3]
    written = load_file(each.out)
    for name in pupil.trainable:
        mean = torch.stack([weights[name] for weights in seen]).mean(0)
        torch.testing.assert_close(written[name].float(), mean, rtol=1e-2, atol=1e-4)  # half precision
    assert any(not torch.allclose(written[n].float(), seen[-1][n], rtol=1e-2, atol=1e-4) for n in pupil.trainable)


def test_the_average_of_states_weighs_their_shares() -> None:
    states = [{"a": torch.tensor([1.0, 2.0]), "temperature": torch.tensor(9.0)}, {"a": torch.tensor([5.0, 2.0])}]
    assert finish.average(states, (3, 1))["a"].tolist() == [2.0, 2.0]
    assert "temperature" not in finish.average(states, (1, 1))  # one fits the state that it was fitted to


@torch.no_grad()
def test_the_temperature_finds_how_much_too_sure_a_model_is(small: tuple[Features, list[str], Path]) -> None:
    """Words drawn from the model itself have temperature 1; once its logits are 1.3 times as large, 1.3."""
    pupil = student()
    pupil.lm.lm_head.weight.normal_(std=0.5)
    examples = material(pupil, small)
    rows = [Example("What?", ("x" * 400,), name) for name in small[1][:2]]
    torch.manual_seed(0)

    class Drawn(Student):
        """Answers as drawn from the model's own probabilities."""

        def hidden(self, examples: Any, visual: Any) -> Any:
            states, _, owner = super().hidden(examples, visual)
            scores = self.lm.lm_head(states).float() / torch.tensor(too_sure)
            return states, torch.distributions.Categorical(logits=scores).sample(), owner

    pupil.__class__ = Drawn
    for too_sure in (1.0, 1.3):
        found, before, after = finish.temperature(pupil, rows * 3, examples.maps)
        assert found == pytest.approx(too_sure, abs=0.08)
        assert after <= before


@pytest.mark.slow
def test_finish_writes_weights_that_make_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{i}.jpg" for i in range(4)]
    for i, name in enumerate(names):
        Image.new("RGB", (64, 48), (60 * i, 90, 120)).save(tmp_path / name)
    (tmp_path / "captions").write_text(json.dumps({name: ["A dog runs ."] for name in names}))
    (tmp_path / "split").write_text(json.dumps({"train": names[:2], "held_out": names[2:]}))
    files = {flag: str(tmp_path / flag) for flag in ("captions", "split", "work", "out")}
    flags = ["--photos", str(tmp_path), *(part for flag, path in files.items() for part in (f"--{flag}", path))]
    state = str(builtin.WEIGHTS)
    with pytest.raises(SystemExit):
        finish.main([state, "--shares", "1", "2", *flags])
    assert "2 shares for 1 files" in capsys.readouterr().err
    finish.main([state, state, "--neck", "0.5", *flags])
    before, after = load_file(state), load_file(files["out"])
    assert before.keys() == after.keys()
    torch.testing.assert_close(after["neck.out.weight"], before["neck.out.weight"] / 2)
    torch.testing.assert_close(after["lora.0.q.b"], before["lora.0.q.b"])
    found = float(after["temperature"])
    assert f"temperature {found:.2f}" in capsys.readouterr().out
    model, _ = build.assemble(None, None, after)
    plain, _ = build.language_model()
    ratio = plain.model.norm.weight / model.model.language_model.norm.weight
    torch.testing.assert_close(ratio, torch.full_like(ratio, found))


@pytest.mark.slow
def test_the_language_model_writes_chats_and_class_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats.main(["--out", str(tmp_path / "chats"), "--count", "3", "--tokens", "4", "--batch", "2"])
    asked = [json.loads(line) for line in (tmp_path / "chats").read_text().splitlines()]
    assert [row["q"] for row in asked] == chats.questions(0)[:3]
    assert all(row["s"] for row in asked)
    few = class_texts.rows(0)[:3]
    monkeypatch.setattr(class_texts, "rows", lambda seed: few)
    class_texts.main(["--out", str(tmp_path / "texts"), "--tokens", "4", "--batch", "2"])
    written = [json.loads(line) for line in (tmp_path / "texts").read_text().splitlines()]
    for (label, kind, thing), row in zip(few, written, strict=True):
        start = class_texts.KINDS[kind][1].format(thing)
        assert (row["c"], row["k"]) == (label, kind)
        assert row["s"].startswith(start)
        assert len(row["s"]) > len(start)


def test_a_drawn_caption_is_worth_the_words_that_two_people_use() -> None:
    human = ("A dog runs.", "A dog in grass.", "The grass is green.", "Running.", "A pet.")
    assert scored.score("A dog sits in the green grass.", human) == pytest.approx(2 - scored.MISS)
    assert scored.score("It is.", human) == 0


def test_a_score_is_measured_against_the_photos_other_captions() -> None:
    scores = torch.tensor([[1.0, 0.0, 2.0, 5.0], [3.0, 3.0, 3.0, 3.0]])
    against = torch.tensor([[(0 + 2 + 5) / 3, (1 + 2 + 5) / 3, (1 + 0 + 5) / 3, (1 + 0 + 2) / 3], [3.0] * 4])
    torch.testing.assert_close(scored.advantages(scores), scores - against)


def test_scored_training_makes_the_words_that_people_agree_on_likelier(
    small: tuple[Features, list[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pupil = student()
    examples = material(pupil, small)
    both = [Example("What?", ("Dog.", "Cat."), small[1][0])] * 4
    maps = examples.maps(both)
    pupil.lm.float().requires_grad_(True)  # the whole of it: updates alone teach a random model no words

    def learn(rate: float, steps: int, loss: Callable[[], torch.Tensor]) -> None:
        adam = torch.optim.Adam(pupil.lm.parameters(), rate)
        for _ in range(steps):
            adam.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            adam.step()

    def dogs() -> float:
        drawn = [text for _ in range(8) for texts in scored.draw(pupil, both, maps, 6) for text in texts]
        return drawn.count("Dog.") / len(drawn)

    learn(3e-3, 150, lambda: pupil.loss(both, maps, 6))
    before = dogs()
    assert 0.1 < before < 0.7  # it says both
    monkeypatch.setattr(scored, "WEIGHT", 0)  # the score alone
    people = [replace(e, answers=("A dog.", "The dog.", "A cat.")) for e in both]
    learn(3e-4, 60, lambda: scored.loss(pupil, people, maps, 6)[0])
    assert dogs() > before + 0.15
