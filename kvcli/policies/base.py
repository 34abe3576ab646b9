"""What every policy shares: its options, the budget, protected entries, top-k with settled ties.

A policy is a frozen dataclass whose fields are its options; the command line, the profiles and `kvcli policies` are
made from them. It holds no tensors: memory of a run lives in `LayerView.state` and in per-slot statistics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from kvcli.errors import UsageError
from kvcli.policies.contract import Evict, Keep, LayerView, Prompt, Statistic
from kvcli.policies.lazy import torch

Decode = Literal["ratio", "bounded", "grow"]


def option(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A field of a policy that users can set: its default, one line of help, and its range (both ends allowed)."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies. Override `compress` (or `compress_model`), and `evict` where the paper acts in decode."""

    name: ClassVar[str]
    source: ClassVar[str] = ""
    when: ClassVar[Literal["layer", "model"]] = "layer"
    frees_memory: ClassVar[bool] = True
    sees_question: ClassVar[bool] = False
    smallest: ClassVar[int] = 1
    """Entries that a row must keep for the policy to work."""

    budget: float | int | None = option(
        0.2, "what is KEPT: a share of the prompt (0 < b <= 1) or a number of entries (2 or more)"
    )

    def statistics(self) -> tuple[Statistic, ...]:
        """What the engine must gather for this policy."""
        return ()

    @property
    def served_at_once(self) -> bool:
        """Whether `compress_model` answers for all layers together; what `when` says, unless options change it."""
        return self.when == "model"

    @property
    def needs_weights(self) -> bool:
        """Whether `evict` reads `LayerView.weights`."""
        return False

    @property
    def needs_rotation(self) -> bool:
        """Whether `LayerView.turn` is used."""
        return False

    @property
    def hides_tokens(self) -> bool:
        """Whether what leaves the first layer also leaves the hidden states of later ones."""
        return False

    @property
    def renumbers(self) -> bool:
        """Whether tokens after a compressed prompt stand at the number of entries held, not at their true position
        (needs rotation)."""
        return False

    @property
    def acts_in_decode(self) -> bool:
        """Whether `evict` is to be called at all."""
        return False

    def compress(self, view: LayerView) -> Keep | None:
        """What one layer keeps of everything seen so far; None keeps all. Called once after each prompt."""
        return None

    def compress_model(self, views: Sequence[LayerView]) -> list[Keep | None]:
        """The same for all layers at once, after the last one (`when = "model"`)."""
        return [self.compress(view) for view in views]

    def evict(self, view: LayerView) -> Evict | None:
        """What leaves one layer after a generated token was fed and attended; None when nothing does."""
        return None

    def growth(self, prompt: Prompt) -> int:
        """Entries that a layer may gain while generating, at most: how much room to reserve."""
        return prompt.max_new_tokens

    # --- budget

    def __post_init__(self) -> None:
        check_options(self)
        if self.budget is not None:
            object.__setattr__(self, "budget", parse_budget(self.budget))

    def targets(self, view: LayerView) -> tuple[int, ...]:
        """Entries that each row is to keep of all real tokens seen: never fewer than `smallest`, never more than
        it has."""
        return tuple(min(self.target(seen), held) for seen, held in zip(view.seen, view.held, strict=True))

    def target(self, seen: int) -> int:
        """Entries kept of `seen` tokens.

        Raises `UsageError` when a count is below `smallest`; a share of a short prompt is rounded up to it instead.
        """
        budget = 1.0 if self.budget is None else self.budget
        if isinstance(budget, int):
            if budget < self.smallest:
                raise UsageError(f"policy {self.name} needs a budget of at least {self.smallest} entries, not {budget}")
            return min(budget, seen)
        return min(seen, max(self.smallest, math.floor(budget * seen + 0.5)))

    def bound(self, kept: int) -> int:
        """Entries that a row which kept so many of its prompt may come to hold: as many, or a count that is larger."""
        return max(kept, self.budget) if isinstance(self.budget, int) else kept

    def resolved(self) -> dict[str, Any]:
        """Every option and its value."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def parse_budget(value: float | int | str) -> float | int:
    """A budget as users write it: `0.2` a share kept, `256` a count kept, `1` means `1.0`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 0 < number <= 1:
        return number
    if number >= 2 and number == int(number):
        return int(number)
    raise UsageError(
        f"budget {value} is neither a share kept (0 < b <= 1, as 0.2) nor a number of entries kept (2 or more)"
    )


