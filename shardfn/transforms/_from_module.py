"""`from_module`: an `nn.Module` as a pure function of its parameters."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from ._lazy import LazyLeaf
from ._module_checks import check_cache, check_keyed, check_module
from ._module_draws import Draws
from ._module_dtypes import Casts, casts, compute_dtype, forwards
from ._module_mode import ModuleMode
from ._module_parts import Given, Overrides, Parts, Placed, first_names, one_thread, resolve, shadowed
from ._module_recompute import running_module


class ModuleFunction:
    """A module's forward as a function of its parameters; made by `from_module`."""

    def __init__(self, module: nn.Module, keep_dtype: Sequence[str]) -> None:
        self._module, self._keep_dtype = module, tuple(keep_dtype)
        self._firsts = first_names(module)
        self._casts: dict[Any, Casts] = {}

    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Args:
            params: by name; those that are not given are the module's own, as constants.
            *args: what the module takes.
            **kwargs: what it takes by name.

        Raises:
            ValueError: a name is none of the module's; or the forward does what would not be the same on every number
                of ranks, or would be lost: it draws from torch's generator, changes a buffer, normalises over the
                batch, or assigns a parameter.
            RuntimeError: another thread runs the module at this moment.
        """
        return self._run(Draws(self._module), params, args, kwargs)

    def keyed(self, key: Int64[Tensor, "2"], index_B: Int64[Tensor, " b"]) -> Callable[..., Any]:
        """The same function with dropout: masks are functions of the key and of the number of each sample.

        Args:
            key: for this step.
            index_B: global number of each row of the batch, which is dim 0 of whatever is dropped from.

        Returns:
            `f(params, *args, **kwargs)`.

        Raises:
            ValueError: a layer of torch.nn that drops has the batch in dim 1; or (when called) a tensor that is dropped
                from has another number of rows, or something else draws.

        Example:
            >>> from shardfn.core import key
            >>> params, apply = from_module(nn.Dropout(0.5))
            >>> x, index_B = torch.ones(4, 3), torch.arange(4)
            >>> whole = apply.keyed(key(0), index_B)(params, x)
            >>> torch.equal(whole[2:], apply.keyed(key(0), index_B[2:])(params, x[2:]))
            True
        """
        check_keyed(self._module, key, index_B)

        def f(params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
            return self._run(Draws(self._module, key, index_B), params, args, kwargs)

        return f

    def _run(self, draws: Draws, params: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_cache()
        parts = Parts.of(self._module)
        given = resolve(parts, self._firsts, params)
        found = self._found(parts, given)
        given.buffers.update(_cast(parts, given, found))
        return _Run(parts, given, found, draws).call(self._module, args, kwargs)

    def _found(self, parts: Parts, given: Given) -> Casts:
        own = {name: _own(parts, name).dtype for name in given.params}
        dtypes = {name: x.dtype for name, x in given.params.items()}
        compute, key = compute_dtype(), (tuple(own.items()), tuple(dtypes.values()), tuple(parts.buffers))
        known = self._casts.get(key)
        # What runs again in the backward runs outside the loss: there the forward's answer counts.
        if known is None or compute not in (None, known.main):
            known = self._casts[key] = casts(parts, own, dtypes, self._keep_dtype, compute)
        return known


class _Run:
    """One call of a module, and what runs again of it in the backward.

    Invariant: whatever runs, the first time and again, runs between `_running` and its end: with the given tensors in
    their places, every function of torch seen, and the draws numbered from where that part began the first time.
    Nothing is kept but the given tensors, which are leaves; so no gathered parameter outlives its use.
    """

    def __init__(self, parts: Parts, given: Given, found: Casts, draws: Draws) -> None:
        self._parts, self._given, self._found, self._draws = parts, given, found, draws
        self._placed: Placed | None = None  # while it runs
        self._caller = threading.get_ident()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._running():
            return module(*args, **kwargs)

    def again(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f`, with the draws that it would make here, and the buffers that the forward has assigned up to here."""
        assert self._placed is not None
        count, overrides = self._draws.count, self._placed.overrides()

        @functools.wraps(f)
        def rerun(*args: Any, **kwargs: Any) -> Any:
            before, self._draws.count = self._draws.count, count
            try:
                with self._running(overrides):
                    return f(*args, **kwargs)
            finally:
                self._draws.count = before

        return rerun

    def path_of(self, sub: nn.Module) -> str | None:
        """Where in the module `sub` is; None if it is no part of it."""
        return next((path for path, m in self._parts.modules.items() if m is sub), None)

    def converted(self, sub: nn.Module, convert: Callable[[Any], Any]) -> bool:
        """Whether `sub` is a part of the module; refuses a conversion that changes something."""
        path = self.path_of(sub)
        if path is None:
            return False
        dot = f"{path}." if path else ""
        for name, x in (*sub.named_parameters(), *sub.named_buffers()):
            # A lazy leaf need not be gathered for it.
            old = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if type(x) is LazyLeaf else x
            with torch.no_grad():
                new = convert(old)
            if new is not old:
                raise ValueError(
                    f"the forward of the module converts {dot}{name} from {x.dtype} on {x.device} to {new.dtype} on"
                    f" {new.device}, and would train what is converted; convert the module before"
                    " from_module, or name that parameter in the policy: exceptions={...}."
                )
        return True

    @contextlib.contextmanager
    def _running(self, overrides: Sequence[Overrides] = ()) -> Iterator[None]:
        _, module = self._parts.unique[0]
        with one_thread(module, self._caller), Placed(self._parts, self._given) as placed, self._at(placed):
            mode = ModuleMode(placed, self._draws)
            placed.override(overrides)
            with running_module(self), shadowed(forwards(self._parts, self._found)), mode:
                yield
            if assigned := placed.assigned_params():
                raise ValueError(
                    f"the forward of the module assigns its parameters {', '.join(assigned)}, which the step keeps and"
                    " trains; give what it computes another name, or convert the module before from_module."
                )
            mode.check()

    @contextlib.contextmanager
    def _at(self, placed: Placed) -> Iterator[None]:
        before, self._placed = self._placed, placed
        try:
            yield
        finally:
            self._placed = before


