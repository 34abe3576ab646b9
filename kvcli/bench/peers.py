"""kvpress beside ours: the same weights, prompts, budget and number type, taking turns.

kvpress needs an older transformers than kvcli, so it gets a virtual environment of its own in the cache folder, made on
the first use, and runs in a child process that waits while ours is measured. Knows environments and processes; the
child's side is `peer_child`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock

from kvcli.bench import results, running, synthetic
from kvcli.bench.results import JSON
from kvcli.bench.speed import ratio
from kvcli.bench.suite import Setting
from kvcli.builtin import build, parts
from kvcli.engine.packed import pack
from kvcli.engine.rotary import Rotator
from kvcli.errors import StartError
from kvcli.policies import create
from kvcli.policies.base import Policy

WANTED = "kvpress==0.5.5"
CONTEXT, BUDGET = 1024, 0.2
BATCHES = (1, 8)
WEIGHTS = "SmolLM2-135M-Instruct"
SMALLEST, LARGEST = 1_000, 40_000
"""Token ids that are drawn: neither special ones nor rare ones."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A press of theirs, and the policy of ours that keeps the same kind of entries. `mirrored` is what makes them
    alike: both compress the prompt once and keep all that is generated."""

    press: str
    options: JSON
    policy: str
    mirrored: JSON

    def ours(self) -> Policy:
        return create(self.policy, budget=BUDGET, **self.mirrored)


PAIRS = (
    Pair("SnapKVPress", {"window_size": 32}, "snapkv", {"window": 32}),
    Pair("StreamingLLMPress", {"n_sink": 4}, "streaming", {"positions": "original", "decode": "grow"}),
    Pair("ObservedAttentionPress", {}, "h2o", {"recent": 0.0, "decode": "grow"}),
)


@dataclass
class Times:
    """Of one side: seconds of each round, and entries kept of the prompt."""

    prefill: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    kept: float | None = None

    def add(self, prefill: float, steps: Sequence[float], kept: float) -> None:
        self.prefill.append(prefill)
        self.step.append(statistics.median(steps))
        self.kept = kept

    def as_json(self) -> JSON:
        return {
            "prefill_seconds": results.spread(self.prefill),
            "step_seconds": results.spread(self.step),
            "kept": self.kept,
        }


class Child:
    """The process in the other environment. Use it as a context."""

    def __init__(self, python: Path, weights: Path, dtype: str, threads: int) -> None:
        script = Path(__file__).with_name("peer_child.py")
        settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(script), str(weights), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: what the child is at can still be finished
            env={**os.environ, **settings},
        )

    def ask(self, request: JSON) -> JSON:
        """Send a request and wait for its answer. Raises `StartError` when the process has died."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise StartError("kvpress's process ended early (what it said is above); remove its folder to make it anew")
        answer: JSON = json.loads(line)
        return answer

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def run(document: JSON, setting: Setting) -> None:
    """Measure every press beside its policy, at each batch."""
    if setting.device.type != "cpu":
        raise StartError("--peers compares on the CPU: add --device cpu")
    python = environment(setting)
    folder, model = weights(setting)
    if setting.packed:
        pack(model)
    number = str(setting.dtype).removeprefix("torch.")
    found = {(batch, pair): (Times(), Times()) for batch in BATCHES for pair in PAIRS}
    with Child(python, folder, number, torch.get_num_threads()) as child:
        versions = child.ask({})
        try:
            for batch in BATCHES:
                _rounds(batch, found, child, model, setting)
        finally:
            document["sections"]["peers"] = section(found, versions)


def _rounds(
    batch: int, found: dict[tuple[int, Pair], tuple[Times, Times]], child: Child, model: Any, setting: Setting
) -> None:
    ids = prompts(batch)
    for pair in PAIRS:  # one unmeasured run of each side
        if not setting.stop():
            _theirs(child, pair, ids[:1], 2)
            _ours(model, pair, ids[:1], 2)
    for number in range(setting.rounds):
        for pair in PAIRS:
            if setting.stop():
                return
            setting.tell(f"{pair.press}, batch {batch}, round {number + 1} of {setting.rounds}")
            theirs, ours = found[batch, pair]
            theirs.add(*_theirs(child, pair, ids, setting.steps))
            ours.add(*_ours(model, pair, ids, setting.steps))


