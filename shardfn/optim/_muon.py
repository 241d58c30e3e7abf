"""Muon: momentum of matrices, made orthogonal.

Leaves that are cut: one rank, the owner, computes each matrix.

    blocks of matrices --all_to_all--> whole matrices --f--> whole matrices --all_to_all--> blocks

A rank sends each block once and receives each block once. Dims that count matrices may be cut over other axes. Ranks
along these axes have different matrices, and send each other nothing.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn import core
from shardfn.collectives import all_to_all, current_mesh

from . import _base as base
from ._adam import adamw, bias_corrections
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_finite, check_not_negative, check_num_steps, check_positive
from ._decide import Resolved, check_whole, resolve_per_leaf, resolve_prefix
from ._elementwise import map_leaves
from ._learning_rate import add_decayed_weights, check_rate, scale_by_learning_rate
from ._leaves import check_state, spec_leaves, wide, zero_count, zeros_like
from ._masks import multi_transform
from ._needs import find_ascending, resolve_masks
from ._pair import as_transformation, inplace


@dataclass(frozen=True)
class NewtonSchulz:
    """Maps the singular values of a matrix to about 1: `X = X / |X|; X = a X + (b X X^T + c (X X^T)^2) X`, repeated.

    After five iterations with the default coefficients, singular values of at least 0.01 of the norm are in [0.68,
    1.13].

    Attributes:
        steps: number of iterations, >= 1.
        coefficients: (a, b, c).
        eps: added to the norm, so that a zero matrix stays zero.
        dtype: dtype of the products. None: float32, or float64 for float64 matrices.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> NewtonSchulz()(torch.eye(2))
        tensor([[1.1081, 0.0000],
                [0.0000, 1.1081]])

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
        https://kellerjordan.github.io/posts/muon/
    """

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-8
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_num_steps("NewtonSchulz", steps=self.steps)
        check_not_negative("NewtonSchulz", eps=self.eps)
        if len(self.coefficients) != 3:
            raise ValueError(f"NewtonSchulz: coefficients={self.coefficients!r} must be three numbers.")
        for x in self.coefficients:
            check_finite("NewtonSchulz", coefficients=x)

    def __call__(self, x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Returns the matrix with mapped singular values, computed in `dtype`."""
        a, b, c = self.coefficients
        tall = x.shape[0] > x.shape[1]
        y = wide(x.mT if tall else x)
        # In the wide dtype: a gradient below the range of a narrow dtype would become zero.
        y = y / (torch.linalg.vector_norm(y) + self.eps)
        y = y if self.dtype is None else y.to(self.dtype)
        for _ in range(self.steps):
            gram = y @ y.mT
            y = a * y + (b * gram + c * (gram @ gram)) @ y
        return y.mT if tall else y


@dataclass(frozen=True)
class MatrixDims:
    """Dims of a leaf that form a matrix. All other dims count matrices.

    Attributes:
        outputs: dims that form the rows: the output features of the matrix.
        inputs: dims that form the columns: the input features of the matrix.

    Example:
        >>> linear, conv = MatrixDims(), MatrixDims(outputs=(0,), inputs=(1, 2, 3))
    """

    outputs: tuple[int, ...] = (-2,)
    inputs: tuple[int, ...] = (-1,)


# Names of leaves that are never hidden matrices: embeddings, heads, norms and biases, which may be stacked.
_NOT_HIDDEN = re.compile(
    r"embed|\b(wte|wpe|shared|position|head|lm_head|score|classifier|bias|b[qkvo]?|\w+_b|\w*norm\w*|ln_\w+)\b"
)


def hidden_matrices(params: base.Params) -> core.PyTree:
    """Returns the leaves that `muon` makes orthogonal by default: a tree like params of `MatrixDims`, or False.

    A leaf of at least two dims is included, unless the path has the name of an embedding, a head, a norm or a bias,
    such as "lm_head". A leaf [out, in, height, width] is a single matrix. A leaf of three dims is a stack of matrices
    [out, in].

    Args:
        params: tree of leaves. Only paths and shapes are used.

    Example:
        >>> import torch
        >>> hidden_matrices({"embed": torch.ones(9, 4), "w": torch.ones(4, 4), "lm_head": torch.ones(9, 4)})
        {'embed': False, 'w': MatrixDims(outputs=(-2,), inputs=(-1,)), 'lm_head': False}
    """
    leaves, treedef = core.tree_flatten(params)
    pairs = zip(core.tree_paths(params), leaves, strict=True)
    return core.tree_unflatten(
        treedef, [x.ndim > 1 and not _NOT_HIDDEN.search(path) and default_dims(x) for path, x in pairs]
    )


