"""Covers `checkpoint.save` and `restore` against whole tensors: any spec, memory, dtype, mesh; and their refusals."""

import json
import os
import pathlib
import random
import re
import resource
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import shardfn as sf
from shardfn import checkpoint
from shardfn.collectives import GlobalTensor, blocks_of
from shardfn.core import Mesh, P, RankError, tree_leaves
from shardfn.memory import DamagedError, as_bytes
from shardfn.testing import distributed

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}],
    3: [{"dp": 3}],
    4: [{"dp": 2, "tp": 2}, {"dp": 4}],
}


def wholes(seed: int) -> dict[str, Tensor]:
    """Leaves of all dtypes, with sizes that nothing divides; the same on all ranks and in all worlds."""
    draw = random.Random(seed)
    out = {}
    for i in range(8):
        shape = tuple(draw.choice((0, 1, 2, 3, 5, 7, 12)) for _ in range(draw.randint(0, 3)))
        x = torch.arange(torch.Size(shape).numel()).reshape(shape) % 97 + i + 1
        dtype = draw.choice(DTYPES)
        out[f"x{i}"] = x % 2 == 0 if dtype == torch.bool else x.to(dtype)
    return out | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}


def drawn_spec(draw: random.Random, ndim: int, mesh: Mesh) -> P:
    free = list(mesh.axis_names)
    draw.shuffle(free)
    return P(*(tuple(free.pop() for _ in range(draw.randint(0, min(2, len(free))))) or None for _ in range(ndim)))


def placed(leaves: dict[str, Tensor], draw: random.Random, mesh: Mesh, pool: Any) -> dict[str, Any]:
    """The leaves on a mesh, each in some memory."""
    out = {}
    for name, x in leaves.items():
        leaf = sf.shard(x, drawn_spec(draw, x.ndim, mesh), mesh)
        kind = draw.choice(("device", "host", "disk"))
        if kind != "device":
            held = pool.write(leaf.local).result() if kind == "disk" else leaf.local
            leaf = GlobalTensor(held, leaf.shape, leaf.spec, mesh, kind)
        out[name] = leaf
    return out


def zeros(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(x) for name, x in leaves.items()}


def assert_same(tree: dict[str, Any], want: dict[str, Tensor]) -> None:
    for name, x in want.items():
        got = tree[name].full_tensor() if isinstance(tree[name], GlobalTensor) else tree[name]
        assert got.dtype == x.dtype and got.shape == x.shape, name
        assert (as_bytes(got.contiguous()) == as_bytes(x)).all(), name


@distributed(world=[1, 2, 3, 4])
def _write(directory: pathlib.Path, seeds: range, world: int) -> Any:
    mesh = sf.make_mesh(random.Random(seeds[0]).choice(MESHES[world]), device="cpu")
    written = []
    with sf.memory.Pool(directory / f"pool{world}-{mesh.rank}") as pool:
        for seed in seeds:
            tree = placed(wholes(seed), random.Random(seed), mesh, pool) | {"plain": torch.tensor([1, 2])}
            tree["tied"] = tree["x0"]
            saved = checkpoint.save(
                directory / f"from{world}", tree, step=seed, user={"seed": seed}, file_bytes=200, durable=False
            )
            assert_same(tree, wholes(seed))  # it is only read
            written.append(saved.bytes)
    return written


