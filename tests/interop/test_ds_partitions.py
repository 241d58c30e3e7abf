"""Covers checkpoints of DeepSpeed's with a file for each of its ranks, written from states and read again."""

import functools
import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop
from shardfn.core import tree_leaves
from shardfn.testing import distributed


class Net(torch.nn.Module):
    """Tied, frozen, with layers that a state may stack, buffers, one of them not saved, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(7, 5)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(5, 3) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.fixed = torch.nn.Parameter(torch.arange(11.0), requires_grad=False)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.arange(4.0))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("loose", torch.ones(2), persistent=False)


def start() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    shapes = {"emb.weight": (7, 5), "scale": (), "fixed": (11,)}
    blocks = {"weight": torch.randn(3, 3, 5, generator=g), "bias": torch.randn(3, 3, generator=g)}
    return {n: torch.randn(s, generator=g) for n, s in shapes.items()} | {"blocks": blocks}


def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
    parts = [params["emb.weight"].sin().sum(), params["scale"] * params["fixed"].sum()]
    parts += [w.cos().sum() for w in params["blocks"].values()]
    return sum(parts) * x.sum(), {"seen": buffers["seen"] + 1}


def trained(policy: sf.Policy | None = None, optimizer: Any = None, scale: Any = None, world: int = 1) -> Any:
    """A state after two steps, and one like it."""
    rule = sf.optim.adamw(0.1) if optimizer is None else optimizer
    mixed = loss if policy is None else sf.mixed_precision(loss, policy, scale)
    trainable = {"emb.weight": True, "scale": True, "fixed": False, "blocks": {"weight": True, "bias": True}}
    mesh, zero = sf.make_mesh({"dp": world}, device="cpu"), sf.Zero(stage=3, persist_elements=0)
    step = sf.sharded_step(mixed, rule, mesh=mesh, zero=zero, trainable=trainable, has_state=True)
    fresh = step.init(start(), model_state={"seen": torch.zeros(4)})
    state = step.init(start(), model_state={"seen": torch.zeros(4)})
    for _ in range(2):
        state, _ = step(state, torch.full((1,), 0.01))
    return state, fresh


@functools.cache
def trained_in_bf16() -> Any:
    return trained(sf.Policy.bf16())


def config_of(stage: int, *, kind: str = "AdamW", **more: Any) -> dict[str, Any]:
    zero = {"stage": stage} | more.pop("zero", {})
    return {"optimizer": {"type": kind, "params": {"torch_adam": True}}, "zero_optimization": zero} | more


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, sf.GlobalTensor) else x


def same(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(whole(x), whole(y)) for x, y in pairs)


SMALL = {"sub_group_size": 9}
MOVED = {"round_robin_gradients": True, "parameter_alignment": True}
TWO = [
    {"params": ["emb.weight", "blocks.1.weight"]},
    {
        "params": [
            "scale",
            *(f"blocks.{i}.{n}" for n in ("bias", "weight") for i in range(3) if (i, n) != (1, "weight")),
        ]
    },
]


@pytest.mark.day("1-zero0-3", "2-zero3-1")
@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize(
    "stage, zero",
    [
        (1, {}),
        pytest.param(1, MOVED, marks=pytest.mark.nightly),
        pytest.param(2, MOVED, marks=pytest.mark.nightly),
        (2, {}),
        pytest.param(3, {}, marks=pytest.mark.nightly),
        pytest.param(3, SMALL, marks=pytest.mark.nightly),
    ],
)
def test_files_for_any_number_of_ranks_are_read_bit_for_bit(
    tmp_path: pathlib.Path, stage: int, zero: dict[str, Any], ranks: int
) -> None:
    state, fresh = trained_in_bf16()
    config = config_of(stage, zero=zero, bf16={"enabled": True})
    job = interop.DeepSpeedJob(config, ranks, Net(), TWO if ranks > 1 else None)
    interop.save_deepspeed(tmp_path, state, "tag", learning_rate=0.1, job=job)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "tag"]
    assert len(list((tmp_path / "tag").iterdir())) == ranks + (ranks if stage == 3 else 1)
    found = interop.read_deepspeed(str(tmp_path))
    assert (found.step, found.shared) == (2, {"head.weight": "emb.weight"})
    assert found.buffers.keys() == {"seen", "kept"} and torch.equal(found.buffers["kept"], torch.arange(3))
    assert torch.equal(found.buffers["seen"], torch.full((4,), 2.0))
    assert "fixed" in found.params and "fixed" not in found.moments["exp_avg"]
    assert same(interop.restore_deepspeed(found, fresh, donate=False), state)


def test_stage_3_without_frozen_parameters_has_no_whole_weights(tmp_path: pathlib.Path) -> None:
    step = sf.sharded_step(lambda p, x: x.sum(), sf.optim.adamw(0.1))
    params = {"weight": torch.ones(2, 3), "bias": torch.arange(2.0)}
    state = step.init(params)
    job = interop.DeepSpeedJob(config_of(3), 2, torch.nn.Linear(3, 2))
    interop.save_deepspeed(tmp_path, state, "tag", learning_rate=0.1, job=job)
    assert same(interop.restore_deepspeed(interop.read_deepspeed(str(tmp_path)), step.init(params)), state)


@distributed(world=[2, 3])
def _by_ranks(directory: str, world: int) -> None:
    state, fresh = trained(world=world)
    for stage in (2, 3):
        job = interop.DeepSpeedJob(config_of(stage), 4, Net())
        interop.save_deepspeed(directory, state, f"{world}-{stage}", learning_rate=0.1, job=job)
    found = interop.read_deepspeed(directory, f"{world}-3")
    assert same(interop.restore_deepspeed(found, fresh), state)
    same_net = Net() if sf.make_mesh({"dp": world}, device="cpu").rank else torch.nn.Linear(1, 1)
    with pytest.raises((ValueError, sf.RankError), match="not a parameter of the module"):
        job = interop.DeepSpeedJob(config_of(2), 4, same_net)
        interop.save_deepspeed(directory, state, "other", learning_rate=0.1, job=job)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_several_ranks_write_the_files_of_one(tmp_path: pathlib.Path, world: int) -> None:
    _by_ranks(directory=str(tmp_path), world=world)
    one, _ = trained()
    interop.save_deepspeed(tmp_path, one, "one", learning_rate=0.1, job=interop.DeepSpeedJob(config_of(2), 4, Net()))
    mine, theirs = (interop.read_deepspeed(str(tmp_path), tag) for tag in ("one", f"{world}-2"))
    for name, x in mine.params.items():
        torch.testing.assert_close(theirs.params[name], x)


class Recorded:
    """A placeholder for an object of DeepSpeed's."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