def default_dims(x: Tensor) -> MatrixDims:
    """Returns the dims of a leaf, chosen by shape."""
    return MatrixDims((0,), (1, 2, 3)) if x.ndim == 4 else MatrixDims()


def all_matrices(params: base.Params) -> core.PyTree:
    """Returns the dims of rows and columns for every leaf of a tree of matrices."""
    return core.tree_map(default_dims, params)


OnMatrix = Callable[[Tensor], Tensor]


class Matrices(NamedTuple):
    """Division of a leaf into matrices.

    Attributes:
        shape: shape of the whole leaf.
        rows: dims that form the rows of a matrix.
        columns: dims that form the columns. All other dims count matrices. For example, a leaf [8, 64, 32] with rows
            (1,) and columns (2,) has 8 matrices.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """Returns the dims of a single matrix."""
        return (*self.rows, *self.columns)

    @property
    def order(self) -> tuple[int, ...]:
        """Returns all dims, beginning with the dims that count matrices."""
        return (*(d for d in range(len(self.shape)) if d not in self.inner), *self.inner)

    @property
    def size(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns of a matrix."""
        return math.prod(self.shape[d] for d in self.rows), math.prod(self.shape[d] for d in self.columns)


def as_matrices(path: str, x: Any, dims: MatrixDims) -> Matrices:
    """Returns a leaf as matrices.

    Raises:
        ValueError: the dims do not form matrices.
    """
    n = len(x.shape)
    named = (*dims.outputs, *dims.inputs)
    rows, columns = (tuple(d % n for d in own) if n else () for own in (dims.outputs, dims.inputs))
    if not rows or not columns or len({*rows, *columns}) < len(named) or any(not -n <= d < n for d in named):
        raise ValueError(
            f"muon: {path} of shape {tuple(x.shape)} is not made of matrices by {dims}. Pass other dims for it in"
            " matrices=, or False to update it by `others`."
        )
    return Matrices(tuple(x.shape), rows, columns)


