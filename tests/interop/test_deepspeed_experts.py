"""Covers checkpoints with experts that DeepSpeed itself writes: read, and restored into states of other meshes; and
those written here, from which it continues.

Run with `pytest -m deepspeed`; see `test_deepspeed`.
"""

import copy
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop
from shardfn.nn import moe
from shardfn.testing import distributed

PROGRAM = pathlib.Path(__file__).parent / "deepspeed_experts.py"
FILES = PROGRAM.with_name("deepspeed_expert_files.py")
# Tests are not a package, and the programs run without shardfn installed.
shared: Any = types.SimpleNamespace(**runpy.run_path(str(PROGRAM.with_name("deepspeed_expert_model.py"))))
PYTHON = os.environ.get("DEEPSPEED_PYTHON", sys.executable)
READ = ("stage 0", "stage 1", "stage 2, bf16", "stage 2, data first", "PR-MoE, stage 0", "PR-MoE, stage 2")

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        "DEEPSPEED_PYTHON" not in os.environ and importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install deepspeed==0.19.8, or set DEEPSPEED_PYTHON",
    ),
]


def ran(ranks: int, program: pathlib.Path, *words: object) -> None:
    """Runs a program on several ranks under DeepSpeed's Python."""
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    line = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", program, *words]
    done = subprocess.run([*map(str, line)], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def names(name: str) -> str:
    """From "moes.0.experts.3.0.weight" to DeepSpeed's."""
    return re.sub(r"^(moes\.\d+)\.experts\.", r"\1.deepspeed_moe.experts.deepspeed_experts.", name)


def tree_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves of a state, with the experts of a layer in one."""
    out = {name: x for name, x in tensors.items() if "deepspeed_experts" not in name}
    for name in tensors:
        found = re.fullmatch(r"(moes\.\d+)\.deepspeed_moe.*deepspeed_experts\.0\.(.*)", name)
        if found:
            leaf = f"{found[1]}.experts.{{}}{found[2]}"
            count = sum(x.endswith(found[2]) and x.startswith(f"{found[1]}.deepspeed_moe.e") for x in tensors)
            own = [tensors[names(leaf.format(f"{e}."))] for e in range(count)]
            out[leaf.format("")] = torch.stack(own)
    return out


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
    ran(4, PROGRAM, tmp_path)
    for case in READ:
        found = interop.read_deepspeed_experts(str(tmp_path / case))
        want = torch.load(tmp_path / case / "want.pt", weights_only=True)
        assert found.step == 2 and found.params.keys() == want.keys() and found.buffers.keys() == {"seen"}
        for name, states in want.items():
            for kind, x in states.items():
                got = found.params if kind == "fp32" else found.moments[kind]
                assert torch.equal(got[name], x), (case, name, kind)
        _restored(str(tmp_path / case), want)


def layer(width: int, expert: torch.nn.Module, number: int, ep_size: int, residual: bool) -> torch.nn.Module:
    """The names of DeepSpeed's own with all experts."""
    del ep_size
    out, experts = torch.nn.Module(), torch.nn.Module()
    out.deepspeed_moe, gate = torch.nn.Module(), torch.nn.Module()
    gate.wg = torch.nn.Linear(width, number, bias=False)
    experts.deepspeed_experts = torch.nn.ModuleList(copy.deepcopy(expert) for _ in range(number))
    out.deepspeed_moe.gate, out.deepspeed_moe.experts = gate, experts
    if residual:
        out.mlp, out.coefficient = expert, torch.nn.Linear(width, 2)
    return out


def module_of(case: Any) -> torch.nn.Module:
    whole = case._replace(ep_size=1)
    return shared.filled(whole, shared.Net(whole, layer), 0)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = params["emb"]["weight"][x]
    for own in params["moes"].values():
        first, second = own["experts"]["0"], own["experts"]["2"]
        leaves = {"w_up": first["weight"], "b_up": first["bias"], "w_down": second["weight"], "b_down": second["bias"]}
        routing = moe.switch_top1(h @ own["deepspeed_moe"]["gate"]["wg"]["weight"].T)
        h = h + moe.apply(moe.gelu_experts, leaves, h, routing, exchange=moe.AllToAll("ep"))
    logits = h @ params["head"]["weight"].T + params["head"]["bias"]
    return torch.nn.functional.cross_entropy(logits.float(), (x + 1) % 11)


@distributed(world=2, timeout=600)
def _write_ours(directory: str, ranks: int) -> None:
    """From states that DeepSpeed has trained, or from ours, in one half of a mesh each half of the experts."""
    for case in shared.CASES:
        if case.ranks != ranks:
            continue
        net, config, place = module_of(case), shared.config_of(case), f"{directory}/{case.name}"
        recipe = interop.from_deepspeed_config(config, ranks=case.ranks)
        assert recipe.optimizer is not None
        leaves = tree_of({name: p.detach() for name, p in net.named_parameters()})
        frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
        step = sf.sharded_step(
            recipe.of(loss),
            recipe.optimizer,
            mesh=sf.make_mesh({"ep": 2}, device="cpu"),
            specs=nested({name: sf.P("ep") if ".experts." in name else sf.P() for name in leaves}),
            batch=sf.P("ep"),
            trainable=nested({name: name not in frozen for name in leaves}),
            zero=sf.Zero(stage=1, axis="ep"),
        )
        state: Any = step.init(nested(leaves))
        job = interop.DeepSpeedJob(config, case.ranks, net, shared.groups_of(case, net), ep_size=case.ep_size)
        if "here" in case.kind:
            for n in range(2):
                state, _ = step(state, shared.tokens(n)[step.rows(shared.ROWS)])
        else:
            found = interop.read_deepspeed_experts(place, "theirs")
            state = interop.restore_deepspeed(found, state, names=names)
        for tag in ("ours", "weights")[: 1 + ("here" in case.kind)]:
            interop.save_deepspeed(
                place, state, tag, learning_rate=1e-2, names=names, job=job, weights_only=tag == "weights"
            )


@pytest.mark.parametrize("ranks", [2, 4])
def test_deepspeed_goes_on_from_files_that_are_its_own(ranks: int, tmp_path: pathlib.Path) -> None:
    ran(ranks, FILES, "begin", tmp_path)
    _write_ours(str(tmp_path), ranks)
    ran(ranks, FILES, "go_on", tmp_path)
    for case in (x for x in shared.CASES if x.ranks == ranks):
        place = tmp_path / case.name
        want, got = (torch.load(place / f"{x}.pt", weights_only=True) for x in ("want", "got"))
        ours, theirs = (interop.read_deepspeed_experts(str(place), tag) for tag in ("ours", "theirs"))
        assert ours.step == theirs.step == 2 and got["steps"] == want["steps"] == 4, case
        if "here" in case.kind:  # its values are ours, and equal to rounding only
            assert got["losses"] == pytest.approx(want["losses"], abs=1e-6), case
            for name, x in want["params"].items():
                torch.testing.assert_close(got["params"][name], x, rtol=0, atol=1e-6, msg=f"{case}: {name}")
            module = torch.load(place / "module.pt", weights_only=True)
            assert all(torch.equal(module[name], x) for name, x in ours.params.items()), case
            continue
        assert got["differing"] == [] and got["rates"] == want["rates"] and got["losses"] == want["losses"], case
        assert all(torch.equal(got["params"][name], x) for name, x in want["params"].items()), case
        for mine, yours in ((ours.params, theirs.params), *((x, theirs.moments[k]) for k, x in ours.moments.items())):
            assert mine.keys() == yours.keys() and all(torch.equal(x, yours[n]) for n, x in mine.items()), case
