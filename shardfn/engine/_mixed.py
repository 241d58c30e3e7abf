"""What `mixed_precision` makes: a loss in another precision, and what the step takes over."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardfn.core import Policy, PyTree, tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.modules import computing_in
from shardfn.optim import GradientTransformation, LossScale, master_weights

from ._levels import Transform
from ._loss import Loss, WeightedMean

# What torch says where the operands of a product, of attention or of a convolution have two dtypes.
_TWO_DTYPES = re.compile(r"same dtype|expected scalar type|type .* should be the same")
_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Mixed(Transform):
    """A loss computed in a policy's precision; `sharded_step` keeps, sends and updates in the policy's dtypes too.

    Attributes:
        inner: the loss.
        policy: the precision.
        loss_scale: what the loss is multiplied by while a step differentiates it; None = nothing.
    """

    transform: ClassVar[str] = "mixed_precision"

    inner: Loss
    policy: Policy
    loss_scale: LossScale | None = None
    _dtypes: dict[Any, list[torch.dtype]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        """The loss, in the policy's output dtype."""
        leaves, treedef = tree_flatten(params)
        dtypes = self._computed(params, leaves, treedef)
        # A leaf that a step gathers comes in the compute dtype already; to cast it would be to use it.
        cast = [x if x.dtype == d else x.to(d) for x, d in zip(leaves, dtypes, strict=True)]
        batch = tree_map(self._cast, args[:1])
        with computing_in(self.policy.compute), self._told_of_exceptions(params, dtypes):
            return self._output(self.inner(tree_unflatten(treedef, cast), *batch, *args[1:], **kwargs))

    @contextlib.contextmanager
    def _told_of_exceptions(self, params: PyTree, dtypes: Sequence[torch.dtype]) -> Iterator[None]:
        """Says of an operation that gets two dtypes which leaves are exceptions of the policy."""
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError or not _TWO_DTYPES.search(str(error)):
                raise
            rows = zip(tree_paths(params, "params"), dtypes, strict=True)
            own = [(path, d) for path, d in rows if d.is_floating_point and d != self.policy.compute]
            if not own:
                raise
            raise ValueError(_two_dtypes(self.policy, own, error)) from error

    def _computed(self, params: PyTree, leaves: list[Any], treedef: Any) -> list[torch.dtype]:
        key = treedef, *(x.dtype for x in leaves)
        if key not in self._dtypes:
            paths = tree_paths(params, "params")
            self.policy.check(paths)
            pairs = zip(paths, leaves, strict=True)
            self._dtypes[key] = [self.policy.dtypes(path, x.dtype).compute for path, x in pairs]
        return self._dtypes[key]

    def _cast(self, x: Any) -> Any:
        return x.to(self.policy.compute) if isinstance(x, Tensor) and x.is_floating_point() else x

    def _output(self, out: Any) -> Any:
        if isinstance(out, WeightedMean):
            return out._replace(total=out.total.to(self.policy.output))
        if isinstance(out, tuple):
            return (self._output(out[0]), *out[1:])
        return out.to(self.policy.output) if isinstance(out, Tensor) else out


def _two_dtypes(policy: Policy, own: Sequence[tuple[str, torch.dtype]], error: RuntimeError) -> str:
    lines = [f"  - {path} is computed in {dtype}" for path, dtype in own[:_SHOWN]]
    lines += [f"  - and {len(own) - _SHOWN} more"] if len(own) > _SHOWN else []
    return "\n".join(
        [
            f"an operation of the loss got two dtypes: {str(error).splitlines()[0]}. All is computed in"
            f" {policy.compute} but for exceptions of the Policy. Cast where they meet, as in x @ w.to(x.dtype), or"
            " (norm(x) * w).to(x.dtype). sf.nn.rms_norm and layer_norm do so, and sf.from_module does it at the borders"
            " of submodules of which all parameters are exceptions: name weight and bias alike. These are exceptions:",
            *lines,
        ]
    )


def with_masters(optimizer: GradientTransformation, policy: Policy) -> GradientTransformation:
    """The optimizer that keeps wide copies of the leaves that the policy keeps narrow."""
    if policy.master is None or not policy.keeps_master:
        return optimizer

    def kept(params: PyTree) -> PyTree:
        leaves, treedef = tree_flatten(params)
        pairs = zip(tree_paths(params, "params"), leaves, strict=True)
        return tree_unflatten(treedef, [policy.dtypes(path, x.dtype).param for path, x in pairs])

    return master_weights(optimizer, policy.master, kept=kept)


def check_scaled(mixed: Mixed) -> None:
    """Refuses to train in float16 without a loss scale.

    Raises:
        ValueError: it would.
    """
    policy = mixed.policy
    if mixed.loss_scale is None and torch.float16 in (policy.compute, policy.reduce, *policy.exceptions.values()):
        raise ValueError(
            "a step computes or sends gradients in float16, where small ones become 0, without a loss scale; pass"
            " mixed_precision(loss, policy, optim.dynamic_loss_scale()), or static_loss_scale(1.0) to go without."
        )
