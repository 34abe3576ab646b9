"""What `profile`, `compare` and `story` share: pictures opened one by one, lists of policies, a console on stdout."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.cli.options import Settings
from kvcli.cli.terminal import Terminal, colored
from kvcli.errors import PictureError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kvcli.engine.session import Request
    from kvcli.jobs import Job, Stray
    from kvcli.policies.base import Policy
    from kvcli.records import ImageFacts

UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


@dataclass(frozen=True)
class Opened:
    """A job whose pictures were read."""

    job: Job
    request: Request
    images: tuple[ImageFacts, ...]


def open_job(job: Job, prompt: str, settings: Settings, screen: Terminal) -> Opened:
    """Read the pictures of a job. Raises `PictureError`."""
    from kvcli import images
    from kvcli.engine.session import Request
    from kvcli.records import ImageFacts

    if job.error:
        raise PictureError(job.error)
    limit = settings.max_pixels or images.DEFAULT_MAX_PIXELS
    pictures = [images.load(source, max_pixels=limit) for source in job.sources]
    for path, picture in zip(job.paths, pictures, strict=True):
        for warning in picture.warnings:
            screen.note(f"{path}: {warning}")
    question, system = asked(job, prompt, settings)
    facts = tuple(
        ImageFacts(path, p.sha256, p.size_bytes, p.format, *p.image.size)
        for path, p in zip(job.paths, pictures, strict=True)
    )
    key = "\n".join([*(p.sha256 for p in pictures), question])
    return Opened(job, Request(tuple(p.image for p in pictures), question, system=system, key=key), facts)


def asked(job: Job, prompt: str, settings: Settings) -> tuple[str, str | None]:
    """Prompt and system message of a job: its own, else those of the run."""
    return (
        prompt if job.prompt is None else job.prompt,
        settings.system if job.system is None else job.system,
    )


def only_jobs(items: Iterator[Job | Stray], screen: Terminal) -> Iterator[Job]:
    """The pictures among what was found."""
    from kvcli.jobs import Job

    for item in items:
        if isinstance(item, Job):
            yield item
        else:
            screen.detail(f"{item.path}: no picture, skipped")


def words(text: str) -> list[str]:
    """The parts of a list with commas, without doubles. Raises `UsageError` when there is none."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise UsageError(f"{text!r} is an empty list")
    return found


def make_policy(name: str, settings: Settings, budget: Any = None, **options: Any) -> Policy:
    """A policy by name, with the `--set` options that it has. Raises `UsageError` for an option that it lacks when it
    is the policy the settings name."""
    from kvcli import policies

    known = {option.name for option in policies.describe(name).options}
    chosen = {k: v for k, v in settings.set.items() if k in known or name == settings.policy}
    if budget is not None:
        chosen["budget"] = budget
    return policies.create(name, **{**options, **chosen})


def greedy(settings: Settings, command: str) -> None:
    """Raise `UsageError` when tokens are to be drawn or beams searched."""
    if settings.temperature > 0 or settings.num_beams > 1:
        raise UsageError(f"{command} compares greedy answers: leave out --temperature and --num-beams")


def memory(text: str) -> int:
    """`24GiB`, `16G`, `800M` as bytes; units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if not match:
        raise UsageError(f"{text!r} is no amount of memory; write it as 24GiB or 800M")
    return int(float(match[1]) * UNITS[match[2]])


def console(settings: Settings) -> Console:
    """A console on stdout, in the colours and width that the user wants."""
    from rich.console import Console

    wide = os.environ.get("COLUMNS", "")
    color = colored(sys.stdout, settings.color)
    width = int(wide) if wide.isdigit() and int(wide) >= 20 else None if sys.stdout.isatty() else 100
    return Console(
        file=sys.stdout, width=width, color_system="standard" if color else None, force_terminal=color,
        highlight=False, markup=False, emoji=False, soft_wrap=False,
    )  # fmt: skip


def plain(settings: Settings) -> bool:
    """Whether stdout can show nothing but ASCII."""
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return not encoding.startswith("utf") or os.environ.get("TERM") == "dumb"


def empty_folder(settings: Settings) -> Path | None:
    """The folder of `--output`, made if need be. Raises `UsageError` when something is in it, unless --overwrite."""
    if settings.output is None:
        return None
    folder = Path(settings.output)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder} is a file; this command writes a folder")
    if folder.is_dir() and any(folder.iterdir()) and not settings.overwrite:
        raise UsageError(f"--output {folder} is not empty; use --overwrite, or another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder} can't be made: {error.strerror}") from error
    return folder
