"""Model state, next to parameters.

For example running statistics, or the biases of a router. A step takes the state and gives it back.

    loss(params, model_state, batch[, key]) -> (loss[, aux], model_state)
    finish(model_state) -> model_state

The transforms around a loss (`jit`, `accumulate`, `mixed_precision`) pass only a batch. So the state bypasses the
transforms: each forward finds the state that the previous forward has left.

`finish` is the end of a step for the state: a pure function, called once, after the last microbatch. The function sees
this rank's blocks, and may call collectives over the axes of the mesh. Every executor calls the function before an
update writes anything. So an error inside leaves the state unchanged, and a skipped step never calls the function.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn._torch import FAKE, FakeTensor, FakeTensorMode, dispatch_mode
from shardfn.capture import fakes
from shardfn.collectives import AnyControl, GlobalTensor, shard, transforming
from shardfn.core import (
    Ambient,
    Mesh,
    P,
    PyTree,
    RankError,
    all_coords,
    block_slices,
    broadcast_prefix,
    named_leaves,
    raise_all,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)

from ._check import is_spec
from ._loss import Loss, WeightedMean


def is_abstract(leaves: list[Any]) -> bool:
    """Returns whether any of these tensors has no data, or torch's fake mode is on, in which no tensor has."""
    active = dispatch_mode(FAKE) is not None
    return active or any(isinstance(x, FakeTensor) or x.device.type == "meta" for x in leaves)


def abstract_leaves(tree: PyTree, device: torch.device) -> PyTree:
    """Returns the tree, with its tensors replaced by tensors without data.

    Tensors on "meta" count as being on `device`.
    """
    leaves, treedef = tree_flatten(tree)
    return tree_unflatten(treedef, fakes(leaves, device))


# The difference of ranks' states, relative to their size, that is accepted: ranks may round differently.
APART = 1e-3


class ModelState:
    """Model state of a step on the way through the forwards, in order.

    `through` is around each forward. After a forward, `now` is the returned state. The original blocks are never
    written.

    Args:
        blocks: a tree of this rank's blocks.
    """

    def __init__(self, blocks: PyTree) -> None:
        self.now = blocks

    @contextlib.contextmanager
    def through(self) -> Iterator[None]:
        """Makes the state known to a forward that runs inside.

        Raises:
            TypeError: (afterwards) a leaf that the loss returns is not a tensor.
            ValueError: the loss returns another tree, or leaves of other shapes or dtypes. All are listed.
        """
        before = self.now
        with _MODEL_STATE.bound(self):
            yield
        if self.now is before:  # as from a loss without a state
            return
        check_returned(before, self.now, "the loss")
        if not transforming():  # a constant of the next forward
            # Else the graph of each forward would hang on the graph of the previous forward.
            self.now = tree_map(Tensor.detach, self.now)


_MODEL_STATE = Ambient[ModelState]("model state of a forward", by_thread=True)


def innermost_state() -> ModelState:
    """Returns the state of the running forward."""
    state = _MODEL_STATE.innermost()
    assert state is not None, "a loss with a model state runs inside ModelState.through"
    return state


def past_the_batch(loss: Loss) -> Loss:
    """Returns a loss with a state as a loss without a state.

    `loss(params, batch[, key]) -> loss[, aux]`, inside `ModelState.through`.
    """

    def thread_state(params: PyTree, *args: Any) -> Any:
        state = innermost_state()
        out = loss(params, state.now, *args)
        if not isinstance(out, tuple) or isinstance(out, WeightedMean) or len(out) < 2:
            raise TypeError(
                "with has_state=True the loss must return (loss, model_state), with has_aux=True (loss, aux,"
                f" model_state); got {type(out).__name__}."
            )
        *rest, state.now = out
        return rest[0] if len(rest) == 1 else tuple(rest)

    return thread_state


