"""Copies recorded parts of a capture's graph for other values: `Copy`, `traced_once`, `alias`.

To trace an op takes half a millisecond, and to copy a node a tenth as long. A step does the same to each of many
leaves, so such work is traced once.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot
from torch.fx.node import map_arg

from shardfn._torch import DisableTorchDispatch, FakeTensor, ProxyTensor, disable_current_modes, preserve_version
from shardfn.collectives import current_call_site, set_call_site
from shardfn.graph import storage_of, tensors_in

from ._capture import Recorder, recorder


class Written(NamedTuple):
    """Recorded node, as a template of copies.

    Attributes:
        node: node, the key among the steps.
        op: kind of node.
        target: function that the node calls.
        args: arguments, in which nodes are other steps, placeholders, or nodes outside the template.
        kwargs: arguments by name.
        meta: metadata.
    """

    node: Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]


class Copy:
    """Copy of steps: maps the template's nodes and memory to the copy's.

    All tensors of the trace that show the same memory share a version counter, as aliases do in eager mode: the counter
    of the tensor by which the memory came in. So autograd notices a later write to any alias of a saved tensor.
    """

    def __init__(self, recorder: Recorder, outside: dict[int, Any]) -> None:
        self._recorder, self._tracer, self._graph = recorder, recorder.tracer, recorder.tracer.graph
        self._nodes: dict[Node, Node] = {}
        # By memory of the template: the copy's memory, and the shift of the copy's begin in elements.
        self._storages: dict[int, Any] = dict(outside)
        # By memory, an empty tensor with the memory's version counter.
        self._counters: dict[int, Tensor] = {}

    def let(self, node: Node, given: Tensor) -> None:
        """Substitutes a tensor of the trace for the value of `node`."""
        copied = node_of(given, self._recorder)
        self._nodes[node] = copied
        # A layer's leaf may be a view into a stack, and begin elsewhere than the template's leaf.
        for old, new in zip(tensors_in(node.meta["val"]), tensors_in(copied.meta["val"]), strict=True):
            shift = (new.storage_offset() - old.storage_offset()) * new.element_size()  # of another dtype too
            self._storages[storage_of(old)] = new.untyped_storage(), shift
            self._counters[storage_of(new)] = _empty_view(given)

    def fetch(self, step: Written, x: Sequence[Any]) -> None:
        """Fetches this layer's leaf in place of the template's leaf."""
        position, leaf = step.args
        with set_call_site(step.meta.get("where")):
            whole = step.meta["book"].fetch(x[position].number if position >= 0 else leaf)
        self.let(step.node, whole)

    def write(self, step: Written, where: str | None) -> None:
        """Writes a node, with the given line of the user's code."""
        nodes = self._nodes

        def find_value(n: Node) -> Node:
            return nodes.get(n, n)

        # The graph adds numbers to names.
        name = step.node.name.rstrip("0123456789").rstrip("_")
        # Given arguments, the constructor would look through all arguments.
        node = self._graph.create_node(step.op, step.target, (), {}, name)
        node.args = map_arg(step.args, find_value)  # pyright: ignore[reportAttributeAccessIssue]
        if step.kwargs:
            node.kwargs = map_arg(step.kwargs, find_value)  # pyright: ignore[reportAttributeAccessIssue]
        node.meta |= step.meta
        # Not the template's number: the template's backward was traced during the forward.
        node.meta["phase"] = self._recorder.phase
        node.meta.pop("where", None)
        if where is not None:
            node.meta["where"] = where
        if "val" in step.meta:
            node.meta["val"] = self._fresh_value(step.meta["val"])
        nodes[step.node] = node

    def tensor(self, node: Node) -> Tensor:
        """Returns a tensor of the trace with the value of a node's copy."""
        copied = self._nodes.get(node, node)
        val: Any = copied.meta["val"]
        if (key := storage_of(val)) not in self._counters:
            with disable_current_modes():  # the graph is not to hold this call
                self._counters[key] = torch.empty(0, dtype=torch.uint8, device="meta")
        counter = self._counters[key]
        return _track_tensor(
            _make_alias(val, val.untyped_storage(), 0, counter), self._tracer.proxy(copied), self._recorder
        )

    def _fresh_value(self, val: Any) -> Any:
        if isinstance(val, FakeTensor):
            key = storage_of(val)
            # A whole storage for each storage of the template: tensors that share memory there share memory in the
            # copy.
            if key not in self._storages:
                self._storages[key] = torch.UntypedStorage(val.untyped_storage().nbytes(), device="meta"), 0
            return _make_alias(val, *self._storages[key])
        if isinstance(val, (list, tuple)):
            return type(val)([self._fresh_value(v) for v in val])
        return val


