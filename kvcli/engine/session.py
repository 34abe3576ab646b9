"""A loaded model that describes batches of pictures through a compressible cache.

Knows models and tensors, nothing of files, records and the terminal. Generation is the library's own; what is done here
is to put prompts together, to announce them to the cache, and to account for what happened.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import LogitsProcessorList

from kvcli.engine import adapter, loading, prompts
from kvcli.engine.decoding import Decoding, DrawPerRow, Step, Stream, Watch
from kvcli.engine.rotary import Rotator
from kvcli.engine.vision import visual_mask, visual_token_ids
from kvcli.errors import StartError
from kvcli.policies.base import Policy
from kvcli.policies.contract import Prompt

__all__ = ["Decoding", "Outcome", "Prepared", "Request", "Session", "Step"]


@dataclass(frozen=True)
class Request:
    """Pictures and a question. `key` names the work: draws depend on it and the seed alone."""

    images: tuple[Image.Image, ...]
    prompt: str
    system: str | None = None
    key: str = ""


@dataclass(frozen=True)
class Prepared:
    """A request as the model reads it: the processor's output for one row, without padding."""

    request: Request
    inputs: Mapping[str, Any]
    length: int
    visual: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of one request. kept, kept_after_prefill: entries of its row, mean of the layers. Bytes are of the KV
    cache: full is what all tokens seen would take; held and peak are this row's share of what its batch held, at the
    end and at most. Seconds are of the whole batch."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    visual_tokens: int
    generated_tokens: int
    seen: int
    kept: int
    kept_after_prefill: int
    bytes_full: int
    bytes_held: int
    bytes_peak: int
    prefill_seconds: float
    decode_seconds: float
    steps: tuple[Step, ...] = ()
    warnings: tuple[str, ...] = ()


