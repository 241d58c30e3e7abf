"""Covers recomputations: tokens have the experts of their forward, or the step ends on all ranks."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn.nn import moe
from shardfn.testing import distributed

D, F, E, S = 4, 3, 4, 6


def turned(logits: Tensor, calls: list[None], until: int) -> Tensor:
    """The logits; those of the first two experts change places in the first calls on the last rank."""
    calls.append(None)
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    return logits[:, [1, 0, 2, 3] if last and len(calls) <= until else [0, 1, 2, 3]]


def layer(params: Any, x: Tensor, calls: list[None], until: int) -> Tensor:
    routing = moe.top_k(turned(x @ params["router"].t(), calls, until), 1)
    return moe.apply(moe.gelu_experts, params["experts"], x, routing, exchange=moe.AllToAll("ep"), name="blocks.3")


def by_torch(f: Any, **options: Any) -> Any:
    """`f` under torch's own checkpoint, to which parameters are no arguments: they come by their closure."""

    def run(params: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: f(params, x), x, **options)

    return run


WRAPS: dict[str, Any] = {
    "remat": sf.remat,
    "torch": functools.partial(by_torch, use_reentrant=False),
    "reentrant": functools.partial(by_torch, use_reentrant=True),
}


def loss(params: Any, x: Tensor, *, until: int, outer: bool, calls: list[None], wrap: str = "remat") -> Tensor:
    inner = WRAPS[wrap](functools.partial(layer, calls=calls, until=until))
    both = WRAPS[wrap](lambda p, x: inner(p, inner(p, x))) if outer else inner
    return both(params, x * params["scale"]).square().mean()


def params_of() -> Any:
    drawn = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=drawn, dtype=torch.float64)
    # Each token chooses one of the two first experts.
    router = draw(E, D) - torch.tensor([0.0, 0.0, 100.0, 100.0], dtype=torch.float64)[:, None]
    experts = {"w_up": draw(E, F, D), "w_down": draw(E, D, F)}
    return {"router": router, "experts": experts, "scale": torch.ones((), dtype=torch.float64)}


def step_of(mesh: sf.Mesh, *, jit: bool = False, **options: Any) -> Any:
    specs = {"router": sf.P(), "experts": dict.fromkeys(("w_up", "w_down"), sf.P("ep")), "scale": sf.P()}
    f: Any = functools.partial(loss, calls=[], **options)
    f = sf.jit(f, backend="graph") if jit else f
    return sf.sharded_step(f, sf.optim.sgd(0.1), mesh=mesh, specs=specs, batch=sf.P("ep"))


def batch() -> Tensor:
    return torch.rand(S, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1


CASES = [("remat", False), ("remat", True), ("torch", False), ("torch", True), ("reentrant", False)]


@pytest.mark.day("True-remat-False-2", "False-remat-True-1", "False-torch-False-2")
@distributed(world=[1, 2])
@pytest.mark.parametrize(("wrap", "jit"), CASES)
@pytest.mark.parametrize("outer", [False, True])
def test_other_experts_in_the_recomputation_end_the_step(world: int, wrap: str, jit: bool, outer: bool) -> None:
    with sf.make_mesh({"ep": world}, device="cpu") as mesh:
        step, params = step_of(mesh, until=1, outer=outer, wrap=wrap, jit=jit), params_of()
        state = step.init(params)
        with pytest.raises((RuntimeError, sf.RankError)) as caught:
            step(state, batch())
        assert "blocks.3: the experts of tokens differ in 6 of 6 places between the forward" in str(caught.value)
        assert all(
            torch.equal(x.full_tensor(), y)
            for x, y in zip(*map(sf.core.tree_leaves, (state.params, params)), strict=True)
        )


@pytest.mark.day("True-remat-True-1", "False-torch-False-2", "True-reentrant-False-2")
@distributed(world=[1, 2])
@pytest.mark.parametrize(("wrap", "jit"), CASES)
@pytest.mark.parametrize("outer", [False, True])
def test_equal_experts_in_all_runs_pass(world: int, wrap: str, jit: bool, outer: bool) -> None:
    with sf.make_mesh({"ep": world}, device="cpu") as mesh:
        for until in (0, 1000):
            step = step_of(mesh, until=until, outer=outer, wrap=wrap, jit=jit)
            _, metrics = step(step.init(params_of()), batch())
            assert metrics["loss"].isfinite()
