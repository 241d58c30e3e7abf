"""`save_deepspeed`: saves a state as a checkpoint of DeepSpeed, universal or with a file for each rank.

The first rank writes leaves that all ranks gather. Experts go from their ranks directly to files.
"""

import functools
import os
import pathlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn import core
from shardfn.collectives import GlobalTensor
from shardfn.engine import agree_on_step, comms_of, losing_no_peer, told_before
from shardfn.interop.leaves import Turns, WrittenByFirst, gather_layer, gather_leaf, gather_own_rows, is_writer
from shardfn.state import TrainState, check_alive

from ._experts import ExpertLayout
from ._files import ExpertFiles, PartitionedFiles, UnfinishedFiles
from ._partition import DeepSpeedJob, Partition, make_partition
from ._parts import Names, PlacedPart, StatePart, describe_part, find_part, is_master, place_leaves
from ._records import VERSION, Counters

_OF_EXPERTS = ".deepspeed_moe.experts."
_ADAM = frozenset(("exp_avg", "exp_avg_sq"))


def save_deepspeed(
    directory: str | os.PathLike[str],
    state: TrainState,
    tag: str,
    *,
    learning_rate: float,
    names: Names = lambda name: name,
    job: DeepSpeedJob | None = None,
    weights_only: bool = False,
) -> None:
    """Writes a state as a checkpoint of DeepSpeed. Collective.

    Without `job` the checkpoint is universal, for `load_universal` and any mesh of DeepSpeed. DeepSpeed resumes with
    the weights (the master copies where there are some), Adam's moments, the step, and schedulers at the step.
    DeepSpeed does not load frozen parameters and buffers from such checkpoints: both are in `module` of the model's
    file, for `read_deepspeed` and for you.

    With `job` the checkpoint is as `engine.save_checkpoint` of the job would write, at ZeRO stage 1, 2 or 3: a file for
    each rank, for `engine.load_checkpoint` and `zero_to_fp32`. The files have the whole state: frozen parameters,
    buffers, the loss scale, momentum of SGD. Stacked layers are written one by one. Only a job that cuts tensors in the
    same way may load the files, see `DeepSpeedJob`.

    A `job` whose module has native experts (`deepspeed.moe.layer.MoE`) has an additional file for each expert, and
    stage 0, 1 or 2. The job's `ep_size` may differ from the mesh here. Leaves of experts have the experts along dim 0.
    The names of experts are found as by `restore_deepspeed`, with a number between the parts.

    Leaves are gathered in sequence. The first rank writes. With experts, each expert's tensors go from a rank with the
    expert to files, and all ranks write files of the job, so all ranks must share `directory`.

    Args:
        directory: directory to pass to `engine.load_checkpoint`. `latest_universal`, or `latest`, names the newest
            checkpoint.
        state: state of a step over parameters from `from_module`, or a tree whose keys, with dots between, are the
            names of the module.
        tag: tag of this checkpoint, which must not exist yet.
        learning_rate: learning rate of the next update, in all groups of the optimizer without an "lr" in `job`, for
            example `recipe.learning_rate(int(state.step))` with a recipe of `from_deepspeed_config`. DeepSpeed's
            schedulers set the rate after an update, never before the first.
        names: function from a parameter's or buffer's name here to DeepSpeed's.
        job: settings of the job that will load the checkpoint.
        weights_only: whether states of the optimizer are left out, for `load_checkpoint(load_module_only=True)`. Only
            with experts.

    Raises:
        ValueError: the tag or a name is not a valid file name, or the optimizer has other states than Adam's moments,
            which DeepSpeed does not load from universal checkpoints, or the state does not fit the job, or DeepSpeed
            has no checkpoint of such a job. Lists all.
        FileExistsError: there is a checkpoint of this tag.
        DonatedError: a step has consumed the state.
        RankError: another rank failed.

    Example:
        >>> import tempfile
        >>> import shardfn as sf
        >>> from shardfn.interop import read_deepspeed
        >>> step = sf.sharded_step(lambda p, x: (p["w"] * x).sum(), sf.optim.adam(0.1))
        >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> directory = tempfile.mkdtemp()
        >>> save_deepspeed(directory, state, "first", learning_rate=0.1)
        >>> found = read_deepspeed(directory, "first")
        >>> found.params["w"], found.moments["exp_avg"]["w"], found.step
        (tensor([0.9000, 0.9000]), tensor([0.1000, 0.1000]), 1)
        >>> config = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
        >>> module = torch.nn.ParameterDict({"w": torch.ones(2)})
        >>> save_deepspeed(directory, state, "second", learning_rate=0.1, job=DeepSpeedJob(config, 3, module))
        >>> read_deepspeed(directory).params["w"]
        tensor([0.9000, 0.9000])
        >>> from shardfn.interop import read_deepspeed_experts
        >>> module = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(4))
        >>> for key in ("deepspeed_experts", "experts", "deepspeed_moe", "mlp"):  # in a MoE, which has a gate as well
        ...     module = torch.nn.ModuleDict({key: module})
        >>> module["head"] = torch.nn.Linear(2, 1, bias=False)
        >>> state = step.init({"mlp": {"weight": torch.ones(4, 2, 3)}, "head": {"weight": torch.ones(1, 2)}})
        >>> names = lambda name: name.replace("mlp.", "mlp.deepspeed_moe.experts.deepspeed_experts.")
        >>> job = DeepSpeedJob(config, 4, module, ep_size=2)
        >>> save_deepspeed(directory, state, "third", learning_rate=0.1, names=names, job=job)
        >>> read_deepspeed_experts(directory).params["mlp.deepspeed_moe.experts.deepspeed_experts.3.weight"].shape
        torch.Size([2, 3])
    """
    check_alive(state)
    leaves = core.tree_leaves(state)
    mesh = next(x.mesh for x in leaves if isinstance(x, GlobalTensor))
    comms, place = comms_of(mesh), pathlib.Path(directory) / tag
    counters: Counters | None = None
    cut: Partition | None = None
    with told_before(comms.control):
        found = _collect_parts(state, names)
        _check_names(found, tag)
        step, rate = int(state.step), float(learning_rate)
        if job is None:
            _check_states(found)
            entries = [PlacedPart(*x) for x in found.items()]
        else:
            cut, counters = make_partition(job, rate), Counters(step, state.loss_scale)
            if weights_only:
                found = {part: x for part, x in found.items() if part.kind in ("fp32", "buffer")}
                cut = cut._replace(states=())
            entries = place_leaves(found, cut, job.module, _path_names(state, names), names)
        if weights_only and (cut is None or not cut.experts.numbers):
            raise ValueError(
                "weights_only=True, and the job has no experts: save all states, from which DeepSpeed's"
                " load_checkpoint(load_module_only=True) takes the weights."
            )
        if is_writer(leaves) and place.exists():
            raise FileExistsError(f"{place} is there already. Use another tag, or remove it.")
    agree_on_step(comms.control, "interop.save_deepspeed", (f"{tag}: {_describe_entries(entries)}", ()))
    with torch.no_grad():
        if cut is None or counters is None:
            _write_by_first(leaves, entries, functools.partial(_UniversalFiles, place, step, rate, found))
        elif cut.experts.numbers:
            save_experts(ExpertFiles(place, cut, counters, weights_only=weights_only), entries, cut, mesh)
        else:
            _write_by_first(leaves, entries, functools.partial(PartitionedFiles, place, cut, counters))


