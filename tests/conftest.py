"""What test files share: a tiny model on disk, pictures, and the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvcli.builtin.features import Features

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = (
    "the a of in on is and with picture photo image cat dog man woman child tree house street sky sea red green "
    "blue black white small large two three people sits stands runs near under over describe this what who where "
    "why you be are short long story detail . , ! ? : one day there was an it he she they his her their"
)


def build_tokenizer(folder: Path) -> None:
    """A word tokenizer with single characters to fall back on, so that any text has tokens of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<eos>", "<image>", "<|system|>", "<|user|>", "<|assistant|>"]
    characters = [chr(code) for code in range(33, 127)]
    words = [f"\u2581{word}" for word in WORDS.split()]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*special, "\u2581", *words, *characters]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    known = "|".join(sorted((w.replace(".", r"\.").replace("?", r"\?") for w in words), key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Split(Regex(f"(?:{known})(?=\u2581|$)|."), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
        padding_side="left",
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def build_checkpoint(folder: Path) -> Path:
    """A LLaVA of random weights (a few hundred kB) with a processor and a chat template: 16 visual tokens."""
    import torch
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    build_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size, patch = 32, 8
    images = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}, do_center_crop=True
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            image_size=size, patch_size=patch,
        ),
        text_config=LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=4096,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # random weights at the usual scale see no picture: these do, and their texts differ
            if weight.dim() > 1:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny LLaVA checkpoint, as `--model` takes it."""
    return build_checkpoint(tmp_path_factory.mktemp("tiny-llava"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve small different pictures, two of them in a subfolder, and one file that is none."""
    from PIL import Image, ImageDraw

    folder = tmp_path_factory.mktemp("pictures")
    (folder / "sub").mkdir()
    for number in range(1, 13):
        image = Image.new("RGB", (40 + 7 * number, 60), (20 * number % 256, 90, 255 - 20 * number))
        ImageDraw.Draw(image).ellipse((number, number, 30 + number, 40), fill=(255, 20 * number, 0))
        where = folder / "sub" if number > 10 else folder
        image.save(where / f"photo{number}.png")
    (folder / "notes.txt").write_text("not a picture")
    return folder


def command_environment(**changes: str) -> dict[str, str]:
    """An environment without the user's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVCLI_") and k not in ("COLUMNS", "NO_COLOR")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CONFIG_HOME": os.devnull} | changes


@pytest.fixture
def kvcli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the real command in an empty folder; output as bytes."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        environment = command_environment(**options.pop("env", {}))  # type: ignore[arg-type]
        return subprocess.run(
            [sys.executable, "-m", "kvcli", *map(str, arguments)],
            capture_output=True,
            env=environment,
            cwd=options.pop("cwd", tmp_path),
            timeout=120,
            **options,
        )

    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Features, list[str], Path]:
    """What a tiny built-in model trains on, see `pupil.seven_photos`."""
    import pupil

    return pupil.seven_photos(tmp_path_factory.mktemp("photos"))
