"""Statistics against eager attention: what a policy is given is what `output_attentions` shows, reduced.

The reference is written with plain loops over rows. Models run in float32: stock eager attention of a padded row in
float64 is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, get_args

import architectures
import pytest
import torch
from oracle import OracleCache, compressed
from proofs import every_architecture, prove
from torch import Tensor

from kvcli.engine import attention
from kvcli.policies.base import Policy
from kvcli.policies.contract import Columns, Evict, Heads, Keep, LayerView, Queries, Rows, RowSummary, Statistic

WINDOW = 5
REDUCERS = ("sum", "squares", "max")
LIMIT = 1e-5
MAIN = ("llava_gqa", "qwen2_5_vl", "gemma3", "paligemma", "paligemma2", "gemma4", "mllama", "llama4", "lfm2")
"""One of each kind of attention: these are tried on every run."""

COLUMNS = tuple(
    Columns(f"{reduce} {queries} {heads} {first}", reduce, queries, WINDOW, heads, heads_first=first)
    for reduce, queries, heads, first in product(
        ("sum", "squares", "max"), get_args(Queries), get_args(Heads), (False, True)
    )
)
OTHERS = tuple(
    kind(f"{kind.__name__} {queries}", queries=queries, window=WINDOW)
    for kind, queries in product((Rows, RowSummary), get_args(Queries))
)
WHILE_GENERATING = tuple(
    Columns(f"{reduce} {heads} {decay}", reduce, heads=heads, decode=True, decay=decay)
    for reduce, heads, decay in [
        *product(REDUCERS, get_args(Heads), (1.0,)),
        *product(("sum",), get_args(Heads), (0.8,)),
    ]
)


@dataclass(frozen=True)
class Listens(Policy):
    """Keeps everything and remembers what it was shown, by (step, layer): statistics, positions, newest weights."""

    name: ClassVar[str] = "listens"

    def __post_init__(self) -> None:
        self.__dict__.update(asked=(), shown={}, places={}, newest={})

    def asking(self, *statistics: Statistic) -> Listens:
        self.__dict__["asked"] = statistics
        return self

    def statistics(self) -> tuple[Statistic, ...]:
        return self.__dict__["asked"]

    @property
    def acts_in_decode(self) -> bool:
        return True

    @property
    def needs_weights(self) -> bool:
        return True

    def compress(self, view: LayerView) -> Keep | None:
        return self._remember(view)

    def evict(self, view: LayerView) -> Evict | None:
        self.__dict__["newest"][view.step, view.layer] = view.weights
        return self._remember(view)

    def _remember(self, view: LayerView) -> None:
        shown = {name: value.clone() for name, value in view.statistics.items()}
        self.__dict__["shown"][view.step, view.layer] = shown
        self.__dict__["places"][view.step, view.layer] = view.positions.clone()


@contextmanager
def eagerly(model: Any) -> Iterator[None]:
    nested = "text_config" in model.config.sub_configs
    text = model.config.text_config if nested else model.config
    before = text._attn_implementation
    model.set_attn_implementation({"text_config" if nested else "": "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config" if nested else "": before})


def eager(tiny: architectures.Tiny, steps: int) -> tuple[Tensor, dict[tuple[int, int], Tensor]]:
    """Tokens, and attention weights by (step, layer), [B, H, T, S], over the layers that grow."""
    cache = OracleCache(tiny.model.config, [])  # never cut, unlike the stock one's sliding layers
    growing = [index for index, layer in enumerate(cache.layers) if hasattr(layer, "visible")]
    told = {**tiny.inputs, **tiny.generate_kwargs, "max_new_tokens": steps, "return_dict_in_generate": True}
    with eagerly(tiny.model), torch.inference_mode():
        out = tiny.model.generate(**told, output_attentions=True, cache=cache)
    found = {}
    for step, layers in enumerate(out.attentions):
        complete = len(layers) == len(cache.layers)  # some models leave layers without attention out
        for place, layer in enumerate(growing):
            found[step, layer] = layers[layer if complete else place].double()
    return out.sequences, found


# --- the reference, row by row


def rows_of(tiny: architectures.Tiny, row: int, queries: Queries) -> list[int]:
    """The columns of a prompt that a set of queries means."""
    mask = tiny.inputs["attention_mask"][row].tolist()
    ids = tiny.inputs["input_ids"][row].tolist()
    real = [column for column, is_real in enumerate(mask) if is_real]
    visual = [column for column in real if ids[column] == tiny.image_token]
    if queries == "all":
        return real
    if queries == "last":
        return real[-WINDOW:]
    after = max(visual, default=-1) if queries == "after-vision" else -1
    return [column for column in real if column not in visual and column > after]


def over_heads(weights: Tensor, heads: Heads, kv_heads: int) -> Tensor:
    """[H, ...] -> [A, ...]; query heads of a group stand together."""
    if heads == "none":
        return weights
    groups = weights.chunk(kv_heads) if heads.startswith("group-") else (weights,)
    reduce = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[heads.removeprefix("group-")]
    return torch.stack([reduce(group, 0) for group in groups])


def columns(asked: Columns, weights: Tensor, kv_heads: int) -> Tensor:
    """[H, rows, S] -> [A, S]."""
    reduce = {"sum": torch.sum, "squares": lambda w, axis: (w * w).sum(axis), "max": torch.amax}[asked.reduce]
    if asked.decay != 1.0:
        later = torch.arange(weights.shape[1] - 1, -1, -1)
        weights = weights * (asked.decay**later)[:, None]
    if not weights.shape[1]:
        return torch.zeros_like(over_heads(weights.sum(1), asked.heads, kv_heads))
    if asked.heads_first:
        return reduce(over_heads(weights, asked.heads, kv_heads), 1)
    return over_heads(reduce(weights, 1), asked.heads, kv_heads)


def expected(asked: Statistic, weights: Tensor, kv_heads: int) -> Tensor:
    """What one batch row is to be shown of the chosen weights [H, rows, S]."""
    if isinstance(asked, Columns):
        return columns(asked, weights, kv_heads)
    if isinstance(asked, Rows):
        found = torch.zeros(weights.shape[0], WINDOW, weights.shape[2], dtype=weights.dtype)
        for place, row in enumerate(range(weights.shape[1])[-WINDOW:], WINDOW - min(WINDOW, weights.shape[1])):
            found[:, place] = weights[:, row]
        return found
    summary = torch.zeros(weights.shape[0], 3, dtype=weights.dtype)
    for head, each in enumerate(weights):
        for row in each:
            seen = row[row > 0]
            summary[head, 0] -= (seen * seen.log()).sum()
            summary[head, 1] += (seen < asked.below * seen.max()).double().mean()
            summary[head, 2] += 1
    return summary


def largest_error(tiny: architectures.Tiny, asked: tuple[Statistic, ...], **options: Any) -> float:
    """Of everything shown after the prompt, in every layer and row."""
    listens = Listens().asking(*asked)
    ours = compressed(tiny, listens, 1, **options)
    _, weights = eager(tiny, 1)
    errors = []
    for layer in ours.cache.ours:
        shown = listens.__dict__["shown"][0, layer.index]
        kv_heads = layer.store.keys.shape[1]
        for statistic, row in product(asked, range(ours.tokens.shape[0])):
            chosen = weights[0, layer.index][row][:, rows_of(tiny, row, statistic.queries)]
            found, reference = shown[statistic.name][row], expected(statistic, chosen, kv_heads)
            if isinstance(statistic, RowSummary):  # a weight at the threshold itself falls on either side of it
                near = [replace(statistic, below=statistic.below * edge) for edge in (1 - LIMIT, 1 + LIMIT)]
                low, high = (expected(each, chosen, kv_heads)[:, 1] for each in near)
                reference[:, 1] = found[:, 1].double().clamp(low, high)
            errors.append(distance(found, reference))
    return max(errors)


def distance(ours: Tensor, reference: Tensor) -> float:
    """Largest difference, as a share of the largest number where that is above one."""
    assert ours.shape == reference.shape
    return float((ours - reference).abs().max() / reference.abs().max().clamp(min=1))


def model(name: str) -> architectures.Tiny:
    """Three rows; Phi-4's without the picture itself, since the library can't show attention beside its tower's."""
    tiny = architectures.build(name, 3)
    if name != "phi4_multimodal":
        return tiny
    return replace(tiny, inputs={key: value for key, value in tiny.inputs.items() if not key.startswith("image_")})