def from_module(
    module: nn.Module, *, keep_dtype: Sequence[str] = ("inv_freq",)
) -> tuple[dict[str, Tensor], ModuleFunction]:
    """Splits a module into its parameters and a pure function of them.

    Tied parameters appear once, under their first name, and stay tied. Buffers are closed over, and are constants: a
    forward that changes one is refused, by name, before it does. The module itself is left as it is; its own parameters
    may be freed with `module.to("meta")` once a step has taken them, if it has no buffers.

    What `torch.utils.checkpoint` inside the module runs again in the backward runs with the parameters and the draws of
    its forward; the reentrant kind runs as the other. Dropout needs a key: `apply.keyed(key, index_B)(params, ...)`.

    Where parameters come in another dtype, as under `mixed_precision`, floating-point buffers follow the parameters of
    their dtype next to them, as with `module.to(dtype)`. Submodules whose parameters are all exceptions of the policy
    compute in the dtype of these, and give back that of their input.

    Args:
        module: any module, in the mode (train or eval) it should run in.
        keep_dtype: patterns; buffers in whose names `re.search` finds one keep their dtype.

    Returns:
        `(params, apply)`: params by name, detached, and `apply(params, *args, **kwargs)` = the module's forward.

    Raises:
        ValueError: the module cannot be trained as torch would train it: a parameter has gradient hooks, no shape yet,
            or shares memory with another tensor; or an embedding has max_norm or scale_grad_by_freq.

    Example:
        >>> params, apply = from_module(nn.Linear(2, 1, bias=False))
        >>> sorted(params), apply(params, torch.zeros(3, 2)).shape
        (['weight'], torch.Size([3, 1]))
    """
    check_module(module)
    return {name: p.detach() for name, p in module.named_parameters()}, ModuleFunction(module, keep_dtype)


def _own(parts: Parts, name: str) -> Tensor:
    slot = parts.params[name]
    own = slot.owner._parameters[slot.name]
    assert own is not None
    return own


def _cast(parts: Parts, given: Given, found: Casts) -> dict[str, Tensor]:
    """The buffers that come in another dtype."""
    out = {}
    for name, dtype in found.buffers.items():
        slot = parts.buffers[name]
        x: Any = given.buffers.get(name, slot.owner._buffers[slot.name])
        out[name] = x.to(dtype)
    return out
