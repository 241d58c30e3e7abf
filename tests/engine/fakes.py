"""A wire of two ranks with only one present: the other's messages are computed, and all transfers are recorded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import shardfn as sf
from shardfn.collectives import Channel, Channels
from shardfn.collectives.transport._rounds import Rounds
from shardfn.core import Mesh, Pending, tree_flatten
from shardfn.engine import Plan, Planner


class Wire(Channels):
    """Rank 0's communicators. `log` has each transfer as (kind, number of elements), `waited` the order of waits."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.waited: list[int] = []
        # The elements of this rank's message -> the message of all ranks' pieces.
        self.messages: dict[tuple[float, ...], Tensor] = {}
        self.line = _Line(self)

    def gather(self, axes: tuple[str, ...]) -> Channel:
        return self.line if axes else _Line(self, 1)

    def reduce(self, axes: tuple[str, ...]) -> Channel:
        return self.gather(axes)

    def flush(self) -> None:
        pass


class _Line(Channel):
    def __init__(self, wire: Wire, size: int = 2) -> None:
        self._wire, self.size, self.index, self.axes, self.shape = wire, size, 0, ("dp",), {"dp": size}
        self._direct = False

    def _sent(self, kind: str, x: Tensor, value: Tensor) -> Pending[Tensor]:
        number = len(self._wire.log)
        self._wire.log.append((kind, x.numel()))

        def result() -> Tensor:
            self._wire.waited.append(number)
            return value

        return Pending(result, lambda: False)

    def all_gather(self, own: Tensor, sizes: Sequence[int], into: Tensor | None = None, **how: Any) -> Pending[Tensor]:
        message = self._wire.messages[tuple(own.reshape(-1).tolist())]
        assert list(sizes) == [own.numel(), message.numel() - own.numel()]
        return self._sent("gather", own, message if into is None else into.copy_(message))

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], *, reuse: bool = False) -> Pending[Tensor]:
        """The other rank has sent the same, so the sum is twice this rank's."""
        del reuse
        assert sum(sizes) == flat.numel()
        return self._sent("reduce", flat, 2 * flat[: sizes[0]])


class ScriptedRounds(Rounds):
    """Rounds in which the other rank sends the values of `says`, one after another, and then this rank's own."""

    def __init__(self, says: Sequence[int] = (), text: str = "") -> None:
        super().__init__(None, 0, lambda error: sf.RankError(str(error)))
        self.says, self.text, self.heard = list(says), text, list[int]()

    def exchange(self, value: int, kind: Any = None, timeout: Any = None) -> list[int]:
        del kind, timeout
        self.heard.append(value)
        return [value, self.says.pop(0) if self.says else value]

    def gather(self, value: Any) -> list[Any]:
        return [value, (1, self.text)]


def plan_of(shapes: dict[str, tuple[int, ...]], zero: sf.Zero) -> tuple[Plan, list[Tensor], list[Tensor]]:
    """The plan of such leaves on two ranks; the leaves; and rank 0's parts of them."""
    mesh = Mesh({"dp": 2}, torch.device("cpu"), abstract=True)
    leaves, treedef = tree_flatten({k: torch.empty(s, device="meta") for k, s in shapes.items()})
    plan = Planner(mesh, sf.P(), sf.P("dp"), zero, True, None).plan(treedef, leaves)
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randn(leaf.block, generator=draw) for leaf in plan.layers]
    kept = [leaf.used.of(x, 0) for leaf, x in zip(plan.layers, wholes, strict=True)]
    return plan, wholes, [x.clone() for x in kept]
