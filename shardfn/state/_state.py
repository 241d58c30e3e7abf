"""`TrainState`, the state that a step takes and returns, and the checks of a state that a user passes to a step."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn._torch import FakeTensor
from shardfn.collectives import GlobalTensor, donate_blocks, list_blocks, list_sharded
from shardfn.core import (
    DonatedError,
    PyTree,
    are_tensors,
    as_html,
    columns,
    dtype_name,
    explains_attributes,
    named_leaves,
    size,
    tree_entries,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)
from shardfn.optim import GradientTransformation, MasterState, owners

from ._storage import copy_value


@explains_attributes(
    state_dict="Save it, sf.checkpoint.save(directory, state), or take trained weights out: sf.export, sf.to_module.",
    load_state_dict="Read one: sf.checkpoint.restore(directory, state).",
    parameters="They are state.params, a tree of GlobalTensors.",
    grads="Gradients live within a step; sf.value_and_grad(loss)(state.params, batch) returns some.",
    to="A state is on the mesh's devices: sf.make_mesh(device=...); Zero(optimizer='host') offloads parts of it.",
)
class TrainState(NamedTuple):
    """Parameters, optimizer state, step number and key: a pytree.

    Attributes:
        params: tree of `GlobalTensor`.
        opt_state: the optimizer's state. Its tensors are `GlobalTensor`s.
        step: 0-d int64 tensor on the CPU: number of updates made.
        key: the key from which each step's key is folded; `()`, an empty tree, when the loss takes none.
        loss_scale: the state of the loss scale; `()` in a step without one.
        model_state: tree of `GlobalTensor` that the loss takes and returns; `()` for a loss without one.
    """

    params: PyTree
    opt_state: PyTree
    step: Tensor
    # No None: torch's own trees, which torch.func maps over, count it as a leaf.
    key: Tensor | tuple[()] = ()
    loss_scale: PyTree = ()
    model_state: PyTree = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a TrainState is not changed in place: write state = state._replace({name}=...), with leaves that a step"
            " or a restore has made."
        )

    def __setitem__(self, name: Any, value: Any) -> None:
        raise TypeError(
            "a TrainState is not changed in place, and its fields have names: write state = state._replace(params=...)."
        )

    def __repr__(self) -> str:
        """Returns a line a leaf: path, global shape, dtype, spec, memory, bytes here; long states are cut short."""
        return _show_state(self)

    def _repr_html_(self) -> str:
        return as_html(repr(self))


def scale_of(state: TrainState) -> Tensor | None:
    """Returns the factor of the next step's loss, or None without a loss scale."""
    return state.loss_scale.scale if state.loss_scale else None


def peek_blocks(tree: PyTree) -> PyTree:
    """Every `GlobalTensor` of a tree as this rank's block, in its stored form. It must not be written to."""
    return _map_held(lambda x: x.held, tree)


def version_of(x: Tensor) -> int | None:
    """How often a tensor has been written to, or None for one made in inference mode, which has no count."""
    return None if x.is_inference() else x._version


def _read_versions(xs: Sequence[Tensor]) -> list[int | None]:
    try:
        return [*map(_VERSION, xs)]
    except RuntimeError:  # one of them was made in inference mode
        return [version_of(x) for x in xs]


_VERSION = operator.attrgetter("_version")


@contextlib.contextmanager
def taken(tree: PyTree, *, donate: bool) -> Iterator[PyTree]:
    """Every `GlobalTensor` of a tree as this rank's block, for an update to write to: the tree's own, or copies.

    If `tree` is donated, an update that ends consumes it. One that fails before it writes anything leaves it unchanged.
    One that fails half-way consumes it, as its values are of no use.
    """
    leaves, treedef = tree_flatten(tree)
    owned = list_sharded(leaves)
    given = list_blocks(owned)
    if not donate:
        with torch.no_grad():
            given = [copy_value(x, leaf.memory_kind) for x, leaf in zip(given, owned, strict=True)]
    blocks = given
    if len(owned) < len(leaves):
        rest = iter(given)
        blocks = [next(rest) if isinstance(x, GlobalTensor) else x for x in leaves]
    held = blocks if are_tensors(blocks) else [x for x in blocks if isinstance(x, Tensor)]
    before = _read_versions(held)
    try:
        yield tree_unflatten(treedef, blocks)
    except BaseException:
        if donate and (None in before or before != _read_versions(held)):
            donate_blocks(owned)
        raise
    if donate:
        donate_blocks(owned)


# The number of leaves that are shown before the sum of the rest.
_SHOWN = 40


def _show_state(state: TrainState) -> str:
    named = [
        (path, x)
        for name in ("params", "opt_state", "model_state")
        for path, x in named_leaves(getattr(state, name), name)
    ]
    here = [_bytes_here(x) for _, x in named]
    number = "without data" if state.step.is_meta or type(state.step) is not Tensor else f"step {int(state.step)}"
    head = f"TrainState({number}, {len(named)} leaves, {size(sum(here))} here)"
    rows = [("path", "shape", "dtype", "spec", "memory", "here")]
    rows += [_format_row(path, x, n) for (path, x), n in zip(named[:_SHOWN], here, strict=False)]
    rest = [f"and {len(named) - _SHOWN} more, {size(sum(here[_SHOWN:]))} here"] if len(named) > _SHOWN else []
    return "\n".join([head, columns(rows), *rest])


def _format_row(path: str, x: Any, nbytes: int) -> tuple[str, ...]:
    if not isinstance(x, GlobalTensor):
        looks = (str(tuple(x.shape)), dtype_name(x.dtype)) if isinstance(x, Tensor) else (type(x).__name__, "")
        return (path, *looks, "", "", size(nbytes))
    if x.donated:
        return path, str(tuple(x.shape)), "donated", repr(x.spec), x.memory_kind, size(nbytes)
    return path, str(tuple(x.shape)), dtype_name(x.dtype), repr(x.spec), x.memory_kind, size(nbytes)


