"""One pass over the prompts of a batch, for many policies.

Reading the prompt costs as much as a hundred generated tokens, and every policy that prunes only the cache reads it
alike. So it is read once, with all that any of the policies wants to know; each then gets a cache as if it had read the
prompt by itself. Knows sessions, caches and policies; nothing of what is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvcli.engine import adapter, prompts
from kvcli.engine.forcing import Force, OnLogits, watched
from kvcli.engine.session import Decoding, Prepared, Session
from kvcli.policies.base import Policy
from kvcli.policies.contract import Columns, Keep, LayerView, Statistic


class Everything(Policy):
    """Gathers what several policies ask for, and keeps all entries. Made by `everything`."""

    name: ClassVar[str] = "everything"
    asked: dict[Statistic, Statistic]
    """What a policy asks for, and the same under a name of its own."""
    rows: dict[int, Mapping[str, Tensor]]
    """Statistics of each layer, by that name."""
    turns: bool

    def statistics(self) -> tuple[Statistic, ...]:
        return tuple(self.asked.values())

    @property
    def needs_rotation(self) -> bool:
        return self.turns

    def compress(self, view: LayerView) -> Keep | None:
        self.rows[view.layer] = view.statistics
        return None


def everything(policies: Sequence[Policy]) -> Everything:
    """The union of what the policies ask for."""
    asked: dict[Statistic, Statistic] = {}
    for policy in policies:
        for statistic in policy.statistics():
            asked.setdefault(statistic, dataclasses.replace(statistic, name=f"{len(asked)}"))
    union = Everything()
    vars(union).update(asked=asked, rows={}, turns=any(policy.needs_rotation for policy in policies))
    return union


class Reading:
    """Prompts that were read once.

    policies: those that `start`, `answer` and `force` may be called with; see `shareable` and `serves`.
    """

    def __init__(
        self, session: Session, batch: Sequence[Prepared], policies: Sequence[Policy], decoding: Decoding
    ) -> None:
        self.session, self.decoding = session, decoding
        joined = prompts.collate(session.processor, [p.inputs for p in batch], [p.request for p in batch])
        self.inputs = {name: self._placed(value) for name, value in joined.items()}
        self.union = everything(policies)
        self.cache = session.cache(self.union, self.inputs, decoding.max_new_tokens)
        self.cache.whole, self.cache.int8 = True, False
        seen: list[Tensor] = []
        with (
            torch.inference_mode(),
            adapter.attached(session.model, self.cache),
            watched(session.model, lambda _, logits: seen.append(logits)),
        ):
            out = session.model.generate(**self.inputs, cache=self.cache, **self._settings(1))
        self.logits = seen[0]
        """[B, vocabulary]: the model's raw scores for the first token, the same under every policy."""
        self.first = out.sequences[:, -1:]

    def serves(self, policy: Policy) -> bool:
        """Whether all that a policy asks for was gathered, so that it can start from here."""
        return shareable(self.session, policy) and all(s in self.union.asked for s in policy.statistics())

    def start(self, policy: Policy) -> adapter.KVCache:
        """A cache that holds what the policy keeps of the prompts."""
        session, read = self.session, self.cache
        cache = session.empty_cache(policy)
        assert read.prompt is not None
        cache.announce(read.prompt)
        cache.coordinates.known = read.coordinates.known
        for layer, source in zip(cache.ours, read.ours, strict=True):
            keys, values = source.store.view()
            layer.lazy_initialization(keys, values)
            layer.store.append(keys, values)
            cache.account(layer)
            turn = cache.turn(layer)
            assert turn is not None
            for statistic in policy.statistics():
                name = self.union.asked[statistic].name
                if not isinstance(statistic, Columns):
                    turn.gathered[statistic.name] = self.union.rows[source.index][name]
                elif turn.first or not statistic.first_layer:
                    found = source.store.side_view(name)
                    assert found is not None
                    layer.store.set_side(statistic.name, found)
            adapter.after_attention(layer, turn, read.prompt.columns, None)
        return cache

    def answer(self, policy: Policy, on_logits: OnLogits | None = None) -> tuple[list[list[int]], adapter.KVCache]:
        """Greedy answers under a policy, as generated (padding after the end of text), and the cache as it was left.

        on_logits: as in `force`.
        """
        cache = self.start(policy)
        watch = on_logits or (lambda step, logits: None)
        watch(0, self.logits)
        with watched(self.session.model, lambda step, logits: watch(step + 1, logits)):
            rest = self._generate(cache, self.first, self.decoding.max_new_tokens - 1, LogitsProcessorList())
        return torch.cat([self.first, rest], 1).tolist(), cache

    def force(self, policy: Policy, answers: Sequence[Sequence[int]], on_logits: OnLogits) -> adapter.KVCache:
        """As `forcing.force`."""
        cache = self.start(policy)
        on_logits(0, self.logits)
        longest = max(map(len, answers))
        if longest > 1:
            processors = LogitsProcessorList([Force([answer[1:] for answer in answers], self.session.pad_id)])
            first = torch.tensor([[answer[0]] for answer in answers], device=self.first.device)
            with watched(self.session.model, lambda step, logits: on_logits(step + 1, logits)):
                self._generate(cache, first, longest - 1, processors, stop=False)
        return cache

    # --- inside

    def _generate(
        self,
        cache: adapter.KVCache,
        first: Tensor,
        tokens: int,
        processors: LogitsProcessorList,
        *,
        stop: bool = True,
    ) -> Tensor:
        """Up to so many tokens [B, n] after the prompt and a first token [B, 1]."""
        ids, real = self.inputs["input_ids"], self.inputs["attention_mask"]
        if tokens < 1:
            return first[:, :0]
        ids, real = torch.cat([ids, first], 1), torch.cat([real, torch.ones_like(first)], 1)
        settings = self._settings(tokens)
        if not stop:
            settings |= {"suppress_tokens": None, "eos_token_id": None}
        with torch.inference_mode(), adapter.attached(self.session.model, cache):
            out = self.session.model.generate(
                input_ids=ids, attention_mask=real, cache=cache, logits_processor=processors, **settings
            )
        fed: Tensor = out.sequences[:, ids.shape[1] :]
        return fed

    def _settings(self, tokens: int) -> dict[str, Any]:
        decoding = dataclasses.replace(self.decoding, max_new_tokens=tokens, num_beams=1)
        settings: dict[str, Any] = self.session._settings(decoding)
        return settings

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        placed: Tensor = value.to(self.session.device, self.session.dtype if value.is_floating_point() else None)
        return placed


def shareable(session: Session, policy: Policy) -> bool:
    """Whether a policy can start from a prompt that was read once: nothing but our own layers must remember it, and
    the policy must not change how it is read."""
    cache = adapter.KVCache(session.model.config, policy)
    remembers = any("rope_deltas" in vars(module) for module in session.model.modules())
    return len(cache.ours) == len(cache.layers) and not remembers and not policy.hides_tokens
