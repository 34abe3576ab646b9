"""`kvcli bench`: how fast prefill and decode are, what they hold, and whether that is what was aimed at."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import bench_flags as flags
from kvcli.cli import errors, run, study
from kvcli.cli.terminal import Interrupts, Terminal, duration
from kvcli.errors import KvcliError, UsageError

if TYPE_CHECKING:
    from kvcli.bench.suite import Setting
    from kvcli.cli.settings import Resolved

JSON = dict[str, Any]
WORK, MEASURE, OUTPUT = "Work of your own", "Measuring", "Output"
PAPERS_SHAPE = "llava-1.5-7b"


def _option(panel: str, *names: str, metavar: str | None = None, help: str, shown: str | bool = False) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_default=shown)


def bench(
    targets: Annotated[
        str | None,
        _option(
            "Targets", "--targets", metavar="A,B,...", help=f"Some of {', '.join(flags.CASES)}; or all.", shown="all"
        ),
    ] = None,
    peers: Annotated[
        bool, _option("Targets", "--peers", help="kvpress beside ours, in an environment made for it (downloads).")
    ] = False,
    shape: Annotated[
        str | None,
        _option(
            WORK, "--shape", metavar="NAME", help=f"Random weights of a shape: {flags.SHAPES}.", shown="smollm2-135m"
        ),
    ] = None,
    model: Annotated[str | None, _option(WORK, "--model", metavar="ID|DIR", help="A real model instead.")] = None,
    layers: Annotated[
        int | None, _option(WORK, "--layers", help="Only so many layers of the shape.", shown="what fits")
    ] = None,
    batch: Annotated[str | None, _option(WORK, "--batch", metavar="N,...", help="Rows.", shown=flags.BATCH)] = None,
    context: Annotated[
        str | None, _option(WORK, "--context", metavar="N,...", help="Prompt tokens.", shown=flags.CONTEXT)
    ] = None,
    new_tokens: Annotated[
        str | None,
        _option(
            WORK,
            "--new-tokens",
            metavar="N",
            help="Answer tokens; some in the middle are timed.",
            shown=flags.NEW_TOKENS,
        ),
    ] = None,
    policies: Annotated[
        str | None, _option(WORK, "--policies", metavar="A,B,...", help="Policies beside full.", shown=flags.POLICIES)
    ] = None,
    budgets: Annotated[
        str | None, _option(WORK, "--budgets", metavar="X,Y,...", help="What each keeps.", shown=flags.BUDGETS)
    ] = None,
    papers: Annotated[
        bool,
        _option(WORK, "--papers", help="The published shapes: 8 x 1024+512, 16 x 624+256, 16 x 1024+512, keep 0.2."),
    ] = False,
    memory: Annotated[
        str | None,
        _option(
            WORK, "--memory", metavar="16GB", help="Memory limit for the largest batch.", shown="what the device has"
        ),
    ] = None,
    device: Annotated[str | None, _option(MEASURE, "--device", metavar="TEXT", help="As for describe.")] = None,
    dtype: Annotated[str | None, _option(MEASURE, "--dtype", metavar="WORD", help="As for describe.")] = None,
    weights: Annotated[
        str,
        _option(MEASURE, "--weights", metavar="WORD", help="plain, or packed: ours in oneDNN's order.", shown=True),
    ] = "plain",
    threads: Annotated[
        str | None, _option(MEASURE, "--threads", metavar="N", help="Threads on a CPU.", shown="torch's own")
    ] = None,
    repeats: Annotated[
        str, _option(MEASURE, "--repeats", metavar="N", help="Rounds in which the arms take turns.", shown=True)
    ] = "3",
    steps: Annotated[
        str, _option(MEASURE, "--steps", metavar="N", help="Steps that are timed in a round.", shown=True)
    ] = "32",
    quick: Annotated[bool, _option(MEASURE, "--quick", help="One round of 8 steps: a first impression.")] = False,
    offline: Annotated[bool | None, _option(MEASURE, "--offline", help="Never use the network.")] = None,
    trust_remote_code: Annotated[
        bool | None, _option(MEASURE, "--trust-remote-code", help="Run code that comes with the model.")
    ] = None,
    as_json: Annotated[bool, _option(OUTPUT, "--json", help="One JSON document on stdout.")] = False,
    plot: Annotated[str | None, _option(OUTPUT, "--plot", metavar="FILE.png", help="Also plot the steps.")] = None,
    page: Annotated[
        str | None, _option(OUTPUT, "--page", metavar="FILE.md", help="Also write all tables as a page.")
    ] = None,
    quiet: Annotated[bool, _option(OUTPUT, "-q", "--quiet", help="Only errors on stderr.")] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "-v", "--verbose", count=True, help="-vv: tracebacks.", rich_help_panel=OUTPUT, show_default=False
        ),
    ] = 0,
) -> None:
    """Measure speed and memory against stock caches, and say what was aimed at and what falls short.

    kvcli bench

    kvcli bench --shape llava-1.5-7b --batch 1,8 --context 1024 --budgets 0.5,0.2 --memory 24GB

    kvcli bench --papers

    kvcli bench --peers

    Caches are filled without a prompt and a few steps are timed; arms take turns. Ctrl-C keeps what was measured.
    """
    own = {
        "--shape": shape,
        "--model": model,
        "--layers": layers,
        "--batch": batch,
        "--context": context,
        "--new-tokens": new_tokens,
        "--policies": policies,
        "--budgets": budgets,
        "--papers": papers or None,
    }
    given = [name for name, value in own.items() if value is not None]
    if given and (targets or peers):
        raise UsageError(f"the targets have work of their own: leave out {given[0]}, or --targets and --peers")
    if model and (shape or layers):
        raise UsageError("--model is a whole model; --shape and --layers are for random weights")
    for name in ("--batch", "--context", "--new-tokens", "--budgets"):
        if papers and own[name] is not None:
            raise UsageError(f"--papers says what is run: leave out {name}")
    for path, end in ((plot, ".png"), (page, ".md")):
        flags.writable(path, end)
    answer = flags.number("--new-tokens", new_tokens or flags.NEW_TOKENS)
    works = [
        (flags.number("--batch", rows), flags.number("--context", columns, 8), answer)
        for rows in study.words(batch or flags.BATCH)
        for columns in study.words(context or flags.CONTEXT)
    ]
    names, shares = study.words(policies or flags.POLICIES), flags.budgets(budgets)
    cases = flags.cases(targets, peers)
    settings = flags.settings(device, dtype, offline, trust_remote_code, quiet, verbose)
    screen = run.terminal(settings)
    counts = (1, 8) if quick else (flags.number("--repeats", repeats), flags.number("--steps", steps, 2))
    limit = None if memory is None else study.memory(memory)
    packed = flags.weights(weights) == "packed"
    used = None if threads is None else flags.number("--threads", threads)
    flags.check_policies(names, shares, [c for _, c, _ in works])
    with run.stdout_is_data(), Interrupts(screen) as interrupts:
        setting = _setting(settings, screen, interrupts, counts, limit, used, packed)
        document = _document(setting)
        failure: Exception | None = None
        try:
            if given:
                chosen = (names, shares, papers)
                _own_work(document, setting, settings, shape, model, layers, works, chosen)
            else:
                _targets(document, setting, cases, peers)
        except KeyboardInterrupt:
            interrupts.asked = True
        except (KvcliError, RuntimeError) as error:  # RuntimeError: out of memory, among others
            if not document["sections"]:
                raise
            failure = error
        document["complete"] = failure is None and not interrupts.asked
        if not given:
            from kvcli.bench.suite import judge

            judge(document)
    _tell(document, settings, screen, as_json, plot, page)
    if failure is not None:
        raise failure
    if interrupts.asked:
        raise typer.Exit(errors.INTERRUPTED)


def _targets(document: JSON, setting: Setting, cases: list[str], peers: bool) -> None:
    from kvcli.bench import suite

    suite.run_targets(document, setting, cases)
    if peers and not setting.stop():
        from kvcli.bench import peers as beside

        beside.run(document, setting)


def _own_work(
    document: JSON,
    setting: Setting,
    settings: Resolved,
    shape: str | None,
    model: str | None,
    layers: int | None,
    works: list[tuple[int, int, int]],
    chosen: tuple[list[str], list[float | int], bool],
) -> None:
    from kvcli.bench import shapes, suite

    names, shares, papers = chosen
    if papers:
        works, shares = list(suite.PAPERS), [0.2]
    if model is not None:
        how = {"offline": settings.offline, "trust_remote_code": settings.trust_remote_code}
        measured, sized = suite.loaded_model(model, setting, **how)
    else:
        sized = shapes.find(shape or (PAPERS_SHAPE if papers else "smollm2-135m"))
        sized = suite.fitted(sized, works, setting) if layers is None else sized.cut(layers)
        measured = suite.random_model(sized, setting)
    planned = [suite.work(sized, *each, setting) for each in works]
    suite.run_works(document, setting, measured, sized, planned, suite.arms(names, shares, {}))


def _setting(
    settings: Resolved,
    screen: Terminal,
    interrupts: Interrupts,
    counts: tuple[int, int],
    memory: int | None,
    threads: int | None,
    packed: bool,
) -> Setting:
    run.quieten(settings)
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts bytes would tell of itself
    import torch
    from transformers.utils import logging

    from kvcli.bench.suite import Setting
    from kvcli.engine.loading import choose_device, choose_dtype

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(settings.device)
    number, reason = choose_dtype(settings.dtype, device, None)
    clock = run.Clock()
    setting = Setting(device, number, *counts, memory, packed, _Telling(screen, clock), lambda: interrupts.asked)
    screen.note(f"{device}, {str(number).removeprefix('torch.')} ({reason}), {torch.get_num_threads()} threads")
    return setting


class _Telling:
    """Progress, line by line, each with the time since the start."""

    def __init__(self, screen: Terminal, clock: run.Clock) -> None:
        import time

        self._screen, self._now, self._started = screen, time.monotonic, time.monotonic()

    def __call__(self, text: str) -> None:
        if self._screen.shows_progress:
            self._screen.note(f"{duration(self._now() - self._started)}: {text}")


def _document(setting: Setting) -> JSON:
    from kvcli.bench import suite

    return suite.new(setting, shlex.join(["kvcli", *sys.argv[1:]]))


def _tell(
    document: JSON, settings: Resolved, screen: Terminal, as_json: bool, plot: str | None, page: str | None
) -> None:
    from kvcli.report import speed

    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        out, plain = study.console(settings), study.plain(settings)
        out.print(speed.machine(document))
        for grid in speed.grids(document):
            out.print()
            out.print(speed.table(grid, plain))
            for note in grid.notes:
                out.print(f"  {note}")
    if page is not None:
        Path(page).write_text(speed.markdown(document), encoding="utf-8")
        screen.note(f"page: {page}")
    if plot is not None:
        from kvcli.report import figures, speed_plot

        figure = speed_plot.steps(document)
        if figure is None:
            screen.note("no steps were timed: nothing to plot")
        else:
            figures.save(figure, Path(plot))
            screen.note(f"plot: {plot}")
