"""Layers that read the picture beside the text: what a turn is where keys are the picture's and queries the text's.

There the columns of a cache are the entries of the picture, whole at once and never added to by the text, so a policy
acts once, when the prompt ends. Knows `run`, nothing of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcli.engine.cache import LayerCache
from kvcli.engine.run import Turn
from kvcli.policies.contract import Keep, Prompt, Statistic


def picture_prompt(mask: Tensor, asking: Prompt) -> Prompt:
    """The picture as a prompt: its entries that the newest token can see, and so every later one.

    mask: the model's, bool or additive, [B, 1, T, entries]. asking: the text.
    """
    newest = mask[:, 0, -1]
    seen = newest if newest.dtype == torch.bool else newest > torch.finfo(newest.dtype).min / 2
    return Prompt(seen, seen, tuple(seen.sum(-1).tolist()), asking.max_new_tokens)


class Unplaced:
    """Turns keys that stand nowhere: pictures beside the text have no positions."""

    def turn(self, keys: Tensor, steps: Tensor, layer: int) -> Tensor:
        return keys


@dataclass
class PictureTurn(Turn):
    """text: the cache of a layer that is fed the text, by which prompts are told from what follows. asking: the text
    of the prompt; its rows that come after a picture are the ones that look at it."""

    text: LayerCache = field(default_factory=LayerCache)
    asking: Prompt | None = None

    @property
    def step(self) -> int:
        assert self.asking is not None
        return self.text.seen - self.asking.columns

    @property
    def growth(self) -> int:
        return 0

    def apply(self, answer: Keep | None) -> None:
        """Where a row would keep nothing of its picture the layer stays whole: attention over nothing is undefined."""
        super().apply(answer if answer is not None and min(answer.held) > 0 else None)

    def _chosen(self, statistic: Statistic, queries: int) -> Tensor:
        assert self.asking is not None
        chosen = self.asking.chosen(statistic.queries, statistic.window)
        after = self.asking.visual.cumsum(-1) > 0
        return (chosen & after)[:, self.text.seen - queries : self.text.seen]
