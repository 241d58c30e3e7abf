"""Finds writes to parameters inside a loss, which must not change them, and names the leaves.

Tensors that share memory share a count of writes, their version, except with their `.data`. A lazy leaf's `.data` is
made to share it. That of a leaf which enters as a plain tensor does not, because torch.compile accepts no other kind.
For those leaves a sum of bits is compared too, once: a loss that bypasses the count does so in its first step already.
In a capture the schemas of the graph's ops give the writes, through `.data` too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from shardfn.core import raise_all
from shardfn.graph import storage_of, tensors_in

DATA: Any = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_REMEDY = "Parameters are immutable there: write to a clone(), or return the new value as aux."
_UNCHANGED = "The state passed in is unchanged."


def refused_write(line: str) -> ValueError:
    """Returns the error of a write to a parameter inside a loss that has not reached the state.

    Args:
        line: the leaf, and how it is written to.

    Example:
        >>> str(refused_write("params['w'] is written to inside the loss (by add_)")).splitlines()[-1]
        "  - params['w'] is written to inside the loss (by add_)"
    """
    return ValueError(f"parameters are written to inside the loss. {_REMEDY} {_UNCHANGED}\n  - {line}")


class Watch:
    """Tensors that must not be written to for as long as a loss and its backward run.

    `check` compares versions with those at `add`. The caller must not write to an added tensor before the last `check`.

    Args:
        bits: whether the bits of the state's own tensors are compared as well, at the first `check` of each place.
    """

    def __init__(self, *, bits: bool = False) -> None:
        self._bits: list[tuple[str, Tensor, Tensor]] | None = [] if bits else None
        self._compared: set[str] = set()
        self._seen: list[_WatchedTensor] = []
        self._kept: list[tuple[str, Tensor, int]] = []
        self._entered: list[tuple[str, Tensor, int]] = []

    def enter(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Watches the tensors that enter a loss as leaves for other memory, by `x.data = ...`.

        They are kept alive as long as this object.
        """
        self._entered += [(path, x, _place_of(x)) for path, x in named]

    def keep(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Watches the state's own tensors, each with the path of its leaf: they are in memory anyway."""
        # No sums of whole leaves: these are dropped and made again, and writes to them are lost with them.
        if self._bits is not None:
            self._bits += [(path, x, _sum_of_bits(x)) for path, x in named]
        self._kept += [(path, x, x._version) for path, x in named if not x.is_inference()]
        for path, x in named:
            if x.is_inference():  # inference tensors have no count of their own
                self._add_witness(path, x, kept=True)

    def add(self, path: str, x: Tensor) -> None:
        """Watches a tensor of a leaf that is not the state's, without keeping its memory alive."""
        self._add_witness(path, x, kept=False)

    def _add_witness(self, path: str, x: Tensor, *, kept: bool) -> None:
        # A detached alias has the count of `x`, and once it is given other memory holds none of its own.
        witness = x.detach()
        witness.data = x.new_empty(0)
        self._seen.append(_WatchedTensor(path, witness, witness._version, kept, StorageWeakRef(x.untyped_storage())))

    def check(self, where: str) -> None:
        """Compares versions, memory and bits with those at the start.

        Args:
            where: the code that has run since, such as "the loss".

        Raises:
            ValueError: lists every leaf that was written to.
        """
        written = [x for x in self._seen if x.witness._version != x.version]
        own = [path for path, x, version in self._kept if x._version != version]
        changed = self._find_changed(where)
        moved = [path for path, x, memory in self._entered if _place_of(x) != memory]
        lost = bool(changed or own) or any(x.kept for x in written)
        state = (
            "The state passed in has changed with it on this rank, so that it must not be used any more: start from a"
            " checkpoint, or from init."
            if lost
            else _UNCHANGED
        )
        raise_all(
            ValueError,
            f"parameters are written to inside {where}. {_REMEDY} {state}",
            [
                f"{path} is written to inside {where}"
                for path in sorted({x.path for x in written} | {*own, *moved, *changed})
            ],
        )

    def _find_changed(self, where: str) -> list[str]:
        """Returns the leaves whose sum of bits has changed since `keep`."""
        if not self._bits or where in self._compared:
            return []
        # Once, as it reads every parameter: a loss that bypasses the count does so the first time, too.
        self._compared.add(where)
        same = torch.stack([_sum_of_bits(x).eq(total).cpu() for _, x, total in self._bits]).tolist()
        return [path for (path, *_), is_same in zip(self._bits, same, strict=True) if not is_same]

    def forget_dead(self) -> None:
        """Drops tensors that are gone. `check` has seen writes to them."""
        self._seen = [x for x in self._seen if not x.memory.expired()]


def _place_of(x: Tensor) -> int:
    """Returns the address of its data, or of its storage if it has no data."""
    return x.data_ptr() if type(x) is Tensor else storage_of(x)


def _sum_of_bits(x: Tensor) -> Tensor:
    """Returns a checksum of the bits: other values change it, except by chance."""
    with torch.no_grad():
        real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        size = real.element_size()
        if real.is_contiguous() and real.nbytes % 8 == real.storage_offset() * size % 8 == 0:
            return real.reshape(-1).view(torch.int64).sum()  # 8 bytes at a time
        as_ints = torch.int64 if size == 8 else torch.int32 if size == 4 else torch.int16 if size == 2 else torch.uint8
        return real.view(as_ints).sum(dtype=torch.int64)


class _WatchedTensor(NamedTuple):
    """A watched tensor: an empty one shares its version."""

    path: str
    witness: Tensor
    version: int
    kept: bool
    memory: StorageWeakRef


def check_graph(
    graph: Graph, leaves: Mapping[int, str], name: str, what: str = "parameters", remedy: str = _REMEDY
) -> None:
    """Refuses ops that write to parameters.

    Args:
        graph: the part of the step captured so far: forward and backward.
        leaves: the path of a leaf by storage.
        name: name of the captured code, such as "the loss".
        what: the leaves' tree, for the error.
        remedy: the remedy, for the error.

    Raises:
        ValueError: lists every such op, with its line.
    """
    found: dict[str, None] = {}
    for node in graph.nodes:
        for x in _find_written(node):
            # By memory: a write through any view counts.
            if storage_of(x) in leaves:
                where = node.meta.get("where", "a line outside of " + name + "'s own")
                found[f"{leaves[storage_of(x)]} is written to inside {name}: {where} ({node.target})"] = None
    raise_all(
        ValueError,
        f"{what} are written to inside {name}. {remedy} Nothing has run; the state passed in is unchanged.",
        list(found),
    )


def _find_written(node: Node) -> Iterable[Tensor]:
    """Yields the tensors that an op writes to."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.is_mutable:
        return
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    for a in schema.arguments:
        x = given.get(a.name)
        if a.alias_info is not None and a.alias_info.is_write and x is not None:
            for n in x if isinstance(x, (list, tuple)) else (x,):
                yield from tensors_in(n.meta["val"]) if isinstance(n, Node) else ()
