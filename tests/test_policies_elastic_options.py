"""Every option of Elastic Cache against plain loops over lists."""

from __future__ import annotations

import cmath
import math
import random

import pytest
import torch
from policy_lab import (
    generate,
    hand_view,
    positions_of,
    prompt_of,
    prompt_pass,
    recording,
    steps_of,
    tiny,
)
from test_policies_elastic import bucket_of, choose_anchors, kept_count
from transformers import DynamicCache

from kvcli import policies
from kvcli.errors import UsageError

LENGTHS = [9, 24, 17]


def random_scores(seed: int, heads: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(LENGTHS), heads, max(LENGTHS), generator=generator, dtype=torch.float64)


def slots_of(row: int) -> list[int]:
    return list(range(max(LENGTHS) - LENGTHS[row], max(LENGTHS)))


def mean_of(contents, row: int, head: int, slots: list[int], weights: list[float]) -> list[float]:
    total = [0.0] * contents.shape[-1]
    for slot, weight in zip(slots, weights, strict=True):
        for d in range(len(total)):
            total[d] += weight * float(contents[row, head, slot, d])
    return [x / sum(weights) for x in total]


def assert_means(view, keep, row, members: dict[int, list[int]], weights=None, names=("keys", "values")) -> None:
    """members: slot that stays -> slots whose mean it holds (itself among them, twice if it counts twice)."""
    assert positions_of(view, keep)[row][0] == sorted(members)
    for k, slot in enumerate(sorted(members)):
        factor = [1.0 if weights is None else weights[s] for s in members[slot]]
        for name in names:
            for head in range(view.keys.shape[1]):
                expected = mean_of(getattr(view, name), row, head, members[slot], factor)
                assert getattr(keep, name)[row, head, k].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def buckets(row: int, scores: torch.Tensor, kept: int) -> dict[int, list[int]]:
    """slot that stays -> its members, as the paper has it."""
    slots = slots_of(row)
    anchors = [slots[i] for i in choose_anchors(scores[row, 0, slots].tolist(), kept)]
    members = {slot: [slot] for slot in (slots[0], slots[-1], *anchors)}
    for slot in slots:
        if slot not in members:
            members[bucket_of(slot, anchors)].append(slot)
    return members


# --- which entries stay


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.8])
def test_official_selects_and_merges_as_the_released_code(budget):
    scores = random_scores(1)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", select="official", budget=budget).compress(view)
    for row, length in enumerate(LENGTHS):
        offset = max(LENGTHS) - length
        column = scores[row, 0, offset:].tolist()
        middle = column[1 : length - 1]
        forget = int(length - length * budget)
        order = sorted(range(len(middle)), key=lambda i: middle[i])
        kept = [i + 1 for i in range(len(middle)) if order[i] > forget]
        dropped = [i for i in range(len(middle)) if order[i] <= forget]
        if forget < 2:
            assert positions_of(view, keep)[row][0] == slots_of(row)
            continue
        assert len(kept) == max(0, length - forget - 3)
        members = {i: [i] for i in (0, *kept, length - 1)}
        for j in dropped if kept else ():
            members[min(kept, key=lambda k: (abs(k - j), k))].append(j)
        assert_means(view, keep, row, {slot + offset: [j + offset for j in joined] for slot, joined in members.items()})


def test_official_keeps_all_when_fewer_than_two_would_go():
    view = hand_view([9], {"importance": torch.rand(1, 1, 9, dtype=torch.float64)})
    keep = policies.create("elastic", select="official", budget=0.85).compress(view)
    assert positions_of(view, keep) == [[list(range(9))]]


def test_official_protects_both_ends_by_nature():
    with pytest.raises(UsageError, match="ends"):
        policies.create("elastic", select="official", ends="ranked")


def test_ranked_ends_compete_and_take_in():
    scores = random_scores(2)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", ends="ranked", budget=5).compress(view)
    for row in range(len(LENGTHS)):
        slots = slots_of(row)
        anchors = sorted(sorted(slots, key=lambda s: (-float(scores[row, 0, s]), s))[:5])
        members = {slot: [slot] for slot in anchors}
        for slot in slots:
            if slot not in anchors:
                members[bucket_of(slot, anchors)].append(slot)
        assert_means(view, keep, row, members)


def test_mean_score_divides_by_the_queries_that_could_see_the_key():
    scores = random_scores(3)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", score="mean", budget=6).compress(view)
    columns = max(LENGTHS)
    divided = torch.stack([scores[..., s] / (columns - s) for s in range(columns)], -1)
    for row in range(len(LENGTHS)):
        assert_means(view, keep, row, buckets(row, divided, 6))


