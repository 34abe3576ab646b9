"""Generating never waits for the device: no number, truth value or index list is read back from a tensor.

On a CPU nothing waits, so what counts is what was asked: the operations that would make a GPU's host wait.
"""

from __future__ import annotations

import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from oracle import compressed, generate, prompt_of
from test_policies_matrix import VARIANTS
from torch.utils._python_dispatch import TorchDispatchMode

import kvcli
from kvcli import policies
from kvcli.engine.adapter import KVCache, attached
from kvcli.engine.rotary import Rotator
from kvcli.policies.base import Policy

STEPS = 12
WAITING = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal"),
    "resolve_conj",  # what `tolist` begins with
    *("nonzero", "argwhere", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
OURS = str(Path(kvcli.__file__).parent)


class Asked(TorchDispatchMode):
    """Notes which of our lines ask the device while tokens are generated, one note a time."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.passes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if self.passes > 1 and (name in WAITING or by_mask):
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        stack = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
        if stack:  # the library asks on its own account too, once a step whether all rows have ended
            self.lines.append(f"{Path(stack[-1].filename).name}: {stack[-1].line}")


@cache
def tiny(name: str) -> architectures.Tiny:
    return architectures.build(name, 3)


def asked(name: str, policy: Policy, **options: Any) -> Counter[str]:
    """How often each of our lines asked, in the passes after the prompt."""
    mode, model = Asked(), tiny(name)

    def before(module: Any, args: Any, kwargs: Any) -> None:
        mode.passes += 1

    hook = model.model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        with mode:
            compressed(model, policy, STEPS, **options)
    finally:
        hook.remove()
    return Counter(mode.lines)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["llava_gqa", "qwen2_5_vl", "mllama"])
@pytest.mark.parametrize("policy", [name for name in policies.names() if name != "fastgen"])
def test_nothing_is_asked_while_generating(policy: str, name: str, int8: bool) -> None:
    options = {} if policy == "full" else {"budget": 0.4}
    assert asked(name, policies.create(policy, **options), int8=int8) == {}


@pytest.mark.parametrize(("policy", "options"), [v for v in VARIANTS if v[0] != "fastgen"])
def test_nor_by_a_variant_of_a_policy(policy: str, options: dict[str, Any]) -> None:
    assert asked("llava_gqa", policies.create(policy, **{"budget": 0.4, **options})) == {}


@pytest.mark.parametrize("policy", policies.names())
def test_sliding_layers_ask_once_a_step_together(policy: str) -> None:
    """What slides out depends on what the policy kept, which only the device knows."""
    told = asked("gemma3", policies.create(policy, **({} if policy == "full" else {"budget": 0.4})))
    assert set(told.values()) <= {STEPS - 1, STEPS - 2}
    assert [line.partition(":")[0] for line in told] == ["kvcache.py"] * (2 if policy == "fastgen" else 1)


def test_fastgen_asks_once_a_step_for_all_layers() -> None:
    """Which of its heads keep everything, only the device knows."""
    told = asked("llava_gqa", policies.create("fastgen", budget=0.4))
    assert list(told.values()) == [STEPS - 2]


@pytest.mark.parametrize("policy", ["full", "elastic", "h2o"])
def test_beams_ask_once_a_step_where_they_go(policy: str) -> None:
    told = asked("llava_gqa", policies.create(policy, **({} if policy == "full" else {"budget": 0.4})), num_beams=2)
    assert list(told.values()) == [STEPS - 1]


@pytest.mark.parametrize(
    ("policy", "options"),
    [("h2o", {}), ("streaming", {}), ("random", {}), ("elastic", {"decode": "bounded"}), ("fastgen", {})],
)
def test_a_bounded_cache_has_the_same_shape_at_every_step(policy: str, options: dict[str, Any]) -> None:
    """So that a step can be captured as a graph."""
    model, asked_for = tiny("llava_gqa"), policies.create(policy, **{"budget": 0.4, **options})
    held = KVCache(model.model.config, asked_for, Rotator(model.model) if asked_for.needs_rotation else None)
    held.announce(prompt_of(model, STEPS))
    shapes: list[list[tuple[int, ...]]] = []

    def after(module: Any, args: Any, output: Any) -> None:
        shapes.append([tuple(layer.keys.shape) for layer in held.ours if layer.keys is not None])

    hook = model.model.register_forward_hook(after)
    try:
        with attached(model.model, held):
            generate(model, held, STEPS)
    finally:
        hook.remove()
    assert len(shapes) == STEPS
    assert len(shapes[1]) == len(held.ours)
    assert all(each == shapes[1] for each in shapes[2:])


def test_the_watch_itself_sees_what_it_looks_for() -> None:
    """Else none of this could fail."""
    tensor = torch.ones(3)
    mode = Asked()
    mode.passes = 2
    seen = []
    mode.note = seen.append  # type: ignore[method-assign]
    with torch.inference_mode(), mode:
        for ask in (lambda: bool(tensor.any()), lambda: tensor[0].item(), tensor.tolist, lambda: tensor[tensor > 0]):
            before = len(seen)
            ask()
            assert len(seen) > before
