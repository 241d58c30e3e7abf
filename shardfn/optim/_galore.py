"""GaLore: Adam's moments in a subspace of the gradient that is renewed from time to time."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from shardfn import core
from shardfn._torch import FakeTensor
from shardfn.collectives import transforming

from . import _base as base
from ._adam import bias_corrections, moments, scale_by_adam
from ._chain import chain
from ._checks import MEANT, check_decay_rate, check_not_negative, check_num_steps, check_positive
from ._learning_rate import add_decayed_weights, check_rate, scale_by_learning_rate
from ._leaves import check_state, wide, zero_count
from ._masks import multi_transform


class Subspace(NamedTuple):
    """Moments of a single matrix.

    Attributes:
        projector: [m, r] or [n, r] with orthonormal columns: basis of the subspace, for a gradient [m, n].
        mu: [r, n] or [m, r]: mean of the projected gradients.
        nu: like mu: mean of their squares.
    """

    projector: Tensor
    mu: Tensor
    nu: Tensor


class ScaleByGaloreState(NamedTuple):
    """State of `scale_by_galore`.

    Attributes:
        count: int32, 0-d: steps taken.
        subspaces: tree like params: a `Subspace` for each leaf.
    """

    count: Int[Tensor, ""]  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name
    subspaces: core.PyTree


def scale_by_galore(
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: float = 1.0,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
) -> base.GradientTransformation:
    """Computes Adam's direction in the subspace of the r largest singular vectors of the gradient.

    With a gradient G [m, n], m >= n, and the basis P [m, r] of its left singular vectors, renewed each
    `update_proj_gap` steps,

        R = P^T G;   u = scale P adam(R)

    and if m < n with the right singular vectors from the right. The moments have r n elements, not m n. They stay as
    they are when the basis changes.

    The rule needs whole matrices, so a step gathers gradients and parameters that ZeRO cuts. Each rank keeps the
    moments of all matrices. Steps between two renewals read the counter on the host. A captured step cannot, and
    decomposes the gradient in each step.

    Args:
        rank: number of singular vectors r. Smaller matrices keep all of theirs.
        update_proj_gap: steps between two renewals of the basis.
        scale: factor of the update, > 0. The paper has 0.25.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.

    Returns:
        The corresponding `GradientTransformation` for leaves with two dims, with a `ScaleByGaloreState` as state.

    Raises:
        ValueError: a number is out of range, or (on use) a leaf is not a matrix. The message lists all such leaves.

    Example:
        >>> tx = scale_by_galore(rank=1)
        >>> tx.update([torch.tensor([[3.0, 0.0], [0.0, 1.0]])], tx.init([torch.zeros(2, 2)]))[0]
        [tensor([[1., 0.],
                [0., 0.]])]

    References:
        Zhao et al., GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024,
        https://arxiv.org/abs/2403.03507
    """
    who = "scale_by_galore"
    check_num_steps(who, rank=rank, update_proj_gap=update_proj_gap)
    check_positive(who, scale=scale)
    check_decay_rate(who, b1=b1, b2=b2)
    check_not_negative(who, eps=eps)

    def init_fn(params: base.Params) -> ScaleByGaloreState:
        wrong = [
            p
            for p, x in zip(core.tree_paths(params, "params"), core.tree_flatten(params)[0], strict=True)
            if x.ndim != 2
        ]
        core.raise_all(
            ValueError, f"{who} steps matrices. Use another rule (optim.multi_transform), as galore does, for:", wrong
        )
        return ScaleByGaloreState(zero_count(params), core.tree_map(lambda p: _first_subspace(p, rank), params))

    def update_fn(
        updates: base.Updates, state: base.OptState, params: base.Params = None
    ) -> tuple[base.Updates, base.OptState]:
        del params
        check_state(who, state, ScaleByGaloreState)
        gs, treedef = core.tree_flatten(updates)
        count = state.count + 1
        c1, c2 = bias_corrections(count, b1, b2)
        renews = state.count % update_proj_gap == 0
        unknown = transforming() or isinstance(renews, FakeTensor) or renews.is_meta
        out = []
        for g, old in zip(gs, treedef.flatten_up_to(state.subspaces), strict=True):
            projector, kept = old.projector, old.mu.dtype
            g = wide(g.to(kept)).contiguous()  # LAPACK rounds by the layout
            if unknown:
                projector = torch.where(renews, _find_basis(g, projector), projector)
            elif bool(renews):
                projector = _find_basis(g, projector)
            mu, nu = moments(_project(g, projector), old.mu, old.nu, b1, b2)
            u = (mu / c1) / ((nu / c2).sqrt() + eps)
            new = Subspace(*(x.to(kept).contiguous() for x in (projector, mu, nu)))
            out.append(((scale * _lift(u, projector, g.shape)).to(kept), new))
        us, subspaces = (core.tree_unflatten(treedef, [row[k] for row in out]) for k in (0, 1))
        return us, ScaleByGaloreState(count, subspaces)

    return base.GradientTransformation(init_fn, update_fn, needs=base.Needs("leaf", ascends=True))


@core.explains_keywords(**MEANT)
def galore(
    learning_rate: base.LearningRate,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: float = 1.0,
    weight_decay: base.Number = 0.0,
    mask: base.Mask = None,
    *,
    b1: base.Number = 0.9,
    b2: base.Number = 0.999,
    eps: base.Number = 1e-8,
) -> base.GradientTransformation:
    """GaLore with Adam: `p = p - lr * (u + weight_decay * p)`, with u of `scale_by_galore` for matrices, else of Adam.

    The names and defaults are optax's.

    Args:
        learning_rate: a number >= 0, or a schedule.
        rank: number of singular vectors.
        update_proj_gap: steps between two renewals of the basis.
        scale: factor of the update of a matrix, > 0.
        weight_decay: factor of the decay, >= 0. It is multiplied by the learning rate.
        mask: leaves that decay: a tree (or prefix) of bools, or a function from params to such a tree. None: all.
        b1: rate of the mean, in [0, 1).
        b2: rate of the squares, in [0, 1).
        eps: constant outside the root, >= 0.

    Returns:
        The corresponding `GradientTransformation`.

    Raises:
        ValueError: a number is out of range, or (on use) the mask or the state does not match the params.

    Example:
        >>> tx, w = galore(0.5, rank=1), [torch.zeros(2, 2)]
        >>> tx.update([torch.tensor([[3.0, 0.0], [0.0, 1.0]])], tx.init(w), w)[0]
        [tensor([[-0.5000, -0.0000],
                [-0.0000, -0.0000]])]

    References:
        Zhao et al., GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024,
        https://arxiv.org/abs/2403.03507
    """
    check_rate("galore", learning_rate)
    rules = {"matrix": scale_by_galore(rank, update_proj_gap, scale, b1, b2, eps), "rest": scale_by_adam(b1, b2, eps)}
    direction = multi_transform(
        rules, lambda params: core.tree_map(lambda p: "matrix" if p.ndim == 2 else "rest", params)
    )
    return chain(direction, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def _first_subspace(p: Tensor, rank: int) -> Subspace:
    (m, n), r = p.shape, min(rank, *p.shape)
    mu = p.new_zeros((r, n) if m >= n else (m, r))
    return Subspace(p.new_zeros(max(m, n), r), mu, mu.clone())


def _find_basis(g: Tensor, like: Tensor) -> Tensor:
    """Returns the first singular vectors of the longer side, each with a positive largest element."""
    m, n = g.shape
    # A value that is not finite reaches the update by the product with the basis. LAPACK would raise an error.
    finite = wide(g).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    vectors = torch.linalg.svd(finite if m >= n else finite.T.contiguous(), full_matrices=False)[0][:, : like.shape[1]]
    # A singular vector has two signs. Ranks with the same gradient, and one device with nearly the same, choose one.
    at = vectors.abs().argmax(dim=0, keepdim=True) if vectors.numel() else None
    return (vectors if at is None else vectors * vectors.gather(0, at).sign()).to(like.dtype)


def _project(g: Tensor, projector: Tensor) -> Tensor:
    g, projector = wide(g), wide(projector)
    return projector.T @ g if g.shape[0] >= g.shape[1] else g @ projector


def _lift(u: Tensor, projector: Tensor, shape: Any) -> Tensor:
    return wide(projector).to(u.dtype) @ u if shape[0] >= shape[1] else u @ wide(projector).T.to(u.dtype)
