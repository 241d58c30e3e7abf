"""Dtypes in which the parts of a module compute if parameters arrive in other dtypes."""

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.core import Ambient, tree_leaves, tree_map

from ._module_parts import ModuleParts

_COMPUTE = Ambient[tuple[torch.dtype | None]]("dtype in which the loss computes", by_thread=True)
# (own dtype, dtype of the given parameter) -> number of elements.
_Moves = collections.Counter[tuple[torch.dtype, torch.dtype]]


class Casts(NamedTuple):
    """Casts that follow from a change of the parameters' dtypes.

    Attributes:
        buffers: new dtype of each buffer that changes.
        apart: submodules with a separate dtype, and the dtype.
        main: dtype of everything else, or None if not needed.
    """

    buffers: dict[str, torch.dtype]
    apart: dict[str, torch.dtype]
    main: torch.dtype | None


def computing_in(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Sets the dtype in which the loss computes, except for a policy's exceptions. None means unknown."""
    return _COMPUTE.bound((dtype,))


def compute_dtype() -> torch.dtype | None:
    """Returns the dtype set by `computing_in`, or None if unknown."""
    bound = _COMPUTE.innermost()
    return bound[0] if bound else None


def casts(
    parts: ModuleParts,
    own: Mapping[str, torch.dtype],
    given: Mapping[str, torch.dtype],
    keep: Sequence[str],
    compute: torch.dtype | None,
) -> Casts:
    """Returns the casts for parameters of dtypes `given` in a module with dtypes `own`.

    A floating-point buffer changes like the nearest parameters of equal dtype, as by `module.to(dtype)`, unless a
    pattern of `keep` matches in the name. A submodule with parameters of a single dtype other than `compute` (or other
    than the narrowest, if `compute` is not known) computes in the single dtype, for example a norm in float32 under
    bfloat16.
    """
    floating = {n: (own[n], d) for n, d in given.items() if own[n].is_floating_point and d.is_floating_point}
    if all(a == b for a, b in floating.values()):
        return Casts({}, {}, compute)
    moves: dict[str, _Moves] = collections.defaultdict(collections.Counter)
    direct: dict[str, set[torch.dtype]] = collections.defaultdict(set)
    for name, move in floating.items():
        owner = name.rpartition(".")[0]
        direct[owner].add(move[1])
        slot = parts.params[name]
        size = max(1, slot.owner._parameters[slot.name].numel())  # pyright: ignore[reportOptionalMemberAccess]
        for path in _list_ancestors(owner):
            moves[path][move] += size
    # Exceptions are wider than the rest, unless a policy makes them narrower. `compute` is then known.
    main = compute or min((to for _, to in moves[""]), key=lambda d: d.itemsize)
    buffers = {}
    for name, slot in parts.buffers.items():
        dtype = slot.owner._buffers[slot.name].dtype  # pyright: ignore[reportOptionalMemberAccess]
        if dtype.is_floating_point and not any(re.search(p, name) for p in keep):
            to = _nearest_dtype(moves, name.rpartition(".")[0], dtype, main)
            if to not in (None, dtype):
                buffers[name] = to
    wide = {path: max(dtypes, key=lambda d: d.itemsize) for path, dtypes in direct.items() if main not in dtypes}
    return Casts(buffers, wide, main)


def forwards(parts: ModuleParts, found: Casts) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Returns the forwards of the submodules with a separate dtype.

    Such a forward casts inputs to the dtype, and results back.
    """
    assert found.main is not None or not found.apart
    unique = {id(parts.modules[path]): (parts.modules[path], dtype) for path, dtype in found.apart.items()}
    return [(sub, _computing_in(dtype, found.main, sub.forward)) for sub, dtype in unique.values()]


def _computing_in(dtype: torch.dtype, main: torch.dtype | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run_in_dtype(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        came = next((x.dtype for x in tensors if x.is_floating_point()), main)
        if not tensors or came is None:
            return forward(*args, **kwargs)
        args, kwargs = tree_map(lambda x: _cast_tensor(x, dtype), (args, kwargs))  # pyright: ignore[reportGeneralTypeIssues]
        return tree_map(lambda x: _cast_tensor(x, came), forward(*args, **kwargs))

    return run_in_dtype


def _cast_tensor(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _list_ancestors(path: str) -> list[str]:
    out = [path]
    while path:
        path = path.rpartition(".")[0]
        out.append(path)
    return out


def _nearest_dtype(moves: Mapping[str, _Moves], path: str, dtype: torch.dtype, main: torch.dtype) -> torch.dtype | None:
    """Returns the new dtype of the nearest parameters of a dtype, `main` if some have `main`."""
    for above in _list_ancestors(path):
        to = {b: n for (a, b), n in moves.get(above, _Moves()).items() if a == dtype}
        if to:
            return main if main in to else max(to, key=lambda d: to[d])
    return None
