"""Covers masks and labels that are functions of shapes, in a step: they see whole leaves, on every rank the same."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim
from shardfn.collectives import unshard
from shardfn.core import RankError, tree_map
from shardfn.optim import GradientTransformation
from shardfn.testing import assert_parity, distributed, one_device

Make = Callable[[Any], GradientTransformation]


def big(params: Any) -> Any:
    """True of w and v. On two ranks the blocks of w are (5, 6), and those of v (5, 6) and (4, 6)."""
    return tree_map(lambda x: x.ndim > 0 and x.shape[0] > 5, params)


def two(params: Any) -> Any:
    """True of v. It would be of its block on the one of two ranks, and not of that on the other."""
    return tree_map(lambda x: x.ndim == 2 and x.shape[0] % 5 == 4, params)


def named(mask: Any) -> Any:
    return lambda params: tree_map(lambda on: "a" if on else "b", mask(params))


def others(mask: Any) -> Any:
    """The leaves that `mask` leaves out: their updates would be unscaled gradients, by which rounding grows."""
    return lambda params: tree_map(lambda on: not on, mask(params))


RULES: dict[str, Make] = {
    "adamw": lambda f: optim.adamw(0.01, weight_decay=0.5, mask=f),
    "lion": lambda f: optim.lion(0.01, weight_decay=0.5, mask=f),
    "lamb": lambda f: optim.lamb(0.01, weight_decay=0.5, mask=f),
    "decay": lambda f: optim.chain(optim.add_decayed_weights(0.5, f), optim.sgd(0.1, momentum=0.9)),
    "masked clip": lambda f: optim.chain(optim.masked(optim.clip_by_global_norm(0.1), f), optim.sgd(0.1)),
    "masked lamb": lambda f: optim.chain(optim.masked(optim.lamb(0.01), f), optim.masked(optim.sgd(0.1), others(f))),
    "labels": lambda f: optim.multi_transform({"a": optim.adamw(0.01), "b": optim.sgd(0.1, momentum=0.5)}, named(f)),
    "freeze": lambda f: optim.chain(optim.adam(0.01), optim.freeze(f)),
    "delayed": lambda f: optim.delayed(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.01, mask=f)), 1),
}
every = pytest.mark.parametrize("name", RULES)


def make_params(dtype: torch.dtype = torch.float32) -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"w": (10, 6), "v": (9, 6), "b": (6,), "s": ()}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def batches(num: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 10, generator=draw) for _ in range(num)]


def loss(params: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x.to(params["w"].dtype) @ params["w"] + params["b"])
    return (h @ params["v"].T).square().mean() * params["s"].cos()


def check(make: Make, world: int, zero: sf.Zero, transform: Any = lambda f: f, **options: Any) -> None:
    mesh = sf.make_mesh({"dp": world})
    for mask in (big, two):
        if zero.disk is not None:
            zero = dataclasses.replace(zero, disk=sf.Disk(f"{zero.directory}-{mask.__name__}"))
        assert_parity(transform(loss), make(mask), make_params(), batches(), mesh=mesh, zero=zero, **options)


@pytest.mark.nightly
@distributed(world=2)
def test_a_mask_decides_by_whole_leaves() -> None:
    mesh = sf.make_mesh({"dp": 2})
    for name, stage in (("adamw", 3), ("masked clip", 3), ("masked lamb", 1), ("freeze", 2)):
        zero = sf.Zero(stage=stage, persist_elements=0)
        assert_parity(loss, RULES[name](two), make_params(), batches(2), mesh=mesh, zero=zero)


@pytest.mark.nightly
@every
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=[2, 3])
def test_a_mask_decides_by_whole_leaves_at_every_stage(world: int, stage: int, name: str) -> None:
    check(RULES[name], world, sf.Zero(stage=stage, persist_elements=0))


@pytest.mark.nightly
@distributed(world=2)
def test_a_mask_decides_by_whole_leaves_on_host_and_disk(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2})
    for name, zero in (
        (
            "masked clip",
            sf.Zero(stage=2, persist_elements=0, grads="host", optimizer="host", pace=sf.Pace(chunk_bytes=128)),
        ),
        (
            "labels",
            sf.Zero(stage=3, persist_elements=0, params="disk", optimizer="disk", disk=sf.Disk(str(tmp_path / "disk"))),
        ),
    ):
        assert_parity(loss, RULES[name](two), make_params(), batches(2), mesh=mesh, zero=zero)


@pytest.mark.nightly
@every
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world=2)
def test_a_mask_decides_by_whole_leaves_in_every_memory(
    stage: int, kind: Any, name: str, tmp_path: pathlib.Path
) -> None:
    where: dict[str, Any] = {"directory": str(tmp_path / "disk")} if kind == "disk" else {}
    check(
        RULES[name],
        2,
        sf.Zero.flat(stage=stage, persist_elements=0, grads="host", optimizer=kind, chunk_bytes=128, **where),
    )


@pytest.mark.nightly
@distributed(world=2)
def test_a_mask_decides_by_whole_leaves_under_jit() -> None:
    mesh, zero, jitted = sf.make_mesh({"dp": 2}), sf.Zero(stage=3, persist_elements=0), sf.jit(loss, backend="graph")
    assert_parity(
        jitted, RULES["masked lamb"](two), make_params(), batches(2), mesh=mesh, zero=zero, reference=loss
    )  # fmt: skip


@pytest.mark.nightly
@every
@distributed(world=2)
def test_a_mask_decides_by_whole_leaves_under_jit_at_night(name: str) -> None:
    for stage in (1, 3):
        zero = sf.Zero(stage=stage, persist_elements=0)
        check(RULES[name], 2, zero, lambda f: sf.jit(f, backend="graph"), reference=loss)


@distributed(world=2)
def test_a_mask_decides_by_whole_leaves_in_the_pure_step() -> None:
    mesh, [x] = sf.make_mesh({"dp": 2}), batches(1)
    mine = x.chunk(2)[mesh.axis_index("dp")]
    for make in (RULES["adamw"], RULES["masked clip"], RULES["labels"]):
        step = sf.sharded_step(loss, make(two), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
        state = step.init(make_params())

        def stepped(one: Tensor, step: Any = step, state: Any = state) -> tuple[Tensor, Any]:
            new, metrics = step(state, mine * one)
            return metrics["loss"], new.params

        _, params = torch.func.grad(stepped, has_aux=True)(torch.ones(()))
        want = one_device(loss, make(two), make_params(), [x])
        for name, got in unshard(params).items():
            torch.testing.assert_close(got, want.params[name], rtol=1e-5, atol=1e-6)


@distributed(world=2)
def test_a_mask_decides_by_whole_leaves_with_masters() -> None:
    mesh, policy = sf.make_mesh({"dp": 2}), sf.Policy.bf16()
    mixed, zero = sf.mixed_precision(loss, policy), sf.Zero(stage=3, persist_elements=0)
    assert_parity(
        mixed, RULES["labels"](two), make_params(), batches(2), mesh=mesh, zero=zero, reference=mixed, parts=2
    )  # fmt: skip


@pytest.mark.nightly
@distributed(world=2)
def test_a_function_is_shown_whole_leaves_where_the_loss_sees_blocks() -> None:
    asked: list[Any] = []

    def mask(params: Any) -> Any:
        asked.append({name: tuple(x.shape) for name, x in params.items()})
        return tree_map(lambda x: x.ndim > 1, params)

    def sum_of_blocks(params: Any, x: Tensor) -> Tensor:
        return sf.psum(params["w"].square().sum(), "tp") + params["b"].sum() * x.mean()

    params = {"w": torch.ones(5, 3), "b": torch.ones(4)}
    for make in (
        lambda: optim.adamw(0.1, mask=mask),
        lambda: optim.onebit_adam(0.1, freeze_step=1, exact=mask),
        lambda: optim.master_weights(optim.lion(0.1, mask=mask)),
    ):
        asked.clear()
        specs = {"w": P("tp"), "b": P()}
        step = sf.sharded_step(sum_of_blocks, make(), mesh=sf.make_mesh({"tp": 2}), specs=specs, batch=P())
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, torch.ones(2))
        assert asked == [{"w": (5, 3), "b": (4,)}]


@pytest.mark.nightly
@distributed(world=2)
def test_a_rule_of_ones_own_declares_how_it_is_decided() -> None:
    def twice(inner: GradientTransformation, **more: Any) -> GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None, *, specs: Any = None) -> Any:
            updates, state = inner.update(updates, state, params, specs=specs)
            return tree_map(lambda u: 2 * u, updates), state

        return GradientTransformation(inner.init, update, **more)

    mesh, zero = sf.make_mesh({"dp": 2}), sf.Zero(stage=1, persist_elements=0)
    inner = RULES["adamw"](two)
    with pytest.raises(ValueError, match=r"mask is a function of whole leaves[^$]*optim.join_needs[^$]*\['w'\]"):
        assert_parity(loss, twice(inner), make_params(), batches(1), mesh=mesh, zero=zero)
    right = twice(inner, needs=optim.join_needs([inner], twice))
    assert_parity(loss, right, make_params(), batches(2), mesh=mesh, zero=zero)


@distributed(world=2)
def test_ranks_whose_functions_decide_differently_raise() -> None:
    mesh = sf.make_mesh({"dp": 2})
    rank = mesh.axis_index("dp")
    for make in (RULES["adamw"], RULES["masked clip"], RULES["labels"]):
        tx = make(lambda params: {"w": True, "v": rank == 0, "b": False, "s": False})
        with pytest.raises(RankError, match=r"params\['v'\]"):
            sf.sharded_step(loss, tx, mesh=mesh).init(make_params())

    def picky(params: Any) -> Any:
        if rank:
            raise LookupError("no such leaf")
        return two(params)

    with pytest.raises(RankError if rank == 0 else LookupError, match="no such leaf"):
        sf.sharded_step(loss, optim.adamw(0.1, mask=picky), mesh=mesh).init(make_params())


@distributed(world=2)
def test_a_function_that_looks_at_values_is_refused_on_all_ranks() -> None:
    tx = optim.adamw(0.1, mask=lambda params: tree_map(lambda x: bool(x.mean() > 0), params))
    step = sf.sharded_step(loss, tx, mesh=sf.make_mesh({"dp": 2}), zero=sf.Zero(stage=2))
    with pytest.raises(ValueError, match=r"passed as mask looks at 'mean' of params\['b'\]"):
        step.init(make_params())
