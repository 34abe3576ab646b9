"""Feed a given answer token by token, with a policy at work, and look at the model's raw scores.

Knows sessions and stock `generate`; nothing of what is measured. Forcing is a logits processor, so that positions,
masks, padding and evictions come about exactly as in a free run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvcli.engine import adapter, prompts
from kvcli.engine.session import Prepared, Session
from kvcli.policies.base import Policy

OnLogits = Callable[[int, Tensor], None]
"""Called with a step (0 is the prompt) and the raw logits [B, vocabulary] that it gave for the next token."""


class Force(LogitsProcessor):
    """Leaves one choice at each step: the next token of each row's answer, padding after its end."""

    def __init__(self, answers: Sequence[Sequence[int]], pad: int) -> None:
        longest = max(map(len, answers))
        self.tokens = torch.tensor([[*answer, *[pad] * (longest - len(answer))] for answer in answers])
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[:, self.step, None].to(scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


@contextmanager
def watched(model: Any, on_logits: OnLogits) -> Iterator[None]:
    """Show the raw logits of the last column of each forward pass to a callback."""
    step = 0

    def hook(module: Any, inputs: Any, output: Any) -> None:
        nonlocal step
        on_logits(step, output.logits[:, -1])
        step += 1

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def force(
    session: Session, batch: Sequence[Prepared], policy: Policy, answers: Sequence[Sequence[int]], on_logits: OnLogits
) -> adapter.KVCache:
    """Feed one answer (token ids, one at least) to each row, all but its last token, and return the used cache.

    The scores of step t are those for token t of the answers; a row whose answer is over is fed padding until the
    longest one ends. An answer may end with the end-of-text token and must not hold it elsewhere.
    """
    joined = prompts.collate(session.processor, [p.inputs for p in batch], [p.request for p in batch])
    inputs = {name: _placed(value, session) for name, value in joined.items()}
    steps = max(map(len, answers))
    cache = session.cache(policy, inputs, steps)
    processors = LogitsProcessorList([Force(answers, session.pad_id)])
    with torch.inference_mode(), adapter.attached(session.model, cache), watched(session.model, on_logits):
        session.model.generate(
            **inputs,
            cache=cache,
            logits_processor=processors,
            max_new_tokens=steps,
            do_sample=False,
            num_beams=1,
            pad_token_id=session.pad_id,
        )
    return cache


def _placed(value: Any, session: Session) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(session.device, session.dtype if value.is_floating_point() else None)
