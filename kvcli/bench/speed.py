"""Prefill, decode and memory of one piece of work under several arms: stock caches and ours, taken in turns.

Arms are interleaved, so that whatever else the machine does meets all of them; each ratio is taken within one round,
and the median over rounds is given with its smallest and largest. Knows models, caches and clocks; nothing of files,
tables and the terminal.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from kvcli.bench import memory, running, synthetic
from kvcli.bench.shapes import Shape
from kvcli.engine.packed import pack
from kvcli.engine.rotary import Rotator
from kvcli.policies import create
from kvcli.policies.base import Policy
from kvcli.policies.contract import Columns, Keep, LayerView, Prompt, Statistic

STOCK = ("dynamic", "static")
PREALLOCATED = "preallocated"
FULL = "full"
FULL_PLAIN = "full, plain weights"
STOCK_PACKED = "dynamic, packed weights"
WARM_UP = 4
"""Steps of each arm before the first round; they are not counted."""
COUNTED = 4
"""Steps while bytes are counted: every step after the prompt allocates alike."""


@dataclass(frozen=True)
class Gathering(Policy):
    """Gathers one statistic and keeps everything: what scores cost, and nothing else. Made by `gathering`."""

    name: ClassVar[str] = "gathering"
    frees_memory: ClassVar[bool] = False
    statistic: Statistic | None = None

    def statistics(self) -> tuple[Statistic, ...]:
        return () if self.statistic is None else (self.statistic,)

    def compress(self, view: LayerView) -> Keep | None:
        return None


@dataclass(frozen=True)
class Arm:
    """A cache to run with. policy None: a stock cache, whose kind is the name."""

    name: str
    policy: Policy | None = None
    packed: bool = False
    """Whether its model's linear layers are packed."""

    @property
    def is_stock(self) -> bool:
        return self.name in STOCK


@dataclass(frozen=True)
class Work:
    """batch rows of `context` prompt tokens each, of which `steps` steps are timed in the middle of an answer of
    `new_tokens`. prefill_rows: rows whose prompts are read when reading is timed."""

    batch: int
    context: int
    new_tokens: int = 32
    steps: int = 32
    rounds: int = 3
    prefill_rows: int = 1

    @property
    def columns(self) -> int:
        """Columns in the cache when the timed steps begin."""
        return self.context + self.ahead

    @property
    def ahead(self) -> int:
        """Answer tokens before the timed steps."""
        return max(0, self.new_tokens - self.steps) // 2

    def settled(self, policy: Policy) -> Policy:
        """The policy as it stands in the middle of the answer: it keeps what it kept of the prompt, and what came."""
        if not policy.frees_memory or policy.budget is None or not self.ahead:
            return policy
        kept, rule = policy.target(self.context), getattr(policy, "decode", "grow")
        if rule == "ratio":
            kept = int(kept / self.context * self.columns)
        elif rule != "bounded":
            told = Prompt(torch.ones(1, 1), torch.zeros(1, 1), (self.context,), self.ahead)
            kept += min(self.ahead, policy.growth(told))
        return dataclasses.replace(policy, budget=min(kept, self.columns))


@dataclass
class Measured:
    """What was found of one arm. Seconds: one for each round. Bytes: of the whole batch (decode)
    or of `prefill_rows` (prefill), above the weights."""

    arm: Arm
    step_seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    kept: float | None = None
    kept_of_prompt: float | None = None
    prefill: memory.Memory | None = None
    decode: memory.Memory | None = None
    bytes_used: int | None = None
    bytes_reserved: int | None = None
    bytes_side: int | None = None


