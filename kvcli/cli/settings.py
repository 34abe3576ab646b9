"""Where each setting's value comes from: flag > KVCLI_* > --profile > ./kvcli.yaml > user config > default.

Each source is a layer of named values; the first layer that has a value wins, and its name is remembered for
`kvcli config`. Unknown names are errors. Knows files and the environment, nothing of what the settings do.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcli.cli.options import DEFAULTS, FIELDS, Settings, flag_name
from kvcli.errors import UsageError

HERE = "kvcli.yaml"
ENVIRONMENT = "KVCLI_"
NOT_SETTINGS = {"KVCLI_CACHE", "KVCLI_PROFILE"}
"""KVCLI_CACHE is where the built-in model lives; the profile is a source of settings, not one of them."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One source: its values by field, already checked, and how messages call it."""

    source: str
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Resolved(Settings):
    """Settings that know where they come from: `sources[field]`. `notes` are warnings for stderr."""

    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    profile: str | None = None
    notes: tuple[str, ...] = ()


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Resolved:
    """Settings from all sources. `flags`: what was typed, by field, and `profile`.

    Raises `UsageError` for a value that makes no sense, an unknown name, or a file that can't be read.
    """
    environ = os.environ if environ is None else environ
    typed = {name: value for name, value in flags.items() if name != "profile"}
    above = [
        _checked("flag", typed, flags=True),
        _checked("environment", _from_environment(environ), env=True),
    ]
    below = [_from_file(path) for path in ((folder or Path()) / HERE, user_file()) if path.is_file()]
    profile = flags.get("profile") or environ.get("KVCLI_PROFILE") or _named_profile(below)
    middle = [_from_file(find_profile(profile))] if profile else []
    if _named_profile(middle):
        raise UsageError(f"{middle[0].source}: a profile can't name another")
    layers = [*above, *middle, *below]
    values, sources = _merge(layers)
    _settle_prompt(values, sources, layers)
    return Resolved(**values, sources=sources, profile=profile, notes=_unknown_variables(environ))


def _merge(layers: list[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    values, sources = {}, {}
    for field in FIELDS:
        owner = next((layer for layer in layers if field in layer.values), None)
        values[field] = owner.values[field] if owner else getattr(DEFAULTS, field)
        sources[field] = owner.source if owner else "default"
    values["set"], sources["set"] = _merge_set(layers, values["policy"])
    return values, sources


def _merge_set(layers: list[Layer], policy: str) -> tuple[dict[str, Any], str]:
    """Options of a policy add up over the layers, but those meant for another policy are left out: a layer's
    `set` belongs to the policy that holds at that layer."""
    merged: dict[str, Any] = {}
    used: list[str] = []
    for index in reversed(range(len(layers))):
        meant = next((x.values["policy"] for x in layers[index:] if "policy" in x.values), DEFAULTS.policy)
        options = layers[index].values.get("set", {})
        if options and meant == policy:
            merged |= options
            used.insert(0, layers[index].source)
    return merged, ", ".join(used) or "default"


def _settle_prompt(values: dict[str, Any], sources: dict[str, str], layers: list[Layer]) -> None:
    """`prompt` and `prompt-file` are two ways to say one thing: the higher layer wins, both in one is an error."""
    for layer in layers:
        if {"prompt", "prompt_file"} <= layer.values.keys():
            raise UsageError(f"prompt and prompt-file exclude each other ({layer.source})")
        if "prompt" in layer.values:
            values["prompt_file"], sources["prompt_file"] = None, "default"
        if layer.values.keys() & {"prompt", "prompt_file"}:
            return


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    names = {ENVIRONMENT + field.upper(): field for field, flag in FIELDS.items() if flag.anywhere}
    return {field: environ[name] for name, field in names.items() if name in environ}


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {ENVIRONMENT + field.upper() for field, flag in FIELDS.items() if flag.anywhere} | NOT_SETTINGS
    strange = [name for name in environ if name.startswith(ENVIRONMENT) and name not in known]
    return tuple(f"{name} is no setting and is ignored{nearest(name, known)}" for name in sorted(strange))


def user_file() -> Path:
    """Settings that hold for every folder, where the system keeps them."""
    import platformdirs

    return platformdirs.user_config_path("kvcli") / "config.yaml"


def _from_file(path: Path) -> Layer:
    """A YAML file of settings; names with `-` or `_`."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line} is no valid YAML: {getattr(error, 'problem', None) or error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold lines of `name: value`")
    return _checked(str(path), {str(key).replace("-", "_"): value for key, value in content.items()})


def _named_profile(layers: list[Layer]) -> str | None:
    names = [layer.values["profile"] for layer in layers if "profile" in layer.values]
    return names[0] if names else None


def _checked(source: str, values: Mapping[str, Any], *, flags: bool = False, env: bool = False) -> Layer:
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name == "profile" and not flags:
            result[name] = str(value)
            continue
        if name not in FIELDS or not (flags or FIELDS[name].anywhere):
            known = [flag_name(field) for field, flag in FIELDS.items() if flag.anywhere]
            raise UsageError(f"{source}: unknown setting {flag_name(name)}{nearest(flag_name(name), known)}")
        if value is None:
            continue
        shown = f"--{flag_name(name)}" if flags else ENVIRONMENT + name.upper() if env else flag_name(name)
        try:
            result[name] = FIELDS[name].kind.convert(value)
        except ValueError as error:
            where = "" if flags or env else f"{source}: "
            raise UsageError(f"{where}{shown} {error}, not {value!r}") from error
    return Layer(source, result)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing when no known name is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


# --- profiles


def find_profile(name: str) -> Path:
    """The file of a profile: a path to a YAML file, or the name of one that ships."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"profile {name}: no such file")
        return path
    shipped = profiles()
    if name not in shipped:
        hint = nearest(name, shipped) or f"; there are {', '.join(shipped)}"
        raise UsageError(f"unknown profile {name}{hint}")
    return shipped[name]


def profiles() -> dict[str, Path]:
    """Profiles that ship, by name."""
    return {path.stem: path for path in sorted(_profile_folder().glob("*.yaml"))}


def _profile_folder() -> Path:
    """The top-level folder `profiles`, which is installed as the package data `kvcli.profiles`."""
    import kvcli

    package = Path(kvcli.__file__).parent
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def summary(path: Path) -> str:
    """What a profile says about itself: the first comment of its file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()
