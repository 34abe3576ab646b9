"""Reports: numbers land where they belong, tables mark what is best, the page holds together alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from kvcli.engine.recording import DROPPED, GENERATED, KEPT, MERGED, TEXT, VISUAL, LayerTrace, Trace
from kvcli.report import forecast, heat, page, side_by_side, summary, terminal, units
from kvcli.report.differences import spans
from kvcli.report.forecast import Load
from kvcli.report.portrait import Portrait

HALVES = np.array([[0.0, 0, 50, 100], [50, 0, 100, 100]])


# --- pictures


def test_a_value_is_spread_over_its_box_and_nowhere_else() -> None:
    found = heat.density(np.array([3.0, 1.0]), HALVES, (100, 100), (10, 10))
    assert found.shape == (10, 10)
    assert found[:, :5].sum() == pytest.approx(3)
    assert found[:, 5:].sum() == pytest.approx(1)
    assert np.ptp(found[:, :5]) == 0


def test_boxes_that_overlap_add_up_and_tokens_without_a_box_count_nowhere() -> None:
    boxes = np.array([[0.0, 0, 100, 100], [0, 0, 50, 50], [np.nan] * 4])
    found = heat.density(np.array([4.0, 1.0, 100.0]), boxes, (100, 100), (10, 10))
    assert found.sum() == pytest.approx(5)
    assert found[2, 2] == pytest.approx(4 / 100 + 1 / 25)


def test_the_picture_glows_where_the_attention_is() -> None:
    grey = Image.new("RGB", (40, 40), (120, 120, 120))
    values = heat.density(np.array([1.0, 0.0]), HALVES, (100, 100), grey.size)
    pixels = np.asarray(heat.blend(grey, values)).astype(int)
    assert pixels[:, :20].mean() > pixels[:, 20:].mean() + 40


def test_no_attention_at_all_is_drawn_dark() -> None:
    grey = Image.new("RGB", (8, 8), (120, 120, 120))
    assert np.asarray(heat.blend(grey, np.zeros((8, 8)))).max() < 120


def test_what_was_kept_stays_clear_and_the_rest_is_covered() -> None:
    picture = Image.new("RGB", (40, 20), (200, 160, 90))
    boxes = np.array([[0.0, 0, 10, 20], [10, 0, 20, 20], [20, 0, 30, 20]])
    pixels = np.asarray(heat.fates(picture, np.array([KEPT, MERGED, DROPPED]), boxes, picture.size)).astype(int)
    assert pixels[10, 5].tolist() == [200, 160, 90]
    assert pixels[10, 15, 2] > pixels[10, 15, 0], "merged is blue"
    assert pixels[10, 25].max() < 60, "dropped is nearly black"
    assert np.ptp(pixels[10, 35]) == 0, "what no token sees has no colour"


def test_what_some_layers_kept_is_half_clear() -> None:
    picture = Image.new("RGB", (30, 10), (220, 20, 20))
    boxes = np.array([[0.0, 0, 10, 10], [10, 0, 20, 10], [20, 0, 30, 10]])
    pixels = np.asarray(heat.kept(picture, np.array([1.0, 0.5, 0.0]), boxes, picture.size)).astype(int)
    redness = [pixels[5, x, 0] - pixels[5, x, 1] for x in (5, 15, 25)]
    assert redness == [200, 100, 0]


def test_what_a_grey_picture_gets_too_is_not_shown_as_looked_at() -> None:
    grey = Image.new("RGB", (40, 40), (120, 120, 120))
    boxes = np.array([[0.0, 0, 20, 20], [20, 0, 40, 20], [0, 20, 20, 40], [20, 20, 40, 40]])
    seen, empty = trace(), trace()
    seen.layers[0].answer[1:5] = [9, 1, 4, 1]
    empty.layers[0].answer[1:5] = [9, 1, 1, 1]
    portrait = Portrait(grey, boxes, 0, seen, empty, seen, {})
    pixels = np.asarray(portrait.looks([0], 40)).astype(int).sum(-1)
    corners = [pixels[y, x] for y, x in ((5, 5), (5, 35), (35, 5), (35, 35))]
    assert max(corners) == corners[2] > corners[0] + 100
    plain = np.asarray(portrait.attention(0, 40, "answer")).astype(int).sum(-1)
    assert plain[5, 5] > plain[35, 5] + 100


def test_thumbnails_keep_their_shape() -> None:
    assert heat.thumbnail(Image.new("RGB", (400, 100)), 200).size == (200, 50)
    assert heat.thumbnail(Image.new("RGB", (1, 5000)), 200).size == (1, 200)


# --- texts


@settings(max_examples=60, deadline=None)
@given(st.text("ab c\u732b\n", max_size=30), st.text("ab c\u732b\n", max_size=30))
def test_differences_lose_nothing(reference: str, candidate: str) -> None:
    found = spans(reference, candidate)
    assert "".join(s.text for s in found if s.kind != "missing") == candidate
    theirs = "".join(s.text for s in found if s.kind != "added")
    assert theirs.split() == reference.split() or "".join(theirs.split()) == "".join(reference.split())


def test_only_what_differs_is_marked() -> None:
    found = spans("a small cat sits here", "a big cat sits")
    assert [(s.kind, s.text.strip()) for s in found] == [
        ("same", "a"), ("missing", "small"), ("added", "big"), ("same", "cat sits"), ("missing", "here"),
    ]  # fmt: skip
    assert side_by_side.marked("a small cat", "a big cat", False).plain.split() == ["a", "-small-", "+big+", "cat"]


# --- tables


def entry(policy: str, budget: float, index: int = 0, **values: Any) -> dict[str, Any]:
    scores = {"tokens": 10, "nll": 1.0, "nll_full": 0.5, "agreement": 0.5, "kl": 0.1, "rouge_l": 0.5}
    scores |= {"first_divergence": 3} | {k: v for k, v in values.items() if k in (*scores, "first_divergence")}
    scores |= {"perplexity": float(np.exp(scores["nll"])), "perplexity_full": float(np.exp(scores["nll_full"]))}
    return {
        "id": f"<b>{index}</b>.jpg", "index": index, "prompt": "why & how", "error": values.get("error"),
        "policy": {"name": policy, "budget": budget}, "sees_question": policy == "h2o", "fidelity": scores,
        "text": values.get("text", "a cat <script>alert(1)</script>"), "seen": 60, "kept": 12,
        "tokens": {"prompt": 40, "visual": 30, "generated": 21},
        "cache_bytes": {"full": 6000, "held": values.get("held", 1200), "peak": 2000},
        "seconds": {"prefill": 0.2, "decode": values.get("decode", 2.0)}, "bytes_by_step": [1000, 1100, 1200],
    }  # fmt: skip


def test_perplexity_of_several_pictures_weighs_their_tokens() -> None:
    entries = [entry("h2o", 0.2, 0, tokens=10, nll=1.0), entry("h2o", 0.2, 1, tokens=30, nll=2.0)]
    row = summary.rows(entries)[0]
    assert row.means["perplexity"] == pytest.approx(np.exp((10 * 1.0 + 30 * 2.0) / 40))
    assert row.means["bytes_held"] == 1200
    assert row.spreads["perplexity"] == pytest.approx(np.std([np.exp(1), np.exp(2)], ddof=1))
    assert row.pictures == 2


def test_the_best_of_each_budget_is_marked_and_the_full_cache_never() -> None:
    entries = [
        entry("full", 1.0, nll=0.5, kl=0.0),
        entry("h2o", 0.2, nll=0.9, kl=0.2),
        entry("streaming", 0.2, nll=1.2, kl=0.1),
        entry("h2o", 0.5, nll=0.6),
    ]
    full, h2o, streaming, alone = summary.rows(entries)
    assert "perplexity" in h2o.best
    assert "kl" in streaming.best
    assert "bytes_held" not in h2o.best | streaming.best, "where all are equal nobody leads"
    assert not full.best | alone.best, "no rival, no mark"


def test_who_holds_more_than_its_rivals_is_not_the_best_and_that_is_said() -> None:
    entries = [entry("h2o", 0.2, kl=0.3), entry("hae", 0.2, kl=0.1, held=1600), entry("streaming", 0.2, kl=0.2)]
    rows = summary.rows(entries)
    assert ["kl" in row.best for row in rows] == [False, False, True]
    assert any("hae 0.2" in remark for remark in side_by_side.remarks(rows))


def test_slower_than_the_full_cache_is_said() -> None:
    entries = [entry("full", 1.0, decode=2.0), entry("h2o", 0.2, decode=4.0), entry("streaming", 0.2, decode=1.0)]
    rows = summary.rows(entries)
    assert [row.slower for row in rows] == [False, True, False]
    assert "slower than the full cache here: h2o 0.2" in side_by_side.remarks(rows)


def test_failures_are_not_in_the_table() -> None:
    broken = entry("h2o", 0.2) | {"error": {"type": "PictureError", "message": "x"}}
    assert summary.rows([broken]) == []


def test_the_csv_has_the_tables_numbers() -> None:
    lines = summary.as_csv(summary.rows([entry("full", 1.0), entry("h2o", 0.2)])).splitlines()
    head = lines[0].split(",")
    row = dict(zip(head, lines[2].split(","), strict=True))
    assert (row["policy"], row["budget"], row["pictures"]) == ("h2o", "0.2", "1")
    assert float(row["kl"]) == 0.1
    assert float(row["tokens_per_second"]) == 10


# --- the terminal


def trace() -> Trace:
    """Two layers, eight columns: text, four visual, text, two generated."""
    kinds = np.array([TEXT, VISUAL, VISUAL, VISUAL, VISUAL, TEXT, GENERATED, GENERATED])
    left = np.full((1, 8), -1)
    left[0, [1, 2, 6]] = [6, 7, 8]
    how = np.where(left >= 0, DROPPED, KEPT)
    importance, answer = np.array([6.0, 1, 2, 1, 1, 0.1, 0, 0]), np.array([1.0, 0, 3, 1, 1, 1, 0.5, 0.1])
    layers = tuple(LayerTrace(n, importance, answer, 1.0, 0.5, left, how) for n in range(2))
    return Trace({"name": "h2o", "budget": 0.2}, kinds, 6, layers)


def test_held_counts_follow_the_clock() -> None:
    held = trace().held()
    assert held[0].tolist() == [[2, 3, 0], [2, 2, 1], [2, 2, 1]]
    assert trace().kept_share()[1].tolist() == [1.0, 0.5, 0.5]


def shown(*things: Any, width: int = 60) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for thing in things:
        console.print(thing)
    return console.export_text()


@pytest.mark.parametrize("plain", [False, True])
def test_maps_tell_kinds_apart_without_colour(plain: bool) -> None:
    lines = shown(terminal.kept_map(trace(), 60, plain)).splitlines()
    full = terminal.SHADES[plain][-1]
    assert lines[1] == f"  0  {full}  {full * 3} {full}"
    assert lines[3].strip() == "tvvvvtgg"


def test_ascii_is_ascii() -> None:
    text = shown(
        terminal.attention_map(trace(), 60, True),
        terminal.kept_map(trace(), 60, True),
        terminal.layer_table(trace(), True),
        terminal.timeline({"full": [1, 2, 3], "h2o": [1, 1, 1]}, 60, True),
        terminal.forecast_table(LOAD, 4, 10**10, True),
        *side_by_side.tables(summary.rows([entry("h2o", 0.2, 0), entry("h2o", 0.2, 1)]), True),
    )
    assert text.isascii()


def test_long_prompts_fit_the_width() -> None:
    columns = 1000
    left = np.full((1, columns), -1)
    layer = LayerTrace(0, np.ones(columns), np.ones(columns), 1.0, 0.5, left, np.where(left >= 0, DROPPED, KEPT))
    wide = Trace({"name": "h2o", "budget": 0.2}, np.full(columns, VISUAL), columns, (layer,))
    assert max(map(len, shown(terminal.attention_map(wide, 60, False)).splitlines())) == 60


# --- the forecast

LOAD = Load(
    weights=1000, weights_read=800, bytes_per_token=2, prompt=90, new_tokens=20, kept=18, growth=4,
    peak_full=220, peak=80,
)  # fmt: skip


def test_the_gain_is_the_ratio_of_bytes_a_step_reads() -> None:
    assert forecast.gain(LOAD, 1) == pytest.approx((800 + 100 * 2) / (800 + 20 * 2))
    assert forecast.gain(LOAD, 10) == pytest.approx((800 + 10 * 200) / (800 + 10 * 40))
    assert forecast.cache_share(LOAD, 10) == pytest.approx(2000 / 2800)


def test_the_batch_from_which_it_pays_is_the_first_that_does() -> None:
    heavy = Load(**{**vars(LOAD), "weights_read": 100_000})
    start = forecast.break_even(heavy)
    assert start is not None
    assert forecast.gain(heavy, start) >= forecast.WORTH_IT > forecast.gain(heavy, start - 1)
    assert "won't pay" in forecast.verdict(heavy, start - 1)
    assert "won't pay" not in forecast.verdict(heavy, start)


def test_a_policy_that_keeps_all_never_pays() -> None:
    idle = Load(**{**vars(LOAD), "kept": 90, "growth": 20, "peak": 220})
    assert forecast.gain(idle, 64) == 1
    assert forecast.break_even(idle) is None
    assert "at no batch size" in forecast.verdict(idle, 64)


def test_the_largest_batch_fills_the_memory() -> None:
    assert forecast.largest_batch(LOAD, 1000 + 5 * 220 + 219, compressed=False) == 5
    assert forecast.largest_batch(LOAD, 1000 + 5 * 220 + 219, compressed=True) == (5 * 220 + 219) // 80
    assert forecast.largest_batch(LOAD, 500, compressed=False) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(512, "512 B"), (3.5 * 1024, "3.5 KiB"), (2**31, "2.0 GiB"), (2**41, "2048.0 GiB")]
)
def test_sizes(value: float, text: str) -> None:
    assert units.size(value) == text


# --- the page


class Links(HTMLParser):
    """Everything that a page would fetch, and all its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]