def traced_once(key: Hashable, f: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns `f(*tensors)`. While a capture runs, copies the trace of the first call with the same key.

    Args:
        key: key that determines the ops of `f`, together with shapes, strides, dtypes and devices of the tensors.
        f: function of tensors that need no gradient.
        tensors: arguments.
    """
    notes = recorder()
    if notes is None:
        return f(*tensors)
    nodes = [node_of(t, notes) for t in tensors]
    whole_key = key, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    # The key has no values and no nodes: `f` may depend only on the arguments and on `key`.
    known = notes.known.get(whole_key)
    if known is None:
        graph = notes.tracer.graph
        # The nodes after `last` are nodes of `f`, as no other code writes to the graph during the call.
        last = next(iter(reversed(graph.nodes)))
        out = f(*tensors)
        notes.known[whole_key] = nodes, list(steps_after(last, notes)), [node_of(t, notes) for t in out]
        return out
    inputs, steps, ends = known
    copy = Copy(notes, {})
    for node, mine in zip(inputs, tensors, strict=True):
        copy.let(node, mine)
    where = current_call_site()
    for step in steps:
        copy.write(step, where)
    return [copy.tensor(n) for n in ends]


def alias(x: Tensor) -> Tensor:
    """Returns `x.detach()`. While a capture runs, no node is recorded."""
    notes = recorder()
    slot: Any = None if notes is None else get_proxy_slot(x, notes.tracer, None)
    if notes is None or slot is None or not isinstance(x, FakeTensor):
        return x.detach()
    with DisableTorchDispatch():  # a detach that only the tracer does not see: versions are shared
        return _track_tensor(FakeTensor(x.fake_mode, x.detach(), x.fake_device), slot.proxy, notes)


def find_alias() -> Callable[[Tensor], Tensor]:
    """Returns a function like `alias`: while no capture runs, the method itself, which many leaves may call."""
    return Tensor.detach if recorder() is None else alias


def node_of(x: Tensor, notes: Recorder) -> Node:
    """Returns the node of a tensor of the trace."""
    slot: Any = get_proxy_slot(x, notes.tracer)
    return slot.proxy.node


def steps_after(last: Node, notes: Recorder) -> Iterator[Written]:
    """Yields the nodes recorded after a node."""
    node = last.next
    while node is not notes.tracer.graph._root:
        meta = dict(node.meta)
        if node.op == "get_attr":
            meta["constant"] = getattr(notes.tracer.root, str(node.target))
        yield Written(node, node.op, node.target, node.args, node.kwargs, meta)
        node = node.next


def _track_tensor(x: FakeTensor, proxy: Any, notes: Recorder) -> FakeTensor:
    set_proxy_slot(x, notes.tracer, ProxyTensor(proxy, None))
    return x


def _make_alias(like: FakeTensor, storage: Any, shift: int, counter: Tensor | None = None) -> FakeTensor:
    with DisableTorchDispatch(), torch.no_grad():
        meta = torch.empty(0, dtype=like.dtype, device="meta") if counter is None else counter.view(like.dtype)
        with preserve_version(meta):  # this is no write
            meta.set_(storage, like.storage_offset() + shift // like.element_size(), like.shape, like.stride())
        return FakeTensor(like.fake_mode, meta, like.fake_device)


def _empty_view(x: Tensor) -> Tensor:
    """Returns a view of no element of `x`, with the version counter of `x`."""
    with DisableTorchDispatch(), torch.no_grad():
        return x.detach().as_strided((0,), (1,), 0).view(torch.uint8)
