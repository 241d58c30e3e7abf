"""Covers `reshard` against a slow reference, the whole tensor cut anew: on one mesh, between meshes, and errors."""

import pathlib
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import GlobalTensor, _carry, route
from shardfn.core import Mesh, P, Placement, all_coords, block_slices
from shardfn.testing import distributed

with warnings.catch_warnings():  # torch's own, at the first use of forward mode
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Whole numbers that every dtype holds, and none twice in a row."""
    x = torch.arange(torch.Size(shape).numel()).reshape(shape) % 97 + 1
    return x % 2 == 0 if dtype == torch.bool else x.to(dtype)


def drawn_spec(draw: random.Random, ndim: int, mesh: Mesh) -> P:
    free = list(mesh.axis_names)
    draw.shuffle(free)
    return P(*(tuple(free.pop() for _ in range(draw.randint(0, min(2, len(free))))) or None for _ in range(ndim)))


def drawn_shape(draw: random.Random, *, even: bool) -> tuple[int, ...]:
    return tuple(draw.choice((0, 12) if even else (0, 1, 2, 3, 4, 5, 7, 12)) for _ in range(draw.randint(0, 3)))


def drawn_tree(
    draw: random.Random, mesh: Mesh, pool: "sf.memory.Pool | None" = None, *, even: bool = False
) -> tuple[dict, dict[str, Tensor]]:
    """Leaves on a mesh, in any memory, and their wholes."""
    wholes = {f"x{i}": whole(drawn_shape(draw, even=even), draw.choice(DTYPES)) for i in range(draw.randint(1, 4))}
    tree = {}
    for name, x in wholes.items():
        leaf = sf.shard(x, drawn_spec(draw, x.ndim, mesh), mesh)
        kind = draw.choice(("device", "host", "disk") if pool else ("device", "host"))
        if kind != "device" and mesh.is_member:
            held = pool.write(leaf.local).result() if kind == "disk" and pool else leaf.local
            leaf = GlobalTensor(held, leaf.shape, leaf.spec, mesh, kind)
        elif kind != "device":
            leaf = sf.collectives.absent(leaf.shape, leaf.dtype, leaf.spec, mesh, kind)
        tree[name] = leaf
    return tree, wholes


def drawn_targets(draw: random.Random, tree: dict, mesh: Mesh, pool: Any = None) -> dict:
    to = {}
    for name, x in tree.items():
        spec = drawn_spec(draw, len(x.shape), mesh)
        kind = draw.choice(("device", "host", "disk") if pool else ("device", "host"))
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float64)) if x.dtype.is_floating_point else x.dtype
        choices = (spec, sf.Sharding(spec, kind), Placement(spec, memory_kind=kind, dtype=dtype))
        to[name] = draw.choice(choices)
    return to


def asked(to: Any, x: GlobalTensor) -> Placement:
    if isinstance(to, Placement):
        return to
    to = to if isinstance(to, sf.Sharding) else sf.Sharding(to)
    return Placement(to.spec, memory_kind=to.memory_kind, dtype=x.dtype, stacked=to.stacked)


def check(out: GlobalTensor, x: Tensor, at: Placement, mesh: Mesh, why: object) -> None:
    """A leaf has the block of its whole, cut anew."""
    assert (out.shape, out.spec, out.memory_kind, out.dtype) == (x.shape, at.spec, at.memory_kind, at.dtype), why
    assert out.mesh is mesh, why
    if mesh.is_member:
        want = x[block_slices(tuple(x.shape), at.spec, mesh.shape, mesh.coords)].to(at.dtype)
        assert torch.equal(out.local, want) and out.local.is_contiguous(), why
    else:
        with pytest.raises(ValueError, match="has no block on this rank"):
            out.local  # noqa: B018


# on one mesh


def _on_one_mesh(world: int, seeds: range, directory: pathlib.Path) -> None:
    shapes = {1: [{"dp": 1}], 2: [{"dp": 2}], 3: [{"dp": 3}], 4: [{"dp": 2, "tp": 2}, {"dp": 4}]}[world]
    meshes = [sf.make_mesh(shape, device="cpu") for shape in shapes]
    with sf.memory.Pool(directory / f"rank{meshes[0].rank}") as pool:
        for seed in seeds:
            draw = random.Random(seed)
            mesh = draw.choice(meshes)
            tree, wholes = drawn_tree(draw, mesh, pool, even=seed % 2 == 0)
            to = drawn_targets(draw, tree, mesh, pool)
            with sf.count_traffic() as traffic:
                out = sf.reshard(tree, to, pool=pool)
            routes = []
            for name, x in tree.items():
                at = asked(to[name], x)
                check(out[name], wholes[name], at, mesh, (seed, name))
                src = Placement(x.spec, memory_kind=x.memory_kind, dtype=x.dtype)
                assert (out[name] is x) == (src == at), (seed, name)
                routes.append(route(x.shape, src, at, mesh))
            if seed % 2 == 0:
                assert traffic.bytes == sum(sum(way.sent(mesh.shape, mesh.coords).values()) for way in routes), seed


@distributed(world=[3, pytest.param(4, marks=pytest.mark.nightly)])
def test_on_one_mesh_blocks_are_those_of_the_whole_and_bytes_the_routes(world: int, tmp_path: pathlib.Path) -> None:
    _on_one_mesh(world, range(10), tmp_path)


@pytest.mark.nightly
@distributed(world=[1, 2, 3, 4])
def test_on_one_mesh_any_leaf_goes_anywhere(world: int, tmp_path: pathlib.Path) -> None:
    _on_one_mesh(world, range(100, 400), tmp_path)


@distributed(world=2)
def test_a_leaf_in_place_is_the_same_leaf_and_others_have_memory_of_their_own() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 1}, device="cpu")
    tree = {"w": sf.shard(torch.ones(4), P("dp"), mesh), "step": torch.tensor(3), "none": None}
    out = sf.reshard(tree, P("dp"))
    assert out["w"] is tree["w"] and out["step"] is tree["step"] and out["none"] is None
    other = sf.reshard(tree, P(("dp", "tp")))["w"]  # cut alike, as an axis of one rank cuts nothing
    assert other.spec == P(("dp", "tp")) and other.local.data_ptr() != tree["w"].local.data_ptr()
    assert sf.reshard({}, P()) == {}


@distributed(world=2)
def test_one_dtype_is_that_of_floating_point_leaves() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    tree = {"w": sf.shard(torch.ones(4), P("dp"), mesh), "n": sf.shard(torch.arange(4), P("dp"), mesh)}
    out = sf.reshard(tree, P(), dtype=torch.bfloat16)
    assert (out["w"].dtype, out["n"].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16 has no effect"):
        sf.reshard(tree["n"], P(), dtype=torch.bfloat16)


@pytest.mark.nightly
@distributed(world=3)
def test_gradients_go_the_way_back() -> None:
    """On each rank the gradient's block is that of the one-device gradient; under vmap and jvp, too."""
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    x = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    weight = torch.linspace(1, 2, 35, dtype=torch.float64).view(7, 5)

    def loss(leaf: GlobalTensor, spec: P) -> Tensor:
        for to in (spec, sf.Sharding(P(), "host"), sf.Sharding(spec, "host"), P()):
            leaf = sf.reshard(leaf, to)
        return (leaf.local.sin() * weight).sum()

    def one(x: Tensor) -> Tensor:
        return (x.sin() * weight).sum()

    for src, others in ((P("dp"), (P(None, "dp"), P())), (P(), (P("dp"),))):
        leaf, want = sf.shard(x, src, mesh), sf.shard(torch.func.grad(one)(x), src, mesh)
        for dst in others:
            assert torch.equal(torch.func.grad(loss)(leaf, dst).local, want.local), (src, dst)
            block = leaf.local.clone().requires_grad_()
            (by_autograd,) = torch.autograd.grad(loss(GlobalTensor(block, x.shape, src, mesh), dst), block)
            assert torch.equal(by_autograd, want.local), (src, dst)
        if src == P():
            continue
        several = sf.stack([leaf, leaf, leaf])
        got = torch.func.vmap(lambda leaf: torch.func.grad(loss)(leaf, P("dp")))(several)
        assert torch.equal(sf.member(got, 2).local, want.local)
        tangent = torch.func.jvp(lambda leaf: loss(leaf, P("dp")), (leaf,), (sf.shard(weight, src, mesh),))[1]
        torch.testing.assert_close(tangent, torch.func.jvp(one, (x,), (weight,))[1])


