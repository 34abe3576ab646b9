"""`kvcli config`: every setting, its value, and where that came from."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvcli.cli.options import FIELDS, flag_name, picture_command
from kvcli.cli.settings import HERE, Resolved, profiles, summary, user_file


@picture_command()
def config(
    inputs: list[str],
    settings: Resolved,
    *,
    list_profiles: Annotated[
        bool, typer.Option("--list", help="List the profiles that ship, instead.", show_default=False)
    ] = False,
) -> None:
    """Show each setting's value and where it came from.

    It takes the flags of `describe`, to see what they would do. The order is: flag, KVCLI_* in the environment,
    --profile, ./kvcli.yaml, the user's config file, default.
    """
    if list_profiles:
        width = max(map(len, profiles()), default=0)
        for name, path in profiles().items():
            print(f"{name:<{width}}  {summary(path)}")
        return
    values = {name: getattr(settings, name) for name in FIELDS}
    if settings.json:
        document = {flag_name(n): {"value": v, "source": settings.sources[n]} for n, v in values.items()}
        json.dump(document, sys.stdout)
        print()
        return
    shown = {flag_name(name): _text(value) for name, value in values.items()}
    name_width, value_width = max(map(len, shown)), min(40, max(map(len, shown.values())))
    for name, value in values.items():
        label = flag_name(name)
        print(f"{label:<{name_width}}  {_text(value):<{value_width}}  {settings.sources[name]}")
    print(f"files: {HERE} here, {user_file()}", file=sys.stderr)
    for note in settings.notes:
        print(f"kvcli: {note}", file=sys.stderr)


def _text(value: Any) -> str:
    """A value as a YAML file would have it."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
