"""Fidelity against the full cache: equal to what a full forward with masks says, and the same in a batch as alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from kvcli import fidelity, policies
from kvcli.engine.recording import LayerTrace, record
from kvcli.engine.session import Decoding, Request, Session
from kvcli.errors import UsageError
from kvcli.policies.base import Policy, evict_one, first, keep_where, oldest, recent, top
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Statistic

STEPS = Decoding(max_new_tokens=20)
NOTHING_LEFT = (None,) * 3
PROMPTS = ("describe this picture", "tell a long story of two people and a dog near the sea", "why")


@dataclass(frozen=True)
class Dropper(Policy):
    """Drops in the prompt by importance and in decode the oldest entry that is no sink; each layer its own."""

    name: ClassVar[str] = "dropper"
    smallest: ClassVar[int] = 4

    def statistics(self) -> tuple[Statistic, ...]:
        return (Columns("importance"),)

    acts_in_decode = property(lambda self: True)

    def compress(self, view: LayerView) -> Keep:
        targets = self.targets(view)
        ends = first(view, 1) | recent(view, 1)
        kept = top(view.statistics["importance"].masked_fill(ends, math.inf), targets, view.occupied)
        return keep_where(kept, view.positions, targets)

    def evict(self, view: LayerView) -> Evict | None:
        bound = self.targets(view)[0] + 3 + view.layer
        return evict_one(oldest(view, view.occupied & ~first(view, 1)), [held > bound for held in view.held])


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy() for _ in PROMPTS]
    return [Request((Image.fromarray(p),), prompt, key=prompt) for p, prompt in zip(noise, PROMPTS, strict=True)]


# --- the independent path


def visible_columns(layer: LayerTrace | None, length: int) -> torch.Tensor:
    """bool [length, length]: the columns that each query may see in a layer: no later ones, none that has left."""
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if layer is not None:
        for column, seen in enumerate(layer.left[0].tolist()):
            if seen >= 0:
                visible[seen:, column] = False
    return visible


@contextmanager
def masked(layers: Sequence[Any], masks: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give each decoder layer a mask of its own."""
    handles = []
    for layer, visible in zip(layers, masks, strict=True):
        bias = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)[None, None]

        def replace(module: Any, args: Any, kwargs: Any, bias: torch.Tensor = bias) -> Any:
            return args, kwargs | {"attention_mask": bias}

        handles.append(layer.register_forward_pre_hook(replace, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_forward(
    session: Session, request: Request, answer: Sequence[int], plan: Sequence[LayerTrace | None]
) -> torch.Tensor:
    """[len(answer), vocabulary]: scores for the answer from one forward pass without any cache, on masks alone."""
    inputs = dict(session.prepare(request).inputs)
    inputs["pixel_values"] = inputs["pixel_values"].to(session.dtype)
    prompt = inputs["input_ids"].shape[1]
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.int64)], 1)
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    masks = [visible_columns(layer, ids.shape[1]) for layer in plan]
    with torch.inference_mode(), masked(session.model.model.language_model.layers, masks):
        return session.model(**inputs, use_cache=False).logits[0, prompt - 1 :]


def test_numbers_of_a_dropping_policy_equal_a_full_forward_with_masks(
    session: Session, requests: list[Request]
) -> None:
    for request in requests:
        prepared = session.prepare(request)
        reference = fidelity.look_up(session, [prepared], STEPS)[0]
        recording = record(Dropper(budget=0.4))
        fidelity.score(session, [reference], recording)
        plan = recording.trace().layers
        found = fidelity.measure(session, [reference], Dropper(budget=0.4), STEPS)[0]
        assert max(layer.left.max() for layer in plan) > prepared.length, "nothing was evicted in decode"

        answer = reference.outcome.tokens
        ours = whole_forward(session, request, answer, plan).log_softmax(-1)
        full = whole_forward(session, request, answer, NOTHING_LEFT).log_softmax(-1)
        token = torch.tensor(answer)[:, None]
        assert found.tokens == len(answer)
        assert found.nll == pytest.approx(-ours.gather(1, token).mean().item(), abs=1e-9)
        assert found.perplexity == pytest.approx(math.exp(-ours.gather(1, token).mean().item()))
        assert found.nll_full == pytest.approx(-full.gather(1, token).mean().item(), abs=1e-9)
        assert found.agreement == pytest.approx((ours.argmax(1) == full.argmax(1)).double().mean().item())
        kl = torch.nn.functional.kl_div(ours, full, log_target=True, reduction="none").sum(1).mean().item()
        assert found.kl == pytest.approx(kl, abs=1e-9)
        assert found.kl > 0.01, "the policy should have done some harm"


