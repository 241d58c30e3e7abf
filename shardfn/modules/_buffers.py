"""Buffers of a module during a forward: constants, which the forward may read and overwrite only for this call."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import FakeTensor, is_functorch_wrapped_tensor

from ._given_tensors import Placed, TensorSlot

WRITES_WHOLE = frozenset({"copy_", "fill_", "zero_"})
# The same values, perhaps elsewhere or in another dtype.
_CONVERTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as", "type"})
_METADATA = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"}
    | {"element_size", "storage_offset", "__len__", "__hash__", "is_tensor"}
)
_NO_WRITES = frozenset({"__index__", "__int__", "__invert__", "__init__", "requires_grad_", "share_memory_"})


class Buffers:
    """Follows a forward's reads and writes of buffers. Must be called with each function before the run.

    Buffers in `state` are ignored: the forward may change them in any way.

    A forward may read a buffer, and may assign a value independent of the old value for the rest of the call: a cache,
    such as rotary frequencies for a longer text. A value that depends on the old value, such as a running mean, is a
    state that the next step would need, and is refused.

    Invariant: `_read` holds the buffers with used values. No function passed to this class writes to the module's
    tensors.
    """

    def __init__(self, placed: Placed, state: frozenset[TensorSlot] = frozenset()) -> None:
        self._placed = placed
        buffers = {n: s for n, s in placed.parts.buffers.items() if s not in state}
        self._tensors = {n: x for n, s in buffers.items() if (x := s.owner._buffers[s.name]) is not None}
        # By identity: equal values in other memory belong to the forward.
        self._known = {id(x): name for name, x in self._tensors.items()}
        self._storages = {x.untyped_storage()._cdata: name for name, x in self._tensors.items() if has_storage(x)}
        self._versions = {name: _version_of(x) for name, x in self._tensors.items()}
        self._read: dict[str, str] = {}
        self._shown: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the id of a known tensor

    def see(self, name: str, x: Tensor) -> None:
        """Records that the named function receives `x`."""
        path = self._known.get(id(x))
        if path is None or name in _METADATA or name in _CONVERTS:
            return
        if self._current_buffer(path) is self._tensors[path]:
            self._read.setdefault(path, name)
        elif x is self._tensors[path]:
            raise ValueError(
                f"the forward assigns to {name} an old value of the buffer {path!r}, which it has replaced. Read the"
                " buffer again by its name."
            )

    def converted(self, name: str, x: Any, out: Any) -> None:
        """Records the result of the named function applied to `x`."""
        path = self._known.get(id(x))
        if path is not None and name in _CONVERTS and isinstance(out, Tensor) and out is not x:
            self._kept.append(out)
            self._known[id(out)] = path

    def shown(self, x: Any, out: Tensor) -> None:
        """Records that `out` is an attribute of `x`, in the same memory."""
        path = self._known.get(id(x))
        if path is not None and x is self._tensors[path]:
            self._kept.append(out)
            self._shown[id(out)] = path

    def check_write(self, name: str, where: Any) -> None:
        """Refuses to write to a buffer or to a view of a buffer.

        Raises:
            ValueError: names the buffer, and the remedy.
        """
        for x in tensors_of(where):
            path = self._find_path(x)
            if path is not None:
                raise ValueError(self._explain_refusal(path, f"writes to it ({name})"))

    def check_data(self, x: Any) -> None:
        """Refuses to give a buffer other memory, by `x.data = ...`.

        Raises:
            ValueError: names the buffer, and the remedy.
        """
        path = self._known.get(id(x))
        if path is not None and x is self._tensors[path]:
            raise ValueError(self._explain_refusal(path, "gives it other memory (.data = ...)"))

    def overwrites(self, name: str, x: Any) -> bool:
        """Returns whether a function writes a buffer whole."""
        return name in WRITES_WHOLE and id(x) in self._known and x is self._tensors[self._known[id(x)]]

    def overwrite(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the buffer's value until the end of the call. The module's buffer is not changed."""
        path = self._known[id(x)]
        if path in self._read:
            raise ValueError(
                self._explain_refusal(path, f"reads it ({self._read[path]}) and then writes it ({func.__name__})")
            )
        slot = self._placed.parts.buffers[path]
        # Not applied to `x`: a buffer that is written whole does not need the old values, and the module keeps the old
        # values.
        new = func(torch.empty_like(x), *args, **kwargs)
        slot.owner._buffers[slot.name] = new
        return new

    def check(self) -> None:
        """Refuses values assigned from old values, and writes that bypassed torch's functions.

        Raises:
            ValueError: names the buffer, and the remedy.
        """
        for path, x in self._tensors.items():
            now = self._current_buffer(path)
            if path in self._read and now is not x and not _is_equal(now, x):
                raise ValueError(
                    self._explain_refusal(path, f"reads it ({self._read[path]}) and then assigns another value to it")
                )
            if _version_of(x) != self._versions[path]:
                raise ValueError(
                    self._explain_refusal(
                        path, "has written to it, past torch's functions, so that it has another value now"
                    )
                )

    def _current_buffer(self, path: str) -> Any:
        slot = self._placed.parts.buffers[path]
        return slot.owner._buffers.get(slot.name)

    def _find_path(self, x: Tensor) -> str | None:
        """Returns the path of the buffer in the memory of `x`."""
        for y in (x, x if x._base is None else x._base):
            if id(y) in self._shown:
                return self._shown[id(y)]
            known = self._known.get(id(y))
            if known is not None and y is self._tensors[known]:
                return known
        return self._storages.get(x.untyped_storage()._cdata) if has_storage(x) else None

    def _explain_refusal(self, path: str, what: str) -> str:
        where, _, name = path.rpartition(".")
        sub = self._placed.parts.buffers[path].owner
        evaluated = f"module.get_submodule({where!r}).eval()" if where else "module.eval()"
        return (
            f"the forward of {where or 'the module'} ({type(sub).__name__}) changes its buffer {name!r}: it {what}. A"
            " step would lose such a state: ranks would change it each by its own rows, and a recomputation would"
            f" change it twice. If it changes in training only, {evaluated} makes it a constant; or use a layer that"
            " keeps no statistics, such as LayerNorm or GroupNorm; or hand it on as model state:"
            " from_module(module, has_state=True)."
        )


def writes(name: str) -> bool:
    """Returns whether the named function writes to the first argument."""
    if name in _NO_WRITES:
        return False
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments, and in lists and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif type(x) in (list, tuple):
        for y in x:
            yield from tensors_of(y)


def has_storage(x: Tensor) -> bool:
    """Returns whether a tensor has memory."""
    if is_functorch_wrapped_tensor(x):
        return False
    return x.layout == torch.strided and type(x) in (Tensor, nn.Parameter, FakeTensor)


def _version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _is_equal(a: Any, b: Tensor) -> bool:
    if type(a) is not Tensor or type(b) is not Tensor or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b)
