"""Covers a module's recomputations in the backward: they run with the parameters and the draws of its forward."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardfn as sf
from shardfn.testing import assert_same, distributed, on_mesh, one_device

ROWS = 12


class Blocks(nn.Module):
    """Two blocks; the first uses a layer twice, and `how` runs them."""

    def __init__(self, how: Callable[..., Any] | None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.how = how

    def first(self, x: Tensor) -> Tensor:
        return self.a(self.a(x).tanh()).tanh()

    def second(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.b(x).sin(), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.1, self.training)
        for f in (self.first, self.second):
            x = f(x) if self.how is None else self.how(f, x)
        return nn.functional.dropout(self.c(x), 0.2, self.training).square().mean()


def nested(f: Callable[..., Any], x: Tensor) -> Tensor:
    inner = functools.partial(checkpoint, f, use_reentrant=False)
    return checkpoint(lambda x: inner(x) + inner(x), x, use_reentrant=False) / 2


def segments(f: Callable[..., Any], x: Tensor) -> Tensor:
    return checkpoint_sequential([f, torch.cos], 2, x, use_reentrant=False)


def plain_segments(f: Callable[..., Any], x: Tensor) -> Tensor:
    return torch.cos(f(x))


def twice(f: Callable[..., Any], x: Tensor) -> Tensor:
    return (f(x) + f(x)) / 2


BY_TORCH = functools.partial(checkpoint, use_reentrant=False)  # bound before any module runs, as models do
REENTRANT = functools.partial(checkpoint, use_reentrant=True)
WAYS = {
    "checkpoint": (BY_TORCH, None),
    "reentrant": (REENTRANT, None),
    "nested": (nested, twice),
    "sequential": (segments, plain_segments),
    "remat": (lambda f, x: sf.remat(f)(x), None),
}


def blocks(how: Callable[..., Any] | None, *, drops: bool) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    torch.manual_seed(0)
    module = Blocks(how).double().train(drops)
    params, apply = sf.from_module(module)

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor], key: Tensor) -> Tensor:
        return apply.keyed(key, batch["index"])(params, batch["x"])

    return params, loss


def batches() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(ROWS, 5, dtype=torch.float64, generator=g), "index": torch.arange(ROWS) + n * ROWS}
        for n in range(2)
    ]


def run_of(how: Callable[..., Any] | None, transform: Callable[..., Any] | None = None, stage: int = 3) -> Any:
    params, loss = blocks(how, drops=True)
    loss = loss if transform is None else transform(loss)
    where: dict[str, Any] = {"mesh": sf.make_mesh({"dp": -1}), "zero": sf.Zero(stage=stage, persist_elements=0)}
    return on_mesh(loss, sf.optim.sgd(0.5), params, batches(), key=sf.key(0), **where)


GRAPH = functools.partial(sf.jit, backend="graph")


@pytest.mark.day("nested", "remat")
@pytest.mark.parametrize("way", [pytest.param(x, marks=pytest.mark.nightly if x == "checkpoint" else ()) for x in WAYS])
def test_a_checkpoint_in_a_module_changes_no_bit(way: str) -> None:
    checkpointed, plain = WAYS[way]
    want = run_of(plain)
    assert_same(run_of(checkpointed), want, exact=True)
    if way != "checkpoint":
        return
    assert_same(run_of(checkpointed, stage=0), want, exact=True)
    assert_same(run_of(checkpointed, GRAPH), want, exact=True)


@distributed(world=2)
def test_sharded_it_equals_one_device_without_checkpoint() -> None:
    params, loss = blocks(None, drops=True)
    want = one_device(loss, sf.optim.sgd(0.5), params, batches(), key=sf.key(0))
    assert_same(run_of(BY_TORCH, functools.partial(sf.accumulate, num_microbatches=3)), want)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world=[2, 3], timeout=900)
def test_every_stage_and_transform(world: int, stage: int) -> None:
    del world
    accumulated = functools.partial(sf.accumulate, num_microbatches=2)
    for how, plain in (WAYS[way] for way in ("checkpoint", "reentrant", "nested", "remat")):
        params, loss = blocks(plain, drops=True)
        want = one_device(loss, sf.optim.sgd(0.5), params, batches(), key=sf.key(0))
        for transform in (None, accumulated, sf.remat, GRAPH, lambda f: GRAPH(accumulated(sf.remat(f)))):
            assert_same(run_of(how, transform, stage), want)


@pytest.mark.nightly
@distributed(world=2)
def test_in_mixed_precision() -> None:
    mixed = functools.partial(sf.mixed_precision, policy=sf.Policy.bf16())
    assert_same(run_of(BY_TORCH, mixed), run_of(None, mixed), exact=True)


def test_outside_of_a_module_checkpoint_is_torch_s() -> None:
    before = torch_checkpoint.CheckpointFunction, nn.Module._apply
    params, loss = blocks(BY_TORCH, drops=False)
    batch = batches()[0]
    loss(params, batch, sf.key(0))
    assert before == (torch_checkpoint.CheckpointFunction, nn.Module._apply)
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, torch.cos(torch.ones(3)))  # pyright: ignore[reportArgumentType]


@pytest.mark.nightly
@distributed(world=2)
def test_a_checkpoint_keeps_no_gathered_parameter(world: int) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module
            self.alive: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = BY_TORCH(layer, x)
                self.alive.append(_live())
            return x.square().mean()

    def _live() -> int:
        gc.collect()
        big = {x.untyped_storage()._cdata for x in gc.get_objects() if type(x) is Tensor and x.numel() == 64 * 64}
        return len(big)

    stack = Stack()
    params, apply = sf.from_module(stack)
    step = sf.sharded_step(
        lambda p, x: apply(p, x),
        sf.optim.sgd(0.1),
        mesh=sf.make_mesh({"dp": world}),
        zero=sf.Zero(stage=3, persist_elements=0, pace=sf.Pace(prefetch_bytes=0)),
    )
    state = step.init(params)
    del params
    for _ in range(2):
        state, _ = step(state, torch.ones(2, 64))
    assert max(stack.alive[4:]) - min(stack.alive[4:]) <= 1


class Cached(nn.Module):
    """Assigns a buffer, and its length beside it, before a part that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.length = nn.Linear(5, 5), 0
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor, how: Callable[..., Any] | None) -> Tensor:
        self.scale, self.length = x.detach().abs().mean(0), 3

        def part(x: Tensor) -> Tensor:
            return torch.tanh(self.lin(x)) * self.scale * self.length

        x = x if how is None else x.requires_grad_()
        y = part(x) if how is None else how(part, x)
        self.scale = y.detach().mean(0)
        return (y * self.scale).sum()


