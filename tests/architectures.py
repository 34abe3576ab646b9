"""Tiny random-weight models of every architecture that the engine claims, with inputs ready for `generate`.

Knows how to build them so that a test on them can fail: attention is peaked (wide initialisation), heads
are grouped for real, no model ignores its picture, nothing stops early and no model writes picture tokens of
its own. Knows nothing of the engine. Nothing is downloaded; each build takes a fraction of a second.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 300
PAD, BOS, EOS = 0, 1, 299
IMAGE, VIDEO, AUDIO = 290, 291, 296
PICTURE_START, PICTURE_END = 292, 293
VIDEO_START, VIDEO_END = 294, 295
WORDS = (5, 280)
"""Ids of ordinary text tokens, from and up to."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
PIXTRAL_TOWER: dict[str, Any] = {**TOWER, "model_type": "pixtral", "num_hidden_layers": 2, "image_size": 64}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
MROPE: dict[str, Any] = {**ROPE, "mrope_section": [2, 3, 3]}

Inputs = dict[str, Tensor]
Builder = Callable[[int], tuple[hf.PreTrainedModel, Inputs]]


@dataclass(frozen=True)
class Tiny:
    """A built model and one left-padded batch for it.

    `inputs` goes to `generate` as it is, together with `generate_kwargs`. Tags tell tests what an
    architecture has: rope, mrope, nope (some layers without rope), gqa, sliding, chunked, softcap,
    prefix-bidirectional (the prompt sees itself both ways), picture-bidirectional (picture tokens see each
    other), cross, shared (layers that read another layer's cache), hybrid (layers with no KV cache), picture
    (the batch has pictures).
    """

    name: str
    model: hf.PreTrainedModel
    inputs: Inputs
    tags: frozenset[str]
    image_token: int = IMAGE
    generate_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"suppress_tokens": list(range(IMAGE, AUDIO + 1)), "do_sample": False}
    )


_BUILDERS: dict[str, tuple[Builder, frozenset[str]]] = {}


def _architecture(name: str, *tags: str) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        _BUILDERS[name] = (builder, frozenset(tags))
        return builder

    return register


def names(*tags: str) -> list[str]:
    """Names of all architectures, or of those that have every one of these tags."""
    return [name for name, (_, has) in _BUILDERS.items() if has.issuperset(tags)]


