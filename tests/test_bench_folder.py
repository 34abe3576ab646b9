"""The folder bench: the full cache writes what a stock loop writes, and a text that differs is told with its gap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from PIL import Image

from kvcli import policies
from kvcli.bench import folder
from kvcli.engine.session import Session

MOST = 6


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Path) -> Session:
    return Session.load(str(tiny_checkpoint), device="cpu", dtype="float64")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(3)
    paths = [tmp_path / f"{name}.png" for name in "abcde"]
    for path in paths:
        Image.fromarray(torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8).numpy()).save(path)
    return paths


def test_every_way_describes_every_picture_and_full_as_stock_does(session, photos):
    ways = [folder.Way("stock loop", None, session), folder.Way("full", policies.create("full"), session)]
    folder.measure(photos, ways, folder.PROMPT, MOST, size=3, turns=2)
    stock, full = ways
    assert list(stock.texts) == [str(path) for path in photos]
    assert full.texts == stock.texts
    assert full.tokens == stock.tokens
    assert len(stock.seconds) == len(full.seconds) == 2
    lines = list(folder.table(ways, folder.Stock(session, folder.PROMPT, MOST)))
    assert len(lines) == 3
    assert lines[2].endswith("5 of 5")


def test_what_cannot_be_read_is_left_out(photos, tmp_path):
    (tmp_path / "aa.png").write_bytes(photos[0].read_bytes()[:200])
    assert folder.find_pictures([tmp_path], 3) == photos[:3]
    with pytest.raises(typer.BadParameter, match="none of these"):
        folder.find_pictures([tmp_path / "nowhere"], 3)


def test_a_text_that_differs_is_told_with_the_gap_of_the_scores(session, photos):
    stock = folder.Stock(session, folder.PROMPT, MOST)
    tokens, out = stock.generate(photos[0], output_scores=True)
    scores = out.scores[0][0]
    second = int(scores.topk(2).indices[1])
    other = session.tokenizer.decode([second])
    assert session.tokenizer(other, add_special_tokens=False)["input_ids"][0] == second
    assert stock.gap(photos[0], other) == pytest.approx(float(scores[tokens[0]] - scores[second]))
