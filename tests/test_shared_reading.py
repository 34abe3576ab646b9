"""A prompt that is read once for many policies gives each of them what it would have read by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from kvcli import fidelity, policies
from kvcli.engine.session import Decoding, Request, Session
from kvcli.engine.shared import Reading, shareable

STEPS = Decoding(max_new_tokens=12)
PROMPTS = ("describe this picture", "tell a long story of two people and a dog near the sea", "why")
POLICIES = [policies.create(name, budget=0.4) for name in policies.names()] + [
    policies.create("hae", budget=None, alpha=0.3, bin=2, broadcast="none"),
    policies.create("elastic", budget=0.4, scope="shared", score="moving-average", discard="frequency"),
    policies.create("elastic", budget=0.4, scope="head", merge_keys="rerotate", positions="compressed"),
]


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def references(session: Session) -> list[fidelity.Reference]:
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy() for _ in PROMPTS]
    requests = [Request((Image.fromarray(p),), prompt, key=prompt) for p, prompt in zip(noise, PROMPTS, strict=True)]
    return fidelity.look_up(session, [session.prepare(request) for request in requests], STEPS)


@pytest.fixture(scope="module")
def reading(session: Session, references: list[fidelity.Reference]) -> Reading:
    return Reading(session, [r.prepared for r in references], POLICIES, STEPS)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_answers_and_scores_are_those_of_a_reading_of_its_own(session, references, reading, policy):
    outcomes = session.run([r.prepared for r in references], policy, STEPS)
    tokens, _ = reading.answer(policy)
    assert [tuple(row[: len(o.tokens)]) for row, o in zip(tokens, outcomes, strict=True)] == [
        o.tokens for o in outcomes
    ]
    scorer = fidelity.Scorer(references)
    cache = reading.force(policy, [r.answer for r in references], scorer)
    for mine, own in zip(scorer.scores(), fidelity.score(session, references, policy), strict=True):
        assert vars(mine) == pytest.approx(vars(own), abs=1e-9)
    longest = max(len(o.tokens) for o in outcomes)
    for held, own in zip(cache.held(), outcomes, strict=True):
        if len(own.tokens) == longest:  # an outcome is accounted at its row's own end, the cache at the batch's
            assert held == pytest.approx(own.kept, abs=0.51)


def test_a_policy_that_changes_the_reading_is_not_served(session):
    assert shareable(session, policies.create("hae"))
    assert not shareable(session, policies.create("hae", broadcast="hidden"))
