"""The cache of a whole model, given to stock `generate`: part of the seam with transformers.

Knows which layers are ours, what prompt was announced, and what everything takes; slots are the business of `cache`,
decisions that of policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvcli.engine.cache import LayerCache
from kvcli.engine.coordinates import Coordinates
from kvcli.engine.hidden import Survivors
from kvcli.engine.layers import KVLayer, PictureLayer
from kvcli.engine.layout import compressible, layout
from kvcli.engine.pictures import PictureTurn, Unplaced, picture_prompt
from kvcli.engine.rotary import Rotator
from kvcli.engine.run import Turn
from kvcli.errors import StartError
from kvcli.policies.base import Policy
from kvcli.policies.contract import Prompt


class KVCache(Cache):
    """A cache for one conversation of a batch under one policy.

    int8: whether entries are stored as int8 once their prompt is done. whole: whether sliding layers hold also what no
    later token can see, for a cache that others start from.

    Attention layers of the stock layout are ours; linear, convolution and shared ones stay stock.
    """

    def __init__(self, config: Any, policy: Policy, rotator: Rotator | None = None, int8: bool = False) -> None:
        self.policy = policy
        self.rotator = rotator
        self.int8 = int8
        self.prompt: Prompt | None = None
        self.survivors: Survivors | None = None
        self.coordinates = Coordinates()
        self.picture: Prompt | None = None
        self.shared: dict[str, Tensor] = {}
        self.shared_pictures: dict[str, Tensor] = {}
        self.whole = False
        self.bytes_peak = 0
        self._slid: dict[int, list[int]] = {}
        self._bytes_now = 0
        stocks, layers = layout(config), []
        shared = any(kind == "dummy" for kind, _ in stocks)
        for index, (kind, stock) in enumerate(stocks):
            window = getattr(stock, "sliding_window", None)
            if not compressible(stock):
                layers.append(stock)
            elif kind == "cross_attention":
                layers.append(PictureLayer(self, index))
            else:
                layers.append(KVLayer(self, index, kind, window, shared))
        super().__init__(layers=layers)
        if not self.ours:
            raise StartError("this model has no attention layer whose cache can be compressed")

    @property
    def ours(self) -> list[KVLayer]:
        """The layers that a policy acts on."""
        return [layer for layer in self.layers if isinstance(layer, KVLayer) and not isinstance(layer, PictureLayer)]

    @property
    def pictures(self) -> list[PictureLayer]:
        """The layers that hold pictures beside the text; a policy acts on them apart from the others."""
        return [layer for layer in self.layers if isinstance(layer, PictureLayer)]

    def announce(self, prompt: Prompt) -> None:
        """Say what the next prompt is: everything up to and including it, all turns. Compression happens as soon as a
        layer has seen that many columns."""
        self.prompt, self.shared, self.shared_pictures, self.picture = prompt, {}, {}, None
        for layer in [*self.ours, *self.pictures]:
            layer.turn = None

    def room(self, layer: KVLayer, incoming: int) -> int:
        """Slots to reserve beyond the incoming ones: none for a first prompt that will be compressed anyway."""
        prompt = self.prompt
        if prompt is None:
            return 0
        if layer.store.seen + incoming < prompt.columns:
            return prompt.columns - layer.store.seen - incoming
        if layer.store.seen == 0 and self.policy.frees_memory:
            return 0
        return self.policy.growth(prompt)

    def turn(self, layer: KVLayer) -> Turn | None:
        """The work of this layer on the announced prompt, made for the batch that arrived (beams repeat rows)."""
        if self.prompt is None:
            return None
        if layer.turn is None:
            rows = len(layer.store.free)
            if rows != len(self.prompt.lengths):
                repeats = rows // len(self.prompt.lengths)
                self.prompt = self.prompt.map(_repeated(len(self.prompt.lengths), repeats))
            # A chunk that an entry falls out of is not a window that slides: there the model's mask alone decides. And
            # what slid out of the first layer's window must not leave the hidden states of layers that still see it.
            slides = layer.kind == "sliding_attention" and not self.policy.hides_tokens and not self.whole
            window = layer.window if slides else None
            layer.turn = Turn(
                layer.index,
                len(self.ours),
                window,
                layer.store,
                self.policy,
                self.prompt,
                self.rotator,
                self.coordinates,
                first=layer is self.ours[0],
                shared=self.shared,
            )
        return layer.turn

    def picture_turn(self, layer: PictureLayer, mask: Tensor | None) -> Turn | None:
        """The work of a layer that holds pictures on the announced prompt. mask: the model's, over the picture."""
        if self.prompt is None or mask is None:
            return None
        if self.picture is None:
            self.picture = picture_prompt(mask, self.prompt)
        if layer.turn is None:
            layer.turn = PictureTurn(
                layer.index,
                len(self.pictures),
                None,
                layer.store,
                self.policy,
                self.picture,
                None if self.rotator is None else Unplaced(),
                first=layer is self.pictures[0],
                shared=self.shared_pictures,
                text=self.ours[0].store,
                asking=self.prompt,
            )
        return layer.turn

    def lag(self, layer: KVLayer) -> Tensor | None:
        """How far [B, 1, 1] below their true positions the next tokens stand, under a policy that renumbers: minus the
        entries that have left. None for not at all."""
        if not self.policy.renumbers or self.prompt is None or layer.store.keys is None:
            return None
        padding = [self.prompt.columns - n for n in self.prompt.lengths]
        gone = [min(0, n + pad - layer.store.seen) for n, pad in zip(layer.store.held, padding, strict=True)]
        return torch.tensor(gone, device=layer.store.keys.device)[:, None, None] if any(gone) else None

    def turned(self, states: Tensor, steps: Tensor, layer: int) -> Tensor:
        """Queries or keys of a layer, moved by a number of positions."""
        assert self.rotator is not None, "a policy that renumbers says so in needs_rotation"
        return self.rotator.turn(states, steps, layer)

    # --- what only the device knows, asked for all layers together

    def slide(self, turn: Turn, queries: int) -> None:
        """Free what slid out of a layer's window, now that so many queries came. The first sliding layer of a step asks
        for all of them."""
        if turn.window is None:
            return
        if turn.layer not in self._slid:
            seen = turn.store.seen
            turns = [each.turn for each in self.ours if each.turn is not None and each.turn.window is not None]
            counts = [each.slid(seen, queries) for each in turns]
            told = torch.stack([c.to(counts[0].device) for c in counts]).tolist()
            self._slid = {each.layer: row for each, row in zip(turns, told, strict=True)}
        turn.slide(queries, self._slid.pop(turn.layer))

    def settle(self) -> None:
        """Learn how many slots became free in the last step, where policies did not say."""
        stores = [store for store in self._stores if store.owed is not None]
        if stores:
            owed = [store.owed for store in stores if store.owed is not None]
            told = torch.stack([each.to(owed[0].device) for each in owed]).tolist()
            for store, counts in zip(stores, told, strict=True):
                store.settle(counts)

    # --- accounts, on the host

    def account(self, layer: KVLayer) -> None:
        """Note what a layer uses after it grew or shrank, and the highest total."""
        used = layer.store.bytes_used()
        self._bytes_now += used - layer.bytes_noted
        layer.bytes_noted = used
        self.bytes_peak = max(self.bytes_peak, self._bytes_now)

    def held(self) -> tuple[float, ...]:
        """Entries of each row without padding, mean of our layers."""
        self.settle()
        layers = [layer.store.held if layer.turn is None else layer.turn.held() for layer in self.ours]
        return tuple(sum(rows) / len(layers) for rows in zip(*layers, strict=True))

    def full_bytes(self, seen: int) -> int:
        """What our layers would hold of one row of `seen` tokens, had nothing been compressed: a sliding layer never
        holds more than its window, and pictures beside the text come on top."""
        total = 0
        for layer in self.ours:
            window = layer.window if layer.kind == "sliding_attention" else None
            slots = seen if window is None else min(seen, window)
            total += layer.store.full_bytes_per_slot() // max(1, len(layer.store.free)) * slots
        for layer in self.pictures:
            total += layer.store.full_bytes_per_slot() // max(1, len(layer.store.free)) * layer.store.seen
        return total

    def bytes_used(self) -> int:
        """Keys and values of our layers in used slots, and of the stock attention layers beside them."""
        stock = [layer for layer in self.layers if not isinstance(layer, KVLayer)]
        return sum(store.bytes_used() for store in self._stores) + sum(_stock_bytes(layer) for layer in stock)

    def bytes_reserved(self) -> int:
        return sum(store.bytes_reserved() for store in self._stores)

    def bytes_side(self) -> int:
        return sum(store.bytes_side() for store in self._stores)

    @property
    def _stores(self) -> list[LayerCache]:
        return [layer.store for layer in [*self.ours, *self.pictures]]

    # --- what the library asks of a cache as a whole

    def crop(self, tokens_to_remove: int) -> None:
        """Cross-attention layers hold the picture, not the text: they are left as they are."""
        for layer in self.layers:
            if not getattr(layer, "holds_picture", False):
                layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.settle()
        order = beam_idx.tolist()  # asked once a step, not once a layer
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                layer.reorder(beam_idx, order)
            else:
                layer.reorder_cache(beam_idx)
        self._rows_became(order)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.settle()
        super().batch_repeat_interleave(repeats)
        if self.prompt is not None:
            self._rows_became(_repeated(len(self.prompt.lengths), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.settle()
        super().batch_select_indices(indices)
        self._rows_became(indices.tolist())

    def _rows_became(self, order: Sequence[int]) -> None:
        """What is known of the prompt follows its rows."""
        if self.prompt is None:
            return
        self.prompt = self.prompt.map(order)
        self.coordinates.map(order)
        for layer in self.ours:
            if layer.turn is not None:
                layer.turn.prompt = self.prompt
        if self.picture is not None:
            self.picture = self.picture.map(order)


def _repeated(rows: int, repeats: int) -> list[int]:
    return [row for row in range(rows) for _ in range(repeats)]


def _stock_bytes(layer: Any) -> int:
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