@distributed(world=[1, 2, 3, 4])
def _read(directory: pathlib.Path, worlds: list[int], seeds: range, world: int) -> None:
    mesh = sf.make_mesh(random.Random(seeds[0] + 1).choice(MESHES[world]), device="cpu")
    with sf.memory.Pool(directory / f"pool{world}-{mesh.rank}-read") as pool:
        for source in worlds:
            for seed in seeds:
                want, place = wholes(seed), directory / f"from{source}"
                like: dict[str, Any] = placed(zeros(want), random.Random(seed + 7), mesh, pool) | {
                    "plain": torch.zeros(2).long()
                }
                like["tied"] = like["x0"]
                restored = checkpoint.restore(place, like, step=seed)
                assert restored.step == seed and restored.user == {"seed": seed}
                assert_same(restored.tree, want | {"tied": want["x0"], "plain": torch.tensor([1, 2])})
                for name in want:
                    x, y = restored.tree[name], like[name]
                    assert (x.spec, x.memory_kind, x.mesh) == (y.spec, y.memory_kind, mesh) and y.donated
                assert restored.tree["tied"] is restored.tree["x0"]


def test_any_tree_from_any_world_to_any_other(tmp_path: pathlib.Path) -> None:
    for world, other in ((3, 2), (2, 3)):
        _write(tmp_path, range(3), world=world)
        _read(tmp_path, [world], range(3), world=other)
    for place in tmp_path.glob("from*/step_*"):
        files = sorted(p.name for p in place.iterdir() if p.suffix == ".safetensors")
        assert len(files) > 2
        elements = 0
        for name in files:
            with safe_open(place / name, "pt") as f:  # another tool opens them
                elements += sum(f.get_tensor(key).numel() for key in f.keys() if "[128]" not in key)
        seed = int(place.name[5:])
        wide = sum(15 * x.numel() for x in wholes(seed).values() if x.dtype == torch.complex128)  # as bytes
        assert elements == sum(x.numel() for x in wholes(seed).values()) + 2 + wide, "each element is written once"


@pytest.mark.nightly
def test_any_tree_from_all_worlds_to_all_others(tmp_path: pathlib.Path) -> None:
    for world in (1, 2, 3, 4):
        _write(tmp_path, range(20), world=world)
    for world in (1, 2, 3, 4):
        _read(tmp_path, [1, 2, 3, 4], range(20), world=world)


