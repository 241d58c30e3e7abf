"""Covers checkpoints of DeepSpeed's with experts that are written from states: read again bit for bit, and refusals."""

import functools
import pathlib
import re
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import interop
from shardfn.core import tree_leaves
from shardfn.testing import distributed

WIDTH, NUMBERS = 6, {"moes.0": 4, "moes.1": 8}
FROZEN = ("emb.bias", "0.bias")


class Layer(nn.Module):
    """The names of `deepspeed.moe.layer.MoE` with all experts on one rank."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.deepspeed_moe = nn.ModuleDict({"gate": nn.ModuleDict(), "experts": nn.ModuleDict()})
        self.deepspeed_moe.gate["wg"] = nn.Linear(WIDTH, number, bias=False)
        experts = [nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(number)]
        self.deepspeed_moe.experts["deepspeed_experts"] = nn.ModuleList(experts)


class Net(nn.Module):
    def __init__(self, *numbers: int, frozen: bool = False) -> None:
        super().__init__()
        self.emb = nn.Linear(WIDTH, 3)
        self.moes = nn.ModuleList(Layer(n) for n in numbers or NUMBERS.values())
        self.register_buffer("seen", torch.arange(3.0))
        for name, p in self.named_parameters():
            p.requires_grad_(not (frozen and name.endswith(FROZEN)))


def names(name: str) -> str:
    """From "moes.0.experts.3.0.weight" to DeepSpeed's."""
    name = re.sub(r"^(moes\.\d+)\.experts\.", r"\1.deepspeed_moe.experts.deepspeed_experts.", name)
    return re.sub(r"^(moes\.\d+)\.gate", r"\1.deepspeed_moe.gate.wg", name)


@functools.cache
def found(*kinds: str, frozen: bool = False) -> interop.DeepSpeedState:
    """Possible contents of a checkpoint: each tensor has values of its own."""
    g = torch.Generator().manual_seed(0)
    leaves = dict(Net(frozen=frozen).named_parameters())
    shapes = {name: p.shape for name, p in leaves.items()}
    # bfloat16 has these values, too.
    params = {name: torch.randn(s, generator=g).bfloat16().float() for name, s in shapes.items()}
    moments = {k: {n: torch.randn(s, generator=g) for n, s in shapes.items() if leaves[n].requires_grad} for k in kinds}
    return interop.DeepSpeedState(params, moments, 6, {}, {"seen": torch.arange(3.0)})


def start() -> dict[str, Any]:
    def layer(number: int) -> dict[str, Any]:
        shapes = {"0": (5, WIDTH), "2": (WIDTH, 5)}
        experts = {k: {"weight": torch.zeros(number, *s), "bias": torch.zeros(number, s[0])} for k, s in shapes.items()}
        return {"gate": {"weight": torch.zeros(number, WIDTH)}, "experts": experts}

    return {
        "emb": {"weight": torch.zeros(3, WIDTH), "bias": torch.zeros(3)},
        "moes": [layer(n) for n in NUMBERS.values()],
    }


def specs(tree: Any) -> Any:
    def of(path: str) -> sf.P:
        return sf.P("ep") if "'experts'" in path else sf.P()

    paths = iter(sf.core.tree_paths(tree))
    return sf.core.tree_map(lambda _: of(next(paths)), tree)


def step_of(shape: dict[str, int], rule: Any = None, *, frozen: bool = False, **more: Any) -> Any:
    mesh = sf.make_mesh(shape, device="cpu")
    trainable = sf.core.tree_map(lambda _: True, start())
    if frozen:
        trainable["emb"]["bias"] = False
        for layer in trainable["moes"]:
            layer["experts"]["0"]["bias"] = False
    optimizer = sf.optim.adamw(0.1) if rule is None else rule
    return sf.sharded_step(
        lambda p, x: x.sum(),
        optimizer,
        mesh=mesh,
        specs=specs(start()),
        batch=sf.P(tuple(shape)),
        trainable=trainable,
        **more,
    )


def config_of(stage: int, *, data_first: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "use_data_before_expert_parallelism": data_first,
    } | more


def same(one: interop.DeepSpeedState, other: interop.DeepSpeedState) -> bool:
    trees = [(one.params, other.params), *((x, other.moments[k]) for k, x in one.moments.items())]
    keys = (one.step, one.buffers.keys(), one.moments.keys()) == (
        other.step,
        other.buffers.keys(),
        other.moments.keys(),
    )
    return keys and all(a.keys() == b.keys() and all(torch.equal(x, b[n]) for n, x in a.items()) for a, b in trees)


def bits(x: Any) -> torch.Tensor:
    return x.local if isinstance(x, sf.GlobalTensor) else x


# The stage, the job's ranks, its ep_size, and whether data comes first.
JOBS = [(0, 4, 2, False), (1, 4, 2, False), (2, 4, 2, True), (2, 4, 4, False), (1, 2, 1, False), (0, 2, 1, True)]


@distributed(world=[1, 2, 4])
def _identity(directory: str, shape: dict[str, int], zero: int, world: int) -> None:
    """Ours to theirs to ours, for every job, from one mesh."""
    want = found("exp_avg", "exp_avg_sq")
    step = step_of(shape, zero=sf.Zero(stage=zero, axis="dp", persist_elements=0))
    state = interop.restore_deepspeed(want, step.init(start()), names=names)
    tag = ""
    for stage, ranks, ep_size, data_first in JOBS:
        job = interop.DeepSpeedJob(config_of(stage, data_first=data_first), ranks, Net(), ep_size=ep_size)
        tag = f"{stage}-{ranks}-{ep_size}-{data_first}"
        interop.save_deepspeed(directory, state, tag, learning_rate=0.1, names=names, job=job)
        assert same(interop.read_deepspeed_experts(directory, tag), want), tag
    again = interop.restore_deepspeed(interop.read_deepspeed_experts(directory, tag), step.init(start()), names=names)
    for x, y in zip(tree_leaves(again), tree_leaves(state), strict=True):
        assert torch.equal(bits(x), bits(y))


@pytest.mark.parametrize(
    "shape, zero",
    [({"dp": 1, "ep": 1}, 0), ({"dp": 1, "ep": 2}, 0), ({"dp": 2, "ep": 2}, 3), ({"dp": 1, "ep": 4}, 1)],
)
def test_files_of_any_job_are_read_bit_for_bit(tmp_path: pathlib.Path, shape: dict[str, int], zero: int) -> None:
    _identity(str(tmp_path), shape, zero, world=shape["dp"] * shape["ep"])
