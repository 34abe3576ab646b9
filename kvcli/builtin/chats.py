"""Chats without a picture, answered by the untouched language model: `python -m kvcli.builtin.chats --out chats.jsonl`.

Training keeps the model near them, so that it still answers as the language model does when no picture is shown. None
of the chats that `evaluate.py` asks is among them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kvcli.builtin import build, prompts

ASK = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Give me five facts about {}.",
    "Why do people care about {}?",
    "What should I know before I learn about {}?",
    "How has {} changed over time?",
    "Give me three tips about {}.",
    "Tell me about {}.",
    "What is the difference between {} and something like it?",
    "Where do I find {}, and what for?",
)
ABOUT = """
    gravity, a lighthouse, music, the ocean, friendship, a bicycle, bread, photosynthesis, a dragon, winter,
    money, chess, a robot, coffee, the city of London, a garden, time, a volcano, football, an old book, the Sun,
    a train, democracy, honey, sleep, the Roman Empire, a computer, mathematics, a school, rain, a letter,
    electricity, an elephant, cooking, a bridge, language, a doctor, the desert, painting, a clock, trust, a
    river, birds, a map, fire, the future, a mountain, salt, the Internet, a mirror, rice, a wolf, spring,
    the capital of Japan, a horse, soup, a lost dog, the stars, a ghost, glass, an orange, the sky at night,
    exercise, a boat, patience, paper, the human heart, a spider, tea, snow, Mars, a violin, a wedding, the
    color red, fear, a secret door, an island, cheese, the president, a tree, an airplane, wool, history,
    vitamins, a queen, the wind, a small town, dinosaurs, the weather, a pair of shoes, luck, a ladder, the brain
"""


def questions(seed: int) -> list[str]:
    """Every question about every subject, in an order that the seed decides."""
    found = [ask.format(subject) for ask in ASK for subject in re.split(r",\s*", ABOUT.strip())]
    random.Random(seed).shuffle(found)
    return found


@torch.inference_mode()
def sample(asked: Sequence[str], tokens: int, batch: int, seed: int) -> Iterator[str]:
    """How the untouched language model goes on with each text, up to `tokens` tokens."""
    torch.manual_seed(seed)
    model, encoder = build.language_model()
    model, encoder.padding_side = model.to(build.quick_dtype()), "left"
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 50, "pad_token_id": encoder.pad_token_id}
    for start in range(0, len(asked), batch):
        inputs = encoder(asked[start : start + batch], add_special_tokens=False, padding=True, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=tokens, **sampled)
        yield from encoder.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m kvcli.builtin.chats", description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True, help="JSON lines: q, s")
    p.add_argument("--count", type=int, help="only so many of the questions")
    p.add_argument("--tokens", type=int, default=80, help="longest answer")
    p.add_argument("--batch", type=int, default=40)
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args(arguments)
    chosen = questions(options.seed)[: options.count]
    with options.out.open("w") as file:
        answers = sample(list(map(prompts.chat, chosen)), options.tokens, options.batch, options.seed)
        for question, answer in zip(chosen, answers, strict=True):
            print(json.dumps({"q": question, "s": answer.strip()}), file=file, flush=True)


if __name__ == "__main__":
    main()