def check_options(policy: Policy) -> None:
    """Raise `UsageError` for an option outside its choices or range."""
    from kvcli.policies import options

    for known in options(type(policy)):
        value = getattr(policy, known.name)
        if known.choices and value not in known.choices:
            raise UsageError(
                f"{known.name} = {value!r} is not one of {', '.join(map(str, known.choices))} (policy {policy.name})"
            )
        below = known.low is not None and isinstance(value, int | float) and value < known.low
        above = known.high is not None and isinstance(value, int | float) and value > known.high
        if below or above:
            raise UsageError(f"{known.name} = {value} is outside {known.low} .. {known.high} (policy {policy.name})")


def top(scores: torch.Tensor, counts: Sequence[int], occupied: torch.Tensor) -> torch.Tensor:
    """bool [B, P, S]: in each row and head the `counts[row]` highest scores among the occupied slots.

    scores, occupied: [B, P, S]. Of equal scores the one in the lower slot wins, which right after a prompt is the
    earlier token.
    """
    order = scores.masked_fill(~occupied, -math.inf).sort(dim=-1, descending=True, stable=True).indices
    wanted = torch.as_tensor(counts, device=scores.device)[:, None, None]
    best = torch.arange(order.shape[-1], device=scores.device) < wanted
    return torch.zeros_like(occupied).scatter(-1, order, best.expand_as(order)) & occupied


def keep_where(kept: torch.Tensor, positions: torch.Tensor, held: Sequence[int]) -> Keep:
    """`Keep` of the slots where `kept` [B, P, S] is true, in the order of their positions.

    held: how many that is in each row (the most over its heads), on the host.
    """
    width = max(1, *held)
    order = (
        positions.masked_fill(~kept, torch.iinfo(positions.dtype).max).sort(dim=-1, stable=True).indices[..., :width]
    )
    index = order.masked_fill(~kept.gather(-1, order), -1)
    return Keep(index=index, held=tuple(held))


def recent(view: LayerView, count: int | Sequence[int]) -> torch.Tensor:
    """bool [B, P, S]: the `count` occupied slots of highest position in each row and head."""
    return _ranked(view.positions, view, count)


def first(view: LayerView, count: int | Sequence[int]) -> torch.Tensor:
    """bool [B, P, S]: the `count` occupied slots of lowest position in each row and head (the sinks)."""
    last = torch.iinfo(view.positions.dtype).max
    return _ranked(last - view.positions.masked_fill(~view.occupied, last), view, count)


def _ranked(order: torch.Tensor, view: LayerView, count: int | Sequence[int]) -> torch.Tensor:
    """bool [B, P, S]: the `count` occupied slots of highest order, which is the same in no two of them. A policy asks
    this at every step, and few are found much sooner than all are sorted."""
    counts = [count] * len(view.held) if isinstance(count, int) else [*count]
    if not any(counts):
        return torch.zeros_like(view.occupied)
    most = min(max(counts), order.shape[-1])
    if min(counts) == max(counts):
        least = order.topk(most, sorted=False).values.amin(-1, keepdim=True)
        return (order >= least) & view.occupied
    ranks = torch.tensor([min(n, most) for n in counts], device=order.device)[:, None, None]
    highest = order.topk(most).values
    least = highest.gather(-1, (ranks - 1).clamp(min=0).expand(-1, order.shape[1], 1))
    return (order >= least) & view.occupied & (ranks > 0)


def oldest(view: LayerView, candidates: torch.Tensor) -> torch.Tensor:
    """int64 [B, P]: the slot of lowest position among the candidates (bool [B, P, S]; one at least in each row)."""
    return view.positions.masked_fill(~candidates, torch.iinfo(view.positions.dtype).max).argmin(-1)


def evict_one(slots: torch.Tensor, leaving: Sequence[bool]) -> Evict | None:
    """`Evict` of one slot [B, P] in the rows where `leaving` is true; None when that is no row."""
    if not any(leaving):
        return None
    slots = slots[..., None]
    if not all(leaving):
        mask = torch.tensor(leaving, device=slots.device)[:, None, None]
        slots = slots.masked_fill(~mask, -1)
    return Evict(slots=slots, leaving=[int(x) for x in leaving])
