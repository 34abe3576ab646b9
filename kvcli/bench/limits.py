"""How fast a step could be, how fast this machine is, and how many rows fit: the arithmetic beside the measurements.

A step reads the weights once and every row's cache once, and multiplies each weight with each row: it takes
max(bytes moved / copy bandwidth, operations / matrix rate), and the time in which Python and the library start it all,
as measured with a model that has next to nothing to compute. Knows numbers; loads no model of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcli.bench import running, synthetic
from kvcli.bench.shapes import Shape, build
from kvcli.policies.full import Full

COPIED = 2**27
"""Bytes of the measured copy: far more than a cache of the processor holds."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the measured matrix product."""
REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """Measured: bytes a second that a copy reads and writes together, operations a second of a large matrix product,
    seconds that a step of these many layers takes when there is nothing to compute."""

    bandwidth: float
    rate: float
    dispatch: float


@dataclass(frozen=True)
class Step:
    """What one step must do. read, written: bytes; operations: multiplications and additions."""

    read: int
    written: int
    operations: int


def step(shape: Shape, batch: int, kept: float, itemsize: int) -> Step:
    """The work of one step with `kept` entries a row, mean of the layers. Embeddings are looked up, not read whole."""
    read_numbers = shape.layers * shape.layer_numbers + shape.vocabulary * shape.hidden
    entry = shape.layers * shape.entry_numbers
    attention = 4 * shape.layers * shape.heads * shape.width
    return Step(
        read=int((read_numbers + batch * kept * entry) * itemsize),
        written=batch * entry * itemsize,
        operations=int(batch * (2 * read_numbers + kept * attention)),
    )


def seconds(work: Step, machine: Machine) -> float:
    """The least that a step takes on this machine."""
    return max((work.read + work.written) / machine.bandwidth, work.operations / machine.rate) + machine.dispatch


def largest_batch(memory: int, weights: int, row_peak: float) -> int:
    """Rows that fit beside the weights when each needs `row_peak` bytes at its peak."""
    return max(0, int((memory - weights) // row_peak)) if row_peak > 0 else 0


# --- measuring


def machine(shape: Shape, dtype: torch.dtype, device: torch.device) -> Machine:
    """What this machine can do, for models of as many layers as `shape`."""
    return Machine(bandwidth(device), rate(dtype, device), dispatch(shape, dtype, device))


def bandwidth(device: torch.device) -> float:
    source, target = (torch.ones(COPIED // 4, device=device) for _ in range(2))
    return 2 * COPIED / _fastest(lambda: target.copy_(source), device)


def rate(dtype: torch.dtype, device: torch.device) -> float:
    side = SIDE.get(device.type, 1024)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _fastest(lambda: left @ right, device)


def dispatch(shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """A step of a model that is as deep, and as narrow as can be."""
    narrow = Shape("narrow", shape.layers, 16, 16, 2, 1, 8, 64, True)
    model = build(narrow, dtype, device)
    cache = synthetic.ours(model, Full(), 1, 8, 64)
    synthetic.fill_ours(cache, synthetic.entries(narrow, 1, 8, dtype, device))
    return statistics.median(running.decode(model, cache, 1, 8, 40)[8:])


def _fastest(run: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        running.synchronize(device)
        started = time.perf_counter()
        run()
        running.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)
