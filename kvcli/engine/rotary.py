"""Turn cached keys by a number of positions, with the model's own frequencies and layout.

Knows rotary embeddings: which frequencies a layer uses, and which channels it pairs. It does not read this
from class names or settings: it lets the model compute the keys of one token at two positions and takes what
maps the one on the other, so that a layer is turned rightly or refused, never turned wrongly. Knows nothing
of caches and policies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.errors import UsageError

_PROBE_POSITIONS = (3, 214)


@dataclass(frozen=True)
class _Layout:
    """How a layer rotates its keys. `owner.name` is the buffer of frequencies, read anew at every turn."""

    owner: nn.Module
    name: str
    interleaved: bool  # pairs are (0, 1), (2, 3), ... instead of (0, r/2), (1, r/2 + 1), ...

    @property
    def frequencies(self) -> Tensor:
        """Radians a position, one for each pair of channels."""
        frequencies: Tensor = getattr(self.owner, self.name)
        return frequencies

    def turn(self, keys: Tensor, steps: Tensor) -> Tensor:
        return _turn(keys, steps, self.frequencies, self.interleaved)


class Rotator:
    """Turns cached keys of `model` (any decoder, or a vision-language model around one).

    Building one costs a forward pass of a single token. It handles rope and multi-axis rope (all axes move
    by the same number of positions), partial rotation, several frequencies in one model, and layers without
    rope, whose keys stay as they are. Scaled rope (yarn) needs nothing special: the scale is in the keys
    already and a turn keeps it.

    Raises UsageError if a layer rotates its keys in a way that is none of these, or with frequencies that
    change while the text grows ("dynamic").
    """

    def __init__(self, model: Any) -> None:
        decoder: nn.Module = model.get_decoder()
        buffers = _frequency_buffers(decoder)
        candidates = [_Layout(owner, name, kind) for owner, name in buffers for kind in (False, True)]
        with _restored(buffers):
            keys = _probe_keys(decoder)
            self._layouts = {layer: _find(candidates, pair, layer) for layer, pair in keys.items()}

    def rotates(self, layer: int) -> bool:
        """Whether the keys of this layer carry a rotation at all."""
        return self._layouts.get(layer) is not None

    def turn(self, keys: Tensor, steps: Tensor, layer: int) -> Tensor:
        """Keys as if their tokens stood `steps` positions later.

        Args:
            keys: `[B, H, S, D]`, rotated, as the cache of `layer` holds them.
            steps: whole numbers, `[B or 1, H or 1, S or 1]`; negative ones turn back.
            layer: index of the decoder layer.

        Returns:
            New keys, same shape and dtype; angles are float64 and the maths at least float32. From low
            precision turn a saved original, never the result of another turn.

        Raises:
            KeyError: the layer keeps no keys of its own.
        """
        layout = self._layouts[layer]
        return keys if layout is None else layout.turn(keys, steps)


def _turn(keys: Tensor, steps: Tensor, frequencies: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `2 * len(frequencies)` channels (RoFormer, arXiv 2104.09864, eq. 34)."""
    exact = torch.float32 if keys.device.type == "mps" else torch.float64
    angles = steps.to(keys.device, exact)[..., None] * frequencies.to(keys.device, exact)
    maths = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = angles.cos().to(maths), angles.sin().to(maths)
    rotary = 2 * frequencies.numel()
    turned, rest = keys[..., :rotary].to(maths), keys[..., rotary:]
    if interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
    else:
        x, y = turned.chunk(2, -1)
    parts = (x * cos - y * sin, y * cos + x * sin)
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((turned.to(keys.dtype), rest), -1)


def _frequency_buffers(decoder: nn.Module) -> list[tuple[nn.Module, str]]:
    """The buffers that hold rotation frequencies, as (module, name); one for each kind of layer."""
    found = []
    for owner in decoder.modules():
        for name, _ in owner.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                found.append((owner, name))
        types = getattr(owner, "rope_type", None)
        if any("dynamic" in kind for kind in (types.values() if isinstance(types, dict) else [types or ""])):
            raise UsageError(
                "This model's rotation frequencies change with the length of the text (dynamic rope), so its "
                "cached keys can't be moved: choose a policy that leaves positions alone."
            )
    return found


@contextmanager
def _restored(buffers: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Undo what a forward pass does to the frequencies: long rope sets them by the highest position."""
    saved = [getattr(owner, name).clone() for owner, name in buffers]
    try:
        yield
    finally:
        for (owner, name), frequencies in zip(buffers, saved, strict=True):
            getattr(owner, name).copy_(frequencies)


@torch.no_grad()
def _probe_keys(decoder: nn.Module) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys `[H, 1, D]` of the same token at the two probe positions, for every layer that caches keys.

    A lone token attends to itself alone, so its hidden states are the same at any position, in every layer:
    the two keys differ by the rotation and nothing else.
    """
    device = next(decoder.parameters()).device
    tokens = torch.ones(2, 1, dtype=torch.long, device=device)
    positions = torch.tensor(_PROBE_POSITIONS, device=device)[:, None]
    cache = decoder(input_ids=tokens, position_ids=positions, use_cache=True).cache
    keys = {layer: getattr(held, "keys", None) for layer, held in enumerate(cache.layers)}
    return {layer: (held[0], held[1]) for layer, held in keys.items() if held is not None and held.dim() == 4}


def _find(candidates: list[_Layout], keys: tuple[Tensor, Tensor], layer: int) -> _Layout | None:
    """The candidate that maps the first key on the second; None if both are equal (a layer without rope)."""
    first, second = keys
    steps = torch.tensor([[_PROBE_POSITIONS[1] - _PROBE_POSITIONS[0]]])
    answers: list[_Layout | None] = [None]
    answers += [layout for layout in candidates if 2 * layout.frequencies.numel() <= first.shape[-1]]
    errors = [_difference(layout.turn(first, steps) if layout else first, second) for layout in answers]
    least = min(errors)
    if least > max(1e-3, 16 * torch.finfo(first.dtype).eps):
        raise UsageError(
            f"Layer {layer} of this model places its keys in a way that is not known, so cached keys can't "
            "be moved: choose a policy that leaves positions alone."
        )
    return answers[errors.index(least)]


def _difference(a: Tensor, b: Tensor) -> float:
    """Mean difference as a share of the channel's size, so that no large channel hides the others."""
    a, b = a.to(torch.float32), b.to(torch.float32)
    return ((a - b).abs() / (a.abs() + b.abs()).clamp_min(1e-30)).mean().item()
