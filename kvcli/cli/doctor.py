"""`kvcli doctor`: what is installed, what the device can do, and what of a model can be compressed."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvcli.cli.settings import Resolved

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "Pillow", "pillow-heif", "numpy", "typer")


def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Load this model and say which layers can be compressed.", show_default=False),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="As for describe.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="As for describe.", show_default=False)] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="As for describe.", show_default=False)] = None,
    offline: Annotated[
        bool | None, typer.Option("--offline", help="Never use the network.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option("--trust-remote-code", help="Run code that comes with the model.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", show_default=False)] = False,
) -> None:
    """Show versions, device and dtype, and with --model which layers can be compressed and which not."""
    from kvcli.cli import run
    from kvcli.cli.settings import resolve

    given = {
        "device": device,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "offline": offline,
        "trust_remote_code": trust_remote_code,
    }
    settings = resolve({name: value for name, value in given.items() if value is not None} | {"model": model or ""})
    run.quieten(settings)
    with run.stdout_is_data():
        report = _report(settings)
        if model is not None:
            report["model"] = _model(settings)
    if as_json:
        json.dump(report, sys.stdout)
        print()
    else:
        _print(report)


def _report(settings: Resolved) -> dict[str, Any]:
    import torch

    import kvcli
    from kvcli.engine.loading import choose_device, choose_dtype

    chosen = choose_device(settings.device)
    dtype, reason = choose_dtype(settings.dtype, chosen, torch.bfloat16)
    return {
        "kvcli": kvcli.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "device": _device(chosen),
        "dtype": f"{str(dtype).removeprefix('torch.')}: {reason} (for a model stored as bfloat16)",
        "cache": "int8" if settings.kv_dtype == "int8" else "the type of the model",
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {os.cpu_count()} cores",
        "hub": {name: os.environ.get(name) for name in ("HF_HOME", "HF_HUB_OFFLINE")},
    }


def _device(device: Any) -> str:
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{device}: {torch.cuda.get_device_name(device)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return str(device)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _model(settings: Resolved) -> dict[str, Any]:
    from kvcli.cli import run

    session = run.load_session(settings, run.terminal(settings), run.Clock())
    names = ("layer", "kind", "compressible", "reason")
    return {
        "name": session.model_name,
        "revision": session.revision,
        "facts": session.facts,
        "layers": [dict(zip(names, row, strict=True)) for row in session.layer_report()],
    }


def _print(report: dict[str, Any]) -> None:
    for name in ("kvcli", "python", "device", "dtype", "cache", "cpu"):
        print(f"{name:<16}{report[name]}")
    for package, found in report["packages"].items():
        print(f"{package:<16}{found or 'not installed'}")
    for name, value in report["hub"].items():
        print(f"{name:<16}{value or 'not set'}")
    if "model" in report:
        print()
        _print_layers(report["model"])


def _print_layers(model: dict[str, Any]) -> None:
    """Runs of layers of one kind on one line."""
    print(f"{'model':<16}{model['name']} ({model['revision']})")
    groups: list[tuple[tuple[Any, ...], list[int]]] = []
    for row in model["layers"]:
        key = (row["kind"], row["compressible"], row["reason"])
        if groups and groups[-1][0] == key:
            groups[-1][1].append(row["layer"])
        else:
            groups.append((key, [row["layer"]]))
    for (kind, compressible, reason), numbers in groups:
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        verdict = "can be compressed" if compressible else "can't be compressed"
        print(f"layer {span:<7}{kind}: {verdict}" + (f" ({reason})" if reason else ""))
    count = sum(row["compressible"] for row in model["layers"])
    print(f"{count} of {len(model['layers'])} layers can be compressed")
