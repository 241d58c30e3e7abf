"""The training example end to end, as a user starts it: one process and two, to the end and interrupted."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/train_gpt.py"
PLAIN = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# five rows: two ranks hold unequal parts
TINY = (
    "--dim 32 --heads 2 --layers 2 --batch 5 --length 16 --eval-every 10 --eval-batches 2 --sample 8 --warmup 4".split()
)
PATIENCE = 300


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} plus {n} is {2 * n}\n" for n in range(600)))
    return path


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(launcher: list[str], text: pathlib.Path, out: pathlib.Path, *options: str) -> subprocess.Popen[str]:
    command = [*launcher, str(EXAMPLE), "--data", str(text), "--out", str(out), *TINY, *options]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, said


def rows(out: pathlib.Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interrupt(process: subprocess.Popen[str], out: pathlib.Path, number: int) -> tuple[int, str]:
    deadline = time.monotonic() + PATIENCE
    while len(rows(out)) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    return finish(process)


def assert_complete(out: pathlib.Path) -> None:
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.stat().st_size > 0 for path in out.glob("events.out.tfevents.*")] == [True]
    assert "validation_loss" in rows(out)[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,tp=2,pp=2", "dp=2,sp=2"])
def test_a_mesh_of_several_axes_computes_the_same(text: pathlib.Path, tmp_path: pathlib.Path, mesh: str) -> None:
    many = [*TORCHRUN[:-1], str(2 ** len(mesh.split(",")))]
    given = ("--steps", "10", "--lr", "0.01", "--heads", "4", "--batch", "8", "--accumulate", "2", "--sample", "0")
    runs = {}
    cut = ("--attention", "ring") if "sp" in mesh else ("--sequence",)
    for name, launcher, options in (("one", PLAIN, ()), ("many", many, ("--mesh", mesh, *cut))):
        out = tmp_path / name
        code, said = finish(start(launcher, text, out, *given, *options))
        assert code == 0, said
        assert_complete(out)
        runs[name] = rows(out)
    for a, b in zip(runs["one"], runs["many"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    assert runs["many"][-1]["validation_loss"] == pytest.approx(runs["one"][-1]["validation_loss"], rel=1e-4)


# Runs the example in this process for each list of arguments; prints the codes and the outputs.
ONE_BY_ONE = """
import contextlib, io, json, runpy, sys, traceback

example, lists = sys.argv[1:]
told = []
for arguments in json.loads(lists):
    sys.argv, said, code = [example, *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(example, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except Exception:
            code = 1
            traceback.print_exc()
    told.append((code, said.getvalue()))
print(json.dumps(told))
"""
NO_MESHES = ("dp=2,tp=2", "dp=1,dp=1", "ep=1", "dp=x")


@pytest.fixture(scope="module")
def refusals(text: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The answers to invalid arguments, by the argument; from one process, as a start takes seconds."""
    out = tmp_path_factory.mktemp("refused")
    runs = {mesh: ["--data", str(text), "--mesh", mesh] for mesh in NO_MESHES}
    runs["gone.txt"] = ["--data", str(out / "gone.txt")]
    lists = json.dumps([[*arguments, "--out", str(out / "x"), *TINY] for arguments in runs.values()])
    command = [*PLAIN, "-c", ONE_BY_ONE, str(EXAMPLE), lists]
    code, said = finish(subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True))
    assert code == 0, said
    return {name: (code, text) for name, (code, text) in zip(runs, json.loads(said), strict=True)}


@pytest.mark.day("dp=x")
@pytest.mark.parametrize(
    "mesh", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(NO_MESHES)]
)
def test_a_mesh_that_does_not_fit_is_refused(refusals: dict[str, tuple[int, str]], mesh: str) -> None:
    code, said = refusals[mesh]
    want = "is 2 x 2 ranks, but 1 were started" if mesh == "dp=2,tp=2" else "write sizes of dp, tp, sp and pp"
    assert code == 2 and want in said, said


def test_missing_data_is_named(refusals: dict[str, tuple[int, str]]) -> None:
    code, said = refusals["gone.txt"]
    assert code != 0
    assert "gone.txt" in said


