"""Assemble the built-in model: two public parts and our weights become one stock LLaVA checkpoint.

Knows how the parts fit together. Fetches nothing and decides nothing about folders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

import kvcli.builtin as builtin
from kvcli.builtin import lora, parts, prompts
from kvcli.builtin.features import image_processor
from kvcli.builtin.gguf import Gguf, llama_state, tokenizer
from kvcli.builtin.tower import Tower, TowerConfig, trunk_weights
from kvcli.cpu import prefers_bfloat16

SHRINK = 2.0**-8  # the stock projector is gelu between two linear layers; so small a signal passes it almost unchanged
REPETITION_PENALTY = 1.0  # a higher one drives short captions away from the words that people use
NO_REPEAT = 4  # runs of so many tokens do not come twice: what keeps long stories from looping without a penalty
TEMPERATURE = "temperature"  # name in the weights file of what the logits are divided by, in the last norm's weight
SPARE_TOKEN = "<empty_output>"  # a special token of the language model that only code notebooks use


def class_names() -> list[str]:
    """The names of the tower's 1,000 classes, in its order."""
    names: list[str] = json.loads(Path(__file__).with_name("classes.json").read_text())
    return names


def class_words(embedding: Tensor, encoder: Any, names: Sequence[str]) -> Tensor:
    """What the mean embedding of a class name's tokens has that the mean class has not: the weight of `Neck.words`.

    `[hidden, classes]`. The part that all classes share would say nothing, and be the larger one.
    """
    ids = [encoder(f" {name}", add_special_tokens=False)["input_ids"] for name in names]
    words = torch.stack([embedding[i].float().mean(0) for i in ids], 1)
    return words - words.mean(1, keepdim=True)


def text_config(file: Gguf) -> LlamaConfig:
    field = file.fields
    return LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def text_tokenizer(file: Gguf) -> Any:
    """The language model's own tokenizer; a spare special token stands for a picture's tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(file, {SPARE_TOKEN: prompts.IMAGE}),
        bos_token=prompts.OPEN,
        eos_token=prompts.CLOSE,
        pad_token=prompts.CLOSE,
        unk_token="<|endoftext|>",
        model_max_length=file.fields["llama.context_length"],
        padding_side="left",
        extra_special_tokens={"image_token": prompts.IMAGE},
    )


def quick_dtype() -> torch.dtype:
    """bfloat16 where its products take less time here, else float32."""
    return torch.bfloat16 if prefers_bfloat16() else torch.float32


def language_model(path: Path | None = None) -> tuple[Any, Any]:
    """The public language model in float32, and its tokenizer."""
    file = Gguf(path or parts.fetch(parts.LANGUAGE))
    with torch.device("meta"):
        model = LlamaForCausalLM(text_config(file))
    state = {name: torch.from_numpy(value) for name, value in llama_state(file).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)  # its table is no part of the state
    return model.eval(), text_tokenizer(file)


def vision_tower(model: Any, encoder: Any, path: Path | None = None) -> Tower:
    """The public tower, with the word of each class from the language model's embedding; its neck is untrained."""
    tower: Tower = Tower(TowerConfig(hidden_size=model.config.hidden_size)).eval()
    released = torch.load(path or parts.fetch(parts.VISION), map_location="cpu", weights_only=True)
    words = class_words(model.get_input_embeddings().weight.detach(), encoder, class_names())
    tower.load_state_dict(trunk_weights(released) | {"neck.words.weight": words}, strict=False)
    return tower


def assemble(language: Path | None, vision: Path | None, weights: dict[str, Tensor]) -> tuple[Any, Any]:
    """Model (float32) and processor from the parts and a weights file's content."""
    builtin.register()
    text, encoder = language_model(language)
    tower = vision_tower(text, encoder, vision)
    weights = {name: value.float() for name, value in weights.items()}
    neck = {name: value for name, value in weights.items() if name.startswith("neck.")}
    missing = set(dict(tower.neck.named_parameters(prefix="neck"))) - set(neck)
    if missing != {"neck.classifier.weight", "neck.classifier.bias", "neck.words.weight"}:
        raise ValueError(f"the weights file does not fit the neck: {sorted(missing)}")
    tower.load_state_dict(neck, strict=False)
    state = text.state_dict()
    lora.merge(state, weights)
    state["model.norm.weight"] = state["model.norm.weight"] / weights.get(TEMPERATURE, 1.0)
    del state["lm_head.weight"]
    text.load_state_dict(state, strict=False)
    config = LlavaConfig(
        text_config=text.config,
        vision_config=tower.config,
        image_token_id=encoder.convert_tokens_to_ids(prompts.IMAGE),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=(tower.config.image_size // tower.config.patch_size) ** 2,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.model.vision_tower, model.model.language_model = tower, text.model
    model.lm_head = text.lm_head
    width = text.config.hidden_size
    projector = model.model.multi_modal_projector
    for layer, scale in ((projector.linear_1, SHRINK), (projector.linear_2, 2 / SHRINK)):
        layer.load_state_dict({"weight": scale * torch.eye(width), "bias": torch.zeros(width)})
    model.generation_config = GenerationConfig(
        do_sample=False,
        repetition_penalty=REPETITION_PENALTY,
        no_repeat_ngram_size=NO_REPEAT,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=1,
    )
    processor = LlavaProcessor(
        image_processor(),
        encoder,
        patch_size=tower.config.patch_size,
        vision_feature_select_strategy="full",
        image_token=prompts.IMAGE,
        chat_template=prompts.TEMPLATE,
    )
    return model, processor


def checkpoint(
    target: Path, language: Path, vision: Path, weights: Path, progress: parts.Progress | None = None
) -> None:
    """Write the checkpoint into `target`, in half precision, safetensors only."""
    tell = progress or (lambda stage, share: None)
    tell("building the model", 0.0)
    model, processor = assemble(language, vision, load_file(weights))
    tell("building the model", 0.6)
    model.to(torch.float16).save_pretrained(target)
    processor.save_pretrained(target)
    tell("building the model", 1.0)
