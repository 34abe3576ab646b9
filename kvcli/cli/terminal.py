"""What people see on stderr: facts, warnings, progress, the closing summary. Data never passes here.

Knows terminals (width, colour, encoding), not what a run does.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

PLAIN_EVERY = 10.0
"""Seconds between progress lines where stderr is no terminal."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Text without control characters, which could drive the terminal. Newlines and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """A name or a message on one line."""
    return clean(text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t"))


def count_of(count: int, word: str) -> str:
    """1 stray, 2 strays."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def duration(seconds: float) -> str:
    """40 ms, 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def colored(stream: TextIO, wish: str) -> bool:
    """Whether to use colour: `always`, `never`, or as the stream, NO_COLOR, FORCE_COLOR and TERM say."""
    if wish != "auto":
        return wish == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Terminal:
    """stderr, in the amount that the user asked for."""

    def __init__(self, *, quiet: bool, verbose: int, color: str, progress: bool) -> None:
        self.quiet, self.verbose = quiet, verbose
        self.color = colored(sys.stderr, color)
        self.interactive = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._wants_progress = progress and not quiet
        self._bar: Any = None
        self._started = time.monotonic()
        self.total: int | None = None
        self._unit = "picture"
        self.failed = 0
        self._settled = 0

    @property
    def shows_progress(self) -> bool:
        """Whether progress is wanted at all."""
        return self._wants_progress

    def note(self, text: str) -> None:
        """A fact that helps; not with --quiet."""
        if not self.quiet:
            self._print(f"kvcli: {one_line(text)}", dim=True)

    def detail(self, text: str) -> None:
        """A fact for --verbose."""
        if self.verbose and not self.quiet:
            self._print(f"kvcli: {one_line(text)}", dim=True)

    def error(self, text: str) -> None:
        """What went wrong; always."""
        self._print(f"kvcli: {one_line(text)}")

    def _print(self, text: str, dim: bool = False) -> None:
        with self.aside():
            encoding = sys.stderr.encoding or "ascii"
            text = text.encode(encoding, "replace").decode(encoding)
            print(f"\033[2m{text}\033[0m" if dim and self.color else text, file=sys.stderr, flush=True)

    # --- progress

    @contextlib.contextmanager
    def progress(self, count: Callable[[], int | None] | None, unit: str = "picture") -> Iterator[None]:
        """Show progress while the block runs: a bar on a terminal, else a line now and then.

        count: counts all units, run in a thread since it may take long; the time left is shown once it is known.
        """
        over = threading.Event()
        self._unit = unit
        self._started = time.monotonic()
        if self._wants_progress and count:
            threading.Thread(target=self._learn_total, args=(count,), daemon=True).start()
            if self.interactive:
                self._bar = self._new_bar()
            else:
                threading.Thread(target=self._plain_lines, args=(over,), daemon=True).start()
        try:
            yield
        finally:
            over.set()
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _new_bar(self) -> Any:
        from tqdm import tqdm

        columns = os.environ.get("COLUMNS", "")
        ascii_only = (sys.stderr.encoding or "").lower().replace("-", "") != "utf8"
        width = int(columns) if columns.isdigit() else None
        # pictures come in batches: the rate over the whole run is steadier than that of the last few
        return tqdm(file=sys.stderr, unit=self._unit[:3], ncols=width, dynamic_ncols=width is None, leave=False,
                    ascii=ascii_only, smoothing=0)  # fmt: skip

    def _learn_total(self, count: Callable[[], int | None]) -> None:
        with contextlib.suppress(Exception):  # what is wrong with the inputs is said by the run itself
            self.total = count()

    def settled(self, failed: bool) -> None:
        """One more unit has come to its end."""
        self._settled += 1
        self.failed += failed
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.set_postfix_str(f"{self.failed} failed", refresh=False)
            self._bar.update()

    def _plain_lines(self, over: threading.Event) -> None:
        last = 0
        while not over.wait(PLAIN_EVERY):
            if self._settled > last:
                last = self._settled
                self.note(self._state())

    def _state(self) -> str:
        elapsed, settled = time.monotonic() - self._started, self._settled
        parts = [f"{settled:,}" + (f" of {self.total:,}" if self.total else "")]
        parts += [f"{self.failed} failed", f"{settled / elapsed:.2f} {self._unit}s/s"]
        if self.total:
            parts.append(f"{duration((self.total - settled) * elapsed / settled)} left")
        return ", ".join(parts)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar away while something else is printed."""
        if self._bar is None:
            yield
            return
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()


class Interrupts:
    """Ctrl-C (or a polite kill) once: `asked` is true and the run ends by itself; twice: KeyboardInterrupt."""

    def __init__(self, terminal: Terminal) -> None:
        self.asked = False
        self._terminal = terminal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._terminal.error("finishing what is in flight; Ctrl-C again stops at once")
