"""Contents of the files of each rank of a job of DeepSpeed, written without DeepSpeed.

Files have a few objects of classes of DeepSpeed. A pickle names a class by module and name. Python's pickler looks both
up before the writing. Here both are written without a look-up, for a program that has the class.
"""

import os
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ._experts import ExpertLayout
from ._partition import Partition


class _Named:
    """Object of a class that is elsewhere, written with the attributes."""

    at = ("", "")

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class LossScaler(_Named):
    """Stand-in for DeepSpeed's constant loss scale, in a pickle."""

    at = ("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


class DynamicLossScaler(_Named):
    """Loss scale that falls with overflows."""

    at = ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")


class FragmentAddress(_Named):
    """Place of a parameter's elements in a rank's part of a group."""

    at = ("deepspeed.utils.tensor_fragment", "fragment_address")


class ZeroStage(_Named):
    """Number of a stage."""

    at = ("deepspeed.runtime.zero.config", "ZeroStageEnum")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__dict__["stage"],)


class _Pickler(pickle._Pickler):  # the pickler in Python: the pickler in C has no way to override the writing of names
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, _Named)):
            # The stubs lack the three methods called here.
            super().save_global(obj, name)  # pyright: ignore[reportAttributeAccessIssue]
            return
        module, other = obj.at
        self.write(pickle.GLOBAL + f"{module}\n{other}\n".encode())  # pyright: ignore[reportAttributeAccessIssue]
        self.memoize(obj)  # pyright: ignore[reportAttributeAccessIssue]


_MODULE = types.ModuleType("deepspeed_pickles")
_MODULE.__dict__["Pickler"] = _Pickler


def save_objects(value: Any, path: os.PathLike[str]) -> None:
    """Writes a value as `torch.save` does, where the value may contain objects of this file.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.pt"
        >>> save_objects({"stage": ZeroStage(stage=2), "x": torch.ones(2)}, path)
        >>> torch.serialization.get_unsafe_globals_in_checkpoint(path)
        ['deepspeed.runtime.zero.config.ZeroStageEnum']
    """
    torch.save(value, path, pickle_module=_MODULE)


# The version whose layout the files have.
VERSION = "0.19.8"


class Counters:
    """Progress of a job.

    Args:
        updates: number of updates of the parameters.
        scale: state of the loss scale, `()` without a loss scale.
    """

    def __init__(self, updates: int, scale: Any) -> None:
        self.updates, self.scale = updates, scale
        # DeepSpeed counts skipped steps, which are not updates here.
        self.steps = int(scale.count) if hasattr(scale, "count") and scale else updates


# A rank's part of a flat group: its kind, the group's number, the rank.
Parts = Callable[[str, int, int], Tensor]


