"""What is counted in texts about pictures: words that people used too, loops, names. Knows words only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

_STOP = """
    a about above across after all along also an and another are around as at away back be been before behind being
    below beside between both but by can do does down during each few for from front get gets getting go goes going had
    has have having he her hers him his how i if in inside into is it its itself just like look looking looks near next
    no not of off on one onto or other others out outside over own past she side so some something stand standing stands
    such than that the their them then there these they this those three through to together top towards toward two
    under up upon very was way were what when where which while who whom with without you your image picture photo
    shows show"""
_COLOURS = """black white red blue green yellow orange brown pink purple gray grey tan golden silver dark light colorful
    colored blond blonde beige"""
_SIZES = "big large small little tiny huge tall short long young old giant narrow wide"
IGNORED = frozenset(f"{_STOP} {_COLOURS} {_SIZES}".split())
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def content_words(text: str) -> set[str]:
    """The different words of a text that say something: no stop words, colours or sizes."""
    return set(words(text)) - IGNORED


def agreed(text: str, human: Sequence[str]) -> tuple[int, int]:
    """How many of the text's content words at least two of the human captions use, and how many it has."""
    used = Counter(word for caption in human for word in set(words(caption)))
    said = content_words(text)
    return sum(used[word] >= 2 for word in said), len(said)


def precision(text: str, human: Sequence[str]) -> float:
    """Share of the text's content words that at least two of the human captions use; 0 for a text without any."""
    good, said = agreed(text, human)
    return good / said if said else 0.0


def most_repeated(items: Sequence[object], size: int = 4) -> int:
    """How often the commonest run of `size` items occurs."""
    runs = Counter(zip(*(items[i:] for i in range(size)), strict=False))
    return max(runs.values(), default=0)


def named(text: str, names: Iterable[str]) -> bool:
    """Whether a text uses one of the names, as whole words, in the singular or with an s."""
    return any(re.search(rf"\b{re.escape(name.lower())}s?\b", text.lower()) for name in names)
