"""Covers DeepSpeed as an independent oracle: the same configuration, rows and steps there and here.

Run with `pytest -m deepspeed`. DeepSpeed 0.19.8 and torch 2.13 are to be in the environment that DEEPSPEED_PYTHON names
the Python of (default: this one).
"""

import importlib.util
import json
import os
import pathlib
import runpy
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop
from shardfn.testing import distributed

PROGRAM = pathlib.Path(__file__).parent / "deepspeed_training.py"
SAVING = PROGRAM.with_name("deepspeed_saving.py")
# Tests are not a package, and the programs run without shardfn installed.
shared: Any = types.SimpleNamespace(**runpy.run_path(str(PROGRAM.with_name("deepspeed_model.py"))))
PYTHON = os.environ.get("DEEPSPEED_PYTHON", sys.executable)
STEPS = 5

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        "DEEPSPEED_PYTHON" not in os.environ and importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install deepspeed==0.19.8, or set DEEPSPEED_PYTHON",
    ),
]
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
ADAM_L2 = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "warmup_num_steps": 2, "warmup_type": "linear"}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_max_lr": 0.01}}
RANGE = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2}}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"optimizer": ADAMW, "scheduler": RANGE},
    "stage 1, microbatches": {"optimizer": ADAMW, "gradient_accumulation_steps": 4, "scheduler": WARMUP},
    "stage 2, clipped": {
        "optimizer": ADAM_L2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.2,
        "scheduler": COSINE,
    },
    "stage 3, clipped where nothing is said": {
        "optimizer": ADAMW,
        "gradient_accumulation_steps": 2,
        "scheduler": DECAY,
    },
}


def config_of(name: str) -> dict[str, Any]:
    stage = int(name[6])
    zero: dict[str, Any] = {"stage": stage} | ({"stage3_param_persistence_threshold": 20} if stage == 3 else {})
    first = {} if "nothing is said" in name else {"gradient_clipping": 0.0}
    return {"train_batch_size": 16, "zero_optimization": zero} | first | CASES[name]


def ran(*words: object, program: str = "torch.distributed.run") -> None:
    """Runs a module under DeepSpeed's Python."""
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    line = [PYTHON, "-m", program, *map(str, words)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def deepspeeds(config: dict[str, Any], place: pathlib.Path, steps: int = STEPS, *begun: pathlib.Path) -> dict[str, Any]:
    """The results of DeepSpeed on two ranks, and a checkpoint in `place / "saved"`."""
    told, out = place / "config.json", place / "out.pt"
    told.write_text(json.dumps(config | {"checkpoint": {"load_universal": bool(begun)}}))
    ran("--standalone", "--nproc-per-node=2", PROGRAM, told, out, steps, place / "saved", *begun)
    return torch.load(out, weights_only=True)


def start() -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in shared.model().named_parameters()}


