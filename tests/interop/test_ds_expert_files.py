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
WEIGHTS = ("0.weight", "0.bias", "2.weight", "2.bias")
FROZEN = ("emb.bias", "0.bias")


class Layer(nn.Module):
    """The names of `deepspeed.moe.layer.MoE` with all experts on one rank."""

    deepspeed_moe: Any

    def __init__(self, number: int) -> None:
        super().__init__()
        self.deepspeed_moe = nn.ModuleDict({"gate": nn.ModuleDict(), "experts": nn.ModuleDict()})
        self.deepspeed_moe.gate["wg"] = nn.Linear(WIDTH, number, bias=False)
        experts = [nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(number)]
        self.deepspeed_moe.experts["deepspeed_experts"] = nn.ModuleList(experts)


class Net(nn.Module):
    moes: Any

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


@distributed(world=[1, 2, 3, 4])
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape, zero",
    [
        ({"dp": 1, "ep": 1}, 0),
        ({"dp": 1, "ep": 2}, 0),
        pytest.param({"dp": 1, "ep": 3}, 0, marks=pytest.mark.nightly),
        pytest.param({"dp": 2, "ep": 2}, 3, marks=pytest.mark.nightly),
        pytest.param({"dp": 1, "ep": 4}, 1, marks=pytest.mark.nightly),
    ],
)
def test_files_of_any_job_are_read_bit_for_bit(tmp_path: pathlib.Path, shape: dict[str, int], zero: int) -> None:
    _identity(str(tmp_path), shape, zero, world=shape["dp"] * shape["ep"])


def saved(directory: pathlib.Path, tag: str = "tag", state: Any = None, **how: Any) -> interop.DeepSpeedState:
    """A state of one rank, written and read again."""
    own = {"config": config_of(2), "ranks": 2, "module": Net(), "ep_size": 2} | how
    weights_only = own.pop("weights_only", False)
    interop.save_deepspeed(
        directory,
        fresh() if state is None else state,
        tag,
        learning_rate=0.1,
        names=names,
        job=interop.DeepSpeedJob(**own),
        weights_only=weights_only,
    )
    read = interop.read_deepspeed_weights if weights_only else interop.read_deepspeed_experts
    return read(str(directory), tag)


@functools.cache
def fresh() -> Any:
    step = step_of({"dp": 1})
    return interop.restore_deepspeed(found("exp_avg", "exp_avg_sq"), step.init(start()), names=names)


