"""Covers two programs in one process: a thread that trains and one that serves get what each gets alone, bit by bit."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import distributed

JITS: dict[str, Any] = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}
CALLS = 100  # of each thread


def whole() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"up": torch.randn(6, 8, generator=g), "down": torch.randn(8, 4, generator=g)}


def zero(axis: str, **options: Any) -> sf.Zero:
    return sf.Zero(stage=3, axis=axis, persist_elements=0, **options)


def predict(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["up"]) @ params["down"]


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return sf.pmean(predict(params, x).square().mean(), "train")  # an axis that the other thread's mesh has not


def training(mode: str, **options: Any) -> Callable[[], list[Tensor]]:
    mesh = sf.make_mesh({"train": -1}, device="cpu")
    step = sf.sharded_step(
        JITS[mode](loss), sf.optim.adamw(1e-2), mesh=mesh, batch=P("train"), zero=zero("train", **options)
    )

    def run() -> list[Tensor]:
        state, out = step.init(whole()), []
        for n in range(CALLS):
            state, metrics = step(state, torch.full((2, 6), 0.1 * n))
            out.append(metrics["loss"])
        return [*out, *sf.core.tree_leaves(sf.unshard(state.params))]

    return run


def serving(mode: str) -> Callable[[], list[Tensor]]:
    mesh = sf.make_mesh({"serve": -1}, device="cpu")

    def serve(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return sf.psum(predict(params, x), "serve")

    f = sf.sharded(JITS["eager" if mode == "eager" else "graph"](serve), mesh=mesh, zero=zero("serve"))
    params = f.init(whole())

    def run() -> list[Tensor]:
        call = f.bind(params, torch.ones(3, 6)) if mode == "bound" else f
        return [call(params, torch.full((3, 6), 0.2 * n)).clone() for n in range(CALLS)]

    return run


def together(*work: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at the same time, each on a thread, which take turns in short order."""
    out: dict[int, Any] = {}
    begin = threading.Barrier(len(work), timeout=120)

    def one(i: int) -> None:
        try:
            begin.wait()
            out[i] = work[i]()
        except BaseException as error:
            out[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(work))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for got in out.values():
        if isinstance(got, BaseException):
            raise got
    return [out[i] for i in range(len(work))]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.day("eager-eager")
@pytest.mark.parametrize(("train", "serve"), [("eager", "eager"), ("graph", "graph"), ("eager", "bound")])
def test_a_thread_that_trains_and_one_that_serves_have_the_results_of_each_alone(train: str, serve: str) -> None:
    alone = training(train)(), serving(serve)()
    trained, served = together(training(train), serving(serve))
    same(trained, alone[0])
    same(served, alone[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("train", "serve"), [pytest.param("eager", "eager", marks=pytest.mark.nightly), ("graph", "bound")]
)
def test_recorders_of_one_thread_do_not_count_moves_of_the_other(train: str, serve: str) -> None:
    _counted(train, serve)


@distributed(world=2)
def _counted(trained: str, served: str) -> None:
    """Two ranks: the threads of a rank have communicators of their own, and send at the same time."""
    train, serve = training(trained, optimizer="host"), serving(served)
    # First calls learn the order of the leaves, and make communicators on all ranks in one order.
    train()
    serve()

    def counted(run: Callable[[], Any]) -> Callable[[], Any]:
        def count() -> Any:
            with sf.count_traffic() as traffic, sf.memory.ledger() as book:
                out = run()
                return out, traffic.by_op, book.transfers("host", "device"), book.moved("device", "host")

        return count

    alone = counted(train)(), counted(serve)()
    got = together(counted(train), counted(serve))
    for (values, *numbers), (want, *want_numbers) in zip(got, alone, strict=True):
        same(values, want)
        assert numbers == want_numbers
    assert got[0][2] > 0 and got[1][2:] == (0, 0)
    assert {axes for _, axes in got[0][1]} == {("train",)} and {axes for _, axes in got[1][1]} == {("serve",)}