@pytest.mark.nightly
@distributed(world=2)
def test_it_runs_in_a_jitted_function() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")

    def f(tree: dict) -> dict:
        there = sf.reshard(tree, {"w": P(None, "dp"), "b": sf.Sharding(P(), "host")}, dtype=torch.bfloat16)
        return {"sum": sf.reshard(there["w"], P()).local.sum(), **there}

    jitted = sf.jit(f, backend="graph")
    x, b = torch.arange(21.0).view(7, 3), torch.arange(5)
    tree = {"w": sf.shard(x, P("dp"), mesh), "b": sf.shard(b, P("dp"), mesh)}
    for _ in range(2):
        with sf.count_traffic() as captured:
            out = jitted(tree)
        with sf.count_traffic() as eager:
            want = f(tree)
        assert captured.bytes == eager.bytes > 0
        assert torch.equal(out["sum"], want["sum"])
        for name in ("w", "b"):
            assert out[name].sharding == want[name].sharding and torch.equal(out[name].local, want[name].local)
    host = {"w": tree["w"], "b": sf.reshard(tree["b"], sf.Sharding(P("dp"), "host"))}
    assert jitted(host)["b"].memory_kind == "host" and jitted.cache_info().misses == 2


# between meshes


FROM_TO = [
    ([0, 1], {"dp": 2}, [1, 2, 3], {"dp": 3}),
    ([0, 1, 2, 3], {"dp": 4}, [1, 2], {"tp": 2}),
    ([0, 1], {"dp": 2}, [2, 3], {"dp": 2}),
    ([0, 1, 2, 3], {"dp": 2, "tp": 2}, [0, 1, 2, 3], {"dp": 4}),
    ([2], {"dp": 1}, [0, 1, 3], {"dp": 3}),
    ([0, 2, 3], {"dp": 3}, [1], {"dp": 1}),
]


