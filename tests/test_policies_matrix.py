"""Every installed policy through the engine on four kinds of attention, alone and in a batch of unequal rows."""

from __future__ import annotations

from dataclasses import replace

import architectures
import pytest
import torch
from policy_lab import generate, prompt_of, settings, tiny

from kvcli import policies
from kvcli.engine.adapter import attached
from kvcli.engine.forcing import Force
from kvcli.policies.contract import Prompt

TOKENS = 8
ARCHITECTURES = ["llava_gqa", "qwen2_5_vl", "gemma3", "paligemma"]
POLICIES = [name for name in policies.names() if name != "full"]
VARIANTS = [
    ("elastic", {"scope": "head", "merge_keys": "rerotate", "count_bias": True, "discard": "frequency"}),
    ("elastic", {"scope": "shared", "merge": "cluster", "score": "moving-average", "anchor": "recent"}),
    ("elastic", {"select": "official", "positions": "compressed", "distance": 3}),
    ("elastic", {"within_modality": True, "weighting": "attention", "decode": "bounded", "distance": 3}),
    ("h2o", {"decode": "ratio", "group": "max"}),
    ("streaming", {"positions": "original", "decode": "ratio"}),
    ("hae", {"bin": 2}),
    ("hae", {"bin": 2, "marks": "fixed", "broadcast": "none", "criterion": "variance"}),
    ("hae", {"broadcast": "hidden", "bin": 3, "recent": 1}),
    ("hae", {"budget": None, "alpha": 0.3, "bin": 2}),
    ("scissorhands", {"drop": 2, "history": 5}),
    ("fastgen", {"budget": None, "recovery": 0.7}),
    ("snapkv", {"window": 4, "pooling": "max"}),
]


def policy(name: str, **options):
    return policies.create(name, **{"budget": 0.4, **options})


def alone(model: architectures.Tiny, row: int) -> architectures.Tiny:
    """One row of a batch without its padding."""
    real = model.inputs["attention_mask"][row].bool()
    grids = model.inputs.get("image_grid_thw")
    inputs = {}
    for name, value in model.inputs.items():
        if value.shape[:2] == model.inputs["input_ids"].shape:
            inputs[name] = value[row : row + 1, real]
        elif name == "pixel_values" and grids is not None:
            inputs[name] = value.split(grids.prod(-1).tolist())[row]
        else:
            inputs[name] = value[row : row + 1]
    return replace(model, inputs=inputs)


def check_bounds(run, asked, prompt) -> None:
    """No layer ever used more slots than what the prompt kept and the growth that the policy announced."""
    for layer in run.cache.ours:
        assert layer.store.extent <= max(layer.store.kept or [prompt.columns]) + asked.growth(prompt)


def check(name: str, options: dict, architecture: str) -> None:
    model = tiny(architecture, 3)
    asked, prompt = policy(name, **options), prompt_of(model, TOKENS)
    run = generate(model, asked, TOKENS)
    again = generate(model, asked, TOKENS)
    check_bounds(run, asked, prompt)
    for layer in range(len(run.cache.ours)):
        assert run.kept(layer) == again.kept(layer)
    assert torch.equal(run.sequences, again.sequences)
    for row, length in enumerate(prompt.lengths):
        one = alone(model, row)
        single = generate(one, asked, TOKENS)
        check_bounds(single, asked, prompt_of(one, TOKENS))
        padding = prompt.columns - length
        assert torch.equal(single.sequences[0, length:], run.sequences[row, prompt.columns :])
        for layer in range(len(run.cache.ours)):
            shifted = [[p - padding for p in head] for head in run.kept(layer)[row]]
            both = single.kept(layer)[0]
            heads = max(len(both), len(shifted))
            assert shifted * (heads // len(shifted)) == both * (heads // len(both))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_batch_equals_its_rows_and_stays_within_its_bound(name, architecture):
    check(name, {}, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_so_does_each_variant(name, options, architecture):
    check(name, options, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [n for n in architectures.names() if n not in ARCHITECTURES])
@pytest.mark.parametrize("name", POLICIES)
def test_every_architecture_answers_the_same_twice_within_the_bound(name, architecture):
    model = tiny(architecture, 3)
    asked = policy(name)
    run, again = generate(model, asked, TOKENS), generate(model, asked, TOKENS)
    check_bounds(run, asked, prompt_of(model, TOKENS))
    assert torch.equal(run.sequences, again.sequences)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_budget_gives_the_library_s_own_answer(architecture, batch):
    model = tiny(architecture, batch)
    with torch.inference_mode():
        stock = model.model.generate(**settings(model, TOKENS)).sequences
    for name in POLICIES:
        assert torch.equal(generate(model, policy(name, budget=1.0), TOKENS).sequences, stock), name


def test_policies_are_listed_without_torch():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvcli import policies\n"
        "for name in policies.names():\n"
        "    info = policies.describe(name)\n"
        "    assert info.summary and info.source and all(o.help for o in info.options), name\n"
        "    policies.create(name)\n"
        "print(len(policies.names()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(POLICIES) + 1


def forced(model: architectures.Tiny, asked, answers: torch.Tensor) -> list[float]:
    """Summed log-probability of an answer for each row, fed token by token under a policy."""
    run = generate(model, asked, answers.shape[1], [Force(answers.tolist(), architectures.PAD)])
    steps = zip(run.logits, answers.T, strict=True)
    return sum(logits.double().log_softmax(-1).gather(-1, token[:, None])[:, 0] for logits, token in steps).tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in POLICIES]
    + [
        ("hae", {"bin": 2, "marks": "fixed"}),
        ("scissorhands", {"drop": 2}),
        ("elastic", {"discard": "frequency", "distance": 3, "decode": "bounded"}),
    ],
)
def test_beams_carry_what_a_policy_remembers(name, options):
    """A beam's score is that of its text fed without beams: nothing was mixed up when beams changed places."""
    model, asked = tiny("llava_gqa", 3), policy(name, **options)
    run = generate(model, asked, TOKENS, num_beams=3, output_scores=True)
    answers = run.sequences[:, prompt_of(model).columns :]
    assert [score * TOKENS for score in run.scores] == pytest.approx(forced(model, asked, answers), rel=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_a_later_turn_is_compressed_together_with_what_the_first_left(name):
    """The cache of turn one goes on with a longer prompt, and is held to the budget of all that was said."""
    model, asked = tiny("llava_gqa"), policy(name)
    run = generate(model, asked, TOKENS)
    words = torch.arange(20, 37)[None]
    ids = torch.cat([run.sequences, words], 1)
    cache, lengths = run.cache, (ids.shape[1],)
    cache.announce(Prompt(torch.ones_like(ids, dtype=torch.bool), ids == model.image_token, lengths, TOKENS))
    with torch.inference_mode(), attached(model.model, cache):
        out = model.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=TOKENS, do_sample=False
        )
    assert out.shape == (1, ids.shape[1] + TOKENS)
    for layer in cache.ours:
        assert layer.store.kept == [asked.target(lengths[0])]
        assert layer.store.seen == ids.shape[1] + TOKENS - 1
        for head in layer.store.located()[0]:
            held = [p for p in head.tolist() if p >= 0]
            assert len(held) == len(set(held))
            assert len(held) <= layer.store.kept[0] + asked.growth(cache.prompt)
