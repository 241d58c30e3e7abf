"""Call of a module on a rank with some of the layers: placeholders stand for the other layers."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardfn._torch import DisableTorchFunctionSubclass, disable_current_modes, pytree
from shardfn.core import MetadataTensor, uncompiled

from ._attention import none_attends
from ._buffers import writes
from ._draws import Draws
from ._given_tensors import ModuleParts


@dataclasses.dataclass
class LayerSpan:
    """Layers that one call of a loss runs, on this rank.

    Attributes:
        start: first layer.
        num: number of layers.
        given: result of the layer before `start`, or None at the first stage.
        ends: whether the forward runs to the end, and not to the layer after.
        calls: number of calls of the module in this loss.
        stack: this rank's rows of the layers' leaves, in the form of params, if the loss gets placeholders.
        shown: placeholders, which the loss must pass on unchanged.
    """

    start: int
    num: int
    given: Tensor | None
    ends: bool
    calls: int = 0
    stack: Mapping[str, Any] | None = None
    shown: Mapping[str, Any] | None = None


class Ended(BaseException):
    """Raised when the layers of this rank are done. Not an `Exception`, so no forward catches the signal."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        self.h = h


class RunAgain(BaseException):
    """Raised to start the call again, as the structure of a layer's result is now known.

    Like `Ended`, not an `Exception`.
    """


class Layers(Protocol):
    """Module with a list of layers.

    Attributes:
        module: the module.
        path: name of the list in the module.
        num_layers: the number of layers.
        needs_params: whether layers need values from the code before, other than the first argument, that depend on
            parameters.
        returns: further results of a layer, and the structure of all results. None until known.
    """

    module: nn.Module
    path: str
    num_layers: int
    needs_params: bool
    returns: tuple[list[Any], Any] | None

    @property
    def layers(self) -> nn.ModuleList:
        """Returns the list of layers in the module."""
        ...


