"""User-defined rules, any pair of functions `(init, update)` as in optax, and the application of rules in place.

A rule whose `update` takes no `specs` cannot distinguish a block from a leaf: for example, a norm would be the norm of
the block. So the rule gets whole leaves, unless `needs` states that every element is stepped separately:

    A[I_x] --all_gather--> A[I] --update--> U[I] --take_own_block--> U[I_x]

State leaves that belong to a parameter are kept as rows like the parameter, and gathered with the parameter. All other
leaves are kept whole by every rank. The results are equal to the results on a single device. The costs are a gather of
gradients, parameters and state in each step, and the memory of the whole leaves during the step.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import collectives, core
from shardfn._torch import FakeTensor, foreach_add_

from . import _base as base
from ._checks import describe_non_rule
from ._decide import Resolved
from ._leaves import check_shapes, leaves_like, spec_leaves, wide


def as_transformation(tx: Any) -> base.GradientTransformation:
    """Returns a `GradientTransformation` for a rule that may be only a pair `(init, update)`.

    Functions that take rules, such as `sharded_step`, `chain` and `masked`, call `as_transformation` first.

    Args:
        tx: a `GradientTransformation`, or any pair of functions `init(params) -> state` and `update(updates, state,
            params) -> (updates, state)`. An `update` without `specs` is given whole leaves, unless `needs.granularity`
            is "element": then blocks are given, because every element is treated equally. In a pair that is not a
            `GradientTransformation`, keywords (`**extra`) do not count as `specs`.

    Returns:
        The corresponding `GradientTransformation`, `tx` unchanged if `update` takes `specs`.

    Raises:
        TypeError: `tx` is neither.

    Example:
        >>> pair = lambda params: (), lambda updates, state, params: ([-u for u in updates], state)
        >>> as_transformation(pair).update([1.0], (), [0.0])
        ([-1.0], ())
    """
    if isinstance(tx, base.GradientTransformation):
        if _takes_specs(tx.update, keywords=True):
            return tx
    elif isinstance(tx, tuple) and len(tx) == 2 and all(map(callable, tx)):
        tx = base.GradientTransformation(*tx)
        if _takes_specs(tx.update, keywords=False):
            return tx
    else:
        raise TypeError(describe_non_rule(tx))
    # A block is as good as the leaf.
    if tx.needs.granularity == "element":
        return tx._replace(update=_ignore_specs(tx.update), apply=tx.apply and _ignore_specs(tx.apply))
    return _OnWholes(tx).rule()


def owners(state: core.PyTree, params: core.PyTree) -> list[int | None]:
    """Returns the number of the parameter to which each leaf of a state belongs, or None.

    A leaf belongs to a parameter of the same shape, with a path that is the end of the leaf's path. For example,
    `.mu['w']` belongs to `['w']`.
    """
    at = {
        path: (i, x.shape)
        for i, (path, x) in enumerate(zip(core.tree_entries(params), core.tree_leaves(params), strict=True))
    }
    out: list[int | None] = []
    for path, x in zip(core.tree_entries(state), core.tree_leaves(state), strict=True):
        i, shape = next((at[path[k:]] for k in range(len(path) + 1) if path[k:] in at), (None, None))
        out.append(i if x.shape == shape else None)
    return out


def _takes_specs(f: Callable[..., Any], *, keywords: bool) -> bool:
    try:
        parameters = inspect.signature(f).parameters
    except ValueError:  # a builtin
        return False
    return "specs" in parameters or (keywords and any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def _ignore_specs(f: Callable[..., Any]) -> Callable[..., Any]:
    def call_pair(
        updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> Any:
        del specs
        return f(updates, state, params)

    return call_pair


class _WholeLeaf(NamedTuple):
    """Whole leaf: shape and spec. No spec if only the step has the spec."""

    shape: torch.Size
    spec: core.P | None

    def join(self, block: Tensor, spec: core.P) -> Tensor:
        """Returns the whole leaf of a block. Collective."""
        return _carry_block(block, self.shape, spec, core.P())

    def first(self, block: Tensor) -> Tensor:
        """Returns the leaf for making a state. Collective if blocks have values."""
        if isinstance(block, FakeTensor) or block.device.type == "meta":
            return block.new_empty(self.shape)
        return self.join(block, self.spec or core.P())


def _cut_block(x: Tensor, spec: core.P) -> Tensor:
    """Returns this rank's block of a leaf."""
    return _carry_block(x, x.shape, core.P(), spec)


