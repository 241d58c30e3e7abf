"""Where the tensors of a module hang, and other tensors in their place for a while."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardfn.core import did_you_mean, raise_all


class Slot(NamedTuple):
    """One place of a tensor.

    Attributes:
        owner: the submodule.
        name: its name there.
    """

    owner: nn.Module
    name: str


class Parts(NamedTuple):
    """The submodules and the tensors of a module by full name; what is shared has several.

    Attributes:
        modules: the submodules.
        params: places of parameters.
        buffers: places of buffers.
    """

    modules: dict[str, nn.Module]
    params: dict[str, Slot]
    buffers: dict[str, Slot]

    @staticmethod
    def of(module: nn.Module) -> "Parts":
        """Those that the module has now."""
        parts = Parts({}, {}, {})
        for path, sub in module.named_modules(remove_duplicate=False):
            parts.modules[path] = sub
            dot = f"{path}." if path else ""
            parts.params.update({dot + n: Slot(sub, n) for n, x in sub._parameters.items() if x is not None})
            parts.buffers.update({dot + n: Slot(sub, n) for n, x in sub._buffers.items() if x is not None})
        return parts


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the first name of that parameter."""
    first = {id(p): name for name, p in module.named_parameters()}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


class Given(NamedTuple):
    """What takes the place of a module's own tensors.

    Attributes:
        params: by full name; all names of a shared parameter.
        buffers: by full name.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


def resolve(parts: Parts, firsts: Mapping[str, str], given: Mapping[str, Tensor]) -> Given:
    """Finds the places that the tensors of `given` are for; a parameter that is not given stays the module's own.

    Raises:
        ValueError: a name is none of the module's, or a shared parameter is given twice with different values.
    """
    leaves: dict[str, tuple[str, Tensor]] = {}
    buffers, problems = {}, []
    for name, x in given.items():
        if name in parts.buffers:
            buffers[name] = x
        elif name not in parts.params or name not in firsts:
            problems.append(f"{name!r} is no parameter of the module{did_you_mean(name, firsts)}")
        elif firsts[name] in leaves and leaves[firsts[name]][1] is not x:
            problems.append(f"{name!r} and {leaves[firsts[name]][0]!r} are one parameter; give one value, or the same")
        else:
            leaves[firsts[name]] = name, x
    problems += [
        f"{name!r} was not there when from_module was called; call it again" for name in parts.params.keys() - firsts
    ]
    raise_all(ValueError, "the parameters do not fit the module:", problems)
    params = {name: leaves[first][1] for name, first in firsts.items() if first in leaves and name in parts.params}
    return Given(params, buffers)


class _Before(NamedTuple):
    """A submodule as it was: before others took the places of its tensors, and right after."""

    sub: nn.Module
    attributes: dict[str, Any]
    params: dict[str, Any]
    buffers: dict[str, Any]
    given_params: dict[str, Any]
    given_buffers: dict[str, Any]


class Placed:
    """A module whose tensors others have taken the place of.

    Invariant: between `__enter__` and `__exit__` each place of `given` holds what was given, and everything else what
    it held before, but for what the forward assigns. `__exit__` puts back the module's own tensors whatever has
    happened; a submodule whose forward has assigned a buffer gets all its attributes back, since what it keeps beside
    the buffer (up to which length it was computed, say) must go with it.
    """

    def __init__(self, parts: Parts, given: Given) -> None:
        self.parts, self.given = parts, given
        self._before: list[_Before] = []

    def __enter__(self) -> "Placed":
        """Puts the given tensors in their places."""
        subs = list({id(sub): sub for sub in self.parts.modules.values()}.values())
        before = [(sub, dict(sub.__dict__), dict(sub._parameters), dict(sub._buffers)) for sub in subs]
        for name, x in self.given.params.items():
            owner, own = self.parts.params[name]
            owner._parameters[own] = x  # pyright: ignore[reportArgumentType]
        for name, x in self.given.buffers.items():
            owner, own = self.parts.buffers[name]
            owner._buffers[own] = x
        self._before = [_Before(*b, dict(b[0]._parameters), dict(b[0]._buffers)) for b in before]
        return self

    def __exit__(self, *error: object) -> None:
        """Puts the module's own tensors back."""
        for b in self._before:
            _put_back(b.sub._parameters, b.params)
            if not _same(b.sub._buffers, b.given_buffers):
                _put_back(b.sub.__dict__, b.attributes)
            _put_back(b.sub._buffers, b.buffers)

    def own(self) -> dict[int, str]:
        """The module's own parameters that are replaced, by identity."""
        before = {id(b.sub): b.params for b in self._before}
        slots = ((name, self.parts.params[name]) for name in self.given.params)
        own = ((name, before[id(s.owner)][s.name]) for name, s in slots)
        return {id(x): name for name, x in own if x is not self.given.params[name]}

    def assigned_params(self) -> list[str]:
        """The parameters that the forward has assigned."""
        found = []
        for path, b in zip(self._paths(), self._before, strict=True):
            names = b.sub._parameters.keys() | b.given_params.keys()
            found += [path + n for n in names if b.sub._parameters.get(n) is not b.given_params.get(n)]
        return sorted(found)

    def _paths(self) -> list[str]:
        first: dict[int, str] = {}
        for path, sub in self.parts.modules.items():
            first.setdefault(id(sub), f"{path}." if path else "")
        return list(first.values())


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k] is x for k, x in b.items())


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    if not _same(now, before):
        now.clear()
        now.update(before)


@contextlib.contextmanager
def shadowed(forwards: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Lets submodules run other forwards for a while."""
    before = [(sub, sub.__dict__.get("forward")) for sub, _ in forwards]
    try:
        for sub, forward in forwards:
            sub.__dict__["forward"] = forward
        yield
    finally:
        for sub, forward in before:
            if forward is None:
                sub.__dict__.pop("forward", None)
            else:
                sub.__dict__["forward"] = forward
