"""Covers results of collectives that `remat` keeps by their names: the recomputation sends nothing, and bits stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, optim, policies
from shardfn.core import tree_leaves
from shardfn.nn import moe
from shardfn.testing import distributed

WIDTH = 6
KEPT = policies.save_only_these_names("moe_rows")
AGAIN = policies.save_only_these_names("act")  # the same operations, and no transfer is kept
MODES = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}


def _named(x: Tensor) -> Tensor:
    return sf.checkpoint_name(x, "moe_rows")


def _ragged(h: Tensor) -> Tensor:
    """Each rank sends the next one all rows but its last."""
    n, index = sf.axis_size("dp"), int(sf.axis_index("dp"))
    sizes, received = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    sizes[(index + 1) % n] = received[(index - 1) % n] = len(h) - 1
    places, begin = torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)
    out = torch.zeros(len(h) + 2, h.shape[1])
    return _named(sf.ragged_all_to_all(h, out, places, sizes, begin, received, "dp"))


def _exchange(h: Tensor) -> Tensor:
    n = sf.axis_size("dp")
    rows, _ = sf.collectives.ragged_exchange(h, torch.full((n,), len(h) // n), "dp")
    return _named(rows)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda h: _named(sf.psum(h, "dp")) * h,
    "pmean": lambda h: _named(sf.pmean(h, "dp")) * h,
    "all_to_all": lambda h: _named(sf.all_to_all(h, "dp", split_dim=1, concat_dim=0)),
    "ragged_all_to_all": _ragged,
    "ragged_exchange": _exchange,
    "all_gather": lambda h: _named(sf.all_gather(h, "dp", dim=0)),
}


def _loss(op: str, policy: Any) -> Callable[..., Tensor]:
    def layer(w: Tensor, x: Tensor) -> Tensor:
        h = sf.checkpoint_name(torch.tanh(x @ w), "act")
        y = torch.sin(OPS[op](h))  # whose derivative needs the result
        return torch.exp(0.1 * y * y).sum()

    wrapped = layer if policy is None else sf.remat(layer, None if policy == "all" else policy)

    def loss(p: dict, x: Tensor) -> Tensor:
        return wrapped(p["w"], x) + wrapped(p["v"], x)

    return loss


def _params() -> dict:
    draw = torch.Generator().manual_seed(0)
    return {k: torch.randn(WIDTH, WIDTH, generator=draw) for k in ("w", "v")}


def _ran(op: str, mode: str, stage: int, policy: Any) -> tuple[Any, dict[Any, Any]]:
    """Two steps, and the traffic of the second by operation."""
    mesh = sf.make_mesh({"dp": -1})
    step = sf.sharded_step(
        MODES[mode](_loss(op, policy)), optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage, persist_elements=0)
    )
    x = torch.linspace(-1, 1, 4 * WIDTH * mesh.size).view(-1, WIDTH).chunk(mesh.size)[mesh.rank]
    state, _ = step(step.init(_params()), x)
    with sf.count_traffic() as traffic:
        state, metrics = step(state, x)
    return sf.unshard((state.params, metrics)), {k: list(v) for k, v in traffic.by_op.items()}


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


NIGHT = pytest.mark.nightly
BY_DAY = {
    ("psum", "eager", 3),
    ("psum", "graph", 0),
    ("all_to_all", "eager", 0),
    ("ragged_all_to_all", "graph", 3),
    ("ragged_exchange", "eager", 3),
}
CASES = [
    (op, mode, stage) for op in OPS for mode in MODES for stage in (0, 3) if (op, mode) != ("ragged_exchange", "graph")
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in BY_DAY else NIGHT) for x in CASES])
def test_a_recomputation_sends_nothing_where_results_are_kept_by_name(case: tuple[str, str, int]) -> None:
    _kept(case)


@distributed(world=2, timeout=120)
def _kept(case: tuple[str, str, int]) -> None:
    want, sent = _ran(*case, None)
    kept, once = _ran(*case, KEPT)
    assert _same(want, kept) and once == sent
    # Another name of the policy, as no policy: the recomputation sends all once more.
    for policy in (AGAIN, "all"):
        again, twice = _ran(*case, policy)
        assert _same(want, again) and sum(n for n, _ in twice.values()) > sum(n for n, _ in sent.values()), policy


def _counted(f: Callable[..., Tensor], *inputs: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """The gradients, and how many messages forward and backward send."""
    handles = [x.clone().requires_grad_() for x in inputs]
    with sf.count_traffic() as traffic:
        grads = torch.autograd.grad(f(*handles), handles)
    return grads, sum(n for n, _ in traffic.by_op.values())


def _plain(x: Tensor) -> Tensor:
    h = sf.checkpoint_name(torch.tanh(x), "act")
    return torch.sin(_named(sf.psum(h, "dp"))).exp().sum()


@pytest.mark.nightly
@distributed(world=2)
def test_policies_of_other_kinds_send_again() -> None:
    with sf.collectives.bind_mesh(sf.make_mesh({"dp": 2})):
        want, sent = _counted(_plain, x := torch.linspace(-1, 1, 5))
        for policy, more in (
            (KEPT, 0),
            (policies.save_anything_except_these_names("act"), 0),
            (policies.offload_only_these_names("moe_rows"), 0),
            (policies.save_anything_except_these_names("moe_rows"), 1),
            (policies.everything_saveable, 1),
            (policies.budget(1 << 20, then="recompute"), 1),
            (lambda saved: "keep" if saved.nbytes < 100 else "recompute", 1),
        ):
            got, now = _counted(sf.remat(_plain, policy), x)
            assert torch.equal(got[0], want[0]) and now == sent + more, policy


@distributed(world=2)
def test_they_may_leave_and_regions_may_nest() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def two(x: Tensor, wrap: Callable[..., Any] = lambda f: f) -> Tensor:
        inner = wrap(lambda x: torch.sin(_named(sf.psum(torch.tanh(x), "dp"))))
        return torch.exp(torch.cos(sf.pmax(inner(x).detach(), "dp")) + inner(x)).sum()

    with sf.collectives.bind_mesh(mesh):
        x = torch.linspace(-1, 1, 4096)
        want, sent = _counted(two, x)
        to_host = policies.offload_only_these_names("moe_rows")
        keeping = lambda f: sf.remat(f, KEPT)  # noqa: E731
        cases = (
            (sf.remat(two, to_host), 1),  # the maximum has no name
            (sf.remat(two, KEPT), 1),
            (lambda x: two(x, keeping), 0),
            (sf.remat(lambda x: two(x, keeping), KEPT), 1),
            (sf.remat(lambda x: two(x, keeping), policies.everything_saveable), 3),
            (sf.remat(lambda x: two(x, sf.remat), KEPT), 2),  # the inner region keeps nothing
        )
        for number, (f, more) in enumerate(cases):
            got, now = _counted(f, x)
            assert torch.equal(got[0], want[0]) and now == sent + more, (number, now - sent)
        with sf.memory.ledger() as book:
            _counted(sf.remat(two, to_host), x)
        assert book.moved("device", "host") == 2 * x.nbytes


@distributed(world=2)
def test_a_kept_result_must_not_be_written() -> None:
    def late(x: Tensor) -> Tensor:
        y = _named(sf.psum(torch.tanh(x), "dp"))
        z = torch.sin(y.detach().add_(1)) * x
        return z.exp().sum()

    with sf.collectives.bind_mesh(sf.make_mesh({"dp": 2})):
        with pytest.raises(ValueError, match=r"the result of psum is kept by its name.*Write to a clone\(\)"):
            _counted(sf.remat(late, KEPT), torch.linspace(-1, 1, 5))


@distributed(world=2)
def test_ranks_may_hold_any_numbers_of_rows() -> None:
    def loss(x: Tensor) -> Tensor:
        sizes = torch.tensor([1, len(x) - 1])
        rows, _ = sf.collectives.ragged_exchange(torch.tanh(x), sizes, "dp")
        return torch.sin(_named(rows)).exp().sum()

    mesh = sf.make_mesh({"dp": 2})
    with sf.collectives.bind_mesh(mesh):
        x = torch.randn((1, 700)[mesh.rank], 3)
        want, sent = _counted(loss, x)
        got, now = _counted(sf.remat(loss, KEPT), x)
        assert torch.equal(got[0], want[0]) and now == sent


_EXPERTS = {"w_gate_up": (4, 2, 5, WIDTH), "w_down": (4, WIDTH, 5)}


def _experts_loss(policy: Any) -> Callable[..., Tensor]:
    """A layer with experts, whose exchanges name their results."""

    def layer(p: dict, x: Tensor) -> Tensor:
        routing = moe.top_k(x @ p["router"].t(), 2)
        return moe.apply(moe.swiglu_experts, p["experts"], torch.tanh(x), routing, exchange=moe.AllToAll("ep")).sin()

    wrapped = layer if policy is None else sf.remat(layer, policy)
    return lambda p, x: wrapped(p, x).exp().mean()


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_layer_with_experts_exchanges_once(mode: str) -> None:
    _exchanged_once(mode)


@distributed(world=2, timeout=120)
def _exchanged_once(mode: str) -> None:
    mesh, found = sf.make_mesh({"ep": 2}), []
    draw = torch.Generator().manual_seed(0)
    experts = {k: torch.randn(shape, generator=draw) for k, shape in _EXPERTS.items()}
    params = {"router": torch.randn(4, WIDTH, generator=draw), "experts": experts}
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(mesh.rank))
    for policy in (None, policies.save_only_these_names("moe_rows", "moe_results"), policies.nothing_saveable):
        step = sf.sharded_step(
            MODES[mode](_experts_loss(policy)),
            optim.sgd(0.1),
            mesh=mesh,
            specs={"router": P(), "experts": dict.fromkeys(experts, P("ep"))},
            batch=P("ep"),
        )
        state, _ = step(step.init(params), x)
        with sf.count_traffic() as traffic:
            state, _ = step(state, x)
        found.append((sf.unshard(state.params), {k: list(v) for k, v in traffic.by_op.items()}))
    (want, sent), (kept, once), (again, twice) = found
    assert _same(want, kept) and _same(want, again)
    assert once == sent and twice != sent, (once, sent)
