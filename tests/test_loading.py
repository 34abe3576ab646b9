"""Checkpoints as hubs have them: models that also read video load without torchvision and describe pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import architectures
import conftest
import pytest
import torch
import transformers as hf
from PIL import Image

from kvcli import policies
from kvcli.engine.session import Decoding, Request, Session

PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL in the files that its checkpoints on the hub have."""
    folder = tmp_path_factory.mktemp("tiny-qwen")
    conftest.build_tokenizer(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(PLACEHOLDERS)})
    tokenizer.chat_template = conftest.TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer.save_pretrained(folder)
    image, video, start, end = tokenizer.convert_tokens_to_ids(list(PLACEHOLDERS))
    config = hf.Qwen2_5_VLConfig(
        text_config={
            **architectures.TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": architectures.MROPE,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={**architectures.QWEN_TOWER, "hidden_size": 32, "window_size": 32, "fullatt_block_indexes": [1]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(0)
    hf.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
    settings |= {"temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}
    named = {"processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | named))
    written = folder / "tokenizer_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | named))
    return folder


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is here")
def test_a_model_that_also_reads_video_needs_no_torchvision(qwen: Path) -> None:
    session = Session.load(str(qwen), device="cpu", dtype="float64")
    wide, tall = Image.new("RGB", (80, 48), "red"), Image.new("RGB", (32, 96), "blue")
    prepared = [session.prepare(Request((picture,), "describe this picture")) for picture in (wide, tall)]
    assert [p.visual for p in prepared] == [5 * 3, 2 * 6], "one visual token for each 16 x 16 pixels"
    policy, decoding = policies.create("elastic", budget=0.5), Decoding(max_new_tokens=8)
    together = session.run(prepared, policy, decoding)
    assert [r.tokens for r in together] == [session.run([p], policy, decoding)[0].tokens for p in prepared]
