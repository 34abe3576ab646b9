"""Memory: the T x S matrix of attention weights never exists, and sliding layers hold no more than they see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import architectures
import pytest
import torch
from oracle import compressed
from proofs import every_architecture, prove
from test_engine_life import prepared, session_of
from test_statistics import Listens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcli import policies
from kvcli.engine.adapter import entry_bytes
from kvcli.engine.session import Decoding
from kvcli.policies.base import Policy
from kvcli.policies.contract import Columns, Rows, RowSummary
from kvcli.policies.full import Full

LENGTH = 4096


class Largest(TorchDispatchMode):
    """Notes the largest storage of numbers (masks are not numbers) behind any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.shape = 0, torch.Size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dtype != torch.bool:
                size = tensor.untyped_storage().nbytes()
                if size > self.bytes:
                    self.bytes, self.shape = size, tensor.shape
        return out


def long_prompt(padding: int) -> architectures.Tiny:
    tiny = architectures.build("llava_gqa", 1)
    ids = torch.randint(*architectures.WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    real = torch.arange(LENGTH)[None] >= padding
    return replace(tiny, inputs={"input_ids": ids * real, "attention_mask": real.long()})


ASKING = Listens().asking(
    Columns("sum", decode=True),
    Columns("max", "max", heads="none"),
    Columns("max of heads", "max", heads="group-mean", heads_first=True),
    RowSummary("rows"),
    Rows("last"),
)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 100])
@pytest.mark.parametrize("policy", [ASKING, policies.create("elastic"), policies.create("hae")], ids=lambda p: p.name)
def test_whatever_is_asked_no_matrix_of_all_weights_is_ever_held(policy: Policy, padding: int) -> None:
    hold_no_matrix(policy, padding)


def test_column_sums_of_a_long_prompt_hold_no_matrix() -> None:
    hold_no_matrix(policies.create("elastic"), 0)


def hold_no_matrix(policy: Policy, padding: int) -> None:
    tiny = long_prompt(padding)
    with Largest() as largest:
        compressed(tiny, policy, 2)
    one_head = LENGTH * LENGTH * 4
    assert largest.bytes < one_head / 2, f"a tensor of {largest.shape} was held"


@pytest.mark.slow
def test_eager_attention_would_be_noticed() -> None:
    """The yardstick sees what it is meant to see."""
    tiny = long_prompt(0)
    with Largest() as largest:
        tiny.model.set_attn_implementation("eager")
        with torch.inference_mode():
            tiny.model.generate(**tiny.inputs, max_new_tokens=1)
    assert largest.bytes >= 4 * LENGTH * LENGTH * 4


@pytest.mark.parametrize(
    "policy",
    [Full(), pytest.param(policies.create("snapkv", budget=1.0), marks=pytest.mark.slow)],
    ids=lambda p: p.name,
)
def test_a_sliding_layer_holds_its_window(policy: Policy) -> None:
    """What slid out is freed also under a policy that keeps everything, and nothing that is seen is lost."""
    tiny, steps = architectures.build("gemma3", 2), 30
    told = {"max_new_tokens": steps, "return_dict_in_generate": True, "output_logits": True}
    with torch.inference_mode():
        stock = tiny.model.generate(**tiny.inputs, **tiny.generate_kwargs, **told)
    ours = compressed(tiny, policy, steps)
    assert torch.equal(ours.tokens, stock.sequences)
    slots = {layer.kind: layer.store.extent for layer in ours.cache.ours}
    assert slots["full_attention"] == ours.cache.ours[0].store.seen
    assert slots["sliding_attention"] <= ours.cache.ours[0].window
    prove("gemma3", "stock", float((ours.logits - torch.stack(stock.logits)).abs().max() / ours.logits.abs().max()))


@pytest.mark.slow
def test_drafts_are_taken_back_after_entries_slid_out() -> None:
    tiny, steps = architectures.build("gemma3", 1), 80
    plain = compressed(tiny, Full(), steps)
    drafted = compressed(tiny, Full(), steps, prompt_lookup_num_tokens=10)
    assert torch.equal(plain.tokens, drafted.tokens)
    assert drafted.cache.ours[0].store.extent <= drafted.cache.ours[0].window + 3 * 11  # drafts of ten


@pytest.mark.parametrize("policy", ["full", "elastic", "snapkv"])
def test_a_picture_beside_the_text_is_counted_and_compressed(policy: str) -> None:
    """Of the entries that a row can see, the budget is kept; what all of them take is what there was to save."""
    tiny = architectures.build("mllama", 2)
    chosen = policies.create(policy)
    held = compressed(tiny, chosen, 4).cache
    visible = [17, 34]  # the first row's mask shows one tile of two
    fed = tiny.inputs["input_ids"].shape[1] + 3
    for layer in held.pictures:
        wanted = [34, 34] if policy == "full" else [chosen.target(n) for n in visible]
        assert layer.store.held == wanted
        entries = layer.store.located()[:, 0].amax(-1).tolist()
        assert policy == "full" or entries[0] < 17, "an invisible tile was kept"
    entry = 2 * 2 * 16 * 4  # keys and values, two KV heads of 16 numbers of 4 bytes
    assert held.full_bytes(fed) == 3 * fed * entry + 2 * 34 * entry
    assert held.bytes_used() == sum(layer.store.extent for layer in [*held.ours, *held.pictures]) * 2 * entry


@pytest.mark.parametrize("name", every_architecture("llava_gqa", "gemma4", "mllama", "qwen3_5"))
def test_the_size_of_an_entry_is_known_before_anything_is_read(name: str) -> None:
    """Layers of one model may differ in it."""
    tiny = architectures.build(name, 1)
    held = compressed(tiny, Full(), 2).cache
    assert entry_bytes(tiny.model.config, torch.float32) == [layer.store.bytes_per_slot() for layer in held.ours]


@pytest.mark.parametrize("policy", ["full", "elastic", "h2o"])
@pytest.mark.parametrize("name", every_architecture("llava_gqa", "gemma3", "mllama", "llama4"))
def test_accounts_of_a_run_add_up(name: str, policy: str) -> None:
    """What is held is never more than a full cache would hold, and the estimate before the run covers the peak."""
    tiny, decoding = architectures.build(name, 1), Decoding(max_new_tokens=5)
    session, chosen = session_of(tiny), policies.create(policy)
    outcome = session.run([prepared(tiny)], chosen, decoding)[0]
    assert outcome.bytes_held <= outcome.bytes_full
    assert outcome.bytes_held <= outcome.bytes_peak <= session.batch_bytes([outcome.prompt_tokens], chosen, decoding)
    if policy == "full":
        assert outcome.bytes_held == outcome.bytes_full