def least(x: GlobalTensor, mesh: Mesh, at: Placement) -> int:
    """The least bytes that all ranks together must receive: elements that each is to hold and does not, one by one."""

    def held(rank: int, m: Mesh, spec: P) -> Tensor:
        mask = torch.zeros(x.shape, dtype=torch.bool)
        if rank in m.ranks:
            mask[block_slices(tuple(x.shape), spec, m.shape, all_coords(m.shape)[m.ranks.index(rank)])] = True
        return mask

    missing = (held(rank, mesh, at.spec) & ~held(rank, x.mesh, x.spec) for rank in range(dist.get_world_size()))
    return sum(int(m.sum()) for m in missing) * min(x.dtype.itemsize, at.dtype.itemsize)


def sent_by_all(traffic: "sf.collectives.Traffic") -> list[int]:
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, traffic.bytes)
    return counts


def _between(seeds: range, directory: pathlib.Path, cases: list) -> None:
    pool = sf.memory.Pool(directory / f"rank{dist.get_rank()}")
    for ranks, shape, new_ranks, new_shape in cases:
        old = sf.make_mesh(shape, ranks=ranks, device="cpu")
        new = sf.make_mesh(new_shape, ranks=new_ranks, device="cpu")
        for seed in seeds:
            draw = random.Random(seed)
            tree, wholes = drawn_tree(draw, old, pool)
            to = drawn_targets(draw, tree, new, pool)
            bytes_needed = sum(least(x, new, asked(to[name], x)) for name, x in tree.items())
            out = {}
            with sf.count_traffic() as traffic:
                if old.is_member or new.is_member:
                    out = sf.reshard(tree, to, mesh=new, pool=pool)
                    for name, x in tree.items():
                        check(out[name], wholes[name], asked(to[name], x), new, (seed, name))
            assert sum(sent_by_all(traffic)) == bytes_needed, seed
            if old.is_member or new.is_member:  # and back
                again = {name: Placement(x.spec, dtype=x.dtype) for name, x in tree.items()}
                back = sf.reshard(out, again, mesh=old)
                for name in tree:
                    check(back[name], wholes[name], again[name], old, (seed, name))
    pool.close()


