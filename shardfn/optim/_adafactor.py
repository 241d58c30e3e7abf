"""Adafactor, built of rules that use the root mean square of a leaf.

`scale_by_factored_rms`: second moments of a matrix as a vector for the rows and a vector for the columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from shardfn import collectives, core

from . import _base as base
from ._averages import ema
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative, check_num_steps, check_positive
from ._decide import Resolved, check_whole
from ._elementwise import vary_number
from ._learning_rate import add_decayed_weights, scale_by_learning_rate
from ._leaves import check_params, check_state, leaves_like, spec_leaves, wide, zero_count
from ._norm import block_squares, over_blocks


@core.explains_keywords(**MEANT)
def adafactor(
    learning_rate: base.LearningRate | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    *,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: float | None = None,
    weight_decay_mask: base.Mask = None,
) -> base.GradientTransformation:
    """Adafactor: Adam without a mean of gradients. Second moments of a matrix are two vectors.

    Names and defaults are optax's: `u = scale_by_factored_rms(g)`, then `u / max(1, rms(u) / clipping_threshold)`,
    times the learning rate, times `max(rms(p), 0.001)`, averaged by `momentum`, plus `weight_decay_rate * p` (not
    multiplied by the learning rate). Then `p = p - u`. Root mean squares are of whole leaves.

    Args:
        learning_rate: a number >= 0, or a schedule. None: 1.
        min_dim_size_to_factor: see `scale_by_factored_rms`. For the other options, write a `chain`.
        decay_rate: see `scale_by_factored_rms`.
        multiply_by_parameter_scale: whether steps are relative to the root mean square of the leaf.
        clipping_threshold: > 0. None: no clipping.
        momentum: momentum in [0, 1). None keeps no average.
        weight_decay_rate: >= 0. None: no decay.
        weight_decay_mask: leaves that decay, as for `add_decayed_weights`.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx, w = adafactor(0.1), [torch.ones(2)]
        >>> tx.update([torch.ones(2)], tx.init(w), w)[0]
        [tensor([-0.1000, -0.1000])]

    References:
        Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
        https://arxiv.org/abs/1804.04235
    """
    rules = [scale_by_factored_rms(True, decay_rate, 0, min_dim_size_to_factor)]
    if clipping_threshold is not None:
        check_positive("adafactor", clipping_threshold=clipping_threshold)
        rules.append(_scale_by_rms(lambda rms: 1 / (rms / clipping_threshold).clamp(min=1.0)))
    rules.append(_negate_updates() if learning_rate is None else scale_by_learning_rate(learning_rate))
    if multiply_by_parameter_scale:
        rules.append(_scale_by_rms(lambda rms: rms.clamp(min=1e-3), of_params=True))
    if momentum is not None:
        rules.append(ema(momentum, debias=False))
    if weight_decay_rate is not None:
        rules += [_negate_updates(), add_decayed_weights(weight_decay_rate, weight_decay_mask), _negate_updates()]
    return chain(*rules)


def _negate_updates() -> base.GradientTransformation:
    rule = base.stateless(lambda updates, params, specs: core.tree_map(torch.neg, updates))
    return rule._replace(needs=base.Needs("element"))


def _scale_by_rms(factor: Callable[[Tensor], Tensor], of_params: bool = False) -> base.GradientTransformation:
    """Multiplies each leaf by a function of the root mean square of the update, or of the parameter."""

    def update_fn(updates: base.Updates, params: base.Params, specs: base.Specs) -> base.Updates:
        us, treedef = core.tree_flatten(updates)
        if not us:
            return updates
        if of_params:
            check_params("adafactor", params)
        xs = leaves_like(params, treedef, "params", "updates") if of_params else us
        # The sum of squares and the number of elements, of all blocks.
        local = torch.stack([torch.stack([(s := block_squares(x)), s.new_tensor(x.numel())]) for x in xs])
        total = local if specs is None else over_blocks(local, spec_leaves(specs, updates))
        by = factor((total[:, 0] / total[:, 1].clamp(min=1)).sqrt()).unbind()
        return core.tree_unflatten(treedef, [(u * c.to(u.device)).to(u.dtype) for u, c in zip(us, by, strict=True)])

    return base.stateless(update_fn)._replace(needs=base.Needs("leaf", ascends=True))


class FactoredState(NamedTuple):
    """The second moments. Leaves are `None` in trees that do not apply.

    Attributes:
        count: int32, 0-d: steps taken.
        v_row: tree like params: the mean of squares over the largest dim. Whole on every rank.
        v_col: tree like params: the mean of squares over the second largest dim. Whole on every rank.
        v: tree like params: of leaves that are not factored, the mean of squares of each element.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    v_row: core.PyTree
    v_col: core.PyTree
    v: core.PyTree


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
) -> base.GradientTransformation:
    """Divides by the root of a second moment, stored as two vectors: `u = g / sqrt(v_row v_col / mean(v_row))`.

    Over the two largest dims of a leaf, `v_row` and `v_col` are the means of `g^2 + epsilon`, each averaged over steps:
    `v = d v + (1 - d) mean`, with `d = 1 - (t - step_offset)^-decay_rate`. For leaves with the same spec, the sums over
    blocks are one psum.

    Args:
        factored: whether to factor at all.
        decay_rate: decay rate in [0, 1).
        step_offset: the step at which a fine-tuning begins.
        min_dim_size_to_factor: smallest size of the two largest dims at which a leaf is factored, >= 1.
        epsilon: added to squares, >= 0.

    Returns:
        The corresponding `GradientTransformation`, with a `FactoredState` as state.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> tx = scale_by_factored_rms(min_dim_size_to_factor=2)
        >>> params = [torch.full((2, 2), 3.0)]
        >>> tx.update(params, tx.init(params), params)[0]
        [tensor([[1., 1.],
                [1., 1.]])]

    References:
        Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
        https://arxiv.org/abs/1804.04235
    """
    check_decay_rate("scale_by_factored_rms", decay_rate=decay_rate)
    check_not_negative("scale_by_factored_rms", epsilon=epsilon, step_offset=step_offset)
    check_num_steps("scale_by_factored_rms", min_dim_size_to_factor=min_dim_size_to_factor)
    return _Factored(factored, decay_rate, step_offset, min_dim_size_to_factor, epsilon).rule()