def loss(p: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    x, y = batch
    hidden = torch.tanh(x @ p["0.weight"].T + p["0.bias"])
    return torch.nn.functional.mse_loss(hidden @ p["2.weight"].T + p["2.bias"], y)


@distributed(world=[1, 2], timeout=120)
def _compare(config: dict[str, Any], want: dict[str, Any], world: int) -> None:
    recipe = interop.from_deepspeed_config(config, ranks=2)
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    assert recipe.optimizer is not None
    step = sf.sharded_step(recipe.of(loss), recipe.optimizer, mesh=mesh, zero=recipe.zero)
    state = step.init(start())
    mine = slice(mesh.rank * 16 // world, (mesh.rank + 1) * 16 // world)
    for n in range(STEPS):
        rate = recipe.learning_rate(n)
        assert float(rate) == pytest.approx(want["rates"][n], rel=1e-6, abs=1e-12)
        state, metrics = step(state, tuple(t[mine] for t in shared.rows(n)))
        assert float(metrics["loss"]) == pytest.approx(want["losses"][n], abs=1e-6)
    for name, x in want["params"].items():
        got = state.params[name]
        got = got.full_tensor() if isinstance(got, sf.GlobalTensor) else got
        torch.testing.assert_close(got, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_deepspeed_and_its_checkpoints_are_read_exactly(name: str, tmp_path: pathlib.Path) -> None:
    config = config_of(name)
    want = deepspeeds(config, tmp_path)
    for world in (1, 2):
        _compare(config, want, world=world)
    if name.startswith("stage 0"):
        with pytest.raises(ValueError, match="stage 0"):
            interop.read_deepspeed(str(tmp_path / "saved"))
        return
    found = interop.read_deepspeed(str(tmp_path / "saved"))
    assert found.step == STEPS and found.params.keys() == want["params"].keys()
    for name_, x in want["params"].items():
        assert torch.equal(found.params[name_], x)
        assert all(found.moments[k][name_].shape == x.shape for k in ("exp_avg", "exp_avg_sq"))


@distributed(world=[1, 2, 4], timeout=120)
def _go_on(config: dict[str, Any], want: dict[str, Any], saved: str, world: int) -> None:
    """The last two steps of five, after three by DeepSpeed."""
    recipe = interop.from_deepspeed_config(config)
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    assert recipe.optimizer is not None
    step = sf.sharded_step(recipe.of(loss), recipe.optimizer, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state = interop.restore_deepspeed(interop.read_deepspeed(saved), step.init(start()))
    assert int(state.step) == 3
    for n in range(3, STEPS):
        state, metrics = step(state, tuple(t[step.rows(16)] for t in shared.rows(n)))
        assert float(metrics["loss"]) == pytest.approx(want["losses"][n], abs=1e-6)
    for name, x in want["params"].items():
        torch.testing.assert_close(state.params[name].full_tensor(), x, rtol=0, atol=1e-6)


@distributed(world=[1, 2, 4], timeout=120)
def _begin(config: dict[str, Any], directory: str, world: int) -> None:
    """Three steps, as a universal checkpoint."""
    recipe = interop.from_deepspeed_config(config)
    assert recipe.optimizer is not None
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    step = sf.sharded_step(recipe.of(loss), recipe.optimizer, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state = step.init(start())
    for n in range(3):
        state, _ = step(state, tuple(t[step.rows(16)] for t in shared.rows(n)))
    interop.save_deepspeed(directory, state, f"world{world}", learning_rate=float(recipe.learning_rate(3)))


# The rate falls from step to step: a run that resumes at a wrong step, or without moments, diverges.
BOTH = {"train_batch_size": 16, "gradient_clipping": 0.0, "optimizer": ADAMW, "scheduler": DECAY}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_jobs_go_on_here_and_there(stage: int, tmp_path: pathlib.Path) -> None:
    config = BOTH | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}}
    (tmp_path / "three").mkdir()
    want = deepspeeds(config, tmp_path)
    deepspeeds(config, tmp_path / "three", 3)
    for world in (1, 2, 4):
        _go_on(config, want, str(tmp_path / "three" / "saved"), world=world)
        _begin(config, str(tmp_path / "ours"), world=world)
    got = deepspeeds(config, tmp_path, STEPS, tmp_path / "ours")
    assert got["losses"] == pytest.approx(want["losses"][3:], abs=1e-6)
    assert got["rates"] == pytest.approx(want["rates"][3:], rel=1e-6)
    for name, x in want["params"].items():
        torch.testing.assert_close(got["params"][name], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "frozen", "tied", "groups", "small", "momentum", "sgd"])
def test_three_ranks_checkpoints_equal_the_result_of_zero_to_fp32(
    kind: str, stage: int, tmp_path: pathlib.Path
) -> None:
    ran("--standalone", "--nproc-per-node=3", SAVING, stage, kind, tmp_path)
    want = torch.load(tmp_path / "want.pt", weights_only=True)
    found = interop.read_deepspeed(str(tmp_path), "here")
    have = found.params | found.buffers | {name: found.params[of] for name, of in found.shared.items()}
    # zero_to_fp32 omits frozen parameters at stage 1.
    lost = {"mlp.0.weight", "mlp.1.bias"} if (kind, stage) == ("frozen", 1) else set()
    assert have.keys() == want.keys() | lost and ("seen" in found.buffers)
    for name, x in want.items():
        assert torch.equal(have[name], x), name
    trained = found.params.keys() - ({"mlp.0.weight", "mlp.1.bias"} if kind == "frozen" else set())
    states = {"sgd": set(), "momentum": {"momentum_buffer"}}.get(kind, {"exp_avg", "exp_avg_sq"})
    assert found.moments.keys() == states and all(x.keys() == trained for x in found.moments.values())
    assert found.step == 3
    if kind in ("sgd", "momentum"):  # DeepSpeed makes no universal checkpoint of these
        return
    words = ["--input_folder", tmp_path / "here", "--output_folder", tmp_path / "universal", "--inject_missing_state"]
    words += ["--num_extract_workers", 1, "--num_merge_workers", 1]
    ran(*words, program="deepspeed.checkpoint.ds_to_universal")
    if kind == "small" and stage < 3:  # DeepSpeed's own converter mixes up gradients that go round
        with pytest.raises(ValueError, match=r"(?s)read the one that it was made of.*mlp\.0\.weight"):
            interop.read_deepspeed(str(tmp_path), "universal")
        return
    other = interop.read_deepspeed(str(tmp_path), "universal")
    assert (other.step, other.shared) == (found.step, found.shared)
    for one, two in ((found.params, other.params), (found.buffers, other.buffers)):
        assert one.keys() == two.keys() and all(torch.equal(x, two[name]) for name, x in one.items())
    assert found.moments.keys() == other.moments.keys()
    for state, tree in found.moments.items():
        assert tree.keys() == other.moments[state].keys()
        assert all(torch.equal(x, other.moments[state][name]) for name, x in tree.items())


@distributed(world=2, timeout=120)
def _write_ours(directory: str) -> None:
    """From states that DeepSpeed has trained, or we for the plain ones; a file for each of three ranks."""
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    for case in shared.CASES:
        net, config = shared.net_of(case), shared.config_of(case)
        params, apply = sf.from_module(net)
        recipe = interop.from_deepspeed_config(config, ranks=3)
        assert recipe.optimizer is not None

        def token_loss(p: Any, x: torch.Tensor, apply: Any = apply) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(apply(p, x).float(), (x + 1) % 11)

        trainable = {name: net.get_parameter(name).requires_grad for name in params}
        zero = sf.Zero(stage=3, persist_elements=0)
        step = sf.sharded_step(recipe.of(token_loss), recipe.optimizer, mesh=mesh, zero=zero, trainable=trainable)
        state, place = step.init(params), f"{directory}/{case}"
        if "plain" in case:
            for n in range(3):
                state, _ = step(state, shared.tokens(n)[step.rows(12)])
        else:
            state = interop.restore_deepspeed(interop.read_deepspeed(place, "theirs"), state)
        job = interop.DeepSpeedJob(config, 3, net, shared.groups_of(case, net))
        rate: Any = recipe.learning_rate
        interop.save_deepspeed(
            place, state, "ours", learning_rate=float(rate(3)) if "scheduler" in config else rate, job=job
        )


def test_files_for_each_rank_are_those_that_deepspeed_writes_and_goes_on_from(tmp_path: pathlib.Path) -> None:
    program = PROGRAM.with_name("deepspeed_partitions.py")
    ran("--standalone", "--nproc-per-node=3", program, "begin", tmp_path)
    _write_ours(str(tmp_path))
    ran("--standalone", "--nproc-per-node=3", program, "go_on", tmp_path)
    for case in shared.CASES:
        want, got = (torch.load(tmp_path / case / f"{name}.pt", weights_only=True) for name in ("want", "got"))
        ours = interop.read_deepspeed(str(tmp_path / case), "ours")
        theirs = interop.read_deepspeed(str(tmp_path / case), "theirs")
        assert ours.step == theirs.step == 3 and ours.shared == theirs.shared, case
        assert (got["steps"], got["rates"]) == (want["steps"], pytest.approx(want["rates"], rel=1e-6)), case
        assert got["losses"] == pytest.approx(want["losses"], abs=1e-6), case
        for name, x in want["params"].items():
            torch.testing.assert_close(got["params"][name], x, rtol=0, atol=1e-6, msg=f"{case}: {name}")
        for name, x in got["whole"].items():
            mine = ours.params | ours.buffers | {name: ours.params[of] for name, of in ours.shared.items()}
            assert torch.equal(mine[name], x), f"{case}: {name}"
        if "plain" in case:  # its values are ours, and equal to 1e-6 only
            continue
        assert got["differing"] == [], case
        for mine, yours in ((ours.params, theirs.params), *((x, theirs.moments[k]) for k, x in ours.moments.items())):
            assert mine.keys() == yours.keys() and all(torch.equal(x, yours[n]) for n, x in mine.items()), case
