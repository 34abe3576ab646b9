"""What one text has that another has not, word by word."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["same", "added", "missing"]


@dataclass(frozen=True)
class Span:
    """A piece of text: in both, only in the candidate ("added"), or only in the reference ("missing")."""

    kind: Kind
    text: str


def spans(reference: str, candidate: str) -> list[Span]:
    """The candidate in pieces, with what it lacks in between. Joined without "missing" they are the candidate, without
    "added" the reference, but for spaces around differences."""
    ours, theirs = _words(candidate), _words(reference)
    found: list[Span] = []
    matcher = difflib.SequenceMatcher(None, [w.strip() for w in theirs], [w.strip() for w in ours], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            found.append(Span("same", "".join(ours[c:d])))
            continue
        if a < b:
            found.append(Span("missing", "".join(theirs[a:b])))
        if c < d:
            found.append(Span("added", "".join(ours[c:d])))
    return found


def _words(text: str) -> list[str]:
    """Words with the space that follows them; scripts without spaces fall into characters."""
    return re.findall(
        r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]\s*|[^\s\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+\s*|^\s+", text
    )