def test_the_first_token_is_predicted_by_the_uncompressed_prompt(session: Session, requests: list[Request]) -> None:
    reference = fidelity.look_up(session, [session.prepare(requests[0])], Decoding(max_new_tokens=1))[0]
    found = fidelity.measure(session, [reference], policies.create("elastic", budget=0.2), Decoding(max_new_tokens=1))
    assert found[0].tokens == 1
    assert found[0].nll == pytest.approx(found[0].nll_full, abs=1e-9)
    assert found[0].kl == pytest.approx(0, abs=1e-9)


def test_the_full_cache_agrees_with_itself(session: Session, requests: list[Request]) -> None:
    references = fidelity.look_up(session, [session.prepare(r) for r in requests], STEPS)
    measured = fidelity.measure(session, references, policies.create("full"), STEPS)
    for found, expected in zip(measured, map(fidelity.itself, references), strict=True):
        assert found.outcome.tokens == expected.outcome.tokens
        assert (found.nll, found.kl) == pytest.approx((expected.nll, expected.kl), abs=1e-9)
        assert (found.agreement, found.rouge_l, found.first_divergence) == (1.0, 1.0, None)
        assert found.kl == pytest.approx(0, abs=1e-9)
        assert found.perplexity == pytest.approx(found.perplexity_full)


def test_a_batch_measures_what_single_runs_do(session: Session, requests: list[Request]) -> None:
    prepared = [session.prepare(r) for r in requests]
    texts = ["two people and a dog", "why", "there was a small house near the sea"]
    policy = policies.create("elastic", budget=0.3)
    together = fidelity.measure(session, fidelity.look_up(session, prepared, STEPS, texts), policy, STEPS)
    for one, text, found in zip(prepared, texts, together, strict=True):
        alone = fidelity.measure(session, fidelity.look_up(session, [one], STEPS, [text]), policy, STEPS)[0]
        for name in ("nll", "nll_full", "agreement", "kl", "rouge_l"):
            assert getattr(found, name) == pytest.approx(getattr(alone, name), abs=1e-9), name
        assert found.first_divergence == alone.first_divergence
        assert found.outcome.tokens == alone.outcome.tokens


def test_a_given_answer_is_what_perplexity_is_about(session: Session, requests: list[Request]) -> None:
    prepared = session.prepare(requests[0])
    text = "a dog runs near the sea"
    reference = fidelity.look_up(session, [prepared], STEPS, [text])[0]
    assert session.tokenizer.decode(reference.answer).strip() == text
    found = fidelity.measure(session, [reference], policies.create("full"), STEPS)[0]
    expected = whole_forward(session, requests[0], reference.answer, NOTHING_LEFT).log_softmax(-1)
    token = torch.tensor(reference.answer)[:, None]
    assert found.nll == pytest.approx(-expected.gather(1, token).mean().item(), abs=1e-9)
    with pytest.raises(UsageError, match="empty"):
        fidelity.look_up(session, [prepared], STEPS, ["  "])


def test_perplexity_over_pictures_weighs_tokens_not_pictures(session: Session, requests: list[Request]) -> None:
    prepared = [session.prepare(r) for r in requests[:2]]
    references = fidelity.look_up(session, prepared, STEPS, ["why", "there was a small house near the sea"])
    found = fidelity.measure(session, references, policies.create("elastic"), STEPS)
    total = sum(r.nll * r.tokens for r in found) / sum(r.tokens for r in found)
    assert fidelity.perplexity(found) == pytest.approx(math.exp(total))
    assert fidelity.perplexity(found) != pytest.approx(sum(r.perplexity for r in found) / 2)


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 4, 3), 1), ((1, 2, 3), (1, 2), 2), ((5,), (6,), 0)],
)
def test_first_divergence(reference: tuple[int, ...], candidate: tuple[int, ...], expected: int | None) -> None:
    assert fidelity.first_divergence(reference, candidate) == expected


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        ("a cat sits on a mat", "a cat sat on the mat", 4 / 6),  # a cat on mat
        ("The cat.", "the CAT", 1.0),
        ("", "", 1.0),
        ("", "cat", 0.0),
        ("кошка спит дома", "кошка дома", 2 * (2 / 3) / (2 / 3 + 1)),  # recall 2/3, precision 1
        ("猫在睡觉", "猫睡觉", 2 * (3 / 4) / (3 / 4 + 1)),
    ],
)
def test_rouge_l(reference: str, candidate: str, expected: float) -> None:
    assert fidelity.rouge_l(reference, candidate) == pytest.approx(expected)
