"""Covers the weights of a checkpoint as files, and back, by the command line."""

import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardfn as sf
from shardfn import checkpoint
from shardfn.cli import main
from shardfn.interop import export_checkpoint


def test_masters_are_written_where_there_are_some(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    params, apply = sf.from_module(module)
    loss = sf.mixed_precision(lambda p, x: apply(p, x).square().mean(), sf.Policy.bf16())
    rule = sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(1e-3))
    step = sf.sharded_step(loss, rule)
    state, _ = step(step.init(params), torch.randn(4, 3))
    checkpoint.save(tmp_path / "run", state)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "4 parameters written" in capsys.readouterr().out
    got = load_file(tmp_path / "out" / "model.safetensors")
    want = sf.master_params(state)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == torch.float32 and torch.equal(got[name], x.full_tensor())
    assert any(not torch.equal(got[n], state.params[n].full_tensor().float()) for n in got)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "b"), "--dtype", "bfloat16"]) == 0
    small = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(small[n], x.bfloat16()) for n, x in got.items())


def test_files_become_a_checkpoint(tmp_path: pathlib.Path) -> None:
    tree = {"a.weight": torch.randn(7, 3), "n": torch.tensor(4), "b": torch.randn(5).bfloat16()}
    save_file(tree, tmp_path / "model.safetensors")
    assert main(["checkpoint", "import", str(tmp_path), str(tmp_path / "run"), "--step", "3"]) == 0
    like = {name: torch.zeros_like(x) for name, x in tree.items()}
    got = checkpoint.restore(tmp_path / "run", like, at="params")
    assert got.step == 3 and all(torch.equal(got.tree[n], x) for n, x in tree.items())
    assert main(["checkpoint", "import", str(tmp_path), str(tmp_path / "run"), "--step", "3"]) == 2  # the step exists
    assert main(["checkpoint", "import", str(tmp_path / "none"), str(tmp_path / "run")]) == 2


def test_trees_of_trees_and_values_without_parameters(tmp_path: pathlib.Path) -> None:
    tree = {"blocks": [{"w": torch.ones(2)}, {"w": torch.zeros(3)}]}
    checkpoint.save(tmp_path / "a", tree, 1, at="params")
    assert export_checkpoint(tmp_path / "a", tmp_path / "out") == ["blocks.0.w", "blocks.1.w"]
    checkpoint.save(tmp_path / "b", {"w": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match="must have leaves below params, got"):
        export_checkpoint(tmp_path / "b", tmp_path / "out")
    clash = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    checkpoint.save(tmp_path / "c", clash, 1, at="params")
    with pytest.raises(ValueError, match="the same name"):
        export_checkpoint(tmp_path / "c", tmp_path / "out")
    with pytest.raises(ValueError, match="is not one of"):
        export_checkpoint(tmp_path / "a", tmp_path / "out", dtype="int8")
