"""Column sums by `flex_attention` against the pass block by block, on a CPU, where both are exact."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from kvcli.engine import flex
from kvcli.engine.attention import Gather, attend_and_gather
from kvcli.policies.contract import Columns, Rows

B, H, HKV, D = 2, 6, 2, 16
ASKED = [
    Columns("each", heads="none"),
    Columns("group", heads="group-mean"),
    Columns("mean", queries="text"),
    Columns("most", heads="max"),
]


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "DEVICES", {"cpu"})


def both(
    queries: int, slots: int, mask: Tensor | None, real: Tensor, before: Tensor | None = None
) -> list[tuple[Tensor, list[Tensor]]]:
    """Output and sums of either pass, flex first."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(B, n, s, D) for n, s in ((H, queries), (HKV, slots), (HKV, slots)))
    found = []
    for softcap in (None, 1e9):  # a cap that changes nothing keeps the other pass
        gathers = [Gather(asked, real, slots, None) for asked in ASKED]
        if before is not None:
            gathers[1].value = before.clone()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not fused here is known
            output = attend_and_gather(query, keys, values, mask, 0.25, gathers, softcap=softcap)
        found.append((output, [gather.value for gather in gathers if gather.value is not None]))
    return found


def agree(found: list[tuple[Tensor, list[Tensor]]], real: Tensor) -> None:
    (ours, sums), (reference, expected) = found
    torch.testing.assert_close(ours * real[:, None, :, None], reference * real[:, None, :, None], rtol=0, atol=1e-5)
    assert len(sums) == len(expected) == len(ASKED)
    for got, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_chunk_of_a_prompt_adds_to_what_was_gathered_before() -> None:
    real = torch.ones(B, 37, dtype=torch.bool)
    agree(both(37, 90, None, real, torch.rand(B, HKV, 90)), real)


def test_padding_and_queries_that_do_not_count() -> None:
    real = torch.ones(B, 70, dtype=torch.bool)
    real[1, :20] = False
    mask = (torch.ones(70, 70, dtype=torch.bool).tril() & real[:, None])[:, None]
    counted = real.clone()
    counted[0, 30:50] = False
    agree(both(70, 70, mask, counted), real)


def test_it_is_used_where_column_sums_are_all_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Tensor | None] = []
    monkeypatch.setattr(flex, "Prompt", lambda *args: used.append(args[3]))
    query, keys = torch.randn(B, H, 9, D), torch.randn(B, HKV, 9, D)
    real = torch.ones(B, 9, dtype=torch.bool)
    others = (
        Columns("m", reduce="max"),
        Columns("d", decay=0.9),
        Columns("f", heads="max", heads_first=True),
        Rows("r"),
    )
    for asked in others:
        attend_and_gather(query, keys, keys, None, 0.25, [Gather(ASKED[0], real, 9), Gather(asked, real, 9)])
    attend_and_gather(query[:, :, -1:], keys, keys, None, 0.25, [Gather(ASKED[0], real[:, -1:], 9)])
    assert used == []
    with pytest.raises(AttributeError):
        attend_and_gather(query, keys, keys, None, 0.25, [Gather(ASKED[0], real, 9)])
    assert used == [None]
