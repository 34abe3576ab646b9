"""Where the model itself places each token: its rotary coordinates, which on multi-axis rope are not its column.

Knows what a decoder is called with; nothing of caches beyond their length. Noted only for policies that turn keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Coordinates:
    """The coordinates of all columns fed so far: int64 [B, A, L] with A axes, or None when the model was not told
    them, which means that they are the columns (less a row's padding)."""

    def __init__(self) -> None:
        self.known: Tensor | None = None

    def note(self, position_ids: Tensor, before: int) -> None:
        """position_ids: [B, T], or [axes, B, T] with one row of plain text positions before the three axes of rope.
        before: columns that were fed earlier; what was noted beyond them was taken back since."""
        if position_ids.dim() == 2:
            position_ids = position_ids[None]
        new = position_ids[-3:].transpose(0, 1)
        if self.known is not None and before:
            new = new.expand(self.known.shape[0], -1, -1)
            new = torch.cat([self.known[..., :before], new], -1)
        self.known = new

    def map(self, order: Sequence[int]) -> None:
        """Put rows in another order, repeat them or leave some out: the source of each new row. What is noted once for
        all rows alike stays."""
        if self.known is not None and max(order) < self.known.shape[0]:
            self.known = self.known[torch.tensor(order, device=self.known.device)]


@contextmanager
def locating(model: Any, cache: Any) -> Iterator[None]:
    """Inside the block, `cache.coordinates` hears where the model places the tokens that it is fed."""
    if cache is None or not cache.policy.needs_rotation:
        yield
        return
    hook = model.get_decoder().register_forward_pre_hook(partial(_note, cache), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _note(cache: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = kwargs.get("position_ids")
    if isinstance(found, Tensor):
        cache.coordinates.note(found, cache.get_seq_length())
