"""The speed bench: its arithmetic by hand, its caches against real runs, and what the command promises."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

from kvcli import policies
from kvcli.bench import limits, memory, peers, results, running, shapes, speed, suite, synthetic, targets
from kvcli.bench.shapes import SHAPES, Shape
from kvcli.bench.speed import Arm, Measured, Work
from kvcli.cli import bench_flags
from kvcli.cli.app import app
from kvcli.engine.adapter import entry_bytes
from kvcli.engine.packed import pack
from kvcli.engine.rotary import Rotator
from kvcli.engine.session import Decoding, Request, Session
from kvcli.errors import StartError, UsageError
from kvcli.report import speed as tables

CPU = torch.device("cpu")
SMALL = Shape("small", 3, 32, 64, 4, 2, 8, 96, True)


@pytest.fixture(scope="module")
def model() -> Any:
    return shapes.build(SMALL, torch.float32, CPU)


# --- shapes


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_knows_its_weights_and_entries(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        built = LlamaForCausalLM(shape.config())
    assert shape.numbers == sum(p.numel() for p in built.parameters())
    assert sum(entry_bytes(built.config, torch.float16)) == shape.layers * shape.entry_numbers * 2
    assert shapes.of_config(name, built.config) == shape


def test_published_sizes() -> None:
    assert SHAPES["llava-1.5-7b"].layers * SHAPES["llava-1.5-7b"].entry_numbers * 2 == 512 * 1024
    assert SHAPES["qwen2.5-vl-7b"].layers * SHAPES["qwen2.5-vl-7b"].entry_numbers * 2 == 56 * 1024
    assert 134e6 < SHAPES["smollm2-135m"].numbers < 135e6


def test_a_shape_that_is_too_large_runs_with_fewer_layers() -> None:
    shape = SHAPES["llava-1.5-7b"]
    fitted = shape.fitted(16 * 2**30, 16 * 1536, 4)
    assert fitted.is_cut
    assert 1 <= fitted.layers <= shapes.CUT_LAYERS
    assert fitted.whole == 32
    assert fitted.layers * (fitted.layer_numbers + 16 * 1536 * fitted.entry_numbers) * 4 < 16 * 2**30
    assert not shape.fitted(2**40, 16 * 1536, 4).is_cut
    with pytest.raises(UsageError, match="32 layers"):
        shape.cut(33)


# --- arithmetic


def test_the_limit_of_a_step_by_hand() -> None:
    shape = Shape("hand", 2, 4, 8, 2, 1, 2, 10, True)
    layer = 2 * 4 * 2 * (2 + 1) + 3 * 4 * 8 + 2 * 4
    work = limits.step(shape, batch=3, kept=5, itemsize=4)
    read = 2 * layer + 10 * 4
    assert work.read == (read + 3 * 5 * 2 * 4) * 4
    assert work.written == 3 * 2 * 4 * 4
    assert work.operations == 3 * (2 * read + 5 * 4 * 2 * 2 * 2)
    memory_bound = limits.Machine(bandwidth=1e3, rate=1e12, dispatch=0.5)
    assert limits.seconds(work, memory_bound) == pytest.approx((work.read + work.written) / 1e3 + 0.5)
    compute_bound = limits.Machine(bandwidth=1e12, rate=1e3, dispatch=0.25)
    assert limits.seconds(work, compute_bound) == pytest.approx(work.operations / 1e3 + 0.25)


def test_the_largest_batch_by_hand() -> None:
    assert limits.largest_batch(100, 20, 9.9) == 8
    assert limits.largest_batch(10, 20, 1) == 0


def measured(seconds: dict[str, list[float]]) -> list[Measured]:
    ours = {speed.FULL: speed.full(), targets.OURS: speed.compressed("elastic", 0.2)}
    return [Measured(ours.get(name, Arm(name)), step_seconds=times, kept=10.0) for name, times in seconds.items()]


TIMES = {
    "dynamic": [12.0, 24.0, 12.0],
    "static": [5.0, 10.0, 5.0],
    "preallocated": [6.0, 12.0, 6.0],
    "full": [4.0, 8.0, 4.0],
    targets.OURS: [2.0, 4.0, 1.0],
}


def test_gains_are_split_and_taken_within_a_round() -> None:
    found = measured(TIMES)
    gain = results.gains(found[-1], found)
    assert gain["over_default"] == (6.0, 6.0, 12.0)
    assert gain["fastest_stock"] == "static"
    assert gain["over_fastest"] == (2.5, 2.5, 5.0)
    parts = [gain[name][0] for name in ("preallocation", "packing", "compression")]
    assert parts == [2.0, 1.5, 2.0]
    assert math.prod(parts) == gain["over_default"][0]


def section(seconds: dict[str, list[float]] = TIMES) -> dict[str, Any]:
    machine = limits.Machine(bandwidth=1.0, rate=1e30, dispatch=0.0)
    return results.section(Work(16, 64, rounds=3), SMALL, 4, measured(seconds), machine, 2**30)


def test_promises_are_judged() -> None:
    rows = {row.target.text: row for row in targets.judged({"decode-16x1024": section()})}
    assert {row.verdict for text, row in rows.items() if "8 x 4096" in text or "kvpress" in text} == {"not measured"}
    default = rows["decode over stock's default, batch 16 x 1024"]
    assert (default.value, default.low, default.high, default.verdict) == (6.0, 6.0, 12.0, "pass")
    slower = {**TIMES, targets.OURS: [5.0, 10.0, 5.0]}
    rows = {row.target.text: row for row in targets.judged({"decode-16x1024": section(slower)})}
    assert rows["decode over stock's default, batch 16 x 1024"].verdict == "falls short"
    assert rows["compression alone (over ours full), 16 x 1024"].value == 0.8
    bound = targets.Target("x", "y", "at most", 1.6, lambda found: None)
    assert bound.holds(1.6)
    assert not bound.holds(1.61)


def test_the_limit_is_judged_for_full_and_kept() -> None:
    found = section()
    rows = {row.target.text: row for row in targets.judged({"decode-16x1024": found})}
    for text, name in (("ours full", "full"), ("kept 0.2", targets.OURS)):
        row = rows[f"decode over its limit, {text}, 16 x 1024"]
        assert (row.value, row.low, row.high) == tuple(results.arm(found, name)["over_limit"])


def test_prefill_on_top_is_a_percentage_with_its_spread() -> None:
    found = [
        Measured(Arm("dynamic"), prefill_seconds=[1.0, 1.0, 1.0]),
        Measured(speed.column_sums(), prefill_seconds=[1.08, 1.05, 1.2]),
    ]
    done = {"prefill-1k": results.section(Work(1, 1024), SMALL, 4, found)}
    row = next(row for row in targets.judged(done) if row.target.text.startswith("column sums"))
    assert (row.value, row.low, row.high) == pytest.approx((8.0, 5.0, 20.0))
    assert row.verdict == "pass"


def test_the_peers_are_judged_by_the_worst_press() -> None:
    def press(batch: int, name: str, prefill: float, decode: float) -> dict[str, Any]:
        return {"batch": batch, "press": name, "prefill": (prefill,) * 3, "decode": (decode,) * 3}

    presses = [
        press(batch, pair.press, 1.1 + number, 1.2 + number)
        for batch in (1, 8)
        for number, pair in enumerate(peers.PAIRS)
    ]
    found = peers.ratios(presses)
    assert found["batch_1"][0] == 1.1
    assert found["decode_8"][0] == 1.2
    assert found["observed_prefill"][0] == 3.1
    assert peers.ratios(presses[:-1])["decode_8"] is None
    rows = {row.target.text: row for row in targets.judged({"peers": {"ratios": found}})}
    assert rows["kvpress's decode over ours, batch 8 (worst)"].verdict == "falls short"
    assert rows["kvpress's prefill over ours, observed attention"].verdict == "pass"


def test_each_pair_keeps_alike() -> None:
    for pair in peers.PAIRS:
        assert pair.ours().target(1000) == 200
        assert not pair.ours().acts_in_decode


# --- bytes


def test_live_bytes_are_counted() -> None:
    def run(held: torch.Tensor) -> torch.Tensor:
        torch.empty(2_000_000)
        return torch.empty(250_000)

    for _ in range(2):
        found = memory.measure(CPU, lambda: torch.empty(500_000), run)
        assert (found.before, found.peak, found.after) == (2_000_000, 10_000_000, 3_000_000)


@pytest.mark.parametrize("name", ["elastic", "snapkv", "streaming", "h2o", "hae"])
def test_after_a_prompt_nothing_is_alive_but_what_the_accounts_say(model: Any, name: str) -> None:
    bench, work = speed.Bench(model, SMALL), Work(2, 256, prefill_rows=2)
    found = [Measured(speed.compressed(name, 0.2))]
    bench.bytes_of_prefill(work, found)
    sizes = results.section(work, SMALL, 4, found)["arms"][0]["bytes"]
    assert sizes["used"] == sizes["formula"]
    said = sizes["used"] + sizes["reserved"] + sizes["side"]
    assert said <= sizes["held_after_prefill"] <= said + 8192


# --- caches filled without a prompt


def filled(model: Any, policy: Any, work: Work) -> Any:
    return speed.Bench(model, SMALL)._filled(work, Arm(policy.name, policy), _entries(work))


def _entries(work: Work) -> synthetic.Entries:
    return synthetic.entries(SMALL, work.batch, work.columns, torch.float32, CPU)


@pytest.mark.parametrize("name", ["full", "elastic", "snapkv", "streaming", "h2o", "hae", "fastgen", "scissorhands"])
def test_a_filled_cache_holds_what_a_prompt_would_leave(model: Any, name: str) -> None:
    policy = policies.create(name, budget=0.3)
    work = Work(2, 50, new_tokens=8, steps=8)
    rotator = Rotator(model) if policy.needs_rotation else None
    read = synthetic.ours(model, policy, 2, 50, work.steps + 2, rotator)
    running.generate(model, read, running.prompt(model, 2, 50), 1)
    made = filled(model, policy, work)
    assert made.ours[0].store.seen == read.ours[0].store.seen == 50
    assert made.held() == read.held()
    for ours, theirs in zip(made.ours, read.ours, strict=True):
        assert ours.store.side.keys() == theirs.store.side.keys()
        shapes_of = [{n: t.shape for n, t in layer.store.side.items()} for layer in (ours, theirs)]
        assert name == "fastgen" or shapes_of[0] == shapes_of[1]
    assert len(running.decode(model, made, 2, 50, 5)) == 5


@pytest.mark.parametrize("name", ["elastic", "snapkv", "streaming", "full"])
def test_the_middle_of_an_answer_holds_what_a_real_answer_holds_there(model: Any, name: str) -> None:
    policy = policies.create(name, budget=0.3)
    work = Work(1, 60, new_tokens=42, steps=2)
    assert work.columns == 80
    rotator = Rotator(model) if policy.needs_rotation else None
    read = synthetic.ours(model, policy, 1, 60, 42, rotator)
    running.generate(model, read, running.prompt(model, 1, 60), 21)
    assert abs(filled(model, policy, work).held()[0] - read.held()[0]) <= 1


def test_a_cache_that_does_not_copy_gives_the_same_tokens(model: Any) -> None:
    ids = running.prompt(model, 2, 20)
    both = [
        running.generate(model, synthetic.stock(k, model.config, 12, 20), ids, 10) for k in ("dynamic", "preallocated")
    ]
    assert torch.equal(*both)


# --- packed weights


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_packed_weights_compute_the_same(rows: int) -> None:
    plain = LlamaForCausalLM(Shape("odd", 2, 40, 72, 5, 1, 8, 99, rows > 3).config()).eval()
    ids = torch.randint(0, 99, (rows, 7), generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        expected = plain(ids).logits
        numbers = sum(p.numel() * p.element_size() for p in plain.parameters())
        packed = pack(plain)
        assert not [m for m in packed.modules() if type(m) is torch.nn.Linear]
        assert sum(p.numel() * p.element_size() for p in packed.parameters()) == numbers
        found = packed(ids).logits
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_a_vision_language_model_says_the_same_with_packed_weights(tiny_checkpoint: Path) -> None:
    said = []
    for weights in ("plain", "packed"):
        session = Session.load(str(tiny_checkpoint), device="cpu", dtype="float32", weights=weights)
        batch = [session.prepare(Request((Image.new("RGB", (40, 60), c),), "why?")) for c in ("red", "blue")]
        outcomes = session.run(batch, policies.create("elastic", budget=0.5), Decoding(max_new_tokens=8))
        said.append([(o.tokens, o.bytes_held) for o in outcomes])
    assert said[0] == said[1]
    assert "packed" in session.facts


def test_only_what_can_be_packed_is_packed() -> None:
    with pytest.raises(StartError, match="float32"):
        pack(torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64)))


def test_what_packed_weights_gain_is_counted_apart() -> None:
    times = {**TIMES, speed.FULL_PLAIN: [4.0, 8.0, 4.0], "full": [3.0, 6.0, 3.0]}
    ours = {
        **{name: speed.full() for name in (speed.FULL, speed.FULL_PLAIN)},
        targets.OURS: speed.compressed("elastic", 0.2),
    }
    found = [
        Measured(dataclasses.replace(ours.get(n, Arm(n)), name=n), step_seconds=t, kept=9.0) for n, t in times.items()
    ]
    gain = results.gains(next(each for each in found if each.arm.name == targets.OURS), found)
    parts = [gain[name][0] for name in ("preallocation", "packing", "weights", "compression")]
    assert parts == pytest.approx([2.0, 1.5, 4 / 3, 1.5])
    assert math.prod(parts) == pytest.approx(gain["over_default"][0])


def test_what_scores_cost_is_told_from_what_packed_weights_gain() -> None:
    arms = {arm.name: arm for arm in speed.with_packed_weights(targets.CASES["prefill-1k"].arms())}
    seconds = {"dynamic": 2.0, speed.STOCK_PACKED: 1.0, targets.SUMS: 1.25}
    found = [Measured(arms[name], prefill_seconds=[value]) for name, value in seconds.items()]
    done = {"prefill-1k": results.section(Work(1, 1024), SMALL, 4, found)}
    row = next(row for row in targets.judged(done) if row.target.text.startswith("column sums"))
    assert row.value == pytest.approx(25.0)
    assert done["prefill-1k"]["gains"][targets.SUMS]["prefill_over_default"][0] == pytest.approx(1.6)


# --- whole runs


def setting(**changes: Any) -> suite.Setting:
    return suite.Setting(CPU, torch.float32, **{"rounds": 1, "steps": 3, **changes})


def test_an_interrupted_run_keeps_what_it_has(model: Any) -> None:
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > 9

    chosen = setting(stop=stop)
    document = suite.new(chosen, "kvcli bench")
    bench = speed.Bench(model, SMALL, stop=stop)
    work = Work(2, 16, steps=3, rounds=5)
    suite.run_works(document, chosen, bench, SMALL, [work, work], suite.arms(["elastic"], [0.2], {}))
    (found,) = document["sections"].values()
    timed = [len(arm["step_seconds"]["rounds"]) for arm in found["arms"] if arm["step_seconds"]]
    assert timed == [1] * 4  # five arms were warmed up, four timed
    assert tables.grids(document)
    assert "interrupted" in tables.markdown({**document, "complete": False})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    for name in [name for name in os.environ if name.startswith("KVCLI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_the_command_measures_and_writes(run: Callable[..., Result], tmp_path: Path) -> None:
    work = "--layers 1 --batch 2 --context 24 --new-tokens 6 --policies elastic --budgets 0.5,0.2 --memory 1GB"
    found = run(*work.split(), *["--repeats", "1", "--json", "--plot", "p.png", "--page", "p.md"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout, parse_constant=pytest.fail)
    assert document["schema"] == results.SCHEMA
    assert document["complete"]
    assert document["machine"]["threads"] == torch.get_num_threads()
    assert document["machine"]["versions"].keys() >= {"torch", "transformers", "kvcli"}
    (section,) = document["sections"].values()
    assert (section["layers"], section["layers_of_model"]) == (1, 30)
    arms = {arm["name"]: arm for arm in section["arms"]}
    assert list(arms) == ["dynamic", "static", "preallocated", "full", "elastic 0.5", "elastic 0.2"]
    assert arms["elastic 0.2"]["kept_of_prompt"] == round(0.2 * 24)
    assert arms["elastic 0.2"]["policy"]["name"] == "elastic"
    for arm in arms.values():
        assert arm["step_seconds"]["median"] > 0
        assert arm["limit_seconds"] > 0
    assert 0 < arms["dynamic"]["largest_batch"] < arms["elastic 0.2"]["largest_batch"]
    page = (tmp_path / "p.md").read_text()
    assert "1 of 30 layers" in page
    assert torch.__version__ in page
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "decode 2 x 24" in found.stderr
    assert {line[:6] for line in found.stderr.splitlines()} == {"kvcli:"}


def test_a_real_model_is_measured_too(run: Callable[..., Result], tiny_checkpoint: Path) -> None:
    found = run("--model", tiny_checkpoint, "--device", "cpu", "--batch", 2, "--context", 24, "--quick", "-q",
                "--policies", "streaming", "--weights", "packed")  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "streaming 0.2" in found.stdout
    assert "ours with packed weights" in found.stdout.replace("\n", "")
    assert found.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--targets", "decode"], "--targets has no decode"),
        (["--targets", "all", "--batch", "2"], "leave out --batch"),
        (["--peers", "--shape", "llava-1.5-7b"], "leave out --shape"),
        (["--shape", "gpt-5"], "no shape 'gpt-5'"),
        (["--model", "x", "--shape", "llava-1.5-7b"], "--model is a whole model"),
        (["--papers", "--context", "512"], "leave out --context"),
        (["--batch", "0"], "--batch must be a whole number"),
        (["--context", "1024,x"], "--context must be a whole number"),
        (["--budgets", "1.5"], "--budgets must be a share"),
        (["--policies", "elastik"], "elastik"),
        (["--memory", "much"], "no amount of memory"),
        (["--weights", "int3"], "--weights must be one of plain, packed"),
        (["--repeats", "0"], "--repeats must be"),
        (["--plot", "x.jpg", "--batch", "1"], "must end in .png"),
        (["--page", "nowhere/x.md", "--batch", "1"], "its folder is not there"),
        (["--layers", "31"], "30 layers"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Callable[..., Result], arguments: list[str], said: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert said in found.stderr.splitlines()[-1]


def test_flags_and_cases_agree() -> None:
    assert tuple(targets.CASES) == bench_flags.CASES
    assert ", ".join(SHAPES) == bench_flags.SHAPES
    assert {target.case for target in targets.TARGETS} == {*targets.CASES, targets.PEERS}
    for case in targets.CASES.values():
        assert targets.OURS in [arm.name for arm in case.arms()]


def test_the_table_says_what_was_not_measured() -> None:
    document: dict[str, Any] = suite.new(setting(), "kvcli bench")
    document["sections"]["decode-16x1024"] = section()
    suite.judge(document)
    grid = tables.targets(document)
    assert [">= 3 x", "6 x (6 x to 12 x)", "pass"] in [row[1:] for row in grid.rows]
    assert {row[3] for row in grid.rows if "kvpress" in row[0]} == {"not measured"}


# --- the guard


@pytest.mark.slow
def test_ratios_do_not_slide() -> None:
    """Far below what is aimed at, on a shape that is quick: whoever makes the engine slow hears of it."""
    shape = Shape("guard", 4, 384, 768, 6, 2, 64, 256, True)
    bench = speed.Bench(shapes.build(shape, torch.float32, CPU), shape)
    decode, prefill = Work(8, 4096, steps=8), Work(1, 1024, steps=8)
    ours = targets.OURS
    found = [Measured(arm) for arm in targets.CASES["decode-8x4096"].arms()]
    bench.decode(decode, found)
    gain = results.section(decode, shape, 4, found)["gains"][ours]
    assert gain["over_default"][0] >= 2
    assert gain["over_fastest"][0] >= 1.3
    assert gain["compression"][0] >= 1.5
    read = [Measured(arm) for arm in targets.CASES["prefill-1k"].arms()]
    bench.prefill(prefill, read)
    bench.bytes_of_prefill(prefill, read)
    rows = {row.target.text: row for row in targets.judged({"prefill-1k": results.section(prefill, shape, 4, read)})}
    assert rows["column sums, on top of plain sdpa prefill, 1k"].value <= 80
    assert rows["last 32 rows, on top of plain sdpa prefill, 1k"].value <= 40
    assert rows["bytes used less the formula, 1k"].verdict == "pass"
    assert rows["prefill peak with column sums over plain sdpa, 1k"].verdict == "pass"
