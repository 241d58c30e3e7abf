"""Covers transforms/_bucketed.py, _padding.py and assert_bucket_invariant: values, counts, bound calls, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import assert_bucket_invariant, distributed

WIDTH = 3


def _step(params: dict[str, Tensor], cache: Tensor, plan: dict[str, Tensor], length: Tensor) -> Any:
    """As a step of decoding: tokens write to slots of a cache, and padding to slot 0, which is never read."""
    valid = torch.arange(len(plan["x"])) < length
    h = torch.tanh(plan["x"] @ params["w"])
    cache.index_copy_(0, torch.where(valid, plan["slot"], 0), h)
    total = sf.psum((h * valid[:, None]).sum(), "dp")
    return {"h": h, "twice": (plan["slot"] * 2)[None]}, total, cache


def _made(mesh: sf.Mesh, wrap: Any = sf.jit, **options: Any) -> tuple[Any, Any]:
    f = sf.sharded(
        wrap(_step) if wrap is not sf.jit else sf.jit(_step, backend="graph"),
        mesh=mesh,
        zero=sf.Zero.flat(stage=3, persist_elements=0),
        in_specs=(P(),),
        out_specs=(None, None, sf.Donated(1)),
        donate=1,
    )
    how = {"sizes": (2, 4, 8), "fill": (None, None, {"x": 0.0, "slot": 0})} | options
    return sf.bucketed(f, (None, None, 0), ({"h": 0, "twice": 1}, None, None), **how), f


def _plan(n: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(n, WIDTH, generator=g), "slot": 1 + torch.randperm(9, generator=g)[:n]}


def _cache(mesh: sf.Mesh) -> sf.GlobalTensor:
    return sf.shard(torch.zeros(10, WIDTH), P(), mesh)


@pytest.mark.day("1")
@distributed(world=[1, 2])
def test_lengths_of_a_bucket_share_a_graph_and_have_the_values_of_the_function() -> None:
    mesh = sf.make_mesh({"dp": -1})
    f, inner = _made(mesh)
    plain, _ = _made(mesh, lambda f: f)
    params = inner.init({"w": torch.arange(9.0).reshape(3, 3) / 9})
    bound = f.bind(params, _cache(mesh), _plan(3))
    assert inner.cache_info().misses == 3 and list(bound.bound) == [2, 4, 8]
    caches = [_cache(mesh) for _ in range(3)]
    for call, n in enumerate((1, 3, 4, 2, 7, 3)):
        plan = _plan(n, call)
        # Without padding: the same function, eager and on its own length.
        want, total, caches[0] = plain.inner(params, caches[0], plan, torch.tensor(n))
        for k, g in ((1, f), (2, bound)):
            out, sum_, caches[k] = g(params, caches[k], plan)
            assert out["h"].shape == (n, WIDTH) and torch.equal(out["twice"], want["twice"])
            torch.testing.assert_close(out["h"], want["h"])
            torch.testing.assert_close(sum_, total)
            torch.testing.assert_close(caches[k].local[1:], caches[0].local[1:])
        assert torch.equal(caches[1].local, caches[2].local)
    info = f.cache_info()
    assert info.buckets == {2: (4, 6, 2), 4: (6, 20, 4), 8: (2, 14, 2)}
    assert info.padding == 8 / 48 and info.graphs.misses == 3


@distributed(world=2)
def test_the_contract_is_checked_by_other_padding() -> None:
    mesh = sf.make_mesh({"dp": -1})
    f, inner = _made(mesh)
    params = inner.init({"w": torch.eye(3)})
    for n in (1, 4, 8 - 1):
        assert_bucket_invariant(f, params, _cache(mesh), _plan(n), select=lambda out: out[:2])
    with pytest.raises(AssertionError, match=r"result\[2\] differs in the bucket of 4 if the 1 rows of padding are"):
        assert_bucket_invariant(f, params, _cache(mesh), _plan(3))


@pytest.mark.nightly
def test_functions_that_see_the_padding_are_found() -> None:
    mean = sf.bucketed(sf.jit(lambda x, n: x.sum() / n, backend="graph"), (0,))
    with pytest.raises(AssertionError, match=r"result differs in the bucket of 4 if the 1 rows .* copies of the first"):
        assert_bucket_invariant(mean, torch.ones(3))
    size = sf.bucketed(sf.jit(lambda x: torch.ones(()) * len(x), backend="graph"), (0,), with_length=False)
    with pytest.raises(AssertionError, match=r"result differs between the buckets of 4 and 8"):
        assert_bucket_invariant(size, torch.ones(4 - 1))


def test_two_lengths_are_nested_and_gradients_pass() -> None:
    def f(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        mask = (torch.arange(len(x))[:, None] < rows) & (torch.arange(len(y)) < columns)
        return torch.where(mask, x[:, None] * y, 0)

    inner = sf.bucketed(f, (None, 0), 1, sizes=(4,))
    # The inner function has the length of the outer one between its own arguments and its own length.
    outer = sf.bucketed(inner, (0,), 0)
    x, y = torch.randn(3, requires_grad=True), torch.randn(2)
    out = outer(x, y)
    assert torch.equal(out, x[:, None] * y)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, y.sum().expand(3))
    assert torch.equal(outer(torch.ones(0), y), torch.ones(0, 2)) and outer.cache_info().graphs is None
    assert {4: (1, 3, 1), 1: (1, 0, 1)} == outer.cache_info().buckets


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"in_dims": (None, None)}, ValueError, r"must have a dim to pad"),
        ({"in_dims": (True,)}, TypeError, r"in_dims.*is a bool"),
        ({"sizes": (4, 2)}, ValueError, r"sizes=\(4, 2\)\): .* in ascending order"),
        ({"sizes": ()}, ValueError, r"pass one size or more"),
        (
            {"sizes": (1, 2, 3)},
            ValueError,
            r"jit\(max_graphs=2\) must keep a graph for each of the 3 sizes .* Pass max_graphs=3",
        ),
    ],
)
def test_dims_and_sizes_that_fit_no_call_are_refused(how: dict[str, Any], error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"in_dims": (0,), "sizes": (4,)} | how
    with pytest.raises(error, match=says):
        sf.bucketed(sf.jit(lambda x, n: x, max_graphs=2), **given)


def test_calls_whose_padding_would_show_are_refused_with_the_remedy() -> None:
    f = sf.bucketed(lambda x, y, n: {"x": x, "y": y.sum()}, (0, {"a": 1}), {"x": 0, "y": None}, sizes=(2, 4))
    good = {"a": torch.ones(1, 3)}
    for x, y, error, says in (
        (torch.ones(5), {"a": torch.ones(1, 5)}, ValueError, r"a length of 5 is above .*sizes=\(2, 4\)\. Add 5"),
        (torch.ones(2), good, ValueError, r"(?s)args\[0\] has 2 along dim 0.*args\[1\]\['a'\] has 3 along dim 1"),
        (torch.ones(3), {"a": torch.ones(3)}, ValueError, r"args\[1\]\['a'\] of shape \(3,\) has no dim 1"),
        (3, good, TypeError, r"args\[0\] is an int; pad it before sf.shard"),
    ):
        with pytest.raises(error, match=says):
            f(x, y)
    rest = sf.bucketed(lambda x, n: x + 1, (0,), sizes=(2, 4))
    assert rest(torch.ones(1)).shape == (2,)  # only a second bucket shows that a dim has the length
    with pytest.raises(ValueError, match=r"result has shape \(4,\) in the bucket of 4, and \(2,\) .* in out_dims"):
        rest(torch.ones(3))
    with pytest.raises(ValueError, match=r"result has shape \(3,\), and not the 4 rows of the bucket along dim 0"):
        sf.bucketed(lambda x, n: x[:3], (0,), 0)(torch.ones(3))
    with pytest.raises(ValueError, match=r"must have sizes= to be bound"):
        sf.bucketed(sf.jit(lambda x, n: x), (0,), 0).bind(torch.ones(3))
    with pytest.raises(ValueError, match=r"bucketed\(sharded\(jit\(f\)\), \.\.\.\)"):
        sf.bucketed(sf.jit(lambda x, n: x), (0,), 0, sizes=(4,)).bind(torch.ones(3))


@distributed(world=[1, 2])
def test_a_result_that_ranks_cut_along_the_length_is_refused() -> None:
    mesh = sf.make_mesh({"dp": -1})
    for spec in (P(), P("dp")):
        whole = sf.sharded(lambda w, x, n: w * x, mesh=mesh, out_specs=spec)
        f, w = sf.bucketed(whole, (None, 0), 0), whole.init(torch.ones(()))
        if spec == P() or mesh.size == 1:
            out = f(w, torch.ones(3))
            assert isinstance(out, sf.GlobalTensor) and out.shape == (3,) and out.local.shape == (3,)
        else:
            with pytest.raises(ValueError, match=r"result is cut along dim 0 as P\('dp'\); return this rank's rows"):
                f(w, torch.ones(3))
