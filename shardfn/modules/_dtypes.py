"""Dtypes in which the parts of a module compute if parameters arrive in other dtypes."""

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn import core

from ._call import Forwards, ModuleCall, ModuleRun, Replacement
from ._given_tensors import GivenTensors, ModuleParts

_COMPUTE = core.Ambient[tuple[torch.dtype | None]]("dtype in which the loss computes", by_thread=True)
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


class ParamDtypes(Replacement):
    """Lets a module compute in the dtypes of the given parameters.

    Args:
        keep: patterns. A buffer keeps the dtype if `re.search` finds a pattern in the name.
    """

    order = 40

    def __init__(self, keep: Sequence[str]) -> None:
        self._keep = tuple(keep)
        # By the given dtypes: a module's structure does not change.
        self._casts: dict[Any, Casts] = {}

    def of_call(self, call: ModuleCall) -> "Replacement":
        """Returns the casts of submodules for a single call, and casts the buffers of the call."""
        found = self._find_casts(call.parts, call.given)
        call.given.buffers.update(_cast_buffers(call.parts, call.given, found, call.state or {}))
        return _CastForwards(found)

    def _find_casts(self, parts: ModuleParts, given: GivenTensors) -> Casts:
        own = {name: _module_param(parts, name).dtype for name in given.params}
        dtypes = {name: x.dtype for name, x in given.params.items()}
        bound = _COMPUTE.innermost()
        compute, key = bound[0] if bound else None, (tuple(own.items()), tuple(dtypes.values()), tuple(parts.buffers))
        known = self._casts.get(key)
        # Recomputation in the backward runs outside the loss: there the answer found in the forward is used.
        if known is None or compute not in (None, known.main):
            known = self._casts[key] = find_casts(parts, own, dtypes, self._keep, compute)
        return known


class _CastForwards(Replacement):
    """Casts of a single call: a submodule with a separate dtype casts inputs to the dtype, and results back."""

    order = ParamDtypes.order

    def __init__(self, casts: Casts) -> None:
        assert casts.main is not None or not casts.apart
        self._casts = casts

    def forwards(self, run: ModuleRun) -> Forwards:
        """Returns the forwards of the submodules with a separate dtype."""
        modules, main = run.call.parts.modules, self._casts.main
        unique = {id(modules[path]): (modules[path], dtype) for path, dtype in self._casts.apart.items()}
        return [(sub, _run_in_dtype(dtype, main, sub.forward)) for sub, dtype in unique.values()]


def find_casts(
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


def _run_in_dtype(dtype: torch.dtype, main: torch.dtype | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in core.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        came = next((x.dtype for x in tensors if x.is_floating_point()), main)
        if not tensors or came is None:
            return forward(*args, **kwargs)
        args, kwargs = core.tree_map(lambda x: _cast_tensor(x, dtype), (args, kwargs))  # pyright: ignore[reportGeneralTypeIssues]
        return core.tree_map(lambda x: _cast_tensor(x, came), forward(*args, **kwargs))

    return cast_forward


def _cast_tensor(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _module_param(parts: ModuleParts, name: str) -> Tensor:
    slot = parts.params[name]
    own = slot.owner._parameters[slot.name]
    assert own is not None
    return own


def _cast_buffers(
    parts: ModuleParts, given: GivenTensors, found: Casts, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the buffers cast to another dtype. Buffers of a state keep the dtype."""
    out = {}
    for name, dtype in found.buffers.items():
        if name in state:
            continue
        slot = parts.buffers[name]
        x: Any = given.buffers.get(name, slot.owner._buffers[slot.name])
        out[name] = x.to(dtype)
    return out


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
