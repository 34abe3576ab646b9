"""What compression will bring, before anything is spent.

While generating, a step reads all weights once and every row's cache once; where memory is the limit it takes
(weights + batch x kept x bytes per token) / bandwidth. Arithmetic and dispatch come on top and are the same for all
policies, so the gains here are upper bounds. Knows formulas, neither models nor the terminal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BATCHES = (1, 8, 32)
WORTH_IT = 1.05
"""Below this factor a gain in speed is not worth the name."""


@dataclass(frozen=True)
class Load:
    """A model and a piece of work. weights_read: bytes that every step reads (text model and output layer); weights:
    all of them. Rows are counted in tokens: what the prompt has and keeps, what may come on top while generating."""

    weights: int
    weights_read: int
    bytes_per_token: int
    prompt: int
    new_tokens: int
    kept: int
    growth: int
    peak_full: int
    """Cache bytes of one row at its highest, nothing compressed."""
    peak: int
    """The same under the policy."""

    @property
    def full_entries(self) -> float:
        """Entries of a full row, mean over the steps."""
        return self.prompt + self.new_tokens / 2

    @property
    def kept_entries(self) -> float:
        """Entries of a compressed row, mean over the steps."""
        return self.kept + min(self.growth, self.new_tokens) / 2


def gain(load: Load, batch: int) -> float:
    """How many times faster a step is at most: full over compressed."""
    full = load.weights_read + batch * load.full_entries * load.bytes_per_token
    return full / (load.weights_read + batch * load.kept_entries * load.bytes_per_token)


def cache_share(load: Load, batch: int) -> float:
    """Share of a step's memory traffic that is cache, nothing compressed: what compression can act on."""
    cache = batch * load.full_entries * load.bytes_per_token
    return cache / (load.weights_read + cache)


def break_even(load: Load) -> int | None:
    """The smallest batch whose gain is worth it; None when no batch is."""
    saved = load.full_entries - WORTH_IT * load.kept_entries
    if saved <= 0:
        return None
    return max(1, -int(-(WORTH_IT - 1) * load.weights_read // (saved * load.bytes_per_token)))


def largest_batch(load: Load, memory: int, *, compressed: bool) -> int:
    """How many rows fit into so many bytes beside the weights; what the forward pass itself needs is left out."""
    return max(0, (memory - load.weights) // (load.peak if compressed else load.peak_full))


def as_json(load: Load, batch: int, memory: int) -> dict[str, Any]:
    """All of it, by name."""
    batches = sorted({batch, *BATCHES})
    return {
        **asdict(load),
        "gain_at_most": {str(n): round(gain(load, n), 3) for n in batches},
        "cache_share_of_a_step": {str(n): round(cache_share(load, n), 4) for n in batches},
        "pays_from_batch": break_even(load),
        "memory": memory,
        "largest_batch": {
            "full": largest_batch(load, memory, compressed=False),
            "compressed": largest_batch(load, memory, compressed=True),
        },
    }


def verdict(load: Load, batch: int) -> str:
    """One sentence: whether compression pays here, in speed and in memory."""
    speed, enough = gain(load, batch), break_even(load)
    saved = 1 - load.peak / load.peak_full
    memory = f"the cache's peak is {saved:.0%} smaller" if saved > 0.005 else "the cache's peak is no smaller"
    if speed >= WORTH_IT:
        return f"at batch {batch} generation is at most {speed:.2f} times as fast; {memory}"
    why = f"the cache is {cache_share(load, batch):.1%} of what a step reads"
    later = "at no batch size" if enough is None else f"from batch {enough} on"
    return f"at batch {batch} compression won't pay in speed: {why} (it may {later}); {memory}"
