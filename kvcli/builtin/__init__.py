"""The small model that ships: `ensure()` builds it on first use and gives its folder; `register()` makes it loadable.

Knows the cache folder and the weights file of this package. Importing it imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from kvcli.builtin import parts

NAME = "builtin"
WEIGHTS = Path(__file__).with_name("weights.safetensors")
RECIPE = "2"  # changes when the same weights file gives another checkpoint
FOLDERS = "builtin-"


def checkpoint_folder() -> Path:
    """Where the checkpoint of this version lies, built or not: the name holds the hash of weights and recipe."""
    digest = hashlib.sha256(RECIPE.encode() + WEIGHTS.read_bytes()).hexdigest()
    return parts.cache_folder() / f"{FOLDERS}{digest[:12]}"


def ready() -> bool:
    """Whether the checkpoint is built. It appears by one rename, so a folder that exists is whole."""
    return checkpoint_folder().is_dir()


def ensure(progress: Callable[[str, float], None] | None = None) -> Path:
    """The folder of a stock LLaVA checkpoint, built on the first use; offline afterwards.

    `progress(stage, share)` is called while packages are fetched and the checkpoint is built. Safe when several
    processes start at once: one builds, the others wait. Raises StartError, in one line, when a part can't be had.
    """
    target = checkpoint_folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if target.is_dir():
            return target
        language, vision = (parts.fetch(part, progress) for part in (parts.LANGUAGE, parts.VISION))
        from kvcli.builtin import build

        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as spare:
            build.checkpoint(Path(spare), language, vision, WEIGHTS, progress)
            for path in (Path(spare), *Path(spare).iterdir()):  # readable by others, if the cache folder is
                path.chmod(0o755 if path.is_dir() else 0o644)
            os.rename(spare, target)
            Path(spare).mkdir()  # what the clean-up takes away
        for old in target.parent.glob(f"{FOLDERS}*"):
            if old.is_dir() and old != target:
                shutil.rmtree(old, ignore_errors=True)
    return target


def card() -> str:
    """The short model card: the section "In short" of this folder's README."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return text.split("\n## In short\n", 1)[1].split("\n## ", 1)[0].strip()


def register() -> None:
    """Tell transformers' auto classes about the vision tower; any number of times."""
    from transformers import AutoConfig, AutoModel

    from kvcli.builtin.tower import Tower, TowerConfig

    AutoConfig.register(TowerConfig.model_type, TowerConfig, exist_ok=True)
    AutoModel.register(TowerConfig, Tower, exist_ok=True)
