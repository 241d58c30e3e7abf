"""`GlobalTensor`: a leaf of a sharded tree. The leaf shows global shape and spec and holds this rank's block.

To torch.func the leaf is a tree of a single tensor, the block. Inside `torch.func.vmap` the block is a single member's,
like any tensor. A leaf that vmap returns holds the blocks of all members, stacked along dim 0, while shape and spec
stay a single member's: `stack` makes such leaves, `member` takes a member out.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfn._torch import FakeTensor, forward_level, peek_interpreter_stack, pytree
from shardfn.collectives.transport import naming_the_wait
from shardfn.core import (
    MOST_DRAWN,
    Absent,
    AnyQuantization,
    DonatedError,
    MemoryKind,
    Mesh,
    P,
    Placement,
    PyTree,
    Sharding,
    Stored,
    StoredValue,
    as_html,
    as_stored,
    block_slices,
    columns,
    dtype_name,
    kind_when_loaded,
    load,
    raise_all,
    size,
    tree_map,
    tree_paths,
    tree_structure,
)

from ._axis_group import bind_mesh
from ._carry import carry
from ._route import Route, route

if TYPE_CHECKING:
    import torch.distributed.tensor


_COMPUTE = (
    "It is a leaf that is spread over ranks, not a tensor to compute with: take leaf.full_tensor() (collective) or"
    " leaf.local (this rank's block); or compute with all leaves as the loss sees them, step.apply(f, state)."
)


class GlobalTensor:
    """Tensor spread over a mesh, as `jax.Array` is in JAX.

    A `GlobalTensor` is a plain value, not a `torch.Tensor`: creating a leaf costs a microsecond, where a `DTensor`
    costs about 25, and a step hands back hundreds. `to_dtensor()` gives the ecosystem's type.

    Attributes:
        shape: global shape.
        spec: layout over the mesh.
        mesh: the mesh.
        memory_kind: the memory of the block: "device", "host" or "disk".
        frozen: whether the leaf began as a parameter with `requires_grad=False`. A step trains such a leaf only if
            `trainable=` includes the leaf.

    Example:
        >>> from shardfn.core import as_mesh
        >>> x = GlobalTensor(torch.ones(3), torch.Size([3]), P(), as_mesh(None))
        >>> x.full_tensor()
        tensor([1., 1., 1.])
    """

    __slots__ = ("_local", "frozen", "memory_kind", "mesh", "shape", "spec")

    def __init__(
        self,
        local: StoredValue,
        shape: torch.Size,
        spec: P,
        mesh: Mesh,
        memory_kind: MemoryKind = "device",
        frozen: bool = False,
    ) -> None:
        self._local: StoredValue | None = local
        self.shape = shape
        self.spec = spec
        self.mesh = mesh
        self.memory_kind: MemoryKind = memory_kind
        self.frozen = frozen

    @property
    def local(self) -> Tensor:
        """Returns this rank's block. A `Stored` block, on disk or in codes, is opened each time.

        Raises:
            DonatedError: a step has consumed this leaf.
            ValueError: this rank is not in the mesh.
        """
        held = self.held
        return held if isinstance(held, Tensor) else load(held)

    @property
    def held(self) -> StoredValue:
        """Returns this rank's block in stored form: a tensor on the device or the host, or a value on disk.

        Raises:
            DonatedError: a step has consumed this leaf.
        """
        if self._local is None:
            raise DonatedError(
                f"this leaf of shape {tuple(self.shape)} was donated: a step took its buffers for the state that it"
                " returned. Use that state, or build the step with donate=False."
            )
        return self._local

    @property
    def donated(self) -> bool:
        """Returns whether a step has consumed this leaf."""
        return self._local is None

    def donate(self) -> StoredValue:
        """Returns the block in stored form. Afterwards this leaf cannot be touched."""
        held = self.held
        self._local = None
        return held

    @property
    def dtype(self) -> torch.dtype:
        """Returns the element type."""
        return self.held.dtype

    @property
    def device(self) -> torch.device:
        """Returns the device of the block, or the host's device if the block is on disk."""
        held = self.held
        return held.device if isinstance(held, Tensor) else torch.device("cpu")

    @property
    def quantization(self) -> AnyQuantization | None:
        """Returns the code to which the stored block is rounded, or None if the block is not rounded."""
        stored = as_stored(self.held)
        return None if stored is None else stored.quantization

    @property
    def placement(self) -> Placement:
        """Returns the layout, memory and dtype of the stored leaf."""
        return Placement(self.spec, (), self.memory_kind, self.dtype, self.quantization)

    def with_block(self, block: StoredValue) -> "GlobalTensor":
        """Returns the same leaf with another block, in the same memory and code."""
        return GlobalTensor(block, self.shape, self.spec, self.mesh, self.memory_kind, frozen=self.frozen)

    def replace_block(self, x: Tensor) -> "GlobalTensor":
        """Returns the same leaf with a tensor as its block, which is on the host if the leaf is on disk."""
        kind = kind_when_loaded(self.memory_kind)
        return GlobalTensor(x, self.shape, self.spec, self.mesh, kind, frozen=self.frozen)

    @property
    def ndim(self) -> int:
        """Returns the number of dims."""
        return len(self.shape)

    @property
    def sharding(self) -> Sharding:
        """Returns layout, memory kind and codes."""
        quantization = self.quantization
        return Sharding(
            self.spec, self.memory_kind, quantization=quantization if isinstance(quantization, str) else None
        )

    def numel(self) -> int:
        """Returns the number of elements of the whole tensor."""
        return self.shape.numel()

    @property
    def stacked(self) -> bool:
        """Returns whether the block is a stack of several members' blocks, as `torch.func.vmap` returns."""
        return len(self.held.shape) != len(self.shape)

    def full_tensor(self) -> Tensor:
        """Returns the whole tensor, on every rank. Collective over the axes of `spec`.

        After half a minute of waiting a warning is logged: a single rank that calls waits until the mesh's timeout.

        Raises:
            ValueError: the block is a stack of several members' blocks, or this rank is not in the mesh.
        """
        self._check_one()
        own = self.local.to(self.mesh.device)
        with bind_mesh(self.mesh), torch.no_grad(), self._naming_the_wait():
            x = carry(own, _route_to_whole(self.shape, self.spec, self.mesh))
        return x.clone() if x is own and own is self._local else x

    def _naming_the_wait(self) -> contextlib.AbstractContextManager[None]:
        axes = self.mesh.axes(self.spec.axes)
        if not axes:
            return contextlib.nullcontext()
        return naming_the_wait(
            f"rank {self.mesh.rank} is in full_tensor() of a leaf of shape {tuple(self.shape)}, which all ranks along"
            f" {axes} must call: not one of them alone, as under `if mesh.rank == 0`"
        )

    def to_dtensor(self) -> "torch.distributed.tensor.DTensor":
        """Returns the same tensor as a `DTensor`, sharing the block.

        Raises:
            ValueError: there is no process group, or one dim is cut by several axes in an order DTensor cannot express.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard  # a third of the time of importing shardfn

        self._check_one()
        if self.mesh.device_mesh is None:
            if self.mesh.size > 1:
                raise ValueError(
                    f"a DTensor needs a DeviceMesh, but {self.mesh!r} is without one. Make the mesh from all ranks."
                )
            raise ValueError("a DTensor needs a process group. With a single rank, use full_tensor().")
        placements: list[Any] = [Replicate()] * len(self.mesh.shape)
        for dim in range(len(self.shape)):
            axes = self.mesh.axes(self.spec.dim_axes(dim))
            if list(axes) != [a for a in self.mesh.axis_names if a in axes]:
                raise ValueError(
                    f"{self.spec!r} cuts dim {dim} by {axes}, against the mesh's order {self.mesh.axis_names}."
                )
            for axis in axes:
                placements[self.mesh.axis_names.index(axis)] = Shard(dim)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            self.local.to(self.mesh.device),
            self.mesh.device_mesh,
            placements,
            run_check=False,
            shape=self.shape,
            stride=stride,
        )

    def _check_one(self) -> None:
        if self.stacked:
            raise ValueError(
                f"this leaf of shape {tuple(self.shape)} has a block for each member of a population, stacked to the"
                f" shape {tuple(self.local.shape)}. Take a member with member(tree, i), or run this under"
                " torch.func.vmap."
            )

    def __repr__(self) -> str:
        """Returns shape, dtype, spec and this rank's bytes as text, without a message or a read, for any leaf."""
        dtype = "donated" if self.donated else f"{self.dtype}"
        axes = ", ".join(f"{axis}={n}" for axis, n in self.mesh.shape.items())
        return f"GlobalTensor({tuple(self.shape)}, {dtype}, {self.spec!r}; {self._here()}, mesh {axes or 'of one'})"

    def _repr_html_(self) -> str:
        dtype = "donated" if self.donated else dtype_name(self.dtype)
        block = "none" if self.donated or isinstance(self.held, Absent) else f"{tuple(self.held.shape)}"
        rows = [("shape", f"{tuple(self.shape)}"), ("dtype", dtype), ("spec", f"{self.spec!r}"), ("block", block)]
        mesh = self.mesh.drawing() if self.mesh.size <= MOST_DRAWN else f"{self.mesh!r}"
        return as_html("\n".join(["GlobalTensor", columns([*rows, ("memory", self._here())]), "", mesh]))

    def _here(self) -> str:
        """Returns the bytes of this rank's block, in stored form, and the memory, as text."""
        held = self._local
        if held is None or isinstance(held, Absent):
            return f"nothing here on {self.memory_kind}"
        abstract = isinstance(held, Tensor) and (held.is_meta or isinstance(held, FakeTensor))
        return f"{size(held.nbytes)} {'a rank' if abstract else 'here'} on {self.memory_kind}"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(
            "a leaf of a state cannot be written in place. Change values before step.init(params). To change a state,"
            " make a new leaf x.with_block(block) from this rank's block x.local, and put the leaf into"
            " state._replace(params=...)."
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a GlobalTensor has no attribute {name!r}. {_COMPUTE}", name=name, obj=self)

    @classmethod
    def __torch_function__(cls, function: Any, *rest: Any) -> Any:
        raise TypeError(f"{getattr(function, '__name__', function)} got a GlobalTensor. {_COMPUTE}")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GlobalTensor cannot be pickled: its mesh is this process's. Use full_tensor(), or save a checkpoint."
        )


