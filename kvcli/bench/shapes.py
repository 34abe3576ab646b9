"""Decoders of known shapes with random weights, so that speed can be measured without a hub.

Speed and memory depend on sizes, not on what weights say. Only the text decoder is built, as a Llama of that shape
(biases and the vision tower are left out): it is what reads and writes the KV cache. Knows sizes and how a model is
made; measures nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcli.errors import UsageError

CUT_LAYERS = 4
"""Layers of a shape that is too large, at most: all layers are alike, and more of them only take longer."""
CUT_VOCABULARY = 256
"""Its vocabulary: what is left besides the layers must not count in numbers that are given per layer."""
SHARE_OF_MEMORY = 0.6


@dataclass(frozen=True)
class Shape:
    """Sizes of a text decoder. layers: those that are built; whole: those of the model itself."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    width: int
    vocabulary: int
    tied: bool
    whole: int = 0

    @property
    def is_cut(self) -> bool:
        return bool(self.whole) and self.layers < self.whole

    @property
    def layer_numbers(self) -> int:
        """Weights of one layer."""
        attention = 2 * self.hidden * self.width * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def numbers(self) -> int:
        """All weights."""
        tables = 1 if self.tied else 2
        return self.layers * self.layer_numbers + tables * self.vocabulary * self.hidden + self.hidden

    @property
    def entry_numbers(self) -> int:
        """Numbers that one token adds to the cache of one layer: key and value of each KV head."""
        return 2 * self.kv_heads * self.width

    def cut(self, layers: int) -> Shape:
        """The same with fewer layers, and then hardly any vocabulary."""
        if not 1 <= layers <= self.layers:
            raise UsageError(f"{self.name} has {self.layers} layers: --layers must be from 1 to that")
        if layers == self.layers:
            return self
        return dataclasses.replace(self, layers=layers, whole=self.layers, vocabulary=CUT_VOCABULARY)

    def fitted(self, memory: int, entries: int, itemsize: int) -> Shape:
        """As many layers as `memory` bytes allow beside a cache of so many entries a layer (all rows together)."""
        # the stock cache holds a layer twice while it grows; the others need less
        layer = (self.layer_numbers + entries * self.entry_numbers) * itemsize
        beside = (self.numbers - self.layers * self.layer_numbers + 3 * entries * self.entry_numbers) * itemsize
        if beside + self.layers * layer <= SHARE_OF_MEMORY * memory:
            return self
        room = SHARE_OF_MEMORY * memory - 3 * entries * self.entry_numbers * itemsize
        return self.cut(max(1, min(self.layers, CUT_LAYERS, int(room // layer))))

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width,
            max_position_embeddings=2**17,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, True),
        Shape("smollm2-1.7b", 24, 2048, 8192, 32, 32, 64, 49152, True),
        Shape("qwen2.5-vl-3b", 36, 2048, 11008, 16, 2, 128, 151936, True),
        Shape("qwen2.5-vl-7b", 28, 3584, 18944, 28, 4, 128, 152064, False),
        Shape("llava-1.5-7b", 32, 4096, 11008, 32, 32, 128, 32064, False),
        Shape("llava-1.5-13b", 40, 5120, 13824, 40, 40, 128, 32064, False),
        Shape("pixtral-12b", 40, 5120, 14336, 32, 8, 128, 131072, False),
    )
}
"""Sizes as the models' published configs give them."""


def find(name: str) -> Shape:
    """A shape by name. Raises `UsageError` for an unknown one."""
    if name not in SHAPES:
        raise UsageError(f"no shape {name!r}; known are {', '.join(SHAPES)}, and --model takes any model")
    return SHAPES[name]


def of_config(name: str, config: Any) -> Shape:
    """The shape of a loaded model's text decoder."""
    text = config.get_text_config(decoder=True)
    return Shape(
        name,
        text.num_hidden_layers,
        text.hidden_size,
        text.intermediate_size,
        text.num_attention_heads,
        text.num_key_value_heads,
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        text.vocab_size,
        bool(getattr(text, "tie_word_embeddings", False)),
    )


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of this shape whose weights are small random numbers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)  # its table is no weight
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.02, generator=generator)
    return model.eval()
