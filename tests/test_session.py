"""A session: batches equal single runs, the full budget equals stock `generate`, and the accounts add up."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from PIL import Image

from kvcli import policies
from kvcli.engine.session import Decoding, Outcome, Request, Session
from kvcli.errors import StartError, UsageError

SHORT = Decoding(max_new_tokens=24)
PROMPTS = (
    "describe this picture",
    "what is in it ?",
    "tell a long story of two people and a dog near the sea , one day",
    "why",
)


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Four prompts of different lengths over four different pictures."""
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy() for _ in PROMPTS]
    return [
        Request((Image.fromarray(pixels),), prompt, key=prompt) for pixels, prompt in zip(noise, PROMPTS, strict=True)
    ]


def stock(session: Session, request: Request, decoding: Decoding) -> list[int]:
    """What the library's own `generate` writes for one request."""
    inputs = dict(session.prepare(request).inputs)
    inputs["pixel_values"] = inputs["pixel_values"].to(session.dtype)
    image = session.model.config.image_token_id
    with torch.inference_mode():
        out = session.model.generate(
            **inputs, max_new_tokens=decoding.max_new_tokens, do_sample=False, suppress_tokens=[image]
        )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def one(session: Session, request: Request, policy: str, decoding: Decoding = SHORT, **options: object) -> Outcome:
    return session.run([session.prepare(request)], policies.create(policy, **options), decoding)[0]


@pytest.mark.parametrize("policy", ["h2o", "streaming", "hae", "scissorhands"])
def test_nothing_leaves_while_a_count_has_room(session: Session, requests: list[Request], policy: str) -> None:
    prepared = session.prepare(requests[1])
    room = one(session, requests[1], policy, budget=prepared.length + 30)
    assert room.kept == room.seen > prepared.length
    tight = one(session, requests[1], policy, budget=prepared.length + 2, **{"hae": {"bin": 4}}.get(policy, {}))
    assert tight.kept < tight.seen


@pytest.mark.parametrize("policy", ["full", "elastic"])
def test_whole_budget_gives_stock_tokens(session: Session, requests: list[Request], policy: str) -> None:
    for request in requests:
        assert list(one(session, request, policy, budget=1.0).tokens) == stock(session, request, SHORT)


@pytest.mark.parametrize("budget", [1.0, 0.2])
def test_batch_equals_single_runs(session: Session, requests: list[Request], budget: float) -> None:
    policy = policies.create("elastic", budget=budget)
    together = session.run([session.prepare(r) for r in requests], policy, SHORT)
    alone = [session.run([session.prepare(r)], policy, SHORT)[0] for r in requests]
    assert len({r.prompt_tokens for r in together}) > 2, "the prompts should differ in length"
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [(r.seen, r.kept, r.kept_after_prefill) for r in together] == [
        (r.seen, r.kept, r.kept_after_prefill) for r in alone
    ]


def test_compression_changes_the_answer(session: Session, requests: list[Request]) -> None:
    """Else the equalities above would prove nothing."""
    texts = {b: [one(session, r, "elastic", budget=b).text for r in requests] for b in (1.0, 0.2)}
    assert texts[1.0] != texts[0.2]


def test_draws_depend_on_seed_and_key_alone(session: Session, requests: list[Request]) -> None:
    policy = policies.create("elastic")
    hot = Decoding(max_new_tokens=12, temperature=1.5, top_p=0.9, seed=7)
    prepared = [session.prepare(r) for r in requests]
    together = [r.text for r in session.run(prepared, policy, hot)]
    assert together == [session.run([p], policy, hot)[0].text for p in prepared]
    other = Decoding(max_new_tokens=12, temperature=1.5, top_p=0.9, seed=8)
    assert together != [session.run([p], policy, other)[0].text for p in prepared]


def test_bytes_equal_the_formula(session: Session, requests: list[Request]) -> None:
    text = session.model.config.text_config
    width = text.hidden_size // text.num_attention_heads
    per_entry = 2 * text.num_hidden_layers * text.num_key_value_heads * width * 8
    assert session.bytes_per_token() == per_entry
    full = one(session, requests[0], "full")
    assert full.bytes_held == full.bytes_full == per_entry * full.seen
    small = one(session, requests[0], "elastic", budget=0.2)
    assert small.bytes_full == per_entry * small.seen
    assert small.bytes_held == per_entry * small.kept
    assert small.kept / small.seen <= 0.25


def test_peak_is_one_whole_layer_beside_compressed_ones(session: Session, requests: list[Request]) -> None:
    layers = session.model.config.text_config.num_hidden_layers
    per_layer = session.bytes_per_token() // layers
    result = one(session, requests[2], "elastic", decoding=Decoding(max_new_tokens=1), budget=0.2)
    kept = result.kept_after_prefill
    assert result.bytes_peak == per_layer * ((layers - 1) * kept + result.prompt_tokens)


