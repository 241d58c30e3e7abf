"""Captures losses that are to be partitioned.

A graph of a forward has operations. Everything else that autograd sees must be noted next to the operations, such as
sections that are recomputed (activation checkpointing) or offloaded, and parts under `no_grad`. Anything that cannot be
noted is an error, such as functions with a custom backward, and hooks. The body of a scan is in the graph once.

Then the graph is rewritten: writes are removed, and products are separated from added terms. Ops that cannot be
rewritten are refused, with the user's lines.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor, track_tensor_tree

from shardfn._torch import FakeTensor, current_graph_task
from shardfn.capture import CaptureError, Recorder, node_of, recorder, steps_after
from shardfn.collectives import transforming
from shardfn.core import (
    PyTree,
    raise_all,
    saved_tensors_hooks,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from shardfn.engine.loss import differing, without_data
from shardfn.graph import LoopMark, find_op, loop_input, looped, where_of, without_writes
from shardfn.nn import Run, is_differentiated, plain_loop


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
    """Part of a loss that ran inside a function of a transform.

    Attributes:
        around: transform, from a function of tensors to a function of the same meaning.
    """

    around: Callable[[Callable[..., Any]], Callable[..., Any]]


class Noting(Recorder):
    """Notes of each op: whether the op is differentiated, the op's loop, and the outermost section in the loop."""

    def __init__(self) -> None:
        super().__init__()
        # The sections that are open at this point of the capture, the outermost first. In a loop's body, only the
        # body's sections.
        self.sections: list[Section] = []
        self._loop: LoopMark | None = None

    @contextlib.contextmanager
    def inside(self, loop: LoopMark) -> Iterator[None]:
        """Notes ops as a loop's while the body runs. Sections that began around the loop do not belong to the body."""
        before = self._loop, self.sections
        self._loop, self.sections = loop, []
        try:
            yield
        finally:
            self._loop, self.sections = before

    def note(self, node: Node) -> None:
        """Notes the facts of a node.

        Raises:
            ValueError: other code has hooks on what autograd saves.
        """
        if current_graph_task() != -1:
            raise ValueError(
                f"{self.line() or 'a line unknown'}: the loss differentiates something itself"
                " (torch.autograd.grad or backward), which the graph of the forward does not hold as such."
                " Use torch.func, or leave out partition."
            )
        if not is_differentiated():
            node.meta["no_grad"] = True
        if self._loop is not None:
            node.meta["loop"] = self._loop
        if self.sections:
            node.meta["section"] = self.sections[0]
        top = saved_tensors_hooks()
        if top is not None and top[0] is not _keep_value:
            raise ValueError(
                f"{self.line() or 'a line unknown'}: partition(loss) does not hold tensors that are"
                " recomputed or moved by saved-tensor hooks, such as torch.utils.checkpoint. Use sf.remat"
                " or sf.offload, or turn the hooks off."
            )


def in_section(around: Callable[[Callable[..., Any]], Callable[..., Any]], f: Callable[[], Any]) -> tuple[bool, Any]:
    """Runs `f` as a section of the loss being captured, or returns (False, None) outside of such a capture."""
    notes = recorder()
    if not isinstance(notes, Noting):
        return False, None
    notes.sections.append(Section(around))
    try:
        return True, f()
    finally:
        notes.sections.pop()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Runs a capture inside a step, without the step's hooks on saved values. Refuses hooks on values."""
    names = "register_hook", "register_post_accumulate_grad_hook"
    before = {name: getattr(torch.Tensor, name) for name in names}

    def refuse_hook(self: Tensor, hook: Any) -> Any:
        del self, hook
        raise ValueError(
            "partition(loss): a hook on a tensor in the loss, Tensor.register_hook, is not in the graph of"
            " the forward. Write a product, or x + (y - x).detach(), or leave out partition."
        )

    for name in names:
        setattr(torch.Tensor, name, refuse_hook)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_keep_value, _keep_value):
            yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


# Torch's names of derivatives of registered ops. The graph holds these ops, and `nn` calls the ops so that
# differentiation is noted. Any other op with such a derivative would be noted as an op without a derivative.
_OPS = "copied_rows", "combined_rows", "multiplied_rows"
_OF_AN_OP = tuple(f"GeneratedBackwardFor_shardfn_kernels_{name}_" for name in _OPS)


def refuse_functions(out: Sequence[Any]) -> None:
    """Refuses operations with a custom backward. A graph of the forward does not hold a custom backward.

    Raises:
        ValueError: there are such operations. The message lists all.
    """
    todo = [x.grad_fn for x in out if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(todo)
    found: set[str] = set()
    while todo:
        fn = todo.pop()
        if isinstance(fn, torch.autograd.function.BackwardCFunction) and not type(fn).__name__.startswith(_OF_AN_OP):
            found.add(type(fn).__name__.removesuffix("Backward"))
        for before, _ in fn.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                todo.append(before)
    raise_all(
        ValueError,
        "partition(loss) holds operations of torch, whose backward it knows. Functions with a backward of their own:",
        [
            "a collective of shardfn; leave it out, or leave out partition: specs alone decide the cuts"
            if name == "_Collective"
            else f"{name}; write it in operations of torch, or leave out partition"
            for name in sorted(found)
        ],
    )


def _keep_value(x: Any) -> Any:
    return x


def record_loop(run: Run, carry: PyTree, layers: Sequence[PyTree]) -> tuple[PyTree, list[PyTree]]:
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


_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.addmm.default: _ATEN.mm.default, _ATEN.baddbmm.default: _ATEN.bmm.default}
# Checks, without an effect on values. By name, since shardfn's check is defined later.
_CHECKS = {"aten._assert_async.msg", "shardfn.check.default"}


def prepare(gm: GraphModule) -> GraphModule:
    """Rewrites a captured forward. See above.

    Raises:
        ValueError: there are ops whose write no operation replaces, or that draw without a key, send, or have an
            effect. The message lists all with the user's lines.
    """
    refused = list(_find_refused(gm)) or list(without_writes(gm))
    raise_all(ValueError, "partition(loss) cannot hold these operations of the loss:", refused)
    for node in list(gm.graph.nodes):
        if node.target in _PRODUCTS and not (node.kwargs or node.args[3:]):
            _split_addmm(gm.graph, node)
    gm.graph.eliminate_dead_code()
    return gm


def _find_refused(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        op, where = find_op(node.target), where_of(node) or "a line unknown"
        space = getattr(node.target, "namespace", "aten")
        if str(node.target) in _CHECKS:
            continue
        if op.channel or space in ("_c10d_functional", "c10d", "shardfn", "shardfn_memory"):
            yield f"{where}: {node.target}, which sends; leave the collectives of the loss to partition, or to specs"
        elif op.draws and not _draws_nothing(node):
            yield f"{where}: {node.target} draws from torch's generator; draw by a key, sf.nn.dropout(key, ...)"
        elif op.effects:
            yield f"{where}: {node.target}, which returns nothing; leave it out"
        elif node.target is _ATEN.as_strided.default:
            yield f"{where}: {node.target} fixes where elements lie, which differs in a block; use views of dims"


def _draws_nothing(node: Node) -> bool:
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and not given.get("dropout_p")


def _split_addmm(graph: Graph, node: Node) -> None:
    """Replaces `addmm(b, x, y)` by `mm(x, y) + b`, so that the sum over ranks can be taken in between."""
    added, x, y = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_PRODUCTS[node.target], (x, y))  # pyright: ignore[reportArgumentType]
        total = graph.call_function(_ATEN.add.Tensor, (product, added))
    product.meta, total.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