class ScaleByMuonState(NamedTuple):
    """Momentum.

    Attributes:
        count: int32, 0-d: steps taken.
        mu: tree like params: mean of the gradients.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    mu: core.PyTree


def scale_by_muon(
    beta: base.Number = 0.95,
    nesterov: bool = True,
    *,
    bias_correction: bool = True,
    consistent_rms: float | None = None,
    newton_schulz: NewtonSchulz = NewtonSchulz(),  # a value
    matrices: base.Mask = None,
) -> base.GradientTransformation:
    """Makes the momentum of each matrix orthogonal: `mu = beta mu + (1 - beta) g`, `u = scale * newton_schulz(m)`.

    With Nesterov `m = beta mu / (1 - beta^(t+1)) + (1 - beta) g / (1 - beta^t)`, else `m = mu / (1 - beta^t)`. Where a
    leaf is cut along rows or columns, each matrix is sent to a single rank, computed there, and sent back.

    Args:
        beta: rate of the mean, in [0, 1).
        nesterov: whether the mean looks one step ahead.
        bias_correction: whether the momentum is divided by `1 - beta^t`, as in optax. False gives the steps of
            `torch.optim.Muon`, with different first steps.
        consistent_rms: root mean square of updates, by the scale `consistent_rms * sqrt(max(rows, columns))`. For
            example, 0.2 is about the value of AdamW. None scales by `sqrt(max(1, rows / columns))`.
        newton_schulz: iterations.
        matrices: dims of matrices: a tree (or prefix) of `MatrixDims`, or a function from params to such a tree. None:
            the dims of `hidden_matrices`, for every leaf.

    Returns:
        The corresponding `GradientTransformation`, with a `ScaleByMuonState` as state, for trees with only matrices.

    Raises:
        ValueError: a number is out of range, or (on use) a leaf is not made of matrices.

    Example:
        >>> import torch
        >>> tx = scale_by_muon()
        >>> tx.update([torch.eye(2)], tx.init([torch.zeros(2, 2)]))[0]
        [tensor([[1.1081, 0.0000],
                [0.0000, 1.1081]])]

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
        https://kellerjordan.github.io/posts/muon/;
        Liu et al., Muon is Scalable for LLM Training, 2025, https://arxiv.org/abs/2502.16982
    """
    check_decay_rate("scale_by_muon", beta=beta)
    if consistent_rms is not None:
        check_positive("scale_by_muon", consistent_rms=consistent_rms)
    return _ScaleByMuon(beta, nesterov, bias_correction, consistent_rms, newton_schulz, matrices).rule()


@core.explains_keywords(**MEANT)
def muon(
    learning_rate: base.LearningRate,
    others: base.GradientTransformation | base.Pair | None = None,
    matrices: base.Mask = None,
    *,
    beta: base.Number = 0.95,
    nesterov: bool = True,
    bias_correction: bool = True,
    weight_decay: base.Number = 0.0,
    consistent_rms: float | None = None,
    newton_schulz: NewtonSchulz = NewtonSchulz(),  # a value
) -> base.GradientTransformation:
    """Muon for hidden matrices, and another rule for the rest: `p = p - lr * (scale_by_muon(g) + weight_decay * p)`.

    Args:
        learning_rate: learning rate of the matrices: a number >= 0, or a schedule.
        others: the rule for embeddings, heads, norms and biases. None: `adamw(learning_rate, weight_decay=0.0)`, as in
            optax. Such leaves often need a smaller rate, such as `adamw(3e-4)`, or `consistent_rms=0.2`.
        matrices: leaves that are matrices: a tree (or prefix) of bools and `MatrixDims`, or a function from params to
            such a tree. None: `hidden_matrices`. Needed if the name of a module's head does not say so, such as the
            last layer of a `Sequential`.
        beta: rate of the momentum, in [0, 1).
        nesterov: whether the mean looks one step ahead.
        bias_correction: see `scale_by_muon`.
        weight_decay: factor of the decay of matrices, >= 0. It is multiplied by the learning rate.
        consistent_rms: see `scale_by_muon`.
        newton_schulz: iterations.

    Returns:
        The corresponding `GradientTransformation`, with a `MultiTransformState` as state of "muon" and "others".

    Raises:
        ValueError: a number is out of range, or (on use) `matrices` does not match the params.

    Example:
        >>> import torch
        >>> tx, params = muon(0.1, adamw(0.01)), {"w": torch.eye(2), "bias": torch.ones(2)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'w': tensor([[-0.1108, -0.0000],
                [-0.0000, -0.1108]]), 'bias': tensor([-0.0101, -0.0101])}

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024,
        https://kellerjordan.github.io/posts/muon/
    """
    check_rate("muon", learning_rate)
    check_not_negative("muon", weight_decay=weight_decay)
    others = as_transformation(adamw(learning_rate, weight_decay=0.0) if others is None else others)
    how: dict[str, Any] = {"consistent_rms": consistent_rms, "newton_schulz": newton_schulz}
    how |= {"bias_correction": bias_correction}
    scale_by_muon(beta, nesterov, **how)

    def make_rule(dims: base.Mask) -> base.GradientTransformation:
        return chain(
            scale_by_muon(beta, nesterov, matrices=dims, **how),
            add_decayed_weights(weight_decay),
            scale_by_learning_rate(learning_rate),
        )

    return _Muon(make_rule, others, hidden_matrices if matrices is None else matrices).rule()


@dataclass(frozen=True, eq=False)
class _Muon:
    """Compared by identity, because `matrices` may be a tree.

    Attributes:
        of_matrices: function from dims to the rule of the matrices.
        others: the rule of the other leaves.
        matrices: leaves that are matrices.
    """

    of_matrices: Callable[[base.Mask], base.GradientTransformation]
    others: base.GradientTransformation
    matrices: base.Mask

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        rules = {"muon": self.of_matrices(None), "others": self.others}
        ascends = self.others.needs.ascends and (lambda params: find_ascending(self.on(params), params))
        needs = multi_transform(rules, "muon").needs._replace(
            resolve_masks=self.decide, bind_stats=None, ascends=ascends
        )
        return base.GradientTransformation(self.init, self.update, self.apply, needs)

    @functools.cached_property
    def resolve(self) -> Callable[..., tuple[Any, ...]]:
        """Returns a function from a tree to the dims of each leaf, or a bool."""
        return resolve_per_leaf(self.matrices, (bool, MatrixDims), "matrices")

    def on(self, tree: core.PyTree, specs: base.Specs = None) -> base.GradientTransformation:
        """Returns the rule for one tree."""
        leaves, treedef = core.tree_flatten(tree)
        found = self.resolve(tree, leaves, treedef, specs)
        dims = [default_dims(x) if found is True else found for x, found in zip(leaves, found, strict=True)]
        labels = core.tree_unflatten(treedef, ["others" if d is False else "muon" for d in dims])
        slots = iter(dims)
        whole = core.tree_map(lambda x: next(slots), tree)
        of = resolve_prefix(whole, tree, (bool, MatrixDims), "matrices")
        return multi_transform({"muon": self.of_matrices(of), "others": self.others}, labels)

    def decide(self, params: base.Params) -> base.GradientTransformation:
        return resolve_masks(self.on(params), params)

    def init(self, params: base.Params) -> base.OptState:
        return self.on(params).init(params)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        return self.on(updates, specs).update(updates, state, params, specs=specs)

    @torch.no_grad()
    def apply(
        self, grads: base.Updates, state: base.OptState, params: base.Params, *, specs: base.Specs = None
    ) -> tuple[base.Params, base.OptState]:
        return inplace(self.on(params, specs))(grads, state, params, specs=specs)


@dataclass(frozen=True, eq=False)
class _ScaleByMuon:
    """The rule. `leaves` has the `Matrices` of each leaf."""

    beta: base.Number
    nesterov: bool
    bias_correction: bool
    consistent_rms: float | None
    newton_schulz: NewtonSchulz
    dims: base.Mask
    leaves: Resolved | None = None

    def rule(self) -> base.GradientTransformation:
        """Returns the optimizer as a `GradientTransformation`."""
        needs = base.Needs("leaf", resolve_masks=self.decide if self.leaves is None else None, ascends=True)
        return base.GradientTransformation(self.init, self.update, needs=needs)

    def decide(self, params: base.Params) -> base.GradientTransformation:
        return replace(self, leaves=self._find_dims(params)).rule()

    def _find_dims(self, tree: core.PyTree) -> Resolved:
        dims = resolve_prefix(all_matrices if self.dims is None else self.dims, tree, MatrixDims, "matrices")
        slots = core.tree_flatten(tree, none_is_leaf=True)[0]
        paths = zip(dims.says, slots, strict=True)
        own = iter(dims.of(tree))
        return Resolved({path: None if x is None else as_matrices(path, x, next(own)) for path, x in paths})

    def init(self, params: base.Params) -> ScaleByMuonState:
        self._find_matrices(params)
        return ScaleByMuonState(zero_count(params), zeros_like(params))

    def _find_matrices(self, tree: core.PyTree, specs: base.Specs = None) -> Sequence[Matrices]:
        if self.leaves is None:
            check_whole("muon", tree, specs)
        return (self.leaves or self._find_dims(tree)).of(tree)

    def update(
        self, updates: base.Updates, state: base.OptState, params: base.Params = None, *, specs: base.Specs = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state("scale_by_muon", state, ScaleByMuonState)
        count = state.count + 1
        now, ahead = (bias_corrections(t, self.beta, self.beta)[0] for t in (count, count + 1))
        by = {"beta": self.beta, "c_g": now, "c_mu": ahead if self.nesterov else now}
        ms, mu = map_leaves(self._leaf_momentum, 2, updates, of={"mu": state.mu}, specs=specs, **by)
        ms, treedef = core.tree_flatten(ms)
        cuts = [core.P()] * len(ms) if specs is None else spec_leaves(specs, updates)
        leaves = self._find_matrices(updates, specs)
        us = on_whole_matrices(self.newton_schulz, ms, leaves, cuts)
        us = [
            (self._shape_scale(leaf) * u).to(m.dtype)
            for u, leaf, m in zip(us, leaves, core.tree_leaves(mu), strict=True)
        ]
        return core.tree_unflatten(treedef, us), ScaleByMuonState(count, mu)

    def _leaf_momentum(
        self, g: Tensor, mu: Tensor, beta: base.Number, c_g: Tensor, c_mu: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the momentum, in the dtype of the arithmetic, and the mean in the dtype of the state."""
        new, now = beta * wide(mu) + (1 - beta) * wide(g), wide(g)
        mean, now = (new / c_mu, now / c_g) if self.bias_correction else (new, now)
        m = beta * mean + (1 - beta) * now if self.nesterov else mean
        return m, new.to(mu.dtype)

    def _shape_scale(self, leaf: Matrices) -> float:
        rows, columns = leaf.size
        if self.consistent_rms is not None:
            return math.sqrt(max(rows, columns)) * self.consistent_rms
        return math.sqrt(max(1.0, rows / max(columns, 1)))


