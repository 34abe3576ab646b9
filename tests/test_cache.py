"""One layer's cache alone, against a naive one: for every row and head a dictionary of entries by column.

Random sequences of everything that can happen to a cache, in float64. After each operation both must hold the same.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from oracle import to_int8_and_back
from torch import Tensor

from kvcli.engine.cache import LayerCache

HEADS, QUERY_HEADS, KEY, VALUE = 2, 4, 3, 2
Entry = dict[str, Tensor]
"""key [KEY], value [VALUE], counts [1], mean [1], each [query heads of the KV head]."""


class Naive:
    """entries: by row and head, what each column holds."""

    def __init__(self, rows: int) -> None:
        self.entries: list[list[dict[int, Entry]]] = [[{} for _ in range(HEADS)] for _ in range(rows)]
        self.seen = 0

    def heads(self) -> list[tuple[int, int, dict[int, Entry]]]:
        return [(r, h, entries) for r, row in enumerate(self.entries) for h, entries in enumerate(row)]


class Pair:
    """The cache and the naive one, always told the same."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.rows = dice.randint(1, 3)
        self.real, self.naive = LayerCache(shared=dice.random() < 0.5), Naive(self.rows)
        self.evicted_since_keep = False
        self.int8 = False

    # --- operations

    def quantise(self) -> None:
        """From now on both hold what int8 holds."""
        self.real.quantise()
        self.int8 = True
        for row, head, entries in self.naive.heads():
            for column, entry in entries.items():
                rounded = {what: self.rounded(entry[what]) for what in ("key", "value")}
                self.naive.entries[row][head][column] = entry | rounded

    def rounded(self, entry: Tensor) -> Tensor:
        return to_int8_and_back(entry) if self.int8 else entry

    def append(self) -> None:
        count = self.dice.choice([1, 1, 1, 2, 5])
        keys = torch.randn(self.rows, HEADS, count, KEY, dtype=torch.float64)
        values = torch.randn(self.rows, HEADS, count, VALUE, dtype=torch.float64)
        self.real.append(keys.clone(), values.clone(), room=self.dice.choice([0, 3, 70]))
        for row, head, entries in self.naive.heads():
            for i in range(count):
                fresh = {"counts": torch.ones(1), "mean": torch.zeros(1), "each": torch.zeros(2)}
                new = {"key": self.rounded(keys[row, head, i]), "value": self.rounded(values[row, head, i])}
                entries[self.naive.seen + i] = new | fresh
        self.naive.seen += count

    def score(self) -> None:
        """Give every entry a score: one for all heads, and one for each query head."""
        if self.heads_differ():
            return
        located = self.real.located()
        mean = torch.rand(self.rows, 1, located.shape[-1], dtype=torch.float64)
        each = torch.rand(self.rows, QUERY_HEADS, located.shape[-1], dtype=torch.float64)
        self.real.set_side("mean", mean)
        self.real.set_side("each", each)
        for row, head, entries in self.naive.heads():
            for slot, column in enumerate(located[row, 0].tolist()):
                if column >= 0:
                    scores = {"mean": mean[row, :, slot], "each": each[row, 2 * head : 2 * head + 2, slot]}
                    entries[column] = entries[column] | scores

    def keep(self) -> None:
        chosen = self.choose(lambda n: self.dice.randint(1, n))
        index, _ = self.slots(chosen)
        told: dict[str, Tensor] = {}
        side = {}
        if self.dice.random() < 0.5:
            told["keys"] = torch.randn(self.rows, HEADS, index.shape[-1], KEY, dtype=torch.float64)
            told["values"] = torch.randn(self.rows, HEADS, index.shape[-1], VALUE, dtype=torch.float64)
            side["counts"] = torch.randint(1, 4, index.shape).float()
        held = [max(len(head) for head in row) for row in chosen]
        self.real.keep(index, held, **told, side=side, room=self.dice.choice([0, 2, 9]))
        for row, head, entries in self.naive.heads():
            kept = {column: entries[column] for column in chosen[row][head]}
            for place, column in enumerate(chosen[row][head]):
                if told:
                    kept[column] = kept[column] | {
                        "key": self.rounded(told["keys"][row, head, place]),
                        "value": self.rounded(told["values"][row, head, place]),
                        "counts": side["counts"][row, min(head, index.shape[1] - 1), place][None],
                    }
            self.naive.entries[row][head] = kept
        self.evicted_since_keep = False

    def evict(self) -> None:
        self.leave(merge=False)

    def merge(self) -> None:
        self.leave(merge=True)

    def leave(self, merge: bool) -> None:
        chosen = self.choose(lambda n: min(self.dice.randint(0, 3), n - 1))
        slots, at = self.slots(chosen)
        if merge:
            into = torch.full_like(slots, 0)
            for row in range(self.rows):
                for head in range(slots.shape[1]):
                    self.merge_one(row, head, slots.shape[1], chosen, at, into)
            self.real.merge(slots, into)
            for _, _, entries in self.naive.heads():  # once all are in; what took nothing in stays as it is
                for column, entry in entries.items():
                    entries[column] = entry | {what: self.rounded(entry[what]) for what in ("key", "value")}
        leaving = [min(len(head) for head in row) for row in chosen]
        if self.dice.random() < 0.3:  # as if only the device knew
            self.real.evict(slots, None)
            assert self.real.owed is not None
            self.real.settle(self.real.owed.tolist())
        else:
            self.real.evict(slots, leaving)
        for row, head, entries in self.naive.heads():
            for column in chosen[row][head]:
                del entries[column]
        self.evicted_since_keep = True

    def merge_one(
        self,
        row: int,
        head: int,
        heads: int,
        chosen: list[list[list[int]]],
        at: dict[tuple[int, int, int], int],
        into: Tensor,
    ) -> None:
        """Choose where the leaving entries of a row and head go, and mix them in."""
        alike = range(HEADS) if heads == 1 else [head]
        stay = sorted(set(self.naive.entries[row][head]) - set(chosen[row][head]))
        for place, column in enumerate(chosen[row][head]):
            target = self.dice.choice(stay)
            into[row, head, place] = at[row, head, target]
            for each in alike:
                entries = self.naive.entries[row][each]
                gone, taker = entries[column], entries[target]
                total = gone["counts"] + taker["counts"]
                for what in ("key", "value"):
                    mixed = (gone[what] * gone["counts"] + taker[what] * taker["counts"]) / total
                    taker = taker | {what: mixed}
                entries[target] = taker | {"counts": total}

    def rewrite(self) -> None:
        chosen = self.choose(lambda n: 1, same_count=True)
        slots, _ = self.slots(chosen)
        keys = torch.randn(self.rows, HEADS, 1, KEY, dtype=torch.float64)
        self.real.rewrite(slots, keys)
        for row, head, entries in self.naive.heads():
            column = chosen[row][head][0]
            entries[column] = entries[column] | {"key": self.rounded(keys[row, head, 0])}

    def map(self) -> None:
        order = [self.dice.randrange(self.rows) for _ in range(self.dice.randint(1, 4))]
        index = torch.tensor(order)
        self.real.map(lambda t: t.index_select(0, index), order)
        self.naive.entries = [[dict(head) for head in self.naive.entries[row]] for row in order]
        self.rows = len(order)

    def crop(self) -> None:
        """Takes back columns that nothing was done to: what the library does after a rejected draft."""
        newest = set(range(self.naive.seen - self.dice.randint(1, 2), self.naive.seen))
        if self.evicted_since_keep or not all(newest < set(entries) for _, _, entries in self.naive.heads()):
            return
        self.real.crop(len(newest))
        for _, _, entries in self.naive.heads():
            for column in newest:
                del entries[column]
        self.naive.seen -= len(newest)

    # --- choices

    def heads_differ(self) -> bool:
        return self.real.located().shape[1] > 1

    def choose(self, count: Callable[[int], int], same_count: bool = False) -> list[list[list[int]]]:
        """Columns by row and head, ascending: the same ones for all heads, or others for each."""
        each = self.heads_differ() or self.dice.random() < 0.3
        chosen = []
        for row in self.naive.entries:
            picks = [sorted(self.dice.sample(sorted(head), count(len(head)))) for head in (row if each else row[:1])]
            chosen.append(picks if each else picks * HEADS)
        self.per_head = each
        return chosen

    def slots(self, chosen: list[list[list[int]]]) -> tuple[Tensor, dict[tuple[int, int, int], int]]:
        """The chosen columns as slots [B, P, n], and the slot of every (row, head, column)."""
        located = self.real.located().expand(-1, HEADS, -1)
        at = {
            (row, head, column): slot
            for row in range(self.rows)
            for head in range(HEADS)
            for slot, column in enumerate(located[row, head].tolist())
            if column >= 0
        }
        heads = HEADS if self.per_head else 1
        width = max(1, *(len(head) for row in chosen for head in row))
        slots = torch.full((self.rows, heads, width), -1)
        for row in range(self.rows):
            for head in range(heads):
                for place, column in enumerate(chosen[row][head]):
                    slots[row, head, place] = at[row, head, column]
        return slots, at

    # --- agreement

    def check(self) -> None:
        real = self.real
        assert real.seen == self.naive.seen
        keys, values = real.read_keys(), real.read_values()
        located = real.located().expand(-1, HEADS, -1)
        for row, head, entries in self.naive.heads():
            columns = located[row, head].tolist()
            assert sorted(c for c in columns if c >= 0) == sorted(entries)
            for slot, column in enumerate(columns):
                if column >= 0:
                    self.check_entry(row, head, slot, entries[column], keys, values)
        self.check_room()

    def check_entry(self, row: int, head: int, slot: int, entry: Entry, keys: Tensor, values: Tensor) -> None:
        assert (keys[row, head, slot] - entry["key"]).abs().max() < 1e-12
        assert (values[row, head, slot] - entry["value"]).abs().max() < 1e-12
        for name in ("counts", "mean", "each"):
            side = self.real.side_view(name)
            if side is not None:
                per_head = side.shape[1] // HEADS if side.shape[1] >= HEADS else 1
                start = head * per_head if side.shape[1] > 1 else 0
                found = side[row, start : start + per_head, slot]
                assert torch.equal(found, entry[name].to(found.dtype)), name

    def check_room(self) -> None:
        real = self.real
        empty = (real.located() < 0).sum(-1).amin(-1).tolist()
        assert all(free <= true for free, true in zip(real.free, empty, strict=True)), "slots would be overwritten"
        if not self.heads_differ():
            assert real.free == empty
        assert real.holes or not any(empty)
        full = self.rows * HEADS * (KEY + VALUE) * 8
        per_slot = self.rows * HEADS * (KEY + VALUE + 2 * 4) if self.int8 else full
        assert real.full_bytes_per_slot() == full
        assert real.bytes_used() == per_slot * real.extent
        stored = sum(t.numel() * t.element_size() for t in (real.keys, real.values))
        assert real.bytes_used() + real.bytes_reserved() == stored


