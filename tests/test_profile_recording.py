"""A recording changes nothing, and what it writes down is what happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvcli import policies
from kvcli.engine.recording import DROPPED, GENERATED, KEPT, MERGED, VISUAL, Recording, record
from kvcli.engine.session import Decoding, Outcome, Request, Session

STEPS = Decoding(max_new_tokens=16)
POLICIES = [("full", {}), ("elastic", {"budget": 0.3}), ("elastic", {"budget": 0.3, "decode": "grow"})]


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(6)
    pixels = [torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy() for _ in "ab"]
    prompts = ("describe this picture", "tell a long story of two people and a dog near the sea")
    return [Request((Image.fromarray(p),), prompt, key=prompt) for p, prompt in zip(pixels, prompts, strict=True)]


def recorded(
    session: Session, requests: list[Request], policy: str, **options: object
) -> tuple[list[Outcome], Recording]:
    recording = record(policies.create(policy, **options))
    return session.run([session.prepare(r) for r in requests], recording, STEPS), recording


@pytest.mark.parametrize(("name", "options"), POLICIES)
def test_recording_changes_nothing(
    session: Session, requests: list[Request], name: str, options: dict[str, object]
) -> None:
    plain = session.run([session.prepare(r) for r in requests], policies.create(name, **options), STEPS)
    outcomes, _ = recorded(session, requests, name, **options)
    for expected, found in zip(plain, outcomes, strict=True):
        assert found.tokens == expected.tokens
        assert (found.kept, found.bytes_held, found.bytes_peak) == (
            expected.kept,
            expected.bytes_held,
            expected.bytes_peak,
        )


@pytest.mark.parametrize(("name", "options"), POLICIES)
def test_entries_add_up_to_what_the_engine_holds(
    session: Session, requests: list[Request], name: str, options: dict[str, object]
) -> None:
    outcomes, recording = recorded(session, requests[:1], name, **options)
    trace = recording.trace()
    assert trace.held().sum(-1).mean(0).tolist() == pytest.approx([step.held[0] for step in outcomes[0].steps])
    assert len(trace.kinds) == outcomes[0].seen
    assert (trace.kinds == VISUAL).sum() == outcomes[0].visual_tokens
    assert (trace.kinds == GENERATED).sum() == outcomes[0].generated_tokens - 1


def test_a_padded_row_reads_as_if_it_were_alone(session: Session, requests: list[Request]) -> None:
    _, together = recorded(session, requests, "elastic", budget=0.3)
    _, alone = recorded(session, requests[:1], "elastic", budget=0.3)
    short, expected = together.trace(0), alone.trace(0)
    end = len(expected.kinds)
    assert short.kinds[:end].tolist() == expected.kinds.tolist()
    for found, wanted in zip(short.layers, expected.layers, strict=True):
        np.testing.assert_allclose(found.importance[:end], wanted.importance, atol=1e-9)
        np.testing.assert_allclose(found.answer[:end], wanted.answer, atol=1e-9)
        np.testing.assert_array_equal(found.left[:, :end], wanted.left)
        assert (found.entropy, found.sparsity) == pytest.approx((wanted.entropy, wanted.sparsity))


def test_importance_entropy_and_sparsity_equal_the_models_own_weights(
    session: Session, requests: list[Request]
) -> None:
    _, recording = recorded(session, requests[:1], "elastic", budget=0.3)
    inputs = dict(session.prepare(requests[0]).inputs)
    inputs["pixel_values"] = inputs["pixel_values"].to(session.dtype)
    session.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            weights = session.model(**inputs, output_attentions=True).attentions
    finally:
        session.model.set_attn_implementation("sdpa")
    length = inputs["input_ids"].shape[1]
    before = torch.ones(length, length).tril().bool()
    first, rest = recording.trace().layers[0], weights[0][0].double()  # later layers only agree as far as rounding
    np.testing.assert_allclose(first.importance[:length], rest.mean(0).sum(0), atol=1e-5)
    assert first.entropy == pytest.approx(torch.special.entr(rest).sum(-1).mean().item(), abs=1e-5)
    small = (rest < 0.01 * rest.amax(-1, keepdim=True)) & before
    assert first.sparsity == pytest.approx((small.sum(-1) / before.sum(-1)).mean().item(), abs=1e-5)
    for layer in recording.trace().layers:
        assert layer.importance.sum() == pytest.approx(length), "every query hands out one unit of attention"


def test_fates_tell_merging_from_dropping(session: Session, requests: list[Request]) -> None:
    outcomes, recording = recorded(session, requests[:1], "elastic", budget=0.3)
    trace = recording.trace()
    for layer in trace.layers:
        fate, prompt = layer.fate(), trace.prompt
        left_in_prompt = layer.left[0] == prompt
        assert (fate[left_in_prompt] == MERGED).all()
        assert (fate[(layer.left[0] > prompt)] == DROPPED).all()
        assert (fate == KEPT).sum() == outcomes[0].kept
        assert left_in_prompt.sum() == prompt - outcomes[0].kept_after_prefill


def test_share_kept_by_kind(session: Session, requests: list[Request]) -> None:
    _, recording = recorded(session, requests[:1], "full")
    assert recording.trace().kept_share() == pytest.approx(np.ones((3, 3)))
    _, recording = recorded(session, requests[:1], "elastic", budget=0.3)
    trace = recording.trace()
    for layer, shares in zip(trace.layers, trace.kept_share(), strict=True):
        kept = layer.fate() == KEPT
        assert shares.tolist() == pytest.approx([kept[trace.kinds == kind].mean() for kind in range(3)])