def on_whole_matrices(
    f: OnMatrix, blocks: Sequence[Tensor], leaves: Sequence[Matrices], specs: Sequence[core.P]
) -> list[Tensor]:
    """Applies `f` to each matrix of each leaf. Collective over the axes that cut rows or columns.

    Args:
        f: function from a matrix [rows, columns] to a matrix of the same shape.
        blocks: this rank's block of each leaf.
        leaves: division of each leaf into matrices.
        specs: spec of each leaf.

    Returns:
        This rank's block of each result, in the dtype of the leaf.
    """
    mesh = current_mesh()
    cuts = [_MatrixCut(leaf, spec, mesh.shape) for leaf, spec in zip(leaves, specs, strict=True)]
    lines: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = {}
    for i, (cut, x) in enumerate(zip(cuts, blocks, strict=True)):
        if math.prod(cut.leaf.shape):
            lines.setdefault((cut.axes, wide(x).dtype), []).append(i)
    out = list(blocks)
    for (axes, _), index in lines.items():
        units = [(cuts[i], wide(m)) for i in index for m in _split_matrices(blocks[i], cuts[i].leaf)]
        found = iter(_exchange_blocks(f, units, axes) if axes else [cut.apply(f, x) for cut, x in units])
        for i in index:
            out[i] = _join_leaf(found, blocks[i], cuts[i].leaf)
    return out


