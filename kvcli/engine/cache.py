"""The KV cache of one layer: preallocated slots that entries can leave, and all that must follow an entry.

Knows tensors only, neither transformers nor policies. Two lengths are kept apart: `seen`, the logical columns that were
fed, and `extent`, the slots in use. An entry that leaves frees its slot at once and a later token takes it; the order
of the slots does not matter, since keys carry their rotation and `positions` says which column a slot holds.

Axis names as in `kvcli.policies.contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcli.engine.hidden import Survivors
from kvcli.engine.stored import SCALE, exact, quantise, read

BLOCK = 64
"""Slots are added this many at a time when the reserved room was not enough."""


class LayerCache:
    """Keys and values of one layer in slots.

    keys, values: buffers [B, Hkv, capacity, D] in the model's own numbers, `dtype`, or once `quantise` was called, in
    the int8 form of `stored`. positions: int64 [B, P, capacity], -1 in an empty slot, or None as long
    as slot and column are the same. side: per-slot tensors [B, A, capacity], by name, which follow every entry. state:
    tensors whose first axis is the batch. free: empty slots below `extent` of each row (the fewest over its heads).
    kept: entries of each row right after the last `keep`. gaps: whether some head may have empty slots that `free`
    does not count. owed: int64 [B], slots of each row that became free and are not among `free` yet, since only the
    device knows how many; see `settle`.
    tail: how many of the last slots hold the last columns in order, so that `crop` can take them back.
    shared: whether other layers read these keys too, later in the same forward pass: they must find what this layer
    found, so held entries are then changed in a copy.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.reset()

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.dtype = torch.float32
        self.int8 = False
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.positions: Tensor | None = None
        self.side: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.free: list[int] = []
        self.owed: Tensor | None = None
        self.kept: list[int] = []
        self.gaps = False
        self.extent = 0
        self.tail = 0
        self.seen = 0

    # --- reading

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def held(self) -> list[int]:
        """Entries of each row, padding included as long as it was not compressed away."""
        return [self.extent - free for free in self.free]

    @property
    def holes(self) -> bool:
        """Whether any slot in use may be empty, so that attention must look at `positions`."""
        return self.gaps or any(self.free)

    @property
    def kv_heads(self) -> int:
        return 0 if self.keys is None else self.keys.shape[1]

    def read_keys(self) -> Tensor:
        """Keys of the slots in use in the model's numbers: [B, Hkv, extent, D]."""
        return read(self.view()[0], self.dtype)

    def read_values(self) -> Tensor:
        return read(self.view()[1], self.dtype)

    def view(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots in use, as they are stored: [B, Hkv, extent, D]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.extent], self.values[:, :, : self.extent]

    def located(self) -> Tensor:
        """positions of the slots in use: [B, P, extent]."""
        if self.positions is not None:
            return self.positions[..., : self.extent]
        assert self.keys is not None
        columns = torch.arange(self.extent, device=self.keys.device)
        return columns.expand(self.keys.shape[0], 1, -1)

    def side_view(self, name: str) -> Tensor | None:
        """A side tensor over the slots in use."""
        found = self.side.get(name)
        return None if found is None else found[..., : self.extent]

    def bytes_used(self) -> int:
        """2 x B x Hkv x used slots x head width x bytes of one number (keys and values may differ in width)."""
        return self.bytes_per_slot() * self.extent

    def bytes_reserved(self) -> int:
        """Allocated for slots that hold nothing yet."""
        return self.bytes_per_slot() * (self.capacity - self.extent)

    def bytes_side(self) -> int:
        """Positions, statistics, counts and state."""
        tensors = [*self.side.values(), *self.state.values()]
        if self.positions is not None:
            tensors.append(self.positions)
        return sum(t.numel() * t.element_size() for t in tensors)

    def bytes_per_slot(self) -> int:
        """Keys and values of one slot, all rows and heads, with their scales."""
        buffers = [t for t in (self.keys, self.values) if t is not None]
        return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in buffers)

    def full_bytes_per_slot(self) -> int:
        """The same in the model's own numbers."""
        if not self.int8 or self.keys is None:
            return self.bytes_per_slot()
        scales = 2 * self.keys.shape[0] * self.keys.shape[1] * SCALE
        return (self.bytes_per_slot() - scales) * self.dtype.itemsize

    # --- writing

    def append(self, keys: Tensor, values: Tensor, room: int = 0) -> None:
        """Add T entries [B, Hkv, T, D] at the next columns; `room`: slots to reserve beyond them if space must be made.

        They go to free slots where every row has enough of them, else to the end.
        """
        count, self.dtype = keys.shape[2], keys.dtype
        keys, values = self._stored(keys), self._stored(values)
        if self.free and min(self.free) >= count:
            self._reuse(keys, values)
        else:
            self._extend(keys, values, room)
        self.seen += count

    def append_survivors(self, keys: Tensor, values: Tensor, survivors: Survivors, room: int = 0) -> None:
        """Add the entries of some columns [B, Hkv, K, D] while all `survivors.length` columns pass by."""
        self.dtype = keys.dtype
        keys, values = self._stored(keys), self._stored(values)
        start, before = self.extent, self.free or [0] * len(survivors.held)
        self._extend(keys, values, room)
        self.positions = self._own_positions()
        self.positions[..., start : self.extent] = survivors.columns
        self.free = [free + keys.shape[2] - n for free, n in zip(before, survivors.held, strict=True)]
        self.gaps, self.tail = any(self.free), 0
        self.seen += survivors.length

    def _extend(self, keys: Tensor, values: Tensor, room: int) -> None:
        count, end = keys.shape[2], self.extent + keys.shape[2]
        if self.keys is None and room == 0:
            # The first prompt of a policy that compresses: it is read once and left behind, so it is not copied.
            self.keys, self.values = keys, values
        else:
            if end > self.capacity:
                self._allocate(end + max(room, BLOCK), keys, values)
            assert self.keys is not None
            assert self.values is not None
            self.keys[:, :, self.extent : end] = keys
            self.values[:, :, self.extent : end] = values
        if self.positions is not None:
            columns = torch.arange(self.seen, self.seen + count, device=keys.device)
            self.positions[..., self.extent : end] = columns
        for name, tensor in self.side.items():
            tensor[..., self.extent : end] = FRESH.get(name, 0.0)
        self.extent, self.tail = end, self.tail + count
        self.free = self.free or [0] * keys.shape[0]

    def _reuse(self, keys: Tensor, values: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        assert self.positions is not None
        count, taken = keys.shape[2], (self.located() >= 0).to(torch.uint8)
        # the first free ones: [B, P, T]
        slots = taken.argmin(-1, keepdim=True) if count == 1 else taken.sort(stable=True).indices[..., :count]
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.scatter_(2, slots[..., None].expand(-1, new.shape[1], -1, new.shape[-1]), new)
        columns = torch.arange(self.seen, self.seen + count, device=keys.device).expand_as(slots)
        self.positions = self.positions.scatter(-1, slots, columns)
        for name in self.side:
            tensor = self._side_of_heads(name, slots.shape[1])
            tensor.scatter_(-1, match_heads(slots, tensor), FRESH.get(name, 0.0))
        self.free = [free - count for free in self.free]
        self.tail = 0

    def keep(
        self,
        index: Tensor,
        held: Sequence[int],
        *,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        side: dict[str, Tensor] | None = None,
        room: int = 0,
    ) -> None:
        """Move the chosen slots into a new, smaller buffer; what is not chosen leaves.

        index: int64 [B, P, K], -1 for none. held: entries of each row, the most over its heads. keys, values, side: new
        contents of the chosen slots ([B, Hkv, K, D], [B, A, K]) in place of the old ones.
        """
        assert self.keys is not None
        assert self.values is not None
        width, taken, missing = index.shape[-1], index.clamp(min=0), index < 0
        located = self.located()
        both = max(located.shape[1], index.shape[1])
        kept_positions = located.expand(-1, both, -1).gather(-1, taken.expand(-1, both, -1))
        kept_positions = kept_positions.masked_fill(missing, -1)
        kept_side = {name: gather_slots(t[..., : self.extent], taken) for name, t in self.side.items()} | (side or {})
        self.keys = gather_slots(self.keys, taken) if keys is None else self._stored(keys)
        self.values = gather_slots(self.values, taken) if values is None else self._stored(values)
        self.positions, self.side = kept_positions, kept_side
        self.extent, self.tail = width, 0
        self.free = [width - n for n in held]
        self.kept = list(held)
        self.gaps = bool((kept_positions < 0).any())
        self._allocate(width + room, self.keys, self.values)

    def evict(self, slots: Tensor, leaving: Sequence[int] | None) -> None:
        """Free slots: int64 [B, P, n], -1 for none. leaving: how many leave every head of each row; None leaves that
        to `settle`.

        Positions are replaced, not written into: another layer that shares this one's keys may still hold the old ones.
        """
        positions = self._own_positions()
        both = max(positions.shape[1], slots.shape[1])
        slots = slots.expand(-1, both, -1)
        padded = torch.nn.functional.pad(positions.expand(-1, both, -1), (0, 1))
        # the column past the end takes the writes of "none"
        self.positions = padded.scatter(-1, slots.masked_fill(slots < 0, self.capacity), -1)[..., :-1]
        self.tail = 0
        if leaving is None:
            gone = (slots >= 0).sum(-1).amin(-1)
            self.owed, self.gaps = gone if self.owed is None else self.owed + gone, True
        else:
            self.free = [free + n for free, n in zip(self.free, leaving, strict=True)]
            self.gaps = self.gaps or min(leaving) < slots.shape[-1]

    def settle(self, counts: Sequence[int]) -> None:
        """Count as free what `owed` says, now on the host."""
        self.free, self.owed = [free + n for free, n in zip(self.free, counts, strict=True)], None

    def merge(self, slots: Tensor, into: Tensor) -> None:
        """Average entries into others before they leave: means of keys and values weighted by the `counts` side tensor.

        slots, into: int64 [B, P, n], -1 in `slots` for none. Several entries may go into the same one.
        """
        if "counts" not in self.side:
            self.set_side("counts", torch.ones_like(self.located(), dtype=torch.float32))
        counts = self._side_of_heads("counts", slots.shape[1])
        source, target = (match_heads(t.clamp(min=0), counts) for t in (slots, into))
        weight = counts.gather(-1, source).masked_fill(match_heads(slots, counts) < 0, 0.0)
        own = counts.gather(-1, target)
        together = (target[..., :, None] == target[..., None, :]).to(weight.dtype)  # who goes into the same entry
        total = own + (together @ weight[..., None])[..., 0]
        number = exact(self.dtype)
        for buffer in self._writable():
            gone, taker = (read(gather_slots(buffer, slots), number) for slots in (source, target))
            added = together.to(number) @ (gone * weight[..., None])
            mixed = self._stored(((taker * own[..., None] + added) / total[..., None]).to(self.dtype))
            buffer.scatter_(2, target.expand(-1, buffer.shape[1], -1)[..., None].expand_as(mixed), mixed)
        self.side["counts"] = counts.scatter(-1, target, total)

    def rewrite(self, slots: Tensor, keys: Tensor) -> None:
        """Give entries new keys: int64 [B, P, m], [B, Hkv, m, D]."""
        held, keys = self._writable()[0], self._stored(keys)
        held.scatter_(2, slots.expand(-1, keys.shape[1], -1)[..., None].expand_as(keys), keys)

    def quantise(self) -> None:
        """Store keys and values as int8 from now on. Whoever looks at the old buffers keeps them."""
        if self.int8:
            return
        capacity, (keys, values) = self.capacity, self.view()
        self.int8, self.keys, self.values = True, quantise(keys), quantise(values)
        if capacity > self.extent:
            self._allocate(capacity, self.keys, self.values)

    def set_side(self, name: str, values: Tensor) -> None:
        """Store a per-slot tensor [B, A, extent]."""
        tensor = values.new_full((*values.shape[:2], self.capacity), FRESH.get(name, 0.0))
        tensor[..., : self.extent] = values
        self.side[name] = tensor

    def _stored(self, entries: Tensor) -> Tensor:
        """Entries as they are put into the buffers."""
        return quantise(entries) if self.int8 else entries

    def _writable(self) -> tuple[Tensor, Tensor]:
        """The buffers, once nobody else can be looking at them."""
        assert self.keys is not None
        assert self.values is not None
        if self.shared:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return self.keys, self.values

    def _side_of_heads(self, name: str, heads: int) -> Tensor:
        """A side tensor that can tell this many heads apart."""
        tensor = self.side[name]
        if tensor.shape[1] < heads:
            tensor = self.side[name] = tensor.expand(-1, heads, -1).clone()
        return tensor

    # --- what generate does to a cache

    def map(self, rows: Callable[[Tensor], Tensor], order: Sequence[int]) -> None:
        """Reorder, repeat or select rows: `rows` on every tensor, `order` (source row of each new row) on the host."""
        if self.keys is None or self.values is None:
            return
        self.keys, self.values = rows(self.keys), rows(self.values)
        if self.positions is not None:
            self.positions = rows(self.positions)
        self.side = {name: rows(t) for name, t in self.side.items()}
        self.state = {name: rows(t) for name, t in self.state.items()}
        self.free = [self.free[i] for i in order]
        self.kept = [self.kept[i] for i in order] if self.kept else []

    def crop(self, columns: int) -> None:
        """Take back the last `columns` columns."""
        self.seen -= columns
        if columns <= self.tail:
            self.extent, self.tail = self.extent - columns, self.tail - columns
            if self.positions is not None:
                self.positions[..., self.extent :] = -1
        else:
            assert self.positions is not None
            self.positions = self.positions.masked_fill(self.positions >= self.seen, -1)
            self.free = [free + columns for free in self.free]

    # --- memory

    def _own_positions(self) -> Tensor:
        """positions over the whole capacity, made when slot and column were the same until now."""
        if self.positions is not None:
            return self.positions
        return _widened(self.located(), self.extent, self.capacity, -1)

    def _allocate(self, capacity: int, keys: Tensor, values: Tensor) -> None:
        """Buffers of `capacity` slots shaped like keys and values, with all that is held copied over."""
        old = (self.keys, self.values)
        self.keys, self.values = (t.new_empty(*t.shape[:2], capacity, t.shape[-1]) for t in (keys, values))
        for new, previous in zip((self.keys, self.values), old, strict=True):
            if previous is not None:
                new[:, :, : self.extent] = previous[:, :, : self.extent]
        if self.positions is not None:
            self.positions = _widened(self.positions, self.extent, capacity, -1)
        self.side = {n: _widened(t, self.extent, capacity, FRESH.get(n, 0.0)) for n, t in self.side.items()}


FRESH = {"counts": 1.0}
"""What a new entry starts with in a side tensor, where it is not zero."""


def match_heads(index: Tensor, tensor: Tensor) -> Tensor:
    """Spread slots [B, P, K] over the head axis A of a side tensor [B, A, S] (A = 1, Hkv or H): [B, A or P, K]."""
    heads = tensor.shape[1]
    if index.shape[1] == 1:
        return index.expand(-1, heads, -1)
    return index if heads <= index.shape[1] else index.repeat_interleave(heads // index.shape[1], 1)


def gather_slots(tensor: Tensor, index: Tensor) -> Tensor:
    """Entries of [B, A, S] or [B, A, S, D] at slots [B, P, K]; with A = 1 and P = Hkv the result has Hkv heads."""
    if tensor.dim() == 4:
        index = index.expand(-1, tensor.shape[1], -1)
        return tensor.gather(2, index[..., None].expand(-1, -1, -1, tensor.shape[-1]))
    index = match_heads(index, tensor)
    return tensor.expand(-1, index.shape[1], -1).gather(-1, index)


def _widened(tensor: Tensor, used: int, capacity: int, fill: float) -> Tensor:
    wide = tensor.new_full((*tensor.shape[:2], capacity), fill)
    wide[..., :used] = tensor[..., :used]
    return wide