def rendered() -> str:
    entries = [entry("full", 1.0), entry("h2o", 0.2, text='it "is" <i>new</i> & odd')]
    picture = Image.new("RGB", (100, 100), (10, 90, 200))
    boxes = np.array([[0.0, 0, 50, 50], [50, 0, 100, 50], [0, 50, 50, 100], [50, 50, 100, 100]])
    looked = Portrait(picture, boxes, 0, trace(), trace(), trace(), {})
    search = page.Search(0.1, {"h2o": (0.4, {1.0: 0.0, 0.5: 0.05, 0.4: 0.09, 0.3: 0.2})})
    shown = [page.Shown(picture, entries, looked, {"h2o 0.2": trace()})]
    return page.render("kvcli <compare>", {"model": "a&b"}, summary.rows(entries), shown, search=search)


def test_the_page_fetches_nothing() -> None:
    reader = Links()
    reader.feed(rendered())
    assert reader.links
    assert all(link.startswith("data:image/") for link in reader.links)
    assert not re.search(r"https?://|@import|url\(", rendered())


def test_texts_from_outside_are_escaped() -> None:
    text = rendered()
    reader = Links()
    reader.feed(text)
    assert not {"script", "i", "b"} & set(reader.tags)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt;b&gt;0&lt;/b&gt;.jpg" in text
    assert "kvcli &lt;compare&gt;" in text


def test_the_page_has_what_it_promises() -> None:
    text = rendered()
    for wanted in ("prefers-color-scheme: dark", "layer 1", "h2o 0.2", "Cache while generating", "smallest budget"):
        assert wanted in text
    assert text.count("<source media") == 2, "each plot for light and for dark"
