"""Files of a checkpoint of DeepSpeed, filled by leaves that are put in sequence.

A checkpoint is a directory that gets its name when complete. Flat groups and weights are mapped files until all leaves
have been put. Then each rank's part is written. So one leaf and one rank's part are in memory, and twice the checkpoint
is on the disk.

With experts all ranks write, a share by each rank. Tensors of experts become separate files, written by a rank
that holds the tensor. All other tensors are mapped files of the first rank. So a rank has at most one expert's tensor,
or one of the job's files, in memory.
"""

import os
import pathlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ._partition import FlatGroup, Partition
from ._parts import StatePart
from ._records import Counters, Records, save_objects


def unfinished_path(place: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a checkpoint that has no name yet."""
    return place.with_name(place.name + ".tmp")


def publish_checkpoint(place: pathlib.Path, newest: str) -> None:
    """Gives a complete checkpoint its name, and writes the name to the file `newest` next to the checkpoint."""
    unfinished_path(place).rename(place)
    made = place.with_name(newest + ".tmp")
    made.write_text(place.name)
    made.rename(place.with_name(newest))


class UnfinishedFiles(ABC):
    """Files of a checkpoint that get the final name only when all are written. An error leaves nothing behind.

    Args:
        place: directory of the checkpoint.
        newest: file next to the directory with the name of the newest checkpoint.
    """

    def __init__(self, place: pathlib.Path, newest: str) -> None:
        self._place, self._newest, self._making = place, newest, unfinished_path(place)

    def __enter__(self) -> Self:
        shutil.rmtree(self._making, ignore_errors=True)
        try:
            self._make_directory()
        except BaseException:
            shutil.rmtree(self._making, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._write_files()
                publish_checkpoint(self._place, self._newest)
        finally:
            # A complete checkpoint has been renamed already.
            shutil.rmtree(self._making, ignore_errors=True)

    @abstractmethod
    def put(self, name: StatePart, x: Tensor) -> None:
        """Takes a leaf: a parameter, a buffer, or a state of a parameter."""

    def _make_directory(self) -> None:
        """Makes the directory."""
        self._making.mkdir(parents=True)

    @abstractmethod
    def _write_files(self) -> None:
        """Writes the files that need all leaves."""


class FlatFiles:
    """Flat groups, and weights in the dtype of the module, filled by a single rank. Experts are elsewhere.

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


class PartitionedFiles(UnfinishedFiles):
    """Writes a checkpoint with a file for each rank.

    Args:
        place: directory of the checkpoint.
        cut: partition of the job.
        counters: progress of the job.
    """

    def __init__(self, place: pathlib.Path, cut: Partition, counters: Counters) -> None:
        super().__init__(place, "latest")
        self._cut = cut
        self._flats = FlatFiles(self._making / "flat", cut)
        self._records = Records(cut, counters, self._flats.part)

    def _make_directory(self) -> None:
        self._flats.make()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            # An error may keep this object alive, and mapped files free the disk space only afterwards.
            self._flats.close()

    def put(self, name: StatePart, x: Tensor) -> None:
        """Takes a leaf: a parameter, a buffer, or a state of a parameter."""
        self._flats.put(name, x)

    def _write_files(self) -> None:
        third = self._cut.stage == 3
        for rank in range(self._cut.ranks):
            save_objects(self._records.optimizer(rank), self._making / self._cut.optimizer_file(rank))
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if third else "mp_rank_00_model_states.pt"
            if third or rank == 0:
                model = self._records.model(rank, self._flats.weights, self._flats.buffers)
                save_objects(model, self._making / name)
        shutil.rmtree(self._making / "flat")


class ExpertFiles:
    """Files that get their names when all files are written.

    Args:
        place: directory of the checkpoint, shared by all ranks.
        cut: partition of the job.
        counters: progress of the job.
        weights_only: whether states of the optimizer are left out.
    """

    def __init__(self, place: pathlib.Path, cut: Partition, counters: Counters, *, weights_only: bool = False) -> None:
        self._weights_only = weights_only
        self._place, self._making, self._cut = place, unfinished_path(place), cut
        self._flats = FlatFiles(self._making / "flat", cut)
        self._records = Records(cut, counters, self._load_part)

    def make(self) -> None:
        """Makes the directory. On the first rank."""
        shutil.rmtree(self._making, ignore_errors=True)
        self._flats.make()
        for kind in ("fp32", *self._cut.states):
            self._expert_path(kind, "").parent.mkdir(parents=True)

    def open(self) -> None:
        """Finds the directory that the first rank has made. The other ranks call this method.

        Raises:
            FileNotFoundError: the first rank has made the directory elsewhere.
        """
        if not self._making.is_dir():
            raise FileNotFoundError(
                f"{self._making}, which the first rank has made, is not on this rank: take a directory that all ranks"
                " share."
            )

    def put(self, part: StatePart, x: Tensor) -> None:
        """Takes an expert's tensor, on a rank with the expert, or any other tensor, on the first rank."""
        if self._cut.experts.has(part.name):
            torch.save(x.detach().cpu().float().contiguous().clone(), self._expert_path(part.kind, part.name))
        else:
            self._flats.put(part, x)

    def write(self, share: int, of: int) -> None:
        """Writes one share of the files, the first on the first rank."""
        try:
            if share:
                self._flats.open()
            for k, (name, made) in enumerate(self._make_files()):
                if k % of == share:
                    save_objects(made(), self._making / name)
        finally:
            self._flats.close()

    def name(self) -> None:
        """Gives the directory its name. On the first rank."""
        shutil.rmtree(self._making / "flat")
        shutil.rmtree(self._making / "experts")
        publish_checkpoint(self._place, "latest")

    def remove(self) -> None:
        """Removes files that have no name yet. On the first rank."""
        self._flats.close()
        shutil.rmtree(self._making, ignore_errors=True)

    def _expert_path(self, kind: str, name: str) -> pathlib.Path:
        return self._making / "experts" / kind / f"{name}.pt"

    def _load_expert(self, kind: str, name: str) -> Tensor:
        return torch.load(self._expert_path(kind, name), mmap=True, weights_only=True)

    def _load_part(self, kind: str, number: int, rank: int) -> Tensor:
        group, member = self._cut.groups[number], self._cut.member(rank, self._cut.groups[number])
        if not group.experts:
            return self._flats.part(kind, number, member)
        experts, out = self._cut.experts, torch.zeros(group.size)
        here, _ = experts.place(rank, self._cut.ranks)
        for name in group.shapes:
            for cut in self._cut.cuts(name):
                if cut.rank == member:
                    whole = self._load_expert(kind, experts.on(here, name)).flatten()
                    out[cut.at : cut.at + cut.stop - cut.start] = whole[cut.start : cut.stop]
        return out

    def _make_files(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the names of all files, and functions that make the contents. Only the first rank has buffers."""
        yield "mp_rank_00_model_states.pt", self._make_model
        named: dict[tuple[int, int], list[str]] = {}
        for name in filter(self._cut.experts.has, self._cut.order):
            named.setdefault(self._cut.experts.at(name), []).append(name)
        for (layer, number), names in named.items():
            yield (
                f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt",
                lambda names=names: self._load_weights(names),
            )
        if self._weights_only:
            return
        if self._cut.stage:
            for rank in range(self._cut.ranks):
                yield self._cut.optimizer_file(rank), lambda rank=rank: self._records.optimizer(rank)
        else:
            for rank in range(self._cut.experts.ranks):
                own = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
                yield own, lambda rank=rank: {"optimizer": self._records.numbered(rank)}

    def _load_weights(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._load_expert("fp32", name).to(self._cut.dtype).clone() for name in names}

    def _make_model(self) -> dict[str, Any]:
        experts, trained = self._cut.experts, self._cut.trained()
        frozen = [x for x in self._cut.shapes if experts.has(x) and x not in trained and not experts.local(x)[0]]
        model = self._records.model(0, self._flats.weights | self._load_weights(frozen), self._flats.buffers)
        return model | ({"optimizer": None} if self._weights_only else {})