@pytest.mark.nightly
@distributed(world=4)
def test_ranks_write_equally_much_and_read_their_own_blocks(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu")
    x, small = torch.randn(512, 4096), torch.randn(300, 300)
    tree = {"rows": sf.shard(x, P("dp"), mesh), "all": sf.shard(x + 1, P(), mesh), "b": sf.shard(small, P("tp"), mesh)}
    saved = checkpoint.save(tmp_path, tree, step=0)
    share = sum(t.numel() for t in (x, x, small)) * 4 / 4
    assert abs(saved.bytes - share) < 0.1 * share
    specs = {"rows": P(None, "tp"), "all": P(("tp", "dp")), "b": P(None, "dp")}
    like = {n: sf.shard(torch.zeros_like(y), specs[n], mesh) for n, y in (("rows", x), ("all", x), ("b", small))}
    out = checkpoint.restore(tmp_path, like)
    own = sum(leaf.local.nbytes for leaf in out.tree.values())
    assert own <= out.read <= 1.05 * own + small.nbytes / 2  # rows of `b` are shorter than a page
    for name, want in (("rows", x), ("all", x + 1), ("b", small)):
        got = out.tree[name]
        box = blocks_of(tuple(want.shape), got.spec, mesh)[mesh.rank]
        assert torch.equal(got.local, want[tuple(slice(*b) for b in box)])


EXPERTS = {"w": (6, 5, 3), "router": (5, 6)}


@distributed(world=[1, 2, 4])
def _experts(directory: pathlib.Path, sources: list[str], world: int) -> None:
    """Experts cut along their own axis, and inside each along another, saved or read in each layout of the world."""
    layouts = [({"ep": world}, {"w": P("ep"), "router": P()})]
    layouts += [({"dp": 2, "ep": 2}, {"w": P("ep", None, "dp"), "router": P("dp")})] if world == 4 else []
    want = {name: torch.arange(1.0, 1 + torch.Size(s).numel()).view(s) for name, s in EXPERTS.items()}
    for i, (axes, specs) in enumerate(layouts):
        mesh = sf.make_mesh(axes, device="cpu")
        if not sources:
            tree = {name: sf.shard(x, specs[name], mesh) for name, x in want.items()}
            checkpoint.save(directory / f"{world}-{i}", tree, 0, durable=False)
        for source in sources:
            like = {name: sf.shard(torch.zeros_like(x), specs[name], mesh) for name, x in want.items()}
            got = checkpoint.restore(directory / source, like).tree
            assert all(torch.equal(got[name].full_tensor(), x) for name, x in want.items())


@pytest.mark.nightly
def test_experts_move_between_ranks_that_do_not_divide_them(tmp_path: pathlib.Path) -> None:
    for world in (1, 2, 4):
        _experts(tmp_path, [], world=world)
    for world in (1, 2, 4):
        _experts(tmp_path, sorted(p.name for p in tmp_path.iterdir()), world=world)


def test_nothing_fits_and_all_of_it_is_listed(tmp_path: pathlib.Path) -> None:
    tree = {"w": torch.ones(3, 2), "wide": torch.ones(2), "gone": torch.ones(1), "fine": torch.ones(2).bfloat16()}
    checkpoint.save(tmp_path, tree, step=1)
    like = {"w": torch.zeros(2, 2), "wide": torch.zeros(2).half(), "new": torch.zeros(1), "fine": torch.zeros(2)}
    with pytest.raises(ValueError) as error:
        checkpoint.restore(tmp_path, like)
    text = str(error.value)
    assert "['w'] is (2, 2) here, but (3, 2) in the checkpoint" in text
    assert "['wide'] is torch.float16 here, but torch.float32 in the checkpoint" in text and "cast=True" in text
    assert "['new'] is not in the checkpoint" in text and "['gone'] of the checkpoint has no place" in text
    assert "fine" not in text
    like["w"] = torch.zeros(3, 2)
    got = checkpoint.restore(tmp_path, like, cast=True, partial=True).tree
    assert got["wide"].dtype == torch.float16 and got["wide"].tolist() == [1, 1] and got["new"] is like["new"]
    assert got["fine"].dtype == torch.float32 and torch.equal(got["w"], tree["w"])


def test_renames_and_parts(tmp_path: pathlib.Path) -> None:
    state = {"params": {"a": torch.arange(3.0), "b": torch.ones(2)}, "other": torch.ones(1)}
    checkpoint.save(tmp_path, state, step=1)
    params = checkpoint.restore(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(2)}, at="['params']").tree
    assert params["a"].tolist() == [0, 1, 2]
    new = {"params": {"z": torch.zeros(3), "b": torch.full((2,), 7.0)}, "other": torch.zeros(1)}

    def rename(path: str) -> str | None:
        return None if path == "['params']['b']" else path.replace("'z'", "'a'")

    got = checkpoint.restore(tmp_path, new, rename=rename, partial=True).tree
    assert got["params"]["z"].tolist() == [0, 1, 2] and got["params"]["b"].tolist() == [7, 7]


def test_another_chain_of_the_same_rules_gets_the_rename_that_reads_it(tmp_path: pathlib.Path) -> None:
    params = {"w": torch.arange(3.0), "b": torch.ones(2)}
    plain, clipped = (
        sf.sharded_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), tx)
        for tx in (sf.optim.adamw(0.1), sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(0.1)))
    )
    for name, saved, other in (("a", plain, clipped), ("b", clipped, plain)):
        state, _ = saved(saved.init(params), torch.ones(3))
        checkpoint.save(tmp_path / name, state, step=1)
        with pytest.raises(ValueError, match=r"(?s)rename=lambda path.*opt_state.*is not in the checkpoint") as error:
            checkpoint.restore(tmp_path / name, other.init(params))
        found = re.search(r"rename=(lambda path: path\.replace\('(.*)', '(.*)', 1\))\.", str(error.value))
        assert found is not None, error.value
        old, new = found[2], found[3]
        got = checkpoint.restore(tmp_path / name, other.init(params), rename=lambda p, a=old, b=new: p.replace(a, b, 1))
        for a, b in zip(tree_leaves(got.tree), tree_leaves(state), strict=True):
            assert torch.equal(sf.unshard(a), sf.unshard(b))
    with pytest.raises(ValueError, match=r"(?s)partial=True.*\.mu\['b'\] of the checkpoint has no place"):
        checkpoint.restore(tmp_path / "a", sf.sharded_step(lambda p, x: p["w"].sum(), sf.optim.sgd(0.1)).init(params))


