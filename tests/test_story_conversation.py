"""A conversation on one cache says what a model says that reads everything anew, and stays within its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from architectures import MROPE, QWEN_TOWER, TEXT
from conftest import TEMPLATE, build_tokenizer
from PIL import Image

from kvcli import policies
from kvcli.engine.conversation import Conversation
from kvcli.engine.loading import Loaded
from kvcli.engine.session import Decoding, Request, Session
from kvcli.errors import UsageError
from kvcli.policies.contract import Prompt

STEPS = Decoding(max_new_tokens=12)
BOUNDED = [n for n in policies.names() if any("bounded" in o.choices for o in policies.describe(n).options)]


class Pictures(hf.Qwen2_5_VLProcessor):
    """The family's processor without its part for videos, which needs a further library."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
        self.video_token, self.video_token_id = tokenizer.video_token, tokenizer.video_token_id
        hf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module")
def llava(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A tiny Qwen2.5-VL, which numbers the patches of a picture along three axes."""
    folder = tmp_path_factory.mktemp("qwen")
    build_tokenizer(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    image, unknown = (tokenizer.convert_tokens_to_ids(token) for token in ("<image>", "<unk>"))
    tokenizer.image_token, tokenizer.image_token_id = "<image>", image
    tokenizer.video_token, tokenizer.video_token_id = "<unk>", unknown
    pixels = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    processor = Pictures(hf.Qwen2VLImageProcessorPil(**pixels), tokenizer, chat_template=TEMPLATE)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = hf.Qwen2_5_VLConfig(
        text_config={**TEXT, **ends, "rope_parameters": MROPE, "vocab_size": len(tokenizer)},
        vision_config={**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]},
        image_token_id=image,
        video_token_id=unknown,
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|system|>"),
    )
    torch.manual_seed(0)
    model = hf.Qwen2_5_VLForConditionalGeneration(config).double().eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return Session(Loaded("tiny-qwen", "0", model, processor, torch.device("cpu"), torch.float64, "as asked"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(8)
    sizes = ((40, 50), (64, 32), (48, 48))
    noise = [torch.randint(0, 255, (*size, 3), generator=generator, dtype=torch.uint8).numpy() for size in sizes]
    prompts = ("tell a story of this picture", "and what is here ?", "why")
    return [Request((Image.fromarray(p),), prompt) for p, prompt in zip(noise, prompts, strict=True)]


def read_anew(session: Session, conversation: Conversation, requests: list[Request], length: int) -> list[int]:
    """What the library's own `generate` says after the first `length` tokens of a conversation, without any cache."""
    assert conversation.ids is not None
    ids = conversation.ids[:, :length]
    pictures = [session.processor.image_processor(r.images[0], return_tensors="pt") for r in requests]
    inputs: dict[str, Any] = {k: torch.cat([p[k] for p in pictures]) for k in pictures[0]}
    inputs["pixel_values"] = inputs["pixel_values"].to(session.dtype)
    image = session.model.config.image_token_id
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == image).long()
    with torch.inference_mode():
        out = session.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **inputs,
            max_new_tokens=12, do_sample=False, suppress_tokens=[image],
        )  # fmt: skip
    return out[0, length:].tolist()


@pytest.mark.parametrize("family", ["llava", "qwen"])
@pytest.mark.parametrize("policy", ["full", "elastic"])
def test_every_turn_says_what_reading_everything_anew_says(
    family: str, policy: str, requests: list[Request], request: pytest.FixtureRequest
) -> None:
    session = request.getfixturevalue(family)
    conversation = Conversation(session, policies.create(policy, budget=1.0))
    answers = []
    for turn, asked in enumerate(requests):
        outcome = conversation.ask(asked, STEPS)
        expected = read_anew(session, conversation, requests[: turn + 1], outcome.prompt_tokens)
        assert list(outcome.tokens) == expected, f"turn {turn}"
        assert outcome.kept == outcome.seen == outcome.prompt_tokens + len(outcome.tokens) - 1
        answers.append(outcome.tokens)
    assert len(set(answers)) == 3, "the turns should differ"


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_a_turn_may_have_no_picture(family: str, requests: list[Request], request: pytest.FixtureRequest) -> None:
    session = request.getfixturevalue(family)
    conversation = Conversation(session, policies.create("full"))
    conversation.ask(requests[0], STEPS)
    outcome = conversation.ask(Request((), "and what is here ?"), STEPS)
    assert list(outcome.tokens) == read_anew(session, conversation, requests[:1], outcome.prompt_tokens)


