"""The loss that `mixed_precision` returns: in another precision, with a policy for the step."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardfn.core import Policy, PyTree, tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.modules import computing_in
from shardfn.optim import GradientTransformation, LossScale, master_weights

from ._accumulated import of_whole_batch
from ._error_context import noting_exceptions
from ._loss import Loss, WeightedMean
from ._transform_order import Transform


@dataclasses.dataclass(frozen=True)
class Mixed(Transform):
    """Loss in a policy's precision. `sharded_step` keeps, sends and updates in the policy's dtypes, too.

    Attributes:
        inner: the loss.
        policy: the precision.
        loss_scale: the factor of the loss during differentiation in a step. None means 1.
        has_state: whether the loss takes a model state before the batch, without casts. A step carries a separate
            state.
    """

    transform: ClassVar[str] = "mixed_precision"

    inner: Loss
    policy: Policy
    loss_scale: LossScale | None = None
    has_state: bool = False
    _dtypes: dict[Any, list[torch.dtype]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss, in the policy's output dtype."""
        leaves, treedef = tree_flatten(params)
        dtypes = self._compute_leaves(params, leaves, treedef)
        # A leaf that a step gathers already comes in the compute dtype. A cast would be a use of the leaf.
        cast = [x if x.dtype == d else x.to(d) for x, d in zip(leaves, dtypes, strict=True)]
        state, args = args[: self.has_state], args[self.has_state :]
        batch = tree_map(self._cast_input, args[:1])
        noting = noting_exceptions(self.policy, lambda: zip(tree_paths(params, "params"), dtypes, strict=True))
        with computing_in(self.policy.compute), noting:
            return self._cast_output(self.inner(tree_unflatten(treedef, cast), *state, *batch, *args[1:], **kwargs))

    def _compute_leaves(self, params: PyTree, leaves: list[Any], treedef: Any) -> list[torch.dtype]:
        key = treedef, *(x.dtype for x in leaves)
        if key not in self._dtypes:
            paths = tree_paths(params, "params")
            self.policy.check(paths)
            pairs = zip(paths, leaves, strict=True)
            self._dtypes[key] = [self.policy.dtypes(path, x.dtype).compute for path, x in pairs]
        return self._dtypes[key]

    def _cast_input(self, x: Any) -> Any:
        return x.to(self.policy.compute) if isinstance(x, Tensor) and x.is_floating_point() else x

    def _cast_output(self, out: Any) -> Any:
        if isinstance(out, WeightedMean):
            return out._replace(total=out.total.to(self.policy.output))
        if isinstance(out, tuple):
            return (self._cast_output(out[0]), *out[1:])
        return out.to(self.policy.output) if isinstance(out, Tensor) else out


def policy_in(loss: Loss) -> Policy | None:
    """Returns the policy of a step's loss, perhaps accumulated, or None without one."""
    loss = of_whole_batch(loss)
    return loss.policy if isinstance(loss, Mixed) else None


def with_masters(optimizer: GradientTransformation, policy: Policy) -> GradientTransformation:
    """Returns the optimizer with wide copies of the leaves that the policy keeps narrow."""
    if policy.master is None or not policy.keeps_master:
        return optimizer

    def make_masters(params: PyTree) -> PyTree:
        leaves, treedef = tree_flatten(params)
        pairs = zip(tree_paths(params, "params"), leaves, strict=True)
        return tree_unflatten(treedef, [policy.dtypes(path, x.dtype).param for path, x in pairs])

    return master_weights(optimizer, policy.master, param_dtypes=make_masters)


def check_scaled(mixed: Mixed) -> None:
    """Refuses to train in float16 without a loss scale.

    Raises:
        ValueError: the loss is in float16 without a loss scale.
    """
    policy = mixed.policy
    if mixed.loss_scale is None and torch.float16 in (policy.compute, policy.reduce, *policy.exceptions.values()):
        raise ValueError(
            "a step computes or sends gradients in float16, where small ones become 0, without a loss scale. Pass"
            " mixed_precision(loss, policy, optim.dynamic_loss_scale()), or static_loss_scale(1.0) to go without."
        )
