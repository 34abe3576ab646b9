"""The one place where errors become exit codes, and one line on stderr each.

0 all done, 1 could not start or go on (model, device, disk), 2 usage, 3 some pictures failed, 4 all failed,
130 interrupted, 141 the reader of our output went away (said by no line: nobody wants to read it).
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from kvcli.errors import KvcliError, UsageError

OK, FAILED_TO_START, USAGE, SOME_FAILED, ALL_FAILED, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 3, 4, 130, 141

HELP = (
    "Exit codes: 0 all done, 1 could not start (model, device, disk), 2 usage, 3 some pictures failed, "
    "4 all failed, 130 interrupted."
)


class Group(TyperGroup):
    """The root command: whatever a command raises leaves it as an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except BaseException as error:
            raise typer.Exit(report(error)) from error


def main(app: typer.Typer) -> int:
    """Run the command line and give its exit code."""
    try:
        return app(prog_name="kvcli", standalone_mode=False) or OK
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        return report(error)
    finally:
        _flush()


def report(error: BaseException) -> int:
    """Say what happened, in one line, and give the exit code."""
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    if verbose(sys.argv):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, KvcliError):
        _say(str(error))
        return USAGE if isinstance(error, UsageError) else FAILED_TO_START
    if hasattr(error, "format_message"):  # the command-line parser's own errors
        _say(f"{error.format_message().rstrip('.')}; see {_command(error)} --help")
        return USAGE
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror}; what was finished is kept")
        return FAILED_TO_START
    text = " ".join(str(error).split())[:300]
    _say(f"{type(error).__name__}: {text} (-vv shows where; please report it)")
    return FAILED_TO_START


def verbose(arguments: list[str]) -> bool:
    """Whether tracebacks are wanted: `-vv`, or two `-v`. Looked up here since an error may come before parsing."""
    short = sum(a.count("v") for a in arguments if a.startswith("-v") and not a.strip("-v"))
    return short + arguments.count("--verbose") >= 2


def _command(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "kvcli"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"kvcli: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Flush now, so that a reader that has gone away is not noticed, loudly, at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
