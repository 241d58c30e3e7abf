"""Covers `shardfn checkpoint`: each command as a user calls it, right and wrong."""

import importlib.util
import pathlib
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

import shardfn as sf
from shardfn.cli import main

Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit status of a command, and its output."""

    def run(*words: object) -> tuple[int, str]:
        status = main(["checkpoint", *map(str, words)])
        out, err = capsys.readouterr()
        assert bool(err) == (status == 2 or "error:" in err) and "Traceback" not in err
        return status, out + err

    return run


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """The checkpoints of steps 1 to 3 of a training in bfloat16."""
    mixed = sf.mixed_precision(lambda p, x: (x @ p["layer.weight"].T).square().mean(), sf.Policy.bf16())
    step = sf.sharded_step(mixed, sf.optim.adamw(1e-2))
    state = step.init({"layer.weight": torch.ones(3, 5)})
    with sf.checkpoint.Manager(tmp_path / "run", keep_last=5) as manager:
        for n in range(3):
            state, _ = step(state, torch.ones(4, 5))
            manager.save(state, user={"next_batch": n + 1})
            manager.wait()
    return tmp_path / "run"


def test_inspect(run: pathlib.Path, said: Said) -> None:
    status, text = said("inspect", run)
    lines = text.splitlines()
    assert status == 0 and lines[0] == f"{run / 'step_000003'}: step 3, saved on a mesh of one device"
    assert lines[1:3] == ["6 leaves of 222 bytes, in 3 files", "user: {'next_batch': 3}"]
    assert "params['layer.weight']  (3, 5)  bfloat16  30  1 chunk" in lines
    assert "step 2" in said("inspect", run, "--step", 2)[1].splitlines()[0]
    assert "step 1" in said("inspect", run / "step_000001", "--step", 1)[1].splitlines()[0]


def test_verify(run: pathlib.Path, said: Said) -> None:
    status, text = said("verify", run)
    assert status == 0 and text.startswith("step 3: 3 files, ") and text.endswith(" bytes, unchanged\n")
    assert said("verify", run, "--step", 1)[1].startswith("step 1:")
    file = next((run / "step_000003").glob("params*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, text = said("verify", run)
    assert status == 1 and f"{file}: bytes" in text and "of params['layer.weight'], have changed" in text
    assert said("verify", run, "--step", 2)[0] == 0
    file.unlink()
    assert said("verify", run)[0] == 1


def test_diff(run: pathlib.Path, said: Said) -> None:
    assert said("diff", run, run) == (0, "no leaf differs\n")
    status, text = said("diff", run, run, "--step", 1, "--other-step", 2)
    assert status == 1 and "step: 1 of 1 elements differ, by 1 at most" in text
    assert said("diff", run / "step_000001", run / "step_000002") == (status, text)
    sf.checkpoint.save(run.with_name("other"), {"layer.weight": torch.ones(5)}, 9, at="params")
    status, text = said("diff", run, run.with_name("other"))
    assert status == 1 and "params['layer.weight']: (3, 5) bfloat16 became (5,) float32" in text
    assert "step: only the first has it" in text


def test_export_and_import(run: pathlib.Path, said: Said, tmp_path: pathlib.Path) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    assert said("export", run, out, "--step", 1) == (0, f"1 parameters written to {out}\n")
    assert load_file(out / "model.safetensors")["layer.weight"].dtype == torch.float32  # the master copies
    assert said("export", run, out, "--dtype", "float16")[0] == 0
    assert load_file(out / "model.safetensors")["layer.weight"].dtype == torch.float16
    status, text = said("import", out, new, "--step", 7)
    assert status == 0 and "restore them with restore(..., at='params')" in text
    assert "1 leaf of 30 bytes, in 1 file\n" in said("inspect", new)[1]
    like = {"layer.weight": torch.zeros(3, 5)}
    assert sf.checkpoint.restore(new, like, at="params").tree["layer.weight"].abs().sum() > 0
    assert said("import", out, new, "--step", 7)[0] == 2  # it is there


@pytest.mark.parametrize(
    "what",
    ["inspect", pytest.param("verify", marks=pytest.mark.nightly), pytest.param("export", marks=pytest.mark.nightly)],
)
def test_places_that_have_no_such_checkpoint(run: pathlib.Path, said: Said, tmp_path: pathlib.Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "step_000004.tmp-0a").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    out = ["out"] if what == "export" else []
    for words, text in (
        ([tmp_path / "nowhere"], "nowhere, which does not exist"),
        ([tmp_path / "file"], "file, which is not a directory"),
        ([tmp_path / "empty"], "empty, which has none"),
        ([tmp_path / "begun"], "has no complete one: step_000004.tmp-0a is being written, or its job ended"),
        ([tmp_path / "begun" / "step_000004.tmp-0a"], "is a checkpoint that is being written, or whose job ended"),
        ([run, "--step", 7], "no checkpoint of step 7 in .*, which has checkpoints of steps [1, 2, 3]"),
        ([run / "step_000001", "--step", 2], "is the checkpoint of step 1, not of step 2. Pass the directory of the"),
        (["nosuch3://bucket"], "nosuch3"),
        *([] if importlib.util.find_spec("s3fs") else [(["s3://bucket"], "s3fs")]),  # a package that is missing
    ):
        status, found = said(what, words[0], *out, *words[1:])
        assert status == 2 and all(part in found for part in text.split(".*")), found


def test_refusals_of_export_and_import(run: pathlib.Path, said: Said, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    sf.checkpoint.save(tmp_path / "flat", {"w": torch.ones(2)}, 1)
    for words, text in (
        (
            ["export", tmp_path / "flat", tmp_path / "out"],
            "must have leaves below params, got ['w']. Save the state",
        ),
        (["export", run, tmp_path / "file"], "file is a file, or lies below one: weights need a directory"),
        (["import", tmp_path / "nowhere", tmp_path / "new"], "no weights in .*nowhere, which does not exist"),
        (["import", tmp_path / "file", tmp_path / "new"], "is a file: pass the directory that it is in"),
        (["import", run, tmp_path / "new"], "must have model.safetensors or model.safetensors.index.json"),
    ):
        status, found = said(*words)
        assert status == 2 and all(part in found for part in text.split(".*")), found
        assert not (tmp_path / "new").exists() and not (tmp_path / "out").exists()
    assert said("export", run, tmp_path / "out")[0] == 0
    status, found = said("import", tmp_path / "out", tmp_path / "file")
    assert status == 2 and "file is a file, or lies below one: checkpoints need a directory" in found