def _write_by_first(leaves: Sequence[Any], entries: Sequence[PlacedPart], files: Callable[[], UnfinishedFiles]) -> None:
    with WrittenByFirst(leaves, "interop.save_deepspeed", files) as out:
        for part, x, layer in entries:
            out.put(part, gather_leaf(x) if layer is None else gather_layer(x, layer))


def _describe_entries(entries: Sequence[PlacedPart]) -> str:
    return ", ".join(describe_part(x.part) for x in entries)


class _UniversalFiles(UnfinishedFiles):
    """Writes a universal checkpoint."""

    def __init__(self, place: pathlib.Path, step: int, rate: float, parts: Mapping[StatePart, Any]) -> None:
        super().__init__(place, "latest_universal")
        self._step, self._rate = step, rate
        self._shapes = {part.name: torch.Size(x.shape) for part, x in parts.items() if part.kind == "fp32"}
        self._buffers = [part.name for part in parts if part.kind == "buffer"]
        self._trained = {part.name for part in parts if part.kind in _ADAM}
        # An optimizer without moments: all are assumed to be trained.
        self._trained = self._trained or set(self._shapes)
        self._module: OrderedDict[str, Tensor] = OrderedDict()

    def put(self, name: StatePart, x: Tensor) -> None:
        """Writes a leaf, and a trained leaf to a separate file."""
        part, value = name, x.detach().cpu()
        if part.name not in self._trained:
            self._module[part.name] = value.clone()
            return
        folder = self._making / "zero" / part.name
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"param": value.float().contiguous(), "cat_dim": 0}, folder / f"{part.kind}.pt")
        if part.kind == "exp_avg":
            torch.save(torch.tensor(float(self._step)), folder / "step.pt")

    def _write_files(self) -> None:
        step = torch.tensor(float(self._step))
        (self._making / "zero").mkdir(parents=True, exist_ok=True)
        # Missing settings of groups stay as in the loading job, which has at most one group per parameter.
        group = {"lr": self._rate}
        record = {
            "ds_version": VERSION,
            "param_groups": [group for _ in self._trained],
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [group]},
        }
        torch.save(record, self._making / "zero" / "optimizer_state.pt")
        frozen = OrderedDict((name, shape) for name, shape in self._shapes.items() if name not in self._trained)
        model = {
            "module": self._module,
            "buffer_names": self._buffers,
            "param_shapes": [OrderedDict((n, s) for n, s in self._shapes.items() if n in self._trained)],
            "frozen_param_shapes": frozen,
            "frozen_param_fragments": OrderedDict((name, self._module[name]) for name in frozen),
            "shared_params": {},
            "lr_scheduler": {"last_batch_iteration": self._step - 1},
            "global_steps": self._step,
            "skipped_steps": 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": VERSION,
        }
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            torch.save(model, self._making / name)