def section(found: dict[tuple[int, Pair], tuple[Times, Times]], versions: JSON) -> JSON:
    """What was measured, and the ratios that are judged (theirs / ours: above 1 ours is faster)."""
    presses = []
    for (batch, pair), (theirs, ours) in found.items():
        if ours.step:
            presses.append(
                {
                    "batch": batch,
                    "press": pair.press,
                    "policy": pair.policy,
                    "options": pair.mirrored,
                    "theirs": theirs.as_json(),
                    "ours": ours.as_json(),
                    "prefill": ratio(theirs.prefill, ours.prefill),
                    "decode": ratio(theirs.step, ours.step),
                }
            )
    return {
        "weights": WEIGHTS,
        "context": CONTEXT,
        "budget": BUDGET,
        "versions": versions,
        "complete": len(presses) == len(found),
        "presses": presses,
        "ratios": ratios(presses),
    }


def ratios(presses: Sequence[JSON]) -> JSON:
    """The worst of the presses, for each promise; None where one of them is missing."""

    def worst(batch: int, *parts: str) -> Any:
        each = [p[part] for p in presses if p["batch"] == batch for part in parts]
        return min(each) if len(each) == len(PAIRS) * len(parts) else None

    observed = [p["prefill"] for p in presses if p["press"] == "ObservedAttentionPress"]
    return {
        "batch_1": worst(1, "prefill", "decode"),
        "decode_8": worst(8, "decode"),
        "observed_prefill": min(observed, default=None),
    }


def prompts(batch: int) -> list[list[int]]:
    """Token ids of equally long prompts, the same at each call."""
    dice = random.Random(3)
    return [[dice.randrange(SMALLEST, LARGEST) for _ in range(CONTEXT)] for _ in range(batch)]


# --- what both sides need


def environment(setting: Setting) -> Path:
    """The Python of kvpress's environment, which is made when it is not there."""
    folder = parts.cache_folder() / "peers"
    place = folder / WANTED.replace("==", "-")
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(str(place) + ".lock"):
        done = place / "complete"
        if not done.exists():
            setting.tell(f"making an environment for {WANTED} in {place}")
            venv.create(place, with_pip=True, clear=True)
            # torch first, and the same one: left to itself, pip may bring a CUDA build of several GB
            torch_wanted = f"torch=={torch.__version__}"
            _pip(python, [torch_wanted], [f"torch=={torch.__version__.partition('+')[0]}"])
            _pip(python, [WANTED, torch_wanted], [WANTED])
            done.touch()
    return python


def _pip(python: Path, wanted: Sequence[str], otherwise: Sequence[str]) -> None:
    """Install packages; a second choice where the first can't be had (a local build's version is known to few)."""
    for packages in (wanted, otherwise):
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        if result.returncode == 0:
            return
    lines = result.stderr.strip().splitlines() or ["no reason given"]
    raise StartError(f"{' '.join(otherwise)} can't be installed for --peers: {lines[-1]}")


def weights(setting: Setting) -> tuple[Path, Any]:
    """A folder of the language model that both sides load, and the model as ours runs it."""
    folder = parts.cache_folder() / "peers" / WEIGHTS
    model, _ = build.language_model()
    with FileLock(str(folder) + ".lock"):
        if not (folder / "config.json").exists():
            setting.tell(f"writing {WEIGHTS} to {folder}")
            model.save_pretrained(folder)
    return folder, model.to(setting.dtype)


def _theirs(child: Child, pair: Pair, ids: list[list[int]], steps: int) -> tuple[float, list[float], float]:
    request = {"press": pair.press, "options": pair.options, "budget": BUDGET, "ids": ids, "steps": steps}
    answer = child.ask(request)
    return answer["prefill"], answer["steps"], answer["kept"]


def _ours(model: Any, pair: Pair, ids: list[list[int]], steps: int) -> tuple[float, list[float], float]:
    """One prompt and `steps` steps of stock `generate` with our cache; the first step is not counted."""
    policy = pair.ours()
    rotator = Rotator(model) if policy.needs_rotation else None
    cache = synthetic.ours(model, policy, len(ids), CONTEXT, steps + 2, rotator)
    watch = running.Stopwatch(model.device)
    started = watch.now()
    running.generate(model, cache, torch.tensor(ids), steps + 2, watch)
    times = [b - a for a, b in zip(watch.times[:-1], watch.times[1:], strict=True)]
    return watch.times[0] - started, times[1:], statistics.fmean(cache.held()) - steps - 1
