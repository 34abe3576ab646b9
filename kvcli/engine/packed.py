"""Linear layers whose weights lie in the order in which oneDNN reads them, for float32 on a CPU.

Stock float32 layers go through the BLAS library that torch was built with, which is slow on some processors when few
rows meet a large matrix, as in every step of decoding. The layers of the model are replaced; nothing else knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import StartError

ROWS = 16
"""Rows for which the order is chosen; others are served by it as well."""


class PackedLinear(nn.Module):
    """A linear layer for inference: [..., in] -> [..., out], equal to the stock one up to rounding."""

    def __init__(self, linear: nn.Linear, shared: bool) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        # a table that is also the embedding stays; any other is held once, packed
        self.weight = linear.weight if shared else nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.packed = packed

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return result


def pack(model: Any) -> Any:
    """Replace the linear layers of a float32 model on a CPU, in place, and return it.

    Raises `StartError` where this torch or the model can't do it.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise StartError("this torch was built without oneDNN: weights can't be packed")
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if any(child.weight.dtype != torch.float32 or child.weight.device.type != "cpu" for _, _, child in found):
        raise StartError("only float32 weights on a CPU can be packed: add --device cpu --dtype float32")
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, any(child.weight is table for table in tables)))
    return model