@pytest.mark.nightly
def test_one_process_and_two_that_run_a_graph_agree(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    runs = {}
    for name, launcher, options in (("one", PLAIN, ()), ("two", TORCHRUN, ("--jit", "graph"))):
        out = tmp_path / name
        code, said = finish(start(launcher, text, out, "--steps", "30", "--lr", "0.01", *options))
        assert code == 0, said
        assert_complete(out)
        runs[name] = rows(out), (out / "sample.txt").read_text()
        assert (out / "sample.txt").read_text() in said
        # No terminal: lines, and no control characters of a progress bar.
        log = said.partition("--- sample ---")[0]
        assert "\nstep 1: loss 5." in log
        assert not {"\r", "\x1b"} & set(log)
    (one, sample), (two, same_sample) = runs.values()
    assert [row["step"] for row in one] == list(range(1, 31))
    assert [row["step"] for row in one if "validation_loss" in row] == [10, 20, 30]
    assert one[0]["loss"] > 5.3
    assert one[-1]["loss"] < 3.5
    assert one[-1]["validation_loss"] < 3.5
    for a, b in zip(one, two, strict=True):
        for name in a.keys() - {"tokens_per_s"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4)
    assert sample == same_sample


@pytest.mark.nightly
def test_ctrl_c_on_one_process(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    process = start(PLAIN, text, tmp_path / "x", "--steps", "1000000", "--precision", "bf16")
    code, said = interrupt(process, tmp_path / "x", signal.SIGINT)
    assert code == 0, said
    assert_complete(tmp_path / "x")
    assert "--- sample ---" in said


@pytest.mark.nightly
def test_ctrl_c_under_torchrun(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tokenizers")
    options = (
        "--steps 1000000 --tokenizer bpe --vocab-size 300 --batch 8 --accumulate 2 --remat --zero 2 --optimizer lion"
    )
    process = start(TORCHRUN, text, tmp_path / "x", *options.split())
    _, said = interrupt(process, tmp_path / "x", signal.SIGINT)
    # the launcher ends with an error of its own, for the signal; the ranks ended normally
    assert "SignalException" in said
    assert "ChildFailedError" not in said
    assert_complete(tmp_path / "x")
    assert (tmp_path / "x/bpe.json").exists()
    assert "--- sample ---" in said


@pytest.mark.nightly
def test_minutes_end_the_run(text: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = ("--steps", "1000000", "--minutes", "0.01", "--precision", "fp16")
    code, said = finish(start(PLAIN, text, tmp_path / "x", *options))
    assert code == 0, said
    assert_complete(tmp_path / "x")


def weights(out: pathlib.Path) -> list[bytes]:
    """The bytes of the newest checkpoint."""
    newest = max((out / "checkpoints").glob("step_*"))
    return [path.read_bytes() for path in sorted(newest.glob("*.safetensors"))]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [PLAIN, TORCHRUN], ids=["python", "torchrun"])
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    text: pathlib.Path, tmp_path: pathlib.Path, launcher: list[str]
) -> None:
    given = ("--steps", "30", "--save-every", "7", "--sample", "0")
    code, said = finish(start(launcher, text, tmp_path / "whole", *given))
    assert code == 0, said
    process = start(launcher, text, tmp_path / "killed", *given)
    deadline = time.monotonic() + PATIENCE
    while len(rows(tmp_path / "killed")) < 16 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL if launcher is PLAIN else signal.SIGTERM)
    finish(process)
    code, said = finish(start(launcher, text, tmp_path / "killed", *given, "--resume"))
    assert code == 0, said
    one, other = rows(tmp_path / "whole"), rows(tmp_path / "killed")
    assert [r["step"] for r in other] == [r["step"] for r in one] == list(range(1, 31))
    assert [(r["loss"], r["grad_norm"]) for r in other] == [(r["loss"], r["grad_norm"]) for r in one]
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    code, said = finish(start(PLAIN, text, tmp_path / "killed", *given[2:], "--steps", "32", "--resume"))  # elsewhere
    assert code == 0 and rows(tmp_path / "killed")[-1]["step"] == 32, said
