"""Covers engine/execution/_arguments.py: results in the place of donated arguments, kept anywhere."""

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import distributed

ROWS, LENGTH, WIDTH = 5, 4, 3  # rows are cut unevenly


def _push(params: dict[str, Tensor], x: Tensor, cache: dict[str, Tensor]) -> Any:
    h = torch.tanh(x @ params["w"] + sf.psum(cache["n"].sum(), "dp"))
    cache["h"] += h[:, None]
    return {"y": cache["h"].mean(1), "n": 3}, {"h": cache["h"], "n": cache["n"] + 1}


def _made(mesh: sf.Mesh, wrap: Any, **options: Any) -> Any:
    f = sf.sharded(
        wrap(_push),
        mesh=mesh,
        zero=sf.Zero(stage=3),
        in_specs=(None, {"h": P("dp"), "n": P("dp")}),
        **{"out_specs": ({"y": P("dp"), "n": None}, sf.Donated(2)), "donate": 2} | options,
    )
    return f, f.init({"w": torch.arange(9.0).reshape(3, 3) / 9})


def _cache(mesh: sf.Mesh, kind: Any, directory: Any) -> dict[str, sf.GlobalTensor]:
    whole = {"h": torch.ones(ROWS, LENGTH, WIDTH), "n": torch.arange(float(ROWS))}
    if kind == "disk":
        kept = sf.Zero.flat(stage=0, params="disk", directory=str(directory), persist_elements=0)
        store = sf.sharded(lambda p: p, mesh=mesh, specs=P("dp"), zero=kept)
        return store.init(whole)
    made = {k: sf.shard(x, P("dp"), mesh) for k, x in whole.items()}
    return (
        made
        if kind == "device"
        else {k: sf.GlobalTensor(x.local, x.shape, x.spec, mesh, kind) for k, x in made.items()}
    )


def _rows(mesh: sf.Mesh, n: int) -> Tensor:
    rows = sf.shard(torch.zeros(ROWS), P("dp"), mesh).local.shape[0]
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(n))


@pytest.mark.day("device-1", "host-1")
@distributed(world=[1, 2])
@pytest.mark.parametrize("kind", ["device", "host", "disk"])
def test_a_donated_cache_returns_to_its_memory_with_the_bits_of_the_device(kind: str, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1})
    place = tmp_path / "pool"
    for wrap in (lambda f: f, sf.jit):
        f, params = _made(mesh, wrap)
        cache, want = _cache(mesh, kind, place), _cache(mesh, "device", place)
        bound = f.bind(params, _rows(mesh, 0), cache) if wrap is sf.jit else f
        for n in range(4):
            call = (f, bound)[n % 2]
            before, x = cache, _rows(mesh, n)
            held: Any = before["h"].held
            out, cache = call(params, x, cache)
            same, want = f(params, x, want)
            assert torch.equal(out["y"].local, same["y"].local) and out["y"].memory_kind == "device"
            for k, leaf in cache.items():
                assert torch.equal(leaf.local, want[k].local), k
                assert (leaf.shape, leaf.spec, leaf.memory_kind) == (want[k].shape, P("dp"), kind)
            assert before["h"].donated and before["n"].donated
            assert kind == "disk" or cache["h"].local.data_ptr() == held.data_ptr()


@pytest.mark.nightly
@distributed(world=2)
def test_arguments_and_results_that_do_not_fit_are_refused_with_the_remedy(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1})
    x = _rows(mesh, 0)
    with pytest.raises(ValueError, match=r"Donated\(2\), but donate=\(\); add 2 to donate="):
        _made(mesh, sf.jit, donate=())
    with pytest.raises(ValueError, match=r"Donated\(2\) 2 times; name an argument once"):
        _made(mesh, sf.jit, out_specs=(sf.Donated(2), sf.Donated(2)))
    for wrap in (lambda f: f, sf.jit):
        f, params = _made(mesh, wrap, out_specs=(sf.Donated(2), None))
        with pytest.raises(ValueError, match=r"result\[0\]\['n'\] is a int, and args\[2\]\['h'\] has \(\d, 4, 3\) of"):
            f(params, x, _cache(mesh, "device", tmp_path))
        f, params = _made(mesh, wrap, out_specs=({"y": sf.Donated(2), "n": None}, None))
        with pytest.raises(ValueError, match=r"Donated\(2\) covers 1, and args\[2\] has 2; return its tree"):
            f(params, x, _cache(mesh, "device", tmp_path))
        f, params = _made(mesh, wrap, out_specs=({"y": P("dp"), "n": None}, P("dp")), donate=())
        with pytest.raises(ValueError, match=r"args\[2\]\['h'\] is kept at 'host'; only .* those in donate="):
            f(params, x, _cache(mesh, "host", tmp_path))
    f, params = _made(mesh, sf.jit)
    host, device = _cache(mesh, "host", tmp_path), _cache(mesh, "device", tmp_path)
    bound = f.bind(params, x, host)
    with pytest.raises(ValueError, match=r"(?s)args\[2\]\['h'\] is bound as .*host.*device"):
        bound(params, x, device)
    twice = {"h": host["h"], "n": host["n"].with_block(host["h"].local.view(-1)[: host["n"].local.numel()])}
    for call in (f, bound):
        with pytest.raises(ValueError, match=r"share memory"):
            call(params, x, twice)
    with pytest.raises(ValueError, match=r"(?s)from the device alone.*args\[2\]\['h'\] is kept at 'host'"):
        f(params, x.requires_grad_(), host)