@dataclass(frozen=True)
class _Factored:
    """The rule. `shapes` has the shapes of the whole leaves."""

    factored: bool
    decay: float
    offset: int
    least: int
    epsilon: float
    shapes: Resolved | None = None

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        # The granularity is "tree", because vectors cannot be cut with rows of the leaf.
        needs = base.Needs(resolve_masks=self.decide if self.shapes is None else None, ascends=True)
        return base.GradientTransformation(self.init, self.update, needs=needs)

    def decide(self, params: base.Params) -> base.GradientTransformation:
        slots = core.tree_flatten(params, none_is_leaf=True)[0]
        shapes = {str(i): None if x is None else tuple(x.shape) for i, x in enumerate(slots)}
        return replace(self, shapes=Resolved(shapes)).rule()

    def leaves(self, tree: core.PyTree, specs: base.Specs = None) -> list["_FactoredLeaf"]:
        """Returns the factoring and the spec of each leaf."""
        blocks = core.tree_flatten(tree)[0]
        if self.shapes is None:
            check_whole("adafactor", tree, specs)
        shapes = [tuple(x.shape) for x in blocks] if self.shapes is None else self.shapes.of(tree)
        cuts = [core.P()] * len(blocks) if specs is None else spec_leaves(specs, tree)
        return [_FactoredLeaf(shape, spec, self.dims(shape)) for shape, spec in zip(shapes, cuts, strict=True)]

    def dims(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the second largest dim and the largest. None: the leaf is not factored."""
        order = sorted(range(len(shape)), key=lambda d: shape[d])
        if not self.factored or len(shape) < 2 or shape[order[-2]] < self.least:
            return None
        return order[-2], order[-1]

    def init(self, params: base.Params) -> FactoredState:
        ps, treedef = core.tree_flatten(params)
        rows, columns, own = list[Any](), list[Any](), list[Any]()
        for p, leaf in zip(ps, self.leaves(params), strict=True):
            pair = leaf.vectors
            row, column = (None, None) if pair is None else (self._zero_vector(p, shape) for shape in pair)
            rows.append(row)
            columns.append(column)
            own.append(torch.zeros_like(p, dtype=wide(p).dtype) if pair is None else None)
        v_row, v_col, v = (core.tree_unflatten(treedef, column) for column in (rows, columns, own))
        return FactoredState(zero_count(params), v_row, v_col, v)

    def _zero_vector(self, p: Tensor, shape: tuple[int, ...]) -> Tensor | collectives.GlobalTensor:
        zeros = p.new_zeros(shape, dtype=wide(p).dtype)
        return (
            zeros
            if self.shapes is None
            else collectives.GlobalTensor(zeros, zeros.shape, core.P(), collectives.current_mesh())
        )

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("scale_by_factored_rms", state, FactoredState)
        gs, treedef = core.tree_flatten(updates)
        leaves = self.leaves(updates, specs)
        squares = [wide(g).square() + self.epsilon for g in gs]
        sums = iter(_factor_sums([(x, leaf) for x, leaf in zip(squares, leaves, strict=True) if leaf.dims is not None]))
        d = 1 - (state.count + 1 - self.offset).double() ** -self.decay
        columns = [treedef.flatten_up_to(x) for x in (state.v_row, state.v_col, state.v)]
        out, new = list[Tensor](), list[tuple[Any, Any, Any]]()
        for g, x, leaf, row, column, v in zip(gs, squares, leaves, *columns, strict=True):
            if leaf.dims is None:
                (by,) = vary_number([g], d, g, leaf.spec)
                v = (by * v + (1 - by) * x).to(v.dtype)
                out.append(wide(g) / v.sqrt())
            else:
                s_row, s_column = next(sums)
                by = d.to(row.device)
                row = (by * row + (1 - by) * s_row / leaf.shape[leaf.dims[1]]).to(row.dtype)
                column = (by * column + (1 - by) * s_column / leaf.shape[leaf.dims[0]]).to(column.dtype)
                out.append(wide(g) * leaf.factor(row, column))
            new.append((row, column, v))
        trees = (core.tree_unflatten(treedef, [x[k] for x in new]) for k in range(3))
        return core.tree_unflatten(treedef, out), FactoredState(state.count + 1, *trees)


class _FactoredLeaf(NamedTuple):
    """Leaf with the dims of its factored second moments.

    Attributes:
        shape: shape of the whole.
        spec: spec of the block.
        dims: the second largest dim and the largest. None: the leaf is not factored.
    """

    shape: tuple[int, ...]
    spec: core.P
    dims: tuple[int, int] | None

    @property
    def vectors(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns the shapes of the means over the largest dim and over the second largest dim."""
        if self.dims is None:
            return None
        row, column = ((*self.shape[:d], *self.shape[d + 1 :]) for d in (self.dims[1], self.dims[0]))
        return row, column

    def box(self, without: int) -> tuple[slice, ...]:
        """Returns this rank's block of a mean over one dim."""
        mesh = collectives.current_mesh()
        box = core.block_slices(self.shape, self.spec, mesh.shape, mesh.coords)
        return (*box[:without], *box[without + 1 :])

    def placed(self, x: Tensor, without: int) -> Tensor:
        """Returns the sum of this rank's block over one dim, in zeros of the shape of the whole sum."""
        room = [n for d, n in enumerate(self.shape) if d != without]
        pads = [(s.start, n - s.stop) for s, n in zip(self.box(without), room, strict=True)]
        return F.pad(x.sum(without), [n for pair in reversed(pads) for n in pair])

    def factor(self, row: Tensor, column: Tensor) -> Tensor:
        """Returns the factor of this rank's block of the gradient."""
        assert self.dims is not None
        other, largest = self.dims
        mean = row.mean(other - 1 if other > largest else other, keepdim=True)
        by_row = (row / mean)[self.box(largest)].rsqrt().unsqueeze(largest)
        return by_row * column[self.box(other)].rsqrt().unsqueeze(other)


def _factor_sums(rows: Sequence[tuple[Tensor, _FactoredLeaf]]) -> list[tuple[Tensor, Tensor]]:
    """Returns the sums of whole leaves over the largest dim, and over the second largest dim.

    Leaves with the same spec share a psum.
    """
    mesh = collectives.current_mesh()
    groups: dict[Any, list[int]] = {}
    out: dict[int, Any] = {}
    for i, (x, leaf) in enumerate(rows):
        assert leaf.dims is not None
        axes = mesh.axes(leaf.spec.axes)
        out[i] = [leaf.placed(x, d) for d in reversed(leaf.dims)] if axes else [x.sum(d) for d in reversed(leaf.dims)]
        groups.setdefault((tuple(a for a in mesh.axis_names if a in axes), x.dtype), []).append(i)
    for (axes, _), index in groups.items():
        if not axes:
            continue
        parts = [x for i in index for x in out[i]]
        whole = collectives.psum(torch.cat([x.flatten() for x in parts]), axes).split([x.numel() for x in parts])
        found = iter(y.view(x.shape) for x, y in zip(parts, whole, strict=True))
        for i in index:
            out[i] = [next(found), next(found)]
    return [(out[i][0], out[i][1]) for i in range(len(rows))]