def _carry_block(x: Tensor, shape: torch.Size, src: core.P, dst: core.P) -> Tensor:
    return collectives.carry(x, _find_route(shape, src, dst, x.dtype, tuple(collectives.current_mesh().shape.items())))


@functools.lru_cache(maxsize=4096)
def _find_route(
    shape: torch.Size, src: core.P, dst: core.P, dtype: torch.dtype, sizes: tuple[tuple[str, int], ...]
) -> collectives.Route:
    # Without coordinates: a route is the same on all ranks, and the cache keeps no mesh alive.
    mesh = core.Mesh(dict(sizes), torch.device("cpu"), abstract=True)
    return collectives.route(shape, core.Placement(src, dtype=dtype), core.Placement(dst, dtype=dtype), mesh)


@dataclass(frozen=True)
class _OnWholes:
    """Rule that is given blocks, but applied to whole leaves.

    The shapes of whole leaves are given by `resolve_masks`, which a step calls first: `GlobalTensor`s also give specs,
    plain tensors do not. `update` gets the specs again. Whole leaves exist only during a call.

    Attributes:
        inner: the rule, whose `update` takes no `specs`.
        leaves: a `_WholeLeaf` for each leaf of the tree, or None before `resolve_masks`.
    """

    inner: base.GradientTransformation
    leaves: Resolved | None = field(default=None, repr=False)

    def rule(self) -> base.GradientTransformation:
        needs = self.inner.needs._replace(resolve_masks=self.decide if self.leaves is None else None, whole=True)
        return base.GradientTransformation(self.init, self.update, needs=needs)

    def decide(self, params: base.Params) -> base.GradientTransformation:
        ask = self.inner.needs.resolve_masks
        slots = core.tree_flatten(params, none_is_leaf=True)[0]
        wholes = [None if x is None else _WholeLeaf(x.shape, getattr(x, "spec", None)) for x in slots]
        leaves = Resolved({str(i): whole for i, whole in enumerate(wholes)})
        return _OnWholes(self.inner if ask is None else ask(params), leaves).rule()

    def init(self, params: base.Params) -> base.OptState:
        if self.leaves is None:
            return self.inner.init(params)
        blocks, treedef = core.tree_flatten(params)
        wholes: tuple[_WholeLeaf, ...] = self.leaves.of(params)
        if self.inner.needs.granularity == "tree" and len(blocks) < sum(
            x is not None for x in self.leaves.says.values()
        ):
            raise ValueError(
                "a state on host or disk is made leaf by leaf, but an optimizer whose update takes no `specs` may look"
                " at the whole tree: keep its state on the device, or declare that it treats every element alike:"
                ' GradientTransformation(init, update, needs=Needs(granularity="element")).'
            )
        _check_blocks(params, blocks, wholes)
        whole = core.tree_unflatten(treedef, [leaf.first(x) for leaf, x in zip(wholes, blocks, strict=True)])
        state = self.inner.init(whole)
        leaves, of = core.tree_flatten(state)
        _check_tensors(state, leaves)
        own = owners(state, whole)
        cuts = [None if i is None else wholes[i].spec or core.P() for i in own]
        kept = core.tree_unflatten(of, [_store_block(x, spec) for x, spec in zip(leaves, cuts, strict=True)])
        _check_owners(kept, own, owners(kept, params))
        return kept

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        mesh = collectives.current_mesh()
        cuts = [] if specs is None else spec_leaves(specs, updates)
        # Blocks are the leaves: no messages.
        if not any(mesh.axis_size(mesh.axes(spec.axes)) > 1 for spec in cuts):
            return self.inner.update(updates, state, params)
        if self.leaves is None:
            raise ValueError(
                "an update that takes no `specs` is given whole leaves, but how large these are is not known: decide"
                " the rule first, by optim.resolve_masks(tx, whole) on a tree of whole leaves."
            )
        wholes: tuple[_WholeLeaf, ...] = self.leaves.of(updates)
        (gs, treedef), (ss, of), own = core.tree_flatten(updates), core.tree_flatten(state), owners(state, updates)

        def join_leaves(leaves: list[Tensor]) -> core.PyTree:
            rows = zip(wholes, leaves, cuts, strict=True)
            return core.tree_unflatten(treedef, [leaf.join(x, spec) for leaf, x, spec in rows])

        # In the order of the tree: each call is a collective, and all ranks make the same calls.
        full = [x if i is None else wholes[i].join(x, cuts[i]) for x, i in zip(ss, own, strict=True)]
        ps = None if params is None else join_leaves(leaves_like(params, treedef, "params", "updates"))
        new, after = self.inner.update(join_leaves(gs), core.tree_unflatten(of, full), ps)
        us = [_cut_block(u, spec) for u, spec in zip(leaves_like(new, treedef, "updates", "params"), cuts, strict=True)]
        ss = leaves_like(after, of, "the new state", "the state")
        ss = [x if i is None else _cut_block(x, cuts[i]) for x, i in zip(ss, own, strict=True)]
        return core.tree_unflatten(treedef, us), core.tree_unflatten(of, ss)


