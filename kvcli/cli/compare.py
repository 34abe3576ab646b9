"""`kvcli compare`: several policies and budgets on the same pictures, what each one writes, costs and saves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import errors, run, study, subjects
from kvcli.cli.options import picture_command
from kvcli.cli.settings import Resolved
from kvcli.cli.terminal import Interrupts, Terminal
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.comparison import Comparison, Measured, Subject
    from kvcli.engine.session import Session
    from kvcli.policies.base import Policy
    from kvcli.records import JSON
    from kvcli.report.page import Search

PANEL = "Compare"
POLICIES = ("elastic", "hae", "h2o", "streaming")
BUDGETS = "0.5,0.2,0.1"


def _option(*names: str, metavar: str | None = None, help: str, shown: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=PANEL, show_default=shown or False)


@picture_command("dry_run", "sidecar", "ordered", "fail_fast", "max_errors", "top_p", "seed")
def compare(
    inputs: list[str],
    settings: Resolved,
    *,
    policies: Annotated[
        str | None, _option("--policies", metavar="A,B,...", help="Policies to compare.", shown="the best known")
    ] = None,
    budgets: Annotated[
        str | None, _option("--budgets", metavar="X,Y,...", help="Budgets of each policy.", shown=BUDGETS)
    ] = None,
    references: Annotated[
        str | None,
        _option("--references", metavar="FILE.jsonl", help="Perplexity of these answers, not of the full cache's."),
    ] = None,
    report: Annotated[
        str | None, _option("--report", metavar="FILE.html", help="Also write one self-contained page.")
    ] = None,
    details: Annotated[int, _option("--details", metavar="N", help="Pictures shown on the page.", shown="6")] = 6,
    auto: Annotated[
        float | None,
        _option("--auto", metavar="TOLERANCE", help="Find the smallest budget: 0.05 allows 5 % more perplexity."),
    ] = None,
    csv: Annotated[bool, _option("--csv", help="The table as CSV on stdout.")] = False,
) -> int:
    """Compare policies and budgets on the same pictures, against the full cache of the same model.

    kvcli compare cat.jpg --policies elastic,h2o,streaming --budgets 0.5,0.2 --report cat.html

    kvcli compare photos/ -r -o compared.jsonl --resume

    kvcli compare photos/ --auto 0.05

    Answers are greedy. With -o FILE.jsonl each result is on disk at once, and --resume goes on.
    """
    screen, clock = run.terminal(settings), run.Clock()
    study.greedy(settings, "compare")
    if settings.json + settings.jsonl + csv > 1:
        raise UsageError("--json, --jsonl and --csv exclude each other")
    page = _page_path(report, settings)
    names = study.words(policies) if policies else _known()
    shares = study.words(budgets) if budgets else [settings.budget] if settings.budget else study.words(BUDGETS)
    found = _policies(names, shares, settings)
    given = subjects.read_references(references) if references else None
    prompt = run.read_prompt(inputs, settings)
    jobs = list(study.only_jobs(run.find_jobs(inputs, settings), screen))
    with contextlib.ExitStack() as stack:
        known, write = subjects.record_file(settings, stack)
        with run.stdout_is_data():
            session = run.load_session(settings, screen, clock)

        def pictures() -> Iterator[Subject]:
            return subjects.opened(jobs, prompt, settings, screen, given)

        search = None
        if auto is not None:
            with run.stdout_is_data():
                search = find_budgets(session, pictures(), names, settings, auto, screen)
            found = _policies(["full"], [], settings) + [
                study.make_policy(name, settings, share) for name, (share, _) in search.found.items()
            ]
        work = _work(found, settings)
        entries: list[JSON] = []
        asked = _measure(session, pictures, work, known, entries, write, screen, settings, named=len(jobs))
        if page is not None:
            with run.stdout_is_data():
                _write_page(page, session, pictures, work, entries, settings, details, search, given is not None)
            screen.note(f"page: {page}")
    _tell(entries, settings, search, csv=csv)
    return errors.INTERRUPTED if asked else _exit_code(entries)


def find_budgets(
    session: Session,
    pictures: Iterator[Subject],
    names: list[str],
    settings: Resolved,
    tolerance: float,
    screen: Terminal,
) -> Search:
    """The smallest budget of each policy within the tolerance."""
    from kvcli import comparison
    from kvcli.report.page import Search

    if tolerance < 0:
        raise UsageError(f"--auto {tolerance:g}: a tolerance is 0 or more")
    full = comparison.baseline(session, pictures, _work([], settings))
    if not full.batches:
        raise UsageError("--auto needs at least one picture that can be read")
    found = {}
    for name in names:
        if name != "full":
            make = lambda share, name=name: study.make_policy(name, settings, share)  # noqa: E731
            found[name] = comparison.smallest_budget(session, full, make, tolerance)
            screen.note(f"{name}: {found[name][0]:.3g} is the smallest budget with a loss of at most {tolerance:g}")
    return Search(tolerance, found)


def _known() -> list[str]:
    from kvcli import policies

    return [name for name in POLICIES if name in policies.names()]


def _policies(names: list[str], budgets: list[Any], settings: Resolved) -> list[Policy]:
    """The full cache first, then every policy with every budget."""
    rest = [study.make_policy(name, settings, share) for name in names if name != "full" for share in budgets]
    return [study.make_policy("full", settings), *rest]


def _work(found: list[Policy], settings: Resolved) -> Comparison:
    from kvcli.comparison import Comparison

    return Comparison(tuple(found), run.make_decoding(settings), settings.batch_size or 1)


def _measure(
    session: Session,
    pictures: Any,
    work: Comparison,
    known: dict[bytes, JSON],
    entries: list[JSON],
    write: Any,
    screen: Terminal,
    settings: Resolved,
    *,
    named: int,
) -> bool:
    """Run everything into `entries` and the file; True when the user asked to stop. named: how many pictures."""
    from kvcli import comparison, records

    tell, steps = (screen.note if named == 1 else screen.detail), named * len(work.policies)
    with Interrupts(screen) as interrupts, screen.progress((lambda: steps) if named > 1 else None, unit="run"):
        measured = comparison.run(session, pictures(), work, done=known, stop=lambda: interrupts.asked)
        while True:
            with run.stdout_is_data():
                each = next(measured, None)
            if each is None:
                break
            entries.append(each.record)
            if each.fresh:
                write(each.record)
            if settings.jsonl:
                sys.stdout.buffer.write(records.encode(each.record) + b"\n")
                sys.stdout.buffer.flush()
            _tell_record(each, tell, screen)
            screen.settled(failed=bool(each.record["error"]))
    return interrupts.asked


def _tell_record(each: Measured, tell: Callable[[str], None], screen: Terminal) -> None:
    """What stderr says about one record; a picture that failed is named once."""
    from kvcli.report.summary import label

    entry = each.record
    if entry["error"]:
        if entry["policy"]["name"] == "full":
            screen.error(f"{entry['id']}: {entry['error']['message']}")
    elif each.fresh:
        tell(f"{entry['id']}, {label(entry['policy'])}: perplexity {entry['fidelity']['perplexity']:.3f}")


def _write_page(
    path: Path,
    session: Session,
    pictures: Any,
    work: Comparison,
    entries: list[JSON],
    settings: Resolved,
    details: int,
    search: Search | None,
    given: bool,
) -> None:
    from kvcli import comparison, fidelity
    from kvcli.engine.looking import look
    from kvcli.report import page, summary
    from kvcli.report.portrait import Portrait

    by_id: dict[tuple[int, str], list[JSON]] = {}
    for entry in entries:
        if not entry["error"]:
            by_id.setdefault((entry["index"], entry["id"]), []).append(entry)
    shown: list[page.Shown] = []
    for subject in pictures():
        if len(shown) == details:
            break
        mine = by_id.get((subject.index, subject.id))
        if not mine:
            continue
        prepared, looked = session.prepare(subject.request), None
        seen = look(session, prepared, fidelity.greedy(work.decoding))
        if seen.boxes is not None:
            first = seen.boxes[0].double().numpy()
            looked = Portrait(subject.request.images[0], first, 0, seen.trace, seen.blank, seen.trace, {})
        traces = comparison.held_after_prompt(session, prepared, work.policies)
        names = (summary.label({"name": p.name, **p.resolved()}) for p in work.policies)
        kept = {n: t for n, t in zip(names, traces, strict=True) if n != "full"}
        shown.append(page.Shown(subject.request.images[0], mine, looked, kept))
    facts = {
        "model": session.model_name,
        "revision": session.revision[:12],
        "device": f"{session.device}, {str(session.dtype).removeprefix('torch.')}",
        "pictures": len(by_id),
        "new tokens": f"at most {work.decoding.max_new_tokens}",
        "prompt": entries[0]["prompt"] if entries else "",
    }
    text = page.render(
        "kvcli compare", facts, summary.rows(entries), shown, given=given, more=len(by_id) - len(shown), search=search
    )
    path.write_text(text, encoding="utf-8")


def _tell(entries: list[JSON], settings: Resolved, search: Search | None, *, csv: bool) -> None:
    """The result on stdout, in the form that was asked for."""
    from kvcli.report import side_by_side, summary

    rows = summary.rows(entries)
    if settings.jsonl:
        return
    if csv:
        sys.stdout.write(summary.as_csv(rows))
    elif settings.json:
        auto = None if search is None else dataclasses.asdict(search)
        print(json.dumps({"table": summary.as_json(rows), "auto": auto, "records": entries}, indent=1))
    else:
        out, plain = study.console(settings), study.plain(settings)
        good = [e for e in entries if not e["error"]]
        places = list(dict.fromkeys((e["index"], e["id"]) for e in good))
        if len(places) == 1:
            out.print(side_by_side.answers(good, out.color_system is not None))
        if search is not None:
            out.print(side_by_side.searches(search.found, search.tolerance, plain))
        for table in side_by_side.tables(rows, plain) if rows else ():
            out.print(table)
        stars = ["* the best of its budget"] if any(row.best for row in rows) else []
        for remark in stars + side_by_side.remarks(rows):
            out.print(remark.replace("±", "+-") if plain else remark)


def _page_path(report: str | None, settings: Resolved) -> Path | None:
    if report is None:
        return None
    path = Path(report)
    if path.exists() and not (settings.overwrite or settings.resume):
        raise UsageError(f"--report {path} exists: use --overwrite, or another name")
    if not path.parent.is_dir():
        raise UsageError(f"--report {path}: there is no folder {path.parent}")
    return path


def _exit_code(entries: list[JSON]) -> int:
    failed = sum(bool(entry["error"]) for entry in entries)
    if not failed:
        return errors.OK
    return errors.ALL_FAILED if failed == len(entries) else errors.SOME_FAILED
