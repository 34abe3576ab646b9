"""From a name to a model and its processor: device, number type, safety, and errors that say what to do.

Knows how the library loads; nothing of caches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from kvcli.cpu import prefers_bfloat16
from kvcli.engine.packed import pack
from kvcli.engine.stills import load_processor
from kvcli.errors import StartError, UsageError

BUILTIN = "builtin"
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Loaded:
    """A model ready to run. `revision`: the hub's commit, or a hash of a local folder's files."""

    name: str
    revision: str
    model: Any
    processor: Any
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str


def load(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "plain",
    offline: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Loaded:
    """Load a model: `builtin`, a folder, or a hub id with an optional `@revision`. weights: "packed" to `pack` them.

    Raises `StartError` when it can't be had or does not fit, `UsageError` for an unknown device or type.
    """
    where, hub_revision = _locate(name, offline, progress)
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": offline}
    if hub_revision:
        shared["revision"] = hub_revision
    with _explained(name, offline):
        config = transformers.AutoConfig.from_pretrained(where, **shared)
    _refuse_what_cannot_run(name, config)
    chosen = choose_device(device)
    number, reason = choose_dtype(dtype, chosen, getattr(config, "dtype", None))
    _check_size(name, where, chosen, number)
    several = device == "auto" and chosen.type == "cuda" and torch.cuda.device_count() > 1
    with _explained(name, offline):
        processor = load_processor(where, config, **shared)
        model = (
            _model_class(config)
            .from_pretrained(
                where,
                config=config,
                dtype=number,
                device_map="auto" if several else {"": chosen},
                use_safetensors=None if allow_pickle else True,
                **shared,
            )
            .eval()
        )
    if weights == "packed":
        pack(model)
        reason += ", packed"
    revision = getattr(config, "_commit_hash", None) or _fingerprint(where)
    return Loaded(name, revision, model, processor, chosen, number, reason)


def choose_device(wanted: str) -> torch.device:
    """`auto` is the first of CUDA, Apple's GPU, CPU that is there."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"{wanted!r} is no device; use auto, cpu, cuda, cuda:1 or mps") from error
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, False):
        raise StartError(f"device {wanted} is not available here; use --device cpu")
    return device


def choose_dtype(wanted: str, device: torch.device, stored: torch.dtype | None) -> tuple[torch.dtype, str]:
    """The type of the weights, and why.

    `auto` is a half-precision type only where the device is quick with it: many CPUs run a bfloat16 prompt several
    times slower than a float32 one.
    """
    if wanted != "auto":
        return getattr(torch, wanted), "as asked"
    if device.type == "cuda":
        half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return (stored, "as stored") if stored in HALVES else (half, "native on this GPU")
    if device.type == "mps":
        return torch.float16, "native on this GPU"
    if stored == torch.bfloat16 and prefers_bfloat16():
        return torch.bfloat16, "as stored, and this CPU is fastest with it"
    return torch.float32, "this CPU is fastest or most exact with it"


def _locate(name: str, offline: bool, progress: Callable[[str, float], None] | None) -> tuple[str, str | None]:
    """(folder or hub id, hub revision)."""
    if name == BUILTIN:
        from kvcli import builtin

        if offline and not builtin.ready():
            raise StartError("the built-in model is not here yet; run `kvcli models pull` once without --offline")
        folder = builtin.ensure(progress)
        builtin.register()
        return str(folder), None
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser()), None
    hub_id, _, revision = name.partition("@")
    return hub_id, revision or None


def _model_class(config: Any) -> Any:
    """Phi-4-multimodal is the one vision-language model that the library maps as a plain language model."""
    if config.model_type == "phi4_multimodal":
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def _refuse_what_cannot_run(name: str, config: Any) -> None:
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(f"{name} is an encoder-decoder model; kvcli serves decoders with a growing KV cache")
    if getattr(text, "kv_lora_rank", None):
        raise StartError(f"{name} caches latents (MLA) instead of keys and values, which kvcli does not compress")


def _check_size(name: str, where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse, before loading, weights that are larger than the memory they must go to (local folders only)."""
    files = list(Path(where).glob("*.safetensors")) if Path(where).is_dir() else []
    stored = sum(_numbers(path) for path in files)
    need = stored * dtype.itemsize
    free = free_bytes(device)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        free = sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    if need > free:
        raise StartError(
            f"{name} needs {need / 2**30:.1f} GiB for its weights as {str(dtype).removeprefix('torch.')}, "
            f"but {device} has {free / 2**30:.1f} GiB free; try a smaller model or --dtype bfloat16"
        )


def _numbers(path: Path) -> int:
    """How many numbers a safetensors file holds, from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for key, entry in header.items() if key != "__metadata__"]
    return sum(int(torch.Size(shape).numel()) for shape in shapes)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return (
            int(torch.cuda.mem_get_info(device)[0])
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return int(psutil.virtual_memory().available)


def _fingerprint(where: str) -> str:
    """A hash of a local folder: contents of small files, names, sizes and first MiB of large ones."""
    digest = hashlib.sha256()
    for path in sorted(Path(where).iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt"):
            with path.open("rb") as file:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + file.read(2**20))
    return digest.hexdigest()[:16]


@contextmanager
def _explained(name: str, offline: bool) -> Iterator[None]:
    """Turn the library's many ways to fail into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        hint = " (offline: only what was downloaded before can be used)" if offline else ""
        raise StartError(f"model {name} can't be loaded{hint}: {reason}") from error
