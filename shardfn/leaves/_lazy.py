"""Lazy leaves: a parameter that is gathered when an op first uses it, and that the graph does not keep.

`LazyLeaf` has the leaf's shape and dtype and no storage. `__torch_function__` replaces it by the whole tensor when a
real op takes it; metadata costs nothing. `keep_out_of_graph` is the other half: in place of a whole tensor or a view of
it autograd saves (leaf, view geometry), and the backward gathers the leaf again.

A stacked leaf enters as a lazy leaf of lazy leaves: taking a layer by its index, or iterating, opens nothing. A slice
of its layers is a stack again.

If a loss takes derivatives itself, `torch.autograd.grad` gets the tensors at which the gradients of leaves arrive, in
place of the leaves. `torch.func` refuses the saved-tensor hooks that keep whole tensors out of the graph. So the hooks
are off while `torch.func` differentiates, and autograd keeps the whole tensors of that part of the loss until the
backward.
"""

import contextlib
import functools
import numbers
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardfn._torch import (
    clear_interpreter_stack,
    graph_break,
    peek_interpreter_stack,
    pop_saved_hooks,
    push_saved_hooks,
)
from shardfn.capture import alias, capturing, mark, plumbing
from shardfn.collectives import same_axes, transforming
from shardfn.core import Ambient, MetadataTensor, Replaced, saved_tensors_hooks, tree_map

from ._layout import LeafLayout
from ._writes import DATA, Watch, refused_write

_TENSOR: Any = torch.Tensor
_NARROWING = _TENSOR.narrow, torch.narrow
TAKING: Any = {
    *(_TENSOR.__getitem__, _TENSOR.__iter__, _TENSOR.unbind, torch.unbind, _TENSOR.select, torch.select),
    *_NARROWING,
}


