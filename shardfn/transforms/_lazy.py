"""Lazy leaves: a parameter that is gathered when an op first uses it, and that the graph does not keep.

`LazyLeaf` has the leaf's shape and dtype and no storage. `__torch_function__` replaces it by the whole tensor when a
real op
takes it; metadata costs nothing. `keep_out_of_graph` is the other half: what autograd would save of a whole tensor is
saved as (leaf, view geometry), and gathered again when the backward asks for it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._plumbing import plumbing

Source = Callable[[int], Tensor]


class _Whole(torch.autograd.Function):
    """handle -> whole tensor; the transpose is the identity, so a handle collects the sum over all uses of its leaf."""

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
        paths: how errors call the leaves.
    """

    def __init__(self, source: Source, paths: Sequence[str]) -> None:
        self._source, self._paths = source, paths
        self._known: dict[int, tuple[int, int, StorageWeakRef]] = {}

    def fetch(self, leaf: int) -> Tensor:
        """The whole tensor of a leaf, as a fresh alias."""
        with plumbing():
            whole = self._source(leaf)
        storage = whole.untyped_storage()
        # A weak reference keeps the StorageImpl's address from being reused, so the key stays unambiguous.
        known = self._known.get(storage._cdata)
        if known is None:
            self._known[storage._cdata] = (leaf, whole._version, StorageWeakRef(storage))
        else:
            self._check(known, whole)
        return whole.detach()

    def forget_dead(self) -> None:
        """Drops the entries of tensors that are gone."""
        self._known = {k: v for k, v in self._known.items() if not v[2].expired()}

    @contextlib.contextmanager
    def keep_out_of_graph(self) -> Iterator[None]:
        """While it is active, autograd saves (leaf, geometry) in place of whole tensors and their views."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, x: Tensor) -> Any:
        known = self._known.get(x.untyped_storage()._cdata)
        if known is None:
            return x
        self._check(known, x)
        return known[0], x.size(), x.stride(), x.storage_offset()

    def _check(self, known: tuple[int, int, StorageWeakRef], x: Tensor) -> None:
        if x._version != known[1]:  # a TypeError would make Python try the reflected operator
            raise ValueError(
                f"parameter {self._paths[known[0]]} is written to inside the loss, through a view of it; parameters are"
                " immutable there. Write to a clone()."
            )

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is not tuple:
            return saved
        leaf, size, stride, offset = saved
        return self.fetch(leaf).as_strided(size, stride, offset)


class LazyLeaf(torch.Tensor):
    """A parameter that arrives when it is used. Behaves as the tensor it stands for; must not be written to."""

    _index: int
    _handle: Tensor
    _book: Any
    _path: str

    @staticmethod
    def make(index: int, path: str, handle: Tensor, book: LeafBook) -> "LazyLeaf":
        """The lazy leaf of `handle`'s shape, dtype and device."""
        leaf = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            LazyLeaf, handle.shape, dtype=handle.dtype, device=handle.device, requires_grad=False
        )
        leaf._index, leaf._path, leaf._handle, leaf._book = index, path, handle, weakref.proxy(book)
        return leaf

    def whole(self) -> Tensor:
        """The whole tensor, connected to the handle that collects its gradient."""
        book, index = self._book, self._index
        if self._handle.requires_grad and torch.is_grad_enabled():
            return _Whole.apply(self._handle, lambda: book.fetch(index))  # pyright: ignore[reportReturnType]
        return book.fetch(index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is _REQUIRES_GRAD:
            return args[0]._handle.requires_grad
        _refuse_writes(func, args)
        args = tuple(_whole(a) for a in args)
        kwargs = {k: _whole(v) for k, v in kwargs.items()} if kwargs else {}
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"a lazy leaf reached {func} unopened: this op bypasses __torch_function__.")


_TENSOR: Any = torch.Tensor
_REQUIRES_GRAD = _TENSOR.requires_grad.__get__
_METADATA = {
    getattr(_TENSOR, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_leaf",
        "names",
        "itemsize",
        "nbytes",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "grad",
        "grad_fn",
        "_backward_hooks",
    )
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.storage_offset,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


def _whole(x: Any) -> Any:
    if type(x) is LazyLeaf:
        return x.whole()
    if type(x) in (list, tuple):
        return type(x)(_whole(y) for y in x)
    return x


def _refuse_writes(func: Any, args: Any) -> None:
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in (
        "__setitem__",
        "__set__",
        "__iadd__",
        "__imul__",
    )
    if in_place and args and type(args[0]) is LazyLeaf:
        raise TypeError(
            f"{args[0]._path} is written to inside the loss (by {name}); parameters are immutable there."
            " Return the new value as aux, or write to a clone()."
        )
