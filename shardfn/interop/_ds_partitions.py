"""Files of each rank of a job of DeepSpeed, from leaves that come one after another.

Flat groups are mapped files until all leaves have arrived. Then each rank's part is written. So one leaf and one rank's
part are in memory, and twice the checkpoint is on the disk.
"""

import pathlib
import shutil
from types import TracebackType

from torch import Tensor

from ._ds_flats import Flats
from ._ds_job import Partition
from ._ds_making import FilesInTheMaking
from ._ds_objects import save_objects
from ._ds_parts import StatePart
from ._ds_records import Counters, Records


class PartitionedFiles(FilesInTheMaking):
    """Writes a checkpoint with a file for each rank.

    Args:
        place: directory of the checkpoint.
        cut: partition of the job.
        counters: progress of the job.
    """

    def __init__(self, place: pathlib.Path, cut: Partition, counters: Counters) -> None:
        super().__init__(place, "latest")
        self._cut = cut
        self._flats = Flats(self._making / "flat", cut)
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
