"""Processors of models that also read video, where the library can't build their video part.

transformers builds a video processor for such models (Qwen-VL, GLM-4V, InternVL, LLaVA-OneVision) and needs torchvision
for it. Pictures don't: without torchvision the processor is put together from its other parts.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING


def load_processor(where: str, config: Any, **shared: Any) -> Any:
    """The processor of a model, with its video part where that can be had."""
    kind = PROCESSOR_MAPPING.get(type(config), None)
    parts = kind.get_attributes() if kind is not None else []
    if "video_processor" not in parts or importlib.util.find_spec("torchvision") is not None:
        return transformers.AutoProcessor.from_pretrained(where, **shared)
    settings, _ = kind.get_processor_dict(where, **shared)
    loaded = [_part(name, where, shared) for name in parts]
    processor = _without_video(kind).from_args_and_dict(loaded, settings)
    if not getattr(processor, "chat_template", None):
        processor.chat_template = processor.tokenizer.chat_template
    return processor


def _part(name: str, where: str, shared: dict[str, Any]) -> Any:
    if name == "video_processor":
        return None
    auto = transformers.AutoTokenizer if "tokenizer" in name else transformers.AutoImageProcessor
    return auto.from_pretrained(where, **shared)


def _without_video(kind: Any) -> Any:
    """The class, accepting that its video part is missing."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, argument)

    # the signature is where the library reads the parts from
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check, "__init__": kind.__init__})
