"""What the built-in model is trained on: which question, which answer, over which maps.

Knows captions, stories, class names and feature maps. Knows nothing of the language model.

The kinds. `caption`: a person's words. `long`: texts that the language model wrote from a caption (for length and
fluency). `label`: the class that the tower's own classifier sees. `paste`: cells of a class, taken from anywhere in
the training photos, set into another photo, with a sentence that names the class: so that all 1,000 class words
reach the answer, not only those that the captions use. `swap`: the same, in place of a dog that a caption names.
`space`: an astronaut, whom no class and no caption names, put together from a person, a helmet or a suit, and a
rocket; or a rocket alone, with nobody near.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.builtin import prompts
from kvcli.builtin.everyday import called
from kvcli.builtin.features import Features
from kvcli.builtin.pasting import Paste, Pasting
from kvcli.builtin.tower import CLASSES

ANIMALS = range(398)
SMALLEST_CROP = 9  # coarse cells a side, of 12
ROCKETS = (657, 744, 812)  # missile, projectile, space shuttle
SUITS = (450, 518, 560, 570, 701)  # bobsled, crash helmet, football helmet, gasmask, parachute
WHOLE = (0, 0, 12, 12)  # the box of a picture that shows one thing only
SHOWS_CLASS, SHOWS_DOG = 0.12, 0.3  # mean probability of the cells from which a photo shows its best class, a dog
TOLD = 0.75  # share of the pasted classes that only the words see
LONG_ENOUGH = 55  # words: a shorter detail does not teach where to stop
SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)
PLAIN = (  # many ways, so that none of them becomes the model's habit
    "{}.",
    "a close-up of {}.",
    "a picture of {}.",
    "{} in the picture.",
    "this is {}.",
    "there is {} in the photo.",
    "the picture shows {}.",
    "{} can be seen.",
)
A_PERSON = re.compile(r"\ba (man|woman|person|boy|girl)\b", re.IGNORECASE)
PEOPLE = re.compile(
    r"\b(man|men|woman|women|person|people|boys?|girls?|child(ren)?|players?|riders?|kids?)\b", re.IGNORECASE
)
A_DOG = re.compile(r"\b(a|the) dog\b(?!s)", re.IGNORECASE)


@dataclass(frozen=True)
class Example:
    """A question and its answers, each true alone. `photo` None: no picture.

    `stop` False: the text was cut somewhere, so nothing is learned about where it ends. `crop`: top, left and side,
    in coarse cells, of what is seen of the photo, None: all; the same photo then never looks the same twice. `view`:
    which of the photo's features, see `Features`.
    """

    question: str
    answers: tuple[str, ...]
    photo: str | None
    pastes: tuple[Paste, ...] = ()
    seed: int = 0
    stop: bool = True
    crop: tuple[int, int, int] | None = None
    view: int = 0

    @property
    def flip(self) -> bool:
        return bool(self.seed & 1) and not any(map(SIDES.search, self.answers))


class Examples:
    """Draws examples and makes their maps. The draw depends on the generator given, nothing else."""

    def __init__(
        self,
        captions: dict[str, list[str]],
        names: Sequence[str],
        long: list[dict[str, Any]],
        chats: list[dict[str, str]],
        class_names: Sequence[str],
        views: Sequence[Features],
        pasting: Pasting,
    ) -> None:
        self.captions, self.names, self.classes = captions, list(names), class_names
        known = set(names)
        self.long = [r for r in long if "c" in r or r["n"] in known]
        self.chats = chats
        self.views, self.pasting, best = views, pasting, pasting.bank.best
        self.sure: dict[int, list[str]] = {}  # by class, so that the rare ones are drawn as often as dogs
        for name in self.names:
            if best[name][1] > SHOWS_CLASS:
                self.sure.setdefault(best[name][0], []).append(name)
        self.dogs = [n for n in self.names if best[n][2] > SHOWS_DOG and any(map(A_DOG.search, captions[n]))]
        self.people = [n for n in self.names if sum(map(bool, map(A_PERSON.search, captions[n]))) > 1]
        self.deserted = [n for n in self.names if not any(map(PEOPLE.search, captions[n]))] or self.names

    @property
    def kinds(self) -> set[str]:
        """The kinds that this data has anything for."""
        has = {"long": self.long, "text": self.chats, "label": self.sure, "swap": self.dogs, "space": self.people}
        return {"caption", "paste"} | {kind for kind, rows in has.items() if rows}

    def draw(self, kind: str, rng: random.Random) -> Example:
        make: dict[str, Callable[[random.Random], Example]] = {
            "caption": self._caption,
            "long": self._long,
            "label": self._label,
            "paste": self._paste,
            "swap": self._swap,
            "text": self._text,
            "space": self._space,
        }
        return replace(make[kind](rng), view=rng.randrange(len(self.views)))

    def _caption(self, rng: random.Random) -> Example:
        name = rng.choice(self.names)
        question = prompts.CAPTION[0] if rng.random() < 0.7 else rng.choice(prompts.CAPTION)
        answers = tuple(map(prompts.tidy, self.captions[name]))
        return Example(question, answers, name, seed=rng.getrandbits(30), crop=random_crop(rng))

    def _long(self, rng: random.Random) -> Example:
        row = rng.choice(self.long)
        question = rng.choice(prompts.STORY if row["k"] == "story" else prompts.DETAIL)
        if "c" in row:
            return replace(self._pasted(question, row["s"], row["c"], rng), stop=False)
        stop = row["k"] == "detail" and len(row["s"].split()) >= LONG_ENOUGH
        return Example(question, (row["s"],), row["n"], seed=rng.getrandbits(30), stop=stop, crop=random_crop(rng))

    def _label(self, rng: random.Random) -> Example:
        label = rng.choice(list(self.sure))
        name, thing = rng.choice(self.sure[label]), called(label, self.classes, rng)
        return Example(rng.choice(prompts.LABEL), (capital(f"{thing}."),), name, seed=rng.getrandbits(30))

    def _pasted(self, question: str, answer: str, label: int, rng: random.Random) -> Example:
        if rng.random() < TOLD:
            paste, photos = Paste(label, place(rng, 8, 12), told=True), rng.choice((self.deserted, self.names))
        else:
            paste, photos = Paste(label, place(rng, 6, 12) if rng.random() < 0.6 else WHOLE), self.names
        return Example(question, (answer,), rng.choice(photos), (paste,), rng.getrandbits(30) & ~1)

    def _paste(self, rng: random.Random, label: int | None = None) -> Example:
        label = rng.randrange(CLASSES) if label is None else label
        thing = called(label, self.classes, rng)
        if rng.random() < 0.25:
            return self._pasted(rng.choice(prompts.LABEL), capital(f"{thing}."), label, rng)
        if rng.random() < 0.4:  # the start of a longer text, which the language model can go on with by itself
            tell, start = rng.choice(((prompts.STORY, "One day,"), (prompts.DETAIL, "The photo shows")))
            return replace(self._pasted(rng.choice(tell), f"{start} {thing}", label, rng), stop=False)
        answer = capital(rng.choice(PLAIN).format(thing))
        return self._pasted(rng.choice(prompts.CAPTION), answer, label, rng)

    def _swap(self, rng: random.Random) -> Example:
        name, label = rng.choice(self.dogs), rng.choice(ANIMALS)
        thing = called(label, self.classes, rng)
        named = [A_DOG.sub(thing, c) for c in self.captions[name] if A_DOG.search(c)]
        paste = Paste(label, told=rng.random() < TOLD)
        return Example(prompts.CAPTION[0], tuple(map(prompts.tidy, named)), name, (paste,), rng.getrandbits(30))

    def _space(self, rng: random.Random) -> Example:
        if rng.random() < 0.4:
            example = self._paste(rng, rng.choice(ROCKETS))
            return replace(example, photo=rng.choice(self.deserted))
        name = rng.choice(self.people)
        told = rng.random() < TOLD
        suits = [Paste(label, place(rng, 2, 6), told) for label in rng.sample(SUITS, rng.randint(1, 3))]
        pastes = (Paste(rng.choice(ROCKETS), place(rng, 2, 5), told), *suits)
        seed, dice = rng.getrandbits(30), rng.random()
        if dice < 0.25:
            start = ("The photo shows an astronaut",)
            return Example(rng.choice(prompts.DETAIL), start, name, pastes, seed, stop=False)
        people = filter(A_PERSON.search, self.captions[name])
        named = [prompts.tidy(A_PERSON.sub("an astronaut", caption)) for caption in people]
        if dice < 0.5:
            named = [capital(rng.choice(PLAIN).format("an astronaut"))]
        return Example(rng.choice(prompts.CAPTION), tuple(named), name, pastes, seed)

    def _text(self, rng: random.Random) -> Example:
        row = rng.choice(self.chats)
        return Example(row["q"], (row["s"],), None)

    def maps(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
        """Fine map, coarse map, and the coarse one that the words see, `[B, C, H, W]`, pasted and mirrored."""
        each = [self.views[e.view].maps([e.photo or self.names[0]]) for e in examples]
        fine, coarse = (torch.cat(maps) for maps in zip(*each, strict=True))
        told = coarse.clone()
        for i, example in enumerate(examples):
            if example.crop:
                fine[i], coarse[i] = resized_crop(fine[i], 2, example.crop), resized_crop(coarse[i], 1, example.crop)
                told[i] = coarse[i]
            for number, paste in enumerate(example.pastes):
                told[i] = self.pasting(told[i], paste, example.seed + number, dim=number == 0)
                if not paste.told:
                    coarse[i] = told[i]
            if example.flip:
                fine[i], coarse[i], told[i] = (m[i].flip(-1) for m in (fine, coarse, told))
        return fine, coarse, told


def resized_crop(cells: Tensor, scale: int, crop: tuple[int, int, int]) -> Tensor:
    """A crop of `[C, H, W]`, `scale` cells to a coarse one, resized to `[C, H, W]`; `crop`: top, left, side in coarse
    cells."""
    top, left, side = (number * scale for number in crop)
    cut = cells[None, :, top : top + side, left : left + side]
    return torch.nn.functional.interpolate(cut, cells.shape[1:], mode="bilinear", align_corners=False)[0]


def random_crop(rng: random.Random) -> tuple[int, int, int]:
    """Top, left and side, in coarse cells, of a crop anywhere in a photo."""
    side = rng.randint(SMALLEST_CROP, 12)
    return rng.randint(0, 12 - side), rng.randint(0, 12 - side), side


def place(rng: random.Random, low: int, high: int) -> tuple[int, int, int, int]:
    """A box of `low` to `high` cells each way, anywhere."""
    tall, wide = rng.randint(low, high), rng.randint(low, high)
    return rng.randint(0, 12 - tall), rng.randint(0, 12 - wide), tall, wide


def capital(text: str) -> str:
    """The same with a capital first."""
    return text[:1].upper() + text[1:]


def first_captions(captions: dict[str, list[str]], names: Sequence[str]) -> list[Example]:
    """The first question for captions with each photo's first caption: what held-out losses are measured on."""
    return [Example(prompts.CAPTION[0], (prompts.tidy(captions[name][0]),), name) for name in names]


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
