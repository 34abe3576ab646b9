"""What this machine's CPU is quick at. Knows nothing of models."""

from __future__ import annotations

import functools
import time

import torch

SIDE, TRIES = 512, 5
CLEARLY = 1.25  # times as fast, so that no two runs on one machine choose differently


@functools.cache
def prefers_bfloat16() -> bool:
    """Whether products of bfloat16 matrices take clearly less time here than those of float32.

    A CPU that has instructions for them is also measured: with AMX they take a third of the time, on some virtual
    machines twice as much. One without takes tens of times as long, and is not asked.
    """
    claims = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if not any(getattr(torch.cpu, name, lambda: False)() for name in claims):
        return False
    return CLEARLY * _seconds(torch.bfloat16) < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    matrix, each = torch.ones(SIDE, SIDE, dtype=dtype), []
    for _ in range(TRIES):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        each.append(time.perf_counter() - start)
    return min(each)
