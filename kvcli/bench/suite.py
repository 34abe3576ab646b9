"""Whole runs of the speed bench: the targets, or work of the user's own, collected in one document.

What was measured before an interruption is in the document. Knows what must be measured in which order; files, tables
and the terminal are others' business.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import kvcli
from kvcli.bench import limits, results, shapes, speed
from kvcli.bench.results import JSON
from kvcli.bench.speed import Arm, Bench, Measured, Work
from kvcli.bench.targets import CASES, SHAPE, as_json, judged
from kvcli.engine import loading

PREFILL_OPERATIONS = 2e12
"""On a CPU as many rows are read as need no more than this: a prompt takes each row the same time."""
PAPERS = ((8, 1024, 512), (16, 624, 256), (16, 1024, 512))
"""Batch, prompt and answer of Elastic Cache's published measurements (Tab. 4), at a fifth of the cache kept."""

Tell = Callable[[str], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Setting:
    """Where and in what numbers to measure. tell, stop: as in `speed.Bench`."""

    device: torch.device
    dtype: torch.dtype
    rounds: int = 3
    steps: int = 32
    memory: int | None = None
    packed: bool = False
    """Whether ours runs with packed weights."""
    tell: Tell = lambda text: None
    stop: Stop = lambda: False

    @property
    def limit(self) -> int:
        """Bytes for the largest batch: what was asked for, or all that the device has."""
        return total_memory(self.device) if self.memory is None else self.memory


def facts(setting: Setting) -> JSON:
    """What a table must name: the machine, the number type, threads and versions."""
    return {
        "device": str(setting.device),
        "device_name": device_name(setting.device),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "weights": "packed" if setting.packed else "plain",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory": total_memory(setting.device),
        "limit_of_memory": setting.limit,
        "versions": {"kvcli": kvcli.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
        "date": time.strftime("%Y-%m-%d"),
    }


def new(setting: Setting, command: str) -> JSON:
    """An empty document."""
    return {"schema": results.SCHEMA, "command": command, "machine": facts(setting), "sections": {}, "targets": []}


def run_targets(document: JSON, setting: Setting, names: Sequence[str]) -> None:
    """Measure the named cases."""
    wanted = [CASES[name] for name in names if name in CASES]
    if wanted:
        shape = shapes.find(SHAPE)
        bench = _bench(shape, setting)
        machine = _machine(document, shape, setting)
        for case in wanted:
            rounds, steps = setting.rounds * case.more, setting.steps
            work = dataclasses.replace(case.work, rounds=rounds, steps=steps, new_tokens=steps)
            found = [Measured(arm) for arm in _with_weights(case.arms(), setting)]
            both = (bench.decode, bench.bytes_of_decode) if case.decode else (bench.prefill, bench.bytes_of_prefill)
            try:
                for measure in both:
                    measure(work, found)
            finally:
                document["sections"][case.name] = _section(work, shape, found, machine, setting)
            if setting.stop():
                return


def judge(document: JSON) -> None:
    """Say of every promise whether it was kept, as far as it was measured."""
    document["targets"] = [as_json(row) for row in judged(document["sections"])]


def run_works(
    document: JSON, setting: Setting, bench: Bench, shape: shapes.Shape, works: Sequence[Work], arms: Sequence[Arm]
) -> None:
    """Measure everything of each piece of work: steps, prompts, bytes."""
    machine = _machine(document, shape, setting)
    for work in works:
        found = [Measured(arm) for arm in _with_weights(arms, setting)]
        whole = [each for each in found if each.arm.name != speed.PREALLOCATED]
        plan = (
            (bench.decode, found),
            (bench.bytes_of_decode, whole),
            (bench.prefill, whole),
            (bench.bytes_of_prefill, whole),
        )
        name = f"{shape.name} {work.batch}x{work.context}+{work.new_tokens}"
        try:
            for measure, each in plan:
                measure(work, each)
        finally:
            document["sections"][name] = _section(work, shape, found, machine, setting)
        if setting.stop():
            return


def random_model(shape: shapes.Shape, setting: Setting) -> Bench:
    """A model of a shape that was fitted."""
    return _bench(shape, setting)


def loaded_model(name: str, setting: Setting, **how: Any) -> tuple[Bench, shapes.Shape]:
    """A model of the user's, by name or folder. how: as `loading.load`."""
    dtype = str(setting.dtype).removeprefix("torch.")
    model = loading.load(name, device=str(setting.device), dtype=dtype, **how).model
    shape = shapes.of_config(name, model.config)
    return Bench(model, shape, setting.tell, setting.stop), shape


def fitted(shape: shapes.Shape, works: Sequence[tuple[int, int, int]], setting: Setting) -> shapes.Shape:
    """As many layers as the device's free memory takes, for the largest of (batch, context, new tokens)."""
    entries = max(batch * (context + new) for batch, context, new in works)
    return shape.fitted(loading.free_bytes(setting.device), entries, setting.dtype.itemsize)


def work(shape: shapes.Shape, batch: int, context: int, new_tokens: int, setting: Setting) -> Work:
    """One piece of work; on a CPU with as many rows to read as are read in bearable time."""
    rows = batch
    if setting.device.type == "cpu":
        each = 2 * context * shape.layers * shape.layer_numbers
        rows = max(1, min(batch, int(PREFILL_OPERATIONS // each)))
    steps = min(setting.steps, new_tokens)
    return Work(batch, context, new_tokens, steps, setting.rounds, rows)


def arms(policies: Sequence[str], budgets: Sequence[float | int], options: JSON) -> list[Arm]:
    """Stock caches, ours full, and ours under each policy and budget."""
    chosen = [speed.compressed(name, budget, **options.get(name, {})) for name in policies for budget in budgets]
    return [*speed.stock_arms(), Arm(speed.PREALLOCATED), speed.full(), *chosen]


def total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def device_name(device: torch.device) -> str:
    """The name of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    chip = names[0] if names else platform.processor() or platform.machine()
    return f"{chip} ({torch.backends.cpu.get_cpu_capability()})"


# --- inside


def _with_weights(arms: Sequence[Arm], setting: Setting) -> Sequence[Arm]:
    return speed.with_packed_weights(arms) if setting.packed else arms


def _bench(shape: shapes.Shape, setting: Setting) -> Bench:
    setting.tell(f"random weights: {shape.name}, {shape.layers} of {shape.whole or shape.layers} layers")
    return Bench(shapes.build(shape, setting.dtype, setting.device), shape, setting.tell, setting.stop)


def _machine(document: JSON, shape: shapes.Shape, setting: Setting) -> limits.Machine:
    setting.tell("how fast this machine copies and multiplies")
    found = limits.machine(shape, setting.dtype, setting.device)
    document["machine"]["measured"] = dataclasses.asdict(found)
    return found


def _section(
    work: Work, shape: shapes.Shape, found: Sequence[Measured], machine: limits.Machine, setting: Setting
) -> JSON:
    return results.section(work, shape, setting.dtype.itemsize, found, machine, setting.limit)
