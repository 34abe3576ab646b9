"""`kvcli story`: a long text about one picture or a sequence of them, on one compressed cache."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import errors, run, study
from kvcli.cli.options import picture_command
from kvcli.cli.settings import Resolved
from kvcli.cli.terminal import Interrupts, Terminal, clean
from kvcli.errors import PictureError, UsageError
from kvcli.report import units
from kvcli.report.units import size

if TYPE_CHECKING:
    from kvcli.engine.conversation import Conversation
    from kvcli.engine.session import Outcome, Step
    from kvcli.policies.base import Policy

PANEL = "Story"
WORDS = 300
TOKENS_PER_WORD = 1.6
GO_ON = "Go on with the story."
TIRED = 12
"""Turns that the story of one picture may take at most, for a model that stops early."""


@picture_command("dry_run", "sidecar", "ordered", "fail_fast", "max_errors", "jsonl", "resume", "batch_size")
def story(
    inputs: list[str],
    settings: Resolved,
    *,
    words: Annotated[
        int, typer.Option("--words", metavar="N", min=1, help="About how long, in all.", rich_help_panel=PANEL)
    ] = WORDS,
    style: Annotated[
        str | None,
        typer.Option("--style", metavar="TEXT", help="As in: fairy tale, noir, haiku.", rich_help_panel=PANEL),
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option("--timeline", metavar="FILE.png", help="Plot the cache step by step.", rich_help_panel=PANEL),
    ] = None,
) -> int:
    """Tell a long story about one picture, or one that goes on from picture to picture.

    kvcli story beach.jpg --words 800 --style "fairy tale"

    kvcli story 1.jpg 2.jpg 3.jpg --policy h2o --budget 256 --timeline cache.png

    All of it is one conversation on one cache. A policy that can keeps a constant size while it writes (its option
    `decode` is then "bounded" unless you set it); a budget that is a number also holds from picture to picture.
    """
    screen, clock = run.terminal(settings), run.Clock()
    if settings.num_beams > 1:
        raise UsageError("a story is told with --num-beams 1")
    policy = bounded(settings)
    plot, text_file = _new_file(timeline, "--timeline", settings), _new_file(settings.output, "--output", settings)
    asked = (
        run.read_prompt(inputs, settings) if settings.sources["prompt"] != "default" or settings.prompt_file else None
    )
    jobs = list(study.only_jobs(run.find_jobs(inputs, settings), screen))
    share = max(1, round(words / len(jobs)))
    prompts = [asked or opening(share, style), *[following(share)] * (len(jobs) - 1)]
    pictures = []
    for job, prompt in zip(jobs, prompts, strict=True):
        try:
            pictures.append(study.open_job(job, prompt, settings, screen))
        except PictureError as error:
            screen.error(f"{job.id}: {error}")
            return errors.ALL_FAILED
    with run.stdout_is_data():
        from kvcli.engine.conversation import Conversation

        session = run.load_session(settings, screen, clock)
        conversation = Conversation(session, policy)
    teller = Teller(conversation, settings, streams=not settings.json)
    with Interrupts(screen) as interrupts:
        stopped = teller.tell(pictures, share, interrupts)
    if not teller.turns and not stopped:
        raise UsageError("there is nothing to tell")
    if settings.json:
        print(json.dumps(teller.as_json(policy), indent=1))
    if text_file is not None:
        text_file.write_text(teller.text() + "\n", encoding="utf-8")
    if plot is not None:
        _plot(teller, policy, plot)
    _close(teller, screen)
    return errors.INTERRUPTED if stopped else errors.OK


def bounded(settings: Resolved) -> Policy:
    """The policy, with `decode` "bounded" where it has that and the user did not choose."""
    from kvcli import policies

    choices = {option.name: option.choices for option in policies.describe(settings.policy).options}
    extra = {"decode": "bounded"} if "bounded" in choices.get("decode", ()) else {}
    if "budget" in settings.set:
        raise UsageError("give the budget as --budget, not as --set budget=")
    return study.make_policy(settings.policy, settings, settings.budget, **extra)


def opening(words: int, style: str | None) -> str:
    """The first request."""
    kind = f" in the style of: {style}" if style else ""
    return f"Write a story about this picture{kind}. About {words} words."


def following(words: int) -> str:
    """What comes with each further picture."""
    return f"The story goes on in this picture. Write what happens next. About {words} words."


class _Stop(Exception):
    """The user has heard enough."""


@dataclass
class Told:
    """One turn: what was asked about which pictures, and what came."""

    id: str
    prompt: str
    outcome: Outcome


@dataclass
class Teller:
    """Asks for the story piece by piece and keeps what came. steps: (turn, tokens seen, step) of every forward pass."""

    conversation: Conversation
    settings: Resolved
    streams: bool
    turns: list[Told] = field(default_factory=list)
    steps: list[tuple[int, int, Step]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The text as it came, also of a turn that was broken off."""

    def tell(self, pictures: list[study.Opened], words: int, interrupts: Interrupts) -> bool:
        """One picture after the other; True when the user asked to stop."""
        try:
            for number, opened in enumerate(pictures):
                if number:
                    self._say("\n\n")
                self._picture(opened, words, interrupts)
        except _Stop:
            return True
        finally:
            if self.streams:
                print(flush=True)
        return False

    def _picture(self, opened: study.Opened, words: int, interrupts: Interrupts) -> None:
        """The story of one picture: asked again to go on while it is too short."""
        request, told = opened.request, 0
        for turn in range(TIRED):
            if turn:
                request = dataclasses.replace(request, images=(), prompt=GO_ON, key=f"{opened.request.key}\n{turn}")
                self._say("\n")
            outcome = self._ask(opened.job.id, request, words - told, interrupts)
            told += len(outcome.text.split())
            if told >= 0.9 * words or not outcome.text or outcome.finish_reason == "length":
                return

    def _ask(self, name: str, request: Any, words: int, interrupts: Interrupts) -> Outcome:
        decoding = run.make_decoding(self.settings)
        if self.settings.sources["max_new_tokens"] == "default":
            decoding = dataclasses.replace(decoding, max_new_tokens=max(16, round(words * TOKENS_PER_WORD)))
        turn = len(self.turns)

        def on_step(step: Step) -> None:
            self.steps.append((turn, self.conversation.prompt_tokens + step.index, step))
            if interrupts.asked:
                raise _Stop

        outcome = self.conversation.ask(request, decoding, on_text=self._say, on_step=on_step)
        self.turns.append(Told(name, request.prompt, outcome))
        return outcome

    def _say(self, text: str) -> None:
        self.pieces.append(text)
        if self.streams:
            encoding = sys.__stdout__.encoding if sys.__stdout__ else "utf-8"
            print(clean(text).encode(encoding, "replace").decode(encoding), end="", flush=True)

    def text(self) -> str:
        """The whole story."""
        return "".join(self.pieces).strip()

    def as_json(self, policy: Policy) -> dict[str, Any]:
        """All turns and all steps."""
        names = ("text", "finish_reason", "prompt_tokens", "visual_tokens", "generated_tokens", "seen", "kept")
        cache = ("bytes_full", "bytes_held", "bytes_peak", "prefill_seconds", "decode_seconds")
        return {
            "model": self.conversation.model_name,
            "revision": self.conversation.revision,
            "policy": {"name": policy.name, **policy.resolved()},
            "text": self.text(),
            "turns": [
                {"id": t.id, "prompt": t.prompt, **{n: getattr(t.outcome, n) for n in names + cache}}
                for t in self.turns
            ],
            "steps": [
                {"turn": turn, "seen": seen, "held": step.held[0], "bytes": step.bytes_used}
                for turn, seen, step in self.steps
            ],
        }


