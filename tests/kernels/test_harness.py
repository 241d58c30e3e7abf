"""Covers kernels.check, swap and measure: each kind of wrong candidate by name, files in a process, fake clocks."""

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import kernels
from shardfn.cli import main, training_step, write_tasks
from shardfn.kernels import _harness_cases

RMS = kernels.MODULE_OPS["rms_norm"].reference
NORM = kernels.KERNELS["row_norm"].reference
GELU = kernels.KERNELS["gelu"].reference


def test_all_ops_have_cases() -> None:
    assert set(_harness_cases.CASES) == set(kernels.KERNELS)


@pytest.mark.parametrize("name", sorted(kernels.KERNELS))
def test_cases_fit_the_schema_and_the_definition(name: str) -> None:
    kernel = kernels.KERNELS[name]
    args = _harness_cases.CASES[name].make(_harness_cases.Size(3, 5))
    assert len(args) == len(kernel.op.default._schema.arguments)
    with kernels.implemented_by("reference"):
        kernel.op(*args)


def _odd(x: Tensor, *rest: Any) -> Tensor:
    y = NORM(x, *rest)
    return torch.cat([y[..., :-1], torch.zeros_like(y[..., :1])], -1) if x.shape[-1] % 2 else y


def _mapped(x: Tensor, *rest: Any) -> Tensor:
    return NORM(x, *rest) if x.ndim == 2 else NORM(x.transpose(-1, -2).contiguous().view_as(x), *rest)


def _batched(x: Tensor, *rest: Any) -> Tensor:
    y = NORM(x, *rest)
    return torch.nextafter(y, torch.zeros(())) if len(x) == 33 else y


