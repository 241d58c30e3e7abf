"""Takes a step's loss out of the transforms that the step itself carries out, and describes a step in lines.

The lines are the constant facts that determine the messages of ranks. Ranks compare the hash of the lines in the
exchange at the beginning of a call. So different steps never meet in a transfer, and the error shows the different
lines.

`Mixed` is the loss that `mixed_precision` returns: in another precision, with a policy for the step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shardfn import nn
from shardfn.core import Policy, PyTree, describe, tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.modules import computing_in
from shardfn.optim import GradientTransformation, LossScale, master_weights

from ._accumulated import Accumulated, of_whole_batch
from ._callable import function_name
from ._error_context import noting_exceptions
from ._jitted import Jitted
from ._loss import Loss, WeightedMean
from ._model_state import past_the_batch
from ._transform_order import Transform, find_transforms


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
        with computing_in(self.policy.compute), nn.rounding_products(self.policy.products), noting:
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


@dataclasses.dataclass(frozen=True)
class CountedLoss:
    """Loss that gets its last argument, the number of the step, by the name `step`.

    Transforms pass all arguments behind the batch on by position.

    Attributes:
        inner: loss with an argument `step`.
    """

    inner: Loss

    def __call__(self, *args: Any) -> Any:
        """Returns the loss."""
        return self.inner(*args[:-1], step=args[-1])

    @property
    def __name__(self) -> str:  # in errors
        return function_name(self.inner)


def pass_count(loss: Loss) -> Loss:
    """Returns a loss that takes the number of the step as its last argument, inside the transforms around it."""
    if isinstance(loss, Transform) and hasattr(loss, "inner"):
        return dataclasses.replace(loss, inner=pass_count(loss.inner))  # pyright: ignore
    return CountedLoss(loss)  # pyright: ignore[reportArgumentType]  # a transform is callable


class Unwrapped(NamedTuple):
    """Loss with its transforms in the order in which a step runs them.

    Attributes:
        loss: `accumulate` of `mixed_precision` of the plain loss, as far as the loss has these transforms.
        jitted: the `jit` of the whole step, or None.
        mixed: the `mixed_precision`, with the dtypes of leaves and messages, or None.
    """

    loss: Loss
    jitted: Jitted | None = None
    mixed: Mixed | None = None


def unwrap(loss: Callable[..., Any], *, has_state: bool = False, count: bool = False) -> Unwrapped:
    """Sorts `jit`, `accumulate` and `mixed_precision`, which mean the same step in any order.

    Args:
        loss: the loss.
        has_state: whether the loss takes and returns a model state, past all these transforms.
        count: whether the loss takes the number of the step, which is then the last argument.

    Raises:
        ValueError: the loss is jitted twice, or has two policies, or a transform was made with has_state=True.
    """
    _refuse_unannounced_state(loss, has_state=has_state)
    around, inner = find_transforms(loss)
    if count:
        inner = with_count() if (with_count := getattr(inner, "with_count", None)) else pass_count(inner)
    if has_state:
        inner = with_state() if (with_state := getattr(inner, "with_state", None)) else past_the_batch(inner)
    named = {x.transform: x for x in around}
    jitted, mixed = named.get("jit"), named.get("mixed_precision")
    parted = named.get("partition")
    if parted is not None:
        if has_state:
            raise ValueError("partition(loss) takes no model state. Build the step without has_state.")
        inner = dataclasses.replace(parted, inner=inner, _programs=parted._programs)
    if mixed is not None:
        inner = mixed = Mixed(inner, mixed.policy, mixed.loss_scale)
    for x in reversed(around):
        if x.transform == "accumulate":
            inner = Accumulated(inner, x.num_microbatches, split=x.split)
    return Unwrapped(inner, jitted, mixed)


def trained_leaves(loss: Callable[..., Any]) -> PyTree:
    """Returns the leaves that a loss trains by default: the attribute `trains`, as from `LoRA.adapt`, or None.

    Args:
        loss: the loss, perhaps inside transforms and `functools.partial`.
    """
    inner: Any = loss
    while inner is not None:
        if (found := getattr(inner, "trains", None)) is not None:
            return found
        inner = getattr(inner, "inner", None) or getattr(inner, "func", None)
    return None


def _refuse_unannounced_state(loss: Callable[..., Any], *, has_state: bool) -> None:
    """Refuses a loss with transforms that take a model state, in a step that was built without a state.

    Raises:
        ValueError: the transforms take a model state.
    """
    if not has_state and any(getattr(x, "has_state", False) for x in find_transforms(loss)[0]):
        raise ValueError("the loss takes a model state, and the step was built without. Pass has_state=True to both.")


def check_state(outer: str, loss: Callable[..., Any], *, has_state: bool) -> None:
    """Refuses a transform with `has_state` around a transform without, or the other way round.

    Raises:
        ValueError: the two differ.
    """
    for x in find_transforms(loss)[0]:
        if hasattr(x, "has_state") and x.has_state != has_state:
            raise ValueError(
                f"{outer}(..., has_state={has_state}) of {x.transform}(..., has_state={x.has_state}): a loss has a"
                " model state or not. Pass the same to both."
            )


def describe_function(loss: Unwrapped, name: str) -> list[str]:
    """Returns a line per fact: a function's transforms, and the capture.

    The wrapped function is described no further than values built from this package's functions: each rank may have
    another function, and ranks agree on leaves and gradients during the run.
    """
    lines = [f"torch {torch.__version__}", *_describe_captured(loss.jitted)]
    around, inner = find_transforms(loss.loss)
    cuts = [x for x in around if x.transform == "accumulate"]
    if loss.mixed is not None:
        lines += describe((loss.mixed.policy, loss.mixed.loss_scale), "mixed_precision")
    lines += [f"partition along {x.axes}" for x in around if x.transform == "partition"]
    counts = [f"{x.num_microbatches}{'' if x.split is None else ' by split='}" for x in cuts]
    lines.append(f"accumulate {' x '.join(counts)}" if cuts else "no accumulate")
    return [*lines, *describe(inner, name, strangers=False)]


def _describe_captured(jitted: Jitted | None) -> list[str]:
    if jitted is None:
        return ["eager, without jit"]
    how = f"jit {jitted.chooses_by()}, backend {jitted.backend!r}, max_graphs {jitted.max_graphs}"
    if jitted.cluster is not None:  # each rank may have separate measurements and limits of memory. Rank 0 chooses
        return [how]
    return [how, *describe(jitted.schedule, "jit.schedule")]
