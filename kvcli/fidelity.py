"""How true a compressed cache is to the full cache of the same model. No labels are needed.

Knows sessions and policies, nothing of files and the terminal. `look_up` lets the full cache answer; `measure` compares
one policy with that.

Perplexity follows the protocol of Elastic Cache (Liu et al., ECCV 2024, section 4.1): an answer is fed token by token
and the policy acts after every token. All tokens of the answer count, the end-of-text token too when the model wrote
it: the first is predicted by the prompt, before anything has left the cache; the last is predicted but never fed.
(The released code leaves the last one out.) A given text is tokenised as it stands, without special tokens.

All scores are of the model's raw distribution. Answers are written with the user's and the model's own settings, such
as a repetition penalty: with one, two caches that agree on every fed token may still write different answers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from rouge_score import rouge_scorer
from torch import Tensor

from kvcli.engine.forcing import OnLogits, force, watched
from kvcli.engine.session import Decoding, Outcome, Prepared, Session
from kvcli.engine.shared import Reading, shareable
from kvcli.errors import UsageError
from kvcli.policies.base import Policy
from kvcli.policies.full import Full


@dataclass(frozen=True)
class Reference:
    """What the full cache did with one request.

    outcome: its greedy answer. answer: the token ids whose perplexity is measured, that answer or a given text.
    logits: [len(answer), vocabulary] on the host, the full cache's scores while `answer` was fed.
    """

    prepared: Prepared
    outcome: Outcome
    answer: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True)
class Scores:
    """What a policy makes of an answer of `tokens` tokens that is fed to it.

    nll and nll_full: mean negative log-likelihood of the tokens in nats, with the policy and with the full cache.
    agreement: share of steps where both rank the same token first. kl: mean KL(full || policy) in nats.
    """

    tokens: int
    nll: float
    nll_full: float
    agreement: float
    kl: float

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll)

    @property
    def perplexity_full(self) -> float:
        """The same with the full cache."""
        return math.exp(self.nll_full)


@dataclass(frozen=True)
class Fidelity(Scores):
    """One policy against the full cache on one request.

    outcome: the policy's own greedy answer. Between that and the full cache's: rouge_l (F, 0 to 1) and
    first_divergence, the index of the first token that differs, None when none does.
    """

    outcome: Outcome
    rouge_l: float
    first_divergence: int | None


def look_up(
    session: Session, batch: Sequence[Prepared], decoding: Decoding, texts: Sequence[str] | None = None
) -> list[Reference]:
    """Answer a batch with the full cache. texts: answers to measure perplexity on, instead of the full cache's own.

    Holds answer length x vocabulary scores of each row in memory. Raises `UsageError` for an empty text.
    """
    session, steps = session.plain, list[Tensor]()

    def note(step: int, logits: Tensor) -> None:
        steps.append(logits)  # moved to the host after the run, which is timed

    with watched(session.model, note):
        outcomes = session.run(batch, Full(), greedy(decoding))
    answers = [outcome.tokens for outcome in outcomes]
    if texts is not None:
        answers = [tokenize(session, text) for text in texts]
        steps.clear()
        force(session, batch, Full(), answers, note)
    logits = torch.stack([step.cpu() for step in steps], 1)
    return [
        Reference(prepared, outcome, answer, logits[row, : len(answer)].clone())
        for row, (prepared, outcome, answer) in enumerate(zip(batch, outcomes, answers, strict=True))
    ]


def read(session: Session, references: Sequence[Reference], policies: Sequence[Policy]) -> Reading | None:
    """The references' prompts, read once for those of the policies that can start from there; None when none can."""
    sharing = [policy for policy in policies if shareable(session, policy)]
    if not sharing:
        return None
    longest = max(len(r.answer) for r in references)
    return Reading(session, [r.prepared for r in references], sharing, Decoding(max_new_tokens=longest))


def score(
    session: Session, references: Sequence[Reference], policy: Policy, reading: Reading | None = None
) -> list[Scores]:
    """Feed the references' answers to a policy, all in one batch. reading: their prompts, where they were read."""
    scorer = Scorer(references)
    _feed(session, references, policy, reading, scorer)
    return scorer.scores()


def surprise(
    session: Session, references: Sequence[Reference], policy: Policy, reading: Reading | None = None
) -> tuple[float, int]:
    """Sum of the negative log-likelihoods (nats) of the references' answers under a policy, and the tokens they have.

    All in one batch. The references' scores are not needed, and may be empty.
    """
    answers, total = [r.answer for r in references], 0.0

    def add(step: int, logits: Tensor) -> None:
        nonlocal total
        rows = [row for row, answer in enumerate(answers) if step < len(answer)]
        tokens = torch.tensor([answers[row][step] for row in rows], device=logits.device)
        total -= float(log_probabilities(logits[rows]).gather(-1, tokens[:, None]).sum())

    _feed(session, references, policy, reading, add)
    return total, sum(map(len, answers))


def _feed(
    session: Session, references: Sequence[Reference], policy: Policy, reading: Reading | None, on_logits: OnLogits
) -> None:
    answers = [r.answer for r in references]
    if reading is not None and reading.serves(policy):
        reading.force(policy, answers, on_logits)
    else:
        force(session, [r.prepared for r in references], policy, answers, on_logits)


