"""Muon: momentum of matrices, made orthogonal."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shardfn.core import (
    P,
    PyTree,
    explains_keywords,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_paths,
    tree_unflatten,
)

from ._adam import adamw, bias_corrections
from ._base import GradientTransformation, Needs
from ._chain import chain
from ._checks import check_decay_rate, check_finite, check_not_negative, check_num_steps, check_positive
from ._decay import add_decayed_weights
from ._decide import Resolved, check_whole, resolve_per_leaf, resolve_prefix
from ._hyper import map_leaves
from ._inplace import inplace
from ._learning_rate import check_rate, scale_by_learning_rate
from ._leaves import check_state, spec_leaves, wide, zero_count, zeros_like
from ._mask import multi_transform
from ._needs import find_ascending, resolve_masks
from ._pair import as_transformation
from ._types import LearningRate, Mask, Number, OptState, Pair, Params, Specs, Updates
from ._unsupported import MEANT
from ._whole_matrices import Matrices, on_whole_matrices


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
        # In the wide dtype: a gradient below the range of a narrow one would become zero.
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


def hidden_matrices(params: Params) -> PyTree:
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
    leaves, treedef = tree_flatten(params)
    pairs = zip(tree_paths(params), leaves, strict=True)
    return tree_unflatten(
        treedef, [x.ndim > 1 and not _NOT_HIDDEN.search(path) and default_dims(x) for path, x in pairs]
    )


def default_dims(x: Tensor) -> MatrixDims:
    """Returns the dims of a leaf, chosen by shape."""
    return MatrixDims((0,), (1, 2, 3)) if x.ndim == 4 else MatrixDims()


def all_matrices(params: Params) -> PyTree:
    """Returns the dims of every leaf, where all are matrices."""
    return tree_map(default_dims, params)


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
            f"muon: {path} of shape {tuple(x.shape)} is not made of matrices by {dims}. Give its dims by"
            " matrices=, or False to leave it to the other rule."
        )
    return Matrices(tuple(x.shape), rows, columns)


class ScaleByMuonState(NamedTuple):
    """Momentum.

    Attributes:
        count: int32, 0-d: steps taken.
        mu: tree like params: mean of the gradients.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    mu: PyTree


def scale_by_muon(
    beta: Number = 0.95,
    nesterov: bool = True,
    *,
    bias_correction: bool = True,
    consistent_rms: float | None = None,
    newton_schulz: NewtonSchulz = NewtonSchulz(),  # a value
    matrices: Mask = None,
) -> GradientTransformation:
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
        A rule with a `ScaleByMuonState`, for trees with only matrices.

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


@explains_keywords(**MEANT)
def muon(
    learning_rate: LearningRate,
    others: GradientTransformation | Pair | None = None,
    matrices: Mask = None,
    *,
    beta: Number = 0.95,
    nesterov: bool = True,
    bias_correction: bool = True,
    weight_decay: Number = 0.0,
    consistent_rms: float | None = None,
    newton_schulz: NewtonSchulz = NewtonSchulz(),  # a value
) -> GradientTransformation:
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
        A rule with a `MultiTransformState` of "muon" and "others".

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

    def make_rule(dims: Mask) -> GradientTransformation:
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

    of_matrices: Callable[[Mask], GradientTransformation]
    others: GradientTransformation
    matrices: Mask

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        rules = {"muon": self.of_matrices(None), "others": self.others}
        ascends = self.others.needs.ascends and (lambda params: find_ascending(self.on(params), params))
        needs = multi_transform(rules, "muon").needs._replace(
            resolve_masks=self.decide, bind_stats=None, ascends=ascends
        )
        return GradientTransformation(self.init, self.update, self.apply, needs)

    @functools.cached_property
    def resolve(self) -> Callable[..., tuple[Any, ...]]:
        """Returns a function from a tree to the dims of each leaf, or a bool."""
        return resolve_per_leaf(self.matrices, (bool, MatrixDims), "matrices")

    def on(self, tree: PyTree, specs: Specs = None) -> GradientTransformation:
        """Returns the rule for one tree."""
        leaves, treedef = tree_flatten(tree)
        found = self.resolve(tree, leaves, treedef, specs)
        dims = [default_dims(x) if found is True else found for x, found in zip(leaves, found, strict=True)]
        labels = tree_unflatten(treedef, ["others" if d is False else "muon" for d in dims])
        slots = iter(dims)
        whole = tree_map(lambda x: next(slots), tree)
        of = resolve_prefix(whole, tree, (bool, MatrixDims), "matrices")
        return multi_transform({"muon": self.of_matrices(of), "others": self.others}, labels)

    def decide(self, params: Params) -> GradientTransformation:
        return resolve_masks(self.on(params), params)

    def init(self, params: Params) -> OptState:
        return self.on(params).init(params)

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        return self.on(updates, specs).update(updates, state, params, specs=specs)

    @torch.no_grad()
    def apply(self, grads: Updates, state: OptState, params: Params, *, specs: Specs = None) -> tuple[Params, OptState]:
        return inplace(self.on(params, specs))(grads, state, params, specs=specs)