def _make_refusal(name: str) -> Any:
    def refuse_operator(self: GlobalTensor, *rest: Any) -> Any:
        del self, rest
        raise TypeError(f"{name} of a GlobalTensor. {_COMPUTE}")

    return refuse_operator


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "matmul",
    "rmatmul",
    "neg",
    "float",
):
    setattr(GlobalTensor, f"__{_name}__", _make_refusal(f"__{_name}__"))


def list_blocks(leaves: Sequence[GlobalTensor]) -> list[StoredValue]:
    """Returns the block of each leaf in stored form, as `GlobalTensor.held`. Steps ask this of hundreds of leaves.

    Raises:
        DonatedError: a step has consumed a leaf.

    Example:
        >>> list_blocks([GlobalTensor(torch.ones(2), torch.Size([2]), P(), Mesh({}, torch.device("cpu")))])
        [tensor([1., 1.])]
    """
    blocks: list[Any] = [*map(_BLOCK, leaves)]
    return [x.held for x in leaves] if any(map(operator.is_, blocks, itertools.repeat(None))) else blocks


_BLOCK = operator.attrgetter("_local")


def list_sharded(leaves: Iterable[Any]) -> list[GlobalTensor]:
    """Returns the global tensors among leaves.

    Example:
        >>> list_sharded([torch.ones(2), 3])
        []
    """
    return [*filter(_is_sharded, leaves)]


