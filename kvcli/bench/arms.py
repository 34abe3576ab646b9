"""What the fidelity bench compares, and the papers' claims that it tests.

Knows policies and their options by name; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcli import policies
from kvcli.policies.base import Policy

BUDGETS = (0.5, 0.2, 0.1)
PAPER_BIN = 16
"""Entries in HAE's bin here: answers are shorter than the paper's stories, and a bin of 64 would never be emptied."""


@dataclass(frozen=True)
class Arm:
    """A policy with its options. budget None: the policy's own thresholds. free: whether it also answers by itself."""

    policy: str
    options: tuple[tuple[str, Any], ...] = ()
    budget: float | None = None
    free: bool = False

    @property
    def options_text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options)

    @property
    def key(self) -> str:
        """One line that names the arm in records."""
        budget = "own thresholds" if self.budget is None else f"{self.budget:g}"
        return " ".join(part for part in (self.policy, self.options_text, f"@ {budget}") if part)

    def create(self) -> Policy:
        return policies.create(self.policy, budget=self.budget, **dict(self.options))


@dataclass(frozen=True)
class Claim:
    """`better` is said to lose less than `worse`, both at `budget`. Each is a policy and its options."""

    text: str
    source: str
    better: tuple[str, dict[str, Any]]
    worse: tuple[str, dict[str, Any]]
    budgets: tuple[float, ...] = (0.5,)

    def arms(self, budget: float) -> tuple[Arm, Arm]:
        return arm(*self.better, budget=budget), arm(*self.worse, budget=budget)


def arm(policy: str, options: dict[str, Any] | None = None, budget: float | None = None, free: bool = False) -> Arm:
    return Arm(policy, tuple(sorted((options or {}).items())), budget, free)


POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("elastic", {}),
    ("h2o", {}),
    ("streaming", {}),
    ("random", {}),
    ("snapkv", {}),
    ("elastic", {"select": "official"}),
    ("elastic", {"merge": "none"}),
    ("hae", {"bin": PAPER_BIN}),
    ("scissorhands", {}),
    ("fastgen", {}),
    ("streaming", {"positions": "original"}),
)
"""Compared at every budget, with answers of their own."""

ELASTIC: tuple[dict[str, Any], ...] = (
    {"merge": "cluster"},
    {"discard": "recent"},
    {"discard": "frequency"},
    {"scope": "head"},
    {"scope": "shared"},
    {"score": "mean"},
    {"score": "moving-average"},
    {"merge_keys": "no"},
    {"merge_keys": "rerotate"},
    {"count_bias": True},
    {"merge_keys": "rerotate", "count_bias": True, "weighting": "attention"},
    {"within_modality": True},
    {"weighting": "attention"},
    {"positions": "compressed", "select": "official"},
    {"positions": "compressed"},
    {"ends": "ranked"},
    {"anchor": "recent"},
    {"decode": "bounded"},
    {"decode": "grow"},
)
HAE: tuple[dict[str, Any], ...] = (
    {"decode": "grow"},
    {"bin": PAPER_BIN, "marks": "fixed"},
    {"bin": PAPER_BIN, "recent": 0, "sinks": 0},
    {"bin": PAPER_BIN, "broadcast": "none"},
    {"bin": PAPER_BIN, "criterion": "variance"},
)

CLAIMS = (
    Claim("Elastic Cache loses less than H2O", "Elastic Cache, Fig. 2", ("elastic", {}), ("h2o", {}), BUDGETS),
    Claim(
        "Elastic Cache loses less than a local window",
        "Elastic Cache, Fig. 2",
        ("elastic", {}),
        ("streaming", {}),
        BUDGETS,
    ),
    Claim(
        "merging loses less than dropping",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"merge": "none"}),
        BUDGETS,
    ),
    Claim(
        "merging by position loses less than by clusters",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"merge": "cluster"}),
        (0.5, 0.2),
    ),
    Claim(
        "a fixed truncation point loses less than dropping the most recent",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"discard": "recent"}),
        (0.5, 0.2),
    ),
    Claim(
        "a fixed truncation point loses less than dropping by frequency",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"discard": "frequency"}),
        (0.5, 0.2),
    ),
    Claim(
        "a choice per layer loses less than one for all layers",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"scope": "shared"}),
        (0.5, 0.2),
    ),
    Claim(
        "a choice per layer loses less than one per head",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"scope": "head"}),
        (0.5, 0.2),
    ),
    Claim(
        "summed attention loses less than mean attention",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"score": "mean"}),
        (0.5, 0.2),
    ),
    Claim(
        "summed attention loses less than a moving average",
        "Elastic Cache, Tab. 3",
        ("elastic", {}),
        ("elastic", {"score": "moving-average"}),
        (0.5, 0.2),
    ),
    Claim(
        "selection by rank loses less than the released selection",
        "ours: the released code compares indices with ranks",
        ("elastic", {}),
        ("elastic", {"select": "official"}),
        BUDGETS,
    ),
    Claim(
        "true positions lose less than the released numbering",
        "ours: the released evaluation numbers queries by the compressed length",
        ("elastic", {}),
        ("elastic", {"positions": "compressed"}),
        (0.5, 0.2),
    ),
    Claim(
        "HAE loses no more than H2O",
        "HAE, Tab. 2 and 3",
        ("hae", {"bin": PAPER_BIN}),
        ("h2o", {}),
        BUDGETS,
    ),
    Claim(
        "the first layer's choice loses no more than one per layer",
        "HAE, section 4.4",
        ("hae", {"bin": PAPER_BIN}),
        ("hae", {"bin": PAPER_BIN, "broadcast": "none"}),
        (0.2,),
    ),
    Claim(
        "guarding sinks and recent entries loses less than the paper's bin without",
        "ours: new entries have had no time to gather attention",
        ("hae", {"bin": PAPER_BIN}),
        ("hae", {"bin": PAPER_BIN, "recent": 0, "sinks": 0}),
        (0.2,),
    ),
    Claim(
        "sinks moved next to recent entries lose less than sinks left where they were",
        "StreamingLLM, section 3.2",
        ("streaming", {}),
        ("streaming", {"positions": "original"}),
        BUDGETS,
    ),
    Claim("H2O loses less than chance", "H2O", ("h2o", {}), ("random", {}), BUDGETS),
)


def all_arms() -> list[Arm]:
    """Every arm once, the ones that matter most first."""
    arms = [arm(name, options, budget, free=True) for budget in BUDGETS for name, options in POLICIES]
    arms += [arm("elastic", options, budget) for budget in (0.2, 0.5) for options in ELASTIC]
    arms += [arm("hae", options, 0.2) for options in HAE]
    arms += [
        arm("hae", {"bin": PAPER_BIN}, free=True),
        arm("hae", {"bin": PAPER_BIN, "broadcast": "none"}),
        arm("hae", {"bin": PAPER_BIN, "broadcast": "hidden"}),
        arm("hae", {"r": 1.0, "alpha": 0.01, "bin": PAPER_BIN}),
        arm("fastgen", {}),
    ]
    return list({a.key: a for a in arms}.values())
