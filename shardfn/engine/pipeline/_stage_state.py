"""Model state of a pipelined loss: each function has a part, which only the rank of the function's stage changes.

    first(params, state, batch[, key]) -> (h, state)
    block(p, state, h[, key]) -> (h, state)
    last(params, state, h, batch[, key]) -> (loss[, aux], state)

A rank runs the forwards of a stage in the order of the microbatches. As no two stages share a part, each part goes
through the microbatches as on a single device, under any schedule.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardfn import core
from shardfn.engine.loss import innermost_state, is_spec
from shardfn.schedules import PipelineSchedule


class PipelineState(NamedTuple):
    """Model state of a pipelined loss, by function. `()` for a function without a state.

    Attributes:
        first: tree of the first function.
        blocks: trees of the layers, stacked as the layers' leaves are, with the spec `P("pp")`. With several chunks a
            list of stacks. For a list of functions a list with a tree for each.
        last: tree of the last function.

    Example:
        >>> import torch
        >>> PipelineState(blocks={"mean": torch.zeros(4, 3)}).first
        ()
    """

    first: core.PyTree = ()
    blocks: core.PyTree = ()
    last: core.PyTree = ()


def current_state() -> PipelineState:
    """Returns the model state after the forwards so far."""
    return innermost_state().now


def put_part(**parts: core.PyTree) -> None:
    """Stores parts for the next forward."""
    state = innermost_state()
    state.now = state.now._replace(**parts)


def apart(out: Any, name: str, what: str, most: int = 2) -> tuple[Any, core.PyTree]:
    """Splits the return value of a function with a state into the result and the state.

    Args:
        out: return value.
        name: name of the function, as `pipeline` calls the function.
        what: result that the function must return in addition to the state, in words.
        most: number of values that the function may return.

    Raises:
        TypeError: the function has returned something else.
    """
    if type(out) is not tuple or not 2 <= len(out) <= most:
        raise TypeError(
            f"with has_state=True {name} of a pipeline must return ({what}, its part of the model state),"
            f" got {type(out).__name__}{f' of {len(out)}' if isinstance(out, tuple) else ''}. Without a part"
            " it is given (), and returns that."
        )
    *rest, state = out
    return (rest[0] if len(rest) == 1 else tuple(rest)), state


def with_part(
    f: Callable[..., Any], part: str, what: str, params: core.PyTree, args: Sequence[Any], most: int = 2
) -> Any:
    """Returns `f(params, part of the model state, *args)`, and stores the new part for the next forward."""
    out, new = apart(f(params, getattr(current_state(), part), *args), part, what, most)
    put_part(**{part: new})
    return out


def check_stage_state(state: core.PyTree, specs: core.PyTree, axis: str | None, rows: Sequence[int] | None) -> None:
    """Refuses a model state that does not fit a pipeline.

    Args:
        state: first model state, of whole tensors.
        specs: specs, a prefix tree.
        axis: axis along which stages lie. None: there is a single rank.
        rows: number of layers of a stack of parameters by chunk. None: the layers are functions, of a tree each.

    Raises:
        TypeError: the state is not a `PipelineState`.
        ValueError: a part is cut that must not be cut, or a part that must be cut is not, or there are other numbers of
            layers.
    """
    if not isinstance(state, PipelineState):
        raise TypeError(
            f"the model state of a pipelined loss is a {type(state).__name__}, but must be a"
            " sf.PipelineState. Give each function a part: sf.PipelineState(first=..., blocks=...,"
            " last=...)."
        )
    made = core.broadcast_prefix(specs, state, is_spec, names=("state_specs", "model_state"))
    named = list(zip(core.tree_paths(state, "model_state"), core.tree_leaves(state), made, strict=True))
    begin, end = len(core.tree_leaves(state.first)), len(core.tree_leaves((state.first, state.blocks)))
    stacked = named[begin:end] if rows is not None else []
    if axis is not None:
        others = named[:begin] + named[end if stacked else begin :]
        _check_cuts(axis, [(p, spec) for p, _, spec in stacked], [(p, spec) for p, _, spec in others])
    if stacked and rows is not None:
        _check_rows([state.blocks] if len(rows) == 1 else state.blocks, [x[0] for x in stacked], rows)


def _check_cuts(axis: str, stacked: list[tuple[str, core.P]], others: list[tuple[str, core.P]]) -> None:
    core.raise_all(
        ValueError,
        f"a pipeline along {axis!r} cuts the model state of its stacked layers along it, and no other:",
        [
            *(f"{path} has spec {spec!r}; use P({axis!r})" for path, spec in stacked if spec.dim_axes(0) != (axis,)),
            *(f"{path} has spec {spec!r}; leave {axis!r} out" for path, spec in others if axis in spec.axes),
        ],
    )


def _check_rows(stacks: core.PyTree, paths: list[str], rows: Sequence[int]) -> None:
    if not isinstance(stacks, list | tuple) or len(stacks) != len(rows):
        raise ValueError(
            f"a pipeline of {len(rows)} chunks expected model_state.blocks as a list of stacks, one a chunk."
        )
    pairs = [(x, n) for stack, n in zip(stacks, rows, strict=True) for x in core.tree_leaves(stack)]
    core.raise_all(
        ValueError,
        "the model state of stacked layers has a row for each layer:",
        [
            f"{path} has shape {tuple(x.shape)}, for {n} layers"
            for path, (x, n) in zip(paths, pairs, strict=True)
            if tuple(x.shape[:1]) != (n,)
        ],
    )


def check_in_order(table: PipelineSchedule) -> None:
    """Refuses a schedule in which a stage runs the microbatches in another order than a single device.

    Raises:
        ValueError: an action comes too late. The message names the rank and the action.
    """
    if late := table.find_late("forward"):
        raise ValueError(
            f"the schedule {table.name} runs {late[1]} on rank {late[0]} after the forward of a later"
            " microbatch, but the model state must go through the microbatches in order. Reorder"
            " the forwards, or drop has_state=True."
        )
