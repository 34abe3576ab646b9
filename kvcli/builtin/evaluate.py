"""Print the figures of the built-in model: `python -m kvcli.builtin.evaluate --help`.

Everything runs on the checkpoint as a user loads it, full cache, greedy. Knows what is measured, not how a word is
counted (`figures.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F

from kvcli import builtin
from kvcli.builtin import build, parts, prompts
from kvcli.builtin.figures import most_repeated, named, precision, words

PROMPTS = {"caption": prompts.CAPTION[0], "detail": prompts.DETAIL[0], "story": prompts.STORY[0]}
LONGEST = {"caption": 120, "detail": 120, "story": 200}
LOOP_TOKENS = 120
CHATS = (
    "What is the capital of France?",
    "Give me three tips for sleeping well.",
    "Why is the sky blue?",
    "Write a short poem about autumn.",
    "What is the difference between a cat and a dog?",
    "How do I boil an egg?",
    "Tell me about the Moon.",
    "Write a short story about a lost key.",
)


class Subject:
    """A model and its processor; answers chats and scores texts in batches."""

    def __init__(self, model: Any, processor: Any, batch: int) -> None:
        self.model, self.processor, self.batch = model, processor, batch
        self.encoder = processor.tokenizer

    def inputs(self, pictures: Sequence[Image.Image], question: str, answers: Sequence[str] | None = None) -> Any:
        """Left-padded model inputs; with answers, each is appended with its stop token."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        texts = [chat + (f"{answer}{prompts.CLOSE}" if answer else "") for answer in answers or [""] * len(pictures)]
        batch = self.processor(images=list(pictures), text=texts, padding=True, return_tensors="pt")
        batch["pixel_values"] = batch["pixel_values"].to(self.model.dtype)
        return batch

    @torch.inference_mode()
    def loss(self, pictures: Sequence[Image.Image], answers: Sequence[str]) -> tuple[float, int]:
        """Sum of the negative log-likelihoods of all answer tokens, and their number."""
        batch = self.inputs(pictures, PROMPTS["caption"], answers)
        lengths = [len(self.encoder(a + prompts.CLOSE, add_special_tokens=False)["input_ids"]) for a in answers]
        width = max(lengths) + 1
        logits = self.model(**batch, logits_to_keep=width).logits.float()
        total = 0.0
        for row, ids, length in zip(logits, batch["input_ids"], lengths, strict=True):
            total += float(F.cross_entropy(row[-length - 1 : -1], ids[-length:], reduction="sum"))
        return total, sum(lengths)

    @torch.inference_mode()
    def answer(self, pictures: Sequence[Image.Image], question: str, longest: int) -> list[list[int]]:
        """Greedy answers as token ids, without what follows the stop."""
        batch = self.inputs(pictures, question)
        out = self.model.generate(**batch, max_new_tokens=longest, do_sample=False)
        stop, start = self.encoder.eos_token_id, batch["input_ids"].shape[1]
        rows = [row[start:].tolist() for row in out]
        return [row[: row.index(stop)] if stop in row else row for row in rows]

    def text(self, ids: list[int]) -> str:
        decoded: str = self.encoder.decode(ids, skip_special_tokens=True)
        return decoded.strip()


def caption_losses(subject: Subject, photos: Path, captions: dict[str, list[str]], names: Sequence[str]) -> Any:
    """Loss per token of each photo's first caption, with its own picture and with the next photo's."""
    sums, tokens = [0.0, 0.0], 0
    for start in range(0, len(names), subject.batch):
        chosen = range(start, min(start + subject.batch, len(names)))
        answers = [prompts.tidy(captions[names[i]][0]) for i in chosen]
        for which in (0, 1):
            pictures = [Image.open(photos / names[(i + which) % len(names)]).convert("RGB") for i in chosen]
            total, count = subject.loss(pictures, answers)
            sums[which] += total
        tokens += count
    return {"caption loss": sums[0] / tokens, "with another picture": sums[1] / tokens}


def answers(
    subject: Subject, photos: Path, names: Sequence[str], kind: str, longest: int | None = None
) -> list[list[int]]:
    found = []
    for start in range(0, len(names), subject.batch):
        pictures = [Image.open(photos / name).convert("RGB") for name in names[start : start + subject.batch]]
        found += subject.answer(pictures, PROMPTS[kind], longest or LONGEST[kind])
    return found


