"""Pictures and questions, one after another, in one conversation on one compressed cache.

Each turn feeds only what is new; the cache is told about the whole conversation, so that a policy compresses all of it
again after each prompt. Knows sessions and prompts, nothing of the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcli.engine import adapter, prompts
from kvcli.engine.decoding import Decoding, Step
from kvcli.engine.session import Outcome, Prepared, Request, Session
from kvcli.engine.vision import visual_mask
from kvcli.errors import UsageError
from kvcli.policies.base import Policy
from kvcli.policies.contract import Prompt

ANSWER = "@@the-answer@@"
"""Stands for earlier answers while a template is filled, so that what follows an answer can be cut out."""


class Conversation(Session):
    """A session whose runs of one request go on where the last one ended.

    Outcomes count the whole conversation: `prompt_tokens` are all columns before the newest answer, `bytes_peak` is
    the highest since the beginning.
    """

    def __init__(self, session: Session, policy: Policy) -> None:
        super().__init__(session.loaded, session.load_seconds)
        self.policy = policy
        self.asked: list[Request] = []
        self.ids: Tensor | None = None
        """All tokens so far [1, L]; the newest was generated and is not fed yet."""
        self.prompt_tokens = 0
        """Columns up to and including the newest prompt."""
        self._per_token: dict[str, Tensor] = {}
        self._grids: list[Tensor] = []
        self._stopped = False
        self._live: adapter.KVCache | None = None

    def ask(
        self,
        request: Request,
        decoding: Decoding,
        *,
        on_text: Callable[[str], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> Outcome:
        """The answer to the next pictures and question. Greedy or drawn, but without beams."""
        if decoding.num_beams > 1:
            raise UsageError("a conversation needs --num-beams 1")
        prepared = self._next(request)
        self.prompt_tokens = prepared.length
        with self._placed(prepared) as placed:
            outcome = self.run([placed], self.policy, decoding, on_text=on_text, on_step=on_step)[0]
        self.ids = torch.cat([prepared.inputs["input_ids"], torch.tensor([outcome.tokens])], 1)
        self._stopped = outcome.finish_reason == "stop"
        self.asked.append(request)
        return outcome

    def cache(self, policy: Policy, inputs: Mapping[str, Tensor], max_new_tokens: int) -> adapter.KVCache:
        """The cache of the conversation, told about everything up to and including this prompt."""
        if self._live is None:
            self._live = super().cache(policy, inputs, max_new_tokens)
        else:
            ids = inputs["input_ids"]
            real = torch.ones_like(ids, dtype=torch.bool)
            self._live.announce(Prompt(real, visual_mask(self.model, ids), (ids.shape[1],), max_new_tokens))
        return self._live

    def full_bytes(self, seen: int) -> int:
        """What the cache would hold of so many tokens, had nothing left it."""
        return 0 if self._live is None else self._live.full_bytes(seen)

    # --- inside

    def _next(self, request: Request) -> Prepared:
        """The whole conversation with this request at its end; pictures are those of this request alone."""
        if self.ids is None:
            inputs = dict(self.prepare(request).inputs)
        else:
            if getattr(self.model.config.get_text_config(), "cross_attention_layers", None):
                raise UsageError(
                    f"{self.model_name} reads pictures beside the text and can't be shown another one later"
                )
            inputs = self._after_answer(request)
        self._per_token = {k: v for k, v in inputs.items() if k in prompts.PER_TOKEN and isinstance(v, Tensor)}
        if isinstance(inputs.get("image_grid_thw"), Tensor):
            self._grids.append(inputs["image_grid_thw"])
        ids = inputs["input_ids"]
        return Prepared(request, inputs, ids.shape[1], int(visual_mask(self.model, ids).sum()))

    def _after_answer(self, request: Request) -> dict[str, Any]:
        """Inputs of a later turn: per-token ones cover the whole conversation, all others are of the new pictures."""
        assert self.ids is not None
        text = self._text_after_answer(request)
        images = {"images": [list(request.images)]} if request.images else {}
        new = self.processor(text=[text], **images, return_tensors="pt", add_special_tokens=False)
        ends = self._stopped and self.ids[0, -1] == new["input_ids"][0, 0]  # the model ended its turn itself
        joined: dict[str, Any] = dict(new)
        length = new["input_ids"].shape[1]
        for name, earlier in self._per_token.items():
            part = new.get(name)  # a turn without pictures may lack what tells them from text
            part = earlier.new_zeros(1, length, *earlier.shape[2:]) if part is None else part
            part = part[:, 1:] if ends else part
            before = self.ids if name == "input_ids" else self._grown(name)
            joined[name] = torch.cat([before, part.to(before)], 1)
        return joined

    def _grown(self, name: str) -> Tensor:
        """A per-token input of all that came before, the newest answer included."""
        assert self.ids is not None
        before = self._per_token[name]
        fill = 1 if name == "attention_mask" else 0
        return torch.nn.functional.pad(before, (0, self.ids.shape[1] - before.shape[1]), value=fill)

    def _text_after_answer(self, request: Request) -> str:
        """What the template puts after the last answer: the end of that turn and the new one."""
        if not getattr(self.processor, "chat_template", None):
            image = getattr(self.processor, "image_token", None) or "<image>"
            return "\n" + "\n".join([image] * len(request.images) + [request.prompt]) + "\n"
        messages: list[dict[str, Any]] = []
        for each in self.asked:
            messages += [_message("user", each.prompt, len(each.images)), _message("assistant", ANSWER)]
        if self.asked[0].system:
            messages.insert(0, _message("system", self.asked[0].system))
        messages.append(_message("user", request.prompt, len(request.images)))
        whole: str = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if ANSWER not in whole:
            raise UsageError(f"the chat template of {self.model_name} leaves earlier answers out")
        return whole.rpartition(ANSWER)[2]

    @contextmanager
    def _placed(self, prepared: Prepared) -> Iterator[Prepared]:
        """With the positions of a later turn, for models that number pictures along several axes: they would number
        the new pictures as if no others had come before, and keep what they found on the model."""
        core: Any = getattr(self.model, "model", None)
        if self.ids is None or not hasattr(core, "get_rope_index"):
            yield prepared
            return
        per_token = {k: v.to(self.device) for k, v in prepared.inputs.items() if k in self._per_token}
        ids = per_token.pop("input_ids")
        grids = torch.cat(self._grids).to(self.device) if self._grids else None
        before = core.rope_deltas
        try:
            spatial, core.rope_deltas = core.get_rope_index(ids, image_grid_thw=grids, **per_token)
            text = torch.arange(ids.shape[1], device=self.device).expand(1, 1, -1)
            positions = torch.cat([text, spatial.to(text)])
            yield dataclasses.replace(prepared, inputs={**prepared.inputs, "position_ids": positions})
        finally:
            core.rope_deltas = before


def _message(role: str, text: str, images: int = 0) -> dict[str, Any]:
    return {"role": role, "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}
