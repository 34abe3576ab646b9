"""From resolved settings to a loaded session, a policy and a stream of jobs: what every picture command starts with."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcli.cli.options import Settings
from kvcli.cli.settings import Resolved
from kvcli.cli.terminal import Terminal, duration
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.engine.session import Decoding, Session
    from kvcli.jobs import Job, Stray
    from kvcli.policies.base import Policy

LONG_PROMPT = 2**20
BORN = time.perf_counter()
"""About when the process began: this module is read with the command line."""


@dataclass
class Clock:
    """What the time until the first token went into, in seconds, for -v."""

    spans: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the block's time to a span."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans[name] = self.spans.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.spans.items())


def terminal(settings: Resolved) -> Terminal:
    """stderr as the settings want it; says what was odd about the settings."""
    result = Terminal(quiet=settings.quiet, verbose=settings.verbose, color=settings.color, progress=settings.progress)
    for text in settings.notes:
        result.note(text)
    return result


def make_policy(settings: Settings) -> Policy:
    """The policy with its options. Raises `UsageError`, before any model is loaded."""
    from kvcli import policies

    budget = {} if settings.budget is None else {"budget": settings.budget}
    if "budget" in settings.set:
        raise UsageError("give the budget as --budget, not as --set budget=")
    policy = policies.create(settings.policy, **budget, **settings.set)
    policy.target(LONG_PROMPT)  # a count that is too small for the policy is refused here, not at each picture
    return policy


def make_decoding(settings: Settings) -> Decoding:
    """How tokens are chosen."""
    from kvcli.engine.session import Decoding

    return Decoding(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        num_beams=settings.num_beams,
        repetition_penalty=settings.repetition_penalty,
        stop=settings.stop,
        seed=settings.seed,
    )


def find_jobs(inputs: list[str], settings: Settings) -> Iterator[Job | Stray]:
    """The pictures. Raises `UsageError` when there are none."""
    from kvcli import inputs as finder

    if settings.null and not settings.from_file:
        raise UsageError("-0 says how --from-file separates its paths, and there is no --from-file")

    return finder.find(
        inputs,
        recursive=settings.recursive,
        from_file=settings.from_file,
        null_separated=settings.null,
        together=settings.together,
        shard=finder.Shard(*settings.shard) if settings.shard else None,
    )


def count_jobs(inputs: list[str], settings: Settings) -> int | None:
    """How many there will be, by walking once more; None when a pipe would have to be read twice."""
    from kvcli import inputs as finder
    from kvcli.jobs import Job

    if "-" in inputs or finder.comes_piped(inputs, settings.from_file):
        return None

    return sum(isinstance(item, Job) for item in find_jobs(inputs, settings))


def read_prompt(inputs: list[str], settings: Settings) -> str:
    """The prompt, from the setting or its file."""
    if settings.prompt_file is None:
        return settings.prompt
    if settings.prompt_file == "-":
        if "-" in inputs or settings.from_file == "-":
            raise UsageError("stdin can be only one of: the picture, the list, the prompt")
        text = sys.stdin.read()
    else:
        try:
            with open(settings.prompt_file, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UsageError(f"--prompt-file {settings.prompt_file} can't be read: {reason}") from error
    if not text.strip():
        raise UsageError(f"--prompt-file {settings.prompt_file} is empty")
    return text.rstrip("\n")


def load_session(settings: Settings, screen: Terminal, clock: Clock) -> Session:
    """The model, ready; says once what runs where."""
    quieten(settings)
    with clock.span("imports"):
        from transformers.utils import logging

        from kvcli.engine.session import Session

        make_decoding(settings)  # what makes no sense is refused before anything is loaded
    if not _libraries_may_draw(settings):
        logging.disable_progress_bar()
    with clock.span("load"), Loading(screen) as loading:
        session = Session.load(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            weights=settings.weights,
            kv_dtype=settings.kv_dtype,
            offline=settings.offline,
            trust_remote_code=settings.trust_remote_code,
            allow_pickle=settings.allow_pickle,
            progress=loading,
        )
    screen.note(session.facts)
    return session


def quieten(settings: Settings) -> None:
    """Keep the chatter of libraries down; what they still print goes to stderr. Called before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if settings.verbose < 2:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        import logging
        import warnings

        warnings.simplefilter("ignore")
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(logging.NullHandler())
    if not _libraries_may_draw(settings):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _libraries_may_draw(settings: Settings) -> bool:
    """Whether bars of downloads and of loading, which are the libraries' own, may show."""
    return settings.progress and not settings.quiet and sys.stderr.isatty()


class Loading:
    """Shows what is being loaded: a bar on a terminal, nothing otherwise. Called with a word and a share done."""

    def __init__(self, screen: Terminal) -> None:
        self._screen = screen
        self._bar: Any = None
        self._what = ""

    def __enter__(self) -> Loading:
        return self

    def __call__(self, what: str, share: float) -> None:
        if what != self._what and not self._screen.interactive:
            self._screen.note(what)
        self._what = what
        if not self._screen.shows_progress or not self._screen.interactive:
            return
        if self._bar is None:
            from tqdm import tqdm

            form = "{desc} {percentage:3.0f}% |{bar}|"
            self._bar = tqdm(total=100, file=sys.stderr, leave=False, dynamic_ncols=True, bar_format=form)
        self._bar.set_description_str(what, refresh=False)
        self._bar.n = max(0.0, min(100.0, share * 100))
        self._bar.refresh()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def stdout_is_data() -> contextlib.redirect_stdout[Any]:
    """While it holds, whatever libraries print goes to stderr: stdout carries data only."""
    return contextlib.redirect_stdout(sys.stderr)