@dataclass(frozen=True)
class _MatrixCut:
    """Cut of each matrix of a leaf over a line of ranks.

    Attributes:
        leaf: the leaf.
        spec: spec of the whole leaf.
        sizes: sizes of the mesh axes.
    """

    leaf: Matrices
    spec: core.P
    sizes: Mapping[str, int]

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes that cut rows or columns, in the order of the mesh."""
        own = {a for d in self.leaf.inner for a in self.spec.dim_axes(d)}
        return tuple(a for a, n in self.sizes.items() if a in own and n > 1)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank in the group that shares a matrix."""
        out = {}
        for axis in reversed(self.axes):
            rank, out[axis] = divmod(rank, self.sizes[axis])
        return out

    def box(self, rank: int) -> tuple[slice, ...]:
        """Returns the block of a matrix that a rank of the group holds."""
        cuts = core.block_slices(self.leaf.shape, self.spec, self.sizes, self.coords(rank))
        return tuple(cuts[d] for d in self.leaf.inner)

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's block. The first rank's block is the largest."""
        return tuple(s.stop - s.start for s in self.box(rank))

    def join_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """Joins a matrix from the blocks, in the order of the group's ranks."""
        axes = [[a for a in self.spec.dim_axes(d) if self.sizes.get(a, 1) > 1] for d in self.leaf.inner]
        at = [self.coords(k) for k in range(len(blocks))]
        order = sorted(range(len(blocks)), key=lambda k: [[at[k][a] for a in own] for own in axes])
        parts = [blocks[k] for k in order]
        for d in reversed(range(len(axes))):
            num = math.prod(self.sizes[a] for a in axes[d])
            parts = [torch.cat(parts[k : k + num], d) for k in range(0, len(parts), num)]
        return parts[0]

    def apply(self, f: OnMatrix, whole: Tensor) -> Tensor:
        """Applies `f` to a whole matrix with the dims of the leaf."""
        return f(whole.reshape(self.leaf.size)).to(whole.dtype).reshape(whole.shape)