@pytest.mark.parametrize(
    "way",
    [
        "checkpoint",
        pytest.param("reentrant", marks=pytest.mark.nightly),
        pytest.param("nested", marks=pytest.mark.nightly),
    ],
)
def test_a_recomputation_sees_the_buffers_of_its_beginning(way: str) -> None:
    module = Cached().double()
    params, apply = sf.from_module(module)
    x = torch.randn(3, 5, dtype=torch.float64)
    checkpointed, plain = WAYS[way]
    want = sf.grad(lambda p: apply(p, x.clone(), plain))(params)
    got = sf.grad(lambda p: apply(p, x.clone(), checkpointed))(params)
    assert all(torch.equal(got[k], want[k]) for k in want)
    assert module.length == 0 and torch.equal(module.scale, torch.ones(5))


class _Reversed(torch.autograd.Function):
    """As in reversible layers: the backward runs the part again, to differentiate it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Any) -> Tensor:
        ctx.parts = parts
        ctx.save_for_backward(x)
        return parts[0](x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.parts[0](x).backward(grads[0])
        assert x.grad is not None
        return x.grad, None


@pytest.mark.day("False")
@pytest.mark.parametrize("jit", [False, True])
def test_a_function_that_would_run_parts_in_its_backward_is_refused_and_the_remedy_works(jit: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3)])
            self.plain = False

        def forward(self, x: Tensor) -> Tensor:
            if self.plain:
                h = checkpoint(self.blocks[0], x, use_reentrant=False)
            else:
                h = _Reversed.apply(x, [self.blocks[0].forward])
            return h.square().mean()

    module = Model()
    params, apply = sf.from_module(module)
    step = sf.sharded_step(sf.jit(apply, backend="graph") if jit else apply, sf.optim.sgd(0.1), mesh=sf.make_mesh())
    before = torch.autograd.Function.apply
    with pytest.raises(ValueError, match=r"its part 'blocks.0' to an autograd.Function \(_Reversed\)"):
        step(step.init(params), torch.ones(2, 3))
    assert torch.autograd.Function.apply == before
    module.plain = True
    params, apply = sf.from_module(module)
    step = sf.sharded_step(sf.jit(apply, backend="graph") if jit else apply, sf.optim.sgd(0.1), mesh=sf.make_mesh())
    step(step.init(params), torch.ones(2, 3))
