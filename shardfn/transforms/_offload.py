"""`offload`: the same function, with saved activations in other memories until the backward."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardfn.activations import SavedValue, SavePolicy, check_policy_names, is_plain, pool_of
from shardfn.collectives import transforming
from shardfn.core import tree_leaves
from shardfn.engine import Transform, check_order, in_section

WINDOW = 64 << 20


@dataclasses.dataclass(frozen=True)
class Offloaded(Transform):
    """Function with saved tensors stored where a policy decides.

    Attributes:
        inner: function that runs.
        policy: function that chooses the memory of each saved tensor.
        directory: directory of tensors on disk. None means the step's directory.
        window: limit of bytes in transfer out, and limit of bytes back before their use.
    """

    transform: ClassVar[str] = "offload"

    inner: Callable[..., Any]
    policy: SavePolicy
    directory: str | os.PathLike[str] | None = None
    window: int = WINDOW
    _called: list[None] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's value."""
        if transforming() or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # For a partitioned loss the graph runs, and the graph's values are moved.
        again = functools.partial(Offloaded, policy=self.policy, directory=self.directory, window=self.window)
        written, out = in_section(again, lambda: self.inner(*args, **kwargs))
        if written:
            return out
        checking = check_policy_names("offload", self.policy, self._called)
        saved = SavedValue(self.policy, self.window, pool_of(self.directory), _held_tensors((args, kwargs)))
        with checking, saved.saving():
            return self.inner(*args, **kwargs)


def offload(
    f: Callable[..., Any],
    policy: SavePolicy,
    *,
    directory: str | os.PathLike[str] | None = None,
    window: int = WINDOW,
) -> Offloaded:
    """Stores saved tensors where `policy` decides: `offload(f, policy)(*args) == f(*args)`, bit for bit.

    This is activation offloading. Tensors saved by autograd while `f` runs leave the device at once, and come back
    while the backward works on tensors saved later: less device memory for more traffic. A tensor saved n times is
    moved once. The device holds the tensors kept by the policy, at most `window` bytes on the way out, at most `window`
    bytes back before their use, and the tensors of the current operation.

    In a captured step the moves are ops of the graph. The newest `window` bytes then stay on the device, as the
    backward needs them first, and `jit`'s `prefetch` sets how early the other tensors come back.

    Not moved are arguments of `f` that are leaves of autograd or hold no gradient (parameters, the batch), leaves
    gathered by a step, tensors below a page, and views of less than a quarter of their memory.

    Args:
        f: loss, or part of a loss. Of `remat` inside, only the inputs are moved.
        policy: policy from `policies`, or any function from a `SavedTensor` to "keep", "host" or "disk".
        directory: directory of values on disk, with a folder for each rank. Values are removed after use. Default: the
            disk directory of the step around.
        window: limit in bytes, see above.

    Returns:
        The function. In a transform of torch.func, without saved-tensor hooks, the function runs as `f` does.

    Raises:
        ValueError: `f` is accumulated, jitted, or has a precision policy or another offload, or (when called) the
            policy returns "recompute", or "disk" without a directory, or the call is inside `remat`.
        RuntimeError: (in the backward) a saved tensor was modified in place.
        CaptureError: (when called) inside `jit`, the policy returns "disk" and `directory` is not the step's.

    Example:
        >>> from shardfn.transforms import policies
        >>> x = torch.ones(2048, requires_grad=True)
        >>> from shardfn import memory
        >>> with memory.ledger() as book:
        ...     offload(lambda x: x.sin().exp().sum(), policies.offload_larger_than(4096))(x).backward()
        >>> book.moved("device", "host")
        8192

    References:
        Rajbhandari et al., ZeRO-Infinity, 2021, https://arxiv.org/abs/2104.07857
    """
    check_order("offload", f)
    if not callable(policy):
        raise TypeError(f"offload takes a policy, which is a function of a SavedTensor; got {policy!r}.")
    if window < 0:
        raise ValueError(f"offload(window={window}): a number of bytes must not be negative.")
    return Offloaded(f, policy, directory, window)


def _held_tensors(args: Any) -> list[Tensor]:
    """Returns the arguments that the caller holds for longer than the backward, and views of such arguments."""
    out = []
    for x in tree_leaves(args):
        if is_plain(x):
            # A leaf of autograd, or a tensor without a gradient, outlives the backward: a move would not free memory.
            base = x if x._base is None else x._base
            if base.grad_fn is None:
                out.append(x)
    return out
