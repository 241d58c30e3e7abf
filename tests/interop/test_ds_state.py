"""Covers states that come from DeepSpeed's checkpoints, and universal checkpoints that are made of states."""

import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop
from shardfn.core import tree_leaves
from shardfn.testing import distributed

SHAPES = {"a": (7, 5), "b": (3,), "blocks.0.w": (4, 3), "blocks.1.w": (4, 3)}


def found(*kinds: str) -> interop.DeepSpeedState:
    """Possible contents of a checkpoint: each state has values of its own."""
    g = torch.Generator().manual_seed(0)

    def tree() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}

    return interop.DeepSpeedState(tree(), {kind: tree() for kind in kinds}, 6, {"head": "a"}, {"seen": torch.ones(2)})


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["a"].sum() * p["b"].sum() * p["blocks"]["w"].sum() * x).sum()


def start() -> dict[str, Any]:
    return {"a": torch.zeros(7, 5), "b": torch.zeros(3), "blocks": {"w": torch.zeros(2, 4, 3)}}


def layers(tree: Any) -> dict[str, torch.Tensor]:
    """A tree of leaves as DeepSpeed's names have it."""
    w = tree["blocks"]["w"].full_tensor()
    return {"a": tree["a"].full_tensor(), "b": tree["b"].full_tensor(), "blocks.0.w": w[0], "blocks.1.w": w[1]}


@distributed(world=[1, 2, 3])
def _restored(world: int, stage: int, memory: str) -> None:
    want = found("exp_avg", "exp_avg_sq")
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    home: Any = {} if memory == "device" else {"optimizer": memory}
    zero = sf.Zero(stage=stage, persist_elements=0, **home)
    mixed = sf.mixed_precision(loss, sf.Policy.bf16())
    step = sf.sharded_step(mixed, sf.optim.adamw(0.1), mesh=mesh, zero=zero)
    state = interop.restore_deepspeed(want, step.init(start()))
    assert int(state.step) == 6
    for name, x in layers(interop.master_params(state)).items():
        assert torch.equal(x, want.params[name]), name
    for name, x in layers(state.params).items():
        assert torch.equal(x, want.params[name].bfloat16()), name
    (adam,) = [x for x in state.opt_state.inner if hasattr(x, "mu")]
    counts = [int(x.full_tensor() if isinstance(x, sf.GlobalTensor) else x) for x in [adam.count]]
    assert counts == [6]
    for kind, tree in (("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
        assert all(torch.equal(x, want.moments[kind][name]) for name, x in layers(tree).items())
    step(state, torch.ones(1))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage, memory",
    [
        (0, "device"),
        pytest.param(1, "device", marks=pytest.mark.nightly),
        pytest.param(3, "device", marks=pytest.mark.nightly),
        (3, "host"),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_state_of_any_mesh_has_all_of_it(world: int, stage: int, memory: str) -> None:
    _restored(world=world, stage=stage, memory=memory)


def test_sgd_and_weights_alone() -> None:
    want = found("momentum_buffer")
    step = sf.sharded_step(loss, sf.optim.sgd(0.1, momentum=0.9))
    state = interop.restore_deepspeed(want, step.init(start()))
    (trace,) = [x.trace for x in state.opt_state if hasattr(x, "trace")]
    assert all(torch.equal(x, want.moments["momentum_buffer"][name]) for name, x in layers(trace).items())
    params = interop.restore_deepspeed(found("exp_avg"), step.init(start()).params, at="params")
    assert all(torch.equal(x, want.params[name]) for name, x in layers(params).items())


def test_leaves_that_do_not_fit_are_named() -> None:
    step = sf.sharded_step(loss, sf.optim.adam(0.1))
    with pytest.raises(
        ValueError, match=r"mu\['a'\] is not in the checkpoint, as exp_avg of a(.|\n)*momentum_buffer of a"
    ):
        interop.restore_deepspeed(found("momentum_buffer"), step.init(start()))
    lion = sf.sharded_step(loss, sf.optim.onebit_adam(0.1, freeze_step=3))
    with pytest.raises(ValueError, match=r"opt_state.* is not in the checkpoint"):
        interop.restore_deepspeed(found("exp_avg", "exp_avg_sq"), lion.init(start()))


@distributed(world=[1, 2, 3])
def _saved(world: int, directory: str) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    mixed = sf.mixed_precision(lambda p, x: (p["a"].sum() * x + p["b"].square().sum()).sum(), sf.Policy.bf16())
    zero = sf.Zero(stage=3, persist_elements=0)
    step = sf.sharded_step(
        mixed, sf.optim.adamw(0.1), mesh=mesh, zero=zero, trainable={"a": True, "b": True, "frozen": False}
    )
    g = torch.Generator().manual_seed(0)
    state = step.init({n: torch.randn(s, generator=g) for n, s in (("a", (7, 5)), ("b", (3,)), ("frozen", (5,)))})
    for _ in range(2):
        state, _ = step(state, torch.ones(1))
    tag = f"world{world}"
    interop.save_deepspeed(directory, state, tag, learning_rate=0.1, names=lambda name: f"net.{name}")
    got = interop.read_deepspeed(directory, tag)
    assert got.step == 2 and got.params.keys() == {"net.a", "net.b", "net.frozen"}
    trained = {"net.a", "net.b"}
    assert {kind: x.keys() for kind, x in got.moments.items()} == {"exp_avg": trained, "exp_avg_sq": trained}
    wide = interop.master_params(state)
    assert all(torch.equal(got.params[f"net.{n}"], x.full_tensor().float()) for n, x in wide.items())
    again = interop.restore_deepspeed(got, step.init(start_like(state)), names=lambda name: f"net.{name}")
    for x, y in zip(tree_leaves(again), tree_leaves(state), strict=True):
        x, y = (t.full_tensor() if isinstance(t, sf.GlobalTensor) else t for t in (x, y))
        assert torch.equal(x, y)
    with pytest.raises((FileExistsError, sf.RankError), match="is there already"):
        interop.save_deepspeed(directory, state, tag, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"names of files.*\n.*'\.\./x'"):
        interop.save_deepspeed(directory, state, "../x", learning_rate=0.1)


def start_like(state: Any) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(x.shape) for name, x in state.params.items()}


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(3, marks=pytest.mark.nightly)]
)
def test_written_files_are_read_again(tmp_path: pathlib.Path, world: int) -> None:
    _saved(world=world, directory=str(tmp_path))
    assert (tmp_path / "latest_universal").read_text() == f"world{world}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest_universal", f"world{world}"]


@distributed(world=2)
def _fails(directory: str) -> None:
    step = sf.sharded_step(loss, sf.optim.adam(0.1), mesh=sf.make_mesh({"dp": 2}, device="cpu"), zero=sf.Zero(stage=3))
    state = step.init(start())
    with pytest.raises((OSError, sf.RankError)):
        interop.save_deepspeed(directory, state, "a", learning_rate=0.1)
    step(state, torch.ones(1))  # the ranks still agree


def test_a_writer_that_fails_raises_on_all(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    _fails(directory=str(tmp_path / "file"))


def test_other_optimizers_are_refused() -> None:
    step = sf.sharded_step(loss, sf.optim.sgd(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"exp_avg and exp_avg_sq, and no others(.|\n)*momentum_buffer"):
        interop.save_deepspeed("nowhere", step.init(start()), "a", learning_rate=0.1)
    step = sf.sharded_step(loss, sf.optim.onebit_adam(0.1, freeze_step=3))
    with pytest.raises(ValueError, match="no place for these states"):
        interop.save_deepspeed("nowhere", step.init(start()), "a", learning_rate=0.1)
