"""From trained states to the weights that ship: `python -m kvcli.builtin.finish --help`.

Averages weights files: what several states of a training agree on is what was learned, what each learned by heart
weighs less (Wortsman et al., "Model soups", 2022). Then fits the temperature of the answers, one number (Guo et al.,
"On Calibration of Modern Neural Networks", 2017): a model that knows its photos by heart is too sure of others. It
changes no greedy answer, up to rounding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from kvcli.builtin import build
from kvcli.builtin.examples import Example, first_captions
from kvcli.builtin.features import Features
from kvcli.builtin.student import Student
from kvcli.builtin.train import SMALL_GRID, half

CANDIDATES = [1 + n / 100 for n in range(-20, 51)]


def average(states: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of each weight, in float32; `shares` are scaled to a sum of 1."""
    whole = sum(shares)
    return {
        name: sum((share / whole * state[name].float() for state, share in zip(states, shares, strict=True)), zero)
        for name, zero in ((name, torch.zeros(())) for name in states[0])
        if name != build.TEMPERATURE
    }


@torch.no_grad()
def temperature(
    student: Student,
    examples: Sequence[Example],
    maps: Callable[[Sequence[Example]], Sequence[Tensor]],
    batch: int = 10,
) -> tuple[float, float, float]:
    """The divisor of the logits that gives these answers the lowest loss a token; the loss without it and with it."""
    sums, count = torch.zeros(len(CANDIDATES), dtype=torch.float64), 0
    for start in range(0, len(examples), batch):
        chosen = examples[start : start + batch]
        with student.autocast():
            states, targets, _ = student.hidden(chosen, student.visual(maps(chosen), SMALL_GRID))
            logits = student.lm.lm_head(states).float()
        sums += torch.stack([F.cross_entropy(logits / t, targets, reduction="sum") for t in CANDIDATES]).double()
        count += len(targets)
    best = int(sums.argmin())
    return CANDIDATES[best], float(sums[CANDIDATES.index(1.0)]) / count, float(sums[best]) / count


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m kvcli.builtin.finish", description=__doc__.splitlines()[0])
    p.add_argument("states", type=Path, nargs="+", help="weights files")
    p.add_argument("--shares", type=float, nargs="*", help="one a file; all alike unless told")
    p.add_argument("--neck", type=float, default=1.0, help="factor on the neck's other features: less, and words lead")
    p.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    p.add_argument("--captions", type=Path, required=True, help="JSON: photo name -> list of captions")
    p.add_argument("--split", type=Path, required=True, help="JSON: `train` and `held_out`, lists of photo names")
    p.add_argument("--work", type=Path, required=True, help="the training's folder, for the features")
    p.add_argument("--out", type=Path, required=True, help="the weights file (safetensors, half precision)")
    options = p.parse_args(arguments)
    shares = options.shares or [1.0] * len(options.states)
    if len(shares) != len(options.states):
        p.error(f"{len(shares)} shares for {len(options.states)} files: give one for each")
    weights = average([load_file(path) for path in options.states], shares)
    for name in ("neck.out.weight", "neck.out.bias"):
        weights[name] = options.neck * weights[name]
    split, captions = json.loads(options.split.read_text()), json.loads(options.captions.read_text())
    language_model, tokenizer = build.language_model()
    tower = build.vision_tower(language_model, tokenizer)
    features = Features(options.work / "features", sorted(split["train"] + split["held_out"]))
    features.compute(options.photos, tower.trunk)
    student = Student(language_model, tokenizer, tower.neck)
    student.load(weights)
    examples = first_captions(captions, split["held_out"])
    second = examples[len(examples) // 2 :]  # the first half stays unseen by the fit

    def maps(chosen: Sequence[Example]) -> Sequence[Tensor]:
        return features.maps([example.photo or "" for example in chosen])

    found, before, after = temperature(student, second, maps)
    print(f"temperature {found:.2f}: loss {before:.4f} -> {after:.4f} on the second half of the held-out photos")
    weights[build.TEMPERATURE] = torch.tensor(found)
    save_file(half(weights), options.out)


if __name__ == "__main__":
    main()
