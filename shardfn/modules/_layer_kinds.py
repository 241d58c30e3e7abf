"""Groups of equal layers in a list, with a stack of leaves each, and stages made of cut stacks.

Layers of the same kind have leaves of the same names, shapes and dtypes. A list of the same kind has one stack. If
there are several kinds, such as dense layers before mixtures of experts, each kind has a separate stack, under the
number of the first layer.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.core import P, frozen, named_parameters, raise_all


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
        """Returns the stacks of all kinds in the form of params, from the layers' leaves by full name."""
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