def test_estimate_covers_what_a_batch_holds(session: Session, requests: list[Request]) -> None:
    for policy in (policies.create("full"), policies.create("elastic", budget=0.3)):
        prepared = [session.prepare(r) for r in requests]
        estimate = session.batch_bytes([p.length for p in prepared], policy, SHORT)
        peak = sum(r.bytes_peak for r in session.run(prepared, policy, SHORT))
        assert peak <= estimate <= 2 * peak


def test_int8_holds_what_its_estimate_says(session: Session, requests: list[Request]) -> None:
    small = copy.copy(session)
    small.int8 = True
    prepared = [small.prepare(r) for r in requests]
    for policy in (policies.create("full"), policies.create("elastic", budget=0.3)):
        results = small.run(prepared, policy, SHORT)
        assert sum(r.bytes_peak for r in results) <= small.batch_bytes([p.length for p in prepared], policy, SHORT)
        assert results[0].bytes_full == session.run(prepared[:1], policy, SHORT)[0].bytes_full
    alone = small.run(prepared[:1], policies.create("full"), SHORT)[0]
    assert alone.bytes_held == small.bytes_per_token() * alone.seen
    layers = session.model.config.text_config.num_hidden_layers
    per_token = session.bytes_per_token() // layers + (layers - 1) * small.bytes_per_token() // layers
    assert alone.bytes_peak == per_token * alone.prompt_tokens  # the last layer before it is rounded


def test_text_streams_as_it_comes(session: Session, requests: list[Request]) -> None:
    pieces: list[str] = []
    result = session.run([session.prepare(requests[0])], policies.create("full"), SHORT, on_text=pieces.append)[0]
    assert len(pieces) > 1
    assert "".join(pieces).strip() == result.text


def test_beams_equal_stock_beams(session: Session, requests: list[Request]) -> None:
    inputs = dict(session.prepare(requests[0]).inputs)
    inputs["pixel_values"] = inputs["pixel_values"].to(session.dtype)
    with torch.inference_mode():
        expected = session.model.generate(
            **inputs, max_new_tokens=12, num_beams=3, do_sample=False,
            suppress_tokens=[session.model.config.image_token_id],
        )[0, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
    found = one(session, requests[0], "elastic", Decoding(max_new_tokens=12, num_beams=3), budget=1.0)
    assert list(found.tokens) == expected


def test_stop_text_ends_the_answer(session: Session, requests: list[Request]) -> None:
    whole = one(session, requests[0], "full")
    stop = whole.text[3:6]
    cut = one(session, requests[0], "full", Decoding(max_new_tokens=24, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.find(stop)].strip()


def test_steps_record_what_is_held(session: Session, requests: list[Request]) -> None:
    result = one(session, requests[2], "elastic", budget=0.2)
    assert len(result.steps) == result.generated_tokens
    for step in result.steps:
        seen = result.prompt_tokens + step.index
        assert step.held[0] <= max(3, 0.2 * seen + 1)


def test_the_model_is_left_as_it_was_found(session: Session, requests: list[Request]) -> None:
    before = session.model.config.text_config._attn_implementation
    one(session, requests[0], "elastic")
    assert session.model.config.text_config._attn_implementation == before
    assert list(one(session, requests[0], "full").tokens) == stock(session, requests[0], SHORT)


def test_several_pictures_in_one_prompt(session: Session, requests: list[Request]) -> None:
    both = Request(requests[0].images + requests[1].images, "describe the two", key="two")
    result = one(session, both, "elastic")
    assert result.visual_tokens == 2 * one(session, requests[0], "elastic").visual_tokens


@pytest.mark.parametrize(
    ("name", "settings", "error", "says"),
    [
        ("no/such-model", {"offline": True}, StartError, "no/such-model"),
        ("{folder}", {"device": "nonsense"}, UsageError, "nonsense"),
        ("{folder}", {"device": "cuda:7"}, StartError, "cuda:7"),
    ],
)
def test_loading_fails_in_one_line(
    tiny_checkpoint: Path, name: str, settings: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        Session.load(name.format(folder=tiny_checkpoint), **settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_that_ends_early_is_accounted_at_its_own_end(session: Session, requests: list[Request]) -> None:
    """Its batch goes on: neither the padding that is fed meanwhile nor the padding of its prompt counts as kept."""
    prepared = [session.prepare(r) for r in requests]
    whole = [one(session, r, "full").text for r in requests]
    stop = next(whole[0][i : i + 3] for i in range(4, 20) if all(whole[0][i : i + 3] not in w for w in whole[1:]))
    results = session.run(prepared, policies.create("full"), Decoding(max_new_tokens=24, stop=(stop,)))
    assert results[0].generated_tokens < results[1].generated_tokens
    for result in results:
        assert result.kept == result.seen
        assert len(result.steps) == result.generated_tokens
