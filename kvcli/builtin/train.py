"""Train the neck and the low-rank updates of the built-in model: `python -m kvcli.builtin.train --help`.

Knows schedules, state files and the mixture. The constant rate goes on until `--steps`; the last `--decay` steps bring
it down to zero, so a stopped run can be made longer, or a decay can be tried from any saved state. Every draw depends
on `--seed`, the number of the step and whether the decay has begun: a run that was stopped gives the numbers of one
that was not. With `--scored` a model that is trained already draws captions and learns from their scores (`scored.py`).
What is written to `--out` is a running average of the weights: photos that were learned by heart weigh less in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvcli.builtin import build, scored
from kvcli.builtin.examples import Example, Examples, first_captions, read_rows
from kvcli.builtin.features import SHAPES, Features
from kvcli.builtin.pasting import Bank, Pasting
from kvcli.builtin.student import Student

SMALL_GRID = 6  # tokens a side of most steps, and of all losses here: that at 576 tokens is the same within 0.01
# share of the steps (and of those in the decay), grid, examples a step with short and with long answers
GRIDS = ((0.84, 0.74, SMALL_GRID, 12, 8), (0.12, 0.19, 12, 6, 4), (0.04, 0.07, 24, 3, 2))
# share of the short answers, and in the decay: what pasted classes cost the captions is then taken back
SHORT = {
    "caption": (0.66, 0.83),
    "swap": (0.05, 0.02),
    "paste": (0.16, 0.10),
    "label": (0.05, 0.03),
    "space": (0.08, 0.02),
}
LONG, TEXT = 0.12, 0.12
# with --scored: share of the steps, examples a step, and what the short answers are then
SCORED = {"scored": (0.75, 10), "text": (0.09, 6), "long": (0.05, 4), "short": (0.11, 16)}
NAMING = {"paste": 0.5, "label": 0.2, "space": 0.2, "swap": 0.1}
RATES = {"lora": 4e-4, "neck": 8e-4}
WEIGHT_DECAY = 0.1  # of the matrices
WARM_UP, CLIP = 30, 1.0


def plan(step: int, seed: int, late: bool, examples: Examples) -> tuple[str, int, list[Example]]:
    """What a step trains on: `text`, `long` or `short`, the grid, the examples. `late`: the decay has begun."""
    rng = random.Random(f"{seed}:{step}")
    *_, grid, short, long = rng.choices(GRIDS, [g[late] for g in GRIDS])[0]
    dice = rng.random()
    if dice < TEXT and "text" in examples.kinds:
        return "text", 0, [examples.draw("text", rng) for _ in range(6)]
    if dice < TEXT + LONG and "long" in examples.kinds:
        return "long", grid, [examples.draw("long", rng) for _ in range(long)]
    shares = {kind: share[late] for kind, share in SHORT.items() if kind in examples.kinds}
    kinds = rng.choices(list(shares), list(shares.values()), k=short)
    return "short", grid, [examples.draw(kind, rng) for kind in kinds]


def scored_plan(step: int, seed: int, examples: Examples) -> tuple[str, int, list[Example]]:
    """As `plan`, for the training on scores: `scored` steps, and some of the others so that nothing is forgotten."""
    rng = random.Random(f"{seed}:{step}")
    kinds = {kind: row for kind, row in SCORED.items() if kind in examples.kinds | {"scored", "short"}}
    (kind,) = rng.choices(list(kinds), [share for share, _ in kinds.values()])
    count = kinds[kind][1]
    if kind == "short":
        shares = {name: share for name, share in NAMING.items() if name in examples.kinds}
        names = rng.choices(list(shares), list(shares.values()), k=count)
        return kind, SMALL_GRID, [examples.draw(name, rng) for name in names]
    drawn = [examples.draw("caption" if kind == "scored" else kind, rng) for _ in range(count)]
    if kind == "scored":  # one batch draws all captions, so all are asked the first one's question
        drawn = [replace(example, question=drawn[0].question) for example in drawn]
    return kind, SMALL_GRID, drawn


def picture_loss(student: Student, examples: Examples, chosen: list[Example], grid: int) -> torch.Tensor:
    """Mean over the examples, each counting alike. Those with one answer go apart from those with several: a batch is
    as wide as its widest row."""
    groups = [[e for e in chosen if (len(e.answers) > 1) == several] for several in (False, True)]
    losses = [student.loss(g, examples.maps(g), grid, True) * len(g) for g in groups if g]
    return torch.stack(losses).sum() / len(chosen)


def rate(step: int, steps: int, decay: int) -> float:
    """Share of the full learning rate: linear warm-up, constant, linear decay over the last `decay` steps."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / decay if decay else 1.0)


def optimizer(student: Student, scale: float) -> torch.optim.AdamW:
    groups = []
    for kind, lr in ((k, v * scale) for k, v in RATES.items()):
        for matrices in (True, False):
            chosen = [p for n, p in student.trainable.items() if n.startswith(kind) and (p.dim() > 1) == matrices]
            groups.append({"params": chosen, "lr": lr, "full": lr, "weight_decay": WEIGHT_DECAY * matrices})
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.98))


def save(path: Path, write: Any) -> None:
    """`write(spare)` then rename: a reader never sees half a file."""
    spare = path.with_name(path.name + ".new")
    write(spare)
    os.replace(spare, path)


def half(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.to(torch.float16).contiguous() for k, v in weights.items()}


