"""Files of a job of DeepSpeed with experts, written by all ranks of a mesh, a share by each rank.

Tensors of experts become separate files, written by a rank that holds the tensor. All other tensors are mapped files of
the first rank. When all leaves have arrived, each rank makes some of the job's files, such as the file of an expert, or
of a rank's part of the optimizer's states. So a rank has at most one expert's tensor, or one of the job's files, in
memory.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._ds_flats import Flats
from ._ds_job import Partition
from ._ds_making import give_name, making_of
from ._ds_objects import save_objects
from ._ds_parts import StatePart
from ._ds_records import Counters, Records


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
        self._place, self._making, self._cut = place, making_of(place), cut
        self._flats = Flats(self._making / "flat", cut)
        self._records = Records(cut, counters, self._load_part)

    def make(self) -> None:
        """Makes the directory. On the first rank."""
        shutil.rmtree(self._making, ignore_errors=True)
        self._flats.make()
        for kind in ("fp32", *self._cut.states):
            self._expert_path(kind, "").parent.mkdir(parents=True)

    def open(self) -> None:
        """Finds the directory. On the other ranks.

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
        give_name(self._place, "latest")

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