def build(name: str, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tiny:
    """The model `name` in evaluation mode, and `batch` rows of prompts of different lengths (left-padded)."""
    builder, tags = _BUILDERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, inputs = builder(batch)
        _open_to_pictures(model)
    model = model.eval().to(dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    return Tiny(name, model, inputs, tags)


def _open_to_pictures(model: hf.PreTrainedModel) -> None:
    """Set what starts at zero and would shut the picture out: gemma3's projection, mllama's gates."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mm_input_projection_weight" in name:
                parameter.normal_(0, 0.3)
            elif "cross_attn_attn_gate" in name or "cross_attn_mlp_gate" in name:
                parameter.fill_(0.7)


# --------------------------------------------------------------------------------------------------- prompts
def _prompts(visual: int | Sequence[int], batch: int, *, framed: bool = False, extra_words: int = 0) -> Inputs:
    """Rows `four words, picture, more words` whose lengths differ; `visual` picture tokens a row."""
    generator = torch.Generator().manual_seed(0)
    counts = [visual] * batch if isinstance(visual, int) else list(visual)
    before, after = ([PICTURE_START], [PICTURE_END]) if framed else ([], [])
    rows = []
    for row, count in enumerate(counts):
        length = (9, 5, 12)[row % 3] + 6 + row + extra_words
        words = torch.randint(*WORDS, (length,), generator=generator).tolist()
        rows.append(words[:4] + before + [IMAGE] * count + after + words[4:])
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([[PAD] * pad + row for pad, row in zip(padding, rows, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
    }


def _text_only(batch: int) -> Inputs:
    """Prompts long enough for sliding windows and chunks of the tiny models to matter."""
    return _prompts(0, batch, extra_words=20)


def _pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _cycle(choices: Sequence[Sequence[int]], batch: int) -> Tensor:
    """`batch` rows that take the choices in turn, so that the pictures of a batch differ in size."""
    return torch.tensor(choices)[torch.arange(batch) % len(choices)]


def _tokens_per_picture(model: hf.PreTrainedModel, **pictures: Tensor) -> list[int]:
    with torch.no_grad():
        features = model.eval().model.get_image_features(**pictures, return_dict=True).pooler_output
    return [len(feature) for feature in features]


# ------------------------------------------------------------------------------------ LLaVA and its children
def _llava(batch: int, kv_heads: int) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**{**TEXT, "num_key_value_heads": kv_heads}),
        vision_config=hf.CLIPVisionConfig(**TOWER),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return hf.LlavaForConditionalGeneration(config), {
        **_prompts(16, batch),
        "pixel_values": _pixels(batch, 3, 32, 32),
    }


@_architecture("llava_mha", "rope", "picture")
def _llava_mha(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    return _llava(batch, kv_heads=4)


@_architecture("llava_gqa", "rope", "gqa", "picture")
def _llava_gqa(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    return _llava(batch, kv_heads=2)


def _anyres(model: hf.PreTrainedModel, batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """Inputs for the families that cut a picture in tiles: sizes are (height, width)."""
    pictures = {
        "pixel_values": _pixels(batch, 5, 3, 32, 32),
        "image_sizes": _cycle([(40, 60), (60, 40), (64, 64)], batch),
    }
    return model, {**_prompts(_tokens_per_picture(model, **pictures), batch), **pictures}


@_architecture("llava_next", "rope", "gqa", "picture")
def _llava_next(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.LlavaNextConfig(
        text_config=hf.LlamaConfig(**TEXT),
        vision_config=hf.CLIPVisionConfig(**TOWER),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    return _anyres(hf.LlavaNextForConditionalGeneration(config), batch)


@_architecture("llava_onevision", "rope", "gqa", "picture")
def _llava_onevision(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.LlavaOnevisionConfig(
        text_config=hf.Qwen2Config(**TEXT),
        vision_config=hf.SiglipVisionConfig(**TOWER),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    return _anyres(hf.LlavaOnevisionForConditionalGeneration(config), batch)


def _mistral_text() -> dict[str, Any]:
    return {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}


def _sized(model: hf.PreTrainedModel, batch: int, cell: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """Inputs for Pixtral's tower, which takes any size; one token for each cell of `cell` pixels."""
    sizes = _cycle([(32, 48), (48, 32), (48, 48)], batch)
    counts = (sizes // cell).prod(-1).tolist()
    return model, {**_prompts(counts, batch), "pixel_values": _pixels(batch, 3, 48, 48), "image_sizes": sizes}


@_architecture("mistral3", "rope", "gqa", "picture")
def _mistral3(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.Mistral3Config(
        text_config=_mistral_text(),
        vision_config=PIXTRAL_TOWER,
        image_token_index=IMAGE,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return _sized(hf.Mistral3ForConditionalGeneration(config), batch, cell=16)


@_architecture("llava_pixtral", "rope", "gqa", "picture")
def _llava_pixtral(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.LlavaConfig(
        text_config=_mistral_text(),
        vision_config=PIXTRAL_TOWER,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return _sized(hf.LlavaForConditionalGeneration(config), batch, cell=8)


# ----------------------------------------------------------------------------------------- Qwen-VL and GLM-V
def _grid_inputs(model: hf.PreTrainedModel, batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """Inputs for the families that give every picture its own grid (time, rows, columns) of patches."""
    grids = _cycle([(1, 4, 4), (1, 6, 4), (1, 4, 8)], batch)
    patches = grids.prod(-1)
    prompts = _prompts((patches // 4).tolist(), batch, framed=True)
    return model, {
        **prompts,
        "mm_token_type_ids": (prompts["input_ids"] == IMAGE).long(),
        "pixel_values": _pixels(int(patches.sum()), 3 * 2 * 8 * 8),
        "image_grid_thw": grids,
    }


def _qwen_config(config: type[hf.PreTrainedConfig], text: dict[str, Any], tower: dict[str, Any]) -> hf.PreTrainedConfig:
    return config(
        text_config={**TEXT, **text},
        vision_config=tower,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=PICTURE_START,
        vision_end_token_id=PICTURE_END,
    )


@_architecture("qwen2_vl", "mrope", "gqa", "picture")
def _qwen2_vl(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8}
    config = _qwen_config(hf.Qwen2VLConfig, {"rope_parameters": MROPE}, tower)
    return _grid_inputs(hf.Qwen2VLForConditionalGeneration(config), batch)


@_architecture("qwen2_5_vl", "mrope", "gqa", "picture")
def _qwen2_5_vl(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    tower = {**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]}
    config = _qwen_config(hf.Qwen2_5_VLConfig, {"rope_parameters": MROPE}, tower)
    return _grid_inputs(hf.Qwen2_5_VLForConditionalGeneration(config), batch)


@_architecture("qwen3_vl", "mrope", "gqa", "picture")
def _qwen3_vl(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    text = {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    tower = {**QWEN_TOWER, "depth": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2, 3]}
    config = _qwen_config(hf.Qwen3VLConfig, text, tower)
    return _grid_inputs(hf.Qwen3VLForConditionalGeneration(config), batch)


@_architecture("qwen3_5", "mrope", "gqa", "hybrid", "picture")
def _qwen3_5(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    text = {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            **ROPE,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    }
    tower = {**QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
    config = _qwen_config(hf.Qwen3_5Config, text, tower)
    return _grid_inputs(hf.Qwen3_5ForConditionalGeneration(config), batch)


@_architecture("glm4v", "mrope", "gqa", "picture")
def _glm4v(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.Glm4vConfig(
        text_config={
            **TEXT,
            "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        vision_config={**QWEN_TOWER, "image_size": 32},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=PICTURE_START,
        image_end_token_id=PICTURE_END,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
    )
    return _grid_inputs(hf.Glm4vForConditionalGeneration(config), batch)


# ------------------------------------------------------------------------------------ tiles and a whole view
def _idefics(
    config: type[hf.PreTrainedConfig], model: type[hf.PreTrainedModel], batch: int
) -> tuple[hf.PreTrainedModel, Inputs]:
    """2 x 2 tiles and the whole picture, four tokens each."""
    built = model(
        config(
            text_config={"model_type": "llama", **TEXT},
            vision_config={**TOWER, "num_hidden_layers": 2},
            image_token_id=IMAGE,
            scale_factor=2,
            pad_token_id=PAD,
        )
    )
    return built, {**_prompts(20, batch), "pixel_values": _pixels(batch, 5, 3, 32, 32)}


@_architecture("smolvlm", "rope", "gqa", "picture")
def _smolvlm(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    return _idefics(hf.SmolVLMConfig, hf.SmolVLMForConditionalGeneration, batch)


@_architecture("idefics3", "rope", "gqa", "picture")
def _idefics3(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    return _idefics(hf.Idefics3Config, hf.Idefics3ForConditionalGeneration, batch)


@_architecture("internvl", "rope", "gqa", "picture")
def _internvl(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """Two tiles and the whole picture, four tokens each."""
    config = hf.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**TOWER, "num_hidden_layers": 2, "image_size": (32, 32), "patch_size": (8, 8)},
        image_token_id=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    inputs = {**_prompts(12, batch), "pixel_values": _pixels(batch * 3, 3, 32, 32)}
    return hf.InternVLForConditionalGeneration(config), inputs


@_architecture("phi4_multimodal", "rope", "gqa", "picture")
def _phi4_multimodal(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """Crops of 1 x 2 with a separator at each row's end, one separator, then the whole picture likewise."""
    crops, separator, whole = 2 * (4 + 1), 1, 2 * (2 + 1)
    config = hf.Phi4MultimodalConfig(
        **TEXT,
        vision_config={**TOWER, "num_hidden_layers": 2, "crop_size": 32, "image_token_id": IMAGE},
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "audio_token_id": AUDIO,
            "input_size": 80,
        },
        original_max_position_embeddings=4096,
        sliding_window=None,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
    )
    return hf.Phi4MultimodalForCausalLM(config), {
        **_prompts(crops + separator + whole, batch),
        "image_pixel_values": _pixels(batch, 3, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 64]]).repeat(batch, 1),
        "image_attention_mask": torch.ones(batch, 3, 4, 4),
    }


# ---------------------------------------------------------------------------------------------- Gemma family
@_architecture("gemma3", "rope", "gqa", "sliding", "picture-bidirectional", "picture")
def _gemma3(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    text = {
        **TEXT,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    config = hf.Gemma3Config(
        text_config=text,
        vision_config=TOWER,
        image_token_index=IMAGE,
        boi_token_index=PICTURE_START,
        eoi_token_index=PICTURE_END,
        mm_tokens_per_image=4,
        pad_token_id=PAD,
    )
    prompts = _prompts(4, batch, framed=True)
    kinds = (prompts["input_ids"] == IMAGE).long()
    inputs = {**prompts, "token_type_ids": kinds, "pixel_values": _pixels(batch, 3, 32, 32)}
    return hf.Gemma3ForConditionalGeneration(config), inputs


def _paligemma_of(batch: int, text: dict[str, Any]) -> tuple[hf.PreTrainedModel, Inputs]:
    config = hf.PaliGemmaConfig(
        text_config={**TEXT, "head_dim": 16, **text},
        vision_config={
            **TOWER,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": 64,
        },
        image_token_index=IMAGE,
        vocab_size=VOCABULARY,
        projection_dim=64,
        hidden_size=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    prompts = _prompts(16, batch)
    kinds = torch.zeros_like(prompts["input_ids"])
    inputs = {**prompts, "token_type_ids": kinds, "pixel_values": _pixels(batch, 3, 32, 32)}
    return hf.PaliGemmaForConditionalGeneration(config), inputs


@_architecture("paligemma", "rope", "gqa", "prefix-bidirectional", "picture")
def _paligemma(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    return _paligemma_of(batch, {"model_type": "gemma"})


@_architecture("paligemma2", "rope", "gqa", "prefix-bidirectional", "sliding", "softcap", "picture")
def _paligemma2(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    text = {"query_pre_attn_scalar": 16, "sliding_window": 20, "attn_logit_softcapping": 3.0}
    return _paligemma_of(batch, {"model_type": "gemma2", **text})


def _shared_text() -> dict[str, Any]:
    """Six layers, of which the last two read the keys and values of layers 2 and 3."""
    return {
        **TEXT,
        "head_dim": 16,
        "sliding_window": 12,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    }


@_architecture("gemma4", "rope", "gqa", "sliding", "shared", "picture")
def _gemma4(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """8 x 8 patches that carry their positions, pooled to 16 tokens, and some padding."""
    tower = {key: TOWER[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = hf.Gemma4Config(
        text_config={**_shared_text(), "global_head_dim": 32},
        vision_config={
            **tower,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "initializer_range": 0.15,
        },
        audio_config=None,
        image_token_id=IMAGE,
        boi_token_id=PICTURE_START,
        eoi_token_id=PICTURE_END,
    )
    prompts = _prompts(16, batch, framed=True)
    places = torch.cartesian_prod(torch.arange(8), torch.arange(8)).flip(-1)
    padded = torch.cat((places, torch.full((16, 2), -1)))
    return hf.Gemma4ForConditionalGeneration(config), {
        **prompts,
        "mm_token_type_ids": (prompts["input_ids"] == IMAGE).long(),
        "pixel_values": _pixels(batch, 80, 3 * 4 * 4).sigmoid(),
        "image_position_ids": padded.repeat(batch, 1, 1),
    }


@_architecture("gemma3n", "rope", "gqa", "sliding", "shared")
def _gemma3n(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    text = {**_shared_text(), "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6}
    return hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(**text)), _text_only(batch)


# ------------------------------------------------------------------------------------------------ the others
@_architecture("mllama", "rope", "gqa", "cross", "picture")
def _mllama(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    """Layers 1 and 3 attend to two tiles of 16 patches and a class token; even rows see one."""
    text = {**TEXT, "num_hidden_layers": 5, "cross_attention_layers": [1, 3], "rope_parameters": ROPE}
    tower = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 48,
        "vision_output_dim": 64,
        "image_size": 32,
        "patch_size": 8,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [1],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    config = hf.MllamaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE)
    prompts = _prompts(1, batch)
    shown = (prompts["input_ids"] == IMAGE).long().cumsum(-1)[:, :, None, None].repeat(1, 1, 1, 2)
    shown[::2, :, :, 1] = 0
    return hf.MllamaForConditionalGeneration(config), {
        **prompts,
        "pixel_values": _pixels(batch, 1, 2, 3, 32, 32),
        "aspect_ratio_ids": torch.full((batch, 1), 2),
        "aspect_ratio_mask": torch.ones(batch, 1, 2, dtype=torch.long),
        "cross_attention_mask": shown,
    }


@_architecture("lfm2", "rope", "gqa", "hybrid")
def _lfm2(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    layers = {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
    }
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**{**TEXT, **layers})), _text_only(batch)


@_architecture("llama4", "rope", "nope", "gqa", "chunked")
def _llama4(batch: int) -> tuple[hf.PreTrainedModel, Inputs]:
    text = {
        **TEXT,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [],
    }
    return hf.Llama4ForCausalLM(hf.Llama4TextConfig(**text)), _text_only(batch)
