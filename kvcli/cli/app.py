"""The command line's root: wires the commands, one file each, and holds nothing else.

A command's module may import no torch and no model at its top: `kvcli --help` reads them all.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvcli
from kvcli.cli import bench, compare, config, describe, doctor, errors, models, policies, profile, story

app = typer.Typer(
    cls=errors.Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=errors.HELP,
)

app.command("describe")(describe.describe)
app.command("profile")(profile.profile)
app.command("compare")(compare.compare)
app.command("story")(story.story)
app.command("bench")(bench.bench)
app.command("policies")(policies.policies)
app.add_typer(models.app, name="models")
app.command("doctor")(doctor.doctor)
app.command("config")(config.config)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvcli {kvcli.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Run vision-language models over pictures while keeping only a part of the KV cache."""


def main() -> None:
    """The console script."""
    sys.exit(errors.main(app))
