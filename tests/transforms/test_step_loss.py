"""Covers derivatives of `step.loss`, `sharded` and `shard_map`: they equal those of one device, also with remat."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P, WeightedMean, Zero
from shardfn.core import tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import RTOL, assert_derivative_parity, distributed

NIGHTLY = pytest.mark.nightly
F64 = torch.float64
# Loading forward mode takes seconds; torch.func takes no hooks of torch's own checkpoint, and no leaves on disk.
REVERSE: dict[str, Any] = {"derivatives": ("loss", "value_and_grad", "grad", "hvp")}
HOOKED: dict[str, Any] = {"derivatives": ("loss", "value_and_grad")}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64) / 2


# A block that is cut along "tp", of sizes that nothing divides, and the same for one device.

SPLIT = {"up": P("tp"), "down": P(None, "tp"), "bias": P()}


def split_params() -> dict[str, Tensor]:
    return {"up": drawn(7, 4), "down": drawn(4, 7, seed=1), "bias": drawn(4, seed=2)}


def split(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(sf.pvary(x, "tp") @ p["up"].T)
    return torch.tanh(sf.psum(hidden @ p["down"].T, "tp") + p["bias"])


def mean_square(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda p, x: f(p, x).square().mean()


def by_torch(f: Callable[..., Any], *, reentrant: bool) -> Callable[..., Any]:
    # The reentrant kind looks for gradients among its arguments alone.
    def called(p: Any, x: Tensor) -> Tensor:
        run = lambda x, *leaves: f(dict(zip(p, leaves, strict=True)), x)  # noqa: E731
        return checkpoint(run, x, *p.values(), use_reentrant=reentrant)  # pyright: ignore[reportReturnType]

    return called


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "plain": lambda f: f,
    "remat": sf.remat,
    "policy": lambda f: sf.remat(f, sf.policies.dots_saveable),
    "nested": lambda f: sf.remat(lambda p, x: sf.remat(f)(p, sf.remat(f)(p, x))),
    "offload": lambda f: sf.offload(f, lambda saved: "host"),
    "offload of remat": lambda f: sf.offload(sf.remat(f), lambda saved: "host"),
    "checkpoint": functools.partial(by_torch, reentrant=False),
    "reentrant": functools.partial(by_torch, reentrant=True),
}
OF_TORCH = ("checkpoint", "reentrant")
DAILY = ("remat", "policy", *OF_TORCH)


def alone(way: str, p: Any, x: Tensor) -> Tensor:
    plain = lambda p, x: torch.tanh(torch.tanh(x @ p["up"].T) @ p["down"].T + p["bias"])  # noqa: E731
    return plain(p, plain(p, x)) if way == "nested" else plain(p, x)


@pytest.mark.day("checkpoint")
@pytest.mark.parametrize("way", [w if w in DAILY else pytest.param(w, marks=NIGHTLY) for w in WAYS])
@distributed(world=2)
def test_a_block_that_may_run_again_in_the_backward(way: str) -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu")
    loss, reference = mean_square(WAYS[way](split)), mean_square(functools.partial(alone, way))
    how = {"reference": reference, "specs": SPLIT, "batch_spec": P(), **(HOOKED if way in OF_TORCH else REVERSE)}
    assert_derivative_parity(loss, split_params(), drawn(3, 4, seed=3), mesh=mesh, **how)


@NIGHTLY
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", WAYS)
@distributed(world=[4, 6])
def test_a_block_that_may_run_again_with_zero(world: int, way: str, stage: int) -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": world // 2}, device="cpu")
    zero = Zero(stage=stage, persist_elements=0)
    how = {"specs": SPLIT, "zero": zero, **(HOOKED if way in OF_TORCH else {})}
    for m in (1, 2):
        loss, reference = mean_square(WAYS[way](split)), mean_square(functools.partial(alone, way))
        assert_derivative_parity(
            sf.accumulate(loss, m), split_params(), drawn(8, 4, seed=3), mesh=mesh, reference=reference, **how
        )


def without_bias(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda p, x: f({**p, "bias": 0.0}, x)


@distributed(world=2)
def test_sharded_functions_and_shard_map_that_run_again_in_the_backward() -> None:
    mesh, x = sf.make_mesh({"tp": 2}, device="cpu"), drawn(3, 4, seed=3)
    params = {k: v for k, v in split_params().items() if k != "bias"}
    specs = {k: v for k, v in SPLIT.items() if k in params}
    want = sf.grad(mean_square(without_bias(functools.partial(alone, "plain"))))(params, x)
    for way in ("remat", *OF_TORCH):
        loss = mean_square(WAYS[way](without_bias(split)))
        fn = sf.sharded(loss, mesh=mesh, specs=specs, batch=P())
        got = sf.unshard(sf.grad(fn)(fn.init(params), x))
        mapped = sf.shard_map(loss, mesh=mesh, in_specs=(specs, P()), out_specs=P())
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        mapped(leaves, x).backward()
        for k, g in want.items():
            torch.testing.assert_close(got[k], g, rtol=0, atol=RTOL[F64])
            torch.testing.assert_close(leaves[k].grad, g, rtol=0, atol=RTOL[F64])


# Sequences that are cut over ranks.

BODIES: dict[str, Callable[[], Any]] = {
    "ring": lambda: sf.nn.Ring("sp", 7, block=2),
    "zigzag": lambda: sf.nn.Ring("sp", 7, zigzag=True, block=2),
    "ulysses": lambda: sf.nn.Ulysses("sp", 7),
    "chunked": lambda: sf.nn.Chunked(3, "sp", 7),
}


@pytest.mark.nightly
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", list(BODIES))
@distributed(world=[2, 3])
def test_sequences_that_are_cut(world: int, name: str, window: int | None, remat: bool) -> None:
    mesh = sf.make_mesh({"sp": world}, device="cpu")
    sizes: dict[str, Any] = {
        "vocab_size": 7,
        "num_layers": 1,
        "d_model": 12,
        "num_heads": 3,
        "max_len": 8,
        "bias": False,
    }
    config = gpt.Config(**sizes, attention=BODIES[name](), window=window)
    params = tree_map(lambda x: x.double() * 10 + 0.1, gpt.init(config, sf.key(0)))
    batch = {"tokens": torch.arange(16).view(2, 8) % 7}
    loss = functools.partial(gpt.loss, config)
    assert_derivative_parity(
        sf.remat(loss) if remat else loss,
        params,
        batch,
        mesh=mesh,
        reference=functools.partial(gpt.loss, dataclasses.replace(config, attention=sf.nn.Dense())),
        batch_spec=P(None, "sp"),
        own=gpt.cut_sequences(config, batch, mesh),
        derivatives=("loss", "value_and_grad", "grad", *(["jvp"] if remat and name != "chunked" else [])),
    )


# Pipelines.


def dense(w: Tensor, h: Tensor) -> Tensor:
    return h + torch.tanh(h @ w)


def scaled(p: Any, h: Tensor) -> Tensor:
    return torch.tanh(h * p["scale"])


def first(p: Any, x: Tensor) -> Tensor:
    return x @ p["embed"]


def last(p: Any, h: Tensor, x: Tensor) -> Any:
    return WeightedMean((h @ p["embed"].t() - x).square().sum(), float(x.numel()))


class Shifted(nn.Module):
    """A layer that is given a second tensor."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=bias)

    def forward(self, h: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(h) + shift)