def _split_matrices(block: Tensor, leaf: Matrices) -> Sequence[Tensor]:
    """Returns the matrices of a leaf, or this rank's blocks of matrices, each with the dims of a single matrix."""
    x = block.permute(leaf.order)
    num = x.ndim - len(leaf.inner)
    return x.reshape(math.prod(x.shape[:num]), *x.shape[num:]).unbind(0)


def _join_leaf(found: Iterator[Tensor], like: Tensor, leaf: Matrices) -> Tensor:
    """Joins a leaf from the next matrices of `found`."""
    x = like.permute(leaf.order)
    num = math.prod(x.shape[: x.ndim - len(leaf.inner)])
    if not num:
        return like
    back = sorted(range(x.ndim), key=lambda d: leaf.order[d])
    return torch.stack([next(found) for _ in range(num)]).reshape(x.shape).permute(back).to(like.dtype)


def _exchange_blocks(f: OnMatrix, units: Sequence[tuple[_MatrixCut, Tensor]], axes: tuple[str, ...]) -> list[Tensor]:
    """Returns this rank's blocks of the results, from this rank's blocks of the matrices."""
    if not units:
        return []
    mesh = current_mesh()
    n, mine = mesh.axis_size(axes), mesh.axis_index(axes)
    rooms = [math.prod(cut.block_shape(0)) for cut, _ in units]
    owned = _assign_owners([math.prod(cut.leaf.size) * min(cut.leaf.size) for cut, _ in units], n)
    width = max(sum(rooms[k] for k in own) for own in owned)
    like = units[0][1].reshape(-1)
    sent = [_pack_row([units[k][1] for k in own], [rooms[k] for k in own], width, like) for own in owned]
    got = all_to_all(torch.stack(sent), axes, split_dim=0, concat_dim=0)
    here, at = list[tuple[_MatrixCut, Tensor]](), 0
    for k in owned[mine]:
        cut = units[k][0]
        blocks = [_unpack_block(got[j], at, cut.block_shape(j)) for j in range(n)]
        here.append((cut, cut.apply(f, cut.join_blocks(blocks))))
        at += rooms[k]
    mine_rooms = [rooms[k] for k in owned[mine]]
    # Every row depends on the first exchange, so that a rank without matrices takes part in the transpose, too.
    back = [_pack_row([x[cut.box(j)] for cut, x in here], mine_rooms, width, got[j]) for j in range(n)]
    done = all_to_all(torch.stack(back), axes, split_dim=0, concat_dim=0)
    out: dict[int, Tensor] = {}
    for row, own in zip(done, owned, strict=True):
        at = 0
        for k in own:
            out[k] = _unpack_block(row, at, tuple(units[k][1].shape))
            at += rooms[k]
    return [out[k] for k in range(len(units))]


def _assign_owners(costs: Sequence[int], num: int) -> list[list[int]]:
    """Returns the matrices of each owner, assigned from the largest on to the owner with the least cost."""
    owned, load = [list[int]() for _ in range(num)], [0] * num
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owner = load.index(min(load))
        owned[owner].append(k)
        load[owner] += costs[k]
    return owned


def _pack_row(blocks: Sequence[Tensor], rooms: Sequence[int], width: int, like: Tensor) -> Tensor:
    """Packs flat blocks, each padded to the block's room, into a row padded to a width."""
    parts = [like[:0]]
    for x, room in zip(blocks, rooms, strict=True):
        parts += [x.reshape(-1), like.new_zeros(room - x.numel())]
    return torch.cat([*parts, like.new_zeros(width - sum(rooms))])


def _unpack_block(row: Tensor, at: int, shape: tuple[int, ...]) -> Tensor:
    return row[at : at + math.prod(shape)].reshape(shape)
