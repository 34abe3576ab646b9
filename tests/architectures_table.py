"""Writes `kvcli/engine/ARCHITECTURES.md`: what the engine tests proved on each architecture, and the largest error.

`python tests/architectures_table.py` runs the whole matrix (minutes); with a file of proofs (see `proofs.py`) as its
argument it only writes the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import architectures
from proofs import TOLERANCE

from kvcli.engine.adapter import layer_report

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "kvcli" / "engine" / "ARCHITECTURES.md"
TESTS = [f"tests/test_{name}.py" for name in ("engine_oracle", "engine_life", "statistics")]

COLUMNS: dict[str, Callable[[str], bool]] = {
    "full cache": lambda what: what == "stock",
    "random decisions": lambda what: what == "oracle",
    "beams": lambda what: what in ("beams", "repeats"),
    "policies": lambda what: what.startswith("policy "),
    "statistics": lambda what: what.startswith("statistics"),
    "in chunks": lambda what: what == "chunks",
    "drafts": lambda what: what == "drafts",
    "later turn": lambda what: what == "later text",
    "later picture": lambda what: what == "later picture",
}

INTRODUCTION = f"""\
# What is proved on which architecture

Written by `python tests/architectures_table.py`; not by hand.

Every architecture is a tiny model with random weights, real attention heads and pictures (where it takes any), in
batches of one and of three rows of different length. Numbers are the largest error found, as a share of the largest
logit or statistic, in float32; the tests allow {TOLERANCE:.0e}. Where tokens are compared, they are the same.

- **full cache**: nothing compressed, against the library's own `generate`.
- **random decisions**: entries kept, dropped, merged, rewritten and biased at random, for each row and KV head, against
  a full, plain cache with masked softmax that replays the same decisions.
- **beams**: the same with beam search, repeated sequences and drawn tokens.
- **policies**: every policy that is installed, against the same plain cache (Gemma 4 in float64: with random weights it
  makes much of rounding).
- **statistics**: what policies are shown, against the library's eager attention.
- **in chunks**: the prompt fed in pieces. **drafts**: prompt lookup, whose wrong guesses are taken back.
- **later turn**: further text on the same cache. **later picture**: a further picture on it.

A dash: not tried, or refused by the library itself.
"""


def run() -> Path:
    """Run the whole matrix and return its proofs. Raises `SystemExit` when a test fails."""
    proofs = Path(tempfile.mkdtemp()) / "proofs.jsonl"
    command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "slow or not slow", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "KVCLI_PROOFS": str(proofs)}, check=False)
    if done.returncode:
        raise SystemExit("a test failed; the table stays as it is")
    return proofs


def largest(proofs: Path) -> dict[str, dict[str, tuple[float, int]]]:
    """By architecture and column: the largest error and the number of proofs."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in proofs.read_text(encoding="utf-8").splitlines():
        proof = json.loads(line)
        for column, includes in COLUMNS.items():
            if includes(proof["what"]):
                found[proof["architecture"]][column].append(proof["error"])
    return {name: {c: (max(e), len(e)) for c, e in columns.items()} for name, columns in found.items()}


def compressed_layers(name: str) -> tuple[str, list[str]]:
    """`4 of 5`, and why the others are left alone."""
    report = layer_report(architectures.build(name).model.config)
    left = {f"{kind.replace('_', ' ')}: {why}" for _, kind, ok, why in report if not ok}
    return f"{sum(ok for _, _, ok, _ in report)} of {len(report)}", sorted(left)


def table(proofs: Path) -> str:
    found = largest(proofs)
    lines = ["| model | attention | layers | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 3)]
    reasons: dict[str, list[str]] = {}
    for name in architectures.names():
        layers, left = compressed_layers(name)
        if left:
            reasons[name] = left
        tags = sorted(architectures.build(name).tags - {"picture"})
        cells = [f"{found[name][c][0]:.0e}" if c in found.get(name, {}) else "–" for c in COLUMNS]
        lines.append("| " + " | ".join([name, ", ".join(tags), layers, *cells]) + " |")
    proofs_in_all = sum(count for columns in found.values() for _, count in columns.values())
    left_alone = [f"- {name}, {reason}." for name, why in reasons.items() for reason in why]
    return "\n".join(
        [INTRODUCTION, *lines, "", f"{proofs_in_all} proofs in all.", "", "## Layers left alone", "", *left_alone, ""]
    )


def main() -> None:
    proofs = Path(sys.argv[1]) if len(sys.argv) > 1 else run()
    TARGET.write_text(table(proofs), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
