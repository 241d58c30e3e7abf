"""`remat`: the same function, whose backward recomputes what the forward does not keep."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from shardfn.collectives import transforming

from ._accumulate import Accumulated
from ._capture import recomputing
from ._jit import Jitted
from ._mixed_precision import Mixed


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps only the inputs of `f` and runs it again in the backward: `remat(f)(*args) == f(*args)`, bit for bit.

    Trades activation memory for one more forward of `f`. Lazy parameters inside are gathered for the recomputation,
    which the backward then shares. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
    https://arxiv.org/abs/1604.06174

    Args:
        f: a pure function; wrap a block of a model, or a whole loss.

    Raises:
        ValueError: `f` is an `accumulate`d loss: its microbatches would be recomputed all at once; or it is jitted, or
            has a precision policy.

    Example:
        >>> import torch
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> remat(torch.sin)(x).backward()
        >>> torch.equal(x.grad, torch.cos(x.detach()))
        True
    """
    if isinstance(f, Accumulated):
        raise ValueError("remat(accumulate(f, n)) would keep every microbatch at once; use accumulate(remat(f), n).")

    if isinstance(f, Jitted):
        raise ValueError("remat(jit(f)) would hide the graph in a recomputation; use jit(remat(f)).")

    if isinstance(f, Mixed):
        raise ValueError(
            "remat(mixed_precision(f, policy)) would hide the policy from the step; use mixed_precision(remat(f),"
            " policy)."
        )

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if transforming():  # where the hooks that drop and recompute are not available; the value is the same
            return f(*args, **kwargs)
        ran: list[None] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            with recomputing() if ran else contextlib.nullcontext():
                ran.append(None)
                return f(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return recomputed
