"""Attention output and column sums by `flex_attention`, which on a GPU never writes attention weights to memory.

Knows tensors, nothing of transformers and policies. Two fused passes: the first gives the output and of each query the
logarithm of its normaliser, lse_q = log sum_k exp(s_qk). The second has queries and keys change places and takes the
same logarithm over queries, of scores less lse_q: its exponential is sum_q exp(s_qk - lse_q), the column sum of key k.

Not measured on a GPU yet, so `DEVICES` is empty; tests compare it with the block by block pass on a CPU, where it is
not fused: torch's compiled CPU kernel gives no lse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

DEVICES: set[str] = set()
"""Types of devices on which statistics of a prompt are gathered this way."""

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""bool of (row, head, query, key)."""


class Prompt:
    """Queries [B, H, T, D] over keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] of a type that computes.

    mask: bool [B or 1, 1, T, S], or None where query t sees the first S - T + t + 1 keys.
    """

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> None:
        self.query, self.keys, self.scale = query, keys, scale
        self.visible = _visible(mask, keys.shape[2] - query.shape[2])
        block = self._block_mask(self.visible, 1 if mask is None else mask.shape[0], query.shape[2], keys.shape[2])
        self.output, self.normaliser = self._run(query, keys, values, block, None)

    def column_sums(self, chosen: Tensor) -> Tensor:
        """Attention that each key gets of the chosen queries, bool [B, T]: float32 [B, H, S]."""
        visible, normaliser = self.visible, self.normaliser

        def asked(row: Tensor, head: Tensor, key: Tensor, query: Tensor) -> Tensor:
            return visible(row, head, query, key) & chosen[row, query]

        def share(score: Tensor, row: Tensor, head: Tensor, key: Tensor, query: Tensor) -> Tensor:
            return score - normaliser[row, head, query]

        keys = self.keys.repeat_interleave(self.query.shape[1] // self.keys.shape[1], 1)
        block = self._block_mask(asked, len(chosen), keys.shape[2], self.query.shape[2])
        _, total = self._run(keys, self.query, self.query, block, share)
        return total.exp()  # of a key that no chosen query sees the logarithm is -inf

    def _block_mask(self, visible: Visible, rows: int, queries: int, keys: int) -> BlockMask:
        return create_block_mask(visible, rows, None, queries, keys, device=str(self.query.device))

    def _run(self, query: Tensor, keys: Tensor, values: Tensor, block: BlockMask, score: Any) -> tuple[Tensor, Tensor]:
        """Output, and the logarithm of the normaliser [B, H, T]."""
        run = _fused() if query.is_cuda else flex_attention
        output, beside = run(
            query,
            keys,
            values,
            score_mod=score,
            block_mask=block,
            scale=self.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return output, beside.lse


@cache
def _fused() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _visible(mask: Tensor | None, before: int) -> Visible:
    if mask is None:
        return lambda row, head, query, key: key <= query + before
    rows = mask[:, 0]
    if len(rows) == 1:
        return lambda row, head, query, key: rows[0, query, key]
    return lambda row, head, query, key: rows[row, query, key]
