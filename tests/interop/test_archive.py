"""Covers `Archive`: malicious files of weights are refused, and do not make it allocate memory."""

import json
import os
import pathlib
import random
import signal
import struct
import tracemalloc
from typing import Any

import pytest
import torch

from shardfn.interop import Archive, ArchiveWriter
from shardfn.memory import DamagedError

ODD = [1 << 40, 1 << 62, 1 << 70, -1, 0, 1, 3, 1e300, 2.0, True, None, "3", [], [[]], {}, "F64", "__import__('os')"]
NAMES = ["../../etc/passwd", "", "x\0", "\ud800", "__metadata__", "data_offsets"]


def saved(directory: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """A good file's header and data."""
    tensors = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.uint8), "c": torch.tensor(1)}
    with ArchiveWriter(directory, {k: (x.dtype, tuple(x.shape)) for k, x in tensors.items()}) as out:
        for name, x in tensors.items():
            out.put(name, x)
    data = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    kids = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(p for k, v in kids for p in places(v, (*at, k)))]


def mutated(header: Any, draw: random.Random) -> Any:
    """One to three values replaced, removed, doubled or renamed."""
    header = json.loads(json.dumps(header))
    for _ in range(draw.randint(1, 3)):
        path, node = draw.choice(places(header)[1:]), header
        try:
            for key in path[:-1]:
                node = node[key]
            kind = draw.randrange(4)
            if kind == 0:
                node[path[-1]] = draw.choice([*ODD, draw.randrange(200)])
            elif kind == 1:
                del node[path[-1]]
            elif kind == 2 and isinstance(node, list):
                node.append(node[path[-1]])
            elif isinstance(node, dict):
                node[draw.choice(NAMES)] = node.pop(path[-1])
        except (KeyError, IndexError, TypeError):
            continue
    return header


def fuzz(directory: pathlib.Path, cases: int) -> int:
    """The number of refused files among `cases`; the others are read, within the file's bytes."""
    (header, data), draw, refused = saved(directory), random.Random(cases), 0
    path = directory / "model.safetensors"
    good = path.read_bytes()
    tracemalloc.start()
    for n in range(cases):
        if n % 4 == 0:  # bytes, not values
            made = bytearray(good)
            for _ in range(draw.randint(1, 8)):
                made[draw.randrange(len(good) - len(data))] = draw.randrange(256)
            path.write_bytes(made[: draw.randrange(len(made))] if n % 8 else made)
        else:
            text = json.dumps(mutated(header, draw)).encode()
            length = draw.choice(
                [len(text)] * 9 + [draw.choice([0, 1, 1 << 31, 1 << 62, (1 << 64) - 1, len(text) + 1])]
            )
            path.write_bytes(struct.pack("<Q", length) + text + data)
        try:
            archive = Archive(directory)
        except DamagedError:
            refused += 1
            continue
        assert sum(x.nbytes for x in archive.values()) <= len(data)
        for name, x in archive.items():
            assert archive.box(name, [(0, size) for size in x.shape]).shape == x.shape
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, "a header of some hundred bytes asked for more"
    assert [p.name for p in directory.iterdir()] == ["model.safetensors"]
    return refused


@pytest.mark.nightly
def test_headers_that_mean_harm_are_refused(tmp_path: pathlib.Path) -> None:
    assert fuzz(tmp_path, 400) > 250


@pytest.mark.nightly
def test_ten_thousand_headers_that_mean_harm(tmp_path: pathlib.Path) -> None:
    assert fuzz(tmp_path, 12_000) > 8_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h["b"].update(data_offsets=[95, 98]), "b begins at byte 95, where byte"),
        pytest.param(lambda h: h["a"].update(shape=[1 << 40, 6]), "contradicts itself", marks=pytest.mark.nightly),
        pytest.param(
            lambda h: h["c"].update(data_offsets=[1 << 40, (1 << 40) + 8]), "was cut short", marks=pytest.mark.nightly
        ),
        (lambda h: h.pop("b"), "and its tensors have"),
        pytest.param(
            lambda h: h["a"].update(shape=[True, 24]), "no number of bytes or elements", marks=pytest.mark.nightly
        ),
        pytest.param(lambda h: h["a"].update(dtype="pickle"), "cannot be understood", marks=pytest.mark.nightly),
    ],
)
def test_crafted(tmp_path: pathlib.Path, change: Any, says: str) -> None:
    header, data = saved(tmp_path)
    change(header)
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(DamagedError, match=says):
        Archive(tmp_path)


