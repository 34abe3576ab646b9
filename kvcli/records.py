"""What a run leaves behind: one record per picture, with the same keys whether it was described or failed.

Knows the schema, how records are appended so that a crash at any moment costs nothing finished, and which records a
resumed run may take as done. Knows nothing of models, policies or the terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcli.errors import StartError, UsageError

SCHEMA = 1
JSON = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What all records of a run share. `policy`: its name and every option; `decoding`: every option. kv_dtype: how
    keys and values are stored."""

    model: str
    revision: str
    device: str
    dtype: str
    policy: JSON
    decoding: JSON
    load_seconds: float = 0.0
    kv_dtype: str = "auto"


@dataclasses.dataclass(frozen=True)
class ImageFacts:
    """One picture of a record. All but the path are None when it could not be read."""

    path: str
    sha256: str | None = None
    bytes: int | None = None
    format: str | None = None
    width: int | None = None
    height: int | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model gave for one picture; bytes are of the KV cache, times in seconds of the batch it was in."""

    text: str
    finish_reason: str
    prompt_tokens: int
    visual_tokens: int
    generated_tokens: int
    seen: int
    kept: int
    kept_after_prefill: int
    bytes_full: int
    bytes_held: int
    bytes_peak: int
    prefill_seconds: float
    decode_seconds: float
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a picture has no text."""

    type: str
    message: str


def record(
    run: RunFacts,
    *,
    index: int,
    id: str,
    prompt: str,
    system: str | None,
    images: tuple[ImageFacts, ...],
    image_seconds: float = 0.0,
    warnings: tuple[str, ...] = (),
    answer: Answer | None = None,
    failure: Failure | None = None,
) -> JSON:
    """A record of schema 1. `path` and `sha256` are those of the first picture; `images` has them all."""
    got = dataclasses.asdict(answer) if answer else {}
    return {
        "schema": SCHEMA,
        "index": index,
        "id": id,
        "path": images[0].path if images else None,
        "sha256": images[0].sha256 if images else None,
        "images": [dataclasses.asdict(image) for image in images],
        "model": run.model,
        "revision": run.revision,
        "device": run.device,
        "dtype": run.dtype,
        "kv_dtype": run.kv_dtype,
        "policy": run.policy,
        "decoding": {key: value for key, value in run.decoding.items() if key != "seed"},
        "seed": run.decoding.get("seed"),
        "system": system,
        "prompt": prompt,
        "text": got.get("text"),
        "finish_reason": got.get("finish_reason"),
        "tokens": {name: got.get(f"{name}_tokens") for name in ("prompt", "visual", "generated")},
        "seen": got.get("seen"),
        "kept": got.get("kept"),
        "kept_after_prefill": got.get("kept_after_prefill"),
        "cache_bytes": {name: got.get(f"bytes_{name}") for name in ("full", "held", "peak")},
        "seconds": {
            "load": run.load_seconds,
            "image": image_seconds,
            "prefill": got.get("prefill_seconds"),
            "decode": got.get("decode_seconds"),
        },
        "batch_size": got.get("batch_size"),
        "warnings": list(warnings),
        "error": dataclasses.asdict(failure) if failure else None,
    }


def encode(value: Any) -> bytes:
    """JSON in UTF-8 on one line, without a newline. Numbers that JSON lacks become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# --- what counts as done

Digest = bytes


def slot(entry: JSON) -> Digest:
    """The place of a record: which picture, by name, and every setting that its text depends on."""
    parts = [
        entry.get(name)
        for name in ("id", "path", "prompt", "system", "model", "revision", "policy", "decoding", "seed")
    ]
    parts.append(entry.get("kv_dtype") == "int8")
    return hashlib.sha256(json.dumps(_finite(parts), sort_keys=True).encode()).digest()


def key(entry: JSON) -> Digest:
    """The place of a record and the bytes of its pictures: equal keys mean equal work."""
    digests = [image.get("sha256") for image in entry.get("images") or []]
    return hashlib.sha256(slot(entry) + json.dumps(digests).encode()).digest()


class RecordFile:
    """A JSONL file that only grows: each record is one write, flushed and synced.

    An existing file is refused unless `overwrite` (emptied at the first write) or `resume` (its successes are `done`;
    a torn last record is cut off). One process at a time may hold it. Raises `UsageError` for an existing or foreign
    file, `StartError` where it can't be written.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        self.done: set[Digest] = set()
        self._failed: set[Digest] = set()
        self._stale = False
        self._fresh = overwrite and not resume
        if not (overwrite or resume) and path.exists() and path.stat().st_size:
            raise UsageError(f"{path} exists: --resume goes on with it, --overwrite replaces it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise StartError(f"{path} can't be written: {error.strerror}") from error
        try:
            _lock(self._file, path)
            if resume:
                self._read()
        except BaseException:
            os.close(self._file)
            raise

    def write(self, entry: JSON) -> None:
        """Append one record; when this returns it is on disk. OSError when it can't be, and then nothing of it is."""
        if self._fresh:
            os.ftruncate(self._file, 0)
            self._fresh = False
        end = os.fstat(self._file).st_size
        data = memoryview(encode(entry) + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise
        self._count(entry)

    def close(self) -> None:
        """Drop failures that a later record has replaced, and let go of the file."""
        try:
            if self._stale:
                self._compact()
        finally:
            os.close(self._file)

    def _count(self, entry: JSON) -> None:
        place = slot(entry)
        self._stale = self._stale or place in self._failed
        if entry.get("error"):
            self._failed.add(place)
        else:
            self.done.add(key(entry))

    def _read(self) -> None:
        """Learn what is done and mend the end of the file, which is not touched before all of it is known as ours."""
        ours = strange = torn = False
        line = b""
        for _, line in self._lines():
            entry = parse(line)
            torn = entry is None and not line.endswith(b"\n") and _begins_like_a_record(line)
            if entry is not None and "schema" in entry:
                self._count(entry)
                ours = True
            elif entry is not None:
                raise self._foreign()
            elif line.strip() and not torn:
                strange = True  # not done, and not ours to delete
        if strange and not ours:
            raise self._foreign()
        if torn:
            os.ftruncate(self._file, os.fstat(self._file).st_size - len(line))
        elif line and not line.endswith(b"\n"):
            os.write(self._file, b"\n")

    def _foreign(self) -> UsageError:
        return UsageError(f"{self.path} holds lines that are no records of kvcli: choose another file")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(self.path, "rb") as lines:
            start = 0
            for line in lines:
                yield start, line
                start += len(line)

    def _compact(self) -> None:
        """Rewrite the file without failures that have a later record in the same place."""
        last: dict[Digest, int] = {}
        for start, line in self._lines():
            entry = parse(line)
            if entry is not None:
                last[slot(entry)] = start
        with replacing(self.path) as file:
            for start, line in self._lines():
                entry = parse(line)
                if entry is None or not entry.get("error") or last[slot(entry)] == start:
                    file.write(line)


def parse(line: bytes) -> JSON | None:
    """The record on a line, or None when it is torn or no JSON object."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _begins_like_a_record(line: bytes) -> bool:
    head = b'{"schema": '
    return line.startswith(head) or head.startswith(line)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file that takes the name `path` when the block ends well, and vanishes when it does not."""
    handle, name = tempfile.mkstemp(prefix=".kvcli-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _lock(file: int, path: Path) -> None:
    """Keep a second run off the file. Where the system has no such locks, nothing is kept off."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartError(f"{path} is being written by another run") from error
    except OSError:
        return  # some network file systems have no locks