@pytest.mark.nightly
@distributed(world=4)
def test_between_meshes_blocks_are_those_of_the_whole_and_bytes_the_least(tmp_path: pathlib.Path) -> None:
    _between(range(3), tmp_path, FROM_TO)


@pytest.mark.nightly
@distributed(world=4)
@pytest.mark.parametrize("case", range(len(FROM_TO)))
def test_between_meshes_any_leaf_goes_anywhere(case: int, tmp_path: pathlib.Path) -> None:
    _between(range(100, 200), tmp_path, [FROM_TO[case]])


@pytest.mark.nightly
@distributed(world=4)
def test_big_leaves_go_in_pieces_and_ranks_that_hold_the_same_share_the_work() -> None:
    old = sf.make_mesh({"dp": 2}, ranks=[0, 1])
    new = sf.make_mesh({"dp": 2}, ranks=[2, 3])
    x, y = torch.arange(3003).view(11, 273), torch.arange(7)
    with pytest.MonkeyPatch.context() as patch, sf.count_traffic() as traffic:
        for name, value in {"PIECE": 400, "WINDOW": 1200, "MESSAGES": 3}.items():
            patch.setattr(f"shardfn.collectives._cross.{name}", value)
        out = sf.reshard([sf.shard(v, P(), old) for v in (x, y)], P(), mesh=new)
    if new.is_member:
        assert torch.equal(out[0].local, x) and torch.equal(out[1].local, y)
    assert sent_by_all(traffic) == [8 * 3010, 8 * 3010, 0, 0]
    assert traffic.calls >= (8 * 3003) // 400 if old.is_member else traffic.calls == 0


@pytest.mark.nightly
@distributed(world=3)
def test_small_leaves_share_a_message_for_each_pair_of_ranks_and_dtype() -> None:
    old, new = sf.make_mesh({"dp": 2}, ranks=[0, 1], device="cpu"), sf.make_mesh({"tp": 2}, ranks=[1, 2], device="cpu")
    sizes = [3, 40_000, 1, 7, 0, 12]  # the second is a message of its own
    wholes = {f"x{i}": whole((n, 2), (torch.float32, torch.bfloat16)[i % 2]) for i, n in enumerate(sizes * 4)}
    wholes |= {"b": torch.tensor(3.0)}
    # Rank 0 sends to 1 and 2, rank 1 to 2: four large leaves, and one message of each of two dtypes.
    usual = [2 * (4 + 2), 4 + 2, 0]
    for piece, calls in ((4 << 20, usual), (40_000, None), (70, None)):
        few = {name: x for name, x in wholes.items() if x.numel() * 10 < piece}
        tree = {name: sf.shard(x, P("dp") if x.ndim else P(), old) for name, x in few.items()}
        with pytest.MonkeyPatch.context() as patch, sf.count_traffic() as traffic:
            patch.setattr("shardfn.collectives._cross.PIECE", piece)
            out = sf.reshard(tree, P(), mesh=new)
        assert calls is None or traffic.calls == calls[dist.get_rank()]
        for name, leaf in out.items():
            assert not new.is_member or torch.equal(leaf.local, few[name]), (piece, name)


