"""Elastic Cache against its paper written out as plain loops over lists."""

from __future__ import annotations

import math

import pytest
import torch
from policy_lab import (
    NEW_TOKENS,
    causal,
    generate,
    hand_view,
    positions_of,
    prompt_of,
    prompt_pass,
    recording,
    steps_of,
    tiny,
)

from kvcli import policies

FULL_ATTENTION = {"llava_gqa": (0, 1, 2, 3), "qwen2_5_vl": (0, 1, 2, 3), "paligemma": (0, 1, 2, 3), "gemma3": (2, 5)}


# --- the paper, as loops


def column_sums(attention, row: int, first: int) -> list[float]:
    """I_n: the mean over heads of what all real queries gave to key n (3.2, Eq. 1). attention: [B, H, T, T]."""
    heads, length = attention.shape[1], attention.shape[2]
    sums = []
    for n in range(first, length):
        total = 0.0
        for h in range(heads):
            for m in range(first, length):  # a prompt that sees itself both ways has entries above the diagonal too
                total += float(attention[row, h, m, n])
        sums.append(total / heads)
    return sums


def kept_count(budget, seen: int, held: int) -> int:
    wanted = budget if isinstance(budget, int) else max(3, math.floor(budget * seen + 0.5))
    return min(wanted, held)


def choose_anchors(scores: list[float], count: int) -> list[int]:
    """Indices of the anchors: both ends never compete, of equal scores the earlier wins."""
    middle = list(range(1, len(scores) - 1))
    chosen: list[int] = []
    for _ in range(max(0, count - 2)):
        best = None
        for i in middle:
            if i not in chosen and (best is None or scores[i] > scores[best]):
                best = i
        chosen.append(best)
    return sorted(chosen)


def bucket_of(position: int, anchors: list[int]) -> int:
    """The nearest anchor by position, the lower of two that are as near (Eq. 2)."""
    best = anchors[0]
    for anchor in anchors[1:]:
        if abs(anchor - position) < abs(best - position):
            best = anchor
    return best


def merged(positions: list[int], contents, counts: list[float], scores: list[float], kept: int):
    """(position, mean, count) of every entry that stays; `contents` is one head's keys or values, a list of rows."""
    n = len(positions)
    if n <= 2:
        return [(positions[i], contents[i], counts[i]) for i in range(n)]
    anchors = choose_anchors(scores, kept)
    stays = sorted({0, n - 1, *anchors})
    result = []
    for i in stays:
        weight, total = counts[i], [counts[i] * x for x in contents[i]]
        if i in anchors:
            for j in range(n):
                if j in stays or bucket_of(positions[j], [positions[a] for a in anchors]) != positions[i]:
                    continue
                weight += counts[j]
                total = [a + counts[j] * b for a, b in zip(total, contents[j], strict=True)]
        result.append((positions[i], [x / weight for x in total], weight))
    return result


def assert_merged(view, keep, scores_of_row, budget) -> None:
    """The answer equals the loops, for every row, KV head, key, value and count."""
    columns = view.positions[:, 0].tolist()
    found = positions_of(view, keep)
    for row, located in enumerate(columns):
        slots = [s for s, p in enumerate(located) if p >= 0]
        slots.sort(key=lambda s: located[s])
        positions = [located[s] for s in slots]
        counts = [float(view.counts[row, 0, s]) for s in slots]
        kept = kept_count(budget, view.seen[row], len(slots))
        for head in range(view.keys.shape[1]):
            for contents, got in ((view.keys, keep.keys), (view.values, keep.values)):
                rows = [contents[row, head, s].tolist() for s in slots]
                expected = merged(positions, rows, counts, scores_of_row[row], kept)
                assert found[row][0] == [p for p, _, _ in expected]
                assert keep.held[row] == len(expected)
                for k, (_, mean, count) in enumerate(expected):
                    assert got[row, head, k].tolist() == pytest.approx(mean, rel=1e-9, abs=1e-12)
                    assert float(keep.counts[row, 0, k]) == count


# --- after the prompt, on views made by hand


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.9, 1.0, 3, 7])
@pytest.mark.parametrize("lengths", [[20], [1], [2], [3], [4], [5, 17, 9], [1, 3, 2, 30]])
def test_kept_set_buckets_and_means(lengths, budget):
    attention = causal(lengths, heads=4, seed=sum(lengths))
    scores = [column_sums(attention, row, max(lengths) - n) for row, n in enumerate(lengths)]
    wide = torch.tensor([[0.0] * (max(lengths) - len(s)) + s for s in scores], dtype=torch.float64)[:, None]
    view = hand_view(lengths, {"importance": wide})
    keep = policies.create("elastic", budget=budget).compress(view)
    assert_merged(view, keep, scores, budget)