OPERATIONS = ["append"] * 6 + ["score", "keep", "evict", "evict", "merge", "rewrite", "map", "crop"]


def play(seed: int, operations: list[str], length: int) -> Pair:
    dice = Random(seed)
    torch.manual_seed(seed)
    pair = Pair(dice)
    for name in ["append", "append", *dice.choices(operations, k=length)]:
        getattr(pair, name)()
        pair.check()
    return pair


@pytest.mark.parametrize("seed", range(25))
def test_any_sequence_of_operations(seed: int) -> None:
    play(seed, OPERATIONS, 25)


@pytest.mark.parametrize("seed", range(2000, 2015))
def test_any_sequence_on_a_cache_of_int8(seed: int) -> None:
    """Whatever moves or changes an entry does the same to its scale."""
    play(seed, [*OPERATIONS, "quantise", "quantise"], 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_more_sequences(seed: int) -> None:
    play(seed, OPERATIONS, 40)


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"append"}))
def test_one_kind_of_operation_among_appends(operation: str) -> None:
    for seed in range(5):
        play(seed, ["append", operation], 12)


def test_a_freed_slot_is_taken_again_and_the_buffer_does_not_grow() -> None:
    cache = LayerCache()
    cache.append(*(torch.zeros(1, HEADS, 8, width) for width in (KEY, VALUE)), room=4)
    for step in range(20):
        cache.evict(torch.tensor([[[step % 8]]]), [1])
        cache.append(*(torch.full((1, HEADS, 1, width), float(step)) for width in (KEY, VALUE)))
    assert (cache.extent, cache.seen, cache.held) == (8, 28, [8])
    assert sorted(cache.located()[0, 0].tolist()) == list(range(20, 28))


def test_reset_gives_everything_back() -> None:
    pair = play(3, OPERATIONS, 15)
    pair.real.reset()
    assert (pair.real.bytes_used(), pair.real.bytes_reserved(), pair.real.bytes_side()) == (0, 0, 0)
    assert (pair.real.seen, pair.real.extent, pair.real.free) == (0, 0, [])