@pytest.mark.nightly
def test_frozen_experts_momentum_and_weights_alone_are_there(tmp_path: pathlib.Path) -> None:
    want = found("momentum_buffer", frozen=True)
    step = step_of({"dp": 1}, sf.optim.sgd(0.1, momentum=0.9), frozen=True)
    state = interop.restore_deepspeed(want, step.init(start()), names=names)
    config = config_of(2) | {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
    for ranks in (2, 4):
        got = saved(tmp_path, str(ranks), state, config=config, ranks=ranks, module=Net(frozen=True))
        assert same(got, want)
    weights = found("exp_avg", "exp_avg_sq")
    for stage in (0, 1):
        assert same(
            saved(tmp_path, f"w{stage}", config=config_of(stage), weights_only=True), weights._replace(moments={})
        )
        assert not [*(tmp_path / f"w{stage}").glob("*optim*")]


@pytest.mark.nightly
def test_names_may_be_asked_for_one_expert_alone(tmp_path: pathlib.Path) -> None:
    def numbered(name: str) -> str:
        name = re.sub(r"(moes\.\d+)\.experts\.(\d+)\.(\d+)", r"\1.deepspeed_moe.experts.deepspeed_experts.\2.\3", name)
        return re.sub(r"^(moes\.\d+)\.gate", r"\1.deepspeed_moe.gate.wg", name)

    job = interop.DeepSpeedJob(config_of(2), 2, Net(), ep_size=2)
    interop.save_deepspeed(tmp_path, fresh(), "tag", learning_rate=0.1, names=numbered, job=job)
    assert same(interop.read_deepspeed_experts(str(tmp_path)), found("exp_avg", "exp_avg_sq"))


@pytest.mark.nightly
def test_weights_are_in_the_dtype_of_the_module(tmp_path: pathlib.Path) -> None:
    assert same(saved(tmp_path, config=config_of(1, bf16={"enabled": True})), found("exp_avg", "exp_avg_sq"))
    file = torch.load(tmp_path / "tag" / "layer_1_expert_7_mp_rank_00_model_states.pt")
    assert {x.dtype for x in file.values()} == {torch.bfloat16}
    assert [*file] == [f"moes.1.deepspeed_moe.experts.deepspeed_experts.7.{x}" for x in WEIGHTS]
    assert torch.load(tmp_path / "tag" / "mp_rank_00_model_states.pt")["num_experts"] == [4, 8]
    assert len([*(tmp_path / "tag").glob("bf16_zero_pp_rank_*")]) == 2


def test_groups_are_split_as_deepspeed_splits_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfn.interop.deepspeed._experts._MOST_ELEMENTS", 200)
    leaves = dict(Net().named_parameters())
    matrices, rest = ([n for n, p in leaves.items() if (p.ndim > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "name": "a"}, {"params": rest, "name": "b", "weight_decay": 0.0}]
    for stage in (1, 2):
        zero = {"stage": stage, "round_robin_gradients": True, "parameter_alignment": True}
        config = config_of(stage) | {"zero_optimization": zero}
        assert same(saved(tmp_path, str(stage), config=config, groups=groups, ranks=4), found("exp_avg", "exp_avg_sq"))
    shapes = torch.load(tmp_path / "2" / "mp_rank_00_model_states.pt")["param_shapes"]
    # Two dense groups; matrices of 6 experts of 60 elements in runs of at most 200; biases of 11 in one.
    assert [len(x) for x in shapes] == [3, 1, 6, 6, 12]


def test_jobs_that_deepspeed_has_no_checkpoint_of_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    def refused(match: str, **how: Any) -> None:
        with pytest.raises(ValueError, match=match):
            saved(tmp_path, **how)
        assert not list(tmp_path.iterdir())

    refused("stage = 3: DeepSpeed has native experts at stages 0, 1 and 2", config=config_of(3))
    refused(r"ranks = 3, and ep_size = 2 does not divide", ranks=3)
    refused("moes.0 has 4 experts, and ep_size = 8 does not divide", ranks=8, ep_size=8)
    refused("elastic_checkpoint", config=config_of(1) | {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}})
    refused("AutoEP has files of its own", config=config_of(1, expert_parallel={"enabled": True}))
    refused("stage = 0 in torch.bfloat16.*take stage 1 or 2", config=config_of(0, bf16={"enabled": True}))
    refused("torch_adam: at stage 0", config=config_of(0) | {"optimizer": {"type": "AdamW"}})
    refused("also frozen ones such as emb.bias", config=config_of(0), module=Net(frozen=True))
    refused(r"emb.bias has exp_avg here, and is frozen there", module=Net(frozen=True))
    net = Net()
    for layer in net.moes:
        layer.deepspeed_moe.experts.deepspeed_experts = layer.deepspeed_moe.experts.deepspeed_experts[:2]
    refused("moes.0 has 2 experts in the module, and its gate is for 4: make the module with ep_size=1", module=net)
    net = Net()
    net.moes[0].deepspeed_moe.experts.deepspeed_experts[1].register_buffer("scale", torch.ones(1))
    refused(r"experts\.1\.scale is a buffer of an expert", module=net)
    refused("the layer is the whole module", module=Layer(4))
    refused("ep_size = 2, and the module has no experts", module=nn.Linear(2, 2))


def test_groups_that_deepspeed_does_not_split_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    def refused(match: str, *groups: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=match):
            saved(tmp_path, groups=groups)

    leaves = list(dict(Net().named_parameters()))
    experts = [x for x in leaves if "experts" in x]
    dense = [x for x in leaves if x not in experts]
    refused("group 0 has the name None: give each", {"params": leaves})
    refused("group 1 has the name 'a'", {"params": dense, "name": "a"}, {"params": experts, "name": "a"})
    refused("group 1 has experts alone", {"params": dense, "name": "a"}, {"params": experts, "name": "b"})
    refused("group 0 has the key 'moe'", {"params": leaves, "name": "a", "moe": True})
    refused(r"group 0 has other experts' parameters.*ranks \[1\]", {"params": leaves[:-1], "name": "a"},
            {"params": leaves[-1:], "name": "b"})  # fmt: skip


def test_a_universal_checkpoint_has_no_experts(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)load the same experts. Pass job=.*moes\.0\.deepspeed_moe\.experts"):
        interop.save_deepspeed(tmp_path, fresh(), "tag", learning_rate=0.1, names=names)
    with pytest.raises(ValueError, match="weights_only=True, and the job has no experts"):
        interop.save_deepspeed(tmp_path, step_of({"dp": 1}).init(start()), "tag", learning_rate=0.1, weights_only=True)
    assert not list(tmp_path.iterdir())


@distributed(world=2)
def _full(directory: str) -> None:
    state: Any = step_of({"ep": 2}).init(start())
    rank = state.params["emb"]["weight"].mesh.rank
    written = torch.save

    def full(*args: Any, **more: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        written(*args, **more)

    torch.save = full
    try:
        with pytest.raises(OSError if rank else sf.RankError, match="No space left"):
            saved(pathlib.Path(directory), state=state)
    finally:
        torch.save = written
    assert rank or not list(pathlib.Path(directory).iterdir())
    assert saved(pathlib.Path(directory), state=state).step == 0


@pytest.mark.nightly
def test_a_rank_without_space_ends_the_call_of_all(tmp_path: pathlib.Path) -> None:
    _full(str(tmp_path))


@distributed(world=2)
def _apart(directory: str) -> None:
    """The elements that cross the mesh: those of dense leaves alone, which all ranks hold already."""
    state: Any = step_of({"ep": 2}).init(start())
    sizes: list[int] = []
    gathered = sf.GlobalTensor.full_tensor

    def full(x: sf.GlobalTensor) -> torch.Tensor:
        out = gathered(x)
        sizes.append(out.numel() if x.mesh.axes(x.spec.axes) else 0)
        return out

    sf.GlobalTensor.full_tensor = full  # pyright: ignore[reportAttributeAccessIssue]
    try:
        saved(pathlib.Path(directory), state=state)
    finally:
        sf.GlobalTensor.full_tensor = gathered
    assert sizes and not any(sizes)


@pytest.mark.nightly
def test_no_expert_is_sent_to_another_rank(tmp_path: pathlib.Path) -> None:
    _apart(str(tmp_path))