@distributed(world=2)
def test_two_meshes_of_the_same_ranks_share_nothing() -> None:
    old, new = sf.make_mesh({"dp": 2}, device="cpu"), sf.make_mesh({"dp": 2}, device="cpu")
    x = sf.shard(torch.arange(5.0), P("dp"), old)
    with sf.count_traffic() as traffic:
        y = sf.reshard(x, P("dp"), mesh=new)
    assert traffic.bytes == 0 and y.mesh is new and y.local.data_ptr() != x.local.data_ptr()
    assert torch.equal(y.full_tensor(), torch.arange(5.0))
    old.close()
    assert torch.equal(sf.reshard(x, P(), mesh=new).local, torch.arange(5.0))  # values of a closed mesh are still there


@pytest.mark.nightly
@distributed(world=3)
def test_a_trained_state_goes_to_a_mesh_that_serves_it() -> None:
    train, serve = sf.make_mesh({"dp": 2}, ranks=[0, 1]), sf.make_mesh({"dp": 2}, ranks=[1, 2])
    start = {"w": torch.linspace(-1, 1, 12).view(4, 3)}
    params: Any = {"w": sf.shard(start["w"], P("dp"), train)}
    if train.is_member:
        step = sf.sharded_step(
            lambda p, x: (x @ p["w"]).square().mean(),
            sf.optim.sgd(0.1),
            mesh=train,
            zero=sf.Zero(stage=3, persist_elements=0),
        )
        state, _ = step(step.init(start), torch.ones(2, 4))
        params = state.params
    served = sf.reshard(params, P(None, "dp"), mesh=serve, dtype=torch.bfloat16)["w"]
    if serve.is_member:
        one = start["w"].clone().requires_grad_()
        (torch.ones(4, 4) @ one).square().mean().backward()
        assert one.grad is not None
        want = (one.detach() - 0.1 * one.grad).bfloat16()
        torch.testing.assert_close(served.full_tensor(), want)


# errors


def _on_tape() -> Placement:
    at = Placement()
    object.__setattr__(at, "memory_kind", "tape")  # past the types, which the tests check
    return at


@pytest.mark.parametrize(
    "to, words",
    [
        (P(None, None, "dp"), r"P\(None, None, 'dp'\) has 3 entries, but the leaf has 2 dims"),
        pytest.param(P("dq"), r"axes \['dq'\] are not in the mesh, which has \('dp',\)", marks=pytest.mark.nightly),
        pytest.param(Placement(P("dp"), quantization=(8, 256)), r"holds elements, no codes", marks=pytest.mark.nightly),
        (Placement(P(), quantization=(8, 0)), r"quantization must be"),
        pytest.param(Placement(P(), unreduced=("dp",)), r"no sum that is still to be taken", marks=pytest.mark.nightly),
        pytest.param(_on_tape(), r"memory_kind='tape'; the memories are", marks=pytest.mark.nightly),
        (sf.Sharding(P(), "disk"), r"on which disk\? Pass pool="),
    ],
)
def test_an_impossible_move_is_named_with_both_placements(to: Any, words: str) -> None:
    with sf.make_mesh({"dp": 1}, device="cpu") as mesh:
        good, bad = (sf.shard(torch.ones(4, 6), P("dp"), mesh) for _ in range(2))
        with pytest.raises(ValueError, match=words) as error:
            sf.reshard({"w": bad, "v": good}, {"w": to, "v": P()})
    text = str(error.value)
    assert text.startswith("reshard: these cannot be, and nothing has moved:\n  - tree['w'] of shape (4, 6), from")
    assert f"from Placement(P('dp'), float32) on {mesh!r} to {asked(to, bad)!r} on {mesh!r}: " in text
    assert "tree['v']" not in text


