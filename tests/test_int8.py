"""Keys and values as int8: the numbers themselves, and the engine against the oracle, which rounds a plain cache."""

from __future__ import annotations

from functools import cache

import architectures
import pytest
import torch
from oracle import OracleCache, compressed, difference, recorded, replayed, routed, to_int8_and_back
from test_engine_oracle import only, padding

from kvcli import policies
from kvcli.engine.adapter import KVCache, attached, entry_bytes
from kvcli.engine.rotary import Rotator
from kvcli.engine.stored import dot, mix, quantise, read
from kvcli.policies.base import Policy
from kvcli.policies.contract import Prompt
from kvcli.policies.full import Full

POLICIES = ("full", "elastic", "h2o", "streaming", "hae")
ARCHITECTURES = ("llava_gqa", "qwen2_5_vl", "gemma3", "mllama", "gemma4")
STEPS = 8


@cache
def tiny(name: str, batch: int = 3) -> architectures.Tiny:
    """In float64, where the engine and the oracle round to the same multiple."""
    return architectures.build(name, batch, torch.float64)


# --- numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    written = (torch.randn(2, 3, 50, 16) * 10 ** torch.randint(-3, 4, (2, 3, 50, 1))).to(dtype)
    stored = quantise(written)
    assert (stored.dtype, stored.shape) == (torch.int8, (2, 3, 50, 20))
    scale = written.double().abs().amax(-1, keepdim=True) / 127
    off = (read(stored, torch.float64) - written.double()).abs()
    assert (off <= scale * (0.5 + 1e-5)).all()
    assert off.max() > 0
    # the largest number of an entry comes back as it was, but for the rounding of its scale and of the type
    largest = read(stored, torch.float64).abs().amax(-1, keepdim=True)
    torch.testing.assert_close(largest, scale * 127, rtol=1e-6, atol=0)
    assert read(stored, dtype).dtype == dtype


def test_zeros_and_the_smallest_numbers_stay_finite() -> None:
    written = torch.zeros(1, 1, 3, 4)
    written[0, 0, 1, 2], written[0, 0, 2] = 1e-44, 1e38
    back = read(quantise(written), torch.float32)
    assert back.isfinite().all()
    assert torch.equal(back[0, 0, 0], torch.zeros(4))
    torch.testing.assert_close(back, written, rtol=1e-6, atol=1e-38)


def test_numbers_that_were_read_are_written_back_unchanged() -> None:
    stored = quantise(torch.randn(2, 2, 40, 8, dtype=torch.float64))
    assert torch.equal(quantise(read(stored, torch.float64)), stored)


@pytest.mark.parametrize("slots", [1, 7, 300])
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "float16"])
def test_products_with_stored_entries_are_those_with_what_is_read(
    kind: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcli.engine import stored as module

    monkeypatch.setitem(module.CHUNK, "cpu", 700)  # several chunks
    torch.manual_seed(1)
    written = torch.randn(3, 2, slots + 9, 16)
    entries = (quantise(written) if kind == "int8" else written.to(getattr(torch, kind)))[:, :, :slots]
    rows, weights = torch.randn(3, 2, 4, 16), torch.rand(3, 2, 4, slots)
    plain = read(entries, torch.float32)
    torch.testing.assert_close(dot(rows, entries), rows @ plain.transpose(-1, -2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mix(weights, entries), weights @ plain, rtol=1e-5, atol=1e-5)


# --- the engine


def error(name: str, policy: Policy, **options: int) -> float:
    told, plan = recorded(policy)
    ours = compressed(tiny(name), told, STEPS, int8=True, **options)
    return difference(ours, replayed(tiny(name), plan, STEPS, policy, int8=True, **options))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_policy_over_int8_equals_a_plain_cache_of_rounded_numbers(name: str, policy: str) -> None:
    assert error(name, policies.create(policy, budget=0.4)) < 1e-9


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("hae", {"bin": 2, "broadcast": "hidden"}),
        ("elastic", {"merge_keys": "rerotate", "count_bias": True, "discard": "frequency", "distance": 3}),
        ("elastic", {"positions": "compressed", "scope": "shared"}),
        ("scissorhands", {"drop": 2}),
        ("fastgen", {}),
    ],
)
def test_so_do_policies_that_turn_hide_and_weigh(policy: str, options: dict[str, object]) -> None:
    assert error("llava_gqa", policies.create(policy, **{"budget": 0.4, **options})) < 1e-9


