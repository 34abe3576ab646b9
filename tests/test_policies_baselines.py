"""H2O, StreamingLLM, SnapKV and the random floor against their papers written out as plain loops."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from policy_lab import (
    generate,
    hand_view,
    positions_of,
    prompt_of,
    prompt_pass,
    recording,
    rotator,
    steps_of,
    tiny,
)
from transformers import DynamicCache

from kvcli import policies

LENGTHS = [9, 24, 17]


def random_votes(seed: int, heads: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(LENGTHS), heads, max(LENGTHS), generator=generator, dtype=torch.float64)


def slots_of(row: int) -> list[int]:
    return list(range(max(LENGTHS) - LENGTHS[row], max(LENGTHS)))


def half_up(x: float) -> int:
    return math.floor(x + 0.5)


def recorded_run(name: str, policy: str, batch: int = 3, **options):
    model = tiny(name, batch)
    wrapped, log = recording(policies.create(policy, **options))
    run = generate(model, wrapped)
    return run, [steps_of(log, layer) for layer in range(4)], prompt_of(model)


# --- H2O


@pytest.mark.parametrize(("budget", "share"), [(0.3, 0.5), (0.5, 0.25), (7, 0.5), (0.4, 0.0), (0.4, 1.0)])
def test_h2o_keeps_recent_and_heavy_and_accumulates_while_generating(budget, share):
    attentions, _, _ = prompt_pass("llava_gqa", 3)
    _, layers, prompt = recorded_run("llava_gqa", "h2o", budget=budget, recent=share)
    for layer, (first, *steps) in enumerate(layers):
        for row, length in enumerate(prompt.lengths):
            start, most = prompt.columns - length, budget if isinstance(budget, int) else half_up(budget * length)
            window = min(most, max(1, half_up(share * most)))
            for head in range(2):
                known = {}
                for n in range(start, prompt.columns):
                    group = [
                        attentions[layer][row, h, m, n]
                        for h in (2 * head, 2 * head + 1)
                        for m in range(n, prompt.columns)
                    ]
                    known[n] = float(sum(group)) / 2
                shown = first.view.statistics["score"][row, head].tolist()
                assert shown[start:] == pytest.approx([known[n] for n in sorted(known)], rel=1e-4, abs=1e-5)
                known = {n: shown[n] for n in known}
                kept = sorted(known)[-window:]
                others = sorted((n for n in known if n not in kept), key=lambda n: (-known[n], n))
                kept = sorted(kept + others[: most - window])
                assert positions_of(first.view, first.answer)[row][head] == kept
                known = {n: known[n] for n in kept}
                for step, seen in enumerate(steps, start=1):
                    known[prompt.columns + step - 1] = 0.0
                    located = seen.view.positions.expand(-1, 2, -1)[row, head].tolist()
                    assert {p for p in located if p >= 0} == set(known)
                    for slot, p in enumerate(located):
                        if p >= 0:
                            known[p] += float(seen.view.weights[row, 2 * head : 2 * head + 2, slot].sum()) / 2
                    inside = sorted(known)[:-window]
                    del known[min(inside, key=lambda p: known[p]) if inside and share < 1 else min(known)]
                    assert len(known) == most


# --- StreamingLLM


@pytest.mark.parametrize(("budget", "sinks"), [(0.4, 4), (9, 2), (3, 4), (0.5, 0)])
def test_streaming_is_the_paper_s_cache_in_which_positions_are_places(budget, sinks):
    """A stock cache of unturned keys, each moved to its place in the cache, the query to the next place."""
    model, turn = tiny("llava_gqa"), rotator("llava_gqa").turn
    run, layers, prompt = recorded_run("llava_gqa", "streaming", batch=1, budget=budget, sinks=sinks)
    most = budget if isinstance(budget, int) else half_up(budget * prompt.columns)
    stay = min(sinks, most - 1)
    entries = [
        [(p, first.view.keys[:, :, p : p + 1], first.view.values[:, :, p : p + 1]) for p in range(prompt.columns)]
        for first, *_ in layers
    ]
    tokens = run.sequences[:, prompt.columns :]
    for step in range(1, tokens.shape[1]):
        cache = DynamicCache()
        for layer, held in enumerate(entries):
            held[:] = held[:stay] + held[stay:][-(most - stay) :] if len(held) > most else held
            moved = [turn(k, torch.tensor([[[place - p]]]), layer) for place, (p, k, _) in enumerate(held)]
            cache.update(torch.cat(moved, 2), torch.cat([v for _, _, v in held], 2), layer)
            seen = layers[layer][step].view
            assert sorted(p for p in seen.positions[0, 0].tolist() if p >= 0)[:-1] == [p for p, _, _ in held]
            slot = seen.positions[0, 0].tolist().index(prompt.columns + step - 1)
            held.append(
                (prompt.columns + step - 1, seen.keys[:, :, slot : slot + 1], seen.values[:, :, slot : slot + 1])
            )
        with torch.inference_mode():
            states = model.model.model.language_model(
                input_ids=tokens[:, step - 1 : step], position_ids=torch.tensor([[most]]), cache=cache
            )
            logits = model.model.lm_head(states.last_hidden_state)[:, -1]
        torch.testing.assert_close(run.logits[step].double(), logits, rtol=1e-4, atol=1e-4)


def test_streaming_leaves_positions_alone_if_told_to():
    _, layers, prompt = recorded_run("llava_gqa", "streaming", budget=0.4, positions="original")
    for first, *steps in layers:
        for row, length in enumerate(prompt.lengths):
            start, most = prompt.columns - length, half_up(0.4 * length)
            for step, seen in enumerate(steps, start=1):
                columns = list(range(start, prompt.columns + step - 1))
                expected = columns[:4] + columns[4:][-(most - 4) :]
                assert sorted(p for p in seen.view.positions[row, 0].tolist() if p >= 0)[:-1] == expected
            slots = list(range(4))
            original = first.view.keys[row, :, start : start + 4]
            torch.testing.assert_close(steps[-1].view.keys[row, :, slots], original)


def test_streaming_moves_sinks_by_positions_not_tokens_where_a_picture_takes_fewer():
    _, layers, prompt = recorded_run("qwen2_5_vl", "streaming", budget=0.4)
    turn = rotator("qwen2_5_vl").turn
    grids = tiny("qwen2_5_vl", 3).inputs["image_grid_thw"] // torch.tensor([1, 2, 2])
    for layer, (first, *steps) in enumerate(layers):
        for row, length in enumerate(prompt.lengths):
            start, most = prompt.columns - length, half_up(0.4 * length)
            saved = int(prompt.visual[row].sum()) - int(grids[row].max())  # positions that the picture does not take
            last = steps[-1].view
            oldest = sorted(p for p in last.positions[row, 0].tolist() if p >= 0)[4]
            assert oldest == prompt.columns + len(steps) - 1 - (most - 4)
            between = (oldest - start - saved) - 4
            original = first.view.keys[row : row + 1, :, start : start + 4]
            moved = turn(original, torch.tensor([[[between]]]), layer)
            torch.testing.assert_close(last.keys[row : row + 1, :, :4], moved)


def test_streaming_has_no_sinks_where_the_model_forgets_them():
    run = generate(tiny("gemma3"), policies.create("streaming", budget=8))
    columns = prompt_of(tiny("gemma3")).columns + 11
    assert run.kept(0) == [[list(range(columns - 8, columns))]]  # slides
    assert run.kept(2) == [[[0, 1, 2, 3, *range(columns - 4, columns)]]]  # sees all


# --- SnapKV


@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize(
    ("budget", "window", "kernel"), [(0.5, 4, 5), (8, 3, 3), (0.9, 12, 5), (6, 32, 5), (1.0, 2, 1), (2, 1, 7)]
)
def test_snapkv_keeps_the_window_and_what_it_votes_for(budget, window, kernel, pooling):
    votes = random_votes(1)
    view = hand_view(LENGTHS, {"votes": votes})
    policy = policies.create("snapkv", budget=budget, window=window, kernel=kernel, pooling=pooling)
    keep = policy.compress(view)
    for row, length in enumerate(LENGTHS):
        most = min(length, budget if isinstance(budget, int) else half_up(budget * length))
        stay = min(window, max(1, most // 2))
        for head in range(2):
            column = votes[row, head, slots_of(row)].tolist()
            earlier = column[: max(0, length - window)]
            smooth = []
            for i in range(len(earlier)):
                near = [
                    earlier[j] if 0 <= j < len(earlier) else 0.0 for j in range(i - kernel // 2, i + kernel // 2 + 1)
                ]
                smooth.append(sum(near) / kernel if pooling == "average" else max(near))
            ranked = sorted(range(len(earlier)), key=lambda i: (-smooth[i], i))
            rest = list(range(len(earlier), length - stay))  # in the window, but not kept with it: last resort
            chosen = (ranked + rest)[: most - stay]
            expected = sorted([*chosen, *range(length - stay, length)])
            assert positions_of(view, keep)[row][head] == [slots_of(row)[i] for i in expected]


def test_snapkv_votes_are_those_of_the_last_tokens():
    attentions, _, _ = prompt_pass("llava_gqa", 3)
    _, layers, prompt = recorded_run("llava_gqa", "snapkv", budget=0.4, window=5)
    for layer, (first, *_) in enumerate(layers):
        for row, length in enumerate(prompt.lengths):
            for head in range(2):
                for n in range(prompt.columns - length, prompt.columns):
                    votes = [attentions[layer][row, h, m, n] for h in (2 * head, 2 * head + 1) for m in range(-5, 0)]
                    shown = float(first.view.statistics["votes"][row, head, n])
                    assert shown == pytest.approx(float(sum(votes)) / 2, rel=1e-4, abs=1e-5)


def test_snapkv_touches_nothing_that_is_generated():
    run, layers, prompt = recorded_run("llava_gqa", "snapkv", budget=0.4)
    kept = positions_of(layers[0][0].view, layers[0][0].answer)
    for row in range(3):
        for head in range(2):
            assert run.kept(0)[row][head] == kept[row][head] + list(range(prompt.columns, prompt.columns + 11))


# --- the floor


def test_random_keeps_every_entry_equally_often():
    keeps = torch.zeros(24)
    for seed in range(600):
        view = hand_view([24], {})
        keeps[policies.create("random", budget=6, seed=seed).compress(view).index[0, 0]] += 1
    expected, deviation = 150, math.sqrt(600 * 0.25 * 0.75)
    assert (keeps - expected).abs().max() < 5 * deviation


def test_random_draws_depend_on_seed_layer_and_length_only():
    def kept(lengths, row, **options):
        layer = options.pop("layer", 0)
        view = hand_view(lengths, {}, layer=layer)
        keep = policies.create("random", budget=0.5, **options).compress(view)
        return [p - (max(lengths) - lengths[row]) for p in positions_of(view, keep)[row][0]]

    assert kept([20], 0) == kept([20, 31, 5], 0) == kept([7, 20], 1)
    assert kept([20], 0) != kept([20], 0, seed=1)
    assert kept([20], 0) != kept([20], 0, layer=1)


def test_random_lets_one_entry_go_at_each_step_but_never_the_newest():
    _, layers, prompt = recorded_run("llava_gqa", "random", budget=0.4)
    for _, *steps in layers:
        for before, after in pairwise(steps):
            for row, length in enumerate(prompt.lengths):
                old, new = (set(s.view.positions[row, 0].tolist()) - {-1} for s in (before, after))
                assert len(old) == half_up(0.4 * length) + 1
                assert len(old - new) == 1
                assert max(old) in new