def _doubled(params: dict[str, Tensor], rows: Tensor, cache: dict[str, Tensor]) -> Any:
    here = sf.memory.rows_to_device(cache["h"], rows).result()[rows] * params["w"]
    sf.memory.rows_to_host(here, cache["h"], [rows]).result()
    return here, cache


@distributed(world=[1, 2])
def test_a_function_sees_an_argument_on_the_host_and_moves_rows_of_it() -> None:
    mesh, rows = sf.make_mesh({"dp": -1}), torch.tensor([1, 0])
    for wrap in (lambda f: f, sf.jit):
        f = sf.sharded(
            wrap(_doubled),
            mesh=mesh,
            zero=3,
            in_specs=(None, {"h": sf.Sharding(P("dp"), "host"), "n": P("dp")}),
            out_specs=(P("dp"), sf.Donated(2)),
            donate=2,
        )
        params, cache = f.init({"w": torch.tensor([1.0, 2.0, 4.0])}), _cache(mesh, "host", None)
        lowered = f.lower(params, rows, cache)
        calls = [f, f] if wrap is not sf.jit else [f, f.bind(params, rows, cache), lowered.compile()]
        assert lowered.memory_analysis().by_memory["host"] >= cache["h"].local.nbytes
        want, place, nbytes = cache["h"].local.clone(), cache["h"].local.data_ptr(), cache["h"].local[:2].nbytes
        for call in calls:
            before = cache
            with sf.memory.ledger() as book:
                out, cache = call(params, rows, cache)
            want[rows] *= torch.tensor([1.0, 2.0, 4.0])
            assert torch.equal(out.local, want[rows]) and torch.equal(cache["h"].local, want)
            assert cache["h"].local.data_ptr() == place and cache["h"].memory_kind == "host" and before["h"].donated
            # "n" is not used, but goes to the device and back whole.
            assert book.moved("host", "device") == nbytes + cache["n"].local.nbytes
            assert book.moved("device", "host") == nbytes + cache["n"].local.nbytes
        with pytest.raises(
            ValueError, match=r"args\[2\]\['h'\] is kept at 'device', and in_specs has it at 'host'; pass"
        ):
            f(params, rows, _cache(mesh, "device", None))
        if wrap is sf.jit:
            other = {"h": _cache(mesh, "device", None)["h"], "n": cache["n"]}
            with pytest.raises(ValueError, match=r"(?s)args\[2\]\['h'\] is bound as .*host.*device"):
                calls[1](params, rows, other)
            twice = cache | {"n": cache["n"].with_block(cache["h"].local.view(-1)[: cache["n"].local.numel()])}
            for call in calls[:2]:
                with pytest.raises(ValueError, match=r"share memory"):
                    call(params, rows, twice)


def test_specs_on_the_host_that_fit_no_call_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"in_specs": (sf.Sharding(P(), "disk"),)}, r"in_specs.*write Sharding\(spec, 'host'\)"),
        ({"in_specs": (sf.Sharding(P()),)}, r"in_specs.*write Sharding\(spec, 'host'\) for a block"),
        ({"out_specs": sf.Sharding(P(), "host")}, r"out_specs.*or Donated\(k\) for a result"),
    ]
    for how, words in cases:
        with pytest.raises(ValueError, match=words):
            sf.sharded(_added, **how)


def _added(w: Tensor, x: Tensor) -> Tensor:
    return x + w


@distributed(world=1)
def test_lowered_functions_and_results_of_their_own_take_the_place_of_an_argument_on_the_host() -> None:
    f = sf.sharded(sf.jit(_added, backend="graph"), in_specs=(P(),), out_specs=sf.Donated(1), donate=1)
    w = f.init(torch.tensor(3.0))
    x = sf.GlobalTensor(torch.zeros(2), torch.Size([2]), P(), f.mesh, "host")
    place = x.local.data_ptr()
    lowered = f.lower(w, x).compile()
    for call in (lowered, f, f.bind(w, x)):
        x = call(w, x)
        assert x.memory_kind == "host" and x.local.data_ptr() == place
    assert torch.equal(x.local, torch.full((2,), 9.0))