def test_pictures_of_earlier_turns_are_remembered(llava: Session, requests: list[Request]) -> None:
    def second_answer(first: Request) -> tuple[int, ...]:
        conversation = Conversation(llava, policies.create("full"))
        conversation.ask(first, Decoding(max_new_tokens=1))
        return conversation.ask(requests[1], STEPS).tokens

    other = Request(requests[2].images, requests[0].prompt)
    assert second_answer(requests[0]) != second_answer(other)


def test_the_text_between_answers_is_what_the_template_says(llava: Session, requests: list[Request]) -> None:
    conversation = Conversation(llava, policies.create("full"))
    outcomes = [conversation.ask(r, STEPS) for r in requests[:2]]
    assert conversation.ids is not None
    seen = conversation.ids[0, : outcomes[1].prompt_tokens].tolist()
    after = seen[outcomes[0].prompt_tokens + len(outcomes[0].tokens) :]
    text = llava.tokenizer.decode(after).replace("<image>" * 16, "<image>")
    assert "<|user|>" in text
    assert text.split("<|user|>")[1].replace(" ", "") == "<image>andwhatishere?<|assistant|>"


def test_a_model_is_left_without_traces(qwen: Session, requests: list[Request]) -> None:
    before = qwen.model.model.rope_deltas
    conversation = Conversation(qwen, policies.create("full"))
    for asked in requests[:2]:
        conversation.ask(asked, STEPS)
    assert qwen.model.model.rope_deltas is before


def test_two_conversations_do_not_disturb_each_other(qwen: Session, requests: list[Request]) -> None:
    def talk(*order: int) -> dict[int, list[tuple[int, ...]]]:
        talks = {n: Conversation(qwen, policies.create("elastic", budget=0.5)) for n in set(order)}
        said: dict[int, list[tuple[int, ...]]] = {n: [] for n in talks}
        for n in order:
            said[n].append(talks[n].ask(requests[(n + len(said[n])) % 3], STEPS).tokens)
        return said

    apart = talk(0, 0) | talk(1, 1)
    assert talk(0, 1, 0, 1) == apart


def test_a_count_holds_over_the_whole_conversation(llava: Session, requests: list[Request]) -> None:
    conversation = Conversation(llava, policies.create("elastic", budget=20, decode="bounded"))
    outcomes = [conversation.ask(r, STEPS) for r in requests]
    assert [o.kept_after_prefill for o in outcomes] == [20, 20, 20]
    assert max(step.held[0] for o in outcomes for step in o.steps) <= 21
    assert outcomes[2].seen > 60


def test_beams_are_refused(llava: Session, requests: list[Request]) -> None:
    with pytest.raises(UsageError, match="num-beams"):
        Conversation(llava, policies.create("full")).ask(requests[0], Decoding(num_beams=2))


def test_some_policies_are_bounded() -> None:
    assert BOUNDED


@pytest.mark.parametrize("tokens", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_story_stays_within_the_bound_at_every_step(
    name: str, tokens: int, llava: Session, requests: list[Request]
) -> None:
    policy = policies.create(name, budget=24, decode="bounded")
    llava.model.generation_config.eos_token_id, before = None, llava.model.generation_config.eos_token_id
    try:
        outcome = Conversation(llava, policy).ask(requests[0], Decoding(max_new_tokens=tokens))
    finally:
        llava.model.generation_config.eos_token_id = before
    assert outcome.generated_tokens == len(outcome.steps) == tokens
    endless = Prompt(torch.ones(1, 1), torch.zeros(1, 1), (outcome.prompt_tokens,), 10**9)
    room = min(64, policy.growth(endless))  # fixed, however much is written
    bound = outcome.kept_after_prefill + room
    per_entry = llava.bytes_per_token()
    assert max(step.held[0] for step in outcome.steps) <= bound
    assert max(step.bytes_used for step in outcome.steps[1:]) <= bound * per_entry