@pytest.mark.parametrize("policy", ["elastic", "streaming"])
def test_beams_carry_scales(policy: str) -> None:
    assert error("llava_gqa", policies.create(policy, budget=0.4), num_beams=3) < 1e-9


def test_rounding_changes_the_answer_of_the_model_a_little() -> None:
    """Otherwise agreement with the oracle would mean nothing."""
    plain, rounded = (compressed(tiny("llava_gqa"), Full(), STEPS, int8=int8) for int8 in (False, True))
    assert torch.equal(plain.logits[0], rounded.logits[0])  # the prompt is read before anything is rounded
    off = (plain.logits[1] - rounded.logits[1]).abs().max() / plain.logits[1].abs().max()
    assert 1e-5 < off < 0.05


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_answers_as_its_rows_alone(policy: str) -> None:
    batch = tiny("llava_gqa")
    together = compressed(batch, policies.create(policy, budget=0.4), STEPS, int8=True)
    for row in range(3):
        alone = compressed(only(batch, row), policies.create(policy, budget=0.4), STEPS, int8=True)
        assert torch.equal(alone.tokens[0], together.tokens[row, padding(batch, row) :])
        torch.testing.assert_close(alone.logits[:, 0], together.logits[:, row], rtol=0, atol=1e-9)


@pytest.mark.parametrize("policy", ["full", "elastic", "h2o"])
def test_bytes_are_those_of_the_formula(policy: str) -> None:
    """One byte a number and four a scale; what a full cache would hold is counted in the model's own numbers."""
    model = tiny("llava_gqa")
    held = compressed(model, policies.create(policy, budget=0.4), STEPS, int8=True).cache
    plain = compressed(model, Full(), STEPS).cache
    per_entry = entry_bytes(model.model.config, torch.float64, int8=True)
    text = model.model.config.text_config
    width = text.hidden_size // text.num_attention_heads
    assert per_entry == [2 * text.num_key_value_heads * (width + 4)] * len(held.ours)
    rows = len(model.inputs["input_ids"])
    used = [layer.store.extent * rows * entry for layer, entry in zip(held.ours, per_entry, strict=True)]
    assert held.bytes_used() == sum(used)
    stored = sum(t.untyped_storage().nbytes() for each in held.ours for t in (each.store.keys, each.store.values))
    assert held.bytes_used() + held.bytes_reserved() == stored
    assert held.full_bytes(100) == plain.full_bytes(100)


@pytest.mark.parametrize("policy", ["full", "elastic", "streaming"])
def test_a_later_prompt_is_read_over_what_int8_holds(policy: str) -> None:
    """Turn two: several queries at once over a cache that is int8 already, then compressed again."""
    model, steps = tiny("llava_gqa", 1), 4
    told, plan = recorded(policies.create(policy, budget=0.4))
    first = compressed(model, told, steps, int8=True)
    ids = torch.cat([first.tokens, torch.arange(20, 37)[None]], 1)
    real = torch.ones_like(ids)
    first.cache.announce(Prompt(real.bool(), ids == model.image_token, (ids.shape[1],), steps))
    more = {"max_new_tokens": steps, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.inference_mode(), attached(model.model, first.cache):
        ours = model.model.generate(input_ids=ids, attention_mask=real, cache=first.cache, **more)
    columns = model.inputs["input_ids"].shape[1]
    rotator = Rotator(model.model)
    oracle = OracleCache(model.model.config, plan, policies.create(policy), [0], rotator, int8_from=columns)
    with torch.inference_mode(), routed(model.model):
        model.model.generate(**model.inputs, **model.generate_kwargs, max_new_tokens=steps, cache=oracle)
        theirs = model.model.generate(input_ids=ids, attention_mask=real, cache=oracle, **more)
    assert oracle.done()
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=1e-9)


def test_reset_forgets_that_it_was_int8() -> None:
    model = tiny("llava_gqa", 1)
    held = compressed(model, Full(), 2, int8=True).cache
    assert isinstance(held, KVCache)
    held.reset()
    assert (held.bytes_used(), held.bytes_reserved(), held.bytes_side()) == (0, 0, 0)
    assert not any(layer.store.int8 for layer in held.ours)


def test_the_oracle_s_rounding_is_ours() -> None:
    written = torch.randn(1, 2, 30, 16, dtype=torch.float64)
    assert torch.equal(read(quantise(written), torch.float64), to_int8_and_back(written))
