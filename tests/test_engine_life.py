"""The life of a cache: prompts in chunks, later turns, beams and repeated sequences, drafts taken back, run after run.

Wherever a policy acts, the reference is the oracle; wherever nothing is compressed, it is stock `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import architectures
import pytest
import torch
from architectures import IMAGE, PICTURE_END, PICTURE_START, Tiny
from dice import Dice
from oracle import OracleCache, Result, compressed, difference, error, generate, recorded, replayed, routed
from proofs import every_architecture, prove
from torch import Tensor

from kvcli import policies
from kvcli.engine.adapter import KVCache, attached
from kvcli.engine.loading import Loaded
from kvcli.engine.rotary import Rotator
from kvcli.engine.session import Decoding, Prepared, Request, Session
from kvcli.engine.shared import Reading
from kvcli.errors import StartError
from kvcli.policies.base import Policy, keep_where
from kvcli.policies.contract import Columns, Keep, LayerView, Prompt, Statistic
from kvcli.policies.full import Full

MAIN = ("llava_gqa", "qwen2_5_vl", "gemma3", "llama4")
PER_HEAD = Dice(keep="per-head", leave="per-head", decode="merge")
GROWING = Dice(keep="per-head", decode="grow")


@cache
def tiny(name: str, batch: int) -> Tiny:
    return architectures.build(name, batch)


# --- one prompt, many ways to feed and to continue it


@pytest.mark.parametrize("name", every_architecture(*MAIN))
def test_a_prompt_in_chunks_is_compressed_once_at_its_end(name: str) -> None:
    if name in ("mllama", "phi4_multimodal"):
        pytest.skip("the library itself can't cut these models' prompts")
    prove(name, "chunks", error(tiny(name, 3), PER_HEAD, steps=6, prefill_chunk_size=8))


@pytest.mark.parametrize("name", every_architecture(*MAIN))
def test_repeated_sequences_and_drawn_beams(name: str) -> None:
    for options in ({"num_return_sequences": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        prove(name, "repeats", drawn_error(tiny(name, 2), PER_HEAD, do_sample=True, **options))


def drawn_error(model: Tiny, policy: Policy, **options: Any) -> float:
    """As `error`, with the same draws on both sides."""
    told, plan = recorded(policy)
    torch.manual_seed(5)
    ours = compressed(model, told, 6, **options)
    torch.manual_seed(5)
    return difference(ours, replayed(model, plan, 6, **options))


@pytest.mark.parametrize("name", every_architecture(*MAIN))
def test_drafts_are_taken_back(name: str) -> None:
    """Prompt lookup feeds guesses, several at a time, and crops those that were wrong."""
    model = tiny(name, 1)
    if not OracleCache(model.model.config, []).is_croppable:
        pytest.skip("the library takes no drafts for models with a recurrent state")
    told, plan = recorded(GROWING)
    plain = compressed(model, told, 16)
    drafted = compressed(model, GROWING, 16, prompt_lookup_num_tokens=3)
    assert torch.equal(plain.tokens, drafted.tokens)
    prove(name, "drafts", difference(drafted, replayed(model, plan, 16)))


def test_drafts_are_refused_where_entries_leave_while_generating() -> None:
    with pytest.raises(ValueError, match="cropped"):
        compressed(tiny("llava_gqa", 1), PER_HEAD, 8, prompt_lookup_num_tokens=3)


def test_a_streamer_hears_every_token() -> None:
    class Heard:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    heard = Heard()
    result = compressed(tiny("llava_gqa", 1), PER_HEAD, 6, streamer=heard)
    assert heard.tokens == [*result.tokens[0].tolist(), -1]


# --- later turns


@dataclass(frozen=True)
class Later:
    """A further turn: text after the last answer, with pictures of its own or without."""

    ids: Tensor
    pictures: dict[str, Tensor]


def words(batch: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(*architectures.WORDS, (batch, count), generator=generator)


def text(model: Tiny, seed: int) -> Later:
    return Later(words(len(model.inputs["input_ids"]), 7, seed), {})


def picture(model: Tiny, seed: int) -> Later:
    """A new picture like the first ones, between words; the pictures of the rows in another order."""
    batch, ids = len(model.inputs["input_ids"]), model.inputs["input_ids"]
    count = int((ids[0] == IMAGE).sum())
    shown = torch.full((batch, count), IMAGE)
    framed = bool((ids == PICTURE_START).any())
    if framed:
        edges = (torch.full((batch, 1), PICTURE_START), torch.full((batch, 1), PICTURE_END))
        shown = torch.cat([edges[0], shown, edges[1]], 1)
    given = {name: value for name, value in model.inputs.items() if name.startswith(("pixel", "image_"))}
    given["pixel_values"] = given["pixel_values"].flip(-1)
    return Later(torch.cat([words(batch, 3, seed), shown, words(batch, 4, seed + 1)], 1), given)


def talk(model: Tiny, held: Any, turns: Sequence[Later], steps: int) -> list[Result]:
    """The first prompt and all later turns on one cache. Per-token inputs cover the whole conversation."""
    results = [generate(model, held, steps)]
    per_token = [name for name, value in model.inputs.items() if value.shape == model.inputs["input_ids"].shape]
    known = {name: model.inputs[name] for name in per_token}
    known_grids = [model.inputs["image_grid_thw"]] if "image_grid_thw" in model.inputs else []
    for turn in turns:
        ids = torch.cat([results[-1].tokens, turn.ids], 1)
        grown = {
            name: torch.nn.functional.pad(value, (0, ids.shape[1] - value.shape[1]), value=int("mask" in name))
            for name, value in known.items()
        }
        known = {**grown, "input_ids": ids}
        for name in {"mm_token_type_ids", "token_type_ids"} & set(known):
            if known[name].any():
                known[name] = (ids == IMAGE).long()
        if isinstance(held, KVCache):
            real = known["attention_mask"].bool()
            held.announce(Prompt(real, ids == model.image_token, tuple(real.sum(1).tolist()), steps))
        if "image_grid_thw" in turn.pictures:
            known_grids.append(turn.pictures["image_grid_thw"])
            turn.pictures["position_ids"] = placed(model, known, torch.cat(known_grids))
        results.append(generate(replace(model, inputs={**known, **turn.pictures}), held, steps))
    return results


def placed(model: Tiny, known: dict[str, Tensor], grids: Tensor) -> Tensor:
    """Positions [4, B, L] of a whole conversation, for models that would number a later picture as if it were the
    first one. They also keep the distance between columns and positions on the model."""
    per_token = {name: value for name, value in known.items() if name != "input_ids"}
    spatial, model.model.model.rope_deltas = model.model.model.get_rope_index(
        known["input_ids"], image_grid_thw=grids, **per_token
    )
    columns = torch.arange(known["input_ids"].shape[1]).expand(1, *known["input_ids"].shape)
    return torch.cat([columns, spatial])


def conversation_error(model: Tiny, policy: Policy, turns: Sequence[Later], steps: int = 5) -> float:
    """The largest error of all turns against the oracle."""
    told, plan = recorded(policy)
    ours = KVCache(model.model.config, told)
    mask = model.inputs["attention_mask"].bool()
    ours.announce(Prompt(mask, model.inputs["input_ids"] == IMAGE, tuple(mask.sum(1).tolist()), steps))
    with attached(model.model, ours):
        mine = talk(model, ours, turns, steps)
    reference = OracleCache(model.model.config, plan)
    with routed(model.model):
        theirs = talk(model, reference, turns, steps)
    assert reference.done()
    return max(difference(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", every_architecture(*MAIN))
def test_later_turns_of_text(name: str) -> None:
    model = tiny(name, 3)
    turns = [text(model, 1), text(model, 2)]
    prove(name, "later text", max(conversation_error(model, policy, turns) for policy in (PER_HEAD, GROWING)))


LATER_PICTURES = (
    "llava_gqa",
    "smolvlm",
    "internvl",
    "mistral3",
    "gemma3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
)


@pytest.mark.parametrize("name", [*LATER_PICTURES, "paligemma"])
def test_a_later_turn_with_a_new_picture(name: str) -> None:
    model = tiny(name, 1)
    turns = [picture(model, 1), text(model, 3)]
    prove(name, "later picture", conversation_error(model, PER_HEAD, turns))


@pytest.mark.parametrize("name", LATER_PICTURES)
def test_a_later_picture_is_seen_as_if_everything_were_read_anew(name: str) -> None:
    model, turn = tiny(name, 1), picture(tiny(name, 1), 1)
    held = KVCache(model.model.config, Full())
    mask = model.inputs["attention_mask"].bool()
    held.announce(Prompt(mask, model.inputs["input_ids"] == IMAGE, tuple(mask.sum(1).tolist()), 4))
    with attached(model.model, held):
        first, later = talk(model, held, [turn], 4)
    ids = torch.cat([first.tokens, turn.ids], 1)
    both = {
        key: torch.cat([value, turn.pictures[key]], 1 if name == "smolvlm" and key == "pixel_values" else 0)
        for key, value in model.inputs.items()
        if key in turn.pictures
    }
    kinds = {key: (ids == IMAGE).long() for key in ("mm_token_type_ids", "token_type_ids") if key in model.inputs}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds, **both}
    with torch.inference_mode():
        told = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
        stock = model.model.generate(**inputs, **model.generate_kwargs, **told)
    assert torch.equal(later.tokens, stock.sequences)
    logits = torch.stack(stock.logits)
    prove(name, "later picture", float((later.logits - logits).abs().max() / logits.abs().max()))


@dataclass(frozen=True)
class Halves(Policy):
    """Keeps every second entry and remembers scores and counts."""

    name: ClassVar[str] = "halves"

    def __post_init__(self) -> None:
        self.__dict__["shown"] = []

    def statistics(self) -> tuple[Statistic, ...]:
        return (Columns("importance"),)

    def compress(self, view: LayerView) -> Keep:
        columns = view.positions[0, 0].tolist()
        scores = dict(zip(columns, view.statistics["importance"][0, 0].tolist(), strict=True))
        self.__dict__["shown"].append({c: s for c, s in scores.items() if c >= 0})
        kept = view.occupied & (torch.arange(len(columns)) % 2 == 0)
        return keep_where(kept, view.positions, kept.sum(-1)[:, 0].tolist())


def test_old_scores_go_on_in_a_later_turn() -> None:
    """Each query row gives a weight of one: what stayed keeps what it had and gets its share of the new rows."""
    model, policy = tiny("llava_gqa", 1), Halves()
    held = KVCache(model.model.config, policy)
    mask = model.inputs["attention_mask"].bool()
    held.announce(Prompt(mask, model.inputs["input_ids"] == IMAGE, tuple(mask.sum(1).tolist()), 4))
    with attached(model.model, held):
        results = talk(model, held, [text(model, 1)], 4)
    layers = len(held.ours)
    first, second = policy.__dict__["shown"][:layers], policy.__dict__["shown"][layers:]
    fed_before = mask.shape[1] + 3  # the last of the four tokens is fed with the next turn
    new_rows = results[0].tokens.shape[1] + 7 - fed_before
    for before, after in zip(first, second, strict=True):
        stayed = {c: s for i, (c, s) in enumerate(sorted(before.items())) if i % 2 == 0}
        assert set(stayed) <= set(after)
        assert all(after[c] >= s for c, s in stayed.items())
        assert sum(after.values()) == pytest.approx(sum(stayed.values()) + new_rows, rel=1e-5)


@pytest.mark.parametrize("budget", [0.4, 9])
def test_a_later_turn_is_held_to_the_budget_of_all_tokens_seen(budget: float) -> None:
    """And merged entries weigh as many tokens as they stand for: no token is ever lost."""
    model, policy = tiny("llava_gqa", 3), policies.create("elastic", budget=budget, decode="grow")
    held = KVCache(model.model.config, policy)
    mask = model.inputs["attention_mask"].bool()
    lengths = mask.sum(1)
    held.announce(Prompt(mask, model.inputs["input_ids"] == IMAGE, tuple(lengths.tolist()), 4))
    with attached(model.model, held):
        talk(model, held, [text(model, 1), text(model, 2)], 4)
    fed_after_turn = 3
    seen = [int(n) + 2 * (4 + 7) for n in lengths]
    for layer in held.ours:
        kept = [n - fed_after_turn for n in layer.store.held]
        assert kept == [policy.target(n) for n in seen]
        stands_for = layer.store.side_view("counts") * (layer.store.located() >= 0)
        assert stands_for.sum(-1)[:, 0].tolist() == [n + fed_after_turn for n in seen]


# --- rows that change places, by hand

CHANGES: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "select": (lambda held: held.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "repeat": (lambda held: held.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reorder": (lambda held: held.reorder_cache(torch.tensor([1, 2, 0])), [1, 2, 0]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", ["elastic", "h2o", "streaming"])
def test_rows_go_on_wherever_they_are_put(policy: str, change: str) -> None:
    """Prompt, then the rows are moved, then more tokens: each row says what it says when left in its place."""
    model = architectures.build("llava_gqa", 3, torch.float64)
    act, order = CHANGES[change]
    moved = fed_token_by_token(model, policies.create(policy, budget=0.4), act, order)
    still = fed_token_by_token(model, policies.create(policy, budget=0.4), lambda held: None, [0, 1, 2])
    torch.testing.assert_close(moved, still[:, order], rtol=0, atol=1e-9)


@torch.inference_mode()
def fed_token_by_token(
    model: Tiny, policy: Policy, change: Callable[[Any], None], order: list[int], steps: int = 6
) -> Tensor:
    """Logits [steps, rows, vocabulary] after the prompt, when the change comes right after it."""
    mask = model.inputs["attention_mask"]
    held = KVCache(model.model.config, policy, Rotator(model.model) if policy.needs_rotation else None)
    real = mask.bool()
    held.announce(Prompt(real, model.inputs["input_ids"] == IMAGE, tuple(real.sum(1).tolist()), steps))
    logits = []
    with attached(model.model, held):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model.model(**model.inputs, position_ids=positions, cache=held)
        change(held)
        mask = mask[order]
        for token in words(3, steps, 5).T:
            mask = torch.cat([mask, torch.ones(len(order), 1, dtype=mask.dtype)], 1)
            place = mask.sum(-1, keepdim=True) - 1
            out = model.model(token[order][:, None], attention_mask=mask, position_ids=place, cache=held)
            logits.append(out.logits[:, -1])
    return torch.stack(logits)


# --- run after run on one model


def test_the_same_run_gives_the_same_between_others() -> None:
    """A, B, A: nothing of a run with another policy, batch size and turn is left for the next one."""
    model, other = tiny("qwen2_5_vl", 3), replace(tiny("qwen2_5_vl", 1), model=tiny("qwen2_5_vl", 3).model)
    policy = policies.create("elastic", budget=0.3)
    first = compressed(model, policy, 8)
    compressed(other, PER_HEAD, 5)
    compressed(model, Full(), 3, num_beams=2)
    conversation_error(other, GROWING, [text(other, 4)])
    again = compressed(model, policy, 8)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logits, again.logits)


def traces(model: Any) -> dict[str, Any]:
    """Everything that a run may leave on a model."""
    found: dict[str, Any] = {"config": model.config._attn_implementation}
    for name in model.config.sub_configs:
        found[f"config.{name}"] = getattr(getattr(model.config, name, None), "_attn_implementation", None)
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("hooks")]
        found[name] = (sum(hooks), sorted(vars(module)), str(vars(module).get("rope_deltas")))
    return found


@pytest.mark.parametrize("name", architectures.names())
def test_a_model_is_left_as_it_was_found(name: str) -> None:
    """As after a stock run of another batch: the library sets hooks of its own when a model first runs."""
    model = architectures.build(name, 2)
    with torch.inference_mode():
        model.model.generate(**architectures.build(name, 1).inputs, **model.generate_kwargs, max_new_tokens=2)
    before = traces(model.model)
    compressed(model, policies.create("streaming", budget=0.5), 2)
    assert traces(model.model) == before


def test_a_model_is_left_as_it_was_found_after_a_failure() -> None:
    class Fails(Full):
        acts_in_decode = True

        def evict(self, view: LayerView) -> None:
            raise RuntimeError("out of memory")

    model = architectures.build("qwen2_5_vl", 2)
    before = traces(model.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        compressed(model, Fails(), 4)
    assert traces(model.model) == before


def session_of(model: Tiny) -> Session:
    """A session of a tiny model; a run of prepared inputs needs no more of a tokenizer."""
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0, decode=lambda tokens, **told: str(tokens))
    processor: Any = SimpleNamespace(tokenizer=tokenizer)
    return Session(Loaded("tiny", "", model.model, processor, torch.device("cpu"), torch.float32, ""))


def prepared(model: Tiny) -> Prepared:
    return Prepared(Request((), ""), model.inputs, model.inputs["input_ids"].shape[1], 0)


@pytest.mark.parametrize("name", ["gemma3", "llava_gqa"])
@pytest.mark.parametrize("policy", ["full", "elastic", "snapkv"])
def test_a_prompt_that_was_read_once_serves_a_policy_as_if_it_had_read_it(policy: str, name: str) -> None:
    """Sliding layers too, whose older entries the policies must still be able to see leave."""
    model, chosen, steps = tiny(name, 1), policies.create(policy), 24
    read = Reading(session_of(model), [prepared(model)], [chosen], Decoding(max_new_tokens=steps))
    answers, held = read.answer(chosen)
    alone = compressed(model, chosen, steps, suppress_tokens=[IMAGE])
    assert answers[0] == alone.tokens[0, model.inputs["input_ids"].shape[1] :].tolist()
    assert held.held() == alone.cache.held()


def test_a_cache_that_the_library_replaced_is_an_error() -> None:
    """Phi-4 starts a new cache where its rope switches to long positions, and says nothing."""
    model = architectures.build("phi4_multimodal", 1)
    length = model.inputs["input_ids"].shape[1]
    model.model.config.original_max_position_embeddings = length + 2
    with pytest.raises(StartError, match="replaced the cache"):
        session_of(model).run([prepared(model)], Full(), Decoding(max_new_tokens=6))