class PartialForward:
    """Call of a module on a rank with some of the layers.

    Invariant: while `call` runs, the module's list holds placeholders, and until the call of this rank's first layer,
    the parameters outside the layers are absent, unless code before the layers needs the values.
    """

    def __init__(self, of: Layers, span: LayerSpan, draws: Draws, forward: Callable[..., Any] | None = None) -> None:
        self._of, self._span, self._draws, self._forward = of, span, draws, forward or of.module
        # `_next` is the layer whose call is due. Once `call` has ended (`_over`), only a checkpoint calls layers.
        self._next, self._stop, self._over = 0, span.start + span.num, False
        # The parameters replaced by absent tensors, with the places, empty once a layer of this rank runs.
        self._absent: list[tuple[dict[str, Any], str, Any]] = []
        # Why a layer's result is assumed to be a tensor. None once the structure of results is known.
        self._assumed: str | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        of, module = self._of, self._of.module
        layers = of.layers
        own = layers._modules
        stand_ins = {
            name: _StandIn(i, uncompiled(layer), self._call_layer)
            for i, (name, layer) in enumerate(zip(own, layers, strict=True))
        }
        layers._modules = stand_ins  # pyright: ignore[reportAttributeAccessIssue]
        elsewhere: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for i, layer in enumerate(own.values()):
                if not self._span.start <= i < self._stop:
                    self._hide_params(layer, elsewhere)
            if self._span.given is not None and not of.needs_params:
                self._take_params(module)
            if not self._span.num:
                none_attends()
            out = self._forward(*args, **kwargs)
            if self._next < of.num_layers:
                self._raise_uncuttable(f"the forward calls {self._next} of {of.num_layers} layers. {_IN_ORDER}")
            return out
        except Exception as error:
            if self._assumed is not None:
                error.add_note(f"A layer's result was assumed to be a tensor, as it {self._assumed}.")
            raise
        finally:
            layers._modules = own
            self._give_params()
            _put_back(elsewhere)
            self._over = True

    def _call_layer(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles the call of a layer."""
        span = self._span
        if self._over:  # a checkpoint's recomputation, in the backward
            return self._run_layer(number, layer, args, kwargs)
        if number != self._next:
            self._raise_uncuttable(f"the forward calls layer {number} where layer {self._next} should be. {_IN_ORDER}")
        if number == 0 and span.num < self._of.num_layers and (names := _recorded_outputs()):
            self._raise_uncuttable(
                f"transformers records {', '.join(names)} of all layers, and each rank has those of its own layers"
                f" alone. Turn off {', '.join(f'output_{name}' for name in names)}."
            )
        h, _ = _first_argument(layer, args, kwargs)
        if number == self._stop and not span.ends:
            raise Ended(h)
        self._next = number + 1
        before = number < span.start
        if before and number < self._of.num_layers - 1:
            return self._rebuild_result(layer, args, kwargs, _make_placeholder(h))
        self._give_params()
        if before:  # a last stage without layers
            out = self._rebuild_result(layer, args, kwargs, span.given)
            self._draws.skip(layer)
            return out
        out = self._run_layer(number, layer, args, kwargs)
        self._record_structure(out)
        if not span.ends and self._next == self._stop == self._of.num_layers:
            raise Ended(pytree.tree_leaves(out)[0])
        return out

    def _run_layer(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer of this rank."""
        if number == self._span.start and self._span.given is not None:
            args, kwargs = _first_argument(layer, args, kwargs)[1](self._span.given)
        if is_placeholder((args, kwargs)):
            raise NeedsValue(f"layer {number} takes it in an argument other than the first")
        return layer(*args, **kwargs)

    def _rebuild_result(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], h: Any) -> Any:
        """Returns the result of a layer from the first tensor, `h`. All other tensors are absent.

        The structure is found once, by a run of the layer without data. If a layer needs values, as experts do, the
        result is assumed to be a tensor until this rank's first layer has run.
        """
        if self._of.returns is None and self._assumed is None:
            absent, mark = pytree.tree_map_only(Tensor, _make_placeholder, (args, kwargs)), self._draws.mark
            try:
                self._record_structure(layer(*absent[0], **absent[1]))
            except (NeedsValue, Exception) as error:
                self._assumed = f"cannot be found by a run of the layer without data ({error})"
                if not self._span.num:
                    self._raise_uncuttable(
                        f"this rank runs no layer, and the structure of a layer's result {self._assumed}. Use no more"
                        " stages than have a layer, or let layers ask for no values."
                    )
            self._draws.mark = mark
        if self._of.returns is None:
            return h
        rest, treedef = self._of.returns
        return pytree.tree_unflatten([h, *rest], treedef)

    def _record_structure(self, out: Any) -> None:
        """Records the structure of a layer's result.

        Raises:
            RunAgain: another structure was assumed.
        """
        if self._of.returns is not None:
            return
        leaves, treedef = pytree.tree_flatten(out)
        if not leaves or not isinstance(leaves[0], Tensor):
            self._raise_uncuttable(
                f"a layer returns a {type(out).__name__}, which does not begin with a tensor. {_IN_ORDER}"
            )
        self._of.returns = [_make_placeholder(x) if isinstance(x, Tensor) else x for x in leaves[1:]], treedef
        assumed, self._assumed = self._assumed, None
        if assumed is not None and not isinstance(out, Tensor):
            raise RunAgain

    def _take_params(self, module: nn.Module) -> None:
        dot = f"{self._of.path}."
        for name, (owner, own) in ModuleParts.of(module).params.items():
            if not name.startswith(dot):
                _hide_param(owner, own, self._absent)

    def _hide_params(self, layer: nn.Module, taken: list[tuple[dict[str, Any], str, Any]]) -> None:
        """Makes the parameters of another rank's layer absent: this rank has only the initial values."""
        for owner, own in ModuleParts.of(layer).params.values():
            _hide_param(owner, own, taken)

    def _give_params(self) -> None:
        _put_back(self._absent)

    def _raise_uncuttable(self, what: str) -> None:
        raise ValueError(f"{self._of.path!r} of this {type(self._of.module).__name__} cannot be cut in stages: {what}")


class _StandIn(nn.Module):
    """Takes the place of a layer, and equals the layer in everything except the call: in kind, parts and hooks."""

    def __init__(self, number: int, layer: nn.Module, at: Callable[..., Any]) -> None:
        super().__init__()
        # The dicts themselves: a hook that is registered here is the layer's.
        self.__dict__.update({name: layer.__dict__[name] for name in self.__dict__ if name in layer.__dict__})
        self.__dict__.update(number=number, layer=layer, at=at)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the layer's class, for `isinstance`."""
        return type(self.__dict__["layer"]) if "layer" in self.__dict__ else _StandIn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["at"](self.__dict__["number"], self.__dict__["layer"], args, kwargs)

    forward = __call__

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["layer"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["layer"], name)


