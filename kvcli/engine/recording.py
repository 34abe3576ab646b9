"""Write down what a policy sees and does, without changing it.

`record` makes a policy that hands every question on to another one and notes, layer by layer, the attention that
each token got, the shape of the attention rows, and which entries left when. `Trace` is one row of that as plain
arrays, for reports. Knows the policy contract, nothing of models, files and figures.

The clock of a trace is `seen`, the number of columns fed so far: a column c is there from seen = c + 1 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcli.policies.base import Policy
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Prompt, RowSummary, Statistic

IMPORTANCE = Columns("recorded.importance", queries="all", heads="mean")
ANSWER = Columns("recorded.answer", queries="after-vision", heads="mean", decode=True)
ROWS = RowSummary("recorded.rows", queries="all")

TEXT, VISUAL, GENERATED = 0, 1, 2
KINDS = ("text", "visual", "generated")
KEPT, MERGED, DROPPED, LEFT = 0, 1, 2, 3
FATES = ("kept", "merged", "dropped", "left")
"""LEFT: merged or dropped; a policy that does both to the same prompt does not say which entry met which fate."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerTrace:
    """One layer of one row; C real columns, the prompt's and the generated ones that were fed.

    importance: [C], attention that a prompt token got from all queries (column sum, mean of the heads). answer: [C],
    from the text after the picture and from what was generated, as long as the entry was there. entropy in nats and
    sparsity (share of weights below a hundredth of the largest): means over heads and queries of the prompt.
    left: [heads, C], `seen` when the entry left that head, -1 when it stayed. how: [heads, C], its fate there.
    """

    layer: int
    importance: Floats
    answer: Floats
    entropy: float
    sparsity: float
    left: Integers
    how: Integers

    def fate(self) -> Integers:
        """[C]: the best that happened to an entry in any head: KEPT, then MERGED, then the others."""
        return np.asarray(self.how.min(0))

    def present(self, seen: int) -> Floats:
        """[C]: share of the heads that hold each column when `seen` columns were fed."""
        arrived = np.arange(self.left.shape[1]) < seen
        there = (self.left < 0) | (self.left > seen)
        return np.asarray((arrived & there).mean(0), dtype=np.float64)


