"""Places of a module's tensors, which hold other tensors for a while."""

import contextlib
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardfn.collectives import GlobalTensor
from shardfn.core import did_you_mean, named_modules, named_parameters, raise_all

_LOCK = threading.Lock()
_RUNNING: dict[int, tuple[int, int]] = {}  # by id of a running module: the thread, and the number of running calls


class TensorSlot(NamedTuple):
    """Place of a tensor.

    Attributes:
        owner: the submodule.
        name: name in the owner.
    """

    owner: nn.Module
    name: str


class ModuleParts(NamedTuple):
    """Submodules and tensors of a module by full name. Shared tensors have several names.

    Attributes:
        modules: the submodules.
        params: places of parameters.
        buffers: places of buffers.
        unique: submodules, each once, with the prefix of the tensors' names.
    """

    modules: dict[str, nn.Module]
    params: dict[str, TensorSlot]
    buffers: dict[str, TensorSlot]
    unique: list[tuple[str, nn.Module]]

    @staticmethod
    def of(module: nn.Module) -> "ModuleParts":
        """Returns the present parts of a module."""
        parts, seen = ModuleParts({}, {}, {}, []), set[int]()
        for path, sub in named_modules(module, remove_duplicate=False):
            parts.modules[path] = sub
            dot = f"{path}." if path else ""
            if id(sub) not in seen:
                seen.add(id(sub))
                parts.unique.append((dot, sub))
            parts.params.update({dot + n: TensorSlot(sub, n) for n, x in sub._parameters.items() if x is not None})
            parts.buffers.update({dot + n: TensorSlot(sub, n) for n, x in sub._buffers.items() if x is not None})
        return parts


def first_names(module: nn.Module) -> dict[str, str]:
    """Returns a mapping from every name of a parameter to the first name."""
    first = {id(p): name for name, p in named_parameters(module)}
    return {name: first[id(p)] for name, p in named_parameters(module, remove_duplicate=False)}


class GivenTensors(NamedTuple):
    """Tensors that take the place of a module's tensors.

    Attributes:
        params: parameters by full name, under all names of a shared parameter.
        buffers: buffers by full name.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def resolve(parts: ModuleParts, firsts: Mapping[str, str], given: Mapping[str, Tensor]) -> GivenTensors:
    """Finds the places of the tensors of `given`. Other parameters stay the module's.

    Raises:
        TypeError: there are no names, or a value is a leaf of a state.
        ValueError: a name is not in the module, or a shared parameter is given twice with different values.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            "a function of from_module expected the parameters first, apply(params, ...), got a"
            f" {type(given).__name__}. Pass the first argument of the loss."
        )
    for name, x in given.items():
        if isinstance(x, GlobalTensor):
            raise TypeError(
                f"params[{name!r}] is a GlobalTensor, a leaf of a state, and the module computes with tensors. Compute"
                " with a state by step.apply(lambda params: apply(params, x), state), or take its weights out:"
                " sf.to_module(state, module)."
            )
    leaves: dict[str, tuple[str, Tensor]] = {}
    buffers, problems = {}, []
    for name, x in given.items():
        if name in parts.buffers:
            buffers[name] = x
        elif name not in parts.params or name not in firsts:
            problems.append(f"{name!r} is not a parameter of the module{did_you_mean(name, firsts)}")
        elif firsts[name] in leaves and leaves[firsts[name]][1] is not x:
            problems.append(f"{name!r} and {leaves[firsts[name]][0]!r} are one parameter. Give one value, or the same")
        else:
            leaves[firsts[name]] = name, x
    problems += [
        f"{name!r} was not there when from_module was called; call it again" for name in parts.params.keys() - firsts
    ]
    raise_all(ValueError, "the parameters do not fit the module:", problems)
    params = {name: leaves[first][1] for name, first in firsts.items() if first in leaves and name in parts.params}
    return GivenTensors(params, buffers)


class _Before(NamedTuple):
    """Attributes and tensors of a submodule before the replacement."""

    path: str
    sub: nn.Module
    attributes: dict[str, Any]
    params: dict[str, Any]
    buffers: dict[str, Any]


class Overrides(NamedTuple):
    """Values that a forward has assigned to the attributes and buffers of a submodule."""

    sub: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Any]


