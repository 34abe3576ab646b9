"""A folder of pictures: kvcli against a plain loop of stock `generate`: `python -m kvcli.bench.folder PICTURES`.

The same files, the same loaded model and the same question. All ways take turns, some pictures at a time, so that a
machine that slows down slows all of them. Every text is compared with the stock loop's; where one differs, the gap
between the stock model's scores of the two tokens at that place is said. Knows sessions and batch runs; writes no file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image, ImageOps

from kvcli import batch, images, inputs, policies
from kvcli.engine.prompts import encode
from kvcli.engine.session import Decoding, Session
from kvcli.errors import PictureError, UsageError
from kvcli.policies.base import Policy
from kvcli.records import RunFacts

PROMPT = "Describe the image."


@dataclass
class Way:
    """One way to describe the folder. seconds and processor: of the turns so far, wall clock and all threads."""

    name: str
    policy: Policy | None
    """None: the stock loop."""
    session: Session
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: int = 0


class Stock:
    """What a user would write without kvcli: open, process, generate, decode, one picture after the other."""

    def __init__(self, session: Session, prompt: str, most: int) -> None:
        self.session, self.prompt, self.most = session, prompt, most

    def inputs(self, path: Path) -> dict[str, Any]:
        """Model inputs of one picture."""
        picture = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        made, _ = encode(self.session.processor, [picture], self.prompt, None)
        device, dtype = self.session.device, self.session.dtype
        return {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in made.items()}

    @torch.inference_mode()
    def generate(self, path: Path, **options: Any) -> tuple[list[int], Any]:
        """The new tokens, and all that `generate` gave."""
        made = self.inputs(path)
        out = self.session.model.generate(
            **made,
            max_new_tokens=self.most,
            do_sample=False,
            pad_token_id=self.session.pad_id,
            return_dict_in_generate=True,
            **options,
        )
        return out.sequences[0, made["input_ids"].shape[1] :].tolist(), out

    def run(self, paths: Sequence[Path], way: Way) -> None:
        """Describe pictures into `way`."""
        for path in paths:
            tokens, _ = self.generate(path)
            way.texts[str(path)] = self.session.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            way.tokens += len(tokens)

    def gap(self, path: Path, other: str) -> float:
        """How far the stock model's score of the other text's token is below the best, where the texts part."""
        tokens, out = self.generate(path, output_scores=True)
        theirs = self.session.tokenizer(other, add_special_tokens=False)["input_ids"]
        theirs += [self.session.model.generation_config.eos_token_id]
        for step, (one, two) in enumerate(zip(tokens, theirs, strict=False)):
            if one != two:
                scores = out.scores[step][0]
                return float(scores[one] - scores[two])
        return float("nan")


def find_pictures(named: Sequence[Path], count: int) -> list[Path]:
    """The first `count` pictures that can be read, since a plain loop would end at one that can't.

    Raises `typer.BadParameter` when there is none.
    """
    found: list[Path] = []
    try:
        for job in inputs.find([str(path) for path in named]):
            if isinstance(job, inputs.Job) and len(found) < count:
                with contextlib.suppress(PictureError):
                    images.load(job.sources[0])
                    found.append(Path(os.fsdecode(job.paths[0])))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    if not found:
        raise typer.BadParameter("none of these pictures can be read")
    return found


def ours(session: Session, paths: Sequence[Path], way: Way, work: batch.Work) -> None:
    """Describe pictures with a batch run into `way`."""
    for event in batch.run(session, inputs.find([str(path) for path in paths]), work):
        if isinstance(event, batch.Settled) and event.record is not None:
            way.texts[event.job.id] = event.record["text"]
            way.tokens += event.record["tokens"]["generated"]


def make_work(session: Session, policy: Policy, prompt: str, most: int, size: int | None) -> batch.Work:
    """A batch run's settings: those of `kvcli describe`."""
    decoding = Decoding(max_new_tokens=most)
    facts = RunFacts(
        session.model_name,
        session.revision,
        str(session.device),
        str(session.dtype).removeprefix("torch."),
        {"name": policy.name, **policy.resolved()},
        dataclasses.asdict(decoding),
    )
    return batch.Work(policy, decoding, prompt, None, facts, batch_size=size)