@dataclass
class Bench:
    """A model to measure with. tell: hears what is being done. stop: asked between two measurements whether to end."""

    model: Any
    shape: Shape
    tell: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.model.get_output_embeddings().weight.dtype
        return found

    @cached_property
    def rotator(self) -> Rotator:
        return Rotator(self.model)

    @cached_property
    def packed(self) -> Any:
        """The same model with packed weights."""
        return pack(copy.deepcopy(self.model))

    def model_of(self, arm: Arm) -> Any:
        return self.packed if arm.packed else self.model

    # --- what is measured

    def decode(self, work: Work, found: Sequence[Measured]) -> None:
        """Time the steps of every arm, in turns."""
        given = self._entries(work)
        for each in found:
            if self.stop():
                return
            self.tell(f"decode {work.batch} x {work.columns}, warm-up: {each.arm.name}")
            self._steps(work, each.arm, given, WARM_UP)
        for number in range(work.rounds):
            for each in found:
                if self.stop():
                    return
                self.tell(f"decode {work.batch} x {work.columns}, round {number + 1} of {work.rounds}: {each.arm.name}")
                times, held = self._steps(work, each.arm, given, work.steps)
                each.step_seconds.append(statistics.median(times))
                each.kept = held

    def prefill(self, work: Work, found: Sequence[Measured]) -> None:
        """Time the reading of a prompt under every arm, in turns."""
        rows, context = work.prefill_rows, work.context
        short = min(context, 64)
        for each in found:
            running.prefill(self.model_of(each.arm), self._empty(each.arm, 1, short, 2), 1, short)
        for number in range(work.rounds):
            for each in found:
                if self.stop():
                    return
                self.tell(f"prefill {rows} x {context}, round {number + 1} of {work.rounds}: {each.arm.name}")
                cache = self._empty(each.arm, rows, context, work.new_tokens)
                each.prefill_seconds.append(running.prefill(self.model_of(each.arm), cache, rows, context))
                del cache
                gc.collect()

    def bytes_of_prefill(self, work: Work, found: Sequence[Measured]) -> None:
        """Count the bytes that reading a prompt needs, and what is held after it."""
        rows, context = work.prefill_rows, work.context
        for each in found:
            if self.stop():
                return
            self.tell(f"bytes of a prefill {rows} x {context}: {each.arm.name}")

            def empty(arm: Arm = each.arm) -> Any:
                return self._empty(arm, rows, context, work.new_tokens)

            def read(cache: Any, each: Measured = each) -> Any:
                running.prefill(self.model_of(each.arm), cache, rows, context)
                if each.arm.policy is not None:
                    each.bytes_used, each.bytes_reserved = cache.bytes_used(), cache.bytes_reserved()
                    each.bytes_side = cache.bytes_side()
                    each.kept_of_prompt = statistics.fmean(cache.held())
                return cache

            each.prefill = memory.measure(self.device, empty, read)

    def bytes_of_decode(self, work: Work, found: Sequence[Measured]) -> None:
        """Count the bytes that steps need: the cache, and what they take on top."""
        given = self._entries(work)
        for each in found:
            if self.stop():
                return
            self.tell(f"bytes of decode {work.batch} x {work.columns}: {each.arm.name}")

            def fill(arm: Arm = each.arm) -> Any:
                return self._filled(work, arm, given)

            def run(cache: Any, model: Any = self.model_of(each.arm)) -> Any:
                running.decode(model, cache, work.batch, work.columns, COUNTED)
                return cache

            each.decode = memory.measure(self.device, fill, run)

    # --- inside

    def _entries(self, work: Work) -> synthetic.Entries:
        return synthetic.entries(self.shape, work.batch, work.columns, self.dtype, self.device)

    def _steps(self, work: Work, arm: Arm, given: synthetic.Entries, steps: int) -> tuple[list[float], float]:
        """Seconds of each step, and entries of a row at the end of them."""
        cache = self._filled(work, arm, given)
        times = running.decode(self.model_of(arm), cache, work.batch, work.columns, steps)
        held = work.columns + steps + 1.0 if arm.policy is None else statistics.fmean(cache.held())
        del cache
        gc.collect()
        return times, held

    def _empty(self, arm: Arm, batch: int, columns: int, new_tokens: int) -> Any:
        if arm.policy is None:
            return synthetic.stock(arm.name.partition(",")[0], self.model.config, new_tokens + 2, columns)
        rotator = self.rotator if arm.policy.needs_rotation else None
        return synthetic.ours(self.model, arm.policy, batch, columns, new_tokens + 2, rotator)

    def _filled(self, work: Work, arm: Arm, given: synthetic.Entries) -> Any:
        policy = None if arm.policy is None else work.settled(arm.policy)
        with torch.inference_mode():
            cache = self._empty(Arm(arm.name, policy), work.batch, work.columns, work.steps)
            if policy is None:
                synthetic.fill_stock(cache, given)
            else:
                synthetic.fill_ours(cache, given)
        return cache


# --- arms


def stock_arms(static: bool = True) -> list[Arm]:
    """The library's own caches."""
    return [Arm(kind) for kind in STOCK if static or kind != "static"]


def full() -> Arm:
    """Ours, nothing compressed."""
    return Arm(FULL, create("full"))


def compressed(name: str, budget: float | int | None, **options: Any) -> Arm:
    """Ours under a policy; budget None: the policy's own thresholds."""
    chosen = "" if budget is None else f" {budget:g}"
    return Arm(f"{name}{chosen}", create(name, budget=budget, **options))


def column_sums() -> Arm:
    """Ours, full, with the attention that each token gets from all queries."""
    return Arm("column sums", Gathering(statistic=Columns("score", heads="mean")))


def last_rows(window: int = 32) -> Arm:
    """Ours, full, with the attention that each token gets from the last queries."""
    return Arm(
        f"last {window}", Gathering(statistic=Columns("votes", queries="last", window=window, heads="group-mean"))
    )


def with_packed_weights(arms: Sequence[Arm]) -> list[Arm]:
    """The same arms, ours with packed weights; ours full without and the stock cache with them, so that what they gain
    and what is gained beside them is known."""
    result = []
    for each in arms:
        if each.name == STOCK[0]:
            result += [each, Arm(STOCK_PACKED, packed=True)]
            continue
        if each.name == FULL:
            result.append(dataclasses.replace(each, name=FULL_PLAIN))
        result.append(each if each.policy is None else dataclasses.replace(each, packed=True))
    return result


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float] | None:
    """(median, smallest, largest) of above / below, round by round; None where no round has both."""
    each = [a / b for a, b in zip(above, below, strict=False)]
    return (statistics.median(each), min(each), max(each)) if each else None
