"""A layer of a scan, traced separately while a step is captured, to be copied for the other layers.

The layer's function runs on placeholders of the arguments, forward and, by `torch.autograd.grad`, backward. The added
nodes are taken out of the graph again and kept as steps. Two kinds of step are not ops of the graph but calls of the
engine, which counts gathers and reductions: a leaf that is fetched, and a gradient that arrives.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_meta, track_tensor

from shardfn._torch import DisableTorchDispatch, FakeTensor, FakeTensorMode
from shardfn.capture import CaptureError, Recorder, Written, node_of, steps_after
from shardfn.collectives import same_axes
from shardfn.core import saved_tensors_hooks
from shardfn.graph import storage_of
from shardfn.leaves import LazyLeaf, LeafBook, fetching, packs_leaves

# A function of a layer's flat arguments: carry and x -> the leaves of the result.
Body = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
Layouts = tuple[tuple[int, ...] | None, ...]


class TemplateBackward(NamedTuple):
    """Backward of a template for some outputs.

    Attributes:
        steps: steps.
        cotangents: placeholder of the cotangent by output, or None.
        grads: node of the gradient by input, or None for a gradient that arrives by a step, or not at all.
    """

    steps: list[Written]
    cotangents: list[Node | None]
    grads: list[Node | None]


class Unfit(Exception):
    """Error of a layer with steps that cannot be copied for other layers, with the reason."""


def stand_in() -> Any:
    """Is the target of nodes that are placeholders of arguments."""


def fetched(position: int, leaf: int) -> Any:
    """Marks a node, as target, that fetches a leaf: of x at `position`, or, at -1, always the same leaf."""


def arrived(position: int, grad: Any) -> Any:
    """Marks a node, as target, with the gradient of x at `position` as argument."""


class Template:
    """Steps of a layer.

    Args:
        body: the layer's function.
        carry: tensors like the carry.
        x: the layer's leaves.
        recorder: recorder of the capture that is running.

    Attributes:
        inputs: the placeholders of carry and x.
        steps: the steps of the forward.
        outs: source of each leaf that the body returns: "carry" or "x" and a position for the same tensor, or "value"
            and a position.
        values: the nodes of the returned values.
        differentiable: whether each value has a gradient.
        saved: the nodes of the forward that the backward needs.
        outside: the nodes of other parts of the graph that the template needs.

    Raises:
        Unfit: the body's steps cannot be copied for other layers.
        CaptureError: the body writes to a tensor from outside.
    """

    def __init__(self, body: Body, carry: Sequence[Tensor], x: Sequence[Tensor], recorder: Recorder) -> None:
        self._recorder, self._tracer, self._mode = recorder, recorder.tracer, _fake_mode([*carry, *x])
        self._positions = {t.number: j for j, t in enumerate(x) if type(t) is LazyLeaf}
        self._num_carry = len(carry)
        # The tensors at which gradients arrive, for either kind of leaf.
        ends = [t.handle if type(t) is LazyLeaf else t for t in x]
        if any(get_proxy_slot(t, self._tracer, None) is None for t in (*carry, *ends)):
            raise Unfit("an argument is not a value of the captured program")
        with self._take_out_nodes() as steps:
            self._given = [same_axes(self._stand_in(t).requires_grad_(t.requires_grad), t) for t in carry]
            handles = [self._stand_in(t).requires_grad_(t.requires_grad) for t in ends]
            for handle, t in zip(handles, x, strict=True):
                same_axes(handle, t)
            xs = [t.with_handle(h) if type(t) is LazyLeaf else h for t, h in zip(x, handles, strict=True)]
            for j, handle in enumerate(handles):
                if handle.requires_grad:
                    # As the engine hears of a gradient in eager steps: when autograd has summed the uses in this layer.
                    handle.register_hook(lambda grad, j=j: self._arrive(j, grad))
            self._given += handles
            self.inputs = [self._node(t) for t in self._given]
            with self._hooks():
                returned = body(self._given[: len(carry)], xs)
            self._values: list[Tensor] = []
            self.outs = [self._out(t, xs) for t in returned]
            self.values = [self._node(t) for t in self._values]
        self.steps = [s for s in steps if s.target is not stand_in]
        self.differentiable = [t.requires_grad for t in self._values]
        self._refuse_outside_gradients()
        # Stand-ins are new, so any write shows in the version.
        if any(t._version for t in self._given):
            raise Unfit("it writes to its arguments")
        given = {storage_of(t) for t in self._given}
        strided = [s for s in self.steps if s.target is torch.ops.aten.as_strided.default]
        if any(storage_of(s.meta["val"]) in given for s in strided):
            raise Unfit("it uses as_strided on an argument, whose place in memory differs from layer to layer")
        self._backwards: dict[Layouts, TemplateBackward] = {}
        # With all cotangents: this backward needs every value of the forward that a backward with fewer cotangents
        # needs.
        full = self.backward(self.layouts)
        mine = {s.node for s in self.steps} | set(self.inputs)
        theirs = {s.node for s in full.steps} | {n for n in full.cotangents if n is not None}
        used = dict.fromkeys(n for s in full.steps for n in _nodes_in((s.args, s.kwargs)))
        used |= dict.fromkeys(n for n in full.grads if n is not None)
        self.saved = [n for n in used if n in mine]
        used |= dict.fromkeys(n for s in self.steps for n in _nodes_in((s.args, s.kwargs)))
        self.outside = [n for n in used if n not in mine and n not in theirs]
        self._refuse_outside_writes()

    @property
    def made(self) -> Sequence[Tensor]:
        """Returns the tensors of `values`."""
        return self._values

    @property
    def layouts(self) -> Layouts:
        """Returns the strides of cotangents that have the strides of their values."""
        return tuple(t.stride() if t.requires_grad else None for t in self._values)

    def backward(self, given: Layouts) -> TemplateBackward:
        """Returns the backward for cotangents of the values with these strides.

        None for a value without a cotangent.
        """
        if given not in self._backwards:
            self._backwards[given] = self._differentiate(given)
        return self._backwards[given]

    def _differentiate(self, given: Layouts) -> TemplateBackward:
        wanted = [t for t in self._given if t.requires_grad]
        if not wanted or all(stride is None for stride in given):
            return TemplateBackward([], [None] * len(given), [None] * len(self._given))
        with self._take_out_nodes() as steps, self._recorder.below():
            pairs = list(zip(self._values, given, strict=True))
            seeds = [None if stride is None else self._stand_in(t, stride) for t, stride in pairs]
            outs = [t for t, stride in pairs if stride is not None]
            into = [s for s in seeds if s is not None]
            # Kept: other strides of cotangents, or fewer cotangents, run the backward again.
            got = iter(torch.autograd.grad(outs, wanted, into, allow_unused=True, retain_graph=True))
            grads = [next(got) if t.requires_grad else None for t in self._given]
            mine = grads[: self._num_carry]
            nodes = [None if g is None else self._node(g) for g in mine]
            cotangents = [None if s is None else self._node(s) for s in seeds]
        kept = [s for s in steps if s.target is not stand_in]
        return TemplateBackward(kept, cotangents, nodes + [None] * (len(self._given) - self._num_carry))

    @contextlib.contextmanager
    def _take_out_nodes(self) -> Iterator[list[Written]]:
        """Takes the nodes that are added to the graph inside out again, as steps."""
        graph = self._tracer.graph
        last, steps = next(iter(reversed(graph.nodes))), []
        with fetching(self._fetch):
            yield steps
        steps += steps_after(last, self._recorder)
        # The last first: a node goes when nothing uses the node any more.
        for step in reversed(steps):
            graph.erase_node(step.node)

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Sets hooks by which autograd saves all tensors but whole leaves, even inside a remat."""
        top = saved_tensors_hooks(while_tracing=False)
        if top is None or packs_leaves(top[0]):
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            yield

    def _fetch(self, book: LeafBook, leaf: int) -> Tensor:
        layout, position = book.leaves[leaf], self._positions.get(leaf, -1)
        whole = without_data(self._mode, layout.dtypes.compute, layout.block, self._given[0].device)
        self._write(fetched, (position, -1 if position >= 0 else leaf), whole).meta["book"] = book
        # So that autograd saves the whole as (leaf, geometry), and the backward has a step that fetches.
        book.note(leaf, whole)
        return whole

    def _arrive(self, position: int, grad: Tensor) -> None:
        self._tracer.create_proxy("call_function", arrived, (position, self._tracer.proxy(self._node(grad))), {})

    def _stand_in(self, like: Tensor, stride: Sequence[int] | None = None) -> Tensor:
        made = without_data(self._mode, like.dtype, like.shape, like.device, stride or like.stride())
        self._write(stand_in, (), made)
        return made

    def _write(self, target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
        proxy = self._tracer.create_proxy("call_function", target, args, {})
        track_tensor(value, proxy, constant=None, tracer=self._tracer)
        set_meta(proxy, value)
        return proxy.node

    def _node(self, x: Tensor) -> Node:
        return node_of(x, self._recorder)

    def _out(self, x: Tensor, xs: Sequence[Tensor]) -> tuple[str, int]:
        for kind, among in (("carry", self._given[: self._num_carry]), ("x", xs)):
            for i, y in enumerate(among):
                if x is y:
                    return kind, i
        if not isinstance(x, FakeTensor) or get_proxy_slot(x, self._tracer, None) is None:
            raise Unfit("it returns a tensor that it was not given and has not computed")
        found = next((i for i, y in enumerate(self._values) if x is y), None)
        if found is None:
            self._values.append(x)
        return "value", len(self._values) - 1 if found is None else found

    def _refuse_outside_gradients(self) -> None:
        inside = {id(t) for t in self._given}
        stack: list[Any] = [t.grad_fn for t in self._values]
        seen = set()
        while stack:
            fn = stack.pop()
            if fn is None or fn in seen:
                continue
            seen.add(fn)
            # The gradient would arrive once, where each copy of the layer owes a gradient.
            if hasattr(fn, "variable") and id(fn.variable) not in inside:
                raise Unfit("it uses a tensor that requires a gradient and is neither in the carry nor in xs")
            stack += [g for g, _ in fn.next_functions]

    def _refuse_outside_writes(self) -> None:
        outside = {*self.outside, *(s.node for s in self.steps if s.op == "get_attr")}
        for step in self.steps:
            schema = getattr(step.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            for argument, value in zip(schema.arguments, step.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(n in outside for n in _nodes_in(value)):
                    raise CaptureError(
                        f"{step.meta.get('where') or 'in a scan'}: the function of a scan writes to a tensor from"
                        f" outside ({step.target}). Return the new value in the carry."
                    )


def check_same(one: Template, other: Template) -> None:
    """Refuses layers that do not run the same operations.

    Raises:
        CaptureError: layers differ. The message names the first different op, by line.
    """
    # From nodes of the first run to their counterparts in the second run. A node outside of both must be the same in
    # both.
    pairs: dict[Any, Any] = dict(zip(one.inputs, other.inputs, strict=True))
    a, b = one.backward(one.layouts), other.backward(other.layouts)
    differing(one.steps, other.steps, pairs, one.values, other.values)
    pairs |= zip(a.cotangents, b.cotangents, strict=False)
    differing(a.steps, b.steps, pairs, a.grads, b.grads)
    if not (one.outs == other.outs and one.differentiable == other.differentiable):
        raise CaptureError(f"{_DIFFERS} Two layers return different values.")


def differing(
    first: Sequence[Written],
    second: Sequence[Written],
    pairs: dict[Any, Any],
    ends: Sequence[Any],
    others: Sequence[Any],
) -> None:
    """Refuses two runs of a layer with different steps.

    Args:
        first: the steps of the first run.
        second: the steps of the second run.
        pairs: node of the first run -> node of the second run, where the two differ. Nodes of the runs are added.
        ends: the nodes that the first run returns.
        others: the nodes that the second run returns.

    Raises:
        CaptureError: layers differ. The message names the first different op, by line.
    """
    for s, t in zip(first, second, strict=False):
        if not _alike(s, t, pairs):
            raise CaptureError(_differ(s, t))
        pairs[s.node] = t.node
    if len(first) != len(second):
        longer = max(first, second, key=len)
        raise CaptureError(_differ(longer[min(len(first), len(second))], None))
    if len(ends) != len(others) or any(pairs.get(x, x) is not y for x, y in zip(ends, others, strict=True)):
        raise CaptureError(f"{_DIFFERS} Two layers return different values.")


def without_data(
    mode: FakeTensorMode, dtype: torch.dtype, size: Any, device: torch.device, stride: Any = None
) -> FakeTensor:
    """Returns a new tensor without data and without a node in the graph, contiguous unless `stride` is given."""
    with DisableTorchDispatch():
        meta = torch.empty(size, dtype=dtype, device="meta")
        return FakeTensor(mode, meta if stride is None else meta.as_strided(size, stride), device)


_DIFFERS = (
    "the function of a scan must run the same operations for all layers, since a capture records them for one layer."
    " The function must be pure, and values that differ between layers must be in xs."
)


def _differ(s: Written, t: Written | None) -> str:
    where = s.meta.get("where") or (t and t.meta.get("where")) or "somewhere"
    return f"{where}: {_DIFFERS} One layer does {_step_text(s)}, another {'nothing' if t is None else _step_text(t)}."


def _step_text(step: Written) -> str:
    shown = [f"{a.name}" if isinstance(a, Node) else repr(a) for a in step.args]
    return f"{step.target}({', '.join(shown)})"


def _alike(s: Written, t: Written, pairs: dict[Any, Any]) -> bool:
    if s.op != t.op or not _same_value((s.args, s.kwargs), (t.args, t.kwargs), pairs):
        return False
    if s.op == "get_attr":
        return _same_constant(s.meta["constant"], t.meta["constant"])
    return s.target is t.target and _same_meta(s.meta.get("val"), t.meta.get("val"))


def _same_value(a: Any, b: Any, pairs: dict[Any, Any]) -> bool:
    if isinstance(a, Node):
        return pairs.get(a, a) is b
    if isinstance(a, (list, tuple)):
        return (
            isinstance(b, (list, tuple))
            and len(a) == len(b)
            and all(_same_value(x, y, pairs) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same_value(v, b[k], pairs) for k, v in a.items())
    return type(a) is type(b) and (a == b or a is b or repr(a) == repr(b))


def _same_constant(x: Any, y: Any) -> bool:
    if x is y:
        return True
    real = isinstance(x, Tensor) and isinstance(y, Tensor) and not isinstance(x, FakeTensor)
    return real and not isinstance(y, FakeTensor) and x.dtype == y.dtype and torch.equal(x, y)


def _same_meta(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same_meta, a, b))
    return a == b


def _nodes_in(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _nodes_in(v)]
    return [n for v in value.values() for n in _nodes_in(v)] if isinstance(value, dict) else []


def _fake_mode(tensors: Sequence[Tensor]) -> FakeTensorMode:
    for x in tensors:
        x = x.handle if type(x) is LazyLeaf else x
        if isinstance(x, FakeTensor):
            return x.fake_mode
    raise Unfit("it has no argument that is captured")
