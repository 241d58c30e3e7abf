"""Covers engine/step/_bound_call.py: bits of a plain call, donation, layouts that differ, failures of one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.core import RankError
from shardfn.testing import distributed

ROWS, LENGTH, WIDTH = 5, 4, 6  # rows are cut unevenly


def _decode(params: dict[str, Tensor], x: Tensor, cache: dict[str, Tensor], at: Tensor) -> Any:
    h = torch.tanh(x @ params["up"] + sf.psum(x.sum(), "dp"))
    cache["h"].index_copy_(1, at, h[:, None])
    return {"y": cache["h"].mean(1) @ params["down"], "h": h, "name": "decoder"}, cache


def _made(mesh: sf.Mesh, stage: int = 3, **options: Any) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(0)
    whole = {"up": torch.randn(WIDTH, 7, generator=g), "down": torch.randn(7, 3, generator=g)}
    f = sf.sharded(
        options.pop("jit", sf.jit)(_decode),
        mesh=mesh,
        zero=sf.Zero.flat(stage=stage, persist_elements=0),
        in_specs=(None, {"h": P("dp")}),
        out_specs=({"y": P("dp"), "h": None, "name": None}, {"h": P("dp")}),
        donate=2,
    )
    return f, f.init(whole)


def _cache(mesh: sf.Mesh) -> dict[str, sf.GlobalTensor]:
    return {"h": sf.shard(torch.zeros(ROWS, LENGTH, 7), P("dp"), mesh)}


def _inputs(cache: dict[str, sf.GlobalTensor], n: int) -> tuple[Tensor, Tensor]:
    rows = cache["h"].local.shape[0]
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(n)), torch.tensor([n % LENGTH])


@pytest.mark.day("1")
@distributed(world=[1, 2, 3])
def test_a_bound_call_has_the_bits_of_a_call() -> None:
    mesh = sf.make_mesh({"dp": -1})
    for stage in (0, 3):
        f, params = _made(mesh, stage)
        plain, cache = _cache(mesh), _cache(mesh)
        x, at = _inputs(cache, 0)
        bound = f.bind(params, x, cache, at, check_every=2)
        assert not cache["h"].donated  # nothing ran
        for n in range(5):
            x, at = _inputs(cache, n)
            place, before = cache["h"].local.data_ptr(), cache
            if n == 3:  # other tensors of the same layout
                params = sf.core.tree_map(lambda w: w.with_block(w.local + 1), params)
            want, plain = f(params, x, plain, at)
            out, cache = bound(params, x, cache, at)
            assert out["name"] == want["name"] and torch.equal(out["h"], want["h"])
            for a, b in ((out["y"], want["y"]), (cache["h"], plain["h"])):
                assert (a.shape, a.spec) == (b.shape, b.spec) and torch.equal(a.local, b.local)
            assert cache["h"].local.data_ptr() == place and before["h"].donated
        assert f.cache_info().misses == 1


def _drops(w: Tensor, x: Tensor) -> Any:
    return {"twice": [x, x[1:]], "own": w}


@distributed(world=1)
def test_results_that_share_memory_are_apart_as_in_a_call() -> None:
    for donate in ((), 1):
        f = sf.sharded(sf.jit(_drops), in_specs=(P(),), out_specs={"twice": P(), "own": None}, donate=donate)
        w, (x, y) = f.init(torch.ones(3)), (sf.shard(torch.ones(3), P(), f.mesh) for _ in range(2))
        bound = f.bind(w, x)
        for call, given in ((f, y), (bound, x)):
            place = given.local.data_ptr()
            out = call(w, given)
            memory = [v.local.data_ptr() for v in out["twice"]]
            assert (memory[0] == place) == (donate == 1) and memory[1] not in (place, place + 4)
            assert out["own"].data_ptr() != w.local.data_ptr()


@distributed(world=2)
def test_other_layouts_and_consumed_arguments_are_refused_by_path() -> None:
    mesh = sf.make_mesh({"dp": -1})
    f, params = _made(mesh)
    cache = _cache(mesh)
    x, at = _inputs(cache, 0)
    bound = f.bind(params, x, cache, at)
    for args, error in (
        ((x.double(), cache, at), r"(?s)another layout.*args\[1\] is bound as .*float32.*float64"),
        ((x[:, :5], cache, at), r"args\[1\] is bound as .*\(\d, 6\).*\(\d, 5\)"),
        ((x, {"h": sf.shard(torch.zeros(ROWS, 9, 7), P("dp"), mesh)}, at), r"args\[2\]\['h'\] is bound as"),
        ((x, {"h": sf.shard(torch.zeros(ROWS, LENGTH, 7), P(), mesh)}, at), r"args\[2\]\['h'\] is bound as"),
        ((x, {"g": cache["h"]}, at), r"is bound to args .* Bind the function again"),
        ((x, {"h": x}, at), r"args\[2\]\['h'\] is bound as"),
        ((x, cache, 0), r"args\[3\] is bound as"),
    ):
        with pytest.raises(ValueError, match=error):
            bound(params, *args)
    with pytest.raises(ValueError, match=r"params\['down'\] is bound as .*float32.*float64"):
        bound(params | {"down": params["down"].with_block(params["down"].local.double())}, x, cache, at)
    with pytest.raises(ValueError, match=r"is bound to params"):
        bound({"up": params["up"]}, x, cache, at)
    with pytest.raises(ValueError, match=r"leave them out of donate=:\n  - args\[2\]\['h'\](\n|$)"):
        bound(params, x, {"h": cache["h"].with_block(params["up"].local.new_zeros(0).set_(x.untyped_storage(), 0, cache["h"].local.shape))}, at)  # fmt: skip # noqa: E501
    bound(params, x, cache, at)
    with pytest.raises(sf.DonatedError, match=r"was donated"):
        bound(params, x, cache, at)
    params["up"].donate()
    with pytest.raises(sf.DonatedError, match=r"was donated"):
        bound(params, x, _cache(mesh), at)


@distributed(world=1)
def test_functions_that_cannot_be_bound_are_refused_with_the_remedy() -> None:
    mesh = sf.make_mesh({"dp": -1})
    f, params = _made(mesh, jit=lambda f: f)
    cache = _cache(mesh)
    x, at = _inputs(cache, 0)
    with pytest.raises(ValueError, match=r"Write sharded\(sf\.jit\(f\), \.\.\.\)"):
        f.bind(params, x, cache, at)
    f, params = _made(mesh)
    with pytest.raises(ValueError, match=r"check_every=-1: .* 0 for no checks"):
        f.bind(params, x, cache, at, check_every=-1)
    with pytest.raises(TypeError, match=r"check_every=True is a bool"):
        f.bind(params, x, cache, at, check_every=True)
    bound = f.bind(params, x, cache, at)
    with pytest.raises(ValueError, match=r"torch\.func cannot transform it. Call it without bind"):
        torch.func.vmap(lambda x: bound(params, x, cache, at)[0]["h"])(x[None])
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"bound under other settings of torch \(autocast\)"):
        bound(params, x, cache, at)
    x.requires_grad_()
    with pytest.raises(ValueError, match=r"an argument requires one\. Call it without bind"):
        bound(params, x, cache, at)
    with torch.no_grad():
        bound(params, x, cache, at)


@distributed(world=1)
def test_a_global_tensor_without_a_spec_is_passed_on_as_in_a_call() -> None:
    f = sf.sharded(sf.jit(lambda w, x: w * x.local))
    w, x = f.init(torch.ones(3)), sf.shard(torch.arange(3.0), P(), f.mesh)
    assert torch.equal(f.bind(w, x)(w, x), f(w, x))


@distributed(world=1)
def test_a_donated_block_that_is_a_parameters_memory_is_refused() -> None:
    for wrap in (lambda f: f, sf.jit):
        f = sf.sharded(wrap(lambda w, x: x.mul_(2) + w), in_specs=(P(),), out_specs=P(), donate=1)
        w = f.init(torch.ones(3))
        calls = [f] if wrap is not sf.jit else [f, f.bind(w, sf.shard(torch.ones(3), P(), f.mesh))]
        for call in calls:
            with pytest.raises(ValueError, match=r"donated arguments share memory .*, or leave .*\n  - args\[1\]$"):
                call(w, sf.GlobalTensor(w.local, torch.Size([3]), P(), f.mesh))
        assert torch.equal(w.local, torch.ones(3))


@distributed(world=2, timeout=120)
def test_an_error_on_one_rank_reaches_the_other_and_the_next_call_runs() -> None:
    mesh = sf.make_mesh({"dp": -1})
    f, params = _made(mesh)
    cache = _cache(mesh)
    x, at = _inputs(cache, 0)
    bound = f.bind(params, x, cache, at, check_every=3)
    with pytest.raises(ValueError if mesh.rank == 0 else RankError, match=r"another layout|rank 0"):
        bound(params, x.double() if mesh.rank == 0 else x, cache, at)
    fresh = _cache(mesh)
    want, _ = f(params, x, _cache(mesh), at)
    for _ in range(4):  # the checks come at the same calls, though one rank was refused one
        out, fresh = bound(params, x, fresh, at)
        assert torch.equal(out["y"].local, want["y"].local)


@distributed(world=2, timeout=120)
def test_ranks_at_different_calls_are_detected_by_the_check() -> None:
    mesh = sf.make_mesh({"dp": -1})
    f = sf.sharded(sf.jit(lambda w, x: w * x), mesh=mesh)  # sends nothing itself
    params, x = f.init(torch.ones(3)), torch.ones(3)
    bound = f.bind(params, x, check_every=3)
    if mesh.rank == 0:
        bound(params, x)
        bound(params, x)
    with pytest.raises(RankError, match=r"call 3 of the bound"):
        bound(params, x) if mesh.rank == 0 else f(params, x)