def test_trees_that_do_not_fit_and_leaves_that_cannot_move() -> None:
    mesh = sf.make_mesh({"dp": 1}, device="cpu")
    x = sf.shard(torch.ones(4), P(), mesh)
    with pytest.raises(ValueError, match=r"(?s)to does not match tree.*tree\['w'\] has no entry in to"):
        sf.reshard({"w": x}, {"v": P()})
    with pytest.raises(ValueError, match=r"none is a GlobalTensor.*sf.shard"):
        sf.reshard({"w": torch.ones(4)}, P("dp"))
    with pytest.raises(ValueError, match=r"holds the blocks of several members; take one by member"):
        sf.reshard(sf.stack([x, x]), P("dp"))
    with pytest.raises(ValueError, match=r"is abstract: its ranks do not exist"):
        sf.reshard(x, P("dp"), mesh=sf.make_mesh({"dp": 8}, device="cpu", abstract=True))
    other = sf.make_mesh({"dp": 1}, device="cpu")
    with pytest.raises(ValueError, match=r"between meshes there is no graph and no derivative"):
        torch.func.grad(lambda x: sf.reshard(x, P(), mesh=other).local.sum())(x)
    other.close()
    with pytest.raises(ValueError, match="the mesh is closed; make another one"):
        sf.reshard(x, P(), mesh=other)
    x.donate()
    with pytest.raises(sf.DonatedError, match=r"tree\['w'\] of shape \(4,\)"):
        sf.reshard({"w": x}, P())


@pytest.mark.nightly
@distributed(world=4, timeout=60)
def test_a_rank_in_neither_mesh_raises() -> None:
    old, new = sf.make_mesh({"dp": 2}, ranks=[0, 1]), sf.make_mesh({"dp": 1}, ranks=[2])
    x = sf.shard(torch.arange(4.0), P("dp"), old)
    if dist.get_rank() == 3:
        with pytest.raises(ValueError, match=r"this rank is in none of Mesh\(dp=1; not this rank .* Mesh\(dp=2; not"):
            sf.reshard(x, P(), mesh=new)
        return
    out = sf.reshard(x, P(), mesh=new)
    assert new.is_member == (out.held.nbytes > 0)


@pytest.mark.nightly
@distributed(world=3, timeout=60)
def test_an_error_of_one_rank_or_of_all_is_one_everywhere_and_the_next_call_works() -> None:
    old, new = sf.make_mesh({"dp": 2}, ranks=[0, 1]), sf.make_mesh({"dp": 2}, ranks=[1, 2])
    rank = dist.get_rank()

    def leaf() -> GlobalTensor:
        return sf.shard(torch.arange(6.0), P("dp"), old)

    for mesh in (None, new) if old.is_member else (new,):
        everywhere = [r"axes \['dq'\] are not in the mesh"] * 2
        differing = [r"(?s)ranks disagree on what to run.*rank 1: tree: \(6,\) from"] * 2
        alone = [r"axes \['dq'\] are not in the mesh", r"(?s)ranks disagree.*rank 0: raised ValueError: reshard"]
        for specs, words in (
            ((P("dq"), P("dq")), everywhere),
            ((P(), P("dp")), differing),
            ((P("dq"), P("dp")), alone),
        ):
            mine = int(rank > 0)
            with pytest.raises((ValueError, sf.RankError), match=words[mine]):
                sf.reshard(leaf(), specs[mine], mesh=mesh)
        with pytest.raises((sf.DonatedError, sf.RankError), match=r"a step has consumed|raised DonatedError"):
            x = leaf()
            if rank == 0:
                x.donate()
            sf.reshard(x, P(), mesh=mesh)
        out = sf.reshard(leaf(), P(), mesh=mesh)
        assert not out.mesh.is_member or torch.equal(out.local, torch.arange(6.0))


@pytest.mark.nightly
@distributed(world=3, timeout=90)
def test_a_rank_that_fails_under_way_is_heard_of() -> None:
    """The last rank's disk is gone when its leaf has come; the others learn of it in their next call at the latest."""
    old, new = sf.make_mesh({"dp": 2}, ranks=[0, 1]), sf.make_mesh({"dp": 1}, ranks=[2])
    x = sf.shard(torch.arange(6.0), P("dp"), old)

    class Broken(sf.memory.Pool):
        def __init__(self) -> None:
            pass

        def write(self, x: Tensor) -> Any:
            raise OSError("no disk")

    with pytest.raises((OSError, sf.RankError), match="no disk"):
        for _ in range(2):
            sf.reshard(x, sf.Sharding(P(), "disk"), mesh=new, pool=Broken())
    out = sf.reshard(x, P(), mesh=new)
    assert not new.is_member or torch.equal(out.local, torch.arange(6.0))


