"""Covers checkpoints with experts that DeepSpeed itself writes: read, and restored into states of other meshes.

Run with `pytest -m deepspeed`; see `test_deepspeed`.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop
from shardfn.testing import distributed

PROGRAM = pathlib.Path(__file__).parent / "deepspeed_experts.py"
PYTHON = os.environ.get("DEEPSPEED_PYTHON", sys.executable)
CASES = ("stage 0", "stage 1", "stage 2, bf16", "stage 2, data first")
EXPERTS = 4

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        "DEEPSPEED_PYTHON" not in os.environ and importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install deepspeed==0.19.8, or set DEEPSPEED_PYTHON",
    ),
]


def names(name: str) -> str:
    """From "moes.0.experts.3.0.weight" to DeepSpeed's."""
    return re.sub(r"^(moes\.\d+)\.experts\.", r"\1.deepspeed_moe.experts.deepspeed_experts.", name)


def tree_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves of a state, with the experts of a layer in one."""
    found = {name: re.fullmatch(r"(moes\.\d+)\.deepspeed_moe.*deepspeed_experts\.0\.(.*)", name) for name in tensors}
    stacks = {f"{m[1]}.experts.{m[2]}": m for m in found.values() if m}
    whole = {
        leaf: torch.stack([tensors[names(f"{m[1]}.experts.{e}.{m[2]}")] for e in range(EXPERTS)])
        for leaf, m in stacks.items()
    }
    return {name: x for name, x in tensors.items() if "deepspeed_experts" not in name} | whole


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """A tree whose keys, with dots between, are the names."""
    out: dict[str, Any] = {}
    for name, x in leaves.items():
        *path, last = name.split(".")
        at = out
        for key in path:
            at = at.setdefault(key, {})
        at[last] = x
    return out


@distributed(world=2)
def _restored(place: str, want: dict[str, Any]) -> None:
    """Into a state whose experts lie on two ranks."""
    mesh = sf.make_mesh({"ep": 2}, device="cpu")
    params = nested({name: torch.zeros_like(x) for name, x in tree_of(want_fp32(want)).items()})
    specs = nested({name: sf.P("ep") if ".experts." in name else sf.P() for name in tree_of(want_fp32(want))})
    step = sf.sharded_step(lambda p, x: x.sum(), sf.optim.adamw(1e-2), mesh=mesh, specs=specs, batch=sf.P("ep"))
    state = interop.restore_deepspeed(interop.read_deepspeed_experts(place), step.init(params), names=names)
    assert int(state.step) == 2
    adam = state.opt_state[0]
    for kind, tree in (("fp32", state.params), ("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
        whole = nested(tree_of({name: w[kind] for name, w in want.items()}))
        for got, x in zip(sf.core.tree_leaves(sf.unshard(tree)), sf.core.tree_leaves(whole), strict=True):
            assert torch.equal(got, x), kind


def want_fp32(want: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: w["fp32"] for name, w in want.items()}


def test_states_are_those_in_the_memory_of_deepspeed(tmp_path: pathlib.Path) -> None:
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    line = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(PROGRAM), str(tmp_path)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for case in CASES:
        found = interop.read_deepspeed_experts(str(tmp_path / case))
        want = torch.load(tmp_path / case / "want.pt", weights_only=True)
        assert found.step == 2 and found.params.keys() == want.keys() and found.buffers.keys() == {"seen"}
        for name, states in want.items():
            for kind, x in states.items():
                got = found.params if kind == "fp32" else found.moments[kind]
                assert torch.equal(got[name], x), (case, name, kind)
        _restored(str(tmp_path / case), want)