def test_moving_average_discounts_each_older_query():
    attentions, _, _ = prompt_pass("llava_gqa", 3)
    policy, log = recording(policies.create("elastic", score="moving-average", momentum=0.8, budget=0.3))
    generate(tiny("llava_gqa", 3), policy, 2)
    prompt = prompt_of(tiny("llava_gqa", 3))
    for layer, attention in enumerate(attentions):
        seen = steps_of(log, layer)[0]
        for row, length in enumerate(prompt.lengths):
            start = prompt.columns - length
            average = [0.0] * prompt.columns
            for m in range(start, prompt.columns):
                for n in range(start, prompt.columns):
                    average[n] = 0.8 * average[n] + sum(float(attention[row, h, m, n]) for h in range(4)) / 4
            assert seen.view.statistics["importance"][row, 0, start:].tolist() == pytest.approx(
                average[start:], rel=1e-4, abs=1e-6
            )
            kept = kept_count(0.3, length, length)
            anchors = [start + i for i in choose_anchors(average[start:], kept)]
            assert positions_of(seen.view, seen.answer)[row][0] == sorted({start, *anchors, prompt.columns - 1})


def test_scope_head_chooses_for_each_kv_head_by_the_mean_of_its_group():
    attentions, _, _ = prompt_pass("llava_gqa", 3)
    policy, log = recording(policies.create("elastic", scope="head", budget=0.3))
    generate(tiny("llava_gqa", 3), policy, 2)
    prompt = prompt_of(tiny("llava_gqa", 3))
    for layer, attention in enumerate(attentions):
        seen = steps_of(log, layer)[0]
        for row, length in enumerate(prompt.lengths):
            start = prompt.columns - length
            for head in range(2):
                group = (2 * head, 2 * head + 1)
                sums = [
                    sum(float(attention[row, h, m, n]) for h in group for m in range(start, prompt.columns)) / 2
                    for n in range(start, prompt.columns)
                ]
                anchors = choose_anchors(sums, kept_count(0.3, length, length))
                stays = sorted({0, length - 1, *anchors})
                assert positions_of(seen.view, seen.answer)[row][head] == [start + i for i in stays]
                for k, i in enumerate(stays):
                    joined = [i] + [
                        j for j in range(length) if i in anchors and j not in stays and bucket_of(j, anchors) == i
                    ]
                    expected = mean_of(seen.view.values, row, head, [start + j for j in joined], [1.0] * len(joined))
                    assert seen.answer.values[row, head, k].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
                    assert float(seen.answer.counts[row, head, k]) == len(joined)


def test_scope_shared_averages_over_layers_and_keeps_the_same_everywhere():
    per_layer = [random_scores(10 + layer) for layer in range(4)]
    views = [hand_view(LENGTHS, {"importance": s}, layer=i, seed=i) for i, s in enumerate(per_layer)]
    policy = policies.create("elastic", scope="shared", budget=5)
    assert policy.served_at_once
    mean = (per_layer[0] + per_layer[1] + per_layer[2] + per_layer[3]) / 4
    for view, keep in zip(views, policy.compress_model(views), strict=True):
        for row in range(len(LENGTHS)):
            assert_means(view, keep, row, buckets(row, mean, 5))


def test_scope_shared_through_the_engine_keeps_the_same_in_all_layers():
    run = generate(tiny("llava_gqa", 3), policies.create("elastic", scope="shared", budget=0.3, decode="grow"))
    assert all(run.kept(layer) == run.kept(0) for layer in range(1, 4))


# --- what is merged


def test_merge_none_drops():
    scores = random_scores(4)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", merge="none", budget=0.4).compress(view)
    assert keep.keys is None
    assert keep.values is None
    for row, length in enumerate(LENGTHS):
        members = buckets(row, scores, kept_count(0.4, length, length))
        assert positions_of(view, keep)[row][0] == sorted(members)


def test_merge_cluster_is_ten_rounds_of_k_means_from_the_anchors():
    scores = random_scores(5)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", merge="cluster", budget=7).compress(view)
    for row in range(len(LENGTHS)):
        slots = slots_of(row)
        anchors = [slots[i] for i in choose_anchors(scores[row, 0, slots].tolist(), 7)]
        points = {s: view.keys[row, :, s].flatten().tolist() for s in slots}
        leaving = [s for s in slots[1:-1] if s not in anchors]
        centres = [points[a] for a in anchors]
        for _ in range(10):
            nearest = {s: min(range(len(anchors)), key=lambda k: math.dist(points[s], centres[k])) for s in leaving}
            centres = [
                [
                    sum(xs) / len(xs)
                    for xs in zip(points[a], *(points[s] for s in leaving if nearest[s] == k), strict=True)
                ]
                for k, a in enumerate(anchors)
            ]
        members = {s: [s] for s in (slots[0], slots[-1])}
        members |= {a: [a, *(s for s in leaving if nearest[s] == k)] for k, a in enumerate(anchors)}
        assert_means(view, keep, row, members)