def test_layers_stacked_and_in_a_list(tmp_path: pathlib.Path) -> None:
    layers = [{"w": torch.randn(2, 3), "b": torch.randn(2)} for _ in range(4)]
    checkpoint.save(tmp_path / "list", {"blocks": layers}, step=0)
    pile = {"blocks": {"w": torch.zeros(4, 2, 3), "b": torch.zeros(4, 2)}}
    got = checkpoint.restore(tmp_path / "list", pile).tree
    for i, layer in enumerate(layers):
        assert torch.equal(got["blocks"]["w"][i], layer["w"]) and torch.equal(got["blocks"]["b"][i], layer["b"])
    checkpoint.save(tmp_path / "pile", got, step=0)
    empty = {"blocks": [{"w": torch.zeros(2, 3), "b": torch.zeros(2)} for _ in range(4)]}
    back = checkpoint.restore(tmp_path / "pile", empty).tree
    for old, new in zip(tree_leaves(layers), tree_leaves(back["blocks"]), strict=True):
        assert torch.equal(old, new)
    with pytest.raises(ValueError, match=r"\['blocks'\]\['w'\] is not in the checkpoint"):  # one layer is left over
        checkpoint.restore(tmp_path / "list", {"blocks": {"w": torch.zeros(3, 2, 3), "b": torch.zeros(3, 2)}})


