"""One model, one cache, some steps: what every arm of the speed bench runs, timed.

Everything goes through stock `generate`, as users' runs do. Knows how to start it with a cache that is filled already,
and how to tell steps apart; knows nothing of what is compared.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvcli.engine import adapter


@dataclass
class Stopwatch(LogitsProcessor):
    """Notes when the scores of each step have been computed."""

    device: torch.device
    times: list[float] = field(default_factory=list)

    def now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(self.now())
        return scores


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prompt(model: Any, batch: int, columns: int) -> Tensor:
    """Token ids [B, L] of no meaning, the same at each call."""
    generator = torch.Generator().manual_seed(2)
    # low ids are special tokens in many vocabularies, high ones placeholders of pictures
    words = min(int(model.get_input_embeddings().weight.shape[0]), 20_000)
    return torch.randint(words // 4, words, (batch, columns), generator=generator).to(model.device)


def generate(model: Any, cache: Any, ids: Tensor, new_tokens: int, *watches: LogitsProcessor) -> Any:
    """Stock `generate`, greedy, without an end; with our attention where the cache is ours."""
    lent = adapter.attached(model, cache) if isinstance(cache, adapter.KVCache) else contextlib.nullcontext()
    with torch.inference_mode(), lent:
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList(watches),
        )


def decode(model: Any, cache: Any, batch: int, columns: int, steps: int) -> list[float]:
    """Seconds of each of `steps` steps after a cache that holds `columns` columns; a first one is not counted."""
    watch = Stopwatch(model.device)
    generate(model, cache, prompt(model, batch, columns + 1), steps + 1, watch)
    return [b - a for a, b in zip(watch.times[:-1], watch.times[1:], strict=True)]


def prefill(model: Any, cache: Any, batch: int, columns: int) -> float:
    """Seconds until the first token is chosen."""
    ids = prompt(model, batch, columns)
    synchronize(model.device)
    started = time.perf_counter()
    generate(model, cache, ids, 1)
    synchronize(model.device)
    return time.perf_counter() - started
