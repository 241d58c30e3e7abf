"""Covers `reshard(into=)`: leaves are overwritten in place with the bits of `reshard(tree, to)`, and errors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn.collectives import GlobalTensor
from shardfn.core import Mesh, P, Placement
from shardfn.testing import distributed

WHOLES = {
    "w": torch.linspace(-3, 3, 35).view(7, 5),
    "v": torch.linspace(0, 1, 66).view(11, 6),
    "n": torch.arange(5),
    "b": torch.tensor(2.5),
    "none": torch.ones(0, 3),
}


def sharded(specs: dict[str, P], mesh: Mesh) -> dict[str, GlobalTensor]:
    return {name: sf.shard(WHOLES[name], spec, mesh) for name, spec in specs.items()}


def blank(tree: dict[str, GlobalTensor], to: dict[str, Any], mesh: Mesh | None = None) -> dict[str, GlobalTensor]:
    """Leaves with the layout `to`, and other values."""
    out = sf.reshard(tree, to, mesh=mesh)
    for leaf in out.values():
        if leaf.mesh.is_member:
            leaf.local.fill_(1)
    return out


def places(tree: dict[str, GlobalTensor]) -> list[int]:
    return [x.local.data_ptr() for x in tree.values() if x.mesh.is_member]


def check(out: dict, into: dict, want: dict) -> None:
    """The leaves of `into` themselves, with the bits of those of `want`."""
    assert out.keys() == want.keys()
    for name, x in want.items():
        assert out[name] is into[name], name
        assert out[name].placement == x.placement and out[name].mesh is x.mesh, name
        if x.mesh.is_member:
            assert torch.equal(out[name].local, x.local), name


ZERO3 = {"w": P("dp"), "v": P(None, "dp"), "n": P("dp"), "b": P(), "none": P("dp")}
TARGETS: dict[str, dict[str, Any]] = {
    "replicated": dict.fromkeys(WHOLES, P()),
    "other dims": {"w": P(None, "dp"), "v": P("dp"), "n": P(), "b": P(), "none": P(None, "dp")},
    "the same": ZERO3,
    "host": {name: sf.Sharding(spec, "host") for name, spec in ZERO3.items()},
    "bfloat16": {
        name: Placement(P(), dtype=torch.bfloat16 if WHOLES[name].is_floating_point() else torch.int64)
        for name in WHOLES
    },
}


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_blocks_on_one_mesh_are_overwritten_where_they_are() -> None:
    mesh = sf.make_mesh({"dp": dist.get_world_size()}, device="cpu")
    tree = sharded(ZERO3, mesh)
    for to in TARGETS.values():
        into = blank(tree, to) if to is not ZERO3 else blank(sf.reshard(tree, P()), to)
        want, before = sf.reshard(tree, to), places(into)
        for given in (None, to):
            for leaf in into.values():
                leaf.local.fill_(1)
            with sf.count_traffic() as traffic:
                check(sf.reshard(tree, given, into=into), into, want)
            with sf.count_traffic() as usual:
                sf.reshard(tree, to)
            assert places(into) == before and traffic.bytes == usual.bytes
    assert torch.equal(tree["w"].full_tensor(), WHOLES["w"])


@distributed(world=2)
def test_leaves_of_a_tensor_parallel_cut_are_overwritten_from_rows() -> None:
    mesh = sf.make_mesh({"dp": 1, "tp": 2}, device="cpu")
    tree = sharded({"w": P(("dp", "tp")), "v": P("tp")}, mesh)
    into = blank(tree, {"w": P(None, "tp"), "v": P("dp", "tp")})
    before, want = places(into), sf.reshard(tree, {"w": P(None, "tp"), "v": P("dp", "tp")})
    check(sf.reshard(tree, into=into), into, want)
    assert places(into) == before


@pytest.mark.nightly
@distributed(world=3)
@pytest.mark.parametrize("ranks", [[1, 2], [2], [0, 1, 2]])
def test_blocks_on_another_mesh_are_overwritten_where_they_are(ranks: list[int]) -> None:
    train = sf.make_mesh({"dp": 2}, ranks=[0, 1], device="cpu")
    serve = sf.make_mesh({"tp": len(ranks)}, ranks=ranks, device="cpu")
    tree = sharded(ZERO3, train)
    to = {"w": P(None, "tp"), "v": sf.Sharding(P("tp"), "host"), "n": P(), "b": P(), "none": P("tp")}
    to |= {"b": Placement(P(), dtype=torch.bfloat16)}
    into, want = blank(tree, to, serve), sf.reshard(tree, to, mesh=serve)
    before = places(into)
    for mesh in (None, serve):
        with sf.count_traffic() as traffic:
            check(sf.reshard(tree, None if mesh is None else to, into=into, mesh=mesh), into, want)
        with sf.count_traffic() as usual:
            sf.reshard(tree, to, mesh=serve)
        assert places(into) == before and traffic.bytes == usual.bytes
    check(sf.reshard(into, into=(back := blank(into, ZERO3, train))), back, sf.reshard(into, ZERO3, mesh=train))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [[2], [1, 2], [0, 1, 2]])
@distributed(world=3)
def test_a_serving_layout_goes_back_to_the_training_layout(ranks: list[int]) -> None:
    train = sf.make_mesh({"dp": 2}, ranks=[0, 1], device="cpu")
    serve = sf.make_mesh({"tp": len(ranks)}, ranks=ranks, device="cpu")
    tree = sharded(ZERO3, train)
    to = {"w": P(None, "tp"), "v": P("tp"), "n": P(), "b": P(), "none": P("tp")}
    served = sf.reshard(tree, to, mesh=serve)
    back = sf.reshard(served, ZERO3, mesh=train)
    check(back, back, tree)
    into = blank(served, ZERO3, train)
    check(sf.reshard(served, into=into), into, tree)
    again = sf.reshard(back, to, mesh=serve)
    check(again, again, served)


@pytest.mark.nightly
@distributed(world=3)
def test_one_call_overwrites_leaves_on_several_meshes() -> None:
    train, one = sf.make_mesh({"dp": 3}, device="cpu"), sf.make_mesh({"tp": 2}, ranks=[0, 2], device="cpu")
    tree = sharded({"w": P("dp"), "v": P("dp"), "n": P("dp")}, train)
    into = {
        "w": sf.shard(torch.zeros(7, 5), P("tp"), one),
        "v": sf.shard(torch.zeros(11, 6), P(None, "tp"), sf.make_mesh({"tp": 2}, ranks=[1, 2], device="cpu")),
        "n": sf.shard(torch.zeros(5, dtype=torch.int64), P(), train),
    }
    out = sf.reshard({**tree, "step": 3}, into={**into, "step": 1})
    assert out["step"] == 3  # other leaves are those of the tree
    for name, leaf in into.items():
        assert out[name] is leaf
        if leaf.mesh.is_member:
            assert torch.equal(leaf.full_tensor(), WHOLES[name])


@distributed(world=2)
def test_serving_weights_follow_a_training_state() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    zero = sf.Zero(stage=3, persist_elements=0)
    step = sf.sharded_step(lambda p, x: (x @ p["w"]).square().mean(), sf.optim.sgd(0.1), mesh=mesh, zero=zero)
    state = step.init({"w": WHOLES["w"].clone()})
    served = sf.reshard(state.params, P(), dtype=torch.bfloat16)
    weight = served["w"].local
    for _ in range(2):
        state, _ = step(state, torch.ones(2, 7))
        sf.reshard(state.params, into=served)
        assert torch.equal(weight, state.params["w"].full_tensor().bfloat16())


def test_a_leaf_that_both_trees_share_stays() -> None:
    with sf.make_mesh({"dp": 1}, device="cpu") as mesh:
        frozen, w = sf.shard(torch.ones(3), P("dp"), mesh), sf.shard(torch.ones(3), P("dp"), mesh)
        into = {"frozen": frozen, "w": sf.shard(torch.zeros(3), P(), mesh)}
        version = frozen.local._version
        out = sf.reshard({"frozen": frozen, "w": w}, into=into)
        assert out["frozen"] is frozen and frozen.local._version == version
        assert torch.equal(out["w"].local, torch.ones(3))


# errors


def _raises(words: str, tree: Any, into: Any, kind: type[Exception] = ValueError, **options: Any) -> None:
    """The error, and that nothing was overwritten."""
    leaves = [x for x in sf.core.tree_leaves(into) if isinstance(x, GlobalTensor) and not x.donated]
    blocks = [x.held for x in leaves]
    before = [x.clone() for x in blocks if isinstance(x, Tensor) and not x.is_meta]
    with pytest.raises(kind, match=words):
        sf.reshard(tree, into=into, **options)
    after = [x for x in blocks if isinstance(x, Tensor) and not x.is_meta]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_leaves_that_cannot_be_overwritten_are_named_with_both_values() -> None:
    mesh = sf.make_mesh({"dp": 1}, device="cpu")

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> GlobalTensor:
        return sf.shard(torch.zeros(shape, dtype=dtype), P("dp"), mesh)

    def holding(block: Tensor, *shape: int) -> GlobalTensor:
        return GlobalTensor(block, torch.Size(shape), P("dp"), mesh)

    tree = {"w": sf.shard(torch.ones(4, 6), P("dp"), mesh), "v": sf.shard(torch.ones(4), P(), mesh)}
    with torch.inference_mode():
        inferred = torch.zeros(4, 6)
    for bad, words in (
        (leaf(4, 5), r"into\['w'\] has shape \(4, 5\), and tree\['w'\] \(4, 6\); pass leaves of the same shape"),
        (leaf(4, 6, dtype=torch.int64), r"into\['w'\] has dtype torch.int64, and tree\['w'\] torch.float32; only"),
        (sf.stack([leaf(4, 6)] * 2), r"into\['w'\] holds the blocks of several members; take one by member\(into"),
        (holding(torch.zeros(3, 6), 4, 6), r"has a block of shape \(3, 6\), and its layout \(4, 6\)"),
        (holding(torch.empty(4, 6, device="meta"), 4, 6), r"into\['w'\] has a block without memory, on meta"),
        (holding(torch.zeros(1, 6).expand(4, 6), 4, 6), r"strides \(0, 1\), whose elements share memory; pass a cont"),
        (holding(inferred, 4, 6), r"into\['w'\] was made under torch.inference_mode\(\).*make it under torch.no_grad"),
    ):
        title = r"(?s)reshard: these cannot be, and nothing has moved:\n  - tree\['w'\] of shape \(4, 6\), from Plac.*"
        _raises(title + words, tree, {"w": bad, "v": leaf(4)})
    _raises(
        r"(?s)into\['v'\] has dtype.*into\['w'\] has shape", tree, {"w": leaf(1, 1), "v": leaf(4, dtype=torch.bool)}
    )
    gone = leaf(4, 6)
    gone.donate()
    _raises(r"into\['w'\] of shape \(4, 6\)", tree, {"w": gone, "v": leaf(4)}, sf.DonatedError)


def test_trees_and_arguments_that_differ_are_named() -> None:
    mesh = sf.make_mesh({"dp": 1}, device="cpu")
    other = sf.make_mesh({"dp": 1}, device="cpu")
    tree = {"w": sf.shard(torch.ones(4), P("dp"), mesh)}
    into = {"w": sf.shard(torch.zeros(4), P(), mesh)}
    at = r"into\['w'\] is Placement\(P\(\), float32\), and to has "
    _raises(at + r"Placement\(P\('dp'\), float32\); leave out to=", tree, into, to=P("dp"))
    _raises(at + r"Placement\(P\(\), host, float32\)", tree, into, to=sf.Sharding(P(), "host"))
    _raises(at + r"Placement\(P\(\), bfloat16\)", tree, into, to=P(), dtype=torch.bfloat16)
    _raises(r"has dtype torch.float32, and dtype= is torch.float64; leave out dtype=", tree, into, dtype=torch.float64)
    _raises(r"into\['w'\] is on Mesh.*, and mesh= is Mesh.*; leave out mesh=", tree, into, mesh=other)
    _raises(r"(?s)into\['u'\] has no leaf in tree.*tree\['w'\] has no leaf in into", tree, {"u": into["w"]})
    _raises(r"into\['w'\]\[0\] has no leaf in tree", tree, {"w": [into["w"]]})
    _raises(r"tree\['w'\] is a GlobalTensor, and into\['w'\] is a Tensor; a Glob", tree, {"w": torch.zeros(4)})
    _raises(r"into\['w'\] has no leaf in tree", {}, into)
    other.close()
    _raises(r"the mesh is closed", tree, {"w": sf.shard(torch.zeros(4), P(), other)})
    with pytest.raises(ValueError, match=r"where to\? Pass to=, such as P\('dp'\), or into="):
        sf.reshard(tree)


def test_leaves_on_disk_or_in_codes_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with sf.make_mesh({"dp": 1}, device="cpu") as mesh, sf.memory.Pool(tmp_path) as pool:
        tree = {"w": sf.shard(torch.ones(4), P("dp"), mesh)}
        into = sf.reshard(tree, sf.Sharding(P("dp"), "disk"), pool=pool)
        _raises(r"into\['w'\] is on disk, where values are replaced and never overwritten", tree, into, pool=pool)
        block = pool.write(torch.ones(4)).result()
        monkeypatch.setattr(type(block), "quantization", (8, 256), raising=False)
        coded = tree["w"].with_block(block)
        _raises(r"into\['w'\] is in codes of \(8, 256\), where values are replaced and never", tree, {"w": coded})
        monkeypatch.undo()
        back = {"w": sf.shard(torch.zeros(4), P(), mesh)}
        assert torch.equal(sf.reshard(into, into=back)["w"].local, torch.ones(4))


def test_shared_memory_is_refused() -> None:
    with sf.make_mesh({"dp": 1}, device="cpu") as mesh:
        memory = torch.arange(12.0)

        def leaf(start: int, stop: int, spec: P = P()) -> GlobalTensor:
            return GlobalTensor(memory[start:stop], torch.Size([stop - start]), spec, mesh)

        free = [sf.shard(torch.zeros(4), P(), mesh) for _ in range(2)]
        _raises(r"into\['a'\] and tree\['a'\] share memory, at", {"a": leaf(0, 4)}, {"a": leaf(0, 4, P("dp"))})
        _raises(r"share memory.*; reshard it without into=", {"a": leaf(0, 4)}, {"a": leaf(3, 7)})
        crossed = {"a": leaf(0, 4), "b": leaf(4, 8)}, {"a": leaf(4, 8), "b": leaf(0, 4)}
        _raises(r"(?s)into\['b'\] and tree\['a'\] share memory.*into\['a'\] and tree\['b'\] share memory", *crossed)
        tied = {"a": leaf(0, 4), "b": leaf(2, 6)}
        _raises(r"into\['a'\] and into\['b'\] share memory", dict(zip("ab", free, strict=True)), tied)
        _raises(r"into\['a'\] and tree\['b'\] share memory", {"a": leaf(0, 4), "b": leaf(0, 4)}, tied)
        side = {"a": leaf(4, 8), "b": leaf(8, 12)}
        sf.reshard({"a": leaf(0, 4), "b": leaf(0, 4)}, into=side)
        assert memory.tolist() == [0, 1, 2, 3] * 3


def test_neither_graphs_nor_gradients_overwrite() -> None:
    mesh = sf.make_mesh({"dp": 1}, device="cpu")
    x, y = (sf.shard(torch.full((4,), v), P(spec), mesh) for v, spec in ((1.0, "dp"), (0.0, None)))
    words = r"tree of shape \(4,\).*no graph and no gradient follows; call this outside of jit and torch.func, under"
    with pytest.raises(ValueError, match=words):
        torch.func.grad(lambda x: sf.reshard(x, into=y).local.sum())(x)
    with pytest.raises(ValueError, match=words):
        sf.jit(lambda x, y: sf.reshard(x, into=y), backend="graph")(x, y)
    followed = x.with_block(x.local.clone().requires_grad_())
    _raises(words, followed, y)
    with torch.no_grad():
        assert torch.equal(sf.reshard(followed, into=y).local, torch.ones(4))
    parameter = y.with_block(torch.zeros(4, requires_grad=True))
    assert torch.equal(sf.reshard(x, into=parameter).local.detach(), torch.ones(4))


@pytest.mark.nightly
@distributed(world=3, timeout=60)
def test_an_error_of_one_rank_is_one_on_all_and_the_target_is_intact() -> None:
    train = sf.make_mesh({"dp": 2}, ranks=[0, 1], device="cpu")
    serve = sf.make_mesh({"tp": 2}, ranks=[1, 2], device="cpu")
    tree = sharded({"w": P("dp")}, train)
    into = blank(tree, {"w": P("tp")}, serve)
    rank, broken = dist.get_rank(), dict(into)
    if rank == 2:
        broken["w"] = into["w"].with_block(torch.zeros(2, 5))
    words = [
        r"(?s)ranks disagree.*rank 2: raised ValueError: reshard",
        r"has a block of shape \(2, 5\), and its layout",
    ]
    _raises(words[rank == 2], tree, broken, (ValueError, sf.RankError))  # type: ignore[arg-type]
    if rank == 2:
        (broken := {"w": into["w"].with_block(into["w"].local)})["w"].donate()
    words = [r"rank 2: raised DonatedError", r"into\['w'\] of shape \(7, 5\)"]
    _raises(words[rank == 2], tree, broken, (sf.DonatedError, sf.RankError))  # type: ignore[arg-type]
    if rank:
        assert torch.equal(into["w"].local, torch.ones_like(into["w"].local))
    check(sf.reshard(tree, into=into), into, sf.reshard(tree, {"w": P("tp")}, mesh=serve))
