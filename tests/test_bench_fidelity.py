"""The fidelity bench: it measures what `kvcli.fidelity` does, goes on where it stopped, and draws fair conclusions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from kvcli import fidelity
from kvcli.bench import fidelity as bench
from kvcli.bench import fidelity_page
from kvcli.bench.arms import BUDGETS, CLAIMS, POLICIES, Claim, all_arms, arm
from kvcli.engine.session import Decoding, Session

STEPS = Decoding(max_new_tokens=8)
ARMS = [
    arm("h2o", {}, 0.5, free=True),
    arm("elastic", {"merge": "none"}, 0.5),
    arm("hae", {"broadcast": "hidden", "alpha": 0.3}),
]


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(2)
    for name in "abc":
        noise = torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy()
        Image.fromarray(noise).save(tmp_path / f"{name}.png")
    return bench.find_photos(tmp_path, 3)


def run(session, photos, records, arms=ARMS, batch=2):
    bench.run(session, photos, arms, records, STEPS, prompt=bench.PROMPT, batch=batch)
    return list(bench.read(records))


def test_records_say_what_the_library_measures(session, photos, tmp_path):
    records = {(r["photo"], r["arm"]): r for r in run(session, photos, tmp_path / "records.jsonl")}
    assert len(records) == 9
    prepared = [session.prepare(bench._request(photo, bench.PROMPT)) for photo in photos]
    references = fidelity.look_up(session, prepared, STEPS)
    for each in ARMS:
        for photo, found in zip(photos, fidelity.measure(session, references, each.create(), STEPS), strict=True):
            record = records[photo.name, each.key]
            for name in ("tokens", "nll", "nll_full", "agreement", "kl"):
                assert record[name] == pytest.approx(getattr(found, name), abs=1e-9)
            if each.free:
                assert record["rouge_l"] == found.rouge_l
                assert record["first_divergence"] == found.first_divergence
            assert 0 < record["kept"] <= record["seen"] == found.outcome.prompt_tokens + found.tokens - 1


def test_a_run_goes_on_where_it_was_stopped(session, photos, tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    expected = run(session, photos, whole)
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:4]) + lines[4][:30])
    again = run(session, photos, cut)
    assert sorted((r["photo"], r["arm"]) for r in again) == sorted((r["photo"], r["arm"]) for r in expected)
    by_key = {(r["photo"], r["arm"]): r for r in again}
    for record in expected:
        assert by_key[record["photo"], record["arm"]]["nll"] == pytest.approx(record["nll"], abs=1e-9)
    before = cut.read_text()
    run(session, photos, cut)
    assert cut.read_text() == before


def test_every_arm_can_be_made_and_every_claim_is_about_arms_that_are_measured():
    arms = all_arms()
    assert len({a.key for a in arms}) == len(arms)
    for each in arms:
        each.create()
    keys = {a.key for a in arms}
    for claim in CLAIMS:
        for budget in claim.budgets:
            assert {a.key for a in claim.arms(budget)} <= keys, claim.text


def records_of(better: list[float], worse: list[float], claim: Claim) -> dict[str, dict[str, dict[str, float]]]:
    return {
        each.key: {str(i): {"nll": x} for i, x in enumerate(losses)}
        for each, losses in zip(claim.arms(0.5), (better, worse), strict=True)
    }


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        ([1.0, 1.1, 1.2, 1.3], [1.5, 1.6, 1.72, 1.8], "holds"),
        ([1.5, 1.6, 1.72, 1.8], [1.0, 1.1, 1.2, 1.3], "fails: the other way round"),
        ([1.0, 1.9, 1.0, 1.9], [1.5, 1.4, 1.5, 1.4], "no difference seen"),
        ([1.0], [2.0], "not measured"),
    ],
)
def test_a_claim_needs_a_difference_beyond_its_error(better, worse, verdict):
    claim = CLAIMS[0]
    found = fidelity_page.difference(records_of(better, worse, claim), claim, 0.5)
    assert fidelity_page.verdict(claim, found) == verdict
    if found is not None:
        each = [a - b for a, b in zip(better, worse, strict=True)]
        assert found[0] == pytest.approx(sum(each) / len(each))


def test_the_page_has_every_policy_and_the_perplexity_over_all_tokens(tmp_path):
    records = [
        {
            "arm": arm(name, options, budget).key,
            "photo": photo,
            "tokens": tokens,
            "nll": nll,
            "nll_full": 0.5,
            "agreement": 0.9,
            "kl": 0.1,
            "kept": 50.0,
            "seen": 100,
            "bytes": 400,
            "bytes_full": 800,
            "rouge_l": 0.75,
            "first_divergence": None,
        }
        for name, options in POLICIES
        for budget in BUDGETS
        for photo, tokens, nll in (("a", 10, 1.0), ("b", 30, 2.0))
    ]
    text = fidelity_page.write(records, fidelity_page.Setting("a command", "a model", "why?", 30))
    ppl = f"{math.exp((10 * 1.0 + 30 * 2.0) / 40):.3f}"
    assert text.count(f"| {ppl} | 90.0 % | 0.1000 | 0.750 | none | 50.0 % | 50.0 % |") >= 3 * len(POLICIES)
    assert f"{math.exp(0.5):.3f}" in text
    assert "2 photos, 40 tokens" in text
    assert json.dumps("why?") in text
