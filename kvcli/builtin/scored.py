"""The training's last part: captions that the model draws itself, scored by the words that people agree on.

Knows drawing and scoring. Knows nothing of schedules. Source: Rennie et al., "Self-critical Sequence Training for Image
Captioning" (2017), with two departures: a caption is measured against the photo's other drawn captions (Kool et al.,
"Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019), not the greedy one; and the score is no CIDEr, it follows
the content-word precision. Captions of people stay in every step: the score knows words, not grammar.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from kvcli.builtin import prompts
from kvcli.builtin.examples import Example
from kvcli.builtin.figures import agreed
from kvcli.builtin.student import Student

DRAWN, LONGEST = 4, 24  # captions drawn for a photo, tokens of one
MISS = 0.7  # what a content word costs that no two people use; one that they use is worth 1
HUMAN, WEIGHT = 2, 0.7  # captions of people beside the drawn ones, and the weight of their loss


def score(text: str, human: Sequence[str]) -> float:
    """Worth of a caption: a word pays if two people use it with a chance above `MISS / (1 + MISS)`."""
    good, said = agreed(text, human)
    return good - MISS * (said - good)


def advantages(scores: Tensor) -> Tensor:
    """How much better each caption is than the mean of its photo's others; `scores` and the result `[photos, n]`."""
    count = scores.shape[1]
    return (scores - scores.mean(1, keepdim=True)) * count / (count - 1)


@torch.no_grad()
def draw(student: Student, examples: Sequence[Example], maps: Sequence[Tensor], grid: int) -> list[tuple[str, ...]]:
    """`DRAWN` captions for each example, from the model as it is, without dropout. All examples ask the same."""
    student.eval()
    model, stop = student.lm.model, student.ids(prompts.CLOSE)[0]
    with torch.compiler.set_stance("force_eager"), student.autocast():
        cache = DynamicCache(config=student.lm.config)
        head = student.prompt(examples[0].question, student.visual(maps, grid))
        states = model(inputs_embeds=head, cache=cache).last_hidden_state[:, -1]
        cache.batch_repeat_interleave(DRAWN)
        states = states.repeat_interleave(DRAWN, 0)
        written = torch.empty(len(states), 0, dtype=torch.long)
        going = torch.ones(len(states), dtype=torch.bool)
        while True:
            token = torch.multinomial(student.lm.lm_head(states).float().softmax(-1), 1)
            token[~going] = stop
            written = torch.cat([written, token], 1)
            going &= token[:, 0] != stop
            if not going.any() or written.shape[1] == LONGEST:
                break
            states = model(input_ids=token, cache=cache).last_hidden_state[:, -1]
    texts = student.tokenizer.batch_decode(written, skip_special_tokens=True)
    return [tuple(text.strip() for text in texts[i : i + DRAWN]) for i in range(0, len(texts), DRAWN)]


def loss(student: Student, examples: Sequence[Example], maps: Sequence[Tensor], grid: int) -> tuple[Tensor, float]:
    """A loss that makes captions likelier that score better than others of the photo; the drawn captions' mean score.

    The examples' answers are all that people said of the photo, at least `HUMAN`. Departures: the gradient is taken
    with dropout and hidden words, as in the rest of the training, though the captions are drawn without; and a caption
    that was cut at `LONGEST` is learned as if it ended there.
    """
    drawn = draw(student, examples, maps, grid)
    scores = torch.tensor([[score(text, e.answers) for text in own] for e, own in zip(examples, drawn, strict=True)])
    human = [random.Random(e.seed).sample(e.answers, HUMAN) for e in examples]
    both = [replace(e, answers=(*own, *theirs)) for e, own, theirs in zip(examples, drawn, human, strict=True)]
    worth = F.pad(advantages(scores), (0, HUMAN))
    by_people = F.pad(torch.zeros_like(scores, dtype=torch.bool), (0, HUMAN), value=True)
    student.train()
    with student.autocast():
        states, targets, _ = student.hidden(both, student.visual(maps, grid))
        losses = F.cross_entropy(student.lm.lm_head(states).float(), targets, reduction="none")
    lengths = torch.tensor([len(tail) for e in both for tail in student.tails(e)])
    worth, by_people = (each.flatten().repeat_interleave(lengths) for each in (worth, by_people))
    return (worth * losses)[~by_people].mean() + WEIGHT * losses[by_people].mean(), float(scores.mean())