def select_layers(func: Any, layers: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
    """Returns the layers that `func` takes from a stack, without opening it.

    Several as a slice. None for other operations.
    """
    if func is _TENSOR.__getitem__:
        first, *rest = args[0] if type(args[0]) is tuple and args[0] else (args[0],)
        if isinstance(first, slice) and not rest and first.step in (None, 1):
            return first if all(isinstance(x, int | None) for x in (first.start, first.stop)) else None
        if not isinstance(first, numbers.Integral) or isinstance(first, bool):
            return None
        layer = layers[int(first)]
        return layer[tuple(rest)] if rest else layer
    if func is _TENSOR.__iter__:
        return iter(layers)
    dim = args[0] if args else kwargs.get("dim", 0)
    if dim != 0:
        return None
    if func in _NARROWING:
        return _narrow_layers(len(layers), **dict(zip(("dim", "start", "length"), args, strict=False)), **kwargs)
    if func in (_TENSOR.unbind, torch.unbind):
        return layers
    return layers[args[1] if len(args) > 1 else kwargs["index"]]


def _narrow_layers(num: int, *, dim: int, start: Any, length: Any) -> slice | None:
    """Returns the layers of a `narrow` along dim 0, or None if torch is to refuse it."""
    del dim
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    start += num if start < 0 else 0
    return slice(start, start + length) if 0 <= start and 0 <= length and start + length <= num else None


class LeafEnds(NamedTuple):
    """The tensors at which the gradient of a leaf arrives.

    Attributes:
        handles: handle; for a stack, a handle per layer.
        stacked: whether it is a stack.
    """

    handles: list[Tensor]
    stacked: bool


def gradients(
    outputs: Any, inputs: Sequence[Any], ends_of: Callable[[Any], LeafEnds | None], **options: Any
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(outputs, inputs)` for inputs that may be lazy leaves.

    Args:
        outputs: tensors.
        inputs: tensors and leaves.
        ends_of: returns the `Ends` of a leaf, or None for a tensor.
        **options: options of `torch.autograd.grad`.

    Raises:
        RuntimeError: an input is not used, and `allow_unused` is not set.
    """
    ends = [ends_of(x) or LeafEnds([x], False) for x in inputs]
    flat = [x for end in ends for x in end.handles]
    # Some layers of a stack may be unused.
    given: dict[str, Any] = options | {"allow_unused": True, "materialize_grads": False}
    found = iter(torch.autograd.grad(outputs, flat, **given))
    grads = [_whole_gradient(end, [next(found) for _ in end.handles]) for end in ends]
    unused = [i for i, g in enumerate(grads) if g is None]
    if unused and not options.get("allow_unused") and not options.get("materialize_grads"):
        raise RuntimeError(
            f"the differentiated tensor at index {unused[0]} appears to not have been used in the graph. Set"
            " allow_unused=True if this is the desired behavior."
        )
    if options.get("materialize_grads"):
        zeros = {i: [torch.zeros_like(x) for x in ends[i].handles] for i in unused}
        grads = [_whole_gradient(ends[i], zeros[i]) if i in zeros else g for i, g in enumerate(grads)]
    return tuple(grads)


def _whole_gradient(end: LeafEnds, grads: Sequence[Tensor | None]) -> Tensor | None:
    like = next((g for g in grads if g is not None), None)
    if like is None or not end.stacked:
        return like
    return torch.stack([torch.zeros_like(like) if g is None else g for g in grads])


def hooks_at_rest(are_ours: Callable[[Any], bool]) -> Replaced:
    """Returns a context that removes our hooks wherever torch.func refuses hooks.

    Args:
        are_ours: whether saved-tensor hooks are ours, from their pack function.
    """

    def resting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def disabled(message: str) -> Iterator[None]:
            ours = []
            while (hooks := saved_tensors_hooks(while_tracing=False)) is not None and are_ours(hooks[0]):
                ours.append(hooks)
                pop_saved_hooks()
            try:
                with original(message):
                    yield
            finally:
                for pack, unpack in reversed(ours):
                    push_saved_hooks(pack, unpack)

        return disabled

    return Replaced(lambda: [(torch.autograd.graph, "disable_saved_tensors_hooks", resting)])


LeafSource = Callable[[int], Tensor]
_FETCH: "Ambient[Callable[[LeafBook, int], Tensor]]" = Ambient("gives the whole tensors of leaves")


class _FetchedLeaf(torch.autograd.Function):
    """handle -> whole tensor. The transpose is the identity, so a handle collects the sum over all uses of its leaf."""

    hands_on = True  # read where the gradients of weights are deferred

    @staticmethod
    def forward(ctx: Any, handle: Tensor, fetch: Callable[[], Tensor]) -> Tensor:
        del ctx, handle
        return fetch()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        del ctx
        return grads[0], None


class LeafBook:
    """The whole tensors that are alive, by storage, so that autograd can be kept from holding them.

    Args:
        source: gives the whole tensor of leaf i.
        leaves: the layout.
        watch: receives the whole tensors, which a loss must not write to.

    Attributes:
        captured: storage -> (path of the leaf, storage), in a capture.
    """

    def __init__(self, source: LeafSource, leaves: Sequence[LeafLayout], watch: Watch | None = None) -> None:
        self._source, self.leaves, self.watch = source, leaves, watch or Watch()
        self.captured: dict[int, tuple[str, Any]] = {}
        self._known: dict[int, tuple[int, int, StorageWeakRef]] = {}

    def fetch(self, leaf: int) -> Tensor:
        """Returns the whole tensor of a leaf, as a fresh alias."""
        if (fetch := _FETCH.innermost()) is not None:
            return fetch(self, leaf)
        # No op of the loss: remat's policy must not number it, as a recomputation may find the leaf still there.
        with plumbing():
            whole = self._source(leaf)
        self.note(leaf, whole)
        mark(whole, "whole_of", self.leaves[leaf].entry)
        # Autograd makes the tensor that a Function returns its result. This one the source may give to other uses.
        return alias(whole)

    def note(self, leaf: int, whole: Tensor) -> None:
        """Records the whole tensor of a leaf."""
        storage = whole.untyped_storage()
        # A weak reference keeps the StorageImpl's address from being reused, so the key stays unambiguous.
        known = self._known.get(storage._cdata)
        if known is None:
            self._known[storage._cdata] = (leaf, whole._version, StorageWeakRef(storage))
            self.look_after(self.leaves[leaf].path, whole)
        else:
            # Requested again while it is alive, it has the same memory.
            self._check_unchanged(known, whole)

    def look_after(self, path: str, whole: Tensor) -> None:
        """Watches a tensor of a leaf for writes."""
        if capturing():
            self.captured[whole.untyped_storage()._cdata] = path, whole.untyped_storage()
        elif not transforming():  # where tensors cannot be emptied, and are checked when they are saved alone
            with plumbing():
                self.watch.add(path, whole)

    def forget_dead(self) -> None:
        """Drops the entries of tensors that are gone."""
        self._known = {k: v for k, v in self._known.items() if not v[2].expired()}
        self.watch.forget_dead()

    @contextlib.contextmanager
    def keep_out_of_graph(self) -> Iterator[None]:
        """While it is active, autograd saves (leaf, geometry) in place of whole tensors and their views."""
        with _RESTING, torch.autograd.graph.saved_tensors_hooks(self._pack_saved, self._unpack_saved):
            yield

    def _pack_saved(self, x: Tensor) -> Any:
        if type(x) is LazyLeaf:  # saved by a Function that received the leaf itself
            return x._to_saved()
        known = self._known.get(x.untyped_storage()._cdata)
        if known is None:
            return x
        self._check_unchanged(known, x)
        # No reference to the memory: so a whole leaf may die before the backward.
        return known[0], x.size(), x.stride(), x.storage_offset()

    def values_of(self, saved: "_SavedLeaf") -> Tensor:
        """Returns the whole tensor of a leaf, without a link to its handle."""
        layers = [self.fetch(x.number) if type(x) is LazyLeaf else x for x in saved.layers]
        return torch.stack(layers) if saved.stacked else layers[0]

    def _check_unchanged(self, known: tuple[int, int, StorageWeakRef], x: Tensor) -> None:
        if x._version != known[1]:  # a TypeError would make Python try the reflected operator
            raise refused_write(f"{self.leaves[known[0]].path} is written to inside the loss, through a view of it")

    def _unpack_saved(self, saved: Any) -> Tensor:
        if type(saved) is _SavedLeaf:
            return self.values_of(saved)
        if type(saved) is not tuple:
            return saved
        leaf, size, stride, offset = saved
        return self.fetch(leaf).as_strided(size, stride, offset)


_RESTING = hooks_at_rest(lambda pack: packs_leaves(pack))


def fetching(fetch: Callable[[LeafBook, int], Tensor]) -> AbstractContextManager[Any]:
    """Lets `fetch` give the whole tensors of leaves."""
    return _FETCH.bound(fetch)


def packs_leaves(pack: Any) -> bool:
    """Returns whether a saved-tensor hook is the hook of `keep_out_of_graph`."""
    return isinstance(getattr(pack, "__self__", None), LeafBook)


class _SavedLeaf(NamedTuple):
    """A lazy leaf that autograd saved, by its layers."""

    layers: tuple[Any, ...]
    stacked: bool


class LazyLeaf(MetadataTensor):
    """A parameter that arrives when it is used. Behaves as the whole tensor; must not be written to.

    Attributes:
        number: index in the layout.
        handle: the tensor at which its gradient arrives; for a stacked leaf that of its first layer.
    """

    computed: ClassVar[frozenset[Any]] = frozenset({_TENSOR.requires_grad.__get__})

    number: int
    handle: Tensor
    _book: Any
    _path: str
    _layers: tuple[Tensor, ...]

    @staticmethod
    def make(index: int, path: str, handle: Tensor, book: LeafBook) -> "LazyLeaf":
        """Returns the lazy leaf of `handle`'s shape, dtype and device."""
        leaf = _link_handles(handle)
        # Weakly: a lazy leaf that escapes from a loss must not keep the step's gatherer alive.
        leaf.number, leaf._path, leaf.handle, leaf._book = index, path, handle, weakref.proxy(book)
        leaf._layers = ()
        return leaf

    @staticmethod
    def stack(path: str, layers: Sequence[Tensor], book: LeafBook) -> "LazyLeaf":
        """Returns the stack of `layers`, lazy leaves or tensors of the same shape."""
        return LazyLeaf._stack_layers(path, layers, weakref.proxy(book))

    @staticmethod
    def _stack_layers(path: str, layers: Sequence[Tensor], book: Any) -> "LazyLeaf":
        handles = [x.handle if type(x) is LazyLeaf else x for x in layers]
        leaf = _link_handles(*handles, stacked=True)
        leaf._path, leaf._layers, leaf._book = path, tuple(layers), book
        leaf.handle = handles[0]
        same_axes(leaf, layers[0])
        return leaf

    def _take_layers(self, which: slice) -> "LazyLeaf | None":
        """Returns the stack of some layers, or None without any."""
        layers = self._layers[which]
        return LazyLeaf._stack_layers(self._path, layers, self._book) if layers else None

    def with_handle(self, handle: Tensor) -> "LazyLeaf":
        """The same leaf, whose gradient arrives at another handle."""
        leaf = _link_handles(handle)
        leaf.number, leaf._path, leaf.handle, leaf._book, leaf._layers = self.number, self._path, handle, self._book, ()
        same_axes(leaf, self)
        return leaf

    def whole(self) -> Tensor:
        """Returns the whole tensor, connected to the handle that collects its gradient."""
        if torch.compiler.is_compiling() or peek_interpreter_stack() is None:
            return self._open_stack()
        # A constant of a transform of torch.func inside the loss; autograd follows it outside of the transform.
        with clear_interpreter_stack():
            return self._open_stack()

    def _open_stack(self) -> Tensor:
        if self._layers:
            out = torch.stack([_gather_argument(x) for x in self._layers])
            self._book.look_after(self._path, out)
            return same_axes(out, self)
        book, index = self._book, self.number
        # One node of autograd per use: their gradients are summed at the handle, whose hook sees the sum.
        if self.handle.requires_grad and torch.is_grad_enabled():
            out: Any = _FetchedLeaf.apply(self.handle, lambda: book.fetch(index))
            return same_axes(out, self)
        return same_axes(book.fetch(index), self)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Opens the leaves that the function is given."""
        if func in cls.computed:
            return args[0].handle.requires_grad
        if torch.compiler.is_dynamo_compiling():
            graph_break(_DYNAMO)
        if func in TAKING and type(args[0]) is LazyLeaf and args[0]._layers:
            taken = select_layers(func, args[0]._layers, *args[1:], **kwargs)
            if isinstance(taken, slice):
                taken = args[0]._take_layers(taken)
            if taken is not None:
                return taken
        if func is torch.autograd.grad:
            return gradients(
                _gather_argument(args[0]), args[1], lambda x: x.ends() if type(x) is LazyLeaf else None, **kwargs
            )
        _refuse_writes(func, args)
        if func == DATA:  # which would hide writes to it
            return _gather_argument(args[0]).detach()
        args = tuple(_gather_argument(a) for a in args)
        return func(*args, **{k: _gather_argument(v) for k, v in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Opens leaves that passed by `__torch_function__`, as arguments of a transform of torch.func do.

        Autograd has noted already that the result depends on them. See `_Joined`.
        """
        del types
        for a, x in zip(func._schema.arguments, args, strict=False):
            if a.alias_info is not None and a.alias_info.is_write:
                _refuse_write(x, str(func))
        args, kwargs = tree_map(_gather_arguments, (tuple(args), kwargs or {}))  # pyright: ignore[reportGeneralTypeIssues]
        return func(*args, **kwargs)

    def ends(self) -> LeafEnds:
        """Returns the tensors at which its gradient arrives: its handle; for a stack, a handle per layer."""
        return LeafEnds([x.handle if type(x) is LazyLeaf else x for x in self._layers or (self,)], bool(self._layers))

    def _to_saved(self) -> "_SavedLeaf":
        return _SavedLeaf(self._layers or (self,), bool(self._layers))


_DYNAMO = (
    "torch.compile cannot trace a parameter that a step gathers when it is used (ZeRO stage 3), so this operation runs"
    ' outside of its graph, which fullgraph=True refuses. Compile the whole step, sf.jit(loss, backend="inductor"), or'
    " leave out fullgraph=True."
)


class _Joined(torch.autograd.Function):
    """handles -> lazy leaf: gradients of code that bypasses `__torch_function__`, as a Function's `apply`, end here."""

    @staticmethod
    def forward(ctx: Any, stacked: bool, *handles: Tensor) -> Tensor:
        ctx.stacked = stacked
        shape = handles[0].shape
        return _make_wrapper((len(handles), *shape) if stacked else shape, handles[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *(grads[0].unbind(0) if ctx.stacked else grads)


def _link_handles(*handles: Tensor, stacked: bool = False) -> Any:
    return _Joined.apply(stacked, *handles)


def _make_wrapper(shape: Sequence[int], like: Tensor) -> Any:
    return LazyLeaf.empty(shape, like.dtype, like.device)


def opened(x: Any) -> Any:
    """Returns a lazy leaf's whole tensor; other values unchanged."""
    return x.whole() if type(x) is LazyLeaf else x


def _gather_argument(x: Any) -> Any:
    if type(x) is LazyLeaf:
        return x.whole()
    if type(x) in (list, tuple):
        return type(x)(_gather_argument(y) for y in x)
    return x


def _gather_arguments(x: Any) -> Any:
    return x._book.values_of(x._to_saved()) if type(x) is LazyLeaf else x


_AUGMENTED = frozenset(
    f"__i{name}__" for name in "add sub mul truediv div floordiv mod pow and or xor lshift rshift matmul".split()
)


def _refuse_writes(func: Any, args: Any) -> None:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if args and (in_place or name in ("__setitem__", "__set__") or name in _AUGMENTED):
        _refuse_write(args[0], name)


def _refuse_write(x: Any, name: str) -> None:
    if type(x) is LazyLeaf:
        # No TypeError, for which Python tries x * y in place of x *= y.
        raise refused_write(f"{x._path} is written to inside the loss (by {name})")
