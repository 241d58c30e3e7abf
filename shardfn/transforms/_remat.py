"""`remat`: the same function, with the forward's values recomputed in the backward."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardfn.activations import RecordedForward, Rerun, SavedResults, SavePolicy, check_policy_names, pool_of
from shardfn.capture import recomputing
from shardfn.collectives import transforming
from shardfn.core import rebind_in_checkpoints, tree_flatten, tree_unflatten
from shardfn.engine import check_order, in_section
from shardfn.leaves import LazyLeaf

from ._offload import WINDOW


def remat(
    f: Callable[..., Any],
    policy: SavePolicy | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    window: int = WINDOW,
) -> Callable[..., Any]:
    """Keeps only the inputs of `f`, which runs again in the backward: `remat(f)(*args) == f(*args)`, bit for bit.

    This is activation checkpointing: less activation memory for one more forward of `f`. Lazy parameters inside are
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
    check_order("remat", f)
    if policy is not None and not callable(policy):
        raise TypeError(f"remat takes a policy, which is a function of a SavedTensor (sf.policies); got {policy!r}.")

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
        written, out = in_section(again, lambda: f(*args, **kwargs))
        if written:
            return out
        leaves, treedef = tree_flatten((args, kwargs))
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
            args, kwargs = tree_unflatten(treedef, filled)
            around = recomputing() if ran else contextlib.nullcontext()
            ran.append(None)
            with around:
                return f(*args, **kwargs)

        with check_policy_names("remat", policy, called), rebind_in_checkpoints():
            return checkpoint(run_flat, *tensors, **options)

    return recompute_call
