"""One layer's share of one turn: statistics gathered along the prompt, then what the policy does to the layer.

Stands between `cache` (slots), `attention` (weights) and `kvcli.policies` (decisions); knows nothing of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvcli.engine.attention import Gather, Latest, Listener, attend, attend_and_gather, finish
from kvcli.engine.cache import BLOCK, LayerCache
from kvcli.engine.coordinates import Coordinates
from kvcli.policies.base import Policy, keep_where
from kvcli.policies.contract import Columns, Evict, Keep, LayerView, Prompt, Statistic


class Turns(Protocol):
    """Anything that can turn the keys of a layer by a number of positions, as `rotary.Rotator`."""

    def turn(self, keys: Tensor, steps: Tensor, layer: int) -> Tensor: ...


@dataclass
class Turn:
    """The announced prompt and the tokens generated after it, in one layer.

    gathered: statistics that do not follow entries (raw rows, row summaries), until the prompt is compressed.
    weights: [B, H, S] of the newest query, for policies that ask. columns: int64 [B, 1, T] of the queries at hand,
    where they are not simply the newest ones. first: whether no layer that a policy acts on comes before this one.
    shared: see `LayerView`.
    """

    layer: int
    layers: int
    window: int | None
    store: LayerCache
    policy: Policy
    prompt: Prompt
    rotator: Turns | None = None
    coordinates: Coordinates = field(default_factory=Coordinates)
    first: bool = True
    shared: dict[str, Tensor] = field(default_factory=dict)
    gathered: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    columns: Tensor | None = None
    compressed: bool = False

    @property
    def step(self) -> int:
        """Generated tokens fed since the prompt; 0 or less while the prompt is still coming in."""
        return self.store.seen - self.prompt.columns

    @property
    def prompt_ends_now(self) -> bool:
        return self.step == 0

    @property
    def wants_all_rows(self) -> bool:
        """Whether a statistic of the prompt looks at more rows than the last few."""
        return self.step <= 0 and any(s.queries != "last" for s in self._asked())

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        *,
        softcap: float | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Attention output [B, H, T, Dv], gathering what the policy asked for in the same pass."""
        gathers = self._gathers(query.shape[2])
        if not gathers and not self._wants_weights:
            return attend(query, keys, values, mask, scale, softcap=softcap, bias=bias)
        listeners: list[Listener] = [*gathers]
        latest = Latest()
        if self._wants_weights:
            listeners.append(latest)
        output = attend_and_gather(query, keys, values, mask, scale, listeners, softcap=softcap, bias=bias)
        self.weights = latest.weights
        self._store(gathers, keys.shape[1])
        return output

    def observe(self, query: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> None:
        """Gather over the last rows only, beside an output that was computed elsewhere."""
        gathers = self._gathers(query.shape[2])
        if gathers:
            longest = max(s.window for s in self._asked())
            # the window counts real tokens from the end of the prompt, which may reach beyond this chunk
            start = max(0, query.shape[2] - longest - self.step) if self.step <= 0 else 0
            if start >= query.shape[2]:
                return
            attend_and_gather(query, keys, None, mask, scale, gathers, start=start)
            self._store(gathers, keys.shape[1])

    def view(self) -> LayerView:
        """What the policy is shown."""
        statistics = dict(self.gathered)
        for name in (s.name for s in self.policy.statistics() if isinstance(s, Columns)):
            found = self.store.side_view(name)
            if found is not None:
                statistics[name] = finish(self._statistic(name), found, self.store.kv_heads)
        positions = self._to_keep(self.store.located())
        counts = self.store.side_view("counts")
        return LayerView(
            layer=self.layer,
            layers=self.layers,
            keys=self.store.read_keys,  # type: ignore[arg-type]  # read when asked for
            values=self.store.read_values,  # type: ignore[arg-type]
            positions=positions,
            statistics=statistics,
            counts=torch.ones_like(positions, dtype=torch.float32) if counts is None else counts,
            prompt=self.prompt,
            step=max(0, self.step),
            held=self.held(),
            state=self.store.state,
            kept=tuple(self.store.kept),
            shared=self.shared,
            weights=self.weights,
            window=self.window,
            turn=None if self.rotator is None else partial(self.rotator.turn, layer=self.layer),
            coordinates=self.coordinates.known,
        )

    def apply(self, answer: Keep | None) -> None:
        """Carry out what the policy decided after the prompt."""
        self.gathered = {}
        answer = answer or self._within_window()
        if answer is None:
            return
        side = {"counts": answer.counts, "bias": answer.bias, **answer.side}
        self.store.keep(
            answer.index,
            answer.held,
            keys=answer.keys,
            values=answer.values,
            side={name: value for name, value in side.items() if value is not None},
            room=self.growth,
        )
        self.compressed = True

    def evict(self) -> None:
        """Ask the policy what leaves after this generated token, and let it leave."""
        answer: Evict | None = self.policy.evict(self.view())
        self.weights = None
        if answer is not None:
            if answer.into is not None:
                self.store.merge(answer.slots, answer.into)
            if answer.rewrite is not None:
                self.store.rewrite(*answer.rewrite)
            self.store.evict(answer.slots, answer.leaving)

    def slid(self, seen: int, queries: int) -> Tensor:
        """For each row how many entries slide out of the window in every head once `seen` columns were fed, and at the
        end how many at most in any head: int64 [B + 1]."""
        counts = self._gone(seen, queries).sum(-1)
        return torch.cat([counts.amin(-1), counts.amax()[None]])

    def slide(self, queries: int, counts: Sequence[int]) -> None:
        """Free what slid out of the window. counts: what `slid` says of it, on the host."""
        *leaving, most = counts
        if most:
            chosen, slots = self._gone(self.store.seen, queries).to(torch.uint8).topk(most, -1)
            self.store.evict(slots.masked_fill(chosen == 0, -1), leaving)

    @property
    def growth(self) -> int:
        """Slots to reserve for what is generated."""
        growth = self.policy.growth(self.prompt)
        return growth if self.window is None else min(growth, BLOCK)

    # --- inside

    def _within_window(self) -> Keep | None:
        """What a sliding layer keeps of a prompt that the policy leaves alone: all that a later token can see."""
        if self.window is None or self.store.seen < self.window:
            return None
        positions = self._to_keep(self.store.located())
        return keep_where(positions >= 0, positions, self.held())

    def _gone(self, seen: int, queries: int) -> Tensor:
        """bool [B, P, S]: held entries that no later token can see: neither after the newest of `seen` columns, nor,
        where several were fed, after any of them, since drafts may be taken back."""
        assert self.window is not None
        located = self.store.located()
        return (located >= 0) & (located <= seen - self.window - (queries if queries > 1 else 0))

    @property
    def _wants_weights(self) -> bool:
        return self.step > 0 and self.policy.needs_weights

    def _asked(self) -> list[Statistic]:
        """What is to be gathered in this layer."""
        asked = self.policy.statistics()
        return [s for s in asked if self.first or not (isinstance(s, Columns) and s.first_layer)]

    def _statistic(self, name: str) -> Statistic:
        return next(s for s in self.policy.statistics() if s.name == name)

    def _gathers(self, queries: int) -> list[Gather]:
        found = []
        slots = self.store.extent
        for statistic in self._asked():
            if self.step > 0 and not (isinstance(statistic, Columns) and statistic.decode):
                continue
            chosen = self._chosen(statistic, queries)
            before = self.gathered.get(statistic.name)
            if isinstance(statistic, Columns):
                before = self.store.side_view(statistic.name)
            found.append(Gather(statistic, chosen, slots, before))
        return found

    def _chosen(self, statistic: Statistic, queries: int) -> Tensor:
        """bool [B, T]: which of the newest `queries` columns count; generated tokens all do."""
        if self.columns is not None:
            all_columns = self.prompt.chosen(statistic.queries, statistic.window)
            at = self.columns[:, 0]
            return all_columns.gather(1, at.clamp(min=0)) & (at >= 0)
        start = self.store.seen - queries
        chosen = self.prompt.chosen(statistic.queries, statistic.window)[:, start : self.store.seen]
        missing = queries - chosen.shape[1]
        return torch.nn.functional.pad(chosen, (0, missing), value=True) if missing else chosen

    def _store(self, gathers: list[Gather], kv_heads: int) -> None:
        for gather in gathers:
            if gather.value is None:
                continue
            name = gather.statistic.name
            if not isinstance(gather.statistic, Columns):
                self.gathered[name] = gather.value
            elif name not in self.store.side:
                self.store.set_side(name, gather.value)

    def _to_keep(self, positions: Tensor) -> Tensor:
        """positions with -1 also where a slot holds padding or what no later token can see."""
        if not self.compressed and min(self.prompt.lengths) < self.prompt.columns:
            inside = positions.clamp(0, self.prompt.columns - 1)
            real = self.prompt.real[:, None].expand(-1, positions.shape[1], -1).gather(-1, inside)
            positions = positions.masked_fill(~real & (positions < self.prompt.columns), -1)
        if self.window is not None:
            positions = positions.masked_fill(positions <= self.store.seen - self.window, -1)
        return positions

    def held(self) -> tuple[int, ...]:
        """Entries of each row, the most over its heads; padding and what slid out of a window don't count."""
        if self.compressed:
            return tuple(self.store.held)
        seen = [n + max(0, self.step) for n in self.prompt.lengths]
        if self.window is not None:
            seen = [min(n, self.window - 1) for n in seen]
        return tuple(min(n, held) for n, held in zip(seen, self.store.held, strict=True))
