"""Scans in losses that are captured to be partitioned: the graph has the body once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor, track_tensor_tree

from shardfn._torch import FakeTensor
from shardfn.capture import CaptureError, node_of, recorder, steps_after
from shardfn.collectives import transforming
from shardfn.core import PyTree, tree_flatten, tree_leaves, tree_structure, tree_unflatten
from shardfn.engine.loss import differing, without_data
from shardfn.graph import LoopMark, loop_input, looped
from shardfn.nn import Run, plain_loop

from ._partition_capture import Noting, refuse_functions


def noted_loop(run: Run, carry: PyTree, layers: Sequence[PyTree]) -> tuple[PyTree, list[PyTree]]:
    """Runs the function of a scan for the first layer, and notes that the layer is one of several.

    The function runs for the last layer too, and must have the same steps.

    Raises:
        CaptureError: layers have different steps, or return a tensor that was not computed.
        ValueError: the function has operations with a custom backward.
    """
    notes = recorder()
    flat, carry_def = tree_flatten(carry)
    xs = [tree_leaves(x) for x in layers]
    if len(layers) == 1 or not isinstance(notes, Noting) or transforming() or not _is_traced([*flat, *xs[0]], notes):
        return plain_loop(run, carry, layers)
    able = [t.requires_grad for t in flat]
    ys: list[PyTree] = []
    while True:
        body = _BoundBody(notes, flat, xs[0], able)
        outs = body.run(run, carry_def, layers[0], ys)
        out_carry, y = tree_unflatten(body.out_def, outs)
        found = [a or t.requires_grad for a, t in zip(able, tree_leaves(out_carry), strict=True)]
        if found == able:
            break
        body.erase()
        able = found  # a carry that gets a gradient in a later layer is captured with a gradient in all layers
    ends, steps = [node_of(t, notes) for t in outs], body.steps
    again = body.run(run, carry_def, layers[-1], [y])
    differing(steps, body.steps, {}, ends, [node_of(t, notes) for t in again])
    body.erase()
    torch.clear_autocast_cache()  # the error may hold tensors of the body
    return body.looped(flat, xs, ends, (out_carry, y))


def _is_traced(tensors: Sequence[Any], notes: Noting) -> bool:
    return all(isinstance(t, FakeTensor) and get_proxy_slot(t, notes.tracer, None) is not None for t in tensors)


class _BoundBody:
    """Function of a scan, run on placeholders of the carry and x."""

    def __init__(self, notes: Noting, carry: Sequence[Tensor], x: Sequence[Tensor], able: Sequence[bool]) -> None:
        self._notes, self._mark = notes, LoopMark()
        self._num_carry = len(carry)
        with notes.inside(self._mark):
            wants = [*able, *(t.requires_grad for t in x)]
            self._given = [self._stand_in(t, wanted) for t, wanted in zip([*carry, *x], wants, strict=True)]
        self._nodes = [node_of(t, notes) for t in self._given]
        # The steps that the last run has written into the graph, until `erase`.
        self.steps: list[Any] = []
        self.out_def: Any = None

    def _stand_in(self, like: Any, wanted: bool) -> Tensor:
        made = without_data(like.fake_mode, like.dtype, like.shape, like.device, like.stride())
        tracer = self._notes.tracer
        proxy = tracer.create_proxy("call_function", loop_input, (), {})
        track_tensor(made, proxy, constant=None, tracer=tracer)
        set_meta(proxy, made)
        return made.requires_grad_(wanted)

    def run(self, run: Run, carry_def: Any, x: PyTree, ys: list[PyTree]) -> list[Tensor]:
        """Returns the function's result, flat. `steps` has the steps."""
        given, x_def = self._given, tree_structure(x)
        last = next(iter(reversed(self._notes.tracer.graph.nodes)))
        with self._notes.inside(self._mark):
            args = tree_unflatten(carry_def, given[: self._num_carry]), tree_unflatten(x_def, given[self._num_carry :])
            outs, self.out_def = tree_flatten(run(*args, ys))
        refuse_functions(outs)
        if not _is_traced(outs, self._notes):
            raise CaptureError(
                f"{self._notes.line() or 'a scan'}: the function of a scan returns a tensor that was not"
                " passed and not computed there. Results must be computed in the function: compute the"
                " tensor there, or put the tensor into xs."
            )
        self.steps = list(steps_after(last, self._notes))
        return outs

    def erase(self) -> None:
        """Removes the steps of the last run from the graph."""
        for step in reversed(self.steps):
            self._notes.tracer.graph.erase_node(step.node)

    def looped(
        self, carry: Sequence[Tensor], layers: Sequence[Sequence[Tensor]], ends: Sequence[Node], like: Any
    ) -> tuple[PyTree, list[PyTree]]:
        """Returns the node that runs the body for all layers, and the node's results."""
        notes = self._notes
        nodes = [node_of(t, notes) for t in carry], [[node_of(t, notes) for t in x] for x in layers]
        args = (*nodes, self._nodes, list(ends))
        tracer = notes.tracer
        proxy = tracer.create_proxy("call_function", looped, torch.fx.map_arg(args, tracer.proxy), {})
        (last, y), num = like, len(layers)
        flat, y_flat = tree_leaves(last), tree_leaves(y)
        outs = [_placeholder_like(t) for t in flat] + [_placeholder_like(t) for _ in range(num) for t in y_flat]
        track_tensor_tree(outs, proxy, constant=None, tracer=tracer)
        proxy.node.meta |= {"val": outs, "body": self._mark}
        ys = [outs[len(flat) + i * len(y_flat) :][: len(y_flat)] for i in range(num)]
        last_carry = tree_unflatten(tree_structure(last), outs[: len(flat)])
        return last_carry, [tree_unflatten(tree_structure(y), one) for one in ys]


def _placeholder_like(t: Any) -> Tensor:
    made = without_data(t.fake_mode, t.dtype, t.shape, t.device, t.stride())
    return made.requires_grad_(t.requires_grad)
