"""The files of each rank of a job of DeepSpeed's, from leaves that come one after another.

Flat groups are mapped files until all leaves have arrived; then each rank's part is written. So one leaf and one rank's
part are in memory, and twice the checkpoint is on the disk.
"""

import os
import pathlib
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ._ds_job import Partition
from ._ds_making import FilesInTheMaking
from ._ds_objects import DynamicLossScaler, FragmentAddress, LossScaler, ZeroStage, save_objects
from ._ds_parts import StatePart

# The version whose layout the files have.
VERSION = "0.19.8"


class Counters:
    """The progress of a job.

    Args:
        updates: of the parameters.
        scale: the state of the loss scale; `()` without one.
    """

    def __init__(self, updates: int, scale: Any) -> None:
        self.updates, self.scale = updates, scale
        # DeepSpeed counts skipped steps, which are not updates here.
        self.steps = int(scale.count) if hasattr(scale, "count") and scale else updates


class PartitionedFiles(FilesInTheMaking):
    """Writes a checkpoint with a file for each rank.

    Args:
        place: the checkpoint's directory.
        cut: the job's partition.
        counters: the job's progress.
    """

    def __init__(self, place: pathlib.Path, cut: Partition, counters: Counters) -> None:
        super().__init__(place, "latest")
        self._cut, self._counters = cut, counters
        self._flats: dict[tuple[str, int], Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}

    def _begin(self) -> None:
        (self._making / "flat").mkdir(parents=True)
        kinds = ("fp32", *self._cut.states)
        for number, group in enumerate(self._cut.groups):
            for kind in kinds:
                flat = self._mapped(f"{kind}.{number}", group.size * self._cut.ranks, torch.float32)
                self._flats[kind, number] = flat.view(self._cut.ranks, group.size)
        trained = self._cut.trained()
        there = {n: s for n, s in self._cut.shapes.items() if self._cut.stage < 3 or n not in trained}
        whole = self._mapped("weights", sum(s.numel() for s in there.values()), self._cut.dtype)
        for (name, shape), x in zip(there.items(), whole.split([s.numel() for s in there.values()]), strict=True):
            self._weights[name] = x.view(shape)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            # An error may keep this object alive, and mapped files free their disk space only after it.
            self._flats, self._weights = {}, {}

    def put(self, name: StatePart, x: Tensor) -> None:
        """Takes a leaf: a parameter, a buffer, or a state of a parameter."""
        value = x.detach().cpu()
        if name.kind == "buffer":
            self._buffers[name.name] = value.clone()
            return
        if name.kind == "fp32" and name.name in self._weights:
            self._weights[name.name].copy_(value)
        if name.name not in self._cut.trained():
            return
        flat = value.flatten()
        for cut in self._cut.cuts(name.name):
            part = self._flats[name.kind, cut.group][cut.rank]
            part[cut.at : cut.at + cut.stop - cut.start] = flat[cut.start : cut.stop]

    def _mapped(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        path = self._making / "flat" / name
        # A write to a mapped file that finds the disk full would end the process.
        with open(path, "wb") as f:
            os.posix_fallocate(f.fileno(), 0, count * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype)

    def _finish(self) -> None:
        third, prefix = self._cut.stage == 3, "bf16_" if self._cut.dtype is torch.bfloat16 else ""
        for rank in range(self._cut.ranks):
            inner = self._third(rank) if third else self._first(rank)
            optim = {"optimizer_state_dict": inner, "ds_config": self._cut.config, "ds_version": VERSION}
            save_objects(optim, self._making / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if third else "mp_rank_00_model_states.pt"
            if third or rank == 0:
                save_objects(self._model(rank), self._making / name)
        shutil.rmtree(self._making / "flat")

    def _scaler(self) -> tuple[Any, bool]:
        scale, half = self._counters.scale, self._cut.config.get("fp16") or {}
        if not hasattr(scale, "last_overflow"):
            return LossScaler(cur_scale=float(scale.scale) if scale else 1.0, dynamic=False), False
        hysteresis = half.get("hysteresis", 2)
        found = DynamicLossScaler(
            cur_scale=float(scale.scale),
            dynamic=True,
            cur_iter=int(scale.count),
            last_overflow_iter=int(scale.last_overflow),
            scale_factor=2.0,
            scale_window=half.get("loss_scale_window", 1000),
            min_scale=half.get("min_loss_scale", 1),
            delayed_shift=hysteresis,
            cur_hysteresis=int(scale.hysteresis),
            consecutive_hysteresis=bool(half.get("consecutive_hysteresis", False)),
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )
        return found, True

    def _common(self) -> dict[str, Any]:
        scaler, dynamic = self._scaler()
        return {
            "zero_stage": ZeroStage(stage=self._cut.stage),
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
        }

    def _states(self, rank: int) -> dict[str, Any]:
        """The state of the optimizer over a rank's parts, as torch's optimizers save theirs."""
        groups: list[dict[str, Any]] = [x | {"params": []} for x in self._cut.settings]
        state: dict[int, dict[str, Any]] = {}
        updates = self._counters.updates
        for number, group in enumerate(self._cut.groups):
            groups[group.owner]["params"].append(number)
            own = {kind: self._flats[kind, number][rank].clone() for kind in self._cut.states}
            # A tensor for each: those that are one in the file are one in the job, which counts in each.
            step = torch.tensor(float(updates)) if self._cut.torch_steps else updates
            state[number] = ({"step": step} if "exp_avg" in own else {}) | own
        return {"state": {k: x for k, x in state.items() if x}, "param_groups": groups}

    def _first(self, rank: int) -> dict[str, Any]:
        """A rank's optimizer file at stages 1 and 2."""
        groups = self._cut.groups
        paddings = [min(max((rank + 1) * x.size - x.used, 0), x.size) for x in groups]
        parts = [self._flats["fp32", i][rank, : x.size - paddings[i]].clone() for i, x in enumerate(groups)]
        return self._common() | {
            "clip_grad": self._cut.config.get("gradient_clipping", 1.0),
            "base_optimizer_state": self._states(rank),
            "single_partition_of_fp32_groups": parts,
            "group_paddings": paddings,
            "param_alignment_paddings": [list(x.paddings) for x in groups],
            "partition_count": [self._cut.ranks] * len(groups),
            "ds_version": VERSION,
            "param_slice_mappings": [OrderedDict(self._addresses(rank, i)) for i in range(len(groups))],
        }

    def _addresses(self, rank: int, group: int) -> Iterator[tuple[str, FragmentAddress]]:
        for name in self._cut.owners[group]:
            for cut in self._cut.cuts(name):
                if cut.rank == rank:
                    yield name, FragmentAddress(numel=cut.stop - cut.start, start=cut.at)

    def _third(self, rank: int) -> dict[str, Any]:
        return self._common() | {
            "partition_count": self._cut.ranks,
            "optimizer_state_dict": self._states(rank),
            "fp32_flat_groups": [self._flats["fp32", i][rank].clone() for i in range(len(self._cut.groups))],
        }

    def _model(self, rank: int) -> dict[str, Any]:
        """A rank's file of the module; below stage 3 one for all."""
        cut, third = self._cut, self._cut.stage == 3
        trained = cut.trained()
        frozen = OrderedDict((name, shape) for name, shape in cut.shapes.items() if name not in trained)
        module: dict[str, Tensor] = dict(self._buffers)
        for name, names in cut.names.items():
            value = torch.empty(0, dtype=cut.dtype) if third else self._weights[name]
            module |= dict.fromkeys(names, value)
        buffers = [name for name in cut.order if name in self._buffers]
        samples = {} if cut.rows is None else {"global_samples": self._counters.steps * cut.rows}
        # At stage 3 only the first rank has these.
        aliases = {alias: names[0] for names in cut.names.values() for alias in names[1:]}
        fragments = OrderedDict((name, self._fragment(name, rank) if third else self._weights[name]) for name in frozen)
        return {
            "module": OrderedDict((name, module[name]) for name in cut.order),
            "buffer_names": buffers,
            "optimizer": None,
            "param_shapes": [OrderedDict(group.shapes) for group in cut.groups],
            "frozen_param_shapes": frozen if cut.stage > 1 else None,
            "shared_params": aliases if rank == 0 else {},
            "frozen_param_fragments": fragments if cut.stage > 1 else None,
            "lr_scheduler": self._scheduler(),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": self._counters.steps - self._counters.updates,
            "global_steps": self._counters.steps,
            **samples,
            "dp_world_size": cut.ranks,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": cut.config,
            "ds_version": VERSION,
        }

    def _scheduler(self) -> Mapping[str, int] | None:
        return {"last_batch_iteration": self._counters.updates - 1} if "scheduler" in self._cut.config else None

    def _fragment(self, name: str, rank: int) -> Tensor:
        flat = self._weights[name].flatten()
        size = -(-flat.numel() // self._cut.ranks)
        out = torch.zeros(size, dtype=flat.dtype)
        own = flat[rank * size : (rank + 1) * size]
        out[: own.numel()] = own
        return out