@dataclass(frozen=True)
class Trace:
    """One row of a recorded run. kinds: [C], TEXT, VISUAL or GENERATED. prompt: columns of the last prompt."""

    policy: dict[str, Any]
    kinds: Integers
    prompt: int
    layers: tuple[LayerTrace, ...]

    @property
    def clock(self) -> range:
        """`seen` after the last prompt and after each token fed since."""
        return range(self.prompt, len(self.kinds) + 1)

    def held(self) -> Floats:
        """[layers, steps, kinds]: entries of each kind after each step, mean of the heads."""
        shares = np.stack([[layer.present(seen) for seen in self.clock] for layer in self.layers])
        return np.stack([shares[..., self.kinds == kind].sum(-1) for kind in range(len(KINDS))], -1)

    def kept_share(self) -> Floats:
        """[layers, kinds]: share of the columns of each kind that are held at the end; NaN where there are none."""
        totals = np.array([(self.kinds == kind).sum() for kind in range(len(KINDS))], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            return np.asarray(self.held()[:, -1] / totals)


class Recording(Policy):
    """A policy with all that happens written down. For one run, or one conversation, of a batch. Made by `record`."""

    inner: Policy
    layers: dict[int, _Layer]
    fed: dict[int, None]
    """Columns that were generated, in order."""

    @property
    def acts_in_decode(self) -> bool:
        """Always, so as to be shown every step; the policy itself is asked only if it acts."""
        return True

    def statistics(self) -> tuple[Statistic, ...]:
        return (*self.inner.statistics(), IMPORTANCE, ANSWER, ROWS)

    def compress(self, view: LayerView) -> Keep | None:
        return self._prompt_done(view, self.inner.compress(view))

    def compress_model(self, views: Sequence[LayerView]) -> list[Keep | None]:
        answers = self.inner.compress_model(views)
        return [self._prompt_done(view, answer) for view, answer in zip(views, answers, strict=True)]

    def evict(self, view: LayerView) -> Evict | None:
        layer = self.layers[view.layer]
        self.fed[view.prompt.columns + view.step - 1] = None
        layer.note(layer.answer, view, ANSWER.name)
        answer = self.inner.evict(view) if self.inner.acts_in_decode else None
        if answer is not None:
            layer.leave(view, answer.slots, answer.into)
        return answer

    # --- notes

    def _prompt_done(self, view: LayerView, answer: Keep | None) -> Keep | None:
        layer = self.layers.setdefault(view.layer, _Layer(view.layer))
        layer.note(layer.importance, view, IMPORTANCE.name)
        layer.note(layer.answer, view, ANSWER.name)
        layer.rows, layer.prompt = view.statistics[ROWS.name], view.prompt
        if answer is not None:
            layer.keep(view, answer)
        return answer

    def trace(self, row: int = 0) -> Trace:
        """What happened to one row of the batch, without its padding."""
        prompt = next(iter(self.layers.values())).prompt
        assert prompt is not None
        real = prompt.real[row].cpu().numpy()
        end = max([len(real), *(column + 1 for column in self.fed)])
        kinds = np.full(end, GENERATED, dtype=np.int64)
        kinds[: len(real)] = np.where(prompt.visual[row].cpu().numpy(), VISUAL, TEXT)
        kinds[[column for column in self.fed if column < len(real)]] = GENERATED
        columns = np.concatenate([np.flatnonzero(real), np.arange(len(real), end)])
        layers = tuple(self.layers[index].trace(row, columns) for index in sorted(self.layers))
        name = {"name": self.inner.name, **self.inner.resolved()}
        return Trace(name, kinds[columns], int(real.sum()), layers)


def record(policy: Policy) -> Recording:
    """The same policy, recorded: a subclass of its class that asks `policy` itself and writes down the answers."""
    cls = type(f"Recorded{type(policy).__name__}", (Recording, type(policy)), {})
    recording: Recording = object.__new__(cls)
    vars(recording).update(vars(policy), inner=policy, layers={}, fed={})
    return recording


@dataclass
class _Exit:
    """Entries [B, P, n] that left together: their columns (-1 for none), the clock, and the fate of each."""

    columns: Tensor
    seen: int
    how: Tensor


@dataclass
class _Layer:
    """Notes of one layer. importance and answer: lists that hold one tensor [B, columns], which grows."""

    index: int
    importance: list[Tensor] = field(default_factory=list)
    answer: list[Tensor] = field(default_factory=list)
    rows: Tensor | None = None
    prompt: Prompt | None = None
    exits: list[_Exit] = field(default_factory=list)

    def note(self, into: list[Tensor], view: LayerView, name: str) -> None:
        """Bring the values of a per-slot statistic up to date, by column; mean of the heads that hold it."""
        values, positions = view.statistics[name], view.positions
        heads = max(values.shape[1], positions.shape[1])
        values, positions = (t.expand(-1, heads, -1).flatten(1) for t in (values, positions))
        end = view.prompt.columns + view.step
        before = into[0] if into else values.new_zeros(len(values), 0)
        before = torch.nn.functional.pad(before, (0, end + 1 - before.shape[1]))  # the last column takes empty slots
        index = positions.masked_fill(positions < 0, end)
        into[:] = [before.scatter_reduce(1, index, values, "mean", include_self=False)[:, :end]]

    def keep(self, view: LayerView, answer: Keep) -> None:
        """Everything that the answer does not name has left."""
        heads = max(answer.index.shape[1], view.positions.shape[1])
        index, positions = (t.expand(-1, heads, -1) for t in (answer.index, view.positions))
        slots = positions.shape[-1]
        stays = torch.zeros_like(positions, dtype=torch.bool)
        stays = torch.nn.functional.pad(stays, (0, 1)).scatter(-1, index.masked_fill(index < 0, slots), True)[..., :-1]
        columns = positions.masked_fill(stays, -1)
        self.exits.append(_Exit(columns, view.prompt.columns, _fates(view, answer, columns)))

    def leave(self, view: LayerView, slots: Tensor, into: Tensor | None) -> None:
        """These entries leave while generating."""
        heads = max(slots.shape[1], view.positions.shape[1])
        slots, positions = (t.expand(-1, heads, -1) for t in (slots, view.positions))
        columns = positions.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, -1)
        how = torch.full_like(columns, DROPPED)
        if into is not None:
            how = how.masked_fill((into >= 0).expand_as(columns), MERGED)
        self.exits.append(_Exit(columns, view.prompt.columns + view.step, how))

    def trace(self, row: int, columns: Integers) -> LayerTrace:
        """One row as arrays over the given columns."""
        heads = max([1, *(e.columns.shape[1] for e in self.exits)])
        end = int(columns[-1]) + 1
        left, how = np.full((heads, end), -1), np.full((heads, end), KEPT)
        for each in self.exits:
            for head in range(heads):
                own = min(head, each.columns.shape[1] - 1)
                gone, fates = each.columns[row, own].cpu().numpy(), each.how[row, own].cpu().numpy()
                there = (gone >= 0) & (gone < end)
                left[head, gone[there]], how[head, gone[there]] = each.seen, fates[there]
        assert self.rows is not None
        entropy, sparsity, count = self.rows[row].double().mean(0).tolist()
        padding = int(columns[0])
        return LayerTrace(
            layer=self.index,
            importance=_row(self.importance, row, end)[columns],
            answer=_row(self.answer, row, end)[columns],
            entropy=entropy / max(count, 1),
            sparsity=sparsity / max(count, 1),
            left=np.where(left >= 0, left - padding, -1)[:, columns],
            how=how[:, columns],
        )


def _fates(view: LayerView, answer: Keep, columns: Tensor) -> Tensor:
    """The fate of the leaving columns, as far as the counts of what stays tell: all of them were merged, or none."""
    stays = answer.index >= 0
    kept = view.counts.expand(-1, answer.index.shape[1], -1).gather(-1, answer.index.clamp(min=0)) * stays
    total, kept = (view.counts * view.occupied).sum(-1), kept.sum(-1)
    after = kept if answer.counts is None else (answer.counts * stays).sum(-1)
    how = torch.where((after - kept).abs() < 0.5, DROPPED, torch.where((after - total).abs() < 0.5, MERGED, LEFT))
    return how[..., None].expand_as(columns)


def _row(notes: list[Tensor], row: int, end: int) -> Floats:
    """One row of a growing tensor as an array of `end` columns."""
    found = notes[0][row].double().cpu().numpy()
    return np.asarray(np.pad(found, (0, max(0, end - len(found))))[:end])
