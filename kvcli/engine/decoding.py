"""How tokens are chosen, and watching them come, as logits processors of stock `generate`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TextStreamer, TopPLogitsWarper

from kvcli.engine.adapter import KVCache
from kvcli.errors import UsageError


@dataclass(frozen=True)
class Decoding:
    """What `describe` lets users choose. Temperature 0 is greedy; repetition_penalty None is the model's own."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    num_beams: int = 1
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature > 0 and self.num_beams > 1:
            raise UsageError("a temperature above 0 needs --num-beams 1: beams and draws don't mix")


@dataclass(frozen=True)
class Step:
    """One forward pass: seconds since generation began, bytes of used slots, entries held by each row (mean of the
    layers). The first one is the prompt."""

    index: int
    seconds: float
    bytes_used: int
    held: tuple[float, ...]


class DrawPerRow(LogitsProcessor):
    """Sampling whose draws depend on a row's own seed, not on its neighbours.

    Adds Gumbel noise to the warped logits, so that the greedy choice that follows is an exact draw from their softmax
    (Gumbel-max). The noise is made on the host, one generator a row, so that it is the same on every device.
    """

    def __init__(self, decoding: Decoding, keys: Sequence[str]) -> None:
        self.warpers: list[Any] = [TemperatureLogitsWarper(decoding.temperature)]
        if decoding.top_p < 1:
            self.warpers.append(TopPLogitsWarper(decoding.top_p))
        self.generators = [torch.Generator().manual_seed(_seed(decoding.seed, key)) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        drawn = [torch.rand(scores.shape[-1], generator=g, dtype=torch.float64) for g in self.generators]
        gumbel = -torch.log(-torch.log(torch.stack(drawn).clamp(1e-300, 1 - 1e-16)))
        return scores + gumbel.to(scores)


@dataclass
class Watch(LogitsProcessor):
    """Notes what the cache holds after each forward pass, without asking the device for anything."""

    cache: KVCache
    listener: Callable[[Step], None] | None = None
    started: float = field(default_factory=time.perf_counter)
    steps: list[Step] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.steps and scores.is_cuda:
            torch.cuda.synchronize(scores.device)  # once, so that the time of the prompt is its own
        step = Step(len(self.steps), time.perf_counter() - self.started, self.cache.bytes_used(), self.cache.held())
        self.steps.append(step)
        if self.listener is not None:
            self.listener(step)
        return scores


class Stream(TextStreamer):
    """Hands finished pieces of text to a callback."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


def _seed(seed: int, key: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:8], "big") >> 1