def test_within_modality_joins_like_to_like_and_drops_what_has_no_anchor():
    scores = random_scores(6)
    visual = torch.zeros(3, max(LENGTHS), dtype=torch.bool)
    visual[0, 17:20] = visual[1, 5:15] = True  # the last row has no picture
    scores[0, 0, 17:20] = 0.0  # and no visual token of the first is an anchor
    view = hand_view(LENGTHS, {"importance": scores}, visual=visual)
    keep = policies.create("elastic", within_modality=True, budget=7).compress(view)
    for row in range(len(LENGTHS)):
        slots = slots_of(row)
        anchors = [slots[i] for i in choose_anchors(scores[row, 0, slots].tolist(), 7)]
        members = {slot: [slot] for slot in (slots[0], slots[-1], *anchors)}
        for slot in slots:
            alike = [a for a in anchors if visual[row, a] == visual[row, slot]]
            if slot not in members and alike:
                members[bucket_of(slot, alike)].append(slot)
        assert_means(view, keep, row, members)


def test_attention_weighted_mean():
    scores = random_scores(7)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", weighting="attention", budget=6).compress(view)
    for row in range(len(LENGTHS)):
        assert_means(view, keep, row, buckets(row, scores, 6), weights=scores[row, 0].tolist())


def test_count_bias_is_the_log_of_the_count():
    view = hand_view(LENGTHS, {"importance": random_scores(8)})
    keep = policies.create("elastic", count_bias=True, budget=6).compress(view)
    for row in range(len(LENGTHS)):
        for k in range(6):
            assert float(keep.bias[row, 0, k]) == pytest.approx(math.log(float(keep.counts[row, 0, k])))


def test_count_bias_acts_on_the_logits():
    plain = generate(tiny("llava_gqa"), policies.create("elastic", budget=0.3), 3)
    biased = generate(tiny("llava_gqa"), policies.create("elastic", budget=0.3, count_bias=True), 3)
    assert not torch.equal(plain.logits[1], biased.logits[1])


def test_merge_keys_no_leaves_keys_as_they_were():
    scores = random_scores(9)
    view = hand_view(LENGTHS, {"importance": scores})
    keep = policies.create("elastic", merge_keys="no", budget=6).compress(view)
    assert keep.keys is None
    for row in range(len(LENGTHS)):
        assert_means(view, keep, row, buckets(row, scores, 6), names=("values",))


def literal_turn(keys, steps):
    """Two planes, of frequencies 1 and 0.1, channel by channel."""
    out = keys.clone()
    batch, heads, slots, _ = keys.shape
    for b in range(batch):
        for h in range(heads):
            for s in range(slots):
                for plane, frequency in enumerate((1.0, 0.1)):
                    step = int(steps.expand(batch, heads, slots)[b, h, s])
                    z = complex(keys[b, h, s, plane], keys[b, h, s, plane + 2]) * cmath.exp(1j * frequency * step)
                    out[b, h, s, plane], out[b, h, s, plane + 2] = z.real, z.imag
    return out


@pytest.mark.parametrize("axes", [0, 1, 3])
def test_merge_keys_rerotate_turns_each_key_to_the_position_of_its_anchor(axes):
    scores = random_scores(9)
    view = hand_view(LENGTHS, {"importance": scores})
    view.turn = literal_turn
    columns = torch.arange(max(LENGTHS)).expand(3, max(axes, 1), -1).clone()
    if axes == 3:
        columns[:, 1, 12:] += 5  # one axis jumps: nothing can be turned across that place
    if axes:
        view.coordinates = columns
    policy = policies.create("elastic", merge_keys="rerotate", budget=6)
    assert policy.needs_rotation
    keep = policy.compress(view)
    crossed = 0
    for row in range(len(LENGTHS)):
        members = buckets(row, scores, 6)
        assert_means(view, keep, row, members, names=("values",))
        for k, slot in enumerate(sorted(members)):
            for head in range(2):
                total = torch.zeros(4, dtype=torch.float64)
                for s in members[slot]:
                    split = axes == 3 and (s < 12) != (slot < 12)
                    crossed += split
                    step = torch.tensor([[[0 if split else slot - s]]])
                    total += literal_turn(view.keys[row : row + 1, head : head + 1, s : s + 1], step)[0, 0, 0]
                torch.testing.assert_close(keep.keys[row, head, k], total / len(members[slot]))
    assert bool(crossed) == (axes == 3)


# --- what leaves while generating


