"""A key computed at one position and turned must equal the key computed at the other, in every layer."""

import pytest
import torch
import transformers as hf
from architectures import TEXT, build, names
from torch import Tensor

from kvcli.engine.rotary import Rotator
from kvcli.errors import UsageError

START, STEP = 5, 90
SMALL = {**TEXT, "head_dim": 16}


def keys_at(model: hf.PreTrainedModel, positions: list[int] | list[list[int]]) -> dict[int, Tensor]:
    """Keys `[positions, H, 1, D]` of the same lone token at these positions, for every layer with keys.

    Multi-axis rope takes a list of positions for each of its axes.
    """
    ids = torch.tensor(positions)[..., None]
    with torch.no_grad():
        cache = model.get_decoder()(input_ids=torch.full((ids.shape[-2], 1), 7), position_ids=ids).cache
    held = {layer: getattr(entry, "keys", None) for layer, entry in enumerate(cache.layers)}
    return {layer: keys for layer, keys in held.items() if keys is not None and keys.dim() == 4}


def largest_error(model: hf.PreTrainedModel) -> float:
    """Over all layers, of keys turned by STEP, as a share of the largest key."""
    rotator = Rotator(model)
    errors = []
    for layer, (start, end) in ((layer, keys) for layer, keys in keys_at(model, [START, START + STEP]).items()):
        turned = rotator.turn(start[None], torch.tensor([[[STEP]]]), layer)
        errors.append(((turned - end).abs().max() / end.abs().max()).item())
    assert errors
    return max(errors)


@pytest.fixture
def model_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models compute angles after `.float()`, also those in float64: lift that for a proof to 1e-12."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("name", names())
def test_turned_key_is_the_key_computed_there(name: str) -> None:
    assert largest_error(build(name).model) < 1e-5


@pytest.mark.parametrize("name", names())
def test_turned_key_is_the_key_computed_there_in_float64(name: str, model_in_float64: None) -> None:
    assert largest_error(build(name, dtype=torch.float64).model) < 1e-12


@pytest.mark.parametrize("name", names("mrope"))
def test_all_axes_turn_together_wherever_each_one_stood(name: str) -> None:
    model = build(name).model
    layer, (start, end) = keys_at(model, [[axis, axis + STEP] for axis in (5, 9, 30)]).popitem()
    turned = Rotator(model).turn(start[None], torch.tensor([[[STEP]]]), layer)
    torch.testing.assert_close(turned[0], end, rtol=0, atol=1e-5 * end.abs().max().item())


@pytest.mark.parametrize("name", ["llava_gqa", "gemma3", "glm4v", "llama4"])
def test_low_precision_turns_as_well_as_it_stores(name: str) -> None:
    assert largest_error(build(name, dtype=torch.bfloat16).model) < 2e-2


LLAMA = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("kind", LLAMA)
def test_scaled_rope(kind: str) -> None:
    rope = {"rope_theta": 10000.0, **LLAMA[kind]}
    assert largest_error(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, rope_parameters=rope)).eval()) < 1e-5


def phi3_with_long_rope() -> hf.PreTrainedModel:
    long, short = [8.0 + i for i in range(8)], [1.0 + 0.1 * i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": long, "short_factor": short}
    settings = {**TEXT, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    config = hf.Phi3Config(**settings, rope_parameters={**rope, "original_max_position_embeddings": 64})
    return hf.Phi3ForCausalLM(config).eval()


@pytest.mark.parametrize("positions", [(5, 40), (100, 140)], ids=["short", "long"])
def test_long_rope_uses_the_frequencies_of_the_last_forward_pass(positions: tuple[int, int]) -> None:
    model = phi3_with_long_rope()
    start, end = keys_at(model, list(positions))[1]
    steps = torch.tensor([[[positions[1] - positions[0]]]])
    turned = Rotator(model).turn(start[None], steps, layer=1)
    torch.testing.assert_close(turned[0], end, rtol=0, atol=1e-5)


def test_layers_without_rope_keep_their_keys() -> None:
    rotator = Rotator(build("llama4").model)
    assert [rotator.rotates(layer) for layer in range(4)] == [True, True, True, False]
    keys = torch.randn(1, 2, 5, 16)
    assert torch.equal(rotator.turn(keys, torch.tensor([[[9]]]), layer=3), keys)


def test_rows_heads_and_slots_turn_by_their_own_steps() -> None:
    rotator = Rotator(build("glm4v", dtype=torch.float64).model)
    keys = torch.randn(3, 2, 4, 16, dtype=torch.float64)
    steps = torch.randint(-50, 50, (3, 2, 4))
    turned = rotator.turn(keys, steps, layer=0)
    for row, head, slot in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(4)).tolist():
        alone = rotator.turn(keys[row, head, slot][None, None, None], steps[row, head, slot][None, None, None], 0)
        torch.testing.assert_close(turned[row, head, slot], alone[0, 0, 0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["llava_gqa", "gemma3", "glm4v", "llama4"])
def test_there_and_back_is_where_it_began(name: str) -> None:
    rotator = Rotator(build(name, dtype=torch.float64).model)
    keys = torch.randn(2, 2, 6, 16, dtype=torch.float64)
    steps = torch.randint(1, 3000, (2, 1, 6))
    there = rotator.turn(keys, steps, layer=1)
    assert (there - keys).abs().max() > 0.1
    torch.testing.assert_close(rotator.turn(there, -steps, layer=1), keys, rtol=0, atol=1e-12)


def test_one_long_turn_equals_many_short_ones_in_float64() -> None:
    rotator = Rotator(build("llava_gqa", dtype=torch.float64).model)
    keys = torch.randn(1, 2, 3, 16, dtype=torch.float64)
    walked = keys
    for _ in range(64):
        walked = rotator.turn(walked, torch.tensor([[[37]]]), layer=0)
    torch.testing.assert_close(walked, rotator.turn(keys, torch.tensor([[[64 * 37]]]), 0), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shape_and_dtype_stay(dtype: torch.dtype) -> None:
    keys = torch.randn(2, 2, 3, 16).to(dtype)
    turned = Rotator(build("llava_gqa").model).turn(keys, torch.ones(1, 1, 3, dtype=torch.int32), layer=0)
    assert turned.shape == keys.shape
    assert turned.dtype == dtype


def test_dynamic_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, rope_parameters=rope))
    with pytest.raises(UsageError, match="dynamic rope"):
        Rotator(model)


def test_learned_positions_are_refused() -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3))
    with pytest.raises(UsageError, match=r"Layer 0 .* not known"):
        Rotator(model.eval())


def test_a_layer_without_keys_of_its_own_has_nothing_to_turn() -> None:
    with pytest.raises(KeyError):
        Rotator(build("lfm2").model).turn(torch.zeros(1, 2, 1, 16), torch.tensor([[[1]]]), layer=0)


def test_building_one_leaves_the_model_as_it_was() -> None:
    model = phi3_with_long_rope()
    keys_at(model, [200])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    Rotator(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