def _odd_of_module(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return RMS(x, weight, 0.1 if x.shape[-1] % 2 else eps)


def _detached(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return RMS(x, weight.detach(), eps)


@pytest.mark.parametrize(
    "f, named", [(RMS, set()), (_odd_of_module, {"odd sizes", "gradient"}), (_detached, {"gradient"})]
)
def test_a_function_of_transformers_is_checked_as_a_kernel(f: Any, named: set[str]) -> None:
    report = kernels.check("rms_norm", f)
    assert {*report.failures} == named, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(kernels.MODULE_OPS))
def test_definitions_pass_their_checks(name: str) -> None:
    report = kernels.check(name, kernels.MODULE_OPS[name].reference)
    skipped = {v.check for v in report.verdicts if v.status == "skipped"}
    assert report.passed and skipped == {"bits", "batch invariance"}, str(report)


_KEPT: list[Tensor] = []


def _leaking(*args: Any) -> Tensor:
    y = NORM(*args)
    _KEPT.append(y.clone())
    return y


@pytest.mark.parametrize(
    "f, named",
    [
        (NORM, ()),
        (_odd, ("odd sizes", "bits", "batch invariance")),
        (_mapped, ("vmap",)),
        (_batched, ("bits", "batch invariance")),
        (_leaking, ("memory",)),
    ],
)
def test_a_wrong_candidate_is_found_by_name(f: Any, named: tuple[str, ...]) -> None:
    report = kernels.check("row_norm", f)
    _KEPT.clear()
    found = set(report.failures)
    assert found == set(named) or (f is _odd and "odd sizes" in found and "even sizes" not in found), str(report)


def test_the_library_uses_a_candidate_inside_the_context_only() -> None:
    calls = []

    def candidate(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return GELU(x)

    with kernels.swap("gelu", candidate):
        calls.clear()
        kernels.gelu(torch.ones(3))
    kernels.gelu(torch.ones(3))
    assert calls == [(3,)]
    with pytest.raises(ValueError, match="must pass its checks"), kernels.swap("gelu", torch.zeros_like):
        pass


def test_faster_by_itself_and_slower_in_the_step_is_reported() -> None:
    now, inside = [0.0], [False]

    def candidate(x: Tensor) -> Tensor:
        now[0] += 5.0 if inside[0] else 1.0
        return GELU(x)

    def present(x: Tensor) -> Tensor:
        now[0] += 2.0
        return GELU(x)

    def make() -> Any:
        def step() -> Tensor:
            inside[0] = True
            y = kernels.gelu(torch.ones(3))
            inside[0] = False
            return y

        return step

    with kernels.swap("gelu", present):
        steps = {"decode": make, "other": lambda: lambda: torch.ones(1)}
        report = kernels.measure("gelu", candidate, steps, rounds=3, clock=lambda: now[0])
    assert report.verdict == "faster by itself, slower in the step decode"
    assert report.steps == {"decode": 2.5} and report.calls["other"] == 0 and set(report.alone.values()) == {0.5}


@pytest.mark.nightly
def test_a_right_candidate_is_slower_in_a_ready_step() -> None:
    now, inside = [0.0], [False]

    def candidate(*args: Any) -> Tensor:
        now[0] += 5.0 if inside[0] else 1.0
        return NORM(*args)

    def present(*args: Any) -> Tensor:
        now[0] += 2.0
        return NORM(*args)

    def make() -> Any:
        step = training_step()

        def run() -> Tensor:
            inside[0] = True
            loss = step()
            inside[0] = False
            return loss

        return run

    with kernels.swap("row_norm", present):
        report = kernels.measure("row_norm", candidate, {"training": make}, rounds=1, clock=lambda: now[0])
    assert report.verdict == "faster by itself, slower in the step training"
    assert report.calls["training"] >= 5 and report.differences["training"] == 0


@pytest.mark.nightly
def test_a_file_is_measured_in_ready_steps(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "good.py").write_text(
        "from shardfn.kernels import find_op\nrotate = find_op('rotate').reference\n"
    )
    assert (
        main(["kernels", "bench", str(path), "--rounds", "1", "--seconds", "600", "--steps", "training", "decode"]) == 0
    )
    said = capsys.readouterr().out
    assert "training_step" in said and "decode_step" in said and "calls" in said
    with pytest.raises(ValueError, match="steps must be 'module:function', got \\['prefill'\\]"):
        kernels.measure_file(path, steps=["prefill"])


def test_a_task_has_its_files(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama = kernels.ArchitectureCoverage("llama", {"rms_norm": 5}, ())
    broken = kernels.ArchitectureCoverage("broken", {}, (), "ValueError: no size")
    folders = write_tasks(tmp_path, ["gelu", "rms_norm"], [llama, broken])
    assert [x.name for x in folders] == ["gelu", "rms_norm"]
    for folder in folders:
        files = {path.name: path.read_text() for path in folder.iterdir()}
        assert {*files} == {"reference.py", "inputs.py", "candidate.py", "task.md"}
        names: dict[str, Any] = {}
        for name in ("reference.py", "inputs.py", "candidate.py"):
            exec(files[name], names)
        args = names["inputs"](3, 5)
        assert names["reference"](*args).shape == (3, 5)
        with pytest.raises(NotImplementedError, match="fill in"):
            names[folder.name](*args)
        assert "odd sizes" in files["task.md"] and ("llama" in files["task.md"]) == (folder.name == "rms_norm")
    table = (tmp_path / "architectures.md").read_text()
    assert "2 model types, of which 1 were built" in table and "- broken: ValueError: no size" in table
    assert main(["kernels", "tasks", "--out", str(tmp_path), "--op", "no_such"]) == 2
    assert "an op must have a name and cases in the harness, got 'no_such'" in capsys.readouterr().err


@pytest.mark.nightly
def test_architectures_have_ops_by_their_numbers() -> None:
    pytest.importorskip("transformers")
    found = {x.model_type: x for x in kernels.find_architectures(["llama", "gpt2", "mixtral", "bloom", "deepseek_v3"])}
    assert found["llama"].calls == {"attention": 2, "causal_loss": 1, "gated_mlp": 2, "rms_norm": 5, "rotary": 2}
    assert found["gpt2"].calls == {"attention": 2, "causal_loss": 1, "layer_norm": 5, "mlp": 2}
    assert found["mixtral"].calls == {"attention": 2, "causal_loss": 1, "experts": 2, "rms_norm": 5, "rotary": 2}
    assert found["bloom"].unmatched == ("BloomAttention", "BloomMLP") and not found["llama"].unmatched
    assert not any(x.problem for x in found.values())
    [absent] = kernels.find_architectures(["no_such_type"])
    assert absent.problem.startswith("KeyError")


@pytest.mark.parametrize(
    "text, reason, said",
    [
        ("", "missing", "must have a function"),
        ("raise OSError('no such model')", "import", "raises OSError: no such model"),
        pytest.param("while True: pass", "time", "must end within 1 s", marks=pytest.mark.nightly),
        pytest.param("def gelu(x, y): return x", "signature", "must take 1 arguments", marks=pytest.mark.nightly),
        pytest.param("import os; os._exit(3)", "exit", "exit status 3", marks=pytest.mark.nightly),
        pytest.param(
            "import torch\ndef gelu(x): return torch.ones(1 << 36)",
            "memory",
            "limit of memory",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_bad_file_is_an_error_of_its_kind(text: str, reason: str, said: str, tmp_path: pathlib.Path) -> None:
    (path := tmp_path / "candidate.py").write_text(text)
    limits = kernels.ProcessLimits(seconds=1.0 if reason == "time" else 120.0)
    with pytest.raises(kernels.CandidateError, match=said) as caught:
        kernels.check_file(path, limits=limits)
    assert caught.value.reason == reason


def test_a_file_is_checked_from_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list"]) == 0 and "gelu(Tensor x) -> Tensor" in capsys.readouterr().out
    assert main(["kernels", "check", str(tmp_path / "missing.py")]) == 2
    assert "must be in a Python file" in capsys.readouterr().err
    (path := tmp_path / "good.py").write_text("from shardfn.kernels import KERNELS\ngelu = KERNELS['gelu'].reference\n")
    assert main(["kernels", "check", str(path)]) == 0
    assert capsys.readouterr().out.startswith("gelu: passed")


@pytest.mark.nightly
def test_a_file_is_measured_from_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "good.py").write_text("from shardfn.kernels import KERNELS\ngelu = KERNELS['gelu'].reference\n")
    assert main(["kernels", "bench", str(path), "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "by itself" in said and "quartiles" in said
