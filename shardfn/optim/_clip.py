"""Clipping: bounds on the gradient before an optimizer."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.core import explains_keywords, tree_flatten, tree_map, tree_unflatten

from ._base import EmptyState, GradientTransformation, Measure, Needs, Phase, stateless
from ._checks import positive
from ._hyper import beside
from ._kernels import foreach_mul_
from ._leaves import disjoint
from ._no_rule import MEANT
from ._norm import block_squares, global_norm
from ._types import OptState, Params, Specs, Updates


@explains_keywords(**MEANT)
def clip(max_delta: float | int) -> GradientTransformation:
    """Clips every element: `u = min(max(g, -max_delta), max_delta)`. NaN stays NaN.

    Args:
        max_delta: the bound, > 0.

    Raises:
        ValueError: the bound is not a finite number > 0.

    Example:
        >>> clip(1.0).update([torch.tensor([-3.0, 0.5])], ())[0]
        [tensor([-1.0000,  0.5000])]
    """
    positive("clip", max_delta=max_delta)

    def update_fn(updates: Updates, params: Params, specs: Specs) -> Updates:
        del params, specs
        return tree_map(lambda g: g.clamp(-max_delta, max_delta), updates)

    return stateless(update_fn)._replace(needs=Needs("element", ascends=True))


@explains_keywords(**MEANT)
def clip_by_global_norm(max_norm: float | int) -> GradientTransformation:
    """Scales the whole tree to a norm of at most `max_norm`: `u = g * max_norm / max(|g|, max_norm)`.

    The form is optax's: no 1e-6 in the denominator as in torch, so a tree within the bound is returned bit for bit. The
    norm is global (see `global_norm`): one psum. If the norm is not finite, every update is NaN, so that a failed step
    does not look like a small step.

    Args:
        max_norm: the bound, > 0.

    Raises:
        ValueError: the bound is not a finite number > 0.

    Example:
        >>> clip_by_global_norm(1.0).update([torch.tensor([3.0, 4.0])], ())[0]
        [tensor([0.6000, 0.8000])]

    References:
        Pascanu et al., On the difficulty of training Recurrent Neural Networks, 2012, https://arxiv.org/abs/1211.5063
    """
    positive("clip_by_global_norm", max_norm=max_norm)

    return _scale_to_norm(max_norm, global_norm)


def _scale_to_norm(max_norm: float | int, norm_of: Callable[[Updates, Specs], Tensor]) -> GradientTransformation:
    def norm_scale(updates: Updates, specs: Specs) -> Float[Tensor, ""]:
        norm = norm_of(updates, specs)
        return torch.where(norm.isfinite(), max_norm / norm.clamp(min=max_norm), torch.nan)

    def init_fn(params: Params) -> EmptyState:
        del params
        return EmptyState()

    def update_fn(
        updates: Updates, state: OptState, params: Params = None, *, specs: Specs = None, donate: bool = False
    ) -> tuple[Updates, OptState]:
        del params
        gs, treedef = tree_flatten(updates)
        if donate and gs and disjoint(gs):
            with torch.no_grad():
                foreach_mul_(gs, norm_scale(updates, specs))
            return updates, state
        scales = beside(gs, norm_scale(updates, specs), updates, specs) if gs else ()
        return tree_unflatten(treedef, [(g * s).to(g.dtype) for g, s in zip(gs, scales, strict=True)]), state

    def specialize_clip(params: Params, stats: Tensor | None, phase: Phase | None) -> GradientTransformation:
        del params, phase
        return _scale_to_norm(max_norm, norm_of if stats is None else lambda updates, specs: stats.sum().sqrt())

    measure = Measure(block_squares, additive=True)
    needs = Needs("element", measure, specialize=specialize_clip, donates=True, ascends=True)
    return GradientTransformation(init_fn, update_fn, needs=needs)
