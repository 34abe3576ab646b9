"""`kvcli profile`: where the model looks, what a policy throws away, and what that will bring."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import errors, run, study
from kvcli.cli.options import picture_command
from kvcli.cli.settings import Resolved
from kvcli.cli.terminal import Terminal
from kvcli.errors import PictureError, UsageError

if TYPE_CHECKING:
    from kvcli.engine.session import Outcome, Prepared, Session
    from kvcli.policies.base import Policy
    from kvcli.report.forecast import Load
    from kvcli.report.portrait import Portrait

PANEL = "Profile"


@picture_command("dry_run", "sidecar", "ordered", "fail_fast", "max_errors", "jsonl", "resume", "top_p", "seed")
def profile(
    inputs: list[str],
    settings: Resolved,
    *,
    policies: Annotated[
        str | None,
        typer.Option("--policies", metavar="A,B,...", help="More policies for the timeline.", rich_help_panel=PANEL),
    ] = None,
    forecast: Annotated[
        bool, typer.Option("--forecast", help="Stop after the forecast: nothing is run.", rich_help_panel=PANEL)
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="24GiB",
            help="Memory limit for the largest batch.",
            rich_help_panel=PANEL,
            show_default="what is free",
        ),
    ] = None,
) -> int:
    """Show where a model looks in a picture, layer by layer, and what a policy keeps of it.

    kvcli profile cat.jpg --policy elastic --budget 0.2 -o cat-profile/

    kvcli profile cat.jpg --forecast --memory 24GiB --batch-size 16

    Attention is that of a run with the full cache, shown against that of the same answer over a grey picture.
    """
    screen, clock = run.terminal(settings), run.Clock()
    study.greedy(settings, "profile")
    limit = None if memory is None else study.memory(memory)
    policy = run.make_policy(settings)
    others = [study.make_policy(name, settings, settings.budget) for name in study.words(policies or "full")]
    prompt = run.read_prompt(inputs, settings)
    jobs = list(study.only_jobs(run.find_jobs(inputs, settings), screen))
    if len(jobs) != 1:
        raise UsageError(f"profile looks at one picture, not {len(jobs)}; or at several in one prompt with --together")
    folder = None if forecast else study.empty_folder(settings)
    try:
        opened = study.open_job(jobs[0], prompt, settings, screen)
    except PictureError as error:
        screen.error(f"{jobs[0].id}: {error}")
        return errors.ALL_FAILED
    with run.stdout_is_data():
        session = run.load_session(settings, screen, clock)
        prepared = session.prepare(opened.request)
        load = expect(session, prepared, policy, settings)
    free = session.free_bytes() + load.weights if limit is None else limit
    facts = _facts(opened, session, settings, load, free)
    if not settings.json:
        _tell_forecast(load, policy, settings, free)
    if forecast:
        if settings.json:
            _print_json(facts)
        return errors.OK
    with run.stdout_is_data():
        portraits = _portraits(session, prepared, policy, others, settings, facts, screen)
    if folder is not None:
        from kvcli.report import portrait

        for number, each in enumerate(portraits, 1):
            place = folder if len(portraits) == 1 else folder / f"picture-{number}"
            place.mkdir(exist_ok=True)
            written = portrait.write(each, place, facts)
            screen.note(f"{len(written)} files in {place}")
    if settings.json:
        from kvcli.report import portrait

        _print_json(portrait.numbers(portraits[0], facts))
    else:
        _tell(portraits[0], settings)
    return errors.OK


def expect(session: Session, prepared: Prepared, policy: Policy, settings: Resolved) -> Load:
    """The numbers that a forecast is made from; nothing is run."""
    import torch

    from kvcli.policies import create
    from kvcli.policies.contract import Prompt
    from kvcli.report.forecast import Load

    decoding, full = run.make_decoding(settings), create("full")
    told = Prompt(torch.ones(1, 1), torch.zeros(1, 1), (prepared.length,), decoding.max_new_tokens)
    frees = policy.frees_memory
    weights, read = weight_bytes(session.model)
    return Load(
        weights=weights,
        weights_read=read,
        bytes_per_token=session.bytes_per_token(),
        prompt=prepared.length,
        new_tokens=decoding.max_new_tokens,
        kept=policy.target(prepared.length) if frees else prepared.length,
        growth=policy.growth(told) if frees else decoding.max_new_tokens,
        peak_full=session.batch_bytes([prepared.length], full, decoding),
        peak=session.batch_bytes([prepared.length], policy, decoding),
    )


def weight_bytes(model: Any) -> tuple[int, int]:
    """(all weights, those that every step reads: the text model and the output layer, but no table of embeddings)."""
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    read = {id(p): p for p in model.get_decoder().parameters()}
    read.pop(id(getattr(table, "weight", None)), None)
    if output is not None:
        read |= {id(p): p for p in output.parameters()}
    return everything, sum(p.numel() * p.element_size() for p in read.values())


def _portraits(
    session: Session,
    prepared: Prepared,
    policy: Policy,
    others: list[Policy],
    settings: Resolved,
    facts: dict[str, Any],
    screen: Terminal,
) -> list[Portrait]:
    """One for each picture of the prompt; facts are completed with the answers."""
    import numpy as np

    from kvcli.engine.looking import look
    from kvcli.engine.recording import record
    from kvcli.report.portrait import Portrait

    decoding, recorded = run.make_decoding(settings), record(policy)
    seen = look(session, prepared, decoding)
    own = session.run([prepared], recorded, decoding)[0]
    steps = {"full": _bytes(seen.outcome), _label(policy): _bytes(own)}
    for other in others:
        if _label(other) not in steps:
            steps[_label(other)] = _bytes(session.run([prepared], other, decoding)[0])
    facts |= {"answer_full": seen.outcome.text, "answer": own.text}
    runs = (seen.trace, seen.blank, recorded.trace(), steps)
    pictures = prepared.request.images
    if seen.boxes is None:
        screen.note("which token sees what is not known for this model: numbers only, no pictures")
        return [Portrait(pictures[0], None, 0, *runs)]
    starts = np.cumsum([0, *map(len, seen.boxes)]).tolist()
    return [
        Portrait(picture, each.double().numpy(), start, *runs)
        for picture, each, start in zip(pictures, seen.boxes, starts[:-1], strict=True)
    ]


def _facts(opened: study.Opened, session: Session, settings: Resolved, load: Load, memory: int) -> dict[str, Any]:
    from kvcli.report import forecast

    return {
        "id": opened.job.id,
        "sha256": [image.sha256 for image in opened.images],
        "model": session.model_name,
        "revision": session.revision,
        "device": str(session.device),
        "dtype": str(session.dtype).removeprefix("torch."),
        "prompt": opened.request.prompt,
        "decoding": dataclasses.asdict(run.make_decoding(settings)),
        "forecast": forecast.as_json(load, settings.batch_size or 1, memory),
    }


def _tell_forecast(load: Load, policy: Policy, settings: Resolved, memory: int) -> None:
    from kvcli.report import forecast, terminal, units

    out, batch = study.console(settings), settings.batch_size or 1
    out.print(
        f"weights {units.size(load.weights)}, of which a step reads {units.size(load.weights_read)}; "
        f"cache {units.size(load.bytes_per_token)} a token"
    )
    out.print(terminal.forecast_table(load, batch, memory, study.plain(settings)))
    out.print(forecast.verdict(load, batch))
    if policy.budget is None:
        out.print(f"{policy.name} decides by itself how much it keeps: give --budget for a forecast of its gain")
    out.print()


def _tell(portrait: Portrait, settings: Resolved) -> None:
    from kvcli.report import terminal

    out, plain = study.console(settings), study.plain(settings)
    out.print(terminal.attention_map(portrait.looked, out.width, plain))
    out.print(terminal.kept_map(portrait.acted, out.width, plain))
    out.print(terminal.layer_table(portrait.acted, plain))
    out.print(terminal.timeline(portrait.steps, out.width, plain))


def _label(policy: Policy) -> str:
    from kvcli.report import units

    return policy.name if policy.name == "full" else f"{policy.name} {units.budget(policy.budget)}"


def _bytes(outcome: Outcome) -> list[int]:
    return [step.bytes_used for step in outcome.steps]


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value, indent=1, allow_nan=False))
