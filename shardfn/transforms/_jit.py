"""Captures of functions: `jit` runs a graph, `eval_shape` computes only shapes.

`eval_shape`: shapes of a function's result without its computation, and abstract tensors for lowered steps.

`jit`: the same function, captured as a single graph for each signature, scheduled and compiled.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn import core, engine
from shardfn._torch import DisableTorchDispatch, FakeTensorMode
from shardfn.capture import fake
from shardfn.collectives import GlobalTensor
from shardfn.graph import Cluster, Schedule


def eval_shape(f: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `f(*args)` as tensors with shape and dtype but no data, without computing.

    Args:
        f: function of trees of tensors, such as `step.init`.
        *args: arguments. Tensors may be abstract.

    Returns: The tree that `f` returns, with tensors on the device "meta".

    Example:
        >>> import torch
        >>> eval_shape(lambda x: x @ x.T, torch.empty(1 << 20, 8, device="meta")).shape
        torch.Size([1048576, 1048576])
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, core.draw_shapes():
        inputs = core.tree_map(lambda x: fake(x, "cpu") if isinstance(x, Tensor) else x, args)
        return core.tree_map(_make_meta, f(*inputs))


def _make_meta(x: Any) -> Any:
    if isinstance(x, GlobalTensor):
        return x.with_block(_make_meta(x.held))
    if isinstance(x, Tensor):
        with DisableTorchDispatch():
            out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return core.frozen(out) if core.is_frozen(x) else out
    return x


def jit(
    f: Callable[..., Any],
    *,
    backend: str | None = None,
    graph_schedule: Schedule | None = None,
    cluster: Cluster | None = None,
    memory: int | None = None,
    check_types: bool = True,
    max_graphs: int = engine.MAX_GRAPHS,
    **options: Any,
) -> engine.Jitted:
    """Runs `f` as a graph: captured once per signature, scheduled, and compiled. `jit(f)(*args) == f(*args)`.

    `sharded_step(jit(loss), ...)` captures the complete step as one flat graph: gathers, forward, backward, reductions,
    clipping and the in-place optimizer. The graph's transfers are then scheduled. A capture takes seconds and is made
    once for each shape of the batch. The log "shardfn.jit" reports each capture. Beyond `max_graphs` shapes, the least
    recently used graph is dropped.

    Args:
        f: a pure function. The Python of `f` runs once per signature, so branches may depend on shapes, not on values.
        backend: "graph" runs the captured ops uncompiled, bit-identical to eager. "inductor" compiles the ops between
            transfers, and needs a C++ compiler. Default: "inductor" where a compiler is found.
        graph_schedule: the options of the passes over the graph. Default: `Schedule()`.
        cluster: the machines, from `sf.graph.calibrate(mesh)` or `sf.graph.cluster(name)`. A cost model then chooses
            the schedule of each graph (`sf.graph.choose`). Rank 0 chooses for all ranks.
        memory: bytes that a device may hold at the step's peak, with `cluster`. Default: the cluster's `device.memory`.
        check_types: whether a missing or a repeated `psum` or `pvary` in the loss is an error. If False, ranks may
            diverge by mistake and nobody notices.
        max_graphs: number of graphs to keep, for the function and for each step or `sharded` function around the
            function, equal on all ranks. The calls of a step, `gradients` and `update` share the graphs. An evicted
            graph is freed, and captured again at the next use.
        **options: fields of `Schedule`, in place of `graph_schedule`: `jit(f, prefetch=0, bucket=0)`. With `cluster`
            the given fields are fixed, and the cost model chooses the other fields.

    Returns:
        The jitted function. `cache_info()` counts hits, misses, evictions and seconds.

    Raises:
        ValueError: a back end or an option is unknown or has no effect. `max_graphs` is below 1, or (when called) no
            schedule fits `memory`.
        TypeError: `cluster` is not a `Cluster`, or `max_graphs` not an int.
        CaptureError: (when called) `f` depends on the value of a tensor. The message names the line.

    Example:
        >>> import torch
        >>> double = jit(lambda x: x * 2, backend="graph")
        >>> double(torch.ones(2)), double(torch.zeros(2))
        (tensor([2., 2.]), tensor([0., 0.]))
        >>> double.cache_info().misses
        1
        >>> small = jit(lambda x: x * 2, backend="graph", max_graphs=1)
        >>> small(torch.ones(2)), small(torch.ones(1))
        (tensor([2., 2.]), tensor([2.]))
        >>> small.cache_info().evictions, small.cache_info().currsize
        (1, 1)

    References:
        Frostig et al., Compiling machine learning programs via high-level tracing, SysML 2018
    """
    if backend not in (None, "graph", "inductor"):
        hint = core.did_you_mean(str(backend), ("graph", "inductor"))
        raise ValueError(f"jit(backend={backend!r}): the back ends are 'graph' and 'inductor'.{hint}")
    fields = [x.name for x in dataclasses.fields(Schedule)]
    for name in options:
        if name not in fields:
            raise ValueError(f"jit has no option {name!r}. The options are {fields}.{core.did_you_mean(name, fields)}")
    if graph_schedule is not None and options:
        raise ValueError(f"jit got graph_schedule= and {sorted(options)}. Put them in one Schedule.")
    engine.check_order("jit", f)
    _check_choosing(graph_schedule, cluster, memory, options)
    _check_max_graphs(max_graphs)
    schedule = graph_schedule or Schedule(**options)
    return engine.Jitted(f, backend, schedule, cluster, memory, options, check_types, max_graphs)


def _check_max_graphs(num: Any) -> None:
    """Checks the number of graphs."""
    remedy = f"pass how many graphs to keep, an int of at least 1, or leave it out for {engine.MAX_GRAPHS}."
    if not isinstance(num, int) or isinstance(num, bool):
        raise TypeError(f"jit(max_graphs={num!r}): {core.a_kind(num)} is not a size; {remedy}")
    if num < 1:
        raise ValueError(f"jit(max_graphs={num}): the graph of the current call is always kept; {remedy}")


def _check_choosing(
    schedule: Schedule | None, cluster: Cluster | None, memory: int | None, options: Mapping[str, Any]
) -> None:
    """Refuses arguments by which `cluster`, or `memory`, would have no effect."""
    if cluster is None:
        if memory is not None:
            raise ValueError(
                f"jit(memory={memory}) without cluster= has no effect: it bounds the schedules that the cost model"
                " chooses from. Pass cluster=sf.graph.calibrate(mesh), or budget= for the step's own values."
            )
        return
    if not isinstance(cluster, Cluster):
        raise TypeError(
            f"jit(cluster={cluster!r}) expected a Cluster, made with sf.graph.calibrate(mesh) or"
            " sf.graph.cluster(name)."
        )
    if memory is not None and memory <= 0:
        raise ValueError(f"jit(memory={memory}): a number of bytes above 0.")
    if schedule is not None:
        raise ValueError(
            "jit got graph_schedule= and cluster=: a Schedule leaves nothing to choose. Give the fields that you want"
            " to keep one by one, as in jit(f, cluster=..., bucket=0)."
        )
    if {"prefetch", "bucket", "reductions"} <= set(options):
        raise ValueError(
            "jit got cluster=, and prefetch=, bucket= and reductions= as well: no choice is left. Drop one of"
            " them, or cluster=."
        )