def text_figures(subject: Subject, found: list[list[int]], kind: str) -> dict[str, float]:
    """Loops (on the first 120 tokens, over words) and lengths in words."""
    texts = [subject.text(ids) for ids in found]
    heads = [words(subject.text(ids[:LOOP_TOKENS])) for ids in found]
    lengths = sorted(len(text.split()) for text in texts)
    return {
        f"{kind}: share without a 4-gram more than twice": sum(most_repeated(h) <= 2 for h in heads) / len(heads),
        f"{kind}: median words": lengths[len(lengths) // 2],
        f"{kind}: shortest": lengths[0],
        f"{kind}: share of at least 50 words": sum(n >= 50 for n in lengths) / len(lengths),
        f"{kind}: share of at least 100 words": sum(n >= 100 for n in lengths) / len(lengths),
    }


def names_figures(subject: Subject, folder: Path, accepted: dict[str, list[str]]) -> Iterator[str]:
    """For each picture of `accepted` (file -> names for it, the class's own first) what is said, and whether it is
    named; then how many are, by any of their names and by the first alone."""
    files = list(accepted)
    for kind in ("caption", "detail"):
        texts = [subject.text(ids) for ids in answers(subject, folder, files, kind, 60)]
        hits = [named(text, accepted[file]) for file, text in zip(files, texts, strict=True)]
        for file, text, hit in zip(files, texts, hits, strict=True):
            yield f"  {'yes' if hit else 'no '} {file} ({accepted[file][0]}): {text}"
        yield f"named in the {kind}: {sum(hits)} of {len(files)}"
        own = sum(named(text, accepted[file][:1]) for file, text in zip(files, texts, strict=True))
        yield f"named in the {kind} by the first of its names: {own} of {len(files)}"


@torch.inference_mode()
def chat_figures(subject: Subject) -> Iterator[str]:
    """How far the merged model is from the public language model, without a picture: both greedy answers, the model's
    with its own generation settings, and their distance along the public one's, which alone would not tell whether
    ours makes sense."""
    original, encoder = build.language_model()
    original = original.to(subject.model.dtype)
    ours, agree, tokens, divergence = subject.model, 0, 0, 0.0
    for question in CHATS:
        ids = encoder(prompts.chat(question), add_special_tokens=False, return_tensors="pt")["input_ids"]
        told: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": encoder.pad_token_id}
        full = original.generate(ids, **told)
        for name, answer in (("public", full), ("ours", ours.generate(input_ids=ids, **told))):
            yield f"  {name}: {subject.text(answer[0, ids.shape[1] :].tolist())!r}"
        place = slice(ids.shape[1] - 1, full.shape[1] - 1)
        theirs = original(full).logits[0, place].float().log_softmax(-1)
        mine = ours(input_ids=full).logits[0, place].float().log_softmax(-1)
        agree += int((theirs.argmax(-1) == mine.argmax(-1)).sum())
        divergence += float(F.kl_div(mine, theirs, log_target=True, reduction="sum"))
        tokens += len(mine)
    yield f"chat without a picture: top-1 agreement: {agree / tokens:.3f}"
    yield f"divergence (nats a token): {divergence / tokens:.3f}"


def show(figures: dict[str, float]) -> None:
    for name, value in figures.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}", flush=True)


def tell(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


def load(weights: Path | None, dtype: torch.dtype, batch: int) -> Subject:
    """The shipped checkpoint, or one put together in memory from another weights file."""
    if weights:
        model, processor = build.assemble(None, None, load_file(weights))
        return Subject(model.to(dtype), processor, batch)
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = builtin.ensure()
    builtin.register()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    return Subject(model.eval(), AutoProcessor.from_pretrained(folder), batch)


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m kvcli.builtin.evaluate", description=__doc__.splitlines()[0])
    p.add_argument("--photos", type=Path, required=True, help="folder of photographs")
    p.add_argument("--captions", type=Path, required=True, help="JSON: photo name -> list of captions")
    p.add_argument("--split", type=Path, required=True, help="JSON with `held_out`: photo names")
    p.add_argument("--weights", type=Path, help="another weights file than the one that ships")
    p.add_argument("--named", type=Path, help="JSON: picture, relative to it -> its names, the class's own first")
    p.add_argument("--penalty", type=float, help="another repetition penalty than the model's own")
    p.add_argument("--no-repeat", type=int, help="runs of so many tokens may not come twice; 0 allows all")
    p.add_argument("--first", type=int, help="only so many held-out photos")
    p.add_argument("--only", nargs="*", default=["loss", "caption", "detail", "story", "named", "chat"])
    p.add_argument("--texts", type=Path, help="write the answers here, as JSON lines")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--batch", type=int, default=10)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = p.parse_args(arguments)
    torch.set_num_threads(options.threads)
    subject = load(options.weights, getattr(torch, options.dtype), options.batch)
    if options.penalty:
        subject.model.generation_config.repetition_penalty = options.penalty
    if options.no_repeat is not None:
        subject.model.generation_config.no_repeat_ngram_size = options.no_repeat
    captions = json.loads(options.captions.read_text())
    names = json.loads(options.split.read_text())["held_out"][: options.first]
    steps: dict[str, Callable[[], None]] = {
        "loss": lambda: show(caption_losses(subject, options.photos, captions, names)),
        **{kind: lambda kind=kind: _texts(subject, options, captions, names, kind) for kind in PROMPTS},  # type: ignore[misc]
        "chat": lambda: tell(chat_figures(subject)),
    }
    if options.named:
        accepted = json.loads(options.named.read_text())
        steps["named"] = lambda: tell(names_figures(subject, options.named.parent, accepted))
    print(f"{len(names)} held-out photos, {parts.LANGUAGE.package} {parts.LANGUAGE.version}, {options.dtype}")
    for name in options.only:
        if name in steps:
            steps[name]()


def _texts(subject: Subject, options: Any, captions: dict[str, list[str]], names: list[str], kind: str) -> None:
    found = answers(subject, options.photos, names, kind)
    show(text_figures(subject, found, kind))
    texts = [subject.text(ids) for ids in found]
    if kind == "caption":
        share = [precision(text, captions[name]) for text, name in zip(texts, names, strict=True)]
        show({"content-word precision": sum(share) / len(share)})
    if options.texts:
        with options.texts.open("a") as file:
            for name, text in zip(names, texts, strict=True):
                print(json.dumps({"photo": name, "kind": kind, "text": text}), file=file)


if __name__ == "__main__":
    main()