def loaded(path: pathlib.Path) -> Any:
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert all(name.startswith("deepspeed.") for name in names)
    with torch.serialization.safe_globals([(Recorded, name) for name in names]):
        return torch.load(path, weights_only=True)


def test_momentum_and_loss_scales_are_there(tmp_path: pathlib.Path) -> None:
    state, fresh = trained(optimizer=sf.optim.sgd(0.1, momentum=0.9))
    job = interop.DeepSpeedJob(
        config_of(2, kind="SGD") | {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 2, Net()
    )
    interop.save_deepspeed(tmp_path, state, "sgd", learning_rate=0.1, job=job)
    assert same(interop.restore_deepspeed(interop.read_deepspeed(str(tmp_path), "sgd"), fresh), state)
    state, _ = trained(sf.Policy.fp16(), scale=sf.optim.dynamic_loss_scale(64.0, window=7))
    half = {"enabled": True, "loss_scale_window": 7}
    interop.save_deepspeed(
        tmp_path, state, "half", learning_rate=0.3, job=interop.DeepSpeedJob(config_of(2, fp16=half), 2, Net(), TWO)
    )
    file = loaded(tmp_path / "half" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    scaler = vars(file["loss_scaler"])
    assert scaler["cur_scale"] == float(state.loss_scale.scale) and scaler["cur_iter"] == 2 and scaler["dynamic"]
    assert scaler["scale_window"] == 7 and scaler["dtype"] is torch.float16
    assert file["zero_stage"].values == (2,) and file["dynamic_loss_scale"] is True
    inner = file["base_optimizer_state"]
    assert [x["params"] for x in inner["param_groups"]] == [[0], [1]] and inner["param_groups"][0]["lr"] == 0.3
    steps = [inner["state"][i]["step"] for i in (0, 1)]
    assert steps[0].data_ptr() != steps[1].data_ptr()  # one tensor would count twice in a step


def test_a_job_that_the_state_does_not_fit_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    state, _ = trained()

    def refused(match: str, config: Any = None, ranks: int = 2, net: Any = None, groups: Any = None) -> None:
        job = interop.DeepSpeedJob(config or config_of(2), ranks, net or Net(), groups)
        with pytest.raises(ValueError, match=match):
            interop.save_deepspeed(tmp_path, state, "a", learning_rate=0.1, job=job)
        assert not list(tmp_path.iterdir())

    refused(r"(?s)stage = 0: stages 1, 2 and 3.*type = 'Lamb': Adam, AdamW and SGD", config_of(0, kind="Lamb"))
    refused("ranks = 0: there is at least one", ranks=0)
    refused("'nvme': it swaps files", config_of(3, zero={"offload_param": {"device": "nvme", "nvme_path": "x"}}))
    refused("zero_hpz_partition_size = 2: save a universal one", config_of(3, zero={"zero_hpz_partition_size": 2}))
    sums = {"grad_accum_dtype": "fp32"}
    refused("another format", config_of(1, bf16={"enabled": True}, data_types=sums))
    refused("exp_avg: the optimizer has no such state there", config_of(2) | {"optimizer": {"type": "SGD"}})
    refused(r"(?s)scale is trained, and in no group.*fixed is frozen.*sale is not a parameter.*Did you mean 'scale'",
            groups=[TWO[0], {"params": [*TWO[1]["params"][1:], "fixed", "sale"]}])  # fmt: skip
    refused("emb.weight is there 2 times", groups=[*TWO, TWO[0]])
    net = Net()
    net.fixed.requires_grad_(True)
    refused("fixed is trained there, and has no exp_avg here", net=net)
    net = Net()
    net.scale.requires_grad_(False)
    refused("scale has exp_avg here, and is frozen there", net=net)
    net = Net()
    net.blocks.append(torch.nn.Linear(5, 3))
    refused(r"(?s)blocks.weight is not a parameter of the module.*blocks.3.bias is not in the state", net=net)
    with torch.device("meta"):
        net = Net()
    refused("buffer kept of the module is on meta", net=net)
    net = Net()
    net.scale = torch.nn.Parameter(torch.ones(2))
    refused(r"scale is \(\), but \(2,\) in the module", net=net)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = trained()
    job = interop.DeepSpeedJob(config_of(2), 2, Net())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        interop.save_deepspeed(tmp_path, state, "a", learning_rate=0.1, job=job)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    interop.save_deepspeed(tmp_path, state, "a", learning_rate=0.1, job=job)
    assert interop.read_deepspeed(str(tmp_path)).step == 2