class Model(nn.Module):
    """An input of each layer is computed from a parameter outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([Shifted() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h, shift = self.embed(x), torch.tanh(self.shift)
        for layer in self.layers:
            h = layer(h, shift)
        return (h @ self.embed.weight).square().mean()


def module() -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    params, apply = sf.from_module(Model().double(), layers="layers")
    specs = {name: P("pp") if name == "layers" else P() for name in params}
    return (
        params,
        lambda p, x: apply(p, x),
        sf.pipeline_module(lambda p, x: apply(p, x), apply, num_microbatches=2),
        specs,
    )


def layers(num_chunks: int = 1) -> tuple[Any, Any, Any, Any]:
    stacks = [drawn(6 // num_chunks, 4, 4, seed=n) for n in range(num_chunks)]
    params = {"embed": drawn(4, 4, seed=9), "blocks": stacks[0] if num_chunks == 1 else stacks}
    how: dict[str, Any] = {} if num_chunks == 1 else {"schedule": "interleaved", "num_chunks": num_chunks}
    loss = sf.pipeline(first, sf.remat(dense), last, num_microbatches=2 if num_chunks == 1 else 6, **how)
    return params, loss, loss, {"embed": P(), "blocks": tree_map(lambda _: P("pp"), params["blocks"])}


def functions() -> tuple[Any, Any, Any, Any]:
    own = [drawn(4, 4), {"scale": drawn(4, seed=1)}, drawn(4, 4, seed=2), drawn(4, 4, seed=3)]
    loss = sf.pipeline(first, [dense, scaled, sf.remat(dense), dense], last, num_microbatches=2)
    return {"embed": drawn(4, 4, seed=9), "blocks": own}, loss, loss, P()


def kinds() -> tuple[Any, Any, Any, Any]:
    """A layer without bias, uncut, in front of the others: all ranks have its leaves, and the first rank runs it."""
    torch.manual_seed(0)
    model = Model()
    model.layers.insert(0, Shifted(bias=False))
    params, apply = sf.from_module(model.double(), layers="layers")
    specs = {name: {"0": P(), "1": P("pp")} if name == "layers" else P() for name in params}
    piped = sf.pipeline_module(lambda p, x: apply(p, x), apply, num_microbatches=2)
    return params, lambda p, x: apply(p, x), piped, specs


PIPELINES = {
    "layers": layers,
    "chunks": functools.partial(layers, 2),
    "functions": functions,
    "module": module,
    "kinds": kinds,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [pytest.param(n, marks=NIGHTLY if n == "chunks" else ()) for n in PIPELINES])
@distributed(world=[2, 3])
def test_pipelines_of_each_kind(world: int, name: str) -> None:
    params, loss, piped, specs = PIPELINES[name]()
    mesh = sf.make_mesh({"pp": world}, device="cpu")
    assert_derivative_parity(
        piped, params, drawn(6, 4, seed=5), mesh=mesh, reference=loss, specs=specs, batch_spec=P(), **REVERSE
    )


@NIGHTLY
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", PIPELINES)
@distributed(world=4)
def test_pipelines_with_zero(name: str, stage: int) -> None:
    params, loss, piped, specs = PIPELINES[name]()
    mesh, zero = sf.make_mesh({"dp": 2, "pp": 2}, device="cpu"), Zero(stage=stage, persist_elements=0)
    assert_derivative_parity(
        piped, params, drawn(12, 4, seed=5), mesh=mesh, reference=loss, specs=specs, batch_spec=P("dp"), zero=zero
    )


# Losses that are partitioned.


def megatron(path: str) -> P:
    name = re.findall(r"\w+", path)[-1]
    if name in ("wq", "wk", "wv", "bq", "bk", "bv", "w_up", "w_gate", "b_up"):
        return P("tp")
    return P(None, "tp") if name in ("wo", "w_down") else P()


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("remat", [True, False])
@distributed(world=[2, 3])
def test_partitioned_losses(world: int, remat: bool, sequence: bool) -> None:
    config = gpt.Config(vocab_size=37, num_layers=1, d_model=20, num_heads=5, max_len=7, bias=False)
    params = tree_map(lambda x: x.double() + 0.1, gpt.init(config, sf.key(0)))
    loss = functools.partial(gpt.loss, config)
    leaves, treedef = tree_flatten(params)
    del leaves
    assert_derivative_parity(
        sf.partition(sf.remat(loss) if remat else loss, sequence=sequence),
        params,
        {"tokens": torch.arange(16).view(2, 8) % 37},
        mesh=sf.make_mesh({"tp": world}, device="cpu"),
        reference=loss,
        specs=tree_unflatten(treedef, [megatron(p) for p in tree_paths(params, "params")]),
        batch_spec=P(),
        derivatives=("loss", "value_and_grad", "grad"),
    )


# Parameters in other memories.


@pytest.mark.day("3-disk-0")
@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(n, marks=NIGHTLY) for n in (1, 2))])
@pytest.mark.parametrize("home", ["host", "disk"])
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly), 3])
def test_parameters_in_other_memories(world: int, home: str, stage: int, tmp_path: Any) -> None:
    mesh, disk = sf.make_mesh({"dp": world}, device="cpu"), sf.core.Disk(str(tmp_path)) if home == "disk" else None
    zero = Zero(stage=stage, params=home, persist_elements=0, disk=disk)  # pyright: ignore[reportArgumentType]
    how = HOOKED if home == "disk" else REVERSE
    loss = mean_square(functools.partial(alone, "plain"))
    assert_derivative_parity(loss, split_params(), drawn(6, 4, seed=3), mesh=mesh, zero=zero, **how)


@distributed(world=1)
def test_leaves_on_disk_are_refused_by_torch_func_and_their_gradients_are_on_the_host(tmp_path: Any) -> None:
    zero = Zero(params="disk", persist_elements=0, disk=sf.core.Disk(str(tmp_path)))
    step = sf.sharded_step(lambda w, x: (w * x).sum(), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}), zero=zero)
    params, x = step.init(torch.ones(3)).params, torch.arange(3.0)
    grads = sf.grad(step.loss)(params, x)
    assert grads.memory_kind == "host" and torch.equal(grads.full_tensor(), x)
    with pytest.raises(ValueError, match=r"torch.func cannot .* is not a tensor. Use sf.value_and_grad"):
        torch.func.grad(step.loss)(params, x)
    step.close()


# Failures.


@pytest.mark.nightly
@distributed(world=2)
def test_the_others_raise_when_a_rank_fails(world: int) -> None:
    mesh = sf.make_mesh({"pp": world}, device="cpu", timeout=600)
    fails: list[None] = []

    def failing(p: Any, h: Tensor, x: Tensor) -> Tensor:
        del p, x
        if fails and mesh.rank == 1:
            raise ZeroDivisionError("on the last stage")
        return h.square().mean()

    loss = sf.pipeline(lambda p, x: x, lambda w, h: torch.tanh(h @ w), failing, blocks=lambda p: p, num_microbatches=2)
    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, specs=P("pp"), batch=P())
    params, x = step.init(torch.ones(2, 4, 4)).params, torch.ones(4, 4)
    calls: list[Any] = [step.loss, sf.value_and_grad(step.loss), torch.func.grad(step.loss)]
    for call in calls:
        call(params, x)
        fails.append(None)
        error, words = (ZeroDivisionError, "last stage") if mesh.rank == 1 else (sf.RankError, "rank 1 raised Zero")
        with pytest.raises(error, match=words):
            call(params, x)
        fails.clear()
    assert step.loss(params, x).isfinite()