def _bytes_here(x: Any) -> int:
    if isinstance(x, GlobalTensor):
        return 0 if x.donated else x.held.nbytes
    return x.nbytes if isinstance(x, Tensor) else 0


def _map_held(f: Callable[[GlobalTensor], Any], tree: PyTree) -> PyTree:
    return tree_map(lambda x: f(x) if isinstance(x, GlobalTensor) else x, tree)


def check_alive(state: PyTree, name: str = "state", *, abstract: bool = False) -> None:
    """Raises if a state, or a part of it called `name`, cannot be used any more.

    Args:
        state: the state.
        name: name in messages.
        abstract: whether shapes alone will do, as for the state into which a checkpoint is restored.

    Raises:
        DonatedError: leaves were donated. The message lists them.
        ValueError: it is the stacked state of a population, or has no values.
    """
    leaves = tree_leaves(state)
    try:
        list_blocks(list_sharded(leaves))
    except DonatedError:
        named = zip(tree_paths(state, name), leaves, strict=True)
        gone = [path for path, x in named if isinstance(x, GlobalTensor) and x.donated]
        shown = ", ".join(gone[:8]) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
        raise DonatedError(
            f"this state was already consumed by a step ({shown}). Go on from the state that step returned, or build"
            " the step with donate=False."
        ) from None
    first = [x for x in leaves[:1] if isinstance(x, GlobalTensor)]
    if not abstract and any(isinstance(x.held, FakeTensor) for x in first):
        raise ValueError(
            f"this {name} is abstract: it has shapes but no values, because init got tensors on 'meta' or without"
            " data. Pass it only to step.lower. To run a step, pass values to init, or for a module on 'meta' a"
            " function that draws or loads values."
        )
    if any(x.stacked for x in first):
        raise ValueError(
            "this state is that of a population: its blocks have a leading dim. Step it under torch.func.vmap, or take"
            " one by member(state, i)."
        )


def state_owners(
    opt_state: PyTree, params: PyTree, optimizer: GradientTransformation | None = None
) -> list[int | None]:
    """Returns for each leaf of an optimizer's state the leaf of params that it belongs to, or None for a counter.

    A leaf belongs to the parameter whose path ends its own path and whose local shape it has. Other leaves are 0-d, or
    `GlobalTensor`s with a placement of their own, and belong to no parameter.

    Args:
        opt_state: the state, initialised on local blocks, or its blocks.
        params: tree of the local blocks; of all leaves only shapes and dtypes count.
        optimizer: the rule, where its state is kept elsewhere than on the device: leaves that it also makes for a tree
            without leaves are counters, even if their paths match (position 1 of a state is not the 0-d parameter at
            position 1).

    Raises:
        ValueError: a leaf is neither.
    """
    nothing = None if optimizer is None else optimizer.init(tree_map(lambda x: None, params))
    counters = set(tree_entries(nothing)) if optimizer is not None else set()
    out: list[int | None] = []
    placed: frozenset[Any] | None = None
    rows = zip(tree_entries(opt_state), named_leaves(opt_state, "opt_state"), owners(opt_state, params), strict=True)
    for path, (name, leaf), owner in rows:
        if isinstance(leaf, GlobalTensor) or path in counters:
            owner = None
        elif owner is None and len(leaf.shape) > 0 and path not in (placed := _find_placed(optimizer, params, placed)):
            raise ValueError(
                f"{name} of shape {tuple(leaf.shape)} has an unknown sharding. A leaf of an optimizer state must be"
                " 0-d, or have the shape of a parameter, or be a GlobalTensor."
            )
        out.append(owner)
    return out


def _find_placed(
    optimizer: GradientTransformation | None, params: PyTree, known: frozenset[Any] | None
) -> frozenset[Any]:
    """Returns the paths of states that a rule makes with a placement of their own, such as factored moments."""
    if known is not None or optimizer is None:
        return known or frozenset()
    like = optimizer.init(tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), params))
    pairs = zip(tree_entries(like), tree_leaves(like), strict=True)
    return frozenset(path for path, x in pairs if isinstance(x, GlobalTensor))


def check_passed(state: Any, other: Any = (), *, call: str = "step(state, batch)") -> None:
    """Refuses other values than a state.

    Args:
        state: the argument.
        other: the argument after it.
        call: the right call, for the message.

    Raises:
        TypeError: `state` is not a `TrainState`; the message names its type and the remedy.
    """
    if isinstance(state, TrainState):
        return
    if isinstance(other, TrainState):
        remedy = f"The arguments are swapped: write {call}."
    elif isinstance(state, tuple) and state and isinstance(state[0], TrainState):
        remedy = "This is the pair that a step returns; unpack it: state, metrics = step(state, batch)."
    else:
        remedy = "Make one from parameters first: state = step.init(params)."
    raise TypeError(f"{call} takes the TrainState that init or a step returned, got {type(state).__name__}. {remedy}")


def widest(state: TrainState) -> PyTree:
    """Returns the parameters of a state, each as its master copy where the optimizer keeps one."""
    nodes = tree_leaves(state.opt_state, is_leaf=lambda x: isinstance(x, MasterState))
    wide: dict[Any, Any] = {}
    for node in nodes:
        if isinstance(node, MasterState):
            wide |= dict(zip(tree_entries(node.master), tree_leaves(node.master), strict=True))
    leaves, treedef = tree_flatten(state.params)
    pairs = zip(tree_entries(state.params), leaves, strict=True)
    return tree_unflatten(treedef, [wide.get(path, x) for path, x in pairs])