def _collect_parts(state: TrainState, names: Names) -> dict[StatePart, Any]:
    """Returns the leaves by part, with the widest copy of each parameter."""
    named = list(zip((p.removeprefix(".") for p in core.tree_paths(state)), core.tree_leaves(state), strict=True))
    parts = [(path, part, x) for path, x in named if (part := find_part(path, names)) and part.kind != "step"]
    # Masters come after the parameters, and replace them.
    out = {part: x for _, part, x in parts}
    counts: dict[StatePart, int] = {}
    for path, part, _ in parts:
        counts[part] = counts.get(part, 0) + (not is_master(path))
    twice = [describe_part(part) for part, n in counts.items() if n > 1]
    core.raise_all(ValueError, "several leaves would have the same name:", twice)
    known = {path for path, _, _ in parts}
    rest = [
        path for path, _ in named if path.startswith("opt_state") and path not in known and not find_part(path, names)
    ]
    core.raise_all(ValueError, "a checkpoint of DeepSpeed's has no place for these states of the optimizer:", rest)
    return out


def _path_names(state: TrainState, names: Names) -> dict[StatePart, str]:
    paths = [path.removeprefix(".") for path in core.tree_paths(state)]
    parts = [(find_part(path, names), find_part(path, lambda name: name)) for path in paths]
    return {part: own.name for part, own in parts if part is not None and own is not None}


def _check_names(parts: Mapping[StatePart, Any], tag: str) -> None:
    odd = [repr(x) for x in (tag, *(part.name for part in parts)) if not re.fullmatch(r"\w[\w.\-]*", x, re.ASCII)]
    core.raise_all(ValueError, "names of files have letters, digits, dots, - and _ only:", odd)


def _check_states(parts: Mapping[StatePart, Any]) -> None:
    experts = sorted({part.name for part in parts if _OF_EXPERTS in part.name})
    core.raise_all(
        ValueError,
        "a universal checkpoint has the name of an expert on one rank alone, so that all ranks would load the same"
        " experts. Pass job= with its ep_size:",
        experts,
    )
    states = {part.kind for part in parts} - {"fp32", "buffer"}
    other = sorted(states - _ADAM) or (sorted(_ADAM - states) if states else [])
    core.raise_all(
        ValueError, "DeepSpeed loads Adam's moments, exp_avg and exp_avg_sq, and no others; here are:", other
    )


def save_experts(files: ExpertFiles, entries: Sequence[PlacedPart], cut: Partition, mesh: core.Mesh) -> None:
    """Writes the files of a job. Collective.

    Args:
        files: files of the job.
        entries: all leaves, in an order equal on all ranks.
        cut: the job's partition.
        mesh: mesh of the leaves.

    Raises:
        OSError: a file cannot be written, or the ranks do not share the directory.
        RankError: another rank failed.
    """
    turns, first = Turns(mesh, "interop.save_deepspeed"), mesh.rank == 0
    try:
        turns.take("begun", files.make if first else bool)
        turns.take("found", bool if first else files.open)
        with losing_no_peer(comms_of(mesh)):
            failed = _put_leaves(files, _local_leaves(entries, cut.experts, first=first))
        turns.take("leaves written", lambda: _raise_failure(failed))
        turns.take("files written", lambda: files.write(mesh.rank, mesh.size))
        turns.take("named", files.name if first else bool)
    finally:
        if first:
            files.remove()


def _put_leaves(files: ExpertFiles, leaves: Iterator[tuple[StatePart, Tensor]]) -> Exception | None:
    """Writes this rank's leaves. After an error the rank gathers on, as peers wait for the gathers."""
    failed: Exception | None = None
    for part, x in leaves:
        try:
            if failed is None:
                files.put(part, x)
        except Exception as problem:
            failed = problem
    return failed


def _raise_failure(failed: Exception | None) -> None:
    if failed is not None:
        raise failed


def _local_leaves(
    entries: Sequence[PlacedPart], experts: ExpertLayout, *, first: bool
) -> Iterator[tuple[StatePart, Tensor]]:
    """Yields the leaves, and rows of leaves, that this rank writes."""
    stacks: dict[int, tuple[Any, dict[int, StatePart]]] = {}
    for part, x, layer in entries:
        if layer is not None and experts.has(part.name):
            stacks.setdefault(id(x), (x, {}))[1][layer] = part
            continue
        value = gather_leaf(x) if layer is None else gather_layer(x, layer)
        if first:
            yield part, value
    for x, parts in stacks.values():
        yield from ((parts[i], row) for i, row in gather_own_rows(x))