class Records:
    """Maker of the contents of DeepSpeed's files, for each rank.

    Args:
        cut: partition of the job.
        counters: progress of the job.
        part: function to a rank's part of a flat group.
    """

    def __init__(self, cut: Partition, counters: Counters, part: Parts) -> None:
        self._cut, self._counters, self._part = cut, counters, part

    def optimizer(self, rank: int) -> dict[str, Any]:
        """Returns a rank's file of the optimizer, above stage 0."""
        inner = self._stage_three_file(rank) if self._cut.stage == 3 else self._stage_one_file(rank)
        return {"optimizer_state_dict": inner, "ds_config": self._cut.config, "ds_version": VERSION}

    def numbered(self, rank: int) -> dict[str, Any]:
        """Returns the state of torch's optimizer at stage 0 on an experts' rank, by number of parameter."""
        groups: list[dict[str, Any]] = [x | {"params": []} for x in self._cut.settings]
        state: list[dict[str, Any]] = []
        of = self._cut.experts.first(rank, self._cut.ranks)
        for number, group in enumerate(self._cut.groups):
            parts = {kind: self._part(kind, number, of) for kind in self._cut.states}
            for name, shape in group.shapes.items():
                groups[group.owner]["params"].append(len(state))
                at = group.starts[name]
                own = {kind: x[at : at + shape.numel()].view(shape).clone() for kind, x in parts.items()}
                state.append(self._add_step(own))
        return {"state": {k: x for k, x in enumerate(state) if x}, "param_groups": groups}

    def _make_scaler(self) -> tuple[Any, bool]:
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

    def _common_keys(self) -> dict[str, Any]:
        scaler, dynamic = self._make_scaler()
        return {
            "zero_stage": ZeroStage(stage=self._cut.stage),
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
        }

    def _optimizer_states(self, rank: int) -> dict[str, Any]:
        """Returns the state of the optimizer over a rank's parts, in the form of torch's optimizers."""
        groups: list[dict[str, Any]] = [x | {"params": []} for x in self._cut.settings]
        state: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(self._cut.groups):
            groups[group.owner]["params"].append(number)
            state[number] = self._add_step({kind: self._part(kind, number, rank) for kind in self._cut.states})
        return {"state": {k: x for k, x in state.items() if x}, "param_groups": groups}

    def _add_step(self, own: dict[str, Any]) -> dict[str, Any]:
        if "exp_avg" not in own:
            return own
        updates = self._counters.updates
        # A separate tensor for each: tensors shared in the file are shared in the job, which counts in each.
        return {"step": torch.tensor(float(updates)) if self._cut.torch_steps else updates} | own

    def _stage_one_file(self, rank: int) -> dict[str, Any]:
        """Returns a rank's optimizer file at stages 1 and 2."""
        groups = self._cut.groups
        ends = [(self._cut.member(rank, x) + 1) * x.size for x in groups]
        paddings = [min(max(end - x.used, 0), x.size) for end, x in zip(ends, groups, strict=True)]
        parts = [self._part("fp32", i, rank)[: x.size - paddings[i]].clone() for i, x in enumerate(groups)]
        return self._common_keys() | {
            "clip_grad": self._cut.config.get("gradient_clipping", 1.0),
            "base_optimizer_state": self._optimizer_states(rank),
            "single_partition_of_fp32_groups": parts,
            "group_paddings": paddings,
            "param_alignment_paddings": [list(x.paddings) for x in groups],
            "partition_count": [x.ranks for x in groups],
            "ds_version": VERSION,
            "param_slice_mappings": [OrderedDict(self._fragment_addresses(rank, i)) for i in range(len(groups))],
        }

    def _fragment_addresses(self, rank: int, group: int) -> Iterator[tuple[str, FragmentAddress]]:
        member = self._cut.member(rank, self._cut.groups[group])
        for name in self._cut.owners[group]:
            for cut in self._cut.cuts(name):
                if cut.rank == member:
                    yield name, FragmentAddress(numel=cut.stop - cut.start, start=cut.at)

    def _stage_three_file(self, rank: int) -> dict[str, Any]:
        return self._common_keys() | {
            "partition_count": self._cut.ranks,
            "optimizer_state_dict": self._optimizer_states(rank),
            "fp32_flat_groups": [self._part("fp32", i, rank) for i in range(len(self._cut.groups))],
        }

    def model(self, rank: int, weights: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns a rank's file of the module. Below stage 3 there is a single file.

        Args:
            rank: number of the rank.
            weights: weights by name. At stage 3 only frozen weights.
            kept: buffers, by name.
        """
        cut, third, experts = self._cut, self._cut.stage == 3, self._cut.experts
        trained = cut.trained()
        # Experts have separate files. Frozen experts of the first experts' rank are also here.
        frozen = OrderedDict(
            (n, _file_shape(s, experts)) for n, s in cut.shapes.items() if n not in trained and n in weights
        )
        module: dict[str, Tensor] = dict(kept)
        for name, names in cut.names.items():
            if not experts.has(name):
                value = torch.empty(0, dtype=cut.dtype) if third else weights[name]
                module |= dict.fromkeys(names, value)
        samples = {} if cut.rows is None else {"global_samples": self._counters.steps * cut.rows}
        # At stage 3 only the first rank has these.
        aliases = {alias: names[0] for names in cut.names.values() for alias in names[1:]}
        fragments = OrderedDict(
            (name, self._cut_fragment(weights[name], rank) if third else weights[name]) for name in frozen
        )
        shapes = [OrderedDict((n, _file_shape(s, experts)) for n, s in group.shapes.items()) for group in cut.groups]
        numbers = {"num_experts": list(experts.numbers.values()), "ds_autoep_layers": None} if experts.numbers else {}
        return {
            "module": OrderedDict((name, module[name]) for name in cut.order if name in module),
            "buffer_names": [name for name in cut.order if name in kept],
            "optimizer": None if cut.stage else self.numbered(0),
            "param_shapes": shapes if cut.stage else None,
            "frozen_param_shapes": frozen if cut.stage > 1 else None,
            "shared_params": None if not cut.stage else aliases if rank == 0 else {},
            "frozen_param_fragments": fragments if cut.stage > 1 else None,
            "lr_scheduler": self._scheduler_state(),
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
            **numbers,
        }

    def _scheduler_state(self) -> Mapping[str, int] | None:
        return {"last_batch_iteration": self._counters.updates - 1} if "scheduler" in self._cut.config else None

    def _cut_fragment(self, weight: Tensor, rank: int) -> Tensor:
        flat = weight.flatten()
        size = -(-flat.numel() // self._cut.ranks)
        out = torch.zeros(size, dtype=flat.dtype)
        own = flat[rank * size : (rank + 1) * size]
        out[: own.numel()] = own
        return out


def _file_shape(shape: torch.Size, experts: ExpertLayout) -> tuple[int, ...]:
    """Returns a shape in DeepSpeed's form: files of models with experts have tuples."""
    return tuple(shape) if experts.numbers else shape