_is_sharded = functools.partial(type.__instancecheck__, GlobalTensor)


def donate_blocks(leaves: Iterable[GlobalTensor]) -> None:
    """Consumes leaves, as `GlobalTensor.donate` does.

    Raises:
        DonatedError: a leaf was consumed before, or is there twice.
    """
    for x in leaves:
        if x._local is None:
            x.donate()
        x._local = None


def shard(x: Tensor, spec: P, mesh: Mesh) -> GlobalTensor:
    """Returns the `GlobalTensor` of a tensor that every rank holds whole. Only this rank's block is copied.

    On ranks outside of the mesh, the leaf has no block: see `absent`. There only the shape and dtype of `x` count.
    """
    if not mesh.is_member:
        return absent(x.shape, x.dtype, spec, mesh)
    block = x.detach()[block_slices(tuple(x.shape), spec, mesh.shape, mesh.coords)]
    return GlobalTensor(block.to(mesh.device, copy=True).contiguous(), x.shape, spec, mesh)


def absent(shape: torch.Size, dtype: torch.dtype, spec: P, mesh: Mesh, kind: MemoryKind = "device") -> GlobalTensor:
    """Returns a leaf for ranks outside of the leaf's mesh: without a block. Reading the value is an error.

    Example:
        >>> others = Mesh({"dp": 2}, torch.device("cpu"), ranks=[1, 2])
        >>> leaf = absent(torch.Size([4, 2]), torch.float32, P("dp"), others)
        >>> leaf.shape, leaf.dtype, leaf.mesh.is_member
        (torch.Size([4, 2]), torch.float32, False)
    """
    why = f"a leaf of shape {tuple(shape)} of {mesh!r} has no block on this rank, which is not in the mesh."
    return GlobalTensor(Absent(len(shape), dtype, kind, why), shape, spec, mesh, kind)


