"""Saved activations: `remat` computes them again, `offload` moves them to other memories."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardfn import core, engine
from shardfn.activations import (
    RecordedForward,
    Rerun,
    SavedResults,
    SavedValue,
    SavePolicy,
    check_policy_names,
    is_plain,
    pool_of,
)
from shardfn.capture import recomputing
from shardfn.collectives import transforming
from shardfn.leaves import LazyLeaf

WINDOW = 64 << 20


@dataclasses.dataclass(frozen=True)
class Offloaded(engine.Transform):
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
        written, out = engine.in_section(again, lambda: self.inner(*args, **kwargs))
        if written:
            return out
        checking = check_policy_names("offload", self.policy, self._called)
        saved = SavedValue(self.policy, self.window, pool_of(self.directory), _caller_tensors((args, kwargs)))
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

    Returns: The function. In a transform of torch.func, without saved-tensor hooks, the function runs as `f` does.

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

    References: Rajbhandari et al., ZeRO-Infinity, 2021, https://arxiv.org/abs/2104.07857
    """
    engine.check_order("offload", f)
    if not callable(policy):
        raise TypeError(f"offload expected a policy, a function of a SavedTensor, got {policy!r}.")
    if window < 0:
        raise ValueError(f"offload(window={window}): a number of bytes must not be negative.")
    return Offloaded(f, policy, directory, window)


def _caller_tensors(args: Any) -> list[Tensor]:
    """Returns the arguments that the caller holds for longer than the backward, and views of such arguments."""
    out = []
    for x in core.tree_leaves(args):
        if is_plain(x):
            # A leaf of autograd, or a tensor without a gradient, outlives the backward: a move would not free memory.
            base = x if x._base is None else x._base
            if base.grad_fn is None:
                out.append(x)
    return out


def remat(
    f: Callable[..., Any],
    policy: SavePolicy | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    window: int = WINDOW,
) -> Callable[..., Any]:
    """Keeps only the inputs of `f`, which runs again in the backward: `remat(f)(*args) == f(*args)`, bit for bit.

    This is activation checkpointing: less activation memory for a second forward of `f`. Lazy parameters inside are
    gathered once, for the recomputation and the backward. Chen et al., Training Deep Nets with Sublinear Memory Cost,
    2016, https://arxiv.org/abs/1604.06174

    With a policy the results of some operations are stored on the device, the host or disk, and the recomputation uses
    the stored results. For an operation with several results the largest decides. Random draws and in-place operations
    always run again. So do collectives, unless a policy by names keeps the name of the result: ranks may hold tensors
    of other sizes, but the same names.

    Args:
        f: pure function, for example a block of a model, or a whole loss.
        policy: policy from `policies`, or any function of a `SavedTensor`. Default: everything is recomputed.
        directory: directory of values on disk, with a folder for each rank. Default: the disk directory of the step
            around.
        window: limit of bytes in transfer to the host or disk, and limit of bytes back before their use.

    Raises:
        ValueError: `f` is an `accumulate`d loss, with microbatches that would be recomputed all at once, or is jitted,
            offloaded, or has a precision policy, or (when called) the policy returns "disk" without a directory, or
            names a value too late.
        RuntimeError: (in the backward) `f` runs other operations the second time, or tokens choose other experts.
        CaptureError: (when called) inside `jit`, the policy returns "disk" and `directory` is not the step's.

    Example:
        >>> import torch
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> remat(torch.sin)(x).backward()
        >>> torch.equal(x.grad, torch.cos(x.detach()))
        True
    """
    engine.check_order("remat", f)
    if policy is not None and not callable(policy):
        raise TypeError(f"remat expected a policy of sf.policies, a function of a SavedTensor, got {policy!r}.")

    def make_contexts() -> tuple[Any, Any]:
        assert policy is not None
        results = SavedResults(policy, window, pool_of(directory))
        return RecordedForward(results), Rerun(results)

    called: list[None] = []
    options: dict[str, Any] = {"use_reentrant": False} | ({} if policy is None else {"context_fn": make_contexts})

    @functools.wraps(f)
    def recompute_call(*args: Any, **kwargs: Any) -> Any:
        if transforming():  # without hooks to drop and recompute, the value is the same
            return f(*args, **kwargs)
        # For a partitioned loss the graph runs, and is recomputed.
        again = functools.partial(remat, policy=policy, directory=directory, window=window)
        written, out = engine.in_section(again, lambda: f(*args, **kwargs))
        if written:
            return out
        leaves, treedef = core.tree_flatten((args, kwargs))
        # Tensors in trees are saved as inputs, too. A leaf gathered by a step cannot be saved as an input.
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and type(x) is not LazyLeaf]
        tensors = [leaves[i] for i in at]
        # A reference to the function must not hold the tensors: checkpoint saves tensors as inputs, where hooks may
        # move them.
        for i in at:
            leaves[i] = None
        # Empty only in the forward: every later call is a recomputation.
        ran = list[None]()

        def run_flat(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for i, x in zip(at, tensors, strict=True):
                filled[i] = x
            args, kwargs = core.tree_unflatten(treedef, filled)
            around = recomputing() if ran else contextlib.nullcontext()
            ran.append(None)
            with around:
                return f(*args, **kwargs)

        with check_policy_names("remat", policy, called), core.rebind_in_checkpoints():
            return checkpoint(run_flat, *tensors, **options)

    return recompute_call