def test_values_that_are_not_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match=r"\['n'\] is a int(.|\n)*") as error:
        checkpoint.save(tmp_path, {"n": 3, "w": torch.ones(1)}, step=0)
    assert "user=" in str(error.value)
    with pytest.raises(ValueError, match="step= is needed"):
        checkpoint.save(tmp_path, {"w": torch.ones(1)})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.save(tmp_path, {"w": torch.ones(1)}, step=0, user={"x": torch.ones(1)})
    checkpoint.save(tmp_path, {"w": torch.ones(1)}, step=0)
    with pytest.raises(FileExistsError, match=r"step_000000 is there already(.|\n)*replace=True"):
        checkpoint.save(tmp_path, {"w": torch.zeros(1)}, step=0)
    checkpoint.save(tmp_path, {"w": torch.full((1,), 2.0)}, step=0, replace=True)
    assert checkpoint.restore(tmp_path, {"w": torch.zeros(1)}).tree["w"].item() == 2
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 5 in .*, which has checkpoints of steps \[0\]"):
        checkpoint.restore(tmp_path, {"w": torch.zeros(1)}, step=5)
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        checkpoint.restore(tmp_path / "nowhere", {"w": torch.zeros(1)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["owner", "step_000000"]


def test_a_part_of_the_layers_of_a_stack_is_no_fit(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, {"blocks": {"w": torch.arange(8.0).view(4, 2)}}, step=1)
    like = {"blocks": [{"w": torch.zeros(2)} for _ in range(2)]}
    with pytest.raises(ValueError, match=r"\['blocks'\]\['w'\] of the checkpoint has 4 layers, and 2 have a place"):
        checkpoint.restore(tmp_path, like)
    got = checkpoint.restore(tmp_path, like, partial=True).tree["blocks"]
    assert [x["w"].tolist() for x in got] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.nightly
def test_more_files_than_a_process_may_open(tmp_path: pathlib.Path) -> None:
    state = {f"w{i}": torch.full((2,), float(i)) for i in range(300)}
    place = pathlib.Path(checkpoint.save(tmp_path, state, step=1, file_bytes=1).path)
    assert len(list(place.glob("*.safetensors"))) == 300
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    try:
        assert checkpoint.verify(tmp_path).files == 300
        got = checkpoint.restore(tmp_path, {k: torch.zeros(2) for k in state}).tree
        few = [os.open(os.devnull, os.O_RDONLY) for _ in range(90)]
        try:
            with pytest.raises(OSError, match="Too many open files") as error:
                checkpoint.verify(tmp_path)
        finally:
            for fd in few:
                os.close(fd)
        assert not isinstance(error.value, DamagedError)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(torch.equal(got[k], x) for k, x in state.items())


def test_leaves_that_could_not_be_read_back_are_refused(tmp_path: pathlib.Path) -> None:
    class Key(str):
        def __repr__(self) -> str:
            return "'k'"

    with pytest.raises(ValueError, match=r"several leaves have the same path:\n  - \['k'\]"):
        checkpoint.save(tmp_path, {Key("a"): torch.ones(1), Key("b"): torch.zeros(1)}, step=0)
    with pytest.raises(TypeError, match=r"of these dtypes(.|\n)*\['w'\] is torch.bits8"):
        checkpoint.save(tmp_path, {"w": torch.zeros(3, dtype=torch.uint8).view(torch.bits8)}, step=0)
    assert checkpoint.steps(tmp_path) == []
    one = torch.arange(20.0).view(4, 5)[::4, ::5]  # one element, whose strides are those of many
    checkpoint.save(tmp_path, {"w": one + 3, "v": one}, step=0)
    assert checkpoint.restore(tmp_path, {"w": one.clone(), "v": torch.ones(1, 1)}).tree["v"].tolist() == [[0.0]]


@pytest.mark.nightly
@distributed(world=2, timeout=60)
def test_ranks_that_differ_raise(tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    leaf = sf.shard(torch.ones(4), P("dp"), mesh)
    with pytest.raises(RankError, match="ranks disagree"):
        checkpoint.save(tmp_path, {"w": leaf, "n": torch.tensor(mesh.rank)}, step=0)
    with pytest.raises(RankError, match="user="):
        checkpoint.save(tmp_path, {"w": leaf}, step=0, user=mesh.rank)
    with pytest.raises((ValueError, RankError), match="is local to a machine"):
        checkpoint.save(tmp_path / f"node{mesh.rank}", {"w": leaf}, step=0)
    assert not list(tmp_path.glob("node*/step_*"))
    checkpoint.save(tmp_path, {"w": leaf}, step=0)
    with pytest.raises((ValueError, RankError), match=r"is \(5,\) here"):
        like = sf.shard(torch.ones(5), P(), mesh)
        checkpoint.restore(tmp_path, {"w": like if mesh.rank else leaf})


def test_a_newer_format_and_a_directory_that_is_being_written(tmp_path: pathlib.Path) -> None:
    place = pathlib.Path(checkpoint.save(tmp_path, {"w": torch.ones(1)}, step=0).path)
    text = (place / "manifest.json").read_text()
    (place / "manifest.json").write_text(json.dumps(json.loads(text) | {"format": 99}))
    with pytest.raises(ValueError, match=r"has format 99, and this version of shardfn reads up to 1. Install a newer"):
        checkpoint.restore(tmp_path, {"w": torch.zeros(1)})
    (place / "manifest.json").unlink()
    place.rename(tmp_path / "step_000000.tmp-00ff")
    with pytest.raises(FileNotFoundError, match="is being written, or whose job ended meanwhile"):
        checkpoint.restore(tmp_path / "step_000000.tmp-00ff", {"w": torch.zeros(1)})
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, {"w": torch.ones(1)}, step=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["owner", "step_000003"]  # the remains are gone