def _store_block(x: Tensor, spec: core.P | None) -> Tensor | collectives.GlobalTensor:
    """Returns a leaf of a first state in the stored form: cut like the parameter, or whole on every rank."""
    if spec is not None or not x.ndim:
        return _cut_block(x, spec or core.P())
    return collectives.GlobalTensor(x.clone(), x.shape, core.P(), collectives.current_mesh())


def _check_blocks(params: base.Params, blocks: list[Tensor], wholes: Sequence[_WholeLeaf]) -> None:
    rows = zip(core.tree_paths(params, "params"), blocks, wholes, strict=True)
    wrong = [
        f"{path} has shape {tuple(x.shape)}, but the leaf has {tuple(leaf.shape)}"
        for path, x, leaf in rows
        if leaf.spec is None and x.shape != leaf.shape
    ]
    core.raise_all(
        ValueError,
        "a rule whose update takes no `specs` makes its state from whole leaves, and it is not known how these blocks"
        " are cut; decide it on `GlobalTensor`s, which have their specs, as a step does:",
        wrong,
    )


def _check_tensors(state: base.OptState, leaves: list[Any]) -> None:
    pairs = zip(core.tree_paths(state, "opt_state"), leaves, strict=True)
    wrong = [f"{path} is of type {type(x).__name__}" for path, x in pairs if not isinstance(x, Tensor)]
    core.raise_all(TypeError, "an optimizer's state is a tree of tensors; make a torch.tensor of:", wrong)


def _check_owners(state: base.OptState, own: list[int | None], seen: list[int | None]) -> None:
    """Checks that all ranks recognise the same leaves as cut. Cut leaves are recognised by shape."""
    rows = zip(core.tree_paths(state, "opt_state"), own, seen, strict=True)
    wrong = [path for path, i, j in rows if i != j]
    core.raise_all(
        ValueError,
        "leaves of the state are at the path of a parameter and have the shape of its rows, but not its own; keep"
        " them under other names:",
        wrong,
    )


def apply_updates(params: base.Params, updates: base.Updates) -> base.Params:
    """Returns the stepped parameters `p + u`, in the dtypes of `params`. Pure.

    Args:
        params: tree of tensors.
        updates: tree of the same structure and shapes.

    Returns:
        A tree like `params`.

    Raises:
        ValueError: the trees differ in structure or shapes.

    Example:
        >>> apply_updates([torch.ones(2)], [torch.tensor([1.0, -1.0])])
        [tensor([2., 0.])]
    """
    ps, treedef = core.tree_flatten(params)
    us = leaves_like(updates, treedef, "updates", "params")
    check_shapes(treedef, ps, updates=us)
    return core.tree_unflatten(treedef, [(wide(p) + u).to(p.dtype) for p, u in zip(ps, us, strict=True)])


def inplace(tx: base.GradientTransformation | base.Pair) -> Callable[..., tuple[base.Params, base.OptState]]:
    """Returns the in-place form of `tx`.

    The rule's `apply`, or else `update` and an addition into the parameters' buffers.

    Args:
        tx: any rule.

    Returns:
        `f(grads, state, params, *, specs=None) -> (params, state)`, which donates its arguments.

    Example:
        >>> from shardfn.optim import EmptyState, identity
        >>> w = torch.ones(2)
        >>> _ = inplace(identity())([torch.ones(2)], EmptyState(), [w])
        >>> w
        tensor([2., 2.])
    """
    tx = as_transformation(tx)
    if tx.apply is not None:
        return tx.apply

    @torch.no_grad()
    def apply_fn(
        grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        updates, state = tx.update(grads, state, params, specs=specs)
        ps, treedef = core.tree_flatten(params)
        us = leaves_like(updates, treedef, "updates", "params")
        check_shapes(treedef, ps, updates=us)
        if ps:
            foreach_add_(ps, us)
        return params, state

    return apply_fn