def measure(paths: Sequence[Path], ways: Sequence[Way], prompt: str, most: int, size: int | None, turns: int) -> None:
    """Fill in the ways, which take turns; the order within a turn is drawn."""
    dice = random.Random(0)
    length = -(-len(paths) // turns)
    for start in range(0, len(paths), length):
        chunk = paths[start : start + length]
        for way in dice.sample(list(ways), len(ways)):
            clock, spent = time.perf_counter(), time.process_time()
            if way.policy is None:
                Stock(way.session, prompt, most).run(chunk, way)
            else:
                ours(way.session, chunk, way, make_work(way.session, way.policy, prompt, most, size))
            way.seconds.append(time.perf_counter() - clock)
            way.processor.append(time.process_time() - spent)
            print(f"{start + len(chunk)} of {len(paths)}: {way.name} {way.seconds[-1]:.1f} s", flush=True)


def table(ways: Sequence[Way], stock: Stock) -> Iterator[str]:
    """One line a way, and one for each text that a lossless way wrote differently."""
    first = ways[0]
    yield f"{'':22}{'s':>8}{'gain':>7}{'cpu s':>8}{'gain':>7}{'tokens':>8}{'same texts':>14}"
    for way in ways:
        gain, spent = sum(first.seconds) / sum(way.seconds), sum(first.processor) / sum(way.processor)
        same = sum(way.texts[name] == text for name, text in first.texts.items())
        yield (
            f"{way.name:22}{sum(way.seconds):8.1f}{gain:7.2f}{sum(way.processor):8.1f}{spent:7.2f}{way.tokens:8}"
            f"{f'{same} of {len(first.texts)}':>14}"
        )
    for way in ways[1:]:
        if way.policy is not None and not way.policy.frees_memory:
            for name, text in first.texts.items():
                if way.texts[name] != text:
                    yield f"{way.name} differs on {name}: scores {stock.gap(Path(name), way.texts[name]):.1e} apart"


def main(
    pictures: Annotated[list[Path], typer.Argument(help="pictures, or folders of them")],
    model: Annotated[str, typer.Option(help="model to run")] = "builtin",
    count: Annotated[int, typer.Option(help="at most so many pictures")] = 200,
    turns: Annotated[int, typer.Option(help="turns that the ways take")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="longest answer")] = 64,
    batch_size: Annotated[int | None, typer.Option(help="pictures at a time; automatic when left out")] = None,
    budget: Annotated[float, typer.Option(help="of the compressed way")] = 0.2,
    prompt: Annotated[str, typer.Option(help="the question")] = PROMPT,
    packed: Annotated[bool, typer.Option(help="ours with packed weights (float32 on a CPU)")] = False,
    texts: Annotated[Path | None, typer.Option(help="write all texts here, as JSON")] = None,
) -> None:
    """Time a folder of pictures: a stock loop, kvcli with the full cache, kvcli with Elastic Cache."""
    found = find_pictures(pictures, count)
    session = Session.load(model)
    own = Session.load(model, weights="packed") if packed else session
    ways = [
        Way("stock loop", None, session),
        Way("full", policies.create("full"), own),
        Way(f"elastic {budget:g}", policies.create("elastic", budget=budget), own),
    ]
    print(f"{session.facts}; {len(found)} pictures, at most {max_new_tokens} new tokens", flush=True)
    for way in ways:
        Stock(way.session, prompt, 4).run(found[:1], Way("warm-up", None, session))
    measure(found, ways, prompt, max_new_tokens, batch_size, turns)
    for line in table(ways, Stock(session, prompt, max_new_tokens)):
        print(line)
    if texts is not None:
        texts.write_text(json.dumps({way.name: way.texts for way in ways}, indent=1))


if __name__ == "__main__":
    typer.run(main)
