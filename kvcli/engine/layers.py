"""Cache layers that look stock from outside and hold a `LayerCache`: part of the seam with transformers.

Know what the library asks of a layer and what the attention function must be told of its keys. What is done to the
entries is decided elsewhere (`run`, policies).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcli.engine.cache import LayerCache
from kvcli.engine.run import Turn

if TYPE_CHECKING:
    from kvcli.engine.kvcache import KVCache


@dataclass
class Handle:
    """What the attention function must know about the keys it is given. It travels as an attribute of the key tensor,
    since a model that shares keys between layers hands the same tensor to layers that never called `update`."""

    layer: KVLayer
    positions: Tensor | None
    bias: Tensor | None
    holes: bool
    seen: int
    columns: Tensor | None = None
    lag: Tensor | None = None
    fresh: bool = True


class KVLayer(CacheLayerMixin):
    """One attention layer of a `KVCache`: stock on the outside, a `LayerCache` inside. Lengths are logical."""

    is_compileable = False

    def __init__(self, owner: KVCache, index: int, kind: str, window: int | None, shared: bool) -> None:
        super().__init__()
        self.keys: Tensor | None
        self.values: Tensor | None
        self._owner = weakref.ref(owner)
        self.index, self.kind, self.window = index, kind, window
        self.is_sliding = window is not None
        self.store = LayerCache(shared)
        self.turn: Turn | None = None
        self.bytes_noted = 0

    @property
    def owner(self) -> KVCache:
        owner = self._owner()
        assert owner is not None, "a layer outlived its cache"
        return owner

    @property
    def is_croppable(self) -> bool:
        return not self.owner.policy.acts_in_decode

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.store.owed is not None:
            self.owner.settle()
        survivors, lag = self.owner.survivors, self.owner.lag(self)
        if lag is not None:
            key_states = self.owner.turned(key_states, lag, self.index)
        room = self.owner.room(self, key_states.shape[2])
        if survivors is None:
            self.store.append(key_states, value_states, room)
        else:
            self.store.append_survivors(key_states, value_states, survivors, room)
        self.owner.account(self)
        return self.shown(None if survivors is None else survivors.columns, lag)

    def shown(self, columns: Tensor | None = None, lag: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values as the model is given them (as stored), with what the attention function must know."""
        self.keys, self.values = self.store.view()
        positions = None if self.store.positions is None else self.store.located()
        self.keys._kvcli = Handle(  # type: ignore[attr-defined]
            self, positions, self.store.side_view("bias"), self.store.holes, self.store.seen, columns, lag
        )
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.store.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store.reset()
        self.keys, self.values, self.turn = None, None, None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self.store.crop(abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reorder(beam_idx, beam_idx.tolist())

    def reorder(self, rows: Tensor, order: Sequence[int]) -> None:
        """Put rows in another order, given on the device and on the host."""
        self._map(lambda t: t.index_select(0, rows.to(t.device)), order)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = len(self.store.free)
        self._map(lambda t: t.repeat_interleave(repeats, 0), [i for i in range(rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda t: t[indices.to(t.device)], indices.tolist())

    def _map(self, rows: Callable[[Tensor], Tensor], order: Sequence[int]) -> None:
        self.store.map(rows, order)
        if self.store.keys is not None:
            self.keys, self.values = self.store.view()


class PictureLayer(KVLayer):
    """A layer whose keys are the picture's: written once, read by every later token straight from `keys`."""

    holds_picture = True
    is_croppable = True

    def __init__(self, owner: KVCache, index: int) -> None:
        super().__init__(owner, index, "cross_attention", None, shared=False)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        self.owner.account(self)
        return self.shown()

    def read_again(self) -> None:
        """Show what is held now to the tokens that come; none of them is a prompt's."""
        keys, _ = self.shown()
        keys._kvcli.fresh = False  # type: ignore[attr-defined]

    def _map(self, rows: Callable[[Tensor], Tensor], order: Sequence[int]) -> None:
        super()._map(rows, order)
        if self.store.keys is not None:
            self.read_again()
