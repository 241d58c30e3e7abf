"""Covers malicious checkpoints: each is refused or harmless, reads no file outside, and takes no excess memory."""

import hashlib
import json
import os
import pathlib
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfn import checkpoint
from shardfn.checkpoint._directory import FilePlace
from shardfn.checkpoint._manifest import decoded
from shardfn.checkpoint._place import read_manifest
from shardfn.cli import main
from shardfn.memory import DamagedError

REFUSED = (DamagedError, ValueError, FileNotFoundError)


def sealed(body: dict[str, Any]) -> str:
    """A manifest with a correct digest, as an attacker would write it."""
    body = {k: v for k, v in body.items() if k != "sha256"}
    text = json.dumps(body, separators=(",", ":"))
    return f'{text[:-1]},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def saved(directory: pathlib.Path) -> pathlib.Path:
    tree = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.bool), "c": torch.tensor(1)}
    return pathlib.Path(checkpoint.save(directory, tree, step=1, durable=False).path)


def like() -> dict[str, Any]:
    return {"a": torch.zeros(4, 6), "b": torch.zeros(3, dtype=torch.bool), "c": torch.tensor(0)}


HUGE = [1 << 40, 1 << 62, 1 << 63, 1 << 70, -1, -(1 << 63), 0, 1, 3, 1e300, True, None, "3", [], [[]], {}]
NAMES = ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..", "", ".safetensors", "x\0.safetensors", "\ud800"]


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a JSON tree."""
    kids = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(p for k, v in kids for p in places(v, (*at, k)))]


def mutated(body: Any, draw: random.Random) -> Any:
    """One to three values of a manifest replaced, removed, doubled or renamed."""
    body = json.loads(json.dumps(body))
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(places(body)[1:])
        node = body
        try:
            for key in path[:-1]:
                node = node[key]
            kind = draw.randrange(4)
            if kind == 0:
                node[path[-1]] = draw.choice([*HUGE, *NAMES, draw.randrange(200)])
            elif kind == 1:
                del node[path[-1]]
            elif kind == 2 and isinstance(node, list):
                node.append(node[path[-1]])
            elif isinstance(node, dict):
                node[draw.choice(NAMES)] = node.pop(path[-1])
        except (KeyError, IndexError, TypeError):
            continue
    return body


def fuzz(directory: pathlib.Path, cases: int, seed: int) -> int:
    place, draw = saved(directory), random.Random(seed)
    path = place / "manifest.json"
    text = path.read_text()
    body = json.loads(text)
    refused = 0
    before = sorted(p.name for p in directory.rglob("*"))
    tracemalloc.start()
    for n in range(cases):
        if n % 4 == 0:  # bytes, not values
            data = bytearray(text.encode())
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(data[: draw.randrange(len(data))] if n % 8 else data)
        else:
            try:
                path.write_text(sealed(mutated(body, draw)))
            except (ValueError, UnicodeError):
                continue
        try:
            read_manifest(FilePlace(place))  # a restore depends on this alone
            got = checkpoint.restore(place, like()).tree
            assert got["a"].shape == (4, 6)  # the change was one that means nothing here
        except REFUSED:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, "a manifest of a few kilobytes asked for more"
    assert sorted(p.name for p in directory.rglob("*")) == before
    path.write_text(text)
    return refused


def test_manifests_that_mean_harm_are_refused(tmp_path: pathlib.Path) -> None:
    assert fuzz(tmp_path, 400, seed=0) > 300


@pytest.mark.nightly
def test_ten_thousand_manifests_that_mean_harm(tmp_path: pathlib.Path) -> None:
    assert fuzz(tmp_path, 12000, seed=1) > 9000


def _leaf(body: Any) -> Any:
    return body["leaves"]["['a']"]


CRAFTED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a file outside": (
        lambda b: _leaf(b)["chunks"][0].update(file="../../x.safetensors"),
        "is not the name of a checkpoint file",
    ),
    "an absolute file": (
        lambda b: _leaf(b)["chunks"][0].update(file="/etc/passwd"),
        "is not the name of a checkpoint file",
    ),
    "a chunk outside of the leaf": (lambda b: _leaf(b)["chunks"][0].update(offset=[1, 0]), "is outside"),
    "bytes outside of the file": (lambda b: _leaf(b)["chunks"][0].update(start=1 << 40), "are outside of"),
    "a huge shape": (lambda b: _leaf(b).update(shape=[1 << 40, 1 << 40]), "overlap or leave a part out"),
    "a huge chunk": (
        lambda b: (_leaf(b).update(shape=[1 << 40, 6]), _leaf(b)["chunks"][0].update(shape=[1 << 40, 6])),
        "are outside of",
    ),
    "overlapping chunks": (lambda b: _leaf(b)["chunks"].append(_leaf(b)["chunks"][0]), "overlap or leave"),
    "overlapping ranges": (
        lambda b: b["leaves"]["['c']"]["chunks"][0].update(start=_leaf(b)["chunks"][0]["start"] + 8),
        "in two ranges or in none",
    ),
    "a dtype that is code": (lambda b: _leaf(b).update(dtype="__import__('os')"), "is not known"),
    "another kind of file": (lambda b: b.update(kind="pickle"), "is not a manifest of a checkpoint"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CRAFTED)]
)
def test_crafted(tmp_path: pathlib.Path, name: str) -> None:
    place = saved(tmp_path)
    change, message = CRAFTED[name]
    body = json.loads((place / "manifest.json").read_text())
    change(body)
    (place / "manifest.json").write_text(sealed(body))
    with pytest.raises(DamagedError, match=message):
        checkpoint.restore(place, like())


def test_deep_and_long_json() -> None:
    for text in ("[" * 100_000, '{"kind":' * 50_000, "9" * 100_000, "\x00", "", "null", '"' + "a" * 1000):
        with pytest.raises(REFUSED):
            decoded(text, "manifest.json")


def test_files_that_are_links_pipes_or_cut(tmp_path: pathlib.Path) -> None:
    place = saved(tmp_path)
    path = next(place.glob("*.safetensors"))
    data = path.read_bytes()
    (tmp_path / "elsewhere").write_bytes(data)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="cannot be read"):
        checkpoint.restore(place, like())
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedError, match="is not a file"):
        checkpoint.restore(place, like())
    path.unlink()
    path.write_bytes(data[:-1])
    with pytest.raises(DamagedError, match=rf"has {len(data) - 1} bytes, {len(data)} were written"):
        checkpoint.restore(place, like())


def test_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = saved(tmp_path)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    assert "['a']  (4, 6)  float32  96  1 chunk" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(place)]) == 0 and "unchanged" in capsys.readouterr().out
    tree = like() | {"b": torch.ones(3, dtype=torch.bool), "d": torch.ones(1)}
    checkpoint.save(tmp_path, tree, step=2, durable=False)
    assert main(["checkpoint", "diff", str(tmp_path), str(tmp_path), "--step", "1", "--other-step", "2"]) == 1
    said = capsys.readouterr().out
    assert "['a']: 23 of 24 elements differ, by 23 at most" in said and "['d']: only the second has it" in said
    assert main(["checkpoint", "diff", str(place), str(place)]) == 0 and "no leaf differs" in capsys.readouterr().out
    victim = next(place.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\xff")
    assert main(["checkpoint", "verify", str(place)]) == 1 and "have changed" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", str(tmp_path / "nowhere")]) == 2
    assert "which does not exist" in capsys.readouterr().err