def test_of_equal_scores_the_earlier_is_the_anchor_and_ties_of_distance_go_down():
    view = hand_view([9], {"importance": torch.ones(1, 1, 9, dtype=torch.float64)})
    keep = policies.create("elastic", budget=4).compress(view)
    assert positions_of(view, keep) == [[[0, 1, 2, 8]]]
    scores = torch.zeros(1, 1, 9, dtype=torch.float64)
    scores[0, 0, [2, 6]] = 1.0
    keep = policies.create("elastic", budget=4).compress(hand_view([9], {"importance": scores}))
    # 4 is as far from 2 as from 6: it joins 2 together with 1 and 3, and leaves 5 and 7 to 6
    assert keep.counts[0, 0].tolist() == [1, 4, 3, 1]


def test_a_second_turn_weighs_entries_by_what_they_stand_for():
    positions = torch.tensor([[[0, 4, 7, 12, 13, 14, 15, 16]], [[-1, 3, 9, -1, 13, 14, 15, 16]]])
    counts = torch.tensor([[[1.0, 6, 3, 2, 1, 1, 1, 1]], [[0.0, 2, 8, 0, 1, 1, 1, 1]]])
    scores = [[9.0, 0.1, 0.5, 2, 0.3, 0.2, 4, 1], [9.0, 0.1, 0.5, 2, 0.3, 1]]
    wide = torch.tensor([scores[0], [50.0, *scores[1][:2], 60.0, *scores[1][2:]]], dtype=torch.float64)[:, None]
    view = hand_view([17, 17], {"importance": wide}, positions=positions, counts=counts)
    assert_merged(view, policies.create("elastic", budget=4).compress(view), scores, 4)


def test_a_slot_order_that_is_not_the_order_of_positions_changes_nothing():
    scores = torch.rand(1, 1, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plain = hand_view([12], {"importance": scores})
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(4))
    mixed = hand_view([12], {"importance": scores[..., shuffle]}, positions=plain.positions[..., shuffle])
    mixed.keys, mixed.values = plain.keys[:, :, shuffle], plain.values[:, :, shuffle]
    policy = policies.create("elastic", budget=5)
    a, b = policy.compress(plain), policy.compress(mixed)
    assert positions_of(plain, a) == positions_of(mixed, b)
    torch.testing.assert_close(a.keys, b.keys)
    torch.testing.assert_close(a.values, b.values)


# --- through the engine


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", list(FULL_ATTENTION))
def test_a_prompt_through_the_engine_equals_the_loops_over_the_library_s_own_attention(name, batch):
    model = tiny(name, batch)
    attentions, keys, values = prompt_pass(name, batch)
    policy, log = recording(policies.create("elastic", budget=0.3))
    generate(model, policy, 2)
    lengths = prompt_of(model).lengths
    for layer in FULL_ATTENTION[name]:
        seen = steps_of(log, layer)[0]
        scores = [column_sums(attentions[layer], row, attentions[layer].shape[-1] - n) for row, n in enumerate(lengths)]
        real = prompt_of(model).real
        for got, expected in ((seen.view.keys, keys[layer]), (seen.view.values, values[layer])):
            expected = expected.transpose(1, 2)[real].double()
            torch.testing.assert_close(got.transpose(1, 2)[real], expected, rtol=1e-3, atol=1e-4)
        assert_merged(seen.view, seen.answer, scores, 0.3)


@pytest.mark.parametrize("budget", [0.2, 0.6, 9])
@pytest.mark.parametrize("distance", [1, 4, 25])
def test_decode_deletes_at_the_truncation_point_step_by_step(budget, distance):
    model = tiny("llava_gqa", 3)
    policy, log = recording(policies.create("elastic", budget=budget, distance=distance))
    generate(model, policy)
    lengths, columns = prompt_of(model).lengths, prompt_of(model).columns
    for layer in range(4):
        prompt, *steps = steps_of(log, layer)
        queues = [list(row[0]) for row in positions_of(prompt.view, prompt.answer)]
        points = [max(1, len(queue) - distance) for queue in queues]
        assert len(steps) == NEW_TOKENS - 1
        for step, seen in enumerate(steps, start=1):
            for row, queue in enumerate(queues):
                queue.append(columns + step - 1)
                held = sorted(p for p in seen.view.positions[row, 0].tolist() if p >= 0)
                assert held == queue
                share = budget if isinstance(budget, float) else min(budget, lengths[row]) / lengths[row]
                if len(queue) / (lengths[row] + step) > share:
                    del queue[points[row]]


def test_decode_grow_deletes_nothing():
    model = tiny("llava_gqa", 1)
    run = generate(model, policies.create("elastic", budget=0.3, decode="grow"))
    assert len(run.kept()[0][0]) == kept_count(0.3, *prompt_of(model).lengths * 2) + NEW_TOKENS - 1