# --- the tests


@pytest.mark.parametrize("name", every_architecture(*MAIN))
def test_all_reducers_equal_eager_attention(name: str) -> None:
    tiny = model(name)
    prove(name, "statistics", largest_error(tiny, COLUMNS + OTHERS), LIMIT)


@pytest.mark.parametrize("name", ["llava_gqa", "qwen2_5_vl", "llama4", "lfm2"])
def test_a_prompt_in_chunks_gives_the_same_statistics(name: str) -> None:
    tiny = model(name)
    prove(name, "statistics in chunks", largest_error(tiny, COLUMNS + OTHERS, prefill_chunk_size=7), LIMIT)


@pytest.mark.parametrize("name", ["llava_gqa", "paligemma"])
def test_a_prompt_in_blocks_of_queries_gives_the_same_statistics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.WEIGHTS, "cpu", 1)
    assert model(name).inputs["input_ids"].shape[1] > 2 * attention.ROWS
    prove(name, "statistics", largest_error(model(name), COLUMNS + OTHERS), LIMIT)


@pytest.mark.parametrize("name", ["llava_gqa", "llava_next"])
def test_a_window_at_the_end_alone_is_gathered_beside_stock_attention(name: str) -> None:
    """A policy that asks for nothing else takes another way through the engine."""
    tiny = model(name)
    asked = tuple(s for s in COLUMNS + OTHERS if s.queries == "last")
    prove(name, "statistics", largest_error(tiny, asked), LIMIT)
    prove(name, "statistics in chunks", largest_error(tiny, asked, prefill_chunk_size=4), LIMIT)


