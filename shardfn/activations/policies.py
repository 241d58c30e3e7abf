"""Policies of activation checkpointing and offloading: each value for the backward is kept, moved or recomputed.

A policy is a pure function of a value's description, `SavedTensor -> "keep" | "recompute" | "host" | "disk"`, so a
lambda will do. `remat(f, policy=...)` calls it for the result of every operation, and `offload(f, policy)` for every
tensor saved by autograd. A saved tensor cannot be recomputed. Names and meanings come from `jax.checkpoint_policies`,
as far as JAX has the policy.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch

from shardfn.core import did_you_mean, hearing_names

Action = Literal["keep", "recompute", "host", "disk"]


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """Description of a value, on which a policy decides.

    Attributes:
        name: name from `checkpoint_name`, or None.
        shape: shape of the value.
        dtype: dtype of the value.
        nbytes: bytes of memory that a kept value costs: the bytes of the value's storage.
        op: operation with the value as a result, such as "aten.mm.default". None under `offload`, where only saved
            tensors are seen.
        is_collective: whether the value is the result of a collective.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    op: str | None = None
    is_collective: bool = False


SavePolicy = Callable[[SavedTensor], Action]

# Matrix products and convolutions; then products of batches of matrices.
_DOTS = {f"aten.{op}.default" for op in ("mm", "addmm", "mv", "addmv", "linear", "convolution")}
_BATCHED = {f"aten.{op}.default" for op in ("bmm", "baddbmm")}


def check_action(action: object, saved: SavedTensor) -> Action:
    """Returns the action if the action is valid.

    Raises:
        ValueError: the argument is not an action.

    Example:
        >>> check_action("host", SavedTensor(None, (2,), torch.float32, 8))
        'host'
    """
    if action not in get_args(Action):
        raise ValueError(
            f"a policy must give one of {', '.join(map(repr, get_args(Action)))}, got {action!r} for {saved}."
        )
    return action  # pyright: ignore[reportReturnType]


# By no property at all.


def everything_saveable(saved: SavedTensor) -> Action:
    """Keeps all values: `remat` with this policy recomputes nothing.

    Example:
        >>> everything_saveable(SavedTensor(None, (2,), torch.float32, 8))
        'keep'
    """
    del saved
    return "keep"


def nothing_saveable(saved: SavedTensor) -> Action:
    """Recomputes all, as `remat` does without a policy.

    Example:
        >>> nothing_saveable(SavedTensor(None, (2,), torch.float32, 8))
        'recompute'
    """
    del saved
    return "recompute"


# By operation.


def save_collectives(saved: SavedTensor) -> Action:
    """Keeps the results of collectives, recomputes the rest: the recomputation sends nothing.

    As TED's communication-aware checkpointing does, for every collective of the function: sums of tensor parallelism,
    exchanges of experts, sums of balance losses. Ranks decide alike, as no size counts. Weights that ZeRO has freed
    are gathered again, as without recomputation. To keep only some results, use their names: "tp_sum", "tp_gather",
    "moe_rows", "moe_results" (`save_only_these_names`).

    Example:
        >>> save_collectives(SavedTensor(None, (2,), torch.float32, 8, "psum", is_collective=True))
        'keep'

    References:
        Singh et al., A Hybrid Tensor-Expert-Data Parallelism Approach, 2023, https://arxiv.org/abs/2303.06318
    """
    return "keep" if saved.is_collective else "recompute"


def keeps_collectives(policy: SavePolicy) -> bool:
    """Returns whether a policy keeps the results of all collectives, with or without names.

    Example:
        >>> keeps_collectives(save_collectives), keeps_collectives(nothing_saveable)
        (True, False)
    """
    return policy is save_collectives


def dots_saveable(saved: SavedTensor) -> Action:
    """Keeps the results of matrix products and convolutions, recomputes the rest.

    Example:
        >>> dots_saveable(SavedTensor(None, (2, 2), torch.float32, 16, "aten.bmm.default"))
        'keep'
    """
    return "keep" if saved.op in _DOTS | _BATCHED else "recompute"


def dots_with_no_batch_dims_saveable(saved: SavedTensor) -> Action:
    """Keeps the results of products with one matrix (the linear layers, not attention's), recomputes the rest.

    Example:
        >>> dots_with_no_batch_dims_saveable(SavedTensor(None, (2, 2), torch.float32, 16, "aten.bmm.default"))
        'recompute'
    """
    return "keep" if saved.op in _DOTS else "recompute"


def offload_dot_with_no_batch_dims(offload_dst: Action = "host") -> SavePolicy:
    """Acts as `dots_with_no_batch_dims_saveable`, but sends the kept results to `offload_dst`.

    Example:
        >>> offload_dot_with_no_batch_dims()(SavedTensor(None, (2, 2), torch.float32, 16, "aten.mm.default"))
        'host'
    """
    return lambda saved: offload_dst if saved.op in _DOTS else "recompute"


# By name.


def names_of(policy: SavePolicy) -> tuple[str, ...]:
    """Returns the names that a policy such as `save_only_these_names` keeps. Other policies keep no names.

    Example:
        >>> names_of(save_only_these_names("attn_out")), names_of(everything_saveable)
        (('attn_out',), ())
    """
    return getattr(policy, "names", ())


def _going_by(names: tuple[str, ...], policy: SavePolicy) -> SavePolicy:
    policy.names = names  # pyright: ignore[reportFunctionMemberAccess]
    return policy


