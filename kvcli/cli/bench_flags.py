"""What was typed after `kvcli bench`, checked before anything is built. Knows flags, measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.cli import kinds, study
from kvcli.cli.kinds import Kind
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.cli.settings import Resolved

CASES = ("decode-16x1024", "decode-8x4096", "prefill-1k", "prefill-4k")
SHAPES = "smollm2-135m, smollm2-1.7b, qwen2.5-vl-3b, qwen2.5-vl-7b, llava-1.5-7b, llava-1.5-13b, pixtral-12b"
BATCH, CONTEXT, NEW_TOKENS, POLICIES, BUDGETS = "1,8", "1024", "32", "elastic,snapkv", "0.2"


def settings(
    device: str | None,
    dtype: str | None,
    offline: bool | None,
    trust_remote_code: bool | None,
    quiet: bool,
    verbose: int,
) -> Resolved:
    from kvcli.cli.settings import resolve

    flags: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "offline": offline,
        "trust_remote_code": trust_remote_code,
    }
    flags |= {"quiet": quiet or None, "verbose": verbose or None}
    return resolve({name: value for name, value in flags.items() if value is not None})


def number(flag: str, text: str, low: int = 1) -> int:
    return int(_checked(flag, kinds.integer(low), text))


def budgets(text: str | None) -> list[float | int]:
    return [_checked("--budgets", kinds.BUDGET, part) for part in study.words(text or BUDGETS)]


def weights(text: str) -> str:
    return str(_checked("--weights", kinds.choice("plain", "packed"), text))


def _checked(flag: str, kind: Kind, text: str) -> Any:
    try:
        return kind.convert(text)
    except ValueError as error:
        raise UsageError(f"{flag} {error}, not {text}") from error


def cases(text: str | None, peers: bool) -> list[str]:
    """Which cases to measure: all without a word, none beside --peers alone."""
    if text is None:
        return [] if peers else list(CASES)
    names = study.words(text)
    for name in names:
        if name not in (*CASES, "all"):
            raise UsageError(f"--targets has no {name}; it is all, or some of {', '.join(CASES)}")
    return list(CASES) if "all" in names else names


def check_policies(names: list[str], budgets: list[float | int], contexts: list[int]) -> None:
    """Refuse, before anything is built, a policy or a budget that makes no sense."""
    from kvcli.policies import create

    for name in names:
        for budget in budgets:
            for context in contexts:
                create(name, budget=budget).target(context)


def writable(path: str | None, end: str) -> None:
    if path is None:
        return
    if not path.endswith(end):
        raise UsageError(f"{path} must end in {end}")
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"{path} can't be written: its folder is not there")
