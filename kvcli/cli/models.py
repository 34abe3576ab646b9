"""`kvcli models`: which models are here, fetch the built-in one, say what it is. Listing imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcli.errors import UsageError

app = typer.Typer(help="List the models that are here, `pull` the built-in one, `show` its card.")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", show_default=False)]


@dataclass(frozen=True)
class Local:
    """A model that needs no download, or the built-in one. `bytes` 0: not there yet."""

    name: str
    state: str
    bytes: int
    kind: str
    path: str


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the built-in model and what the hub's cache on this machine holds; nothing is fetched."""
    if context.invoked_subcommand is None:
        found = [built_in(), *hub_cache()]
        print(json.dumps([asdict(model) for model in found], ensure_ascii=False)) if as_json else _table(found)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="[builtin]", show_default=False)] = "builtin",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress on stderr.", show_default=False)] = False,
) -> None:
    """Fetch the parts of the built-in model and build it, once; prints its folder."""
    from kvcli import builtin
    from kvcli.cli.run import Loading
    from kvcli.cli.terminal import Terminal

    _only_builtin(name, "pull")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar, ours
    with Loading(Terminal(quiet=quiet, verbose=0, color="auto", progress=not quiet)) as progress:
        folder = builtin.ensure(progress)
    print(folder)


@app.command()
def show(name: Annotated[str, typer.Argument(metavar="[builtin]", show_default=False)] = "builtin") -> None:
    """The built-in model's card, short: what it is made of, how good it is, what it can't do."""
    from kvcli import builtin

    _only_builtin(name, "show")
    print(builtin.card())


def _only_builtin(name: str, verb: str) -> None:
    from kvcli import builtin

    if name != builtin.NAME:
        raise UsageError(
            f"kvcli models {verb} {name}: only `{builtin.NAME}` is ours to {verb}; "
            f"give a folder or a hub id to --model, and transformers fetches it"
        )


def built_in() -> Local:
    from kvcli import builtin

    folder = builtin.checkpoint_folder()
    state = "ready" if builtin.ready() else "not built yet: kvcli models pull"
    return Local(builtin.NAME, state, _bytes(folder), "llava", str(folder))


def hub_cache() -> Iterator[Local]:
    """Every model in the hub's cache that has a configuration, under its hub id, newest revision."""
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        revisions = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
        if not revisions:
            continue
        newest = revisions[-1]
        try:
            settings = json.loads(newest.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        whole = any(newest.parent.glob("*.safetensors"))
        state = "here" if whole else "no safetensors here"
        name = folder.name.removeprefix("models--").replace("--", "/")
        yield Local(name, state, _bytes(newest.parent), str(settings.get("model_type", "?")), str(newest.parent))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _table(found: list[Local]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvcli.report.units import size

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "kind", "size", "state"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for model in found:
        table.add_row(model.name, model.kind, size(model.bytes) if model.bytes else "-", model.state)
    Console(highlight=False).print(table)
