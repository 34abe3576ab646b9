"""Read the one GGUF file that the built-in model needs: its header, its tensors as float32, its tokenizer.

Knows the file format (version 3) and the block formats F32, Q8_0 and Q4_1. Knows nothing of models, except that the
writer of such files interleaves the rows of a Llama's query and key weights, which `llama_state` undoes.
Source: the GGUF specification and the block layouts of ggml.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32
CONTROL = 3  # a token's type: has a meaning of its own, is never part of a text

Floats = npt.NDArray[np.float32]
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
NAMES |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NAMES |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class Gguf:
    """`fields`: the header's values by name. `tensor(name)`: one tensor as float32, in the order of PyTorch."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, version, tensors, fields = self._take("<4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise ValueError(f"{path} is no GGUF file of version 3")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(self._take("<I")[0])
        self._places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            shape = self._take(f"<{self._take('<I')[0]}Q")[::-1]
            self._places[name] = (shape, *self._take("<IQ"))
        align = self.fields.get("general.alignment", 32)
        self._base = -(-self._at // align) * align

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._take("<Q")
        return bytes(self._take(f"<{size}s")[0]).decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take("<" + SCALARS[kind])[0]
        inner, count = self._take("<IQ")
        if inner == STRING:
            return [self._string() for _ in range(count)]
        return list(self._take(f"<{count}{SCALARS[inner]}"))

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def tensor(self, name: str) -> Floats:
        shape, kind, offset = self._places[name]
        count, start = int(np.prod(shape)), self._base + offset
        if kind == F32:
            plain: Floats = np.frombuffer(self._data, "<f4", count, start).reshape(shape).copy()
            return plain
        if kind == Q8_0:
            blocks = np.frombuffer(self._data, [("d", "<f2"), ("q", "i1", BLOCK)], count // BLOCK, start)
            rows: Floats = blocks["d"].astype(np.float32)[:, None] * blocks["q"]
            return rows.reshape(shape)
        if kind == Q4_1:
            layout = [("d", "<f2"), ("m", "<f2"), ("q", "u1", BLOCK // 2)]
            blocks = np.frombuffer(self._data, layout, count // BLOCK, start)
            nibbles = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], 1)
            scale, least = (blocks[key].astype(np.float32)[:, None] for key in ("d", "m"))
            rows = scale * nibbles + least
            return rows.reshape(shape)
        raise ValueError(f"{name} has the block format {kind}, which this reader does not know")


def _in_halves(weight: Floats, heads: int) -> Floats:
    """Rows of each head from pairs (0, h/2, 1, h/2 + 1, ...) back to halves, as transformers turns them."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def llama_state(file: Gguf) -> dict[str, Floats]:
    """All weights under the names of `LlamaForCausalLM`, float32; the head is tied to the embedding."""
    heads = {
        "attn_q": file.fields["llama.attention.head_count"],
        "attn_k": file.fields["llama.attention.head_count_kv"],
    }
    state = {}
    for name in file.names:
        weight = file.tensor(name)
        if name in TOP:
            state[TOP[name]] = weight
            continue
        _, number, kind, leaf = name.split(".")
        if kind in heads:
            weight = _in_halves(weight, heads[kind])
        state[f"model.layers.{number}.{NAMES[kind]}.{leaf}"] = weight
    return state


def tokenizer(file: Gguf, rename: dict[str, str]) -> Tokenizer:
    """The byte-level BPE of the file. `rename`: unused special tokens that get another name, for other work."""
    tokens = [rename.get(token, token) for token in file.fields["tokenizer.ggml.tokens"]]
    merges = [tuple(merge.split(" ")) for merge in file.fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = file.fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL
    ]
    bpe.add_special_tokens(special)
    return bpe