def unshard(tree: PyTree) -> PyTree:
    """Returns `tree` with every `GlobalTensor` as a whole plain tensor. Collective. Other leaves pass through."""
    return tree_map(lambda x: x.full_tensor() if isinstance(x, GlobalTensor) else x, tree)


def local(tree: PyTree) -> PyTree:
    """Returns `tree` with every `GlobalTensor` as this rank's block. Other leaves pass through."""
    return tree_map(lambda x: x.local if isinstance(x, GlobalTensor) else x, tree)


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Returns trees of one structure as a single tree, stacked in every block, for `torch.func.vmap`.

    Args:
        trees: trees of the members. Global tensors must agree in shape and spec.

    Raises:
        ValueError: `trees` is empty, or the trees differ. Every leaf is listed.

    Example:
        >>> stack([{"w": torch.ones(2)}, {"w": torch.zeros(2)}])["w"].shape
        torch.Size([2, 2])
    """
    if not trees:
        raise ValueError("stack needs at least one tree.")
    if any(tree_structure(t) != tree_structure(trees[0]) for t in trees):
        raise ValueError(f"the trees differ in structure: {[str(tree_structure(t)) for t in trees]}.")
    problems: list[str] = []
    paths = iter(tree_paths(trees[0], "tree"))

    def join_leaves(*leaves: Any) -> Any:
        path = next(paths)
        if len({(type(x), tuple(x.shape), getattr(x, "spec", None)) for x in leaves}) > 1:
            problems.append(f"{path}: {', '.join(map(repr, leaves))}")
            return None
        if not isinstance(leaves[0], GlobalTensor):
            return torch.stack(leaves)
        first = leaves[0]
        block = torch.stack([x.local for x in leaves])
        return GlobalTensor(block, first.shape, first.spec, first.mesh, frozen=first.frozen)

    out = tree_map(join_leaves, *trees)
    raise_all(ValueError, "leaves of the members differ:", problems)
    return out


def member(tree: PyTree, index: int) -> PyTree:
    """Returns member `index` of a tree that `torch.func.vmap` returned, or that `stack` made.

    Args:
        tree: a tree of blocks and tensors with a leading dim.
        index: the member's number.

    Example:
        >>> member(stack([{"w": torch.ones(2)}, {"w": torch.zeros(2)}]), 1)
        {'w': tensor([0., 0.])}
    """

    def take_member(x: Any) -> Any:
        if not isinstance(x, GlobalTensor):
            return x[index]
        return GlobalTensor(x.local[index], x.shape, x.spec, x.mesh, frozen=x.frozen)

    return tree_map(take_member, tree)


def transforming() -> bool:
    """Returns whether a transform of torch.func (or forward-mode AD) is running, so that tensors may be wrapped.

    Example:
        >>> transforming(), torch.func.grad(lambda x: x * transforming())(torch.tensor(1.0))
        (False, tensor(1.))
    """
    return peek_interpreter_stack() is not None or forward_level() >= 0


# torch also puts other objects than tensors in the places of leaves, so property and constructor are bypassed.

_Context = tuple[torch.Size, P, Mesh, MemoryKind, bool]


def _flatten_leaf(x: GlobalTensor) -> tuple[list[Any], _Context]:
    held = x._local
    if not isinstance(held, Tensor | Absent) and isinstance(held, Stored):
        raise ValueError(
            f"torch.func cannot differentiate or map {x!r}, which is not a tensor. Use sf.value_and_grad(f), or keep"
            " the parameters in another memory: Zero(params='host')."
        )
    return [x.local if x.donated else x._local], (x.shape, x.spec, x.mesh, x.memory_kind, x.frozen)


def _flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
    children, context = _flatten_leaf(x)
    return [(pytree.GetAttrKey("local"), children[0])], context


def _unflatten_leaf(children: Any, context: _Context) -> GlobalTensor:
    x = object.__new__(GlobalTensor)
    (x._local,), (x.shape, x.spec, x.mesh, x.memory_kind, x.frozen) = children, context
    return x


pytree.register_pytree_node(
    GlobalTensor,
    _flatten_leaf,
    _unflatten_leaf,
    flatten_with_keys_fn=_flatten_with_keys,
)


def _route_to_whole(shape: torch.Size, spec: P, mesh: Mesh) -> Route:
    """Returns the route to the whole, axis by axis: groups along several axes need all ranks, here fewer may call."""
    stops, entries = [Placement(spec)], [spec.dim_axes(dim) for dim in range(len(spec))]
    for dim in range(len(spec)):
        while entries[dim]:
            entries[dim] = entries[dim][:-1]
            stops.append(Placement(P(*(axes or None for axes in entries))))
    return route(shape, stops[0], stops[-1], mesh, via=stops[1:-1])
