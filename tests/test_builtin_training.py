"""How the built-in model is trained: what is drawn, what is learned from it, and that a stopped run goes on."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcli import builtin
from kvcli.builtin import build, chats, class_texts, finish, lora, prompts, scored, train
from kvcli.builtin.examples import Example, Examples
from kvcli.builtin.features import Features
from kvcli.builtin.pasting import Bank, Paste, Pasting
from kvcli.builtin.student import Student
from kvcli.builtin.tower import Neck, Trunk


@torch.no_grad()
def random_trunk() -> Trunk:
    """A trunk of the same random weights each time, whose features are not all near zero."""
    torch.manual_seed(0)
    trunk = Trunk()
    for module in trunk.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # the statistics of what it sees first
    trunk(torch.randn(2, 3, 384, 384))
    return trunk.eval()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Features, list[str], Path]:
    """Features of seven made-up photos, by a random trunk."""
    folder = tmp_path_factory.mktemp("photos")
    names = [f"{i}.jpg" for i in range(7)]
    for i, name in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(folder / name)
    features = Features(folder / "features", names)
    features.compute(folder, random_trunk(), batch=4)
    return features, names, folder


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and the chat's special tokens."""
    special = ["<|endoftext|>", prompts.OPEN, prompts.CLOSE]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=prompts.CLOSE, eos_token=prompts.CLOSE)


def language_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def student() -> Student:
    torch.manual_seed(0)
    return Student(language_model(), letters(), Neck(32, 16))


def material(student: Student, small: tuple[Features, list[str], Path], *more_views: Features) -> Examples:
    features, names, _ = small
    captions = {
        name: [f"a dog and a man are number {i} .", f"a man sees {i} dots", "colours"] for i, name in enumerate(names)
    }
    long = [{"n": names[0], "k": "story", "s": "One day, it rained."}]
    chats = [{"q": "Hello?", "s": "Hello."}]
    pasting = Pasting(Bank(features, names, student.neck), student.neck.classifier)
    classes = [f"thing {i}" for i in range(1000)]
    return Examples(captions, names, long, chats, classes, [features, *more_views], pasting)


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


@torch.no_grad()
def test_rows_of_different_width_give_the_loss_of_one_batch(small: tuple[Features, list[str], Path]) -> None:
    pupil = student()
    examples, rng = material(pupil, small), random.Random(0)
    drawn = [examples.draw(kind, rng) for kind in ("caption", "paste", "caption", "long", "paste")]
    together = float(pupil.loss(drawn, examples.maps(drawn), 6, True))
    assert float(train.picture_loss(pupil, examples, drawn, 6)) == pytest.approx(together, rel=2e-2)  # bfloat16


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
    learn(3e-4, 30, lambda: scored.loss(pupil, people, maps, 6)[0])
    assert dogs() > before + 0.15
