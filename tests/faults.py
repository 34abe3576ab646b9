"""Deliberate faults, and the tests that notice each: `python tests/faults.py` prints the table.

A fault is a small change of the source in a copy of the package; the tests named with it must pass without it and fail
with it. All of these write fluent text and raise nothing by themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Fault:
    """changes: (file, old text, new text). tests: what must notice, as pytest is told."""

    name: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


ADAPTER, LAYERS = "kvcli/engine/adapter.py", "kvcli/engine/layers.py"
CACHE, ATTENTION = "kvcli/engine/cache.py", "kvcli/engine/attention.py"
MASKS, CONTRACT = "kvcli/engine/masks.py", "kvcli/policies/contract.py"
ORACLE = "tests/test_engine_oracle.py::"

FAULTS = (
    Fault(
        "physical instead of logical length",
        (
            (
                LAYERS,
                "    def get_seq_length(self) -> int:\n        return self.store.seen",
                "    def get_seq_length(self) -> int:\n        return self.store.extent",
            ),
            (LAYERS, "return self.store.seen + query_length, 0", "return self.store.extent + query_length, 0"),
            (MASKS, "    if positions is None:\n        return mask", "    if True:\n        return mask"),
        ),
        (ORACLE + "test_random_decisions_in_batches_and_beams",),
    ),
    Fault(
        "mask dropped in decode",
        (
            (
                MASKS,
                "    if positions is None:\n",
                "    if queries == 1:\n        return None\n    if positions is None:\n",
            ),
        ),
        (ORACLE + "test_random_decisions_in_batches_and_beams",),
    ),
    Fault(
        "-1 treated as 0",
        (
            (MASKS, "    occupied = (positions >= 0)[:, :, None]", "    occupied = (positions >= -1)[:, :, None]"),
            (MASKS, "return occupied if holes else None", "return None"),
        ),
        (ORACLE + "test_random_decisions_in_batches_and_beams",),
    ),
    Fault(
        "side tensor not reordered by beams",
        ((CACHE, "self.side = {name: rows(t) for name, t in self.side.items()}", "pass"),),
        (ORACLE + "test_random_decisions_in_batches_and_beams",),
    ),
    Fault(
        "sinks rotated twice",
        (
            (
                "kvcli/policies/streaming.py",
                "turned = view.turn(originals,",
                "turned = view.turn(view.keys[:, :, :width],",
            ),
        ),
        ("tests/test_policies_baselines.py",),
    ),
    Fault(
        "padding rows counted in scores",
        (
            (
                CONTRACT,
                '        if queries == "all":\n            return self.real',
                '        if queries == "all":\n            return self.real | True',
            ),
        ),
        ("tests/test_statistics.py::test_all_reducers_equal_eager_attention",),
    ),
    Fault(
        "cache replaced by the library unnoticed",
        (("kvcli/engine/session.py", "if output.cache is not cache:", "if False:"),),
        ("tests/test_engine_life.py::test_a_cache_that_the_library_replaced_is_an_error",),
    ),
    Fault(
        "query heads of a group in the wrong order",
        (
            (
                ATTENTION,
                "rows = scaled[:, :, begin:end].reshape(batch, kv_heads, group * (end - begin), -1)",
                "rows = scaled[:, :, begin:end].unflatten(1, (group, kv_heads)).transpose(1, 2)"
                ".reshape(batch, kv_heads, group * (end - begin), -1)",
            ),
        ),
        ("tests/test_statistics.py::test_all_reducers_equal_eager_attention",),
    ),
    Fault(
        "scores of a group summed in the wrong order",
        (
            (
                ATTENTION,
                "_reduce_heads(value.view(value.shape[0], kv_heads, -1, *value.shape[2:]), statistic.heads)",
                "_reduce_heads(value.unflatten(1, (-1, kv_heads)).transpose(1, 2), statistic.heads)",
            ),
        ),
        ("tests/test_statistics.py::test_all_reducers_equal_eager_attention",),
    ),
    Fault(
        "rope_deltas left behind",
        ((ADAPTER, "            module.rope_deltas = value", "            pass"),),
        ("tests/test_engine_life.py::test_a_model_is_left_as_it_was_found",),
    ),
    Fault(
        "keys changed under layers that share them",
        ((CACHE, "if self.shared:", "if False:"),),
        (ORACLE + "test_random_decisions_on_every_architecture",),
    ),
    Fault(
        "a free slot counted that one head does not have",
        ((CACHE, "zip(self.free, leaving, strict=True)]", "zip(self.free, [slots.shape[-1]] * len(leaving))]"),),
        ("tests/test_cache.py::test_one_kind_of_operation_among_appends",),
    ),
    Fault(
        "merged entries weigh one",
        ((CACHE, 'self.side["counts"] = counts.scatter(-1, target, total)', "pass"),),
        ("tests/test_cache.py::test_one_kind_of_operation_among_appends",),
    ),
)


def noticed(fault: Fault) -> list[str]:
    """The tests that fail with a fault in place. Raises `ValueError` when the source no longer has what it changes."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "kvcli", copy / "kvcli", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for file, old, new in fault.changes:
            text = (copy / file).read_text(encoding="utf-8")
            if old not in text:
                raise ValueError(f"{fault.name}: {file} has no {old!r} any more")
            (copy / file).write_text(text.replace(old, new), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-rf",
            "--tb=no",
            "--maxfail=3",
            "-p",
            "no:cacheprovider",
            *fault.tests,
        ]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise ValueError(f"{fault.name}: the tests did not run: {done.stdout[-400:]}{done.stderr[-400:]}")
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]


def main() -> int:
    missed = 0
    for fault in FAULTS:
        failing = noticed(fault)
        missed += not failing
        first = failing[0] if failing else "NOT NOTICED"
        print(f"{fault.name:50s} {first}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