class Session:
    """One model, many batches. Not for use by several threads at once, except `prepare`."""

    def __init__(self, loaded: loading.Loaded, load_seconds: float = 0.0, kv_dtype: str = "auto") -> None:
        """kv_dtype: "int8" to store keys and values so once a prompt is done; "auto" for the model's own type."""
        self.loaded = loaded
        self.model, self.processor = loaded.model, loaded.processor
        self.model_name, self.revision = loaded.name, loaded.revision
        self.device, self.dtype = loaded.device, loaded.dtype
        self.load_seconds = load_seconds
        self.int8 = kv_dtype == "int8"
        self.tokenizer = self.processor.tokenizer
        self._copies = threading.local()
        adapter.KVCache(self.model.config, _anything())  # refuses a model without a layer to compress

    @classmethod
    def load(cls, model: str, kv_dtype: str = "auto", **settings: Any) -> Session:
        """See `loading.load` for the other settings and errors."""
        started = time.perf_counter()
        loaded = loading.load(model, **settings)
        return cls(loaded, time.perf_counter() - started, kv_dtype)

    @property
    def kv_dtype(self) -> str:
        """How keys and values are stored, in a word."""
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")

    @property
    def plain(self) -> Session:
        """The same session with a cache of the model's own numbers, which others are measured against."""
        other = copy.copy(self)
        other.int8 = False
        return other

    @property
    def facts(self) -> str:
        """One line: model, device, number type and why, attention path, layers that can be compressed."""
        report = self.layer_report()
        number = str(self.dtype).removeprefix("torch.")
        ours = sum(ok for _, _, ok, _ in report)
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return (
            f"{self.model_name} on {self.device} ({number}: {self.loaded.dtype_reason}{threads}), "
            f"attention sdpa, {ours} of {len(report)} layers compressible" + (", cache int8" if self.int8 else "")
        )

    def layer_report(self) -> list[tuple[int, str, bool, str]]:
        """(index, kind, compressible, why not) for each decoder layer."""
        return adapter.layer_report(self.model.config)

    # --- prompts

    def prepare(self, request: Request) -> Prepared:
        """Run the processor. Safe in worker threads: each thread has a processor of its own.

        Raises `PictureError` when the processor refuses the picture.
        """
        if not hasattr(self._copies, "processor"):
            self._copies.processor = copy.deepcopy(self.processor)
        inputs, warnings = prompts.encode(self._copies.processor, request.images, request.prompt, request.system)
        ids = inputs["input_ids"]
        visual = int(visual_mask(self.model, ids).sum())
        return Prepared(request, inputs, ids.shape[1], visual, tuple(warnings))

    # --- generation

    def run(
        self,
        batch: Sequence[Prepared],
        policy: Policy,
        decoding: Decoding,
        *,
        on_text: Callable[[str], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> list[Outcome]:
        """Answer a batch. on_text streams the answer of a single request without beams. Running out of memory is
        passed on as torch says it; the session stays usable."""
        inputs = prompts.collate(self.processor, [p.inputs for p in batch], [p.request for p in batch])
        inputs = {k: self._on_device(v) for k, v in inputs.items()}
        cache = self.cache(policy, inputs, decoding.max_new_tokens)
        watch = Watch(cache, on_step)
        processors = LogitsProcessorList([watch])
        if decoding.temperature > 0:
            processors.append(DrawPerRow(decoding, [p.request.key for p in batch]))
        if len(batch) > 1 or decoding.num_beams > 1:
            on_text = None
        settings = self._settings(decoding)
        with torch.inference_mode(), adapter.attached(self.model, cache):
            output = self.model.generate(
                **inputs,
                cache=cache,
                logits_processor=processors,
                streamer=None if on_text is None else Stream(self.tokenizer, on_text),
                **settings,
            )
        if output.cache is not cache:
            raise StartError(
                f"{self.model_name} replaced the cache during the run (its positions switch to another range at this "
                "length); use a shorter prompt or fewer new tokens"
            )
        ended = time.perf_counter() - watch.started
        start = inputs["input_ids"].shape[1]
        return [
            self._outcome(each, row, output.sequences[row, start:].tolist(), decoding, cache, watch, ended, len(batch))
            for row, each in enumerate(batch)
        ]

    def cache(self, policy: Policy, inputs: Mapping[str, Tensor], max_new_tokens: int) -> adapter.KVCache:
        """An empty cache that was told about the prompt in `inputs`."""
        ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
        lengths = tuple(real.sum(1).tolist())
        cache = self.empty_cache(policy)
        cache.announce(Prompt(real, visual_mask(self.model, ids) & real, lengths, max_new_tokens))
        return cache

    def empty_cache(self, policy: Policy) -> adapter.KVCache:
        """A cache for this model that knows of no prompt yet."""
        return adapter.KVCache(self.model.config, policy, self.rotator if policy.needs_rotation else None, self.int8)

    @cached_property
    def rotator(self) -> Rotator:
        """Turns this model's keys; made on first use, since it costs a forward pass of one token."""
        return Rotator(self.model)

    # --- memory, before anything is spent

    def bytes_per_token(self) -> int:
        """KV bytes that one more token takes in all layers that grow."""
        return sum(adapter.entry_bytes(self.model.config, self.dtype, self.int8))

    def batch_bytes(self, lengths: Sequence[int], policy: Policy, decoding: Decoding) -> int:
        """KV bytes that a batch of prompts of these lengths will hold at its peak, beams included.

        The peak is the largest of: all layers compressed but one, and the end of the generation. A picture beside the
        text counts whole.
        """
        rows, longest = len(lengths) * decoding.num_beams, max(lengths)
        prompt = Prompt(torch.ones(1, 1), torch.zeros(1, 1), tuple(lengths), decoding.max_new_tokens)
        kept = max(policy.target(n) for n in lengths) if policy.frees_memory else longest
        end = kept + policy.growth(prompt)
        layers = adapter.entry_bytes(self.model.config, self.dtype)
        held = self.bytes_per_token()
        done = sum(layers) * longest if policy.served_at_once else held * kept
        in_prefill = done + max(layers) * longest
        beside = sum(adapter.picture_bytes(self.model.config, self.dtype))
        return rows * (max(held * end, in_prefill) + beside)

    def free_bytes(self) -> int:
        """Memory that is free on the model's device."""
        return loading.free_bytes(self.device)

    # --- inside

    def _on_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def _settings(self, decoding: Decoding) -> dict[str, Any]:
        placeholders = sorted(visual_token_ids(self.model.config))
        settings: dict[str, Any] = {
            "max_new_tokens": decoding.max_new_tokens,
            "num_beams": decoding.num_beams,
            "do_sample": False,
            "return_dict_in_generate": True,
            "pad_token_id": self.pad_id,
            # a model that wrote a placeholder would be asked for a picture that isn't there
            "suppress_tokens": placeholders or None,
        }
        if decoding.repetition_penalty is not None:
            settings["repetition_penalty"] = decoding.repetition_penalty
        if decoding.stop:
            settings |= {"stop_strings": list(decoding.stop), "tokenizer": self.tokenizer}
        return settings

    @property
    def pad_id(self) -> int:
        """The token that fills short rows; the end-of-text token where the model has none for it."""
        return prompts.pad_id(self.processor)

    def _outcome(
        self,
        prepared: Prepared,
        row: int,
        tokens: list[int],
        decoding: Decoding,
        cache: adapter.KVCache,
        watch: Watch,
        ended: float,
        rows: int,
    ) -> Outcome:
        tokens, text, reason = self._read(tokens, decoding)
        seen = prepared.length + max(0, len(tokens) - 1)  # the last token is never fed
        # a row that ended early was carried along, padded, until the last one of its batch had ended
        steps = tuple(watch.steps[: max(1, len(tokens))])
        first, last = steps[0], steps[-1]
        beams = decoding.num_beams
        full = cache.full_bytes(seen)
        return Outcome(
            text=text,
            tokens=tuple(tokens),
            finish_reason=reason,
            prompt_tokens=prepared.length,
            visual_tokens=prepared.visual,
            generated_tokens=len(tokens),
            seen=seen,
            kept=round(last.held[row * beams]),
            kept_after_prefill=round(first.held[row * beams]),
            bytes_full=full * beams,
            bytes_held=last.bytes_used // rows,
            bytes_peak=cache.bytes_peak // rows,
            prefill_seconds=first.seconds,
            decode_seconds=ended - first.seconds,
            steps=steps,
            warnings=prepared.warnings,
        )

    def _read(self, tokens: list[int], decoding: Decoding) -> tuple[list[int], str, str]:
        """(tokens without padding, text, finish reason) of what was generated for a row."""
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        reason = "length"
        for index, token in enumerate(tokens):
            if token in ends:
                tokens, reason = tokens[: index + 1], "stop"
                break
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        found = [at for stop in decoding.stop if (at := text.find(stop)) >= 0]
        if found:
            text, reason = text[: min(found)], "stop"
            while tokens and tokens[-1] == self.pad_id:
                tokens = tokens[:-1]
        return tokens, text.strip(), reason


def _anything() -> Policy:
    from kvcli.policies.full import Full

    return Full()
