"""Low-rank updates on a frozen Llama: attach them for training, collect them, merge them into plain weights.

Knows linear layers. Knows nothing of pictures or data. Source: Hu et al., "LoRA" (2021), `W + scale * b @ a`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SCALE = 2.0
DROPOUT = 0.2  # share of the inner values of an update that a training step leaves out
PLACES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
PLACES |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
RANKS = {"q": 16, "k": 16, "v": 16, "o": 16, "gate": 10, "up": 10, "down": 10}


class Update(nn.Module):
    """A frozen linear layer and its update; `Update.on = False` gives the layer as it was."""

    on = True

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if not Update.on:
            return y
        inner = nn.functional.linear(x.flatten(0, -2), self.a.to(x.dtype))
        inner = nn.functional.dropout(inner, DROPOUT, self.training)
        return torch.addmm(y.flatten(0, -2), inner, (SCALE * self.b).to(x.dtype).T).view_as(y)


def attach(model: nn.Module) -> dict[str, nn.Parameter]:
    """Put an update on every place of every layer of a Llama; the parameters, by their names in the weights file."""
    parameters = {}
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        for name, path in PLACES.items():
            parent, leaf = path.split(".")
            home = getattr(layer, parent)
            update = Update(getattr(home, leaf), RANKS[name]).train(home.training)
            setattr(home, leaf, update)
            parameters[f"lora.{number}.{name}.a"] = update.a
            parameters[f"lora.{number}.{name}.b"] = update.b
    return parameters


def merge(state: dict[str, Tensor], weights: dict[str, Tensor], prefix: str = "model.layers.") -> None:
    """Add the updates of a weights file to the plain weights of a Llama `state`, in place and in float32."""
    for key in [k for k in weights if k.startswith("lora.") and k.endswith(".a")]:
        _, number, name, _ = key.split(".")
        target = f"{prefix}{number}.{PLACES[name]}.weight"
        update = weights[key[:-1] + "b"].float() @ weights[key].float()
        state[target] = state[target].float() + SCALE * update
