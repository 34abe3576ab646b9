"""How true every policy is to the full cache: `python -m kvcli.bench.fidelity`.

The full cache describes each photo; each policy is then fed that answer token by token, with its eviction at work
(perplexity, agreement, KL), and the main ones also answer by themselves (ROUGE-L, first divergence). A batch of photos
is read once for all policies. Results are appended to a records file as they come, one line for a photo and a policy:
a run that was stopped goes on where it was. Knows files and sessions; what is compared is in `arms`, the page in
`fidelity_page`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kvcli import builtin, fidelity, images
from kvcli.bench import fidelity_page
from kvcli.bench.arms import Arm, all_arms
from kvcli.engine.adapter import KVCache
from kvcli.engine.forcing import force
from kvcli.engine.session import Decoding, Prepared, Request, Session
from kvcli.engine.shared import Reading, shareable
from kvcli.errors import PictureError, UsageError
from kvcli.policies.full import Full

PROMPT = "Describe the image in detail."
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


@dataclass(frozen=True)
class FullAnswer:
    """What the full cache wrote about a photo, and its scores while it did."""

    photo: str
    prepared: Prepared
    answer: tuple[int, ...]
    text: str
    logits: Tensor


def run(
    session: Session, photos: Sequence[Path], arms: Sequence[Arm], records: Path, decoding: Decoding, **how: Any
) -> None:
    """Measure all arms on all photos that `records` does not have yet. how: `prompt`, `batch`."""
    done = {(r["photo"], r["arm"]) for r in read(records)}
    if records.exists() and not records.read_bytes().endswith(b"\n"):
        with records.open("a") as file:
            file.write("\n")  # the last line was cut off; what follows must not be glued to it
    size: int = how["batch"]
    for start in range(0, len(photos), size):
        group = photos[start : start + size]
        missing = [arm for arm in arms if any((photo.name, arm.key) not in done for photo in group)]
        if not missing:
            continue
        batch = [session.prepare(_request(photo, how["prompt"])) for photo in group]
        sharing = [arm for arm in missing if shareable(session, arm.create())]
        reading = Reading(session, batch, [Full(), *(arm.create() for arm in sharing)], decoding)
        answers = full_answers(session, reading, group, batch, decoding)
        for number, arm in enumerate(missing, start=1):
            print(f"photos {start + 1}-{start + len(group)}: {number}/{len(missing)} {arm.key}", file=sys.stderr)
            found = measure(session, reading if arm in sharing else None, answers, arm, decoding)
            with records.open("a") as file:
                file.writelines(
                    json.dumps({"model": session.model_name, "prompt": how["prompt"], **record}) + "\n"
                    for record in found
                    if (record["photo"], arm.key) not in done
                )


def full_answers(
    session: Session, reading: Reading, photos: Sequence[Path], batch: Sequence[Prepared], decoding: Decoding
) -> list[FullAnswer]:
    """The full cache's greedy answers to a batch that was read."""
    steps: list[Tensor] = []
    tokens, _ = reading.answer(Full(), lambda step, logits: steps.append(logits.cpu()))
    logits = torch.stack(steps, 1)
    answers = []
    for row, (photo, prepared) in enumerate(zip(photos, batch, strict=True)):
        answer, text, _ = session._read(tokens[row], decoding)
        answers.append(FullAnswer(photo.name, prepared, tuple(answer), text, logits[row, : len(answer)]))
    return answers


def measure(
    session: Session, reading: Reading | None, answers: Sequence[FullAnswer], arm: Arm, decoding: Decoding
) -> list[dict[str, Any]]:
    """One record for each photo. reading None: the policy reads the prompt by itself."""
    policy, scorer, forced = arm.create(), fidelity.Scorer(answers), [a.answer for a in answers]
    if reading is None:
        cache = force(session, [a.prepared for a in answers], policy, forced, scorer)
    else:
        cache = reading.force(policy, forced, scorer)
    fed = max(map(len, forced)) - 1
    records = []
    for row, (answer, scores) in enumerate(zip(answers, scorer.scores(), strict=True)):
        records.append(
            {
                "photo": answer.photo,
                "arm": arm.key,
                **vars(scores),
                "kept": cache.held()[row],
                "seen": answer.prepared.length + fed,
                "bytes": cache.bytes_used() // len(answers),
                "bytes_full": cache.full_bytes(answer.prepared.length + fed),
                **_notes(cache, row),
            }
        )
    if arm.free and reading is not None:
        tokens, _ = reading.answer(policy)
        for row, (answer, record) in enumerate(zip(answers, records, strict=True)):
            own, text, _ = session._read(tokens[row], decoding)
            record["rouge_l"] = fidelity.rouge_l(answer.text, text)
            record["first_divergence"] = fidelity.first_divergence(answer.answer, own)
    return records


def _notes(cache: KVCache, row: int) -> dict[str, float]:
    """What a policy wrote into its state for reports, mean of the layers that did."""
    notes = {}
    for name, label in (("agreement", "agreement_of_layers"), ("lost", "lost_scores")):
        values = [float(layer.store.state[name][row]) for layer in cache.ours if name in layer.store.state]
        if values:
            notes[label] = sum(values) / len(values)
    return notes


def read(records: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without a line that was cut off."""
    if not records.exists():
        return
    for line in records.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def find_photos(folder: Path, count: int) -> list[Path]:
    """The first pictures of a folder by name. Raises `UsageError` when there are none."""
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise UsageError(f"{folder} has no pictures; give another folder with --photos")
    return found[:count]


def _request(photo: Path, prompt: str) -> Request:
    try:
        return Request((images.load(photo).image,), prompt, key=photo.name)
    except PictureError as error:
        raise UsageError(f"{photo}: {error}") from error


def main(
    model: Annotated[str, typer.Option(help="model to measure on")] = "builtin",
    photos: Annotated[Path, typer.Option(help="folder of pictures")] = Path("samples"),
    count: Annotated[int, typer.Option(help="how many of them")] = 16,
    batch: Annotated[int, typer.Option(help="pictures that are read together")] = 16,
    tokens: Annotated[int, typer.Option(help="longest answer")] = 64,
    prompt: Annotated[str, typer.Option(help="the question")] = PROMPT,
    only: Annotated[str, typer.Option(help="arms whose name holds this")] = "",
    records: Annotated[Path, typer.Option(help="where results are appended")] = Path("fidelity.jsonl"),
    page: Annotated[Path | None, typer.Option(help="write the table of all records here")] = None,
) -> None:
    """Measure every policy against the full cache on the same photos."""
    arms = [arm for arm in all_arms() if only in arm.key]
    command = shlex.join(["python", "-m", "kvcli.bench.fidelity", *sys.argv[1:]])
    try:
        chosen = find_photos(photos, count)
        session = Session.load(model)
        decoding = Decoding(max_new_tokens=tokens)
        run(session, chosen, arms, records, decoding, prompt=prompt, batch=batch)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    facts = session.facts
    if model == builtin.NAME:
        facts += f", checkpoint {builtin.checkpoint_folder().name}"
    text = fidelity_page.write(list(read(records)), fidelity_page.Setting(command, facts, prompt, tokens))
    if page is None:
        print(text)
    else:
        page.write_text(text)


if __name__ == "__main__":
    typer.run(main)
