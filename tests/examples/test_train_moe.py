"""Covers examples/train_moe.py: its files and table, and that two ranks with experts train as one."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/train_moe.py"
SIZE = ["--seeds", "2", "--steps", "4", "--eval-every", "2", "--eval-batches", "1", "--dim", "16", "--width", "32"]


def run(out: pathlib.Path, ranks: int, *more: str) -> dict[str, list[list[list[float]]]]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    data = ["--data", str(EXAMPLE), __file__, "--batch", "4", "--length", "16", "--out", str(out)]
    command = [sys.executable, *start, str(EXAMPLE), *SIZE, *data, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\| 4 \| [\d.]+ \+- [\d.]+ \| [\d.]+", done.stdout)
    found = json.loads((out / "curves.json").read_text())
    assert {len(found[name]) for name in ("dense", "8 experts")} == {2}
    return found


@pytest.mark.nightly
def test_it_compares_two_models(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 1)
    assert [step for step, _ in found["8 experts"][0]] == [2, 4]
    assert "Steps of 8 experts to the last loss of dense" in (tmp_path / "curves.md").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("exchange", ["tokens", "weights"])
def test_two_ranks_train_as_one(exchange: str, tmp_path: pathlib.Path) -> None:
    one = run(tmp_path / "one", 1)
    two = run(tmp_path / "two", 2, "--exchange", exchange, "--zero", "3")
    for name in ("dense", "8 experts"):
        for a, b in zip(one[name], two[name], strict=True):
            assert [x[1] for x in b] == pytest.approx([x[1] for x in a], abs=1e-3)
