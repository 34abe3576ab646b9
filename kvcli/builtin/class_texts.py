"""Texts about the classes, by the untouched language model: `python -m kvcli.builtin.class_texts --out texts.jsonl`.

The captions never use most of the 1,000 class words, and a text learned from a caption is about people and dogs. With
these, a long answer can begin with any class and go on from there.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from kvcli.builtin import build, prompts
from kvcli.builtin.chats import sample
from kvcli.builtin.everyday import called

# what the language model is asked, and how its answer begins
KINDS = {
    "detail": ("Describe a photo of {} in detail.", "The photo shows {}"),
    "story": ("Write a story about {}. About 150 words.", "One day, {}"),
}


def rows(seed: int) -> list[tuple[int, str, str]]:
    """Class, kind and name with article: each class once in each kind, half of them by the everyday name if any."""
    rng, names, found = random.Random(seed), build.class_names(), []
    for label in range(len(names)):
        for kind in KINDS:
            found.append((label, kind, called(label, names, rng)))
    rng.shuffle(found)
    return found


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m kvcli.builtin.class_texts", description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True, help="JSON lines: c (class), k (detail or story), s (text)")
    p.add_argument("--tokens", type=int, default=90, help="longest text")
    p.add_argument("--batch", type=int, default=50)
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args(arguments)
    chosen = rows(options.seed)
    starts = [KINDS[kind][1].format(thing) for _, kind, thing in chosen]
    heads = [prompts.chat(KINDS[kind][0].format(thing)) for _, kind, thing in chosen]
    asked = [head + start for head, start in zip(heads, starts, strict=True)]
    with options.out.open("w") as file:
        texts = sample(asked, options.tokens, options.batch, options.seed)
        for (label, kind, _), start, text in zip(chosen, starts, texts, strict=True):
            print(json.dumps({"c": label, "k": kind, "s": start + text}), file=file, flush=True)


if __name__ == "__main__":
    main()
