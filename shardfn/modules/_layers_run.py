"""One call of a module of which this rank runs some layers: what stands in the places of the others."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardfn.core import uncompiled

from ._absent import AbsentTensor, NeedsValue, is_absent
from ._module_draws import Draws
from ._module_parts import ModuleParts


@dataclasses.dataclass
class LayerSpan:
    """The layers that one call of a loss runs, on this rank.

    Attributes:
        start: the first layer.
        num: how many.
        given: what the layer before `start` has made; None at the first stage.
        ends: whether the forward runs to its end, and not to the layer after.
        calls: how often the module has been called within.
        stack: this rank's rows of the layers' leaves, by name, where the loss is shown others in their place.
        shown: those, which it is to pass on as they are.
    """

    start: int
    num: int
    given: Tensor | None
    ends: bool
    calls: int = 0
    stack: Mapping[str, Tensor] | None = None
    shown: Mapping[str, Tensor] | None = None


class Ended(BaseException):
    """The layers of this rank are done; no `Exception`, so that no forward catches it."""

    def __init__(self, h: Any) -> None:
        super().__init__()
        self.h = h


class Layers(Protocol):
    """A module with a list of layers.

    Attributes:
        module: the module.
        path: where in it the list is.
        num_layers: how many layers there are.
        needs_params: whether what comes before the layers is more than the first layer's argument.
        returns: what a layer returns besides, and the structure; None until one has been asked.
    """

    module: nn.Module
    path: str
    num_layers: int
    needs_params: bool
    returns: tuple[list[Any], Any] | None

    @property
    def layers(self) -> nn.ModuleList:
        """The list."""
        ...


class LayersRun:
    """One call of a module, of which this rank runs some layers.

    Invariant: while `call` runs, stand-ins are in the module's list; and until the first own layer is called, absent
    parameters in the places of those that are no layer's, if nothing in front of the layers needs their values.
    """

    def __init__(self, of: Layers, span: LayerSpan, draws: Draws) -> None:
        self._of, self._span, self._draws = of, span, draws
        # `_next` is the layer whose call is due. Once `call` has ended (`_over`), a checkpoint alone calls layers.
        self._next, self._stop, self._over = 0, span.start + span.num, False
        # Parameters that absent ones stand for, with their places; empty once an own layer runs.
        self._absent: list[tuple[dict[str, Any], str, Any]] = []

    def call(self, *args: Any, **kwargs: Any) -> Any:
        of, module = self._of, self._of.module
        layers = of.layers
        own = layers._modules
        stand_ins = {
            name: _StandIn(i, uncompiled(layer), self._at)
            for i, (name, layer) in enumerate(zip(own, layers, strict=True))
        }
        layers._modules = stand_ins  # pyright: ignore[reportAttributeAccessIssue]
        elsewhere: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for i, layer in enumerate(own.values()):
                if not self._span.start <= i < self._stop:
                    self._hide(layer, elsewhere)
            if self._span.given is not None and not of.needs_params:
                self._take_params(module)
            out = module(*args, **kwargs)
            if self._next < of.num_layers:
                self._refuse(f"the forward calls {self._next} of {of.num_layers} layers")
            return out
        finally:
            layers._modules = own
            self._give_params()
            _put_back(elsewhere)
            self._over = True

    def _at(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What happens at the call of a layer."""
        span = self._span
        if self._over:  # what a checkpoint computes again, in the backward
            return self._own(number, layer, args, kwargs)
        if number != self._next:
            self._refuse(f"the forward calls layer {number} where layer {self._next} should be")
        h, _ = _first_argument(layer, args, kwargs)
        if number == self._stop and not span.ends:
            raise Ended(h)
        self._next = number + 1
        before = number < span.start
        if before and number < self._of.num_layers - 1:
            return self._returned(layer, args, kwargs, _absent_like(h))
        self._give_params()
        if before:  # a last stage without layers
            out = self._returned(layer, args, kwargs, span.given)
            self._draws.skip(layer)
            return out
        out = self._own(number, layer, args, kwargs)
        if not span.ends and self._next == self._stop == self._of.num_layers:
            raise Ended(pytree.tree_leaves(out)[0])
        return out

    def _own(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer of this rank."""
        if number == self._span.start and self._span.given is not None:
            args, kwargs = _first_argument(layer, args, kwargs)[1](self._span.given)
        if is_absent((args, kwargs)):
            raise NeedsValue(f"layer {number} is given it, besides its first argument")
        return layer(*args, **kwargs)

    def _returned(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], h: Any) -> Any:
        """What a layer returns that makes `h`; what it returns besides is absent. Found once, without computing it."""
        if self._of.returns is None:
            absent = pytree.tree_map_only(Tensor, _absent_like, (args, kwargs))
            mark = self._draws.mark
            out = layer(*absent[0], **absent[1])
            self._draws.mark = mark
            leaves, treedef = pytree.tree_flatten(out)
            if not leaves or not isinstance(leaves[0], Tensor):
                self._refuse(f"a layer returns a {type(out).__name__}, which does not begin with a tensor")
            self._of.returns = leaves[1:], treedef
        rest, treedef = self._of.returns
        return pytree.tree_unflatten([h, *rest], treedef)

    def _take_params(self, module: nn.Module) -> None:
        dot = f"{self._of.path}."
        for name, (owner, own) in ModuleParts.of(module).params.items():
            if not name.startswith(dot):
                _make_absent(owner, own, self._absent)

    def _hide(self, layer: nn.Module, taken: list[tuple[dict[str, Any], str, Any]]) -> None:
        """Makes the parameters of another rank's layer absent: here they are those of the module as it was made."""
        for owner, own in ModuleParts.of(layer).params.values():
            _make_absent(owner, own, taken)

    def _give_params(self) -> None:
        _put_back(self._absent)

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{self._of.path!r} of this {type(self._of.module).__name__} cannot be cut in stages: {what}. Its"
            " layers must run once each, in order."
        )


class _StandIn(nn.Module):
    """Stands in the place of a layer, and is it in everything but its call."""

    def __init__(self, number: int, layer: nn.Module, at: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(number=number, layer=layer, at=at, training=layer.training)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["at"](self.__dict__["number"], self.__dict__["layer"], args, kwargs)

    forward = __call__

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["layer"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["layer"], name)


def _make_absent(owner: nn.Module, name: str, taken: list[tuple[dict[str, Any], str, Any]]) -> None:
    x: Any = owner._parameters[name]
    if x is not None and type(x) is not AbsentTensor:
        taken.append((owner._parameters, name, x))
        owner._parameters[name] = AbsentTensor.of(x)  # pyright: ignore[reportArgumentType]


def _put_back(taken: list[tuple[dict[str, Any], str, Any]]) -> None:
    while taken:
        where, name, x = taken.pop()
        where[name] = x


def _first_argument(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """What a layer is called with first, and its arguments with another in its place."""
    if args:
        return args[0], lambda h: ((h, *args[1:]), kwargs)
    name = next(iter(inspect.signature(layer.forward).parameters), "")
    name = name if name in kwargs else next((k for k, x in kwargs.items() if isinstance(x, Tensor)), "")
    if not name:
        raise ValueError(f"a layer, a {type(layer).__name__}, is called without a tensor; it should be given one.")
    return kwargs[name], lambda h: (args, {**kwargs, name: h})


def _absent_like(x: Tensor) -> Tensor:
    return x if type(x) is AbsentTensor else AbsentTensor.of(x)
