"""One call of a module of which this rank runs some layers: what stands in the places of the others."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._absent import AbsentTensor, NeedsValue, is_absent
from ._module_draws import Draws
from ._module_parts import ModuleParts

# Draws are numbered by where they are: in front of the layers, in each of them, and behind them.
_DRAWS_EACH = 1 << 20


@dataclasses.dataclass
class LayerSpan:
    """The layers that one call of a loss runs, on this rank.

    Attributes:
        start: the first layer.
        num: how many.
        given: what the layer before `start` has made; None at the first stage.
        ends: whether the forward runs to its end, and not to the layer after.
        calls: how often the module has been called within.
    """

    start: int
    num: int
    given: Tensor | None
    ends: bool
    calls: int = 0


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
        self._next, self._stop = 0, span.start + span.num
        self._absent: list[tuple[dict[str, Any], str, Any]] = []

    def call(self, *args: Any, **kwargs: Any) -> Any:
        of, module = self._of, self._of.module
        layers = of.layers
        own = layers._modules
        stand_ins = {
            name: _StandIn(i, layer, self._at) for i, (name, layer) in enumerate(zip(own, layers, strict=True))
        }
        layers._modules = stand_ins  # pyright: ignore[reportAttributeAccessIssue]
        try:
            if self._span.given is not None and not of.needs_params:
                self._take_params(module)
            out = module(*args, **kwargs)
            if self._next < of.num_layers:
                self._refuse(f"the forward calls {self._next} of {of.num_layers} layers")
            return out
        finally:
            layers._modules = own
            self._give_params()

    def _at(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What happens at the call of a layer."""
        span = self._span
        if number != self._next:
            self._refuse(f"the forward calls layer {number} where layer {self._next} should be")
        h, replaced = _first_argument(layer, args, kwargs)
        if number == self._stop and not span.ends:
            raise Ended(h)
        self._next = number + 1
        before = number < span.start
        if before and number < self._of.num_layers - 1:
            return self._returned(layer, args, kwargs, _absent_like(h))
        self._give_params()
        self._draws.count = (number + 1) * _DRAWS_EACH
        try:
            if before:  # a last stage without layers
                return self._returned(layer, args, kwargs, span.given)
            if number == span.start and span.given is not None:
                args, kwargs = replaced(span.given)
            if is_absent((args, kwargs)):
                raise NeedsValue(f"layer {number} is given it, besides its first argument")
            out = layer(*args, **kwargs)
            if not span.ends and self._next == self._stop == self._of.num_layers:
                raise Ended(pytree.tree_leaves(out)[0])
            return out
        finally:
            self._draws.count = (number + 2) * _DRAWS_EACH

    def _returned(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], h: Any) -> Any:
        """What a layer returns that makes `h`; what it returns besides is absent. Found once, without computing it."""
        if self._of.returns is None:
            absent = pytree.tree_map_only(Tensor, _absent_like, (args, kwargs))
            count = self._draws.count
            out = layer(*absent[0], **absent[1])
            self._draws.count = count
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
                x: Any = owner._parameters[own]
                self._absent.append((owner._parameters, own, x))
                owner._parameters[own] = AbsentTensor.of(x)  # pyright: ignore[reportArgumentType]

    def _give_params(self) -> None:
        while self._absent:
            where, name, x = self._absent.pop()
            where[name] = x

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


def _first_argument(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """What a layer is called with first, and its arguments with another in its place."""
    if args:
        return args[0], lambda h: ((h, *args[1:]), kwargs)
    name = next(iter(inspect.signature(layer.forward).parameters), "")
    return kwargs[name], lambda h: (args, {**kwargs, name: h})


def _absent_like(x: Tensor) -> Tensor:
    return x if type(x) is AbsentTensor else AbsentTensor.of(x)
