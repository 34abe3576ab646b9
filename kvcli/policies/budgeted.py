"""Policies that hold to their budget while generating, each in one of three ways.

Knows counts, not scores: when an entry must leave. Which one leaves is the policy's to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcli.policies.base import Decode, Policy, option
from kvcli.policies.contract import LayerView, Prompt

DECODE_HELP = "while generating: bounded keeps the size, ratio keeps kept/seen at the budget, grow touches nothing"


@dataclass(frozen=True)
class Budgeted(Policy):
    """A policy with a rule for the time after the prompt; its `evict` lets one entry go where `over` says so."""

    decode: Decode = option("bounded", DECODE_HELP)

    @property
    def acts_in_decode(self) -> bool:
        """A budget of 1.0 keeps all, also of what is generated."""
        return self.decode != "grow" and self.budget != 1.0

    def growth(self, prompt: Prompt) -> int:
        if not self.acts_in_decode:
            return prompt.max_new_tokens
        if self.decode == "bounded":
            room = max(self.bound(kept) - kept for kept in map(self.target, prompt.lengths))
            return min(prompt.max_new_tokens, room + 1)
        return math.ceil(max(self.shares(prompt)) * prompt.max_new_tokens) + 2

    def over(self, view: LayerView) -> list[bool]:
        """Whether each row holds more than it may, now that a token was added."""
        return [held > limit for held, limit in zip(view.held, self.limits(view), strict=True)]

    def limits(self, view: LayerView) -> list[float]:
        """Entries that each row may hold now."""
        if self.decode == "bounded":
            return [float(self.bound(self.target(n))) for n in view.prompt.lengths]
        return [share * seen for share, seen in zip(self.shares(view.prompt), view.seen, strict=True)]

    def shares(self, prompt: Prompt) -> list[float]:
        """The ratio kept / seen that each row is held to: the budget, or what a count was of the prompt."""
        if isinstance(self.budget, int):
            return [self.target(n) / n for n in prompt.lengths]
        return [1.0 if self.budget is None else self.budget] * len(prompt.lengths)