def _plot(teller: Teller, policy: Policy, path: Path) -> None:
    from kvcli.report import figures
    from kvcli.report.summary import label

    held = [step.bytes_used for _, _, step in teller.steps]
    full = [teller.conversation.full_bytes(seen) for _, seen, _ in teller.steps]
    name = label({"name": policy.name, **policy.resolved()})
    series = {"a full cache": full, name: held}
    figures.save(figures.timeline(series, title="KV cache of the story", starts=_starts(teller)), path)


def _starts(teller: Teller) -> list[int]:
    """The steps at which turns begin, but the first."""
    turns = [turn for turn, _, _ in teller.steps]
    return [i for i in range(1, len(turns)) if turns[i] != turns[i - 1]]


def _close(teller: Teller, screen: Terminal) -> None:
    if not teller.turns:
        return
    last = teller.turns[-1].outcome
    generated = sum(told.outcome.generated_tokens for told in teller.turns)
    seconds = sum(told.outcome.decode_seconds for told in teller.turns)
    speed = units.speed(generated - len(teller.turns) + 1, seconds) or 0.0  # each turn's first token is of its prompt
    highest = max(step.bytes_used for _, _, step in teller.steps)
    screen.note(
        f"{len(teller.text().split())} words, {generated} tokens in {len(teller.turns)} turns"
        f" ({speed:.1f} tokens/s); kept {last.kept} of {last.seen} entries at the end; "
        f"cache at most {size(highest)} between steps, {size(last.bytes_full)} had nothing left it"
    )


def _new_file(name: str | None, flag: str, settings: Resolved) -> Path | None:
    """A file to be written. Raises `UsageError` when it exists, unless --overwrite, or has no folder."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or (path.exists() and not settings.overwrite):
        raise UsageError(f"{flag} {path} exists: use --overwrite, or another name")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")
    return path
