"""Covers sharded: parity with one device, captured or not; gradients; donated arguments; memory; errors by path."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import P
from shardfn.engine.step._sharded import Sharded
from shardfn.testing import RTOL, distributed, odd_batch, odd_loss, odd_params

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
JITS = {"eager": lambda f: f, "graph": lambda f: sf.jit(f, backend="graph")}
STACKED = {"w": sf.Sharding(P(), stacked=True), "out": P()}
B, H, T, K = 4, 3, 5, 2  # rows, heads, length and size of a head of the cache


def _values(p: dict, batch: dict) -> dict[str, Any]:
    """Several results, one of them a leaf itself, one a view of a leaf, one not a tensor."""
    return {"loss": odd_loss(p, batch), "one": p["one"], "row": p["bias7"][2:4], "name": "odd"}


def _same(got: Any, want: Any) -> None:
    for a, b in zip(sf.core.tree_leaves(got), sf.core.tree_leaves(want), strict=True):
        assert a == b if not isinstance(b, Tensor) else torch.equal(a, b)


@pytest.mark.day("eager")
@pytest.mark.parametrize("mode", JITS)
def test_equals_one_device(mode: str) -> None:
    _equals_one_device([3], mode, world=2)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", JITS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_one_device_at_every_stage(world: int, mode: str) -> None:
    _equals_one_device([0, 1, 2, 3], mode, world=world)


@distributed(world=[1, 2, 3])
def _equals_one_device(stages: list[int], mode: str) -> None:
    mesh = sf.make_mesh({"dp": -1})
    for stage in stages:
        f = sf.sharded(JITS[mode](_values), mesh=mesh, zero=sf.Zero.flat(stage=stage, **ODD))
        params = f.init(odd_params())
        assert sf.core.tree_map(lambda x: x.sharding, params) == sf.core.tree_map(
            lambda x: sf.Sharding(x.spec), f.specs(odd_params())
        )
        for n in (0, 1):  # the second time in the learnt order
            rows = {k: v[n : n + 3 + mesh.rank] for k, v in odd_batch(n).items()}  # uneven
            out = f(params, rows)
            _same(out, _values(odd_params(), rows))
            out["one"].fill_(7.0)  # the result's own memory
        _same(sf.unshard(params), odd_params())
        info = f.cache_info()
        assert (info.misses > 0) == (mode == "graph") and info.hits + info.misses in (0, 2)


def _scanned(p: dict, x: Tensor) -> Tensor:
    h, _ = sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, p["w"])
    return h @ p["out"]


@pytest.mark.nightly
def test_a_home_and_stacked_leaves_keep_every_bit(tmp_path: Any) -> None:
    _homes(tmp_path, ["graph"], ["host"])


@pytest.mark.nightly
def test_homes_stacked_leaves_and_precision_keep_every_bit(tmp_path: Any) -> None:
    _homes(tmp_path, list(JITS), ["device", "host", "disk"])


@distributed(world=2, timeout=200)
def _homes(tmp_path: Any, modes: list[str], homes: list[Any]) -> None:
    mesh, g = sf.make_mesh({"dp": 2}), torch.Generator().manual_seed(0)
    whole = {"w": torch.randn(4, 5, 5, generator=g), "out": torch.randn(5, 3, generator=g)}
    x = torch.randn(2 + mesh.rank, 5, generator=g)
    for mode, jit in ((mode, JITS[mode]) for mode in modes):
        for home in homes:
            where: dict[str, Any] = {"directory": str(tmp_path / mode)} if home == "disk" else {}
            zero = sf.Zero.flat(stage=3, persist_elements=0, prefetch_bytes=64, params=home, **where)
            f = sf.sharded(jit(_scanned), mesh=mesh, specs=STACKED, zero=zero)
            params = f.init(whole)
            assert params["w"].memory_kind == home
            for _ in range(2):
                assert torch.equal(f(params, x), _scanned(whole, x)), (mode, home)
            f.close()
        mixed = sf.mixed_precision(_scanned, sf.Policy.bf16())
        f = sf.sharded(jit(mixed), mesh=mesh, specs=STACKED, zero=sf.Zero(stage=3, persist_elements=0))
        out = f(f.init(whole), x)
        assert out.dtype == torch.float32 and torch.equal(out, mixed(whole, x))


def test_a_gradient_is_that_of_one_device() -> None:
    _gradients([(3, "eager")])


@pytest.mark.nightly
def test_gradients_are_those_of_one_device() -> None:
    _gradients([(0, "eager"), (1, "graph"), (3, "graph")])


@distributed(world=2)
def _gradients(cases: list[tuple[int, str]]) -> None:
    mesh = sf.make_mesh({"dp": 2})

    def mean(p: dict, batch: dict) -> Tensor:
        return sf.pmean(odd_loss(p, batch), "dp")

    want_value, want = sf.value_and_grad(odd_loss)(odd_params(), odd_batch(0))
    rows = {k: v[6 * mesh.rank :][:6] for k, v in odd_batch(0).items()}
    for stage, mode in cases:
        f = sf.sharded(JITS[mode](mean), mesh=mesh, zero=sf.Zero.flat(stage=stage, **ODD))
        params = f.init(odd_params())
        value, got = sf.value_and_grad(f)(params, rows)
        again = torch.func.grad(f)(params, rows)
        captured = sf.jit(torch.func.grad(lambda p, b, f=f: f(p, b)), backend="graph")(params, rows)
        torch.testing.assert_close(value, want_value, rtol=RTOL[torch.float32], atol=0)
        for tree in (got, again, captured):
            assert sf.core.tree_map(lambda x: x.spec, tree) == sf.core.tree_map(lambda x: x.spec, params)
            for a, b in zip(sf.core.tree_leaves(sf.unshard(tree)), sf.core.tree_leaves(want), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=RTOL[torch.float32] * max(1.0, float(b.abs().sum())))


def _decode(p: dict, x: Tensor, cache: dict, at: int) -> tuple[Tensor, dict]:
    """One token of attention over a cache: heads are cut along "tp", rows along "dp"."""
    k = (x @ p["k"]).view(len(x), -1, K)
    cache["k"][:, :, at] = k
    score = torch.einsum("bhtk,bhk->bht", cache["k"][:, :, : at + 1], k).softmax(-1)
    seen = torch.einsum("bht,bhtk->bhk", score, cache["k"][:, :, : at + 1]).flatten(1)
    return sf.psum(seen @ p["o"], "tp"), {"k": cache["k"], "length": cache["length"] + 1}


_CUT = {"k": P("dp", "tp"), "length": P()}


def _decoder(mesh: sf.Mesh, f: Any, **options: Any) -> tuple[Sharded, Any, dict, Tensor]:
    g = torch.Generator().manual_seed(0)
    whole = {"k": torch.randn(6, H, K, generator=g), "o": torch.randn(H, K, 6, generator=g)}
    specs = {"k": P(None, "tp"), "o": P("tp")}

    def flat(p: dict, *args: Any) -> Any:  # heads may be uneven
        return f({"k": p["k"].flatten(1), "o": p["o"].flatten(0, 1)}, *args)

    made = sf.sharded(
        options.pop("jit", lambda f: f)(flat),
        mesh=mesh,
        specs=specs,
        zero=sf.Zero(stage=3, persist_elements=0),
        in_specs=(None, _CUT),
        out_specs=(None, _CUT),
        **options,
    )
    return made, made.init(whole), whole, torch.randn(T, B, 6, generator=g)


@pytest.mark.nightly
def test_a_donated_cache_is_written_in_place_and_equals_one_device() -> None:
    _decodes(world=2)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 4])
def test_a_donated_cache_equals_one_device_on_other_meshes(world: int) -> None:
    _decodes(world=world)


@distributed(world=[1, 2, 4])
def _decodes(world: int) -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2} if world == 4 else {"dp": 1, "tp": world})
    for jit in JITS.values():
        f, params, whole, xs = _decoder(mesh, _decode, donate=2, jit=jit)
        flat = {"k": whole["k"].flatten(1), "o": whole["o"].flatten(0, 1)}
        want = {"k": torch.zeros(B, H, T, K), "length": torch.zeros(())}
        cache = {n: sf.shard(x, _CUT[n], mesh) for n, x in want.items()}
        rows, before = B // mesh.axis_size("dp"), cache
        for at in range(3):
            place, before = cache["k"].local.data_ptr(), cache
            y, want = _decode(flat, xs[at], want, at)
            mine = slice(rows * mesh.axis_index("dp"), rows * (mesh.axis_index("dp") + 1))
            out, cache = f(params, xs[at][mine], cache, at)
            torch.testing.assert_close(out, y[mine])
            assert cache["k"].shape == want["k"].shape and cache["k"].local.data_ptr() == place
            for name, x in want.items():
                torch.testing.assert_close(cache[name].full_tensor(), x)
            assert before["k"].donated and before["length"].donated
            with pytest.raises(sf.DonatedError, match=r"was donated"):
                before["k"].full_tensor()
        with pytest.raises(sf.DonatedError, match=r"consumed by an earlier call.*\n  - args\[2\]\['k'\]"):
            f(params, xs[0][:rows], before, 0)


@pytest.mark.nightly
@distributed(world=2)
def test_arguments_that_are_not_donated_are_not_written() -> None:
    cache: dict[str, sf.GlobalTensor] = {}
    mesh = sf.make_mesh({"dp": 1, "tp": 2})
    for mode, jit in JITS.items():
        f, params, _, xs = _decoder(mesh, _decode, jit=jit)
        cache = {n: sf.shard(torch.zeros(s), _CUT[n], mesh) for n, s in (("k", (B, H, T, K)), ("length", ()))}
        with pytest.raises(ValueError, match=r"(?s)arguments are written to inside the function.*donate=.*") as told:
            f(params, xs[0], cache, 0)
        assert "args[2]['k']" in str(told.value) and "length" not in str(told.value), mode

    def fails(p: dict, x: Tensor, cache: dict) -> Any:
        if x[0] > 1:
            cache["k"].add_(1)
        if x[0] > 0:
            raise ZeroDivisionError
        return None, cache

    f = sf.sharded(fails, mesh=mesh, in_specs=(None, _CUT), out_specs=(None, _CUT), donate=2)
    params = f.init({"w": torch.ones(2)})
    for x, consumed in ((1.0, False), (2.0, True)):  # before a write, and half-way
        with pytest.raises(ZeroDivisionError if mesh.rank == 0 else (ZeroDivisionError, sf.RankError)):
            f(params, torch.tensor([x]), cache)
        assert cache["k"].donated == consumed


@pytest.mark.nightly
@distributed(world=2)
def test_only_a_forward_is_captured_and_leaves_go_after_use() -> None:
    mesh = sf.make_mesh({"dp": 2})
    params = {f"w{i}": torch.randn(64, 64) for i in range(8)}

    def deep(p: dict, x: Tensor) -> Tensor:
        for i in range(8):
            x = torch.tanh(x @ p[f"w{i}"])
        return x

    leaf = 64 * 64 * 4
    f = sf.sharded(
        sf.jit(deep, backend="graph", prefetch=leaf, bucket=0), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0)
    )
    lowered = f.lower(params, torch.ones(2, 64))
    text, memory = lowered.as_text(), lowered.memory_analysis()
    assert "# forward" in text and "# backward" not in text and "# update" not in text
    assert text.count("start all_gather") == 8 and "psum_scatter" not in text
    assert memory.max_by_kind["gathered"] <= 3 * leaf and memory.max_by_kind["activations"] == 0
    assert lowered.cost_analysis().sent == 8 * leaf // 2
    kept, x = f.init(sf.core.tree_map(lambda w: w.contiguous(), _broadcast(params))), torch.ones(2, 64)
    run = lowered.compile()
    with sf.count_traffic() as seen:
        assert torch.equal(run(kept, x), f(kept, x))
    assert seen.bytes == 2 * lowered.cost_analysis().sent
    with pytest.raises(ValueError, match="takes the shapes it was lowered for"):
        run(kept, torch.ones(3, 64))


class _Alive(TorchDispatchMode):
    """The whole weights that are alive whenever one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}
        self.most = self.used = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            storage, self.used = args[1].untyped_storage(), self.used + 1
            self.seen[storage._cdata] = StorageWeakRef(storage)
            self.most = max(self.most, sum(not x.expired() for x in self.seen.values()))
        return func(*args, **(kwargs or {}))


