"""Covers the example of block-sparse attention: GPT and BERT learn, and dense attention prints the same losses."""

import pathlib
import re
import runpy
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/sparse_long.py"


def losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> list[float]:
    size = ["--length", "100", "--block", "16", "--dim", "32", "--data", str(EXAMPLE), __file__]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *size, *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"parameters, 100 tokens, \d+\.\d% of the blocks", out)
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", out)]


@pytest.mark.parametrize("model", ["gpt", pytest.param("bert", marks=pytest.mark.nightly)])
def test_it_learns_and_all_attention_is_the_same(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = losses(monkeypatch, capsys, "--model", model, "--steps", "6", "--batch", "2")
    assert len(sparse) == 6 and sparse[-1] < sparse[0]
    for other in ("dense", "blockwise"):
        found = losses(monkeypatch, capsys, "--model", model, "--steps", "2", "--batch", "2", "--attention", other)
        assert found == pytest.approx(sparse[:2], abs=2e-4)
