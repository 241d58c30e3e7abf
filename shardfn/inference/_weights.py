"""Weights in their served form, made leaf by leaf, so that the parameters are never in memory next to the weights.

Weights are made so of parameters that are read at their use, and where weights are kept away from the device.

weights[k] == decoder.pack(params)[k], bit for bit, with the memory of a few leaves
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shardfn._torch import FakeTensorMode
from shardfn.collectives import Constant, GlobalTensor, bind_mesh
from shardfn.core import (
    Axes,
    Disk,
    MemoryKind,
    Mesh,
    P,
    PyTree,
    Sharding,
    Zero,
    block_slices,
    broadcast_prefix,
    draw_block,
    find_directory_problem,
    is_in_memory,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_paths,
    tree_unflatten,
)
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, reshard
from shardfn.engine.agreement import check_replicas
from shardfn.memory import Pool, trim_heap

from ._layouts import Layout

# Bytes of parameters that are packed at a time, if a leaf is not larger.
TOGETHER = 16 << 20
# Leaves of at most this number of elements, such as those of norms, stay on the device.
SMALL = 1024


def make_zero(weights: MemoryKind, disk: Disk | None, axis: Axes = None) -> Zero:
    """Returns the rule of weights in a memory, cut along an axis.

    Raises:
        ValueError: there is no such memory, or the directory is missing or has no effect.
    """
    if weights not in get_args(MemoryKind):
        raise ValueError(f"engine: weights must be 'device', 'host' or 'disk', got {weights!r}.")
    problem = find_directory_problem([weights], disk)
    if problem == "missing":
        raise ValueError("engine: weights='disk' has no directory. Give one: disk=sf.Disk('/path/to/a/fast/disk').")
    if problem == "idle":
        raise ValueError(
            f"engine: disk={disk} has no effect with weights={weights!r}. Leave disk out, or pass weights='disk'."
        )
    if axis is None:
        return Zero(params=weights, disk=disk, persist_elements=SMALL)
    return Zero(3, axis, params=weights, disk=disk, persist_elements=SMALL)


class Shapes(NamedTuple):
    """Weights in their served form, as shapes.

    Attributes:
        tree: global shapes, on "meta".
        specs: specs of the leaves.
    """

    tree: PyTree
    specs: list[P]

    def ahead(self, layers: int) -> int:
        """Returns the bytes moved to the device ahead of their use. The disk is read three times as far: by a layer."""
        return -(-sum(x.nbytes for x in tree_leaves(self.tree)) // (3 * layers))


def find_packed_shapes(source: "WeightSource") -> Shapes:
    """Returns the shapes of the served form. Collective.

    Raises:
        RankError: ranks have different parameters.
    """
    source.compare()
    mesh, tree = source.mesh, source.packed(())
    specs = broadcast_prefix(source.layout.packed, tree, _is_spec, names=("packed", "weights"))
    blocks = tree_leaves(tree)
    own = [x.shape for x in blocks]
    ranks: list[Any] = comms_of(mesh).control.gather(own) if mesh.size > 1 else [own]

    def get_whole(k: int) -> Tensor:
        shape = list(blocks[k].shape)
        for d, axis in enumerate(specs[k]):
            if axis is not None:
                shape[d] = sum(shapes[k][d] for shapes in ranks)
        return torch.empty(shape, dtype=blocks[k].dtype, device="meta")

    return Shapes(tree_unflatten(tree_flatten(tree)[1], [get_whole(k) for k in range(len(blocks))]), specs)


def pack_leafwise(source: "WeightSource", shapes: Shapes, kept: PyTree, pool: Pool | None, *, together: bool) -> PyTree:
    """Returns the served form, each leaf in separate memory before the next leaves are made. Collective.

    Args:
        source: parameters. Each leaf of their served form is made of one parameter, and of shapes.
        shapes: shapes of the result.
        kept: `Sharding` of each leaf of the result.
        pool: pool where leaves on disk are written.
        together: whether a leaf may be made of several parameters: then all parameters are read once more, and
            together.

    Raises:
        ValueError: a leaf that is kept away from the device is made of several parameters. The message lists them.
    """
    mesh, wanted = source.mesh, tree_leaves(kept, is_leaf=_is_sharding)
    wholes, treedef = tree_flatten(shapes.tree)
    out: list[GlobalTensor | None] = [None] * len(wholes)

    def fill_group(group: tuple[int, ...]) -> None:
        blocks = tree_leaves(source.packed(group))
        for k, block in enumerate(blocks):
            if out[k] is None and block.device.type != "meta":
                x = GlobalTensor(block.contiguous(), wholes[k].shape, shapes.specs[k], mesh)
                out[k] = x if x.sharding == wanted[k] else reshard(x, wanted[k], pool=pool)
            blocks[k] = wholes[k]  # drops the block

    for group in source.groups():
        fill_group(group)
        trim_heap()
    if together and any(x is None for x in out):
        fill_group(source.all)
    missing = [path for path, x in zip(tree_paths(shapes.tree, "weights"), out, strict=True) if x is None]
    raise_all(ValueError, "engine: these weights are made of several parameters; keep them on the device:", missing)
    return tree_unflatten(treedef, out)


class WeightSource:
    """Parameters of a model. Some have values, and the rest are shapes.

    Args:
        layout: layout of the model.
        params: whole tensors, deferred draws, or `GlobalTensor`s.
        shardings: `Sharding` of each parameter.
        mesh: mesh.
    """

    def __init__(self, layout: Layout, params: PyTree, shardings: PyTree, mesh: Mesh) -> None:
        self.layout, self.mesh = layout, mesh
        self._leaves, self._treedef = tree_flatten(params)
        self._shardings: list[Sharding] = tree_leaves(shardings, is_leaf=_is_sharding)
        self._paths = tree_paths(params, "params")

    @property
    def all(self) -> tuple[int, ...]:
        """Returns the group of all leaves."""
        return tuple(range(len(self._leaves)))

    def compare(self) -> None:
        """Refuses trees of different leaves, and whole leaves of different values, on some ranks. Collective.

        Raises:
            RankError: ranks have different parameters.
        """
        if self.mesh.size == 1:
            return
        comms, leaves = comms_of(self.mesh), dict(zip(self._paths, self._leaves, strict=True))
        lines = [f"{path}: {tuple(x.shape)} of {x.dtype}" for path, x in leaves.items()]
        whole = {path: x for path, x in leaves.items() if not isinstance(x, GlobalTensor)}
        with losing_no_peer(comms):
            agree_on_step(comms.control, "the weights of an engine", constant=Constant.of("\n".join(lines)))
            check_replicas(list(whole), list(whole.values()), comms.control)

    def groups(self) -> Iterator[tuple[int, ...]]:
        """Yields groups of neighbouring leaves, of `TOGETHER` bytes or a single leaf."""
        group, size = list[int](), 0
        for i, x in enumerate(self._leaves):
            nbytes = x.shape.numel() * x.dtype.itemsize
            if group and size + nbytes > TOGETHER:
                yield tuple(group)
                group, size = [], 0
            group.append(i)
            size += nbytes
        yield tuple(group)

    def packed(self, group: tuple[int, ...]) -> PyTree:
        """Returns the served form, with values where it is made only of the leaves of a group."""
        blocks = [self._load_block(i) if i in group else self._get_shape(i) for i in range(len(self._leaves))]
        with bind_mesh(self.mesh), torch.no_grad():
            return self.layout.pack(tree_unflatten(self._treedef, blocks))

    def _get_slices(self, i: int) -> tuple[slice, ...]:
        return block_slices(tuple(self._leaves[i].shape), self._shardings[i].spec, self.mesh.shape, self.mesh.coords)

    def _get_shape(self, i: int) -> Tensor:
        sizes = [s.stop - s.start for s in self._get_slices(i)]
        return torch.empty(sizes, dtype=self._leaves[i].dtype, device="meta")

    def _load_block(self, i: int) -> Tensor:
        x = self._leaves[i]
        if isinstance(x, GlobalTensor):
            return reshard(x, self._shardings[i], mesh=self.mesh).local
        return draw_block(x, self._get_slices(i)).to(self.mesh.device)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _is_sharding(x: Any) -> bool:
    return isinstance(x, Sharding)


def abstract_weights(source: WeightSource) -> PyTree:
    """Returns the served form as tensors without data. The mesh may be abstract, and cuts evenly."""
    mesh, tree = source.mesh, source.packed(())
    specs = broadcast_prefix(source.layout.packed, tree, _is_spec, names=("packed", "weights"))

    def make_leaf(block: Tensor, spec: P) -> GlobalTensor:
        entries = [*spec, *[None] * (block.dim() - len(spec))]
        whole = [n * mesh.axis_size(axis) for n, axis in zip(block.shape, entries, strict=True)]
        held = torch.empty(block.shape, dtype=block.dtype, device=mesh.device)
        return GlobalTensor(held, torch.Size(whole), spec, mesh)

    leaves, treedef = tree_flatten(tree)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return tree_unflatten(treedef, [make_leaf(x, spec) for x, spec in zip(leaves, specs, strict=True)])


def drop_copies(gm: GraphModule) -> GraphModule:
    """Returns a captured program that uses values from the disk in the host's memory, where that is the device's."""
    ops, graph = torch.ops.shardfn_memory, Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        move = _find_started(node, ops.to_device_start.default)
        if move is None or move.args[1] != torch.device("cpu"):
            continue
        read = move.args[0]
        if isinstance(read, Node) and _find_started(read, ops.read_start.default) and len(read.users) == 1:
            node.replace_all_uses_with(read)
            graph.erase_node(node)
            graph.erase_node(move)
    return GraphModule(gm, graph)


def _find_started(node: Node, op: Any) -> Node | None:
    """Returns the node of an op that a node waits for, or None."""
    start = node.args[0] if node.target is torch.ops.shardfn_memory.wait.default else None
    return start if isinstance(start, Node) and start.target is op else None


def count_bytes(weights: PyTree, *kinds: MemoryKind) -> int:
    """Returns the bytes of weights on this rank in some memories."""
    return sum(x.held.nbytes for x in tree_leaves(weights) if is_in_memory(x.memory_kind, *kinds))