@distributed(world=2)
def test_eager_leaves_go_after_use() -> None:
    mesh, alive = sf.make_mesh({"dp": 2}), _Alive()

    def deep(p: dict, x: Tensor) -> Tensor:
        with alive:
            for i in range(8):
                x = x @ p[f"w{i}"]
        return x

    f = sf.sharded(
        deep,
        mesh=mesh,
        zero=sf.Zero(
            stage=3, persist_elements=0, travel=sf.Travel(bucket_bytes=0), pace=sf.Pace(prefetch_bytes=2 * 16 * 16 * 4)
        ),
    )
    params = f.init({f"w{i}": torch.ones(16, 16) for i in range(8)})
    for calls in (8, 16):
        f(params, torch.ones(2, 16))
        assert alive.used == calls and alive.most <= 3


def _broadcast(tree: dict) -> dict:
    for x in tree.values():
        dist.broadcast(x, 0)
    return tree


@pytest.mark.nightly
def test_an_abstract_mesh_is_lowered_for() -> None:
    mesh = sf.make_mesh({"dp": 64, "tp": 2}, abstract=True)
    f = sf.sharded(
        lambda p, c, x: (sf.psum(x @ p["w"], "tp"), c),
        mesh=mesh,
        specs={"w": P("tp")},
        zero=sf.Zero(stage=3, persist_elements=0),
        in_specs=({"k": P("dp")},),
        out_specs=(None, {"k": P("dp")}),
        donate=1,
    )
    lowered = f.lower({"w": torch.ones(8, 64)}, {"k": torch.ones(128, 3)}, torch.ones(2, 4))
    assert "float32[2, 3] = input batch args[1]['k']" in lowered.as_text()
    assert lowered.cost_analysis().sent > 0
    with pytest.raises(ValueError, match="is abstract"):
        lowered.compile()


