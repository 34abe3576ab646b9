"""From pictures and words to the tensors that a model reads, for one request and for a batch.

Knows processors and chat templates; nothing of models and caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from kvcli.errors import PictureError

PER_TOKEN = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "cross_attention_mask"}
"""Inputs with one entry per prompt token along axis 1: padded on the left in a batch."""


class Asked(Protocol):
    """What a batch must be encoded again from when its parts don't fit together."""

    @property
    def images(self) -> tuple[Image.Image, ...]: ...
    @property
    def prompt(self) -> str: ...
    @property
    def system(self) -> str | None: ...


def encode(
    processor: Any, images: Sequence[Image.Image], prompt: str, system: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The processor's output for one request (batch of one, no padding), and warnings."""
    text, warnings = _text(processor, len(images), prompt, system)
    return _process(processor, [text], [list(images)]), warnings


def collate(processor: Any, parts: Sequence[Mapping[str, Any]], asked: Sequence[Asked]) -> dict[str, Any]:
    """One batch of several encoded requests, padded on the left.

    Per-token inputs are padded and stacked, all others joined along their first axis. Where pictures differ in a way
    that can't be joined (another number of tiles), the processor encodes the whole batch anew and pads them itself.
    """
    if len(parts) == 1:
        return dict(parts[0])
    longest = max(part["input_ids"].shape[1] for part in parts)
    joined: dict[str, Any] = {}
    for key in parts[0]:
        values = [part[key] for part in parts if isinstance(part.get(key), Tensor)]
        if len(values) < len(parts):
            return _again(processor, asked)
        if key in PER_TOKEN:
            fill = pad_id(processor) if key == "input_ids" else 0
            values = [_pad_left(v, longest, fill) for v in values]
        if any(v.shape[1:] != values[0].shape[1:] or v.dtype != values[0].dtype for v in values):
            return _again(processor, asked)
        joined[key] = torch.cat(values)
    return joined


def pad_id(processor: Any) -> int:
    """The token that fills short rows; the end-of-text token where there is none for it."""
    tokenizer = processor.tokenizer
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return 0 if found is None else int(found)


def _again(processor: Any, asked: Sequence[Asked]) -> dict[str, Any]:
    texts = [_text(processor, len(a.images), a.prompt, a.system)[0] for a in asked]
    return _process(processor, texts, [list(a.images) for a in asked])


def _text(processor: Any, pictures: int, prompt: str, system: str | None) -> tuple[str, list[str]]:
    """The prompt with its placeholders, by the model's chat template or, without one, by a plain one."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}] * pictures + [{"type": "text", "text": prompt}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), []
    image = getattr(processor, "image_token", None) or "<image>"
    lines = ([system] if system else []) + [image] * pictures + [prompt]
    return "\n".join(lines) + "\n", ["the model has no chat template; a plain prompt was used"]


def _process(processor: Any, texts: list[str], images: list[list[Image.Image]]) -> dict[str, Any]:
    tokenizer = processor.tokenizer
    begins = bool(tokenizer.bos_token) and all(text.startswith(tokenizer.bos_token) for text in texts)
    several = len(texts) > 1
    settings: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": not begins}
    if several:
        settings |= {"padding": True, "padding_side": "left"}
    given = {"images": images} if any(images) else {}
    try:
        return dict(processor(text=texts, **given, **settings))
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PictureError(f"the model's processor refuses this picture: {first}") from error


def _pad_left(value: Tensor, length: int, fill: int) -> Tensor:
    missing = length - value.shape[1]
    if not missing:
        return value
    return torch.cat([value.new_full((value.shape[0], missing, *value.shape[2:]), fill), value], 1)