class Placed:
    """Module with replaced tensors.

    Invariant: between `__enter__` and `__exit__` each place of `given` holds the given tensor, and every other place
    the previous value, except for the forward's assignments. `__exit__` puts back the module's tensors in any case.
    After a forward that has assigned a tensor, the submodule gets all attributes back, since other attributes (such as
    the length up to which the tensor was computed) must agree with the tensor.

    Each part that runs again in the backward enters once, with the whole module: a few dict copies a submodule.

    Attributes:
        own: replaced parameters of the module, by identity, from `__enter__` on.
    """

    def __init__(self, parts: ModuleParts, given: GivenTensors) -> None:
        self.parts, self.given = parts, given
        self.own: dict[int, str] = {}
        self._before: list[_Before] = []
        self._given: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> "Placed":
        """Puts the given tensors in place."""
        # The dicts themselves stay, since other code may hold them. The contents are copied.
        self._before = [
            _Before(path, sub, sub.__dict__.copy(), sub._parameters.copy(), sub._buffers.copy())
            for path, sub in self.parts.unique
        ]
        for name, x in self.given.params.items():
            owner, own = self.parts.params[name]
            old: Any = owner._parameters[own]
            if old is not x:
                self.own[id(old)] = name
                owner._parameters[own] = x  # pyright: ignore[reportArgumentType]
        for name, x in self.given.buffers.items():
            owner, own = self.parts.buffers[name]
            owner._buffers[own] = x
        self._given = [
            (sub._parameters.copy() if sub._parameters else {}, sub._buffers.copy() if sub._buffers else {})
            for _, sub in self.parts.unique
        ]
        return self

    def __exit__(self, *error: object) -> None:
        """Puts the module's tensors back."""
        for b, (params, buffers) in zip(self._before, self._given, strict=True):
            sub = b.sub
            if not (params or buffers or sub._parameters or sub._buffers):
                continue
            if not (_is_same(sub._buffers, buffers) and _is_same(sub._parameters, params)):
                _put_back(sub.__dict__, b.attributes)
            _put_back(sub._parameters, b.params)
            _put_back(sub._buffers, b.buffers)

    def overrides(self) -> list[Overrides]:
        """Returns the submodules whose buffers the forward has assigned up to here."""
        pairs = zip(self._before, self._given, strict=True)
        subs = [b.sub for b, (_, given) in pairs if (given or b.sub._buffers) and not _is_same(b.sub._buffers, given)]
        return [Overrides(sub, sub.__dict__.copy(), sub._buffers.copy()) for sub in subs]

    def override(self, overrides: Sequence[Overrides]) -> None:
        """Restores the assignments from before a part of the forward that now runs again."""
        for x in overrides:
            _put_back(x.sub.__dict__, x.attributes)
            _put_back(x.sub._buffers, x.buffers)

    def assigned_params(self) -> list[str]:
        """Returns the parameters that the forward has assigned."""
        found = []
        for b, (given, _) in zip(self._before, self._given, strict=True):
            now = b.sub._parameters
            if (now or given) and not _is_same(now, given):
                found += [b.path + n for n in now.keys() | given.keys() if now.get(n) is not given.get(n)]
        return sorted(found)


def _is_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(map(operator.is_, a.values(), b.values()))


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    if (now or before) and not _is_same(now, before):
        # In one update, so that the order of names is restored, too.
        now.clear()
        now.update(before)


@contextlib.contextmanager
def refuse_two_threads(module: nn.Module, caller: int) -> Iterator[None]:
    """Refuses to run a module in two threads at a time: a module has a single place for each tensor.

    Args:
        module: the module.
        caller: thread of the call. Autograd may run a part again in another thread, while the caller waits.

    Raises:
        RuntimeError: another thread runs the module. The message has the remedy.
    """
    me = threading.get_ident()
    with _LOCK:
        thread, depth = _RUNNING.get(id(module), (me, 0))
        if thread != me and caller == me:
            raise RuntimeError(
                f"this {type(module).__name__} is running in another thread, but a module can run only once at a time."
                " Give each thread a copy: from_module(copy.deepcopy(module))."
            )
        _RUNNING[id(module)] = thread, depth + 1
    try:
        yield
    finally:
        with _LOCK:
            thread, depth = _RUNNING.pop(id(module))
            if depth > 1:
                _RUNNING[id(module)] = thread, depth - 1