@pytest.mark.nightly
@distributed(world=2)
def test_apply_of_a_step_is_one_and_keeps_jit() -> None:
    mesh = sf.make_mesh({"dp": 2})
    step = sf.sharded_step(odd_loss, sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero.flat(stage=3, **ODD))
    state = step.init(odd_params())
    rows = {k: v[6 * mesh.rank :][:6] for k, v in odd_batch(0).items()}
    told, log, handler = list[str](), logging.getLogger("shardfn.jit"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    for _ in range(3):  # made anew each time, and captured once
        assert torch.equal(step.apply(sf.jit(odd_loss, backend="graph"), state, rows), odd_loss(odd_params(), rows))
    log.removeHandler(handler)
    assert sum("captured apply" in text for text in told) == 1
    assert torch.equal(step.apply(odd_loss, state, rows), odd_loss(odd_params(), rows))


@pytest.mark.nightly
@distributed(world=3)
def test_results_are_blocks_of_one_tensor_or_an_error_on_all_ranks() -> None:
    mesh = sf.make_mesh({"dp": 3})
    f = sf.sharded(lambda p, x: {"y": x}, mesh=mesh, out_specs={"y": P("dp")})
    params = f.init({"w": torch.ones(1)})
    rows = sf.shard(torch.arange(7.0), P("dp"), mesh).local
    assert torch.equal(f(params, rows)["y"].full_tensor(), torch.arange(7.0))
    with pytest.raises(ValueError, match=r"result\['y'\] has blocks \[\(1,\), \(2,\), \(3,\)\].*cuts \(6,\)"):
        f(params, torch.ones(1 + mesh.rank))
    with pytest.raises(ValueError, match=r"result\['y'\] of shape \(\) has spec P\('dp'\)"):
        f(params, torch.tensor(1.0))
    wrong = sf.sharded(JITS["graph"](lambda p, c: c["k"]), mesh=mesh, in_specs=({"k": P("dp")},), out_specs=P())
    with pytest.raises(TypeError, match=r"result of shape .* varies along 'dp'"):
        wrong(params, {"k": sf.shard(torch.arange(7.0), P("dp"), mesh)})


def test_arguments_that_do_not_fit_are_named() -> None:
    mesh = sf.make_mesh({"dp": 1})
    x = sf.shard(torch.ones(4), P("dp"), mesh)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"in_specs": (P("pd"),)}, r"axis 'pd' is not in the mesh"),
        ({"in_specs": ("dp",)}, r"specs\['in_specs'\]\[0\] is 'dp'; write P"),
        ({"donate": 0}, r"donate=0: the first argument is gathered"),
        ({"in_specs": (None,), "donate": 1}, r"donate=1 has no effect: in_specs has no entry for args\[1\]"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            sf.sharded(lambda p, *args: p, mesh=mesh, **options)
    f = sf.sharded(lambda p, c: c["a"] * p, mesh=mesh, in_specs=({"a": P("dp")},))
    w = f.init(torch.ones(4))
    for call, error, words in (
        (lambda: f(torch.ones(4), {"a": x}), TypeError, r"make it with init.*\n  - params is a Tensor"),
        (lambda: f(w), ValueError, r"in_specs has 1 entries.*there are 0"),
        (lambda: f(w, {"a": torch.ones(4)}), TypeError, r"sf\.shard.*\n  - args\[1\]\['a'\] is a Tensor"),
        (lambda: f(w, {"b": x}), ValueError, r"args\[1\]\['b'\] has no entry in in_specs\[0\]"),
        (lambda: f(w, {"a": sf.shard(torch.ones(4), P(), mesh)}), ValueError, r"args\[1\]\['a'\] is kept as P\(\)"),
    ):
        with pytest.raises(error, match=rf"(?s){words}"):
            call()
    with pytest.raises(ValueError, match="the loss scale has no effect"):
        sf.sharded(sf.mixed_precision(lambda p: p, sf.Policy.bf16(), sf.optim.static_loss_scale(2.0)))
    with pytest.raises(ValueError, match="sharded already"):
        sf.sharded_step(f, sf.optim.sgd(0.1), mesh=mesh)
    with pytest.raises(ValueError, match="cannot be transformed"):
        torch.func.vmap(lambda x: f.init(x))(torch.ones(2, 4))


@distributed(world=2)
def test_ranks_that_call_different_functions_raise() -> None:
    mesh = sf.make_mesh({"dp": 2})

    def one(p: Tensor) -> Tensor:
        return p

    def two(p: Tensor) -> Tensor:
        return p + 1

    fs = [sf.sharded(f, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0)) for f in (one, two)]
    params = fs[0].init(torch.ones(4))
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: the sharded function one.*rank 1: the sharded function two"):
        fs[mesh.rank](params)
    jits = [sf.sharded(jit(one), mesh=mesh) for jit in JITS.values()]
    params = jits[0].init(torch.ones(4))
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: eager, without jit.*rank 1: jit by the schedule"):
        jits[mesh.rank](params)
    assert torch.equal(jits[1](params), torch.ones(4))


@distributed(world=2)
def test_members_of_a_population_pass_through() -> None:
    mesh = sf.make_mesh({"dp": 2})
    f = sf.sharded(
        lambda p, x: x @ p, mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0), in_specs=(P(),), out_specs=P()
    )
    many = sf.stack([f.init(torch.full((3, 2), float(k))) for k in range(4)])
    whole = sf.shard(torch.ones(5, 3), P(), mesh)
    out = torch.func.vmap(f, in_dims=(0, None))(many, whole)
    assert sf.member(out, 2).shape == (5, 2) and torch.equal(sf.member(out, 2).full_tensor(), torch.full((5, 2), 6.0))
