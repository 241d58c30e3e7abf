"""Module with layers on several ranks. Each rank runs the module's forward around the rank's layers.

Each layer is replaced by a placeholder that handles the call. On a rank with layers [a, b):

    layers before a    are not run; their results are absent
    layer a            receives the previous rank's result in place of its first argument
    a ... b - 1        run
    layer b            is where it ends: its first argument is sent to the next rank
    no layer b         the forward runs to its end

Code before the list runs on each rank, and makes the layers' other arguments, such as masks and rotary angles.
Parameters of such code are absent, so none is gathered. If another value than the first layer's first argument depends
on a parameter, the code runs again with the parameters: then several stages use these leaves.

Groups of equal layers in a list, with a stack of leaves each, and stages made of cut stacks.

Layers of the same kind have leaves of the same names, shapes and dtypes. A list of the same kind has one stack. If
there are several kinds, such as dense layers before mixtures of experts, each kind has a separate stack, under the
number of the first layer.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from shardfn.core import Ambient, P, frozen, named_modules, named_parameters, raise_all

from ._draws import Draws
from ._partial_forward import Ended, LayerSpan, NeedsValue, PartialForward, RunAgain, is_placeholder


class LayerKind(NamedTuple):
    """Layers of the same kind.

    Attributes:
        layers: numbers of the layers, in order.
        names: names of a layer's leaves.
        frozen: names of leaves with `requires_grad=False`.
    """

    layers: tuple[int, ...]
    names: tuple[str, ...]
    frozen: frozenset[str]

    @property
    def key(self) -> str:
        """Returns the key of the kind's stack, where there are several."""
        return str(self.layers[0])


