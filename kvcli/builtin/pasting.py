"""Things that captions never name, set into the feature maps of photos.

Knows the classes of the tower's classifier, and cells of feature maps that it takes for them. Knows nothing of what is
asked or answered about them (`examples.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcli.builtin.features import Features
from kvcli.builtin.tower import CLASSES, Neck

DOGS = slice(151, 269)
DOG_CELL = 0.3  # probability of all dog classes from which a cell shows a dog
PER_CLASS = 16
KIN, LIKE_KIN = 4, 0.3  # the classes that the classifier takes a class for, and the share of its cells that look so
SHARPNESS, SURE, DIM = 2.0, (0.6, 0.98), (0.5, 1.1)  # of the neck; how sure a pasted class is; how bright its map


@dataclass(frozen=True)
class Paste:
    """Cells of a class, set into a photo. box: top, left, height, width in coarse cells, None: where dogs are.

    `told`: only the words of the neck see it, its other features stay those of the photo. Those features know what
    the captions name, and call every unknown animal a dog; this is how the words learn to overrule them.
    """

    label: int
    box: tuple[int, int, int, int] | None = None
    told: bool = False


class Bank:
    """For every class the cells of the training photos that the classifier is surest of; per photo its best class.

    `cells` is `[1000, 16, 1280]`; `best[name] = (class, mean probability, mean probability of the dog classes)`.
    """

    def __init__(self, features: Features, names: Sequence[str], neck: Neck) -> None:
        path = features.folder / "bank.pt"
        if path.exists():
            stored = torch.load(path, weights_only=True)
            self.cells: Tensor = stored["cells"]
            self.best: dict[str, tuple[int, float, float]] = stored["best"]
            return
        top = torch.full((CLASSES, PER_CLASS), -1.0)
        self.cells = torch.zeros(CLASSES, PER_CLASS, neck.classifier.in_features)
        self.best = {}
        for start in range(0, len(names), 64):
            chosen = names[start : start + 64]
            coarse = features.maps(chosen)[1].flatten(2).transpose(1, 2)
            with torch.inference_mode():
                chances = neck.classifier(coarse).float().softmax(-1)
            for name, mean in zip(chosen, chances.mean(1), strict=True):
                self.best[name] = (int(mean.argmax()), float(mean.max()), float(mean[DOGS].sum()))
            flat, cells = chances.flatten(0, 1), coarse.flatten(0, 1)
            value, row = flat.topk(PER_CLASS, 0)
            both = torch.cat([top, value.T], 1)
            top, order = both.topk(PER_CLASS, 1)
            pool = torch.cat([self.cells, cells[row.T]], 1)
            self.cells = pool.gather(1, order[..., None].expand(-1, -1, pool.shape[-1]))
        torch.save({"cells": self.cells, "best": self.best}, path)


class Pasting:
    """Sets classes into coarse maps."""

    def __init__(self, bank: Bank, classifier: nn.Linear) -> None:
        self.bank, self.classifier = bank, classifier
        self.direction = F.normalize(classifier.weight.detach().float(), dim=-1)
        self.kin = kin(self.direction)

    @torch.no_grad()
    def __call__(self, coarse: Tensor, paste: Paste, seed: int, *, dim: bool) -> Tensor:
        """`coarse` `[1280, 12, 12]` with cells that the classifier takes for the class, more or less surely.

        The whole map is dimmed (`dim`), and the cells are as bright as what they replace: features of pictures from
        outside the training photos are fainter than theirs, and a class that shines is believed only when it shines.
        """
        draw = torch.Generator().manual_seed(seed)

        def between(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(shape or (1,), generator=draw)

        where = torch.zeros(coarse.shape[1:], dtype=torch.bool)
        if paste.box is None:
            chances = self.classifier(coarse.flatten(1).T).softmax(-1)[:, DOGS].sum(-1)
            where = (chances > DOG_CELL).view_as(where)
        else:
            top, left, high, wide = paste.box
            where[top : top + high, left : left + wide] = True
            coarse = coarse * between(*DIM) if dim else coarse
        before, count = coarse[:, where].T, int(where.sum())
        labels = torch.full((count,), paste.label)
        unsure = torch.rand(count, generator=draw) < between(0, 2 * LIKE_KIN)
        labels[unsure] = self.kin[paste.label][torch.randint(KIN, (int(unsure.sum()),), generator=draw)]
        cells = self.bank.cells[labels, torch.randint(PER_CLASS, (count,), generator=draw)]
        share = between(0.5, 1, count, 1)
        cells = F.normalize(share * cells + (1 - share) * before, dim=-1)
        cells = cells * before.norm(dim=-1, keepdim=True) * between(0.7, 1.2)
        aim = between(0.05, 1, count) * between(*SURE)
        for _ in range(2):  # the clamp takes back a part of the first step
            cells = cells + self._missing(cells, labels, aim)[:, None] * self.direction[labels]
            cells = cells.clamp(0, 6)
        result = coarse.clone()
        result[:, where] = cells.T
        return result

    def _missing(self, cells: Tensor, labels: Tensor, aim: Tensor) -> Tensor:
        """How far to go along each class's direction for a sharpened probability of `aim`.

        `cells` `[N, 1280]`; `labels`, `aim` and the result `[N]`.
        """
        scores = SHARPNESS * self.classifier(cells)
        own = scores.gather(1, labels[:, None])[:, 0]
        others = scores.scatter(1, labels[:, None], -torch.inf).logsumexp(-1)
        length = self.classifier.weight.norm(dim=-1)[labels]
        far: Tensor = (aim.logit() - own + others) / (SHARPNESS * length)
        return far


def kin(direction: Tensor) -> Tensor:
    """For each class the `KIN` whose classifier rows are most like its own, `[1000, KIN]`: a real thing of a class
    looks like them in places."""
    alike = direction @ direction.T
    return alike.fill_diagonal_(-1).topk(KIN, 1).indices