def measure(
    session: Session,
    references: Sequence[Reference],
    policy: Policy,
    decoding: Decoding,
    reading: Reading | None = None,
) -> list[Fidelity]:
    """Compare a policy with the full cache, all references in one batch: one free run that is timed from the first
    token of the prompt, one that is fed the answers. The latter is not needed when all answers come out as fed."""
    steps: list[Tensor] = []
    with watched(session.model, lambda step, logits: steps.append(logits)):
        outcomes = session.run([r.prepared for r in references], policy, greedy(decoding))
    if all(outcome.tokens == reference.answer for outcome, reference in zip(outcomes, references, strict=True)):
        scorer = Scorer(references)
        for step, logits in enumerate(steps):
            scorer(step, logits)
        scores = scorer.scores()
    else:
        scores = score(session, references, policy, reading)
    return [compare(*each) for each in zip(references, outcomes, scores, strict=True)]


def itself(reference: Reference) -> Fidelity:
    """The full cache against itself; nothing is run again."""
    scorer = Scorer([reference])
    for step, logits in enumerate(reference.logits):
        scorer(step, logits[None])
    return compare(reference, reference.outcome, scorer.scores()[0])


def compare(reference: Reference, outcome: Outcome, scores: Scores) -> Fidelity:
    """Scores, and how an answer differs from the full cache's."""
    return Fidelity(
        **vars(scores),
        outcome=outcome,
        rouge_l=rouge_l(reference.outcome.text, outcome.text),
        first_divergence=first_divergence(reference.outcome.tokens, outcome.tokens),
    )


class Answered(Protocol):
    """An answer and what the full cache said while it was fed; see `Reference`."""

    @property
    def answer(self) -> tuple[int, ...]: ...
    @property
    def logits(self) -> Tensor: ...


class Scorer:
    """Compares raw scores, step by step, with what the full cache said."""

    def __init__(self, references: Sequence[Answered]) -> None:
        self.references = references
        self.sums: Tensor | None = None  # [B, 4]: nll, nll_full, agreement, kl

    def __call__(self, step: int, logits: Tensor) -> None:
        last = [min(step, len(reference.answer) - 1) for reference in self.references]
        over = torch.tensor([step >= len(reference.answer) for reference in self.references], device=logits.device)
        full = torch.stack([r.logits[t] for r, t in zip(self.references, last, strict=True)]).to(logits.device)
        token = torch.tensor([r.answer[t] for r, t in zip(self.references, last, strict=True)], device=logits.device)
        ours, theirs = log_probabilities(logits), log_probabilities(full)
        kl = torch.where(theirs.isneginf(), 0.0, theirs.exp() * (theirs - ours)).sum(-1)
        nll, nll_full = (-t.gather(-1, token[:, None])[:, 0] for t in (ours, theirs))
        agreement = (logits.argmax(-1) == full.argmax(-1)).to(kl.dtype)
        new = torch.stack([nll, nll_full, agreement, kl], -1).masked_fill(over[:, None], 0.0)
        self.sums = new if self.sums is None else self.sums + new

    def scores(self) -> list[Scores]:
        """Means over the answer of each row."""
        assert self.sums is not None
        counts = [len(reference.answer) for reference in self.references]
        return [
            Scores(count, *(total / count for total in row))
            for count, row in zip(counts, self.sums.tolist(), strict=True)
        ]


def perplexity(results: Sequence[Scores], *, full: bool = False) -> float:
    """exp of the mean over all tokens of all results, as papers report it. full: with the full cache."""
    total = sum((r.nll_full if full else r.nll) * r.tokens for r in results)
    return math.exp(total / sum(r.tokens for r in results))


def greedy(decoding: Decoding) -> Decoding:
    """The same without draws and beams."""
    return dataclasses.replace(decoding, temperature=0.0, top_p=1.0, num_beams=1)


def tokenize(session: Session, text: str) -> tuple[int, ...]:
    """The token ids of a given answer. Raises `UsageError` when there is none."""
    ids = session.tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
    if not ids:
        raise UsageError("an empty text was given as reference answer; remove it or fill it in")
    return tuple(ids)


def first_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None when both are the same."""
    for index, (one, other) in enumerate(zip(reference, candidate, strict=False)):
        if one != other:
            return index
    shorter, longer = sorted((len(reference), len(candidate)))
    return None if shorter == longer else shorter


def rouge_l(reference: str, candidate: str) -> float:
    """ROUGE-L F of two texts, 0 to 1 (Lin, 2004); two texts without a single word are alike only when equal."""
    if reference == candidate:
        return 1.0
    return float(_scorer().score(reference, candidate)["rougeL"].fmeasure)


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-softmax in float32 at least."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)


class Words:
    """Words in lower case, also beyond ASCII; scripts without spaces are cut into characters."""

    pattern = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W_\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return self.pattern.findall(text.lower())


@cache
def _scorer() -> Any:
    return rouge_scorer.RougeScorer(["rougeL"], tokenizer=Words())
