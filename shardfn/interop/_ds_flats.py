"""Flat groups of a job of DeepSpeed, and weights, in mapped files that leaves fill one after another.

So one leaf, and one rank's part of a group, are in memory at a time.
"""

import os
import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ._ds_flat_groups import FlatGroup
from ._ds_job import Partition
from ._ds_parts import StatePart


class Flats:
    """Flat groups, and weights in the dtype of the module, filled by one rank. Experts are elsewhere.

    Args:
        directory: directory of the files.
        cut: partition of the job.

    Attributes:
        weights: weights by name. At stage 3 only frozen weights.
        buffers: buffers by name.
    """

    def __init__(self, directory: pathlib.Path, cut: Partition) -> None:
        self._directory, self._cut, self._trained = directory, cut, cut.trained()
        self._flats: dict[tuple[str, int], Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def make(self) -> None:
        """Makes the files."""
        self._directory.mkdir(parents=True)
        for name, count, dtype in self._list_files():
            if not count:
                continue
            # A write to a mapped file that finds the disk full would end the process.
            with open(self._directory / name, "wb") as f:
                os.posix_fallocate(f.fileno(), 0, count * dtype.itemsize)
        self.open()

    def open(self) -> None:
        """Maps the files that a rank has made."""
        for kind, number, group in self._list_groups():
            flat = self._map_file(f"{kind}.{number}", group.size * group.ranks, torch.float32)
            self._flats[kind, number] = flat.view(group.ranks, group.size)
        there = self._weight_shapes()
        whole = self._map_file("weights", sum(s.numel() for s in there.values()), self._cut.dtype)
        for (name, shape), x in zip(there.items(), whole.split([s.numel() for s in there.values()]), strict=True):
            self.weights[name] = x.view(shape)

    def close(self) -> None:
        """Frees the files, which take space on the disk while mapped."""
        self._flats, self.weights = {}, {}

    def put(self, name: StatePart, x: Tensor) -> None:
        """Takes a leaf: a parameter, a buffer, or a state of a parameter."""
        value = x.detach().cpu()
        if name.kind == "buffer":
            self.buffers[name.name] = value.clone()
            return
        if name.kind == "fp32" and name.name in self.weights:
            self.weights[name.name].copy_(value)
        if name.name not in self._trained:
            return
        flat = value.flatten()
        for cut in self._cut.cuts(name.name):
            part = self._flats[name.kind, cut.group][cut.rank]
            part[cut.at : cut.at + cut.stop - cut.start] = flat[cut.start : cut.stop]

    def part(self, kind: str, number: int, rank: int) -> Tensor:
        """Returns a rank's part of a group. The rank is counted among the ranks that share the group."""
        return self._flats[kind, number][rank].clone()

    def _list_groups(self) -> Iterator[tuple[str, int, FlatGroup]]:
        dense = [(number, group) for number, group in enumerate(self._cut.groups) if not group.experts]
        return ((kind, number, group) for number, group in dense for kind in ("fp32", *self._cut.states))

    def _list_files(self) -> Iterator[tuple[str, int, torch.dtype]]:
        for kind, number, group in self._list_groups():
            yield f"{kind}.{number}", group.size * group.ranks, torch.float32
        yield "weights", sum(s.numel() for s in self._weight_shapes().values()), self._cut.dtype

    def _weight_shapes(self) -> dict[str, torch.Size]:
        every = {n: s for n, s in self._cut.shapes.items() if not self._cut.experts.has(n)}
        return {n: s for n, s in every.items() if self._cut.stage < 3 or n not in self._trained}

    def _map_file(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.from_file(str(self._directory / name), shared=True, size=count, dtype=dtype)