_IN_ORDER = "Its layers must run once each, in order."


def _recorded_outputs() -> list[str]:
    """Returns the names of the layer outputs that transformers records by hooks."""
    known = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(known, "_active_collector", None)
    found = None if collector is None else collector.get()
    return sorted(name for name in found or {} if not name.startswith("_"))


def _hide_param(owner: nn.Module, name: str, taken: list[tuple[dict[str, Any], str, Any]]) -> None:
    x: Any = owner._parameters[name]
    if x is not None and type(x) is not Placeholder:
        taken.append((owner._parameters, name, x))
        owner._parameters[name] = Placeholder.of(x)  # pyright: ignore[reportArgumentType]


def _put_back(taken: list[tuple[dict[str, Any], str, Any]]) -> None:
    while taken:
        where, name, x = taken.pop()
        where[name] = x


def _first_argument(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Returns the first argument of a layer, and a function that replaces the first argument."""
    if args:
        return args[0], lambda h: ((h, *args[1:]), kwargs)
    name = next(iter(inspect.signature(layer.forward).parameters), "")
    name = name if name in kwargs else next((k for k, x in kwargs.items() if isinstance(x, Tensor)), "")
    if not name:
        raise ValueError(f"a layer must be called with a tensor, but a {type(layer).__name__} got none.")
    return kwargs[name], lambda h: (args, {**kwargs, name: h})


def _make_placeholder(x: Tensor) -> Tensor:
    return x if type(x) is Placeholder else Placeholder.of(x)


# Other functions that need no value.
_ANSWERED = frozenset({"requires_grad_", "__format__"})


class NeedsValue(BaseException):
    """Raised where the running code needs an absent value. Not an `Exception`, so no forward catches the error."""


class Placeholder(MetadataTensor):
    """Tensor without data, on the device of the absent value.

    Raises:
        NeedsValue: the value is needed, or written to a tensor with data.
    """

    _meta: Tensor

    @staticmethod
    def of(x: Tensor) -> "Placeholder":
        """Returns an absent tensor with the shape and dtype of a tensor."""
        return _wrap_meta(_make_meta(x), x.device)

    @classmethod
    def on_values(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function on tensors without data."""
        name = getattr(func, "__name__", "")
        if name in _ANSWERED or (name == "__get__" and func not in _VIEWS):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        written = (args[:1] if writes(name) else (), kwargs.get("out"))
        if any(isinstance(x, Tensor) and type(x) is not Placeholder for x in pytree.tree_leaves(written)):
            raise NeedsValue(f"{name} writes it to a tensor")
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if type(x) is Placeholder)
        try:
            # A capture must not record the operations: the graph would run on tensors of the meta device.
            with DisableTorchFunctionSubclass(), disable_current_modes(), torch.no_grad():
                on_meta = pytree.tree_map(_convert_arg, (args, {k: v for k, v in kwargs.items() if k != "device"}))
                out = func(*on_meta[0], **on_meta[1])
        except (RuntimeError, NotImplementedError) as error:  # torch's errors for meta tensors without values
            raise NeedsValue(f"{name}: {error}") from error
        if writes(name):
            return args[0]
        return pytree.tree_map_only(Tensor, lambda x: _wrap_meta(x, device), out)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses calls from outside of `__torch_function__`."""
        del types, args, kwargs
        raise NeedsValue(f"{func} takes it by another way than a function of torch")


def is_placeholder(x: Any) -> bool:
    """Returns whether anything in a tree is absent."""
    for leaf in pytree.tree_leaves(x):
        if type(leaf) is Placeholder:
            return True
    return False


_VIEWS: Any = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag"))


def _wrap_meta(meta: Tensor, device: torch.device) -> Placeholder:
    made = Placeholder.empty(meta.shape, meta.dtype, device, meta.stride(), meta.storage_offset())
    made._meta = meta
    return made


def _convert_arg(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x._meta if type(x) is Placeholder else _make_meta(x)
    return torch.device("meta") if isinstance(x, torch.device) else x


def _make_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