def test_deep_headers(tmp_path: pathlib.Path) -> None:
    saved(tmp_path)
    for text in (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b"null", b"\xff"):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(DamagedError, match="cannot be understood"):
            Archive(tmp_path)


@pytest.mark.parametrize(
    "where",
    [
        "shardfn.checkpoint.safetensors_header",
        pytest.param("as_bytes", marks=pytest.mark.nightly),
        pytest.param("os.fsync", marks=pytest.mark.nightly),
        "pathlib.Path.rename",
        pytest.param("nothing", marks=pytest.mark.nightly),
    ],
)
def test_a_writer_that_fails_leaves_the_old_files_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for name in "abc":
        with ArchiveWriter(tmp_path, {name: (torch.float32, (5, 3))}, stem=name) as out:
            out.put(name, torch.ones(5, 3))
    had = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if where != "nothing":
        monkeypatch.setattr(where if "." in where else f"shardfn.interop.leaves._archive.{where}", full)
    entries: Any = {name: (torch.float32, (5, 3)) for name in "abc"}
    with (
        pytest.raises((OSError, AssertionError), match="No space left" if where != "nothing" else "not written"),
        ArchiveWriter(tmp_path, entries, file_bytes=60) as out,
    ):
        for name in "abc" if where != "nothing" else "ab":
            out.put(name, torch.ones(5, 3))
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == had


@pytest.mark.day("0-2", "0-3", "3-2")
@pytest.mark.parametrize("files", [2, 3])
@pytest.mark.parametrize(
    "renames", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(range(5))]
)
def test_weights_written_over_others_are_never_mixed(tmp_path: pathlib.Path, files: int, renames: int) -> None:
    """A writer is killed after `renames` renames: a reader then finds the old weights, the new or no file."""
    names = "abc"[:files]
    entries: Any = {name: (torch.float32, (5, 3)) for name in names}

    def write(value: float) -> None:
        with ArchiveWriter(tmp_path, entries, file_bytes=60) as out:
            for name in names:
                out.put(name, torch.full((5, 3), value))

    write(1.0)
    child = os.fork()
    if child == 0:  # the child never returns to the test: it is killed, or exits
        rename, left = pathlib.Path.rename, [renames]

        def counted(self: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return rename(self, to)

        pathlib.Path.rename = counted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            write(2.0)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    try:
        archive = Archive(tmp_path)
    except FileNotFoundError:
        assert 0 <= renames <= files
        write(3.0)
        archive = Archive(tmp_path)
    found = {float(archive.box(name, [(0, 5), (0, 3)]).unique()) for name in names}
    assert found in ({1.0}, {2.0}, {3.0})


def test_weights_that_are_not_finite_are_not_written(tmp_path: pathlib.Path) -> None:
    entries = {name: (torch.float32, (4,)) for name in ("a", "b", "mask")}
    good = dict.fromkeys(entries, torch.ones(4))
    write_all(tmp_path, entries, good)
    before = (tmp_path / "model.safetensors").read_bytes()
    bad = good | {"b": torch.tensor([1.0, torch.nan, torch.inf, 0.0]), "mask": torch.full((4,), -torch.inf)}
    with pytest.raises(ValueError, match=r"must be finite, got .* in 1 of 3 leaves.*\n  - b: 2 of 4 elements"):
        write_all(tmp_path, entries, bad, allow_nonfinite={"mask"})
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    write_all(tmp_path, entries, bad, allow_nonfinite=True)
    assert (tmp_path / "model.safetensors").read_bytes() != before


def write_all(directory: pathlib.Path, entries: Any, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    with ArchiveWriter(directory, entries, **options) as out:
        for name, x in tensors.items():
            out.put(name, x)