@dataclass(frozen=True, eq=False)
class _ScaleByMuon:
    """The rule. `leaves` has the `Matrices` of each leaf."""

    beta: Number
    nesterov: bool
    bias_correction: bool
    consistent_rms: float | None
    newton_schulz: NewtonSchulz
    dims: Mask
    leaves: Resolved | None = None

    def rule(self) -> GradientTransformation:
        """Returns the rule as a `GradientTransformation`."""
        needs = Needs("leaf", resolve_masks=self.decide if self.leaves is None else None, ascends=True)
        return GradientTransformation(self.init, self.update, needs=needs)

    def decide(self, params: Params) -> GradientTransformation:
        return replace(self, leaves=self._find_dims(params)).rule()

    def _find_dims(self, tree: PyTree) -> Resolved:
        dims = resolve_prefix(all_matrices if self.dims is None else self.dims, tree, MatrixDims, "matrices")
        slots = tree_flatten(tree, none_is_leaf=True)[0]
        paths = zip(dims.says, slots, strict=True)
        own = iter(dims.of(tree))
        return Resolved({path: None if x is None else as_matrices(path, x, next(own)) for path, x in paths})

    def init(self, params: Params) -> ScaleByMuonState:
        self._find_matrices(params)
        return ScaleByMuonState(zero_count(params), zeros_like(params))

    def _find_matrices(self, tree: PyTree, specs: Specs = None) -> Sequence[Matrices]:
        if self.leaves is None:
            check_whole("muon", tree, specs)
        return (self.leaves or self._find_dims(tree)).of(tree)

    def update(
        self, updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None
    ) -> tuple[Updates, OptState]:
        del params
        check_state("scale_by_muon", state, ScaleByMuonState)
        count = state.count + 1
        now, ahead = (bias_corrections(t, self.beta, self.beta)[0] for t in (count, count + 1))
        by = {"beta": self.beta, "c_g": now, "c_mu": ahead if self.nesterov else now}
        ms, mu = map_leaves(self._leaf_momentum, 2, updates, of={"mu": state.mu}, specs=specs, **by)
        ms, treedef = tree_flatten(ms)
        cuts = [P()] * len(ms) if specs is None else spec_leaves(specs, updates)
        leaves = self._find_matrices(updates, specs)
        us = on_whole_matrices(self.newton_schulz, ms, leaves, cuts)
        us = [(self._shape_scale(leaf) * u).to(m.dtype) for u, leaf, m in zip(us, leaves, tree_leaves(mu), strict=True)]
        return tree_unflatten(treedef, us), ScaleByMuonState(count, mu)

    def _leaf_momentum(self, g: Tensor, mu: Tensor, beta: Number, c_g: Tensor, c_mu: Tensor) -> tuple[Tensor, Tensor]:
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
