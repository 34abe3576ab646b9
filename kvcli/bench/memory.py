"""Bytes of live tensors while something runs, as the allocator counts them.

On a GPU torch keeps these numbers itself; on a CPU they are summed up from what its profiler is told of every
allocation. Scratch space of matrix libraries is not seen. Knows nothing of what is run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PREPARED, DONE = "kvcli bench: prepared", "kvcli bench: done"


@dataclass(frozen=True)
class Memory:
    """Bytes above what was there before: held after `prepare`, at most during `run`, held after it."""

    before: int
    peak: int
    after: int


def measure(device: torch.device, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> Memory:
    """What `prepare()` allocates and keeps, and what `run` of its result needs on top. What both return is alive until
    all has been counted."""
    if device.type == "cuda":
        return _on_gpu(device, prepare, run)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepared = prepare()
        with record_function(PREPARED):
            pass
        result = run(prepared)
        with record_function(DONE):
            pass
        # freed while the profiler looks: it would take later blocks at these places for the ones that it knew
        del prepared, result
        gc.collect()
    events = profiler.profiler.kineto_results.events()
    marks = {event.name(): event.start_ns() for event in events if event.name() in (PREPARED, DONE)}
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return _summed([change for change in changes if change[0] < marks[DONE]], marks[PREPARED])


def _summed(changes: list[tuple[int, int]], mark: int) -> Memory:
    """changes: (when, bytes more or fewer), in order."""
    now = before = sum(size for when, size in changes if when < mark)
    peak = before
    for when, size in changes:
        if when >= mark:
            now += size
            peak = max(peak, now)
    return Memory(before, peak, now)


def _on_gpu(device: torch.device, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> Memory:
    start = torch.cuda.memory_allocated(device)
    prepared = prepare()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run(prepared)
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del prepared, result
    return Memory(before - start, peak - start, after - start)