def test_a_picture_beside_the_text_is_scored_by_the_text_after_it() -> None:
    tiny, listens = model("mllama"), Listens().asking(*COLUMNS, *OTHERS)
    ours = compressed(tiny, listens, 1)
    _, weights = eager(tiny, 1)
    errors = []
    for layer, row, asked in product(ours.cache.pictures, range(3), COLUMNS + OTHERS):
        first = tiny.inputs["input_ids"][row].tolist().index(tiny.image_token)
        rows = [column for column in rows_of(tiny, row, asked.queries) if column >= first]
        reference = expected(asked, weights[0, layer.index][row][:, rows], layer.store.keys.shape[1])
        errors.append(distance(listens.__dict__["shown"][0, layer.index][asked.name][row], reference))
    prove("mllama", "statistics", max(errors), LIMIT)


def test_a_statistic_of_the_first_layer_is_gathered_there_alone() -> None:
    listens = Listens().asking(Columns("first", first_layer=True), Columns("all"))
    compressed(model("llava_gqa"), listens, 1)
    named = {layer: set(shown) for (_, layer), shown in listens.__dict__["shown"].items()}
    assert named == {0: {"first", "all"}, 1: {"all"}, 2: {"all"}, 3: {"all"}}


@pytest.mark.parametrize("name", every_architecture(*MAIN))
def test_statistics_go_on_while_generating(name: str) -> None:
    """Every generated token is one more row of weight one, and the weights of the newest are shown as they are."""
    tiny, steps = model(name), 5
    listens = Listens().asking(*WHILE_GENERATING)
    ours = compressed(tiny, listens, steps)
    tokens, weights = eager(tiny, steps)
    assert torch.equal(ours.tokens, tokens)
    errors = []
    for layer, row in product(ours.cache.ours, range(len(tokens))):
        width = weights[steps - 1, layer.index].shape[-1]
        prompt = weights[0, layer.index][row][:, rows_of(tiny, row, "all")]
        later = [weights[step, layer.index][row] for step in range(1, steps)]
        all_rows = torch.cat([torch.nn.functional.pad(w, (0, width - w.shape[-1])) for w in [prompt, *later]], 1)
        last = (steps - 1, layer.index)
        places = listens.__dict__["places"][last][row, 0]
        held = places >= 0  # the others slid out of a window or are padding
        seen = len(rows_of(tiny, row, "all")) + steps - 1
        sliding = layer.kind == "sliding_attention"
        assert int(held.sum()) == (min(seen, layer.window - 1) if sliding else seen)
        for asked in WHILE_GENERATING:
            reference = columns(asked, all_rows, layer.store.keys.shape[1])[:, places[held]]
            errors.append(distance(listens.__dict__["shown"][last][asked.name][row][:, held], reference))
        newest = listens.__dict__["newest"][last][row][:, held]
        errors.append(distance(newest, later[-1][:, 0, places[held]]))
    prove(name, "statistics while generating", max(errors), LIMIT)
