"""How a model is loaded: in which numbers, and checkpoints as hubs have them, which also read video."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import architectures
import conftest
import pytest
import torch
import transformers as hf
from PIL import Image

from kvcli import policies
from kvcli.engine.loading import choose_dtype
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


def test_auto_is_bfloat16_where_a_cpu_is_quicker_with_it() -> None:
    """What a processor claims to have decides nothing: some that claim bfloat16 take twice as long with it."""

    def seconds(dtype: torch.dtype) -> float:
        matrix, each = torch.ones(768, 768, dtype=dtype), []
        for _ in range(9):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            each.append(time.perf_counter() - start)
        return min(each)

    chosen, _ = choose_dtype("auto", torch.device("cpu"), torch.bfloat16)
    half, single = seconds(torch.bfloat16), seconds(torch.float32)
    if chosen == torch.bfloat16:
        assert half < single
    else:
        assert chosen == torch.float32
        assert half > single / 2  # what is chosen needs a clear lead, not so large a one


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is here")
def test_a_model_that_also_reads_video_needs_no_torchvision(qwen: Path) -> None:
    session = Session.load(str(qwen), device="cpu", dtype="float64")
    wide, tall = Image.new("RGB", (80, 48), "red"), Image.new("RGB", (32, 96), "blue")
    prepared = [session.prepare(Request((picture,), "describe this picture")) for picture in (wide, tall)]
    assert [p.visual for p in prepared] == [5 * 3, 2 * 6], "one visual token for each 16 x 16 pixels"
    policy, decoding = policies.create("elastic", budget=0.5), Decoding(max_new_tokens=8)
    together = session.run(prepared, policy, decoding)
    assert [r.tokens for r in together] == [session.run([p], policy, decoding)[0].tokens for p in prepared]
