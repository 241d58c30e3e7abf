"""`DeepSpeedJob`: settings that determine the place of each element in the files of a job of DeepSpeed.

stage 1, 2   the parameters of a group, in sequence, are cut in equal parts, a part per rank
stage 3      each parameter is cut so. A rank's part of a group is the rank's pieces, in sequence
experts      are separate groups, cut among the ranks with the same experts
stage 0      groups are whole. Only jobs with experts have such files

A flat group is the order of parameters in one flat tensor, and the ranks that cut the tensor.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardfn import core
from shardfn.interop.leaves import parameter_names

from ._config import DeepSpeedRecipe, from_deepspeed_config
from ._experts import ExpertLayout, Group, find_experts, has_experts, split

# At `parameter_alignment`, parameters begin at a multiple of this many bytes.
_ALIGNED_BYTES = 16


class FlatGroup(NamedTuple):
    """Parameters that lie in one flat tensor on each rank.

    Attributes:
        owner: index of the group in the optimizer.
        shapes: shapes by name, in the order of the elements.
        starts: start of each parameter: below stage 3 in the whole group, else in each rank's part.
        paddings: numbers of unused elements after each parameter.
        used: number of elements of the whole group, paddings between parameters included.
        size: number of elements of a rank's part.
        ranks: number of parts.
        experts: whether the parameters belong to the experts of a single rank, by local names.
    """

    owner: int
    shapes: dict[str, torch.Size]
    starts: dict[str, int]
    paddings: tuple[int, ...]
    used: int
    size: int
    ranks: int
    experts: bool = False


def list_flat_groups(
    groups: Sequence[tuple[Group, bool]],
    shapes: Mapping[str, torch.Size],
    zero: Mapping[str, Any],
    sharing: tuple[int, int],
    dtype: torch.dtype,
) -> Iterator[FlatGroup]:
    """Yields the flat groups of a job.

    Args:
        groups: groups of the optimizer, and whether each is of experts.
        shapes: shapes of all parameters.
        zero: configuration of ZeRO.
        sharing: number of ranks that share the batch, and number of ranks with the same experts.
        dtype: dtype of the module's weights.
    """
    stage = zero.get("stage", 0)
    if stage == 3:
        for owner, ((names, _), _) in enumerate(groups):
            ranks = sharing[0]
            for some in _sub_groups(names, shapes, ranks, int(zero.get("sub_group_size", 1e9))):
                yield _place_pieces(owner, {name: shapes[name] for name in some}, ranks)
        return
    align = math.lcm(_ALIGNED_BYTES, dtype.itemsize) // dtype.itemsize if zero.get("parameter_alignment") else 1
    for owner, ((names, _), experts) in enumerate(groups):
        ranks = sharing[experts] if stage else 1
        order = [x for r in range(ranks) for x in names[r::ranks]] if zero.get("round_robin_gradients") else names
        yield _place_row(owner, {name: shapes[name] for name in order}, ranks, align)._replace(experts=experts)


def _sub_groups(names: Sequence[str], shapes: Mapping[str, torch.Size], ranks: int, most: int) -> Iterator[list[str]]:
    """Yields the groups of stage 3: a group ends when a rank's part reaches this many elements."""
    some: list[str] = []
    held = 0
    for name in names:
        some.append(name)
        held += -(-shapes[name].numel() // ranks)
        if held >= most:
            yield some
            some, held = [], 0
    if some:
        yield some


def _place_pieces(owner: int, shapes: dict[str, torch.Size], ranks: int) -> FlatGroup:
    starts: dict[str, int] = {}
    at = 0
    for name, shape in shapes.items():
        starts[name] = at
        at += -(-shape.numel() // ranks)
    return FlatGroup(owner, shapes, starts, (0,) * len(shapes), at * ranks, at, ranks)


def _place_row(owner: int, shapes: dict[str, torch.Size], ranks: int, align: int) -> FlatGroup:
    starts: dict[str, int] = {}
    paddings: list[int] = []
    at = 0
    for name, shape in shapes.items():
        starts[name] = at
        at += shape.numel()
        # After the last parameter the group is padded for all ranks.
        paddings.append(-at % align if len(starts) < len(shapes) else 0)
        at += paddings[-1]
    return FlatGroup(owner, shapes, starts, tuple(paddings), at, -(-at // (2 * ranks)) * 2, ranks)


_STATES = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclasses.dataclass(frozen=True)
class DeepSpeedJob:
    """Settings of a job of DeepSpeed that determine the form of checkpoints.

    A rank's file has no names inside: the place of an element of a parameter follows from these settings, and DeepSpeed
    checks only the number of ranks. So the settings must equal the settings of the loading job.

    Attributes:
        config: configuration, a JSON file or the contents.
        ranks: number of ranks that share the batch.
        module: trained module, for names, order, and tied or frozen parameters. Parameters may be on `meta`.
        groups: groups of the optimizer, in torch's form, with names for parameters: `[{"params": ["a.weight"],
            "weight_decay": 0.0}, ...]`. Default: one group of all trained parameters, in the module's order. With
            experts each group has a "name", and groups are as before
            `split_params_into_different_moe_groups_for_optimizer`.
        ep_size: number of ranks with different experts, the `ep_size` of the layers `deepspeed.moe.layer.MoE`. The
            module here must have `ep_size=1`, and all experts.
    """

    config: str | os.PathLike[str] | Mapping[str, Any]
    ranks: int
    module: nn.Module
    groups: Sequence[Mapping[str, Any]] | None = None
    ep_size: int = 1


class PieceOfLeaf(NamedTuple):
    """Elements of a parameter on a single rank: `start` to `stop`, from `at` on in the rank's flat part.

    The rank is counted among the ranks that share the group.
    """

    rank: int
    group: int
    at: int
    start: int
    stop: int


class Partition(NamedTuple):
    """Partition of a job's parameters and optimizer states.

    Attributes:
        config: contents of the file.
        stage: stage of ZeRO.
        ranks: number of ranks that share the batch.
        dtype: dtype of the module's weights.
        rows: number of rows of a global batch, or None if the configuration has no number.
        order: names of all tensors that the module saves, in order.
        names: all names of each parameter, by the first name.
        shapes: shapes of all parameters, by first name.
        owners: names of the parameters in each group of the optimizer, for experts the names on a single rank.
        settings: settings of the optimizer's groups, without parameters.
        groups: flat groups.
        states: names of a parameter's states in the optimizer.
        torch_steps: whether steps are counted in tensors, as in torch's optimizers.
        experts: layers and ranks of the experts.
    """

    config: dict[str, Any]
    stage: int
    ranks: int
    dtype: torch.dtype
    rows: int | None
    order: tuple[str, ...]
    names: dict[str, list[str]]
    shapes: dict[str, torch.Size]
    owners: tuple[tuple[str, ...], ...]
    settings: tuple[dict[str, Any], ...]
    groups: tuple[FlatGroup, ...]
    states: tuple[str, ...]
    torch_steps: bool
    experts: ExpertLayout

    def trained(self) -> set[str]:
        """Returns the names of the optimizer's parameters."""
        return {x for names in self.owners for name in names for x in self.experts.everywhere(name)}

    def member(self, rank: int, group: FlatGroup) -> int:
        """Returns a rank's number among the ranks that share a group."""
        if not self.stage:
            return 0
        return self.experts.place(rank, self.ranks)[1] if group.experts else rank

    def optimizer_file(self, rank: int) -> str:
        """Returns the name of a rank's file of the optimizer, above stage 0."""
        prefix = "bf16_" if self.dtype is torch.bfloat16 else ""
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def cuts(self, name: str) -> Iterator[PieceOfLeaf]:
        """Yields the place of each element of a trained parameter."""
        number, group = next((i, x) for i, x in enumerate(self.groups) if name in x.shapes)
        count, first = group.shapes[name].numel(), group.starts[name]
        piece = -(-count // group.ranks)
        for rank in range(group.ranks):
            if self.stage == 3:
                start, at = min(rank * piece, count), first
                stop = min(start + piece, count)
            else:
                begin = rank * group.size
                start, stop = max(begin - first, 0), min(begin + group.size - first, count)
                at = first + start - begin
            if start < stop:
                yield PieceOfLeaf(rank, number, at, start, stop)


def make_partition(job: DeepSpeedJob, rate: float) -> Partition:
    """Returns a job's partition of parameters and optimizer states.

    Args:
        job: settings of the job.
        rate: learning rate of the next update, in the groups without a rate.

    Raises:
        ValueError: files of such a job are not supported, or the groups are not the module's trained parameters. The
            message lists all.
    """
    config = dict(job.config if isinstance(job.config, Mapping) else json.loads(pathlib.Path(job.config).read_text()))
    core.raise_all(
        ValueError, "files for each rank are not written for such a job of DeepSpeed's:", _find_problems(config, job)
    )
    recipe = from_deepspeed_config(config, ranks=job.ranks)
    leaves = dict(core.named_parameters(job.module))
    shapes = {name: torch.Size(p.shape) for name, p in leaves.items()}
    order = tuple(core.state_names(job.module))
    data_first = bool(config.get("use_data_before_expert_parallelism"))
    experts = find_experts(shapes, order, job.ep_size, data_first=data_first)
    dtype = torch.float32 if recipe.policy is None else recipe.policy.compute
    _check_experts(experts, config, job, recipe, dtype)
    given = _param_groups(job, leaves, experts)
    kind = str(config["optimizer"]["type"]).lower()
    own = _group_settings(kind, config["optimizer"].get("params") or {}, rate)
    groups = split([(names, own | x) for names, x in given], experts, shapes)
    has_momentum = kind != "sgd" or any(x["momentum"] for (_, x), _ in groups)
    sharing = (job.ranks, job.ranks // job.ep_size)
    return Partition(
        config,
        recipe.zero.stage,
        job.ranks,
        dtype,
        recipe.rows_per_step,
        order,
        parameter_names(job.module),
        shapes,
        tuple(names for (names, _), _ in groups),
        tuple(settings for (_, settings), _ in groups),
        tuple(list_flat_groups(groups, shapes, config.get("zero_optimization") or {}, sharing, dtype)),
        _STATES[kind] if has_momentum else (),
        kind == "sgd" or bool((config["optimizer"].get("params") or {}).get("torch_adam")),
        experts,
    )


def _param_groups(job: DeepSpeedJob, leaves: Mapping[str, torch.Tensor], experts: ExpertLayout) -> list[Group]:
    """Returns the optimizer's groups: names, and the settings of each."""
    # DeepSpeed omits empty parameters from its optimizer.
    trained = [name for name, p in leaves.items() if p.requires_grad and p.numel()]
    one = {"params": trained} | ({"name": "dense-params"} if experts.numbers else {})
    groups = [dict(x) for x in (job.groups if job.groups is not None else [one])]
    out = [(tuple(x.pop("params", ())), x) for x in groups]
    _check_groups([names for names, _ in out], trained, list(leaves))
    return out


def _find_problems(config: Mapping[str, Any], job: DeepSpeedJob) -> list[str]:
    zero = config.get("zero_optimization") or {}
    kind = str((config.get("optimizer") or {}).get("type"))
    out = []
    if job.ranks < 1:
        out.append(f"ranks = {job.ranks}: there is at least one")
    if job.ep_size < 1:
        out.append(f"ep_size = {job.ep_size}: there is at least one rank; leave it out where all have all experts")
    if zero.get("stage", 0) not in ((0, 1, 2, 3) if has_experts(job.module) else (1, 2, 3)):
        out.append(f"zero_optimization.stage = {zero.get('stage', 0)}: stages 1, 2 and 3 have such files")
    if kind.lower() not in _STATES:
        out.append(f"optimizer.type = {kind!r}: Adam, AdamW and SGD are. Name the one that the job makes itself")
    for key in ("offload_param", "offload_optimizer"):
        if (zero.get(key) or {}).get("device") == "nvme":
            out.append(f"zero_optimization.{key}.device = 'nvme': it swaps files of its own; save a universal one")
    for key, off in (("zero_hpz_partition_size", (0, 1)), ("zero_quantized_weights", (False,))):
        if zero.get(key, off[0]) not in off:
            out.append(f"zero_optimization.{key} = {zero[key]!r}: save a universal one")
    sums = (config.get("data_types") or {}).get("grad_accum_dtype")
    brain = (config.get("bf16") or config.get("bfloat16") or {}).get("enabled")
    if brain and zero.get("stage") == 1 and sums in ("fp32", "float32", "float"):
        out.append("data_types.grad_accum_dtype = 'fp32' with bf16 at stage 1: another format. Save a universal one")
    if (config.get("expert_parallel") or {}).get("enabled"):
        out.append("expert_parallel.enabled: AutoEP has files of its own; it reads those of module_to_hf")
    if int((config.get("tensor_parallel") or {}).get("autotp_size") or 1) > 1:
        out.append("tensor_parallel.autotp_size: ranks with parts of weights; save a universal one")
    return out


def _check_experts(
    experts: ExpertLayout, config: Mapping[str, Any], job: DeepSpeedJob, recipe: DeepSpeedRecipe, dtype: torch.dtype
) -> None:
    if not experts.numbers:
        return
    stage, out = recipe.zero.stage, []
    zero = config.get("zero_optimization") or {}
    if stage == 3:
        out.append("zero_optimization.stage = 3: DeepSpeed has native experts at stages 0, 1 and 2 only")
    if job.ranks % job.ep_size:
        out.append(f"ranks = {job.ranks}, and ep_size = {job.ep_size} does not divide that")
    if zero.get("elastic_checkpoint"):
        out.append("zero_optimization.elastic_checkpoint: DeepSpeed joins states of unlike experts; leave it out")
    params = config["optimizer"].get("params") or {}
    if stage == 0 and dtype is not torch.float32:
        out.append(f"zero_optimization.stage = 0 in {dtype}: its masters have no names; take stage 1 or 2, or float32")
    if stage == 0 and str(config["optimizer"]["type"]).lower() != "sgd" and not params.get("torch_adam"):
        out.append("optimizer.params.torch_adam: at stage 0 states are those of torch's Adam. Set it, or take stage 1")
    frozen = [name for name, p in core.named_parameters(job.module) if not p.requires_grad]
    if stage == 0 and frozen:
        out.append(f"stage = 0: parameters have numbers there, also frozen ones such as {frozen[0]}; take stage 1 or 2")
    core.raise_all(ValueError, "files are not written for such a job of DeepSpeed's with experts:", out)


def _check_groups(owners: Sequence[Sequence[str]], trained: Sequence[str], known: Sequence[str]) -> None:
    counts: dict[str, int] = {}
    for name in (name for names in owners for name in names):
        counts[name] = counts.get(name, 0) + 1
    problems = [f"{name} is there {n} times" for name, n in counts.items() if n > 1]
    problems += [f"{name} is trained, and in no group" for name in trained if name not in counts]
    odd = [name for name in counts if name not in trained]
    problems += [f"{name} is frozen, or empty" for name in odd if name in known]
    problems += [
        f"{name} is not a parameter of the module.{core.did_you_mean(name, known)}" for name in odd if name not in known
    ]
    problems += [f"group {i} has no parameters" for i, names in enumerate(owners) if not names]
    core.raise_all(
        ValueError, "groups of the optimizer have the parameters that the module trains, each once:", problems
    )


def _group_settings(kind: str, params: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Returns the settings of a group as the optimizer saves them."""
    had = {k: v for k, v in params.items() if k not in ("lr", "torch_adam", "adam_w_mode", "fp32_optimizer_states")}
    if kind == "sgd" or params.get("torch_adam"):
        wide = kind == "adamw" or params.get("adam_w_mode", True)
        make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW if wide else torch.optim.Adam
        (group,) = make([torch.zeros(1)], lr=rate, **had).state_dict()["param_groups"]
        return {k: v for k, v in group.items() if k != "params"}
    own = {"bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    return {"lr": rate} | own | {k: v for k, v in had.items() if k in own}
