"""Scissorhands and FastGen, which treat every head by itself, against their papers written out as plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from policy_lab import (
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

LENGTHS = [9, 24, 17]


def half_up(x: float) -> int:
    return math.floor(x + 0.5)


def run_of(policy: str, new_tokens: int = 16, **options):
    model = tiny("llava_gqa", 3)
    wrapped, log = recording(policies.create(policy, **options))
    run = generate(model, wrapped, new_tokens)
    return run, [steps_of(log, layer) for layer in range(4)], prompt_of(model)


# --- Scissorhands


@pytest.mark.parametrize(("history", "recent", "drop", "budget"), [(5, 3, 4, 0.5), (64, 2, 1, 0.3), (8, 50, 3, 9)])
def test_scissorhands_counts_weights_below_uniform_and_drops_in_batches(history, recent, drop, budget):
    attentions, _, _ = prompt_pass("llava_gqa", 3)
    run, layers, prompt = run_of("scissorhands", history=history, recent=recent, drop=drop, budget=budget)
    drops = 0
    for layer, (first, *steps) in enumerate(layers):
        for row, length in enumerate(prompt.lengths):
            start = prompt.columns - length
            most = budget if isinstance(budget, int) else half_up(budget * length)
            stay = max(1, min(recent, most // 2))
            for head in range(2):
                group = (2 * head, 2 * head + 1)
                counter = dict.fromkeys(range(start, prompt.columns), 0)
                for m in range(max(start, prompt.columns - history), prompt.columns):
                    for n in range(start, m + 1):
                        weight = sum(float(attentions[layer][row, h, m, n]) for h in group) / 2
                        counter[n] += weight < 1 / (m - start + 1)
                columns = sorted(counter)
                others = sorted(columns[:-stay], key=lambda n: (counter[n], -n))
                kept = sorted(columns[-stay:] + others[: most - stay])
                assert positions_of(first.view, first.answer)[row][head] == kept
                counter = {n: counter[n] for n in kept}
                for step, seen in enumerate(steps, start=1):
                    counter[prompt.columns + step - 1] = 0
                    located = seen.view.positions.expand(-1, 2, -1)[row, head].tolist()
                    assert {p for p in located if p >= 0} == set(counter)
                    for slot, p in enumerate(located):
                        if p >= 0:
                            weight = float(seen.view.weights[row, list(group), slot].sum()) / 2
                            counter[p] += weight < 1 / len(counter)
                    if len(counter) == most + drop:
                        inner = sorted(counter)[:-stay]
                        for p in sorted(inner, key=lambda p: (-counter[p], p))[:drop]:
                            del counter[p]
                        drops += 1
                assert run.kept(layer)[row][min(head, len(run.kept(layer)[row]) - 1)] == sorted(counter)
    assert drops


# --- FastGen


def sets_of(length: int, score: list[float], special: int, frequency: int, local: int) -> list[set[int]]:
    """The row of policies over one head's entries 0 .. length - 1."""
    first = set(range(min(special, length)))
    latest = set(range(length - local, length)) - first

    def heaviest(among) -> set[int]:
        return set(sorted(among, key=lambda i: (-score[i], i))[:frequency])

    middle = set(range(length)) - first
    return [first, first | heaviest(middle), first | latest | heaviest(middle - latest), set(range(length))]


@pytest.mark.parametrize("budget", [None, 0.5, 8])
@pytest.mark.parametrize("recovery", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_fastgen_gives_each_head_the_first_set_that_recovers_enough(recovery, budget):
    attention, window = causal(LENGTHS, heads=4, seed=5), 6
    columns = max(LENGTHS)
    rows = torch.zeros(3, 4, window, columns, dtype=torch.float64)
    score = torch.zeros(3, 2, columns, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        start = columns - length
        rows[row] = attention[row, :, -window:]
        for head in range(2):
            score[row, head] = attention[row, 2 * head : 2 * head + 2, start:].sum((0, 1)) / 2
    view = hand_view(LENGTHS, {"score": score, "profile": rows})
    policy = policies.create("fastgen", recovery=recovery, window=window, budget=budget)
    keep = policy.compress(view)
    kinds = set()
    for row, length in enumerate(LENGTHS):
        start = columns - length
        if budget is None:
            frequency, local, special = math.ceil(0.3 * length), math.ceil(0.3 * length), 4
        else:
            most = min(length, budget if isinstance(budget, int) else half_up(budget * length))
            special = min(4, most)
            frequency, local = most - special - (most - special) // 2, (most - special) // 2
        for head in range(2):
            choices = sets_of(length, score[row, head, start:].tolist(), special, frequency, local)
            choices = choices if budget is None else choices[:3]
            for kind, chosen in enumerate(choices):
                got = sum(float(rows[row, h, :, start + i].sum()) for h in (2 * head, 2 * head + 1) for i in chosen)
                if got / (2 * window) >= recovery or kind == len(choices) - 1:
                    break
            kinds.add(kind)
            assert positions_of(view, keep)[row][head] == [start + i for i in sorted(chosen)]
    assert keep.held == tuple(max(len(head) for head in heads) for heads in positions_of(view, keep))
    assert len(kinds) > 1 or recovery in (0.3, 1.0) or budget is not None


@pytest.mark.parametrize(("budget", "recovery"), [(None, 0.9), (None, 0.6), (0.5, 0.6), (0.5, 1.0), (4, 1.0)])
def test_fastgen_heads_keep_to_their_policy_while_generating(budget, recovery):
    run, layers, prompt = run_of("fastgen", budget=budget, recovery=recovery, window=8)
    for layer, (first, *steps) in enumerate(layers):
        for row, length in enumerate(prompt.lengths):
            most = length if budget is None else (budget if isinstance(budget, int) else half_up(budget * length))
            local = math.ceil(0.3 * length) if budget is None else (most - 4) // 2
            sizes = (4, 4 + math.ceil(0.3 * length), 4 + 2 * math.ceil(0.3 * length), length)
            for head in range(2):
                kept = positions_of(first.view, first.answer)[row][head]
                kind = (sizes if budget is None else (4, most - local, most)).index(len(kept))
                guard = min((0, 1, max(1, local), 1)[kind], len(kept) - 4)
                score = {p: float(first.view.statistics["score"][row, head, p]) for p in kept}
                for step, seen in enumerate(steps, start=1):
                    score[prompt.columns + step - 1] = 0.0
                    located = seen.view.positions.expand(-1, 2, -1)[row, head].tolist()
                    assert {p for p in located if p >= 0} == set(score)
                    for slot, p in enumerate(located):
                        if p >= 0:
                            score[p] += float(seen.view.weights[row, 2 * head : 2 * head + 2, slot].sum()) / 2
                    if len(score) > len(kept) and kind < 3:
                        order = sorted(score)
                        inner = order[4 : len(order) - guard]
                        if inner:
                            del score[min(inner, key=lambda p: score[p])]
                assert run.kept(layer)[row][head] == sorted(score)
