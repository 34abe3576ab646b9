"""What a policy and the engine say to each other: statistics asked for, views given, changes answered.

Knows shapes and words, nothing of transformers or of any policy. Axis names used throughout:
B rows of the batch, Hkv KV heads, H query heads (G = H / Hkv of them share a KV head), S slots of the buffer,
P either 1 (one choice for all heads) or Hkv (a choice per KV head), L logical columns (the prompt as it was fed,
left padding included, then the generated tokens), D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcli.policies.lazy import torch

Queries = Literal["all", "text", "after-vision", "last"]
Heads = Literal["none", "group-mean", "group-sum", "group-max", "mean", "sum", "max"]


@dataclass(frozen=True)
class Columns:
    """Attention weights reduced over query rows: one number per key, kept per slot while entries come and go.

    `reduce`: over the query rows, their sum, the sum of their squares, or their maximum. `queries`: which rows count;
    padding never does ("after-vision": text after the last visual token; "last": the last `window` real tokens of the
    prompt).
    `heads`: reduction over query heads. "none" keeps [B, H, S], "group-*" gives [B, Hkv, S], the others [B, 1, S].
    `heads_first`: reduce heads before rows; matters when one of the two is a maximum or the other is not linear.
    `decode`: go on while generating, with each new token as one more query row (of weight one).
    `first_layer`: gather it in the first layer that a policy acts on and nowhere else.
    `decay`: with "sum", what a row's weight is multiplied by for each counted row that comes after it.
    """

    name: str
    reduce: Literal["sum", "squares", "max"] = "sum"
    queries: Queries = "all"
    window: int = 32
    heads: Heads = "mean"
    heads_first: bool = False
    decode: bool = False
    first_layer: bool = False
    decay: float = 1.0


@dataclass(frozen=True)
class Rows:
    """Raw attention rows of the last `window` chosen queries: [B, H, window, S], zeros where a row has fewer."""

    name: str
    queries: Queries = "last"
    window: int = 32


@dataclass(frozen=True)
class RowSummary:
    """Per head, summed over the chosen query rows: [B, H, 3] = entropy in nats, share of visible keys whose
    weight is below `below` times the row's largest, number of rows (divide by it for means)."""

    name: str
    queries: Queries = "all"
    window: int = 32
    below: float = 0.01


Statistic = Columns | Rows | RowSummary


@dataclass(frozen=True)
class Prompt:
    """What has been fed when a policy is asked to compress: all turns so far, as announced by the session.

    real, visual: bool [B, L] (padding is not real). lengths: real tokens of each row, on the host.
    """

    real: torch.Tensor
    visual: torch.Tensor
    lengths: tuple[int, ...]
    max_new_tokens: int

    @property
    def columns(self) -> int:
        """L, padding included."""
        return int(self.real.shape[1])

    def chosen(self, queries: Queries, window: int) -> torch.Tensor:
        """bool [B, L]: the query rows that a statistic counts."""
        text = self.real & ~self.visual
        if queries == "all":
            return self.real
        if queries == "text":
            return text
        if queries == "after-vision":
            seen_after = self.visual.flip(-1).cumsum(-1).flip(-1)  # visual tokens at or after each column
            return text & (seen_after == 0)
        from_end = self.real.flip(-1).cumsum(-1).flip(-1)
        return self.real & (from_end <= window)

    def map(self, order: Sequence[int]) -> Prompt:
        """The prompt of the given batch rows, for beams and repeated sequences."""
        rows = torch.tensor(order, device=self.real.device)
        lengths = tuple(self.lengths[i] for i in order)
        return Prompt(self.real[rows], self.visual[rows], lengths, self.max_new_tokens)


@dataclass
class LayerView:
    """One layer's cache as a policy sees it.

    keys, values: [B, Hkv, S, D], rotated as cached (those of an int8 cache are put together when a policy reads them,
    which costs about what attention does). positions: int64 [B, P, S], the logical column of each slot, -1 for a slot
    that holds nothing to keep (empty, padding, or out of a sliding window). statistics: by name.
    counts: float [B, P, S], how many tokens were merged into the entry. weights: float [B, H, S] of the newest
    query (decode, and only for a policy with `needs_weights`). step: 0 after a prompt, t after the t-th generated
    token was fed. state: tensors of this layer and run whose first axis is the batch.
    held: entries of each row now, on the host, the most over its heads. kept: the same right after the last prompt was
    compressed (empty before). shared: tensors that the layers of one prompt hand on to later ones. window: a sliding
    layer's width, else None.
    turn(keys [B, Hkv, n, D], steps [B, Hkv or 1, n]): the keys as if they stood that many positions later, with the
    model's own frequencies (only for a policy with `needs_rotation`).
    coordinates: int64 [B, A, columns fed], where the model itself places each column on its A rotary axes (for such a
    policy too); None when that is the column, less the padding of the row.
    """

    layer: int
    layers: int
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    statistics: Mapping[str, torch.Tensor]
    counts: torch.Tensor
    prompt: Prompt
    step: int
    held: tuple[int, ...]
    state: dict[str, torch.Tensor]
    kept: tuple[int, ...] = ()
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: torch.Tensor | None = None
    window: int | None = None
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    coordinates: torch.Tensor | None = None

    @property
    def occupied(self) -> torch.Tensor:
        """bool [B, P, S]."""
        return self.positions >= 0

    @property
    def seen(self) -> tuple[int, ...]:
        """Real tokens that each row has read or written, on the host."""
        return tuple(n + self.step for n in self.prompt.lengths)

    @property
    def visual(self) -> torch.Tensor:
        """bool [B, P, S]: slots that hold a visual token (generated tokens are text)."""
        columns = self.prompt.columns
        inside = self.occupied & (self.positions < columns)
        index = self.positions.clamp(0, columns - 1)
        mask = self.prompt.visual[:, None].expand(-1, index.shape[1], -1)
        return inside & mask.gather(-1, index)


class _Lazy:
    """A field that may be given as a function, which is called when the field is first read."""

    def __init__(self, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, view: Any, owner: type) -> Any:
        found = vars(view)[self.name]
        if callable(found):
            found = vars(view)[self.name] = found()
        return found

    def __set__(self, view: Any, value: Any) -> None:
        vars(view)[self.name] = value


for _name in ("keys", "values"):
    setattr(LayerView, _name, _Lazy(_name))  # once the dataclass is made, which would take it for a default


@dataclass
class Keep:
    """Answer after a prompt: the slots that stay, everything else leaves.

    index: int64 [B, P, K], ascending by position, -1 where a row keeps fewer than K. held: entries of each row, on
    the host (the most over its heads). keys, values: [B, Hkv, K, D] when merging changed them. counts: [B, P, K].
    bias: [B, P, K], added to the logits of these entries from now on. side: new values of statistics, by name.
    """

    index: torch.Tensor
    held: tuple[int, ...]
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    side: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Evict:
    """Answer while generating: the slots that leave now.

    slots: int64 [B, P, n], -1 for none; no slot twice in a row. leaving: for each row the number of entries that
    leave every one of its heads, on the host: the engine reuses that many slots without asking the device. None: only
    the device knows; it is then asked once a step.
    into: int64 [B, P, n], the slot that takes each leaving entry in by the count-weighted mean of keys and values;
    None drops them all. rewrite: (slots int64 [B, P, m], keys [B, Hkv, m, D]), entries that stay with new keys.
    """

    slots: torch.Tensor
    leaving: Sequence[int] | None
    into: torch.Tensor | None = None
    rewrite: tuple[torch.Tensor, torch.Tensor] | None = None
