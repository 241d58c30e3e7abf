"""Describes a step, or a sharded function, in lines: the constant facts that determine the messages of ranks.

Ranks compare the hash of the lines in the exchange at the beginning of a call. So different steps never meet in a
transfer, and the error shows the different lines.
"""

import torch

from shardfn.core import describe
from shardfn.optim import GradientTransformation

from ._jitted import Jitted
from ._transform_order import taken_over
from ._unwrap import Unwrapped


def describe_step(loss: Unwrapped, optimizer: GradientTransformation) -> list[str]:
    """Returns a line per fact: the loss's transforms, the capture, the optimizer's rules and numbers."""
    return [*describe_function(loss, "loss"), *describe(optimizer, "optimizer")]


def describe_function(loss: Unwrapped, name: str) -> list[str]:
    """Returns a line per fact: a function's transforms, and the capture.

    The wrapped function is described no further than values built from this package's functions: each rank may have
    another function, and ranks agree on leaves and gradients during the run.
    """
    lines = [f"torch {torch.__version__}", *_describe_captured(loss.jitted)]
    around, inner = taken_over(loss.loss)
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