@distributed(world=2, timeout=60)
def test_a_rank_that_comes_to_a_step_instead_is_an_error_on_both() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    step = sf.sharded_step(
        lambda p, x: (p * x).mean(), sf.optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0)
    )
    state = step.init(torch.ones(4))
    with pytest.raises(sf.RankError, match=r"(?s)ranks disagree on what to run.*rank 0: reshard"):
        if mesh.rank == 0:
            sf.reshard(state.params, P())
        else:
            step(state, torch.ones(2, 4))
    assert torch.equal(sf.reshard(state.params, P()).local, torch.ones(4))


# small leaves that share messages


def _small(mesh: Mesh) -> tuple[dict[str, GlobalTensor], dict[str, Any]]:
    """Leaves of several dtypes, sizes and dims that are cut, with their targets."""
    tree: dict[str, GlobalTensor] = {}
    to: dict[str, Any] = {}
    for i, (src, dst, dtype) in enumerate(
        (src, dst, dtype)
        for src, dst in ((P("dp"), P()), (P("dp"), P(None, "dp")), (P(None, "dp"), P("dp")), (P(), P("dp")))
        for dtype in (torch.float32, torch.int64, torch.bool)
    ):
        for rows, columns in ((5, 3), (0, 4), (6, 1), (1, 7)):
            tree[f"{i}, {rows}"] = sf.shard(whole((rows, columns, 2), dtype), src, mesh)
            to[f"{i}, {rows}"] = Placement(dst, dtype=torch.bfloat16) if i % 3 == 0 else dst
    return tree, to


@pytest.mark.day("2")
@distributed(world=[2, 3])
def test_small_leaves_with_the_same_hops_share_a_message_and_have_the_bits_of_messages_of_their_own() -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    tree, to = _small(mesh)
    found = []
    for least in (0, _carry.SMALL):
        with pytest.MonkeyPatch.context() as patch, sf.count_traffic() as traffic:
            patch.setattr(_carry, "SMALL", least)
            found.append((sf.reshard(tree, to), traffic))
    (alone, many), (shared, few) = found
    for name, x in shared.items():
        assert torch.equal(x.local, alone[name].local) and x.local.is_contiguous(), name
        assert x.local.stride() == alone[name].local.stride(), name
    # Three ways that send, of three dtypes each; leaves without elements send nothing.
    assert few.calls == 9 and many.calls > 20 and few.bytes == many.bytes and few.by_dtype == many.by_dtype
    memory = [x.local.untyped_storage().data_ptr() for x in shared.values() if x.local.numel()]
    assert len(set(memory)) == len(memory)


@distributed(world=2)
def test_large_leaves_and_full_messages_are_apart() -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    # Undone in the rank's process, which later tests use.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_carry, "SMALL", 100)
        patch.setattr(_carry, "MESSAGE", 150)
        _check_messages(mesh)


def _check_messages(mesh: Mesh) -> None:
    sizes = (8, 8, 16, 30, 2, 20)  # of 4 bytes: 32 + 32 + 64, 120 alone, 8 + 80
    tree = [sf.shard(whole((n,), torch.float32), P("dp"), mesh) for n in sizes]
    with sf.count_traffic() as traffic:
        out = sf.reshard(tree, P())
    assert traffic.calls == 3
    assert all(torch.equal(x.local, whole((n,), torch.float32)) for x, n in zip(out, sizes, strict=True))
    # A target on the host is reached leaf by leaf, after the message.
    kept = sf.reshard(tree, sf.Sharding(P(), "host"))
    assert all(x.memory_kind == "host" and torch.equal(x.local, y.local) for x, y in zip(kept, out, strict=True))