def first_model_state(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Returns a tree of whole tensors, the same on all ranks, as global tensors: this rank's blocks."""
    check_fit(tree, specs)
    leaves, treedef = tree_flatten(tree)
    made = broadcast_prefix(specs, tree, is_spec, names=("state_specs", "model_state"))
    if not (mesh.abstract or is_abstract(leaves)):
        return tree_unflatten(treedef, [shard(x, spec, mesh) for x, spec in zip(leaves, made, strict=True)])

    def make_abstract(x: Tensor, spec: P) -> GlobalTensor:
        where = block_slices(tuple(x.shape), spec, mesh.shape, mesh.coords)
        block = torch.empty([s.stop - s.start for s in where], dtype=x.dtype, device=mesh.device)
        return GlobalTensor(block, x.shape, spec, mesh)

    with FakeTensorMode(allow_non_fake_inputs=True):
        return tree_unflatten(treedef, [make_abstract(x, spec) for x, spec in zip(leaves, made, strict=True)])


def check_fit(tree: PyTree, specs: PyTree) -> None:
    """Refuses a first model state that the specs do not fit.

    Raises:
        TypeError: a leaf is not a tensor. All are listed.
        ValueError: a leaf has fewer dims than its spec, or the trees differ.
    """
    named = named_leaves(tree, "model_state")
    raise_all(
        TypeError,
        "model_state must be a tree of tensors:",
        [f"{path} is a {type(x).__name__}" for path, x in named if not isinstance(x, Tensor)],
    )
    made = broadcast_prefix(specs, tree, is_spec, names=("state_specs", "model_state"))
    raise_all(
        ValueError,
        "state_specs have more entries than their leaf has dims:",
        [
            f"{p} of shape {tuple(x.shape)} has spec {s!r}"
            for (p, x), s in zip(named, made, strict=True)
            if len(s) > x.ndim
        ],
    )


def check_alike(tree: PyTree, control: AnyControl) -> None:
    """Refuses first model states with different leaves on different ranks. Collective.

    Raises:
        RankError: lists the leaves that each rank passes.
    """
    mine = [f"{path}: {tuple(x.shape)} {x.dtype}" for path, x in named_leaves(tree, "model_state")]
    rows: list[Any] = control.gather(mine)
    if any(row != rows[0] for row in rows):
        raise_all(RankError, "ranks pass other model states:", [f"rank {r}: {row}" for r, row in enumerate(rows)])


def check_kept(tree: PyTree, specs: PyTree, *, has_state: bool) -> None:
    """Refuses a state with a model state that does not fit the step.

    Raises:
        ValueError: the state has a model state and should not, or lacks a model state, or leaves are cut otherwise.
            Such leaves are listed.
    """
    leaves = tree_leaves(tree)
    if leaves and not has_state:
        raise ValueError("the state has a model state, but the step was built without. Pass has_state=True.")
    if has_state and tree == ():
        raise ValueError(
            "the state has no model state, but the step was built with has_state=True. Make it with"
            " init(params, model_state=...)."
        )
    made = broadcast_prefix(specs, tree, is_spec, names=("state_specs", "model_state"))
    named = zip(tree_paths(tree, "model_state"), leaves, made, strict=True)
    raise_all(
        ValueError,
        "the model state was made by a step with other state_specs:",
        [
            f"{path} is {f'kept as {x.spec!r}' if isinstance(x, GlobalTensor) else f'a {type(x).__name__}'}; here it is"
            f" {spec!r}"
            for path, x, spec in named
            if not isinstance(x, GlobalTensor) or x.spec != spec
        ],
    )


def check_returned(before: PyTree, after: PyTree, who: str) -> None:
    """Refuses a model state that a function has returned, if it is not like the function's argument.

    Args:
        before: the given state.
        after: the returned state.
        who: the function, in words.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: the trees differ, or leaves have other shapes or dtypes. All are listed by path.
    """
    old, treedef = tree_flatten(before)
    new, made = tree_flatten(after)
    if made != treedef:
        had, has = tree_paths(before, "model_state"), tree_paths(after, "model_state")
        problems = [f"{path} is missing" for path in had if path not in has]
        problems += [f"{path} is new" for path in has if path not in had]
        raise_all(
            ValueError,
            f"{who} returns another model state than it was given. Return the same tree:",
            problems or [f"it is {made}, and was {treedef}"],
        )
    named = list(zip(tree_paths(before, "model_state"), old, new, strict=True))
    raise_all(
        TypeError,
        f"{who} returns leaves of the model state that are not tensors:",
        [f"{path} is a {type(y).__name__}" for path, _, y in named if not isinstance(y, Tensor)],
    )
    raise_all(
        ValueError,
        f"{who} returns leaves of the model state with other shapes or dtypes than it was given:",
        [
            f"{path} is {tuple(y.shape)} {y.dtype}, and was {tuple(x.shape)} {x.dtype}"
            for path, x, y in named
            if x.shape != y.shape or x.dtype != y.dtype
        ],
    )


def put_in(blocks: PyTree, new: PyTree) -> PyTree:
    """Returns the model state after a step, in the memory of `blocks`."""
    leaves, treedef = tree_flatten(blocks)
    memory = {b.untyped_storage()._cdata for b in leaves}
    # A loss may return a leaf in the place of another: all leaves are read before a leaf is written.
    apart = [x.clone() if x.untyped_storage()._cdata in memory else x for x in tree_leaves(new)]
    return tree_unflatten(treedef, [b.copy_(x) for b, x in zip(leaves, apart, strict=True)])


def wrapped_like(blocks: Sequence[Tensor], old: PyTree) -> PyTree:
    """Returns blocks as global tensors, in the tree of an earlier model state."""
    leaves, treedef = tree_flatten(old)
    pairs = zip(blocks, leaves, strict=True)
    return tree_unflatten(treedef, [GlobalTensor(b, x.shape, x.spec, x.mesh) for b, x in pairs])


def shapes_of(model_state: PyTree) -> Any:
    """Returns the properties of a model state on which a compiled step relies, as a comparable value.

    No layout describes the leaves.
    """
    leaves, treedef = tree_flatten(model_state)
    return treedef, *((tuple(x.shape), x.spec, x.dtype, x.memory_kind) for x in leaves)


def check_same_state(tree: PyTree, mesh: Mesh, control: AnyControl) -> None:
    """Refuses leaves that differ between ranks along axes that the leaf's spec leaves out. Collective.

    Raises:
        RankError: lists each such leaf.
    """
    leaves = tree_leaves(tree)
    if all(mesh.size == mesh.axis_size(x.spec.axes) for x in leaves):
        return
    rows: list[Any] = control.gather([_summarize_elements(x.local) for x in leaves])
    problems = []
    for k, (path, x) in enumerate(zip(tree_paths(tree, "model_state"), leaves, strict=True)):
        same: dict[Any, list[tuple[float, float]]] = {}
        for row, at in zip(rows, all_coords(mesh.shape), strict=True):
            same.setdefault(tuple(at[a] for a in mesh.axes(x.spec.axes)), []).append(row[k])
        if any(not _is_near(one, group[0]) for group in same.values() for one in group):
            left = tuple(a for a in mesh.axes(mesh.axis_names) if a not in x.spec.axes)
            problems.append(f"{path}, kept as {x.spec!r}, differs along {left}: sums {[row[k][0] for row in rows]}")
    raise_all(
        RankError,
        "ranks that should have one model state have different ones after the first step. Average the values that the"
        " loss has measured, with sf.pmean(x, axes), or declare in state_specs that these axes cut it:",
        problems,
    )


def _summarize_elements(x: Tensor) -> tuple[float, float]:
    """Returns a sum that differs between permutations of elements, and the sum of their magnitudes."""
    flat = x.detach().reshape(-1).to(torch.float64)
    weights = 1 + torch.arange(flat.numel(), device=flat.device, dtype=torch.float64).cos() / 2
    return float((flat * weights).sum()), float((flat.abs() * weights).sum())


def _is_near(a: tuple[float, float], b: tuple[float, float]) -> bool:
    # States that overflow on all ranks count as equal.
    if not all(map(math.isfinite, (*a, *b))):
        return math.isfinite(a[1]) == math.isfinite(b[1])
    return abs(a[0] - b[0]) <= APART * max(a[1], b[1])


Finish = Callable[[PyTree], PyTree]


def check_finish(finish: Any, *, has_state: bool) -> None:
    """Refuses a value that cannot be the end of a step.

    Raises:
        TypeError: the value is not a function.
        ValueError: the step has no model state.
    """
    if finish is None:
        return
    if not callable(finish):
        raise TypeError(
            "sharded_step(finish=...) takes a function, finish(model_state) -> model_state, and this is of type"
            f" {type(finish).__name__}."
        )
    if not has_state:
        raise ValueError(
            "sharded_step(finish=f) has no effect without a model state, which f(model_state) takes and returns. Pass"
            " has_state=True, or drop finish=."
        )


def finished(finish: Finish | None, model_state: PyTree) -> PyTree:
    """Returns the model state after the end of a step, or the same without a function. The mesh must be bound.

    Args:
        finish: the function.
        model_state: a tree of this rank's blocks, after the last microbatch.

    Raises:
        TypeError: a leaf of the result is not a tensor.
        ValueError: the function returns another tree, or leaves of other shapes or dtypes, or writes to the argument.
            Every such leaf is listed by path.
    """
    if finish is None:
        return model_state
    if transforming():  # a derivative may pass through the end, and tensors of a transform count no writes
        new = finish(model_state)
        check_returned(model_state, new, "finish")
        return new
    named = named_leaves(model_state, "model_state")
    versions = [x._version for _, x in named]
    with torch.no_grad():
        new = finish(model_state)
    raise_all(
        ValueError,
        "finish writes to the model state that it is given. Return new tensors, x + 1 in place of x.add_(1):",
        [path for (path, x), was in zip(named, versions, strict=True) if x._version != was],
    )
    check_returned(model_state, new, "finish")
    return tree_map(Tensor.detach, new)
