"""The yardstick: every entry stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcli.policies.base import Policy, option


@dataclass(frozen=True)
class Full(Policy):
    """Keep everything: the model's own cache, preallocated."""

    name: ClassVar[str] = "full"
    source: ClassVar[str] = "none: the model as it is"
    frees_memory: ClassVar[bool] = False

    budget: float | int | None = option(1.0, "always all of it; any other value is ignored")

    def target(self, seen: int) -> int:
        return seen