def run(student: Student, examples: Examples, held_out: list[Example], options: Any) -> Iterator[dict[str, Any]]:
    """Train from the state in `options.work` (or from the start) to `options.steps`; yields the log, line by line."""
    adam, step, state = optimizer(student, options.rate), 0, options.work / "state.pt"
    average = student.weights()
    if state.exists():
        stored = torch.load(state, weights_only=True)
        student.load(stored["weights"])
        average = stored["average"]
        adam.load_state_dict(stored["adam"])
        step = stored["step"]
    saved, sums = time.monotonic(), {kind: [0.0, 0] for kind in SCORED}
    while step < options.steps:
        for group in adam.param_groups:
            group["lr"] = group["full"] * rate(step, options.steps, options.decay)
        late = step >= options.steps - options.decay
        torch.manual_seed(options.seed << 32 | step)  # of the dropout
        student.train()
        if options.scored:
            kind, grid, chosen = scored_plan(step, options.seed, examples)
        else:
            kind, grid, chosen = plan(step, options.seed, late, examples)
        adam.zero_grad(set_to_none=True)
        if kind == "scored":
            loss, shown = scored.loss(student, chosen, examples.maps(chosen), grid)
        else:
            loss = student.text_loss(chosen) if kind == "text" else picture_loss(student, examples, chosen, grid)
            shown = float(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(student.trainable.values()), CLIP)
        adam.step()
        for name, value in student.trainable.items():
            average[name].lerp_(value.detach(), max(1 / (step + 1), 1 / options.horizon))
        sums[kind][0] += shown
        sums[kind][1] += 1
        step += 1
        if step % options.log == 0 or step == options.steps:
            row = {k: round(s / n, 4) for k, (s, n) in sums.items() if n}
            yield {"step": step, "time": time.strftime("%H:%M:%S"), **row}
            sums = {k: [0.0, 0] for k in sums}
        if time.monotonic() - saved > 60 * options.save or step == options.steps:
            content = {"weights": student.weights(), "average": average, "adam": adam.state_dict(), "step": step}
            save(state, lambda p, c=content: torch.save(c, p))
            save(options.out, lambda p: save_file(half(average), p))
            saved = time.monotonic()
        if step % options.evaluate == 0 or step == options.steps:
            current, losses = student.weights(), {}
            for name, weights in (("held_out", average), ("held_out_now", current)):
                student.load(weights)
                losses[name] = round(student.mean_loss(held_out, examples.maps, SMALL_GRID), 4)
            yield {"step": step, **losses}


def progress(features: Features) -> Callable[[int], None]:
    """Says how many photos of this view are done; a view takes minutes."""
    return lambda done: print(f"features, view {features.view}: {done}", flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m kvcli.builtin.train", description=__doc__.splitlines()[0])
    p.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    p.add_argument("--captions", type=Path, required=True, help="JSON: photo name -> list of captions")
    p.add_argument("--split", type=Path, required=True, help="JSON: `train` and `held_out`, lists of photo names")
    p.add_argument("--out", type=Path, required=True, help="the weights file (safetensors, half precision)")
    p.add_argument("--work", type=Path, required=True, help="folder for features, state and log")
    p.add_argument("--long", type=Path, nargs="*", default=[], help="JSON lines: n (photo) or c (class), k, s (text)")
    p.add_argument("--chats", type=Path, nargs="*", default=[], help="JSON lines: q, s: chats without a picture")
    p.add_argument("--init", type=Path, help="weights file to start from")
    p.add_argument("--views", type=int, default=2, help="each photo as it is, and seen again in views - 1 other ways")
    p.add_argument("--scored", action="store_true", help="train on the scores of captions that the model draws")
    p.add_argument("--steps", type=int, default=6000)
    p.add_argument("--decay", type=int, default=0, help="the last so many steps bring the rate down to zero")
    p.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    p.add_argument("--horizon", type=int, default=500, help="steps that the average reaches back")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument(
        "--compile", action="store_true", help="compile the decoder layers: a third less time, minutes to start"
    )
    p.add_argument("--log", type=int, default=20, help="steps between two lines of the log")
    p.add_argument("--evaluate", type=int, default=400, help="steps between two losses on the held-out photos")
    p.add_argument("--save", type=float, default=4, help="minutes between two states")
    return p


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    captions = json.loads(options.captions.read_text())
    split = json.loads(options.split.read_text())
    language_model, tokenizer = build.language_model()
    tower = build.vision_tower(language_model, tokenizer)
    features = Features(options.work / "features", sorted(split["train"] + split["held_out"]))
    features.compute(options.photos, tower.trunk, tick=progress(features))
    for key in SHAPES:  # the spread of 500 photos is that of all
        mean, deviation = features.moments(split["train"][:500], key)
        getattr(tower.neck, f"{key}_mean").copy_(mean)
        getattr(tower.neck, f"{key}_std").copy_(deviation)
    more = [Features(options.work / f"features{n}", split["train"], n) for n in range(1, options.views)]
    for view in more:
        view.compute(options.photos, tower.trunk, tick=progress(view))
    student = Student(language_model, tokenizer, tower.neck)
    if options.compile:
        for layer in language_model.model.layers:
            layer.compile(dynamic=True)
    if options.init:
        student.load(load_file(options.init))
    pasting = Pasting(Bank(features, split["train"], tower.neck), tower.neck.classifier)
    texts = (read_rows(options.long), read_rows(options.chats), build.class_names())
    examples = Examples(captions, split["train"], *texts, [features, *more], pasting)
    held_out = first_captions(captions, split["held_out"])
    with (options.work / "log.jsonl").open("a") as log:
        for line in run(student, examples, held_out, options):
            print(json.dumps(line), file=log, flush=True)
            print(line, flush=True)


if __name__ == "__main__":
    main()
