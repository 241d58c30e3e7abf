"""Which transform may be around which: one table, that every order check reads.

    around a step    the step takes it over, with everything in the step
    around a loss    the step takes it over, for the loss as a whole
    inside a loss    the loss, or a part of it, runs in it
    a program        runs on a mesh, around all of these

Transforms that a step takes over mean the same step in any order. A transform inside a loss may not be around a
transform that a step takes over, as the outer would hide the inner.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from ._callable import check_function

Level = Literal["around a step", "around a loss", "inside a loss", "a program"]


class TransformRow(NamedTuple):
    """Row of a transform in the table.

    Attributes:
        level: the kind of function inside.
        within: the transforms that may be directly around.
        twice: the error if a step takes the transform over twice. None: twice is allowed.
    """

    level: Level
    within: frozenset[str]
    twice: str | None = None


_STEP = frozenset({"jit", "accumulate", "mixed_precision", "partition", "sharded"})
TABLE = {
    "jit": TransformRow("around a step", _STEP - {"jit"} | {"bucketed"}, "the loss is jitted twice. Drop one."),
    "accumulate": TransformRow("around a loss", _STEP),
    "mixed_precision": TransformRow(
        "around a loss",
        _STEP - {"mixed_precision"},
        "the loss has two precision policies. Drop one mixed_precision.",
    ),
    "partition": TransformRow(
        "around a loss",
        _STEP - {"partition"} | {"pipeline"},
        "the loss is partitioned twice. Drop one partition, or name one axis.",
    ),
    "remat": TransformRow("inside a loss", _STEP | {"remat", "offload", "pipeline"}),
    "offload": TransformRow("inside a loss", _STEP | {"pipeline"}),
    "pipeline": TransformRow("inside a loss", _STEP),
    "sharded": TransformRow(
        "a program",
        frozenset({"bucketed"}),
        "the function is sharded already, by sharded(f, ...). Give f itself to the transform that shards it, a step or"
        " sharded.",
    ),
    "bucketed": TransformRow(
        "a program",
        frozenset({"bucketed"}),
        "the function is bucketed already, by bucketed(f, ...). Give f itself to a step or sharded.",
    ),
}
_CAPTURED = "bucketed({0}, ...) has no graphs whose number it bounds. Use bucketed(jit({0}), ...)."
# By order that the table refuses: the effect, and the remedy.
WHY = {
    ("jit", "jit"): "jit(jit(f)) is jit(f). Drop one.",
    ("mixed_precision", "mixed_precision"): "mixed_precision(mixed_precision(loss)): a loss has one policy. Drop one.",
    ("partition", "partition"): "partition(partition(loss)): a loss is partitioned once. Drop one.",
    ("remat", "partition"): "remat(partition(f)) would hide the leaves' specs from it. Use partition(remat(f)).",
    ("offload", "partition"): (
        "offload(partition(f), policy) would hide the leaves' specs from it. Use offload inside a plain loss."
    ),
    ("partition", "sharded"): "partition(sharded(f)) has no leaves to partition. Use sharded(partition(f), ...).",
    ("remat", "accumulate"): (
        "remat(accumulate(f, n)) would keep every microbatch at once. Use accumulate(remat(f), n)."
    ),
    ("remat", "jit"): "remat(jit(f)) would hide the graph in a recomputation. Use jit(remat(f)).",
    ("remat", "mixed_precision"): (
        "remat(mixed_precision(f, policy)) would hide the policy from the step. Use mixed_precision(remat(f), policy)."
    ),
    ("remat", "offload"): (
        "remat(offload(f, policy)) would drop and recompute the tensors that offload moves. Use remat(f,"
        " policy=policy), or offload(remat(f), policy)."
    ),
    ("offload", "accumulate"): (
        "offload(accumulate(f, n), policy) would hide the microbatches, whose activations would all wait at once. Use"
        " accumulate(offload(f, policy), n)."
    ),
    ("offload", "jit"): "offload(jit(f), policy): a graph saves nothing. Use jit(offload(f, policy)).",
    ("offload", "mixed_precision"): (
        "offload(mixed_precision(f, precision), policy) would hide the precision from the step. Use"
        " mixed_precision(offload(f, policy), precision)."
    ),
    ("offload", "offload"): "offload(offload(f, a), b): a function has one policy. Drop one.",
    ("remat", "pipeline"): (
        "remat(pipeline(...)) would run all stages again in one backward. Use remat for the block of the pipeline."
    ),
    ("offload", "pipeline"): (
        "offload(pipeline(...), policy) would hide the stages from the step. Use offload for the block of the pipeline."
    ),
    ("pipeline", "jit"): "pipeline of a jitted function: a step is jitted as a whole. Use jit(pipeline(...)).",
    ("pipeline", "accumulate"): (
        "pipeline of an accumulated function: the pipeline has the microbatches. Use pipeline(..., num_microbatches=n)."
    ),
    ("pipeline", "mixed_precision"): (
        "pipeline of a function of mixed precision would hide the policy from the step. Use mixed_precision("
        "pipeline(...), policy)."
    ),
    ("pipeline", "sharded"): "pipeline of a sharded function: use sharded(pipeline(...), ...).",
    ("pipeline", "pipeline"): "pipeline of a pipelined function: a loss has one pipeline. Drop one.",
    ("jit", "sharded"): (
        "jit(sharded(f)) would hide the gathers from the agreement of the ranks. Use sharded(jit(f), ...), whose graph"
        " holds them."
    ),
    ("accumulate", "sharded"): (
        "accumulate(sharded(f), n) would gather every leaf once a microbatch. Use sharded(accumulate(f, n), ...)."
    ),
    ("mixed_precision", "sharded"): (
        "mixed_precision(sharded(f), policy) would cast a sharded function. Use sharded(mixed_precision(f, policy),"
        " ...)."
    ),
    ("remat", "sharded"): ("remat(sharded(f)) would run a whole program again. Use sharded(remat(f), ...)."),
    ("offload", "sharded"): (
        "offload(sharded(f), policy): a sharded function saves nothing. Use sharded(offload(f, policy), ...)."
    ),
    ("sharded", "sharded"): "sharded(sharded(f)): a function is sharded once. Drop one.",
    ("jit", "bucketed"): "jit(bucketed(f, ...)) would capture a graph a length. Use bucketed(jit(f), ...).",
    ("sharded", "bucketed"): (
        "sharded(bucketed(f, ...)) would agree on a graph a length. Use bucketed(sharded(jit(f), ...), ...)."
    ),
    ("partition", "bucketed"): "partition(bucketed(f, ...)): a length is padded once. Use bucketed(jit(...), ...).",
    ("accumulate", "bucketed"): (
        "accumulate(bucketed(f, ...), n) would pad each microbatch. Use bucketed(jit(accumulate(f, n)), ...)."
    ),
    ("mixed_precision", "bucketed"): (
        "mixed_precision(bucketed(f, ...), policy) would hide the policy. Use bucketed(jit(mixed_precision(f, policy)),"
        " ...)."
    ),
    ("remat", "bucketed"): "remat(bucketed(f, ...)) would pad again in the backward. Use bucketed(jit(remat(f)), ...).",
    ("offload", "bucketed"): (
        "offload(bucketed(f, ...), policy): a graph saves nothing. Use bucketed(jit(offload(f, policy)), ...)."
    ),
    ("pipeline", "bucketed"): "pipeline of a bucketed function: pad the batch of the whole pipeline in its place.",
    ("bucketed", "accumulate"): _CAPTURED.format("accumulate(f, n)"),
    ("bucketed", "mixed_precision"): _CAPTURED.format("mixed_precision(f, policy)"),
    (
        "bucketed",
        "partition",
    ): "bucketed(partition(f), ...) has no leaves. Use bucketed(sharded(jit(partition(f))), ...).",
    ("bucketed", "offload"): _CAPTURED.format("offload(f, policy)"),
    ("bucketed", "pipeline"): _CAPTURED.format("pipeline(...)"),
}


class Transform:
    """Function that a transform has made of another, `inner`, with a row of the table.

    A transform with functions that need not be recognised (such as remat) makes plain functions.
    """

    transform: ClassVar[str]


def check_order(outer: str, f: Callable[..., Any], *, deep: bool = False) -> None:
    """Refuses `outer(f)` if the table does, such as `partition(sharded(f))`.

    Args:
        outer: the transform.
        f: a function, perhaps made by another transform.
        deep: whether to look further into `f`, through the transforms that a step takes over.

    Raises:
        TypeError: `f` is not a function.
        ValueError: names the order to use.
    """
    check_function(outer, f)
    for x in _inward(f):
        if outer not in TABLE[x.transform].within:
            raise ValueError(WHY[outer, x.transform])
        if not deep:
            return


def find_transforms(f: Callable[..., Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the transforms that a step takes over from a loss, outermost first, and the function inside.

    Raises:
        ValueError: a transform that may occur once occurs twice, or the function is already a program.
    """
    found: list[Any] = []
    for x in _inward(f):
        row = TABLE[x.transform]
        again = row.level == "a program" or any(y.transform == x.transform for y in found)
        if row.twice is not None and again:
            raise ValueError(row.twice)
        if row.level == "inside a loss":
            return found, x
        found.append(x)
    return found, found[-1].inner if found else f


def _inward(f: Any) -> Iterator[Any]:
    """Yields the results of transforms from the outside in.

    The results include the transforms that a step takes over, and the first other transform.
    """
    while isinstance(f, Transform):
        yield f
        if TABLE[f.transform].level == "inside a loss":
            return
        f = f.inner  # pyright: ignore[reportAttributeAccessIssue]
