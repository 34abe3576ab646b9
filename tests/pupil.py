"""A tiny built-in model while it is trained, and what it is trained on, for the tests of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcli.builtin import prompts
from kvcli.builtin.examples import Examples
from kvcli.builtin.features import Features
from kvcli.builtin.pasting import Bank, Pasting
from kvcli.builtin.student import Student
from kvcli.builtin.tower import Neck, Trunk


@torch.no_grad()
def random_trunk() -> Trunk:
    """A trunk of the same random weights each time, whose features are not all near zero."""
    torch.manual_seed(0)
    trunk = Trunk()
    for module in trunk.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # the statistics of what it sees first
    trunk(torch.randn(2, 3, 384, 384))
    return trunk.eval()


def seven_photos(folder: Path) -> tuple[Features, list[str], Path]:
    """Features of seven made-up photos, by a random trunk; their names; the folder."""
    names = [f"{i}.jpg" for i in range(7)]
    for i, name in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 48)).save(folder / name)
    features = Features(folder / "features", names)
    features.compute(folder, random_trunk(), batch=4)
    return features, names, folder


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and the chat's special tokens."""
    special = ["<|endoftext|>", prompts.OPEN, prompts.CLOSE]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=prompts.CLOSE, eos_token=prompts.CLOSE)


def language_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def student() -> Student:
    torch.manual_seed(0)
    return Student(language_model(), letters(), Neck(32, 16))


def material(student: Student, small: tuple[Features, list[str], Path], *more_views: Features) -> Examples:
    features, names, _ = small
    captions = {
        name: [f"a dog and a man are number {i} .", f"a man sees {i} dots", "colours"] for i, name in enumerate(names)
    }
    long = [{"n": names[0], "k": "story", "s": "One day, it rained."}]
    chats = [{"q": "Hello?", "s": "Hello."}]
    pasting = Pasting(Bank(features, names, student.neck), student.neck.classifier)
    classes = [f"thing {i}" for i in range(1000)]
    return Examples(captions, names, long, chats, classes, [features, *more_views], pasting)
