"""Every setting of the commands that take pictures, declared once: its flag, type, default and help.

`Settings` gives commands typed values; `picture_command` makes the flags from it; `kvcli.cli.settings` fills it from
flags, environment and files. A new setting is one line here. Knows nothing of what the settings do.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from kvcli.cli import kinds
from kvcli.cli.kinds import Kind

CACHE, MODEL, PROMPT, DECODING = "KV cache", "Model", "Prompt", "Decoding"
INPUT, OUTPUT, RUN, TERMINAL = "Pictures", "Output", "Run", "Terminal"


@dataclasses.dataclass(frozen=True)
class Flag:
    """How a setting is read and shown. Its long flag is its name; `short` are others, `shown` the default in words."""

    kind: Kind
    help: str
    panel: str
    short: tuple[str, ...]
    shown: str | None
    anywhere: bool
    """False: a flag for one run, which makes no sense in a file or the environment."""


def setting(
    default: Any,
    kind: Kind,
    panel: str,
    help: str,
    *short: str,
    shown: str | None = None,
    anywhere: bool = True,
) -> Any:
    """A field of `Settings`; `shown` is the default as the help prints it."""
    flag = Flag(kind, help, panel, short, shown, anywhere)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"flag": flag})
    return dataclasses.field(default=default, metadata={"flag": flag})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run, resolved."""

    policy: str = setting("elastic", kinds.TEXT, CACHE, "What leaves the cache: see `kvcli policies`.")
    budget: float | int | None = setting(
        None,
        kinds.BUDGET,
        CACHE,
        "What is kept: a share of the prompt (0.2) or a number of entries (256).",
        shown="the policy's own, mostly 0.2",
    )
    set: dict[str, Any] = setting(
        {}, kinds.OPTIONS, CACHE, "An option of the policy; may be repeated. See `kvcli policies show NAME`."
    )

    model: str = setting(
        "builtin", kinds.TEXT, MODEL, "A folder, a hub id (with @revision if wanted), or the built-in model."
    )
    device: str = setting("auto", kinds.TEXT, MODEL, "auto, cpu, cuda, cuda:1 or mps.")
    dtype: str = setting("auto", kinds.DTYPE, MODEL, "Type of the weights.")
    weights: str = setting(
        "plain",
        kinds.choice("plain", "packed"),
        MODEL,
        "packed lays float32 weights on a CPU out for oneDNN: often much faster.",
    )
    kv_dtype: str = setting(
        "auto",
        kinds.choice("auto", "int8"),
        CACHE,
        "How what is kept is stored: int8 takes about half of 16-bit numbers.",
        shown="the model's",
    )
    offline: bool = setting(False, kinds.SWITCH, MODEL, "Never use the network.")
    trust_remote_code: bool = setting(
        False, kinds.SWITCH, MODEL, "Run code that comes with the model. Only for models that you trust."
    )
    allow_pickle: bool = setting(
        False, kinds.SWITCH, MODEL, "Load weights that are not safetensors. They can run code."
    )

    prompt: str = setting("Describe the image.", kinds.TEXT, PROMPT, "What to ask about each picture.")
    prompt_file: str | None = setting(None, kinds.PATH, PROMPT, "Read the prompt from a file (- for stdin).")
    system: str | None = setting(None, kinds.TEXT, PROMPT, "A system message before the prompt.")

    max_new_tokens: int = setting(128, kinds.integer(1), DECODING, "Longest answer, in tokens.")
    temperature: float = setting(0.0, kinds.number(0), DECODING, "0 is greedy; above it, tokens are drawn.")
    top_p: float = setting(
        1.0,
        kinds.number(0, 1, above=True),
        DECODING,
        "Draw from the likeliest tokens of this total probability.",
    )
    num_beams: int = setting(1, kinds.integer(1, 64), DECODING, "Beams of a beam search.")
    repetition_penalty: float | None = setting(
        None, kinds.number(0, above=True), DECODING, "Above 1 discourages repeats.", shown="the model's own"
    )
    stop: tuple[str, ...] = setting((), kinds.TEXTS, DECODING, "End the answer at this text; may be repeated.")
    seed: int = setting(0, kinds.integer(0, 2**63 - 1), DECODING, "Seed of the draws.")

    recursive: bool = setting(False, kinds.SWITCH, INPUT, "Go into the folders of a folder.", "-r")
    from_file: str | None = setting(
        None, kinds.PATH, INPUT, "Read paths from a list, one a line (- for stdin).", anywhere=False
    )
    null: bool = setting(
        False, kinds.SWITCH, INPUT, "Paths of --from-file end in NUL, not in a newline.", "-0", anywhere=False
    )
    together: bool = setting(False, kinds.SWITCH, INPUT, "All pictures in one prompt, one answer.", anywhere=False)
    shard: tuple[int, int] | None = setting(
        None, kinds.SHARD, INPUT, "Take the i-th of n parts of the pictures, as 3/8: for job arrays."
    )
    max_pixels: int | None = setting(None, kinds.integer(1), INPUT, "Refuse larger pictures.", shown="100,000,000")

    json: bool = setting(False, kinds.SWITCH, OUTPUT, "One JSON document on stdout.")
    jsonl: bool = setting(False, kinds.SWITCH, OUTPUT, "One JSON object per picture, as it finishes.")
    output: str | None = setting(
        None, kinds.PATH, OUTPUT, "FILE.jsonl: append records. DIR/: a text file per picture.", "-o"
    )
    sidecar: bool = setting(False, kinds.SWITCH, OUTPUT, "Put the text beside each picture, as a.jpg.txt.")
    overwrite: bool = setting(False, kinds.SWITCH, OUTPUT, "Replace what is there.", anywhere=False)
    resume: bool = setting(
        False, kinds.SWITCH, OUTPUT, "Go on: skip what is done with the same settings, retry failures."
    )
    ordered: bool = setting(False, kinds.SWITCH, OUTPUT, "Records in the order of the pictures.")
    dry_run: bool = setting(False, kinds.SWITCH, OUTPUT, "List what would run, and stop.", anywhere=False)

    batch_size: int | None = setting(None, kinds.BATCH, RUN, "Pictures at a time.", shown="auto")
    fail_fast: bool = setting(False, kinds.SWITCH, RUN, "Stop at the first failure.")
    max_errors: int | None = setting(None, kinds.integer(1), RUN, "Stop when this many pictures have failed.")

    quiet: bool = setting(False, kinds.SWITCH, TERMINAL, "Only errors on stderr.", "-q")
    verbose: int = setting(0, kinds.COUNT, TERMINAL, "Say more: -v times, -vv tracebacks.", "-v", shown="")
    color: str = setting("auto", kinds.COLOR, TERMINAL, "auto, always or never.")
    progress: bool = setting(True, kinds.SWITCH, TERMINAL, "No progress bar.")