def save_only_these_names(*names: str) -> SavePolicy:
    """Keeps the named values, recomputes the rest.

    Example:
        >>> save_only_these_names("attn_out")(SavedTensor("attn_out", (2,), torch.float32, 8))
        'keep'
    """
    return _going_by(names, lambda saved: "keep" if saved.name in names else "recompute")


def save_anything_except_these_names(*names: str) -> SavePolicy:
    """Recomputes the named values, keeps the rest, unnamed values included.

    Example:
        >>> save_anything_except_these_names("logits")(SavedTensor(None, (2,), torch.float32, 8))
        'keep'
    """
    return _going_by(names, lambda saved: "recompute" if saved.name in names else "keep")


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str],
    names_which_can_be_offloaded: tuple[str, ...] | list[str],
    offload_dst: Action = "host",
) -> SavePolicy:
    """Keeps some names, sends other names to `offload_dst`, recomputes the rest.

    Raises:
        ValueError: a name is in both lists.

    Example:
        >>> policy = save_and_offload_only_these_names(
        ...     names_which_can_be_saved=["q"], names_which_can_be_offloaded=["mlp"])
        >>> policy(SavedTensor("mlp", (2,), torch.float32, 8))
        'host'
    """
    both = set(names_which_can_be_saved) & set(names_which_can_be_offloaded)
    if both:
        raise ValueError(f"{sorted(both)} can be saved and can be offloaded. Each name must be in a single list.")

    def choose_action(saved: SavedTensor) -> Action:
        if saved.name in names_which_can_be_saved:
            return "keep"
        return offload_dst if saved.name in names_which_can_be_offloaded else "recompute"

    return _going_by((*names_which_can_be_saved, *names_which_can_be_offloaded), choose_action)


def offload_only_these_names(*names: str, to: Action = "host") -> SavePolicy:
    """Sends the named values to `to`, keeps the rest.

    Example:
        >>> offload_only_these_names("mlp")(SavedTensor("mlp", (2,), torch.float32, 8))
        'host'
    """
    return _going_by(names, lambda saved: to if saved.name in names else "keep")


def offload_anything_except_these_names(*names: str, to: Action = "host") -> SavePolicy:
    """Keeps the named values, sends the rest to `to`.

    Example:
        >>> offload_anything_except_these_names("mlp")(SavedTensor("mlp", (2,), torch.float32, 8))
        'keep'
    """
    return _going_by(names, lambda saved: "keep" if saved.name in names else to)


# By size.


def offload_larger_than(nbytes: int, to: Action = "host") -> SavePolicy:
    """Sends values larger than `nbytes` to `to`, keeps the rest.

    Example:
        >>> offload_larger_than(4)(SavedTensor(None, (2,), torch.float32, 8))
        'host'
    """
    return lambda saved: to if saved.nbytes > nbytes else "keep"


@dataclasses.dataclass(frozen=True)
class Budget:
    """Policy with a budget: the newest `limit` bytes of the values that `then` would not keep are kept, too.

    Attributes:
        limit: bytes of the budget.
        then: action, or policy, for older values.
    """

    limit: int
    then: Action | SavePolicy = "host"

    def __call__(self, saved: SavedTensor) -> Action:
        """Returns the action for a value beyond the budget."""
        return self.then(saved) if callable(self.then) else self.then


def budget(nbytes: int, then: Action | SavePolicy = "host") -> Budget:
    """Keeps the newest values up to `nbytes`. As newer values come, the oldest values leave.

    The backward needs the newest values first, and the values that leave last: so there is time to bring these values
    back, and the backward starts without a wait. The budget holds for each call of the transformed function, for
    example 2 GB for each layer, and counts only values that `then` would not keep.

    Args:
        nbytes: budget in bytes.
        then: action for the other values, or policy for each of the other values.

    Raises:
        ValueError: `nbytes` is negative.

    Example:
        >>> budget(1 << 30, then="disk").limit
        1073741824
    """
    if nbytes < 0:
        raise ValueError(f"budget({nbytes}): a budget of bytes must not be negative.")
    return Budget(nbytes, then)


def limit_of(policy: SavePolicy) -> int:
    """Returns the bytes that a policy keeps regardless of its decisions, or 0 for all but budgets.

    Example:
        >>> limit_of(budget(8)), limit_of(everything_saveable)
        (8, 0)
    """
    return policy.limit if isinstance(policy, Budget) else 0


def describe(name: str | None, x: torch.Tensor, op: str | None = None) -> SavedTensor:
    """Returns a tensor as policies see it.

    Example:
        >>> describe("h", torch.ones(4)[:2]).nbytes
        16
    """
    nbytes = x.untyped_storage().nbytes()
    return SavedTensor(name, tuple(x.shape), x.dtype, nbytes or math.prod(x.shape) * x.dtype.itemsize, op)


@contextlib.contextmanager
def check_policy_names(who: str, policy: SavePolicy | None, done: list[None]) -> Iterator[None]:
    """Warns, around the first call of a function, of names of the policy that no value of the call has.

    Args:
        who: the transform.
        policy: the policy whose names are checked; None checks nothing.
        done: list of finished calls, empty before the first call.
    """
    names = () if policy is None else names_of(policy)
    if done or not names:
        yield
        return
    heard: dict[str, None] = {}
    with hearing_names(lambda x, name: heard.setdefault(name)):
        yield
    done.append(None)
    for name in names:
        if name not in heard:
            there = f"it has {', '.join(map(repr, heard))}" if heard else "it names none"
            warnings.warn(
                f"{who}: the policy goes by {name!r}, but no value of the function has the name ({there})."
                f"{did_you_mean(name, heard)} Name values where they are made, sf.checkpoint_name(x, {name!r}).",
                stacklevel=3,
            )