def decode_steps(**options):
    """For each layer and row: the positions held before each deletion, the statistics at that time, and the prompt."""
    policy, log = recording(policies.create("elastic", **options))
    generate(tiny("llava_gqa", 3), policy)
    return [steps_of(log, layer) for layer in range(4)], prompt_of(tiny("llava_gqa", 3))


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({"discard": "recent"}, lambda held, kept: held - 2),
        ({"anchor": "recent", "distance": 4}, lambda held, kept: max(1, held - 1 - 4)),
        ({"anchor": "recent", "distance": 25}, lambda held, kept: max(1, held - 1 - 25)),
        ({"distance": 3, "decode": "bounded"}, lambda held, kept: max(1, kept - 3)),
        ({"select": "official", "distance": 3}, lambda held, kept: max(1, kept - 3)),
    ],
)
def test_which_entry_leaves(options, index):
    layers, prompt = decode_steps(budget=0.3, **options)
    for first, *steps in layers:
        queues = [list(row[0]) for row in positions_of(first.view, first.answer)]
        kept = [len(queue) for queue in queues]
        for step, seen in enumerate(steps, start=1):
            for row, queue in enumerate(queues):
                queue.append(prompt.columns + step - 1)
                assert sorted(p for p in seen.view.positions[row, 0].tolist() if p >= 0) == queue
                tokens = prompt.lengths[row] + step
                if options.get("decode") == "bounded":
                    over = len(queue) > kept[row]
                elif options.get("select") == "official":
                    over = int(len(queue) - tokens * 0.3) >= 1
                else:
                    over = len(queue) / tokens > 0.3
                if over:
                    del queue[index(len(queue), kept[row])]


def test_discard_frequency_drops_the_least_attended_of_all_queries_so_far():
    layers, prompt = decode_steps(budget=0.3, discard="frequency")
    for first, *steps in layers:
        scores = []
        for row, held in enumerate(positions_of(first.view, first.answer)):
            column = first.view.statistics["importance"][row, 0].tolist()
            scores.append({p: column[p] for p in held[0]})
        for step, seen in enumerate(steps, start=1):
            for row, known in enumerate(scores):
                known[prompt.columns + step - 1] = 0.0
                located = seen.view.positions[row, 0].tolist()
                assert {p for p in located if p >= 0} == set(known)
                for slot, p in enumerate(located):
                    if p >= 0:
                        known[p] += sum(float(seen.view.weights[row, h, slot]) for h in range(4)) / 4
                if len(known) / (prompt.lengths[row] + step) > 0.3:
                    inner = sorted(known)[1:-1]
                    del known[min(inner, key=lambda p: known[p])]


def test_every_step_stays_within_the_bound():
    for decode in ("ratio", "bounded"):
        layers, _ = decode_steps(budget=0.3, decode=decode)
        for first, *steps in layers:
            kept = first.answer.held
            for seen in steps:
                for row, held in enumerate(seen.view.held):
                    share = 0.3 * seen.view.seen[row] if decode == "ratio" else kept[row]
                    assert held <= share + 2  # the newest token, and one deletion a step


def test_random_options_run_and_hold_what_they_say():
    """Combinations that no other test names: a batch runs through, and positions are never lost or doubled."""
    from kvcli.policies import options
    from kvcli.policies.elastic import Elastic

    rng = random.Random(0)
    choices = {o.name: o.choices for o in options(Elastic) if o.choices}
    for _ in range(12):
        picked = {name: rng.choice(values) for name, values in choices.items() if name != "positions"}
        if picked["select"] == "official":
            picked["ends"] = "protected"
        run = generate(tiny("llava_gqa", 3), policies.create("elastic", budget=0.4, **picked), 6)
        for layer in range(4):
            for row in run.kept(layer):
                for head in row:
                    assert len(head) == len(set(head))
                    assert head[-1] == prompt_of(tiny("llava_gqa", 3)).columns + 4


@pytest.mark.parametrize("decode", ["grow", "bounded"])
def test_compressed_positions_are_those_of_a_stock_cache_that_only_knows_its_length(decode):
    """The released evaluation: nobody says where a token stands, so the model counts the entries it holds."""
    model = tiny("llava_gqa")
    policy, log = recording(
        policies.create("elastic", budget=0.3, positions="compressed", decode=decode, discard="recent")
    )
    run = generate(model, policy, 6)
    cache = DynamicCache()
    for layer in range(4):
        answer = steps_of(log, layer)[0].answer
        cache.update(answer.keys, answer.values, layer)
    tokens = run.sequences[:, -6:]
    with torch.inference_mode():
        for step in range(1, 6):
            out = model.model.model.language_model(input_ids=tokens[:, step - 1 : step], cache=cache)
            logits = model.model.lm_head(out.last_hidden_state)[:, -1]
            torch.testing.assert_close(run.logits[step].double(), logits, rtol=1e-4, atol=1e-4)
            if decode == "bounded":  # the entry before the newest leaves
                for held in cache.layers:
                    held.keys = torch.cat([held.keys[:, :, :-2], held.keys[:, :, -1:]], 2)
                    held.values = torch.cat([held.values[:, :, :-2], held.values[:, :, -1:]], 2)