class LayerKinds(NamedTuple):
    """Kinds of layers of a list, for example dense layers and layers with experts.

    Attributes:
        path: name of the list.
        kinds: kinds in the order of their first layers.
    """

    path: str
    kinds: tuple[LayerKind, ...]

    @staticmethod
    def of(path: str, layers: Sequence[nn.Module]) -> "LayerKinds":
        """Returns the kinds of a list of modules.

        Raises:
            ValueError: some layers of a kind freeze leaves that other layers train. The message lists the leaves.
        """
        own = [dict(named_parameters(layer)) for layer in layers]
        found: dict[Any, list[int]] = {}
        for i, leaves in enumerate(own):
            found.setdefault(frozenset((name, x.shape, x.dtype) for name, x in leaves.items()), []).append(i)
        raise_all(
            ValueError,
            f"{path!r} has layers that are frozen and layers that are not, and a stacked leaf is trained as a whole."
            " Set requires_grad alike in all layers of a kind, or leave out layers=:",
            [
                f"{path}.{i}.{name}.requires_grad is {x.requires_grad},"
                f" {path}.{rows[0]}.{name}.requires_grad is {y.requires_grad}"
                for rows in found.values()
                for i in rows
                for name, x in own[i].items()
                if x.requires_grad is not (y := own[rows[0]][name]).requires_grad
            ],
        )
        return LayerKinds(path, tuple(_make_kind(rows, own[rows[0]]) for rows in found.values()))

    @property
    def num_layers(self) -> int:
        """Returns the number of layers of all kinds."""
        return sum(len(kind.layers) for kind in self.kinds)

    @property
    def trainable(self) -> Any:
        """Returns whether each stacked leaf is trained, as a tree like the stacks in params."""
        return self.tree([{name: name not in kind.frozen for name in kind.names} for kind in self.kinds])

    def specs(self, of_layers: Mapping[str, P], axis: str) -> Any:
        """Returns the specs of the stacks, as a tree like the stacks in params: dim 0 is cut along `axis`.

        Args:
            of_layers: specs of the layers' leaves by full name.
            axis: axis of the stages.
        """
        firsts = [(kind, f"{self.path}.{kind.layers[0]}.") for kind in self.kinds]
        return self.tree([{name: P(axis, *of_layers[dot + name]) for name in kind.names} for kind, dot in firsts])

    def stacked(self, params: Mapping[str, Tensor]) -> Any:
        """Stacks the parameters of the layers of each kind, in the form of params. `params` has full names."""
        stacks: list[dict[str, Tensor]] = []
        for kind in self.kinds:
            leaves = {
                name: torch.stack([params[f"{self.path}.{i}.{name}"] for i in kind.layers]) for name in kind.names
            }
            stacks.append({name: frozen(x) if name in kind.frozen else x for name, x in leaves.items()})
        return self.tree(stacks)

    def tree(self, stacks: Sequence[Any]) -> Any:
        """Returns the stacks of all kinds in the form of params."""
        if len(self.kinds) == 1:
            return stacks[0]
        return {kind.key: stack for kind, stack in zip(self.kinds, stacks, strict=True)}

    def stacks(self, tree: Mapping[str, Any]) -> list[Any]:
        """Returns the stack, by kind: the inverse of `tree`.

        Raises:
            ValueError: there are other stacks, or other leaves.
        """
        keys = [kind.key for kind in self.kinds]
        if len(keys) > 1 and set(tree) != set(keys):
            raise ValueError(f"params[{self.path!r}] must have the kinds of the layers, {keys}, got {sorted(tree)}.")
        stacks: list[Any] = [tree] if len(keys) == 1 else [tree[key] for key in keys]
        for kind, stack in zip(self.kinds, stacks, strict=True):
            if set(stack) != set(kind.names):
                raise ValueError(
                    f"{self.stack_path(kind)} must have the parameters of the layers, {sorted(kind.names)}, got"
                    f" {sorted(stack)}."
                )
        return stacks

    def stack_path(self, kind: LayerKind) -> str:
        """Returns the stack of a kind, in words."""
        return f"params[{self.path!r}]" + (f"[{kind.key!r}]" if len(self.kinds) > 1 else "")

    def flat(self, tree: Mapping[str, Any], start: int, num: int) -> dict[str, Tensor]:
        """Returns the leaves of some layers by full name, from the rows of each stack.

        Only of these layers, or of all layers.

        Raises:
            ValueError: a stack has another number of rows. The message lists the stacks.
        """
        out: dict[str, Tensor] = {}
        for kind, stack in zip(self.kinds, self.stacks(tree), strict=True):
            own = [i for i in kind.layers if start <= i < start + num]
            wrong = {name: len(x) for name, x in stack.items() if own and len(x) not in (len(own), len(kind.layers))}
            if wrong:
                raise ValueError(f"{self.stack_path(kind)} should have {len(own)} layers, and has {wrong}")
            for name, x in stack.items() if own else ():
                rows = x.unbind(0)
                first = kind.layers.index(own[0]) if len(rows) > len(own) else 0
                out.update({f"{self.path}.{i}.{name}": rows[first + j] for j, i in enumerate(own)})
        return out

    def end(self, start: int, rows: Sequence[int], *, last: bool) -> int:
        """Returns the layer after a rank's layers.

        Args:
            start: first layer of the rank.
            rows: number of rows of the stack by kind: all of them if the stack is not cut.
            last: whether the rank is the last rank, with all remaining layers.
        """
        if last:
            return self.num_layers
        cut = [(kind, num) for kind, num in zip(self.kinds, rows, strict=True) if num < len(kind.layers)]
        wanted = [(kind, _count_before(kind, start) + num) for kind, num in cut]
        return next(i for i in range(start, self.num_layers + 1) if all(_count_before(k, i) == n for k, n in wanted))

    def cut(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Returns by kind whether the stack is cut: whether the ranks' rows add up to all rows. See `shares`."""
        return [sum(own) == len(kind.layers) for kind, own in zip(self.kinds, rows, strict=True)]

    def shares(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Returns the number of layers of each rank.

        Layers of uncut stacks run with the next layer of a cut stack. For example, a dense layer in front of 6 layers
        of experts on 2 ranks gives 4 and 3 layers.

        Args:
            rows: numbers of rows of the stack by kind and rank.

        Raises:
            ValueError: the rows of a rank are not the rows of consecutive layers.
        """
        num, bounds = len(rows[0]), [0]
        cut = [(kind, own) for kind, own, is_cut in zip(self.kinds, rows, self.cut(rows), strict=True) if is_cut]
        for rank in range(1, num):
            wanted = [(kind, sum(own[:rank])) for kind, own in cut]
            behind = (
                i for i in range(bounds[-1], self.num_layers + 1) if all(_count_before(k, i) == n for k, n in wanted)
            )
            found = next(behind, None)
            if found is None:
                later = [f"{self.stack_path(k)} from layer {k.layers[n]} on" for k, n in wanted if n < len(k.layers)]
                raise ValueError(
                    f"{self.path!r} has layers of {len(self.kinds)} kinds, each cut evenly, and so rank {rank} of {num}"
                    f" would have {', '.join(later)}, while the ranks before lack the layers behind these. Use"
                    " another number of stages, or cut only one kind, as in"
                    f" specs={{{self.path!r}: {self._describe_cuts()}}}."
                )
            bounds.append(found)
        bounds.append(self.num_layers)
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def _describe_cuts(self) -> str:
        """Returns the specs that cut only the kind with the most layers, in words."""
        most = max(self.kinds, key=lambda kind: len(kind.layers))
        return "{" + ", ".join(f"{k.key!r}: {'P(axis)' if k is most else 'P()'}" for k in self.kinds) + "}"


def _make_kind(rows: Sequence[int], first: Mapping[str, Tensor]) -> LayerKind:
    """Makes a kind from the numbers of layers and the leaves of the first layer."""
    return LayerKind(tuple(rows), tuple(first), frozenset(name for name, x in first.items() if not x.requires_grad))


def _count_before(kind: LayerKind, layer: int) -> int:
    """Returns the number of layers of a kind before a layer."""
    return sum(i < layer for i in kind.layers)


_SPAN = Ambient[LayerSpan]("layers of a module on this rank", by_thread=True)


class RunsModule(Protocol):
    """Interface of a module's function without named layers: `ModuleFunction`."""

    module: nn.Module
    trainable: dict[str, bool]
    specs: Any

    def draws(self, key: Tensor, index_B: Tensor) -> Callable[[], Draws]:
        """Makes the random numbers of a single call."""
        ...

    def run(
        self,
        draws: Draws,
        params: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Returns the forward's result, and the new values of the buffers in `state`."""
        ...


class LayeredFunction:
    """Forward of a module as a function of the parameters, with layers stacked by kind.

    Made by `from_module(module, layers=...)`. An ordinary function. `pipeline_module` puts the layers on several ranks.

    Attributes:
        module: the module.
        path: path of the list of layers, and in params the key of the stacked leaves.
        kinds: groups of equal layers.
        num_layers: the number of layers.
        needs_params: whether layers need values from the code before, other than the first argument, that depend on
            parameters. Found when a stage runs.
        returns: further results of a layer, and the structure of all results. None until a stage has learnt the
            structure.
        trainable: values as of a `ModuleFunction`, a tree like the parameters.
        specs: specs as of a `ModuleFunction`, a tree like the parameters. Stacked leaves are cut along "pp", the
            default axis of `pipeline_module`. A mesh need not have the axis.
    """

    def __init__(self, function: RunsModule, kinds: LayerKinds) -> None:
        self._function, self.module, self.path, self.kinds = function, function.module, kinds.path, kinds
        self.num_layers = kinds.num_layers
        flags = function.trainable.items()
        self.trainable: dict[str, Any] = {k: v for k, v in flags if not k.startswith(f"{self.path}.")}
        self.trainable[self.path] = kinds.trainable
        self.specs: dict[str, Any] = {k: v for k, v in function.specs.items() if not k.startswith(f"{self.path}.")}
        self.specs[self.path] = kinds.specs(function.specs, "pp")
        self.needs_params = False
        self.returns: tuple[list[Any], Any] | None = None

    def __call__(self, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's forward.

        Args:
            params: parameters by name, and under the path of the list the layers' leaves by name, each [L, *shape].
                With several kinds of layers there is such a dict for each kind, under the number of the first layer.
            *args: the module's arguments.
            **kwargs: arguments by name.

        Raises:
            ValueError: as of `ModuleFunction`, or the forward does not call the layers once each, in sequence, each on
                the result of the previous layer.
        """
        return self._run(Draws(self.module), params, args, kwargs)

    def within(self, forward: Callable[..., Any], params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs `forward(*args, **kwargs)`, which calls the module, or a part with all layers, once.

        Args:
            forward: function to run in place of the module, see `ModuleFunction.within`. On ranks without the last
                layer the function runs up to a layer.
            params: parameters as of the module's forward.
            *args: arguments of `forward`.
            **kwargs: arguments by name.
        """
        return self._run(Draws(self.module), params, args, kwargs, forward)

    def keyed(
        self, key: Int64[Tensor, "2"], index_B: Int64[Tensor, " b"], forward: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Returns the same function with dropout.

        See `ModuleFunction.keyed`. Masks do not depend on the rank of a layer.
        """
        draws = self._function.draws(key, index_B)

        def f(params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
            return self._run(draws(), params, args, kwargs, forward)

        return f

    def on_span(self, span: LayerSpan, loss: Callable[..., Any], *args: Any) -> Any:
        """Runs a loss of this function on a rank that has some of the layers.

        Args:
            span: layers of the rank.
            loss: loss that calls this function once. The stack in the parameters has the rows of the span.
            *args: arguments of the loss.

        Returns:
            The input of the layer after the span, or, if the span ends the forward, the loss's result.

        Raises:
            ValueError: the loss does not call this function once, or cannot be cut in stages.
        """
        while True:
            span.calls = 0
            try:
                with _SPAN.bound(span):
                    out = loss(*args)
            except Ended as ended:
                out = ended.h
            except RunAgain:
                continue
            except NeedsValue as needs:
                self._require_params(str(needs))
                continue
            if not span.calls:
                raise ValueError(
                    f"the loss does not call the module, whose layers {self.path!r} are on several ranks. Call the"
                    " function of from_module in the loss, or remove pipeline()."
                )
            if not is_placeholder(out):
                return out
            self._require_params("the loss depends on it" if span.ends else "a layer's first argument depends on it")

    def _require_params(self, why: str) -> None:
        """Lets code before the layers run with parameters from now on.

        Raises:
            ValueError: the code does already, so a layer of another rank computes the needed value.
        """
        if self.needs_params:
            raise ValueError(
                f"{self.path!r} of this {type(self.module).__name__} cannot be cut in stages: something besides the"
                f" next layer uses the result of a layer ({why}). Stages hand on one tensor, from each layer to the"
                " next."
            )
        self.needs_params = True

    @property
    def layers(self) -> nn.ModuleList:
        """Returns the list of layers."""
        found = self.module.get_submodule(self.path)
        assert isinstance(found, nn.ModuleList)
        return found

    def _run(
        self,
        draws: Draws,
        params: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> Any:
        stack, span = params[self.path], _SPAN.innermost()
        if span is not None and span.stack is not None:
            pairs = zip(self.kinds.stacks(stack), self.kinds.stacks(span.shown or {}), strict=True)
            if any(x is not shown[name] for own, shown in pairs for name, x in own.items()):
                raise ValueError(
                    f"the loss calls the module with another params[{self.path!r}] than it is given: the layers are on"
                    " several ranks. Pass them on unchanged."
                )
            stack = span.stack
        whole = span is None
        span = LayerSpan(0, self.num_layers, None, True) if span is None else span
        span.calls += 1
        if span.calls > 1:
            raise ValueError(
                f"the loss calls the module twice, whose layers {self.path!r} are on several ranks: call it once, on"
                " all rows."
            )
        flat = {name: x for name, x in params.items() if name != self.path}
        try:
            flat |= self.kinds.flat(stack, span.start, span.num)
        except ValueError as error:
            hint = " A loss of blocks of layers is for pipeline_module." if whole else ""
            raise ValueError(f"{error}{hint}") from None
        run = PartialForward(self, span, draws, forward)
        return self._function.run(draws, flat, None, args, kwargs, run.call)[0]


def layered(module: nn.Module, path: str, params: Mapping[str, Tensor]) -> tuple[dict[str, Any], LayerKinds]:
    """Returns a module's parameters, stacked for the list of layers, and the kinds of layers.

    Raises:
        ValueError: there is no such list, or layers share parameters. Every leaf is listed.
    """
    try:
        layers = module.get_submodule(path)
    except AttributeError:
        layers = None
    if not isinstance(layers, nn.ModuleList) or not path or not len(layers):
        found = [p for p, sub in named_modules(module) if isinstance(sub, nn.ModuleList) and len(sub)]
        raise ValueError(
            f"layers must be one of {found}, the lists of layers of this {type(module).__name__}, got {path!r}."
        )
    problems = [
        f"{path}.{i}.{name} is {other}, too; untie them"
        for i, layer in enumerate(layers)
        for name, x in named_parameters(layer)
        if (other := _other_place(module, f"{path}.{i}", x)) is not None
    ]
    raise_all(ValueError, f"the layers of {path!r} cannot be stacked, as they share parameters:", problems)
    others = {name: x for name, x in params.items() if not name.startswith(f"{path}.")}
    kinds = LayerKinds.of(path, list(layers))
    return {**others, path: kinds.stacked(params)}, kinds


def _other_place(module: nn.Module, layer: str, x: Tensor) -> str | None:
    """Returns the other place of a layer's parameter in the module."""
    names = (name for name, y in named_parameters(module, remove_duplicate=False) if y is x)
    return next((name for name in names if not name.startswith(f"{layer}.")), None)
