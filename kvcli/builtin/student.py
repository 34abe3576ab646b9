"""The model while it is trained: frozen trunk features in, loss out.

Knows the neck, the language model with its low-rank updates, and how a chat about a picture is laid out. Knows
nothing of files or schedules. `build.py` makes the stock checkpoint of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcli.builtin import lora, prompts
from kvcli.builtin.build import SHRINK, quick_dtype
from kvcli.builtin.examples import Example
from kvcli.builtin.tower import Neck

WORD_DROPOUT = 0.25  # of an answer's tokens so far: else captions are learned by heart (Bowman et al., 2016)


def through_projector(tokens: Tensor) -> Tensor:
    """What LLaVA's projector does with `SHRINK * identity` before and `2 / SHRINK * identity` after its gelu."""
    return F.gelu(tokens * SHRINK) * (2 / SHRINK)


class Student(nn.Module):
    """`trainable` and `fixed`: what is trained, and what is only measured; both under the names of the weights file."""

    def __init__(self, language_model: Any, tokenizer: Any, neck: Neck) -> None:
        super().__init__()
        self.lm, self.neck, self.tokenizer = language_model.to(quick_dtype()).requires_grad_(False), neck, tokenizer
        self.lm.set_attn_implementation("eager")  # at these lengths faster backwards than sdpa on a CPU
        self.neck.requires_grad_(False)
        updates = lora.attach(self.lm.model)
        self.trainable: dict[str, Tensor] = {}
        for name, parameter in neck.named_parameters():
            if name.split(".")[0] not in ("classifier", "words"):
                self.trainable[f"neck.{name}"] = parameter.requires_grad_(True)
        self.trainable |= updates
        self.fixed = {f"neck.{name}": value for name, value in neck.named_buffers()}
        self.eval()

    def weights(self) -> dict[str, Tensor]:
        """What the weights file holds, in float32."""
        return {k: v.detach().clone() for k, v in (self.fixed | self.trainable).items()}

    def load(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in (self.fixed | self.trainable).items():
                value.copy_(weights[name])

    def visual(self, maps: Sequence[Tensor], grid: int) -> Tensor:
        """Maps (fine, coarse, if need be another coarse one for the words) to `[B, grid * grid, hidden]`; a grid below
        that of a map pools it first."""
        pooled = [F.avg_pool2d(m, m.shape[-1] // grid) if m.shape[-1] > grid else m for m in maps]
        return through_projector(self.neck(*pooled))

    def autocast(self) -> torch.autocast:
        """bfloat16 for the float32 neck and updates too, where the language model is in it; else nothing."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.lm.dtype == torch.bfloat16)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text of the chat, its special tokens among them."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompt(self, question: str, visual: Tensor) -> Tensor:
        """Embeddings `[B, length, hidden]` of the chat up to where the answer begins, the same question in all rows."""
        before, after = (
            self._embedded(text, len(visual)) for text in (prompts.before_image(), prompts.after_image(question))
        )
        return torch.cat([before, visual.to(before.dtype), after], 1)

    def _embedded(self, text: str, rows: int) -> Tensor:
        vectors: Tensor = self.lm.model.embed_tokens(torch.tensor([self.ids(text)]))
        return vectors.expand(rows, -1, -1)

    def tails(self, example: Example) -> list[list[int]]:
        """Tokens of each answer, with the stop where the example teaches one."""
        return [self.ids(answer + prompts.CLOSE * example.stop) for answer in example.answers]

    def hidden(self, examples: Sequence[Example], visual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Last hidden states that predict the answers, the answers' tokens, and the example of each token.

        The answers of one example share picture and question, and do not see each other: one pass for all of them.
        """
        embed = self.lm.model.embed_tokens
        if visual is None:
            heads = [self.ids(prompts.chat(e.question)) for e in examples]
        else:
            heads = [self.ids(prompts.after_image(e.question)) for e in examples]
        tails = [self.tails(e) for e in examples]
        rows = [h + [token for t in ts for token in t] for h, ts in zip(heads, tails, strict=True)]
        width = max(map(len, rows))
        inputs, offset = embed(torch.tensor([r + [0] * (width - len(r)) for r in rows])), 0
        if visual is not None:
            before = self._embedded(prompts.before_image(), len(rows))
            inputs = torch.cat([before, visual.to(inputs.dtype), inputs], 1)
            offset = before.shape[1] + visual.shape[1]
        branch = torch.zeros(inputs.shape[:2], dtype=torch.long)  # 0: seen by all that follows; n: by answer n alone
        position = torch.arange(inputs.shape[1]).repeat(len(rows), 1)
        at = []
        for i, (head, ts) in enumerate(zip(heads, tails, strict=True)):
            start = begin = offset + len(head)
            for number, tail in enumerate(ts, 1):
                stop = start + len(tail)
                branch[i, start:stop] = number
                position[i, start:stop] = torch.arange(begin, begin + len(tail))
                at += [(i, begin - 1), *((i, place) for place in range(start, stop - 1))]
                start = stop
        if self.training and visual is not None:
            inputs = inputs.masked_fill(((branch > 0) & (torch.rand(branch.shape) < WORD_DROPOUT))[..., None], 0)
        sees = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
        mask = torch.zeros(sees.shape, dtype=inputs.dtype).masked_fill(~sees.tril(), torch.finfo(inputs.dtype).min)
        states = self.lm.model(
            inputs_embeds=inputs, attention_mask=mask[:, None], position_ids=position, use_cache=False
        ).last_hidden_state
        row, column = torch.tensor(at).T
        return states[row, column], torch.tensor([token for ts in tails for t in ts for token in t]), row

    def loss(self, examples: Sequence[Example], maps: Sequence[Tensor], grid: int, per_example: bool = False) -> Tensor:
        """Mean negative log-likelihood of an answer token; `per_example` lets a short answer count as a long one.

        While training, with dropout and hidden words."""
        with self.autocast():
            states, targets, owner = self.hidden(examples, self.visual(maps, grid))
            logits = self.lm.lm_head(states)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return (losses / owner.bincount()[owner]).sum() / len(examples) if per_example else losses.mean()

    def text_loss(self, examples: Sequence[Example]) -> Tensor:
        """Mean divergence from the untouched language model on chats without a picture."""
        with self.autocast():
            lora.Update.on = False
            with torch.no_grad():
                teacher = self.lm.lm_head(self.hidden(examples, None)[0]).float().log_softmax(-1)
            lora.Update.on = True
            student = self.lm.lm_head(self.hidden(examples, None)[0]).float().log_softmax(-1)
        return F.kl_div(student, teacher, log_target=True, reduction="batchmean")

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example], maps: Any, grid: int, batch: int = 10) -> float:
        """Loss per token over all answer tokens of `examples`; `maps(chunk)` gives their maps."""
        self.eval()
        total, count = 0.0, 0
        for start in range(0, len(examples), batch):
            chunk = examples[start : start + batch]
            tokens = sum(len(tail) for e in chunk for tail in self.tails(e))
            total += float(self.loss(chunk, maps(chunk), grid)) * tokens
            count += tokens
        return total / count if count else math.nan
