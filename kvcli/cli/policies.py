"""`kvcli policies`: what can leave the cache, and with which options. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.policies import Option, PolicyInfo


def policies(
    action: Annotated[str, typer.Argument(metavar="[list|show]", show_default=False)] = "list",
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", show_default=False)] = False,
) -> None:
    """List the policies, or `show NAME` with all its options."""
    from kvcli.policies import describe, names

    if action == "list" and name is None:
        found = [describe(name) for name in names()]
        _print_json([_plain(info) for info in found]) if as_json else _table(found)
    elif action == "show" and name is not None:
        _print_json(_plain(describe(name))) if as_json else _show(describe(name))
    elif action == "show":
        raise UsageError("kvcli policies show NAME: which one? `kvcli policies` lists them")
    else:
        raise UsageError(f"kvcli policies {action}: it is `kvcli policies` or `kvcli policies show NAME`")


def _table(found: list[PolicyInfo]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("policy", "frees memory", "sees question", "what it keeps"):
        table.add_column(heading, no_wrap=heading == "policy", overflow="fold")
    for info in found:
        table.add_row(info.name, _yes(info.frees_memory), _yes(info.sees_question), info.summary)
    _console().print(table)


def _show(info: PolicyInfo) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = _console()
    console.print(Text(info.name, style="bold"))
    console.print(Text(f"{info.doc}\n"))
    if info.source:
        console.print(Text(f"source: {info.source}"))
    console.print(Text(f"acts: {'per layer' if info.when == 'layer' else 'once, over all layers'}"))
    console.print(Text(f"frees memory: {_yes(info.frees_memory)}"))
    console.print(Text(f"sees the question: {_yes(info.sees_question)}"))
    console.print(Text("\nOptions, as --set NAME=VALUE (the budget as --budget), with their defaults:"))
    for option in info.options:
        console.print(Text.assemble((option.name, "bold"), f" = {_default(option)}"))
        console.print(Padding(Text(f"{option.help} ({_values(option)})"), (0, 0, 0, 4)))


def _values(option: Option) -> str:
    low, high = option.low, option.high
    bounds = "" if low is None and high is None else f" {_bound(low)}..{_bound(high)}"
    return option.type_text + bounds


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _default(option: Option) -> str:
    return "none" if option.default is None else str(option.default)


def _plain(info: PolicyInfo) -> dict[str, Any]:
    result = dataclasses.asdict(info)
    for option in result["options"]:
        option.pop("types", None)
    return result


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, ensure_ascii=True)
    print()


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)
