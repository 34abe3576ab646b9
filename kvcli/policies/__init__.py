"""The policies that are installed, by name: entry points of the group `kvcli.policies`.

Anyone's package can add one. Nothing here imports torch: listing and describing policies is instant.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvcli.errors import StartError, UsageError

if typing.TYPE_CHECKING:
    from kvcli.policies.base import Policy

GROUP = "kvcli.policies"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a policy, as users see it."""

    name: str
    type_text: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    types: tuple[type, ...] = ()


@dataclasses.dataclass(frozen=True)
class PolicyInfo:
    """What `kvcli policies` shows."""

    name: str
    summary: str
    doc: str
    source: str
    when: str
    frees_memory: bool
    sees_question: bool
    options: tuple[Option, ...]


def names() -> dict[str, str]:
    """Name -> first line of its description, in alphabetical order; `full`, the yardstick, first."""
    found = sorted({point.name for point in entry_points(group=GROUP)}, key=lambda n: (n != "full", n))
    return {name: describe(name).summary for name in found}


@cache
def find(name: str) -> type[Policy]:
    """The class of a policy. Raises `UsageError` with the nearest match, `StartError` when its package is broken."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise UsageError(f"no policy is called {name!r}{nearest(name, points)}; `kvcli policies` lists them")
    try:
        found = points[name].load()
    except Exception as error:
        raise StartError(f"policy {name} can't be loaded from {points[name].value}: {error}") from error
    return typing.cast("type[Policy]", found)


def describe(name: str) -> PolicyInfo:
    """Everything there is to say about a policy."""
    cls = find(name)
    doc = inspect.cleandoc(cls.__doc__ or "")
    return PolicyInfo(
        name=name,
        summary=doc.splitlines()[0] if doc else "",
        doc=doc,
        source=cls.source,
        when=cls.when,
        frees_memory=cls.frees_memory,
        sees_question=cls.sees_question,
        options=options(cls),
    )


def options(cls: type[Policy]) -> tuple[Option, ...]:
    """The options of a policy class, its budget first, in the order they are written."""
    hints = typing.get_type_hints(cls)
    return tuple(_option(field, hints[field.name]) for field in dataclasses.fields(cls))


def create(name: str, **values: Any) -> Policy:
    """A policy with the given options; text is turned into the option's type.

    Raises `UsageError` for an unknown option (with the nearest match) or a value that does not fit.
    """
    cls = find(name)
    known = {option.name: option for option in options(cls)}
    for key in values:
        if key not in known:
            raise UsageError(f"policy {name} has no option {key!r}{nearest(key, known)}")
    return cls(**{key: _convert(known[key], value, name) for key, value in values.items()})


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'elastic'?`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if union else (hint,)
    choices = tuple(c for p in parts if typing.get_origin(p) is typing.Literal for c in typing.get_args(p))
    plain = tuple(p for p in parts if isinstance(p, type)) + tuple({type(c) for c in choices})
    text = " | ".join(map(str, choices)) or " | ".join("none" if p is type(None) else p.__name__ for p in plain)
    meta = field.metadata
    return Option(
        field.name,
        text,
        field.default,
        meta.get("help", ""),
        choices,
        meta.get("low"),
        meta.get("high"),
        plain,
    )


def _convert(option: Option, value: Any, policy: str) -> Any:
    if not isinstance(value, str) or option.name == "budget":
        return value
    if value in option.choices:
        return value
    for kind in (type(None), bool, int, float, str):
        if kind in option.types:
            with_kind = _parse(kind, value)
            if with_kind is not ...:
                return with_kind
    raise UsageError(f"{option.name} = {value!r} is not {option.type_text} (policy {policy})")


def _parse(kind: type, text: str) -> Any:
    """`text` as a value of `kind`, or `...` when it is none."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if kind is type(None):
        return None if text.lower() in ("none", "null", "") else ...
    if kind is bool:
        return words.get(text.lower(), ...)
    try:
        return kind(text)
    except ValueError:
        return ...