FIELDS: dict[str, Flag] = {f.name: f.metadata["flag"] for f in dataclasses.fields(Settings)}
DEFAULTS = Settings()


def flag_name(field: str) -> str:
    """`max_new_tokens` -> `max-new-tokens`, the spelling of flags, files and messages."""
    return field.replace("_", "-")


def picture_command(*without: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a typer command of `function(inputs, settings, ...)`.

    The command gets the argument PICTURE... and a flag for every field of `Settings` but those in `without`, which
    mean nothing to it; further parameters of `function` (keyword-only, `Annotated` with their `typer.Option`) become
    flags of that command alone. The value that `function` returns is the exit code.
    """
    return functools.partial(_picture_command, without)


def _picture_command(without: Collection[str], function: Callable[..., int | None]) -> Callable[..., None]:
    own = list(inspect.signature(function, eval_str=True).parameters.values())[2:]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        from kvcli.cli.settings import resolve

        inputs = given.pop("inputs", None) or []
        extra = {parameter.name: given.pop(parameter.name) for parameter in own}
        code = function(inputs, resolve(_flags(given)), **extra)
        if code:
            raise typer.Exit(code)

    pictures = inspect.Parameter(
        "inputs",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None,
            typer.Argument(
                metavar="PICTURE",
                help="Files, folders, quoted globs, .jsonl jobs, or - for a picture on stdin.",
                show_default=False,
            ),
        ],
    )
    parameters = [pictures, *own, *_parameters(without)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # or typer would read the signature of `function`
    return command


def _policies_like(incomplete: str) -> list[tuple[str, str]]:
    from kvcli.policies import names

    return [(name, text) for name, text in names().items() if name.startswith(incomplete)]


def _profiles_like(incomplete: str) -> list[tuple[str, str]]:
    from kvcli.cli.settings import profiles, summary

    return [(name, summary(path)) for name, path in profiles().items() if name.startswith(incomplete)]


COMPLETIONS = {"policy": _policies_like}
"""What the shell offers for a flag's value."""


def _parameters(without: Collection[str]) -> list[inspect.Parameter]:
    result = []
    for field, flag in FIELDS.items():
        if field == "batch_size":
            result.append(_profile())
        if field in without:
            continue
        if flag.kind.form == "switch":
            result += _switch(field, flag)
        else:
            result.append(_valued(field, flag))
    return result


def _profile() -> inspect.Parameter:
    """The one flag that is no setting but a source of settings."""
    help = "Named settings, or a YAML file of them: see `kvcli config --list`."
    option = typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help=help,
        rich_help_panel=RUN,
        show_default=False,
        autocompletion=_profiles_like,
    )
    return _parameter("profile", str | None, option)


def _switch(field: str, flag: Flag) -> list[inspect.Parameter]:
    """`--x` and `--no-x`, of which the help shows the one that changes the default."""
    common: dict[str, Any] = {"help": flag.help, "rich_help_panel": flag.panel, "show_default": False}
    on = bool(getattr(DEFAULTS, field))
    positive = typer.Option(f"--{flag_name(field)}", *flag.short, hidden=on, **common)
    negative = typer.Option(f"--no-{flag_name(field)}", hidden=not on, **common)
    return [_parameter(field, bool | None, positive), _parameter(f"no_{field}", bool | None, negative)]


def _valued(field: str, flag: Flag) -> inspect.Parameter:
    common: dict[str, Any] = {
        "help": flag.help,
        "rich_help_panel": flag.panel,
        "show_default": _shown(field),
    }
    if flag.kind.form == "count":
        option = typer.Option(f"--{flag_name(field)}", *flag.short, count=True, **common)
        return _parameter(field, int, option, default=0)
    if field in COMPLETIONS:
        common["autocompletion"] = COMPLETIONS[field]
    option = typer.Option(f"--{flag_name(field)}", *flag.short, metavar=flag.kind.label, **common)
    return _parameter(field, list[str] | None if flag.kind.form == "many" else str | None, option)


def _shown(field: str) -> str | bool:
    shown, default = FIELDS[field].shown, getattr(DEFAULTS, field)
    if shown is not None:
        return shown or False
    return False if default is None or default in ((), {}) else str(default)


def _parameter(name: str, form: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[form, option])


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """What the user really typed: field -> text, with `--no-x` folded into its switch."""
    from kvcli.errors import UsageError

    flags: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or value == [] or (name == "verbose" and not value):
            continue
        positive = name.removeprefix("no_")
        if positive != name and positive in FIELDS:
            if given.get(positive):
                both = flag_name(positive)
                raise UsageError(f"--{both} and --no-{both} exclude each other")
            flags[positive] = False
        else:
            flags[name] = value
    return flags
