"""`read_deepspeed`: DeepSpeed's checkpoints, ZeRO stages 1 to 3 and universal checkpoints, as whole named tensors.

DeepSpeed's files are pickles, opened by torch's unpickler for weights, with tensors and plain containers as the result.
The few classes of DeepSpeed in between become objects that do nothing, and any other name is refused.

    stage 1, 2   ranks' flat partitions, in sequence, are the group; parameters lie in it in order
    stage 3      a parameter is cut in equal pieces, a piece per rank, the last pieces padded
    universal    a file for each parameter and each of its states; flat where stage 3 wrote it
"""

import pathlib
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.core import raise_all

# Classes in DeepSpeed's files that hold no tensor.
_INERT = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_TAG = re.compile(r"[\w.\-]+", re.ASCII)
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
# The files of a parameter in a universal checkpoint that are not a state of its shape.
_APART = ("fp32", "step")


class _Inert:
    """Placeholder for an object of DeepSpeed."""

    def __new__(cls, *args: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class DeepSpeedState(NamedTuple):
    """Contents of a checkpoint of DeepSpeed.

    Attributes:
        params: whole parameters in float32, by the module's names: masters where there are any. Frozen parameters are
            included.
        moments: states of the optimizer with a parameter's shape, such as "exp_avg" and "exp_avg_sq" for Adam, or
            "momentum_buffer" for SGD, each by the same names.
        step: number of updates, or 0 if the files have no number.
        shared: names of tied parameters, and the name in `params` of each.
        buffers: buffers of the module, by name, with unchanged dtypes.
    """

    params: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    step: int
    shared: dict[str, str]
    buffers: dict[str, Tensor]


def read_deepspeed(directory: str, tag: str | None = None) -> DeepSpeedState:
    """Reads a checkpoint written by `engine.save_checkpoint`, or converted by `ds_to_universal`.

    Files are mapped, not loaded, so only the resulting tensors are in memory. The parameters have the names of the
    DeepSpeed module: pass them to `step.init`, for example of a loss that calls the function of `from_module`. Moments
    have the names of their parameters.

    Args:
        directory: directory passed to `save_checkpoint`.
        tag: tag of the checkpoint. Default: the tag in `latest` (or `latest_universal`).

    Raises:
        FileNotFoundError: no such checkpoint. The message names the missing files.
        ValueError: a file has objects other than tensors and plain containers, or does not fit the other files, or the
            checkpoint is of several model-parallel ranks, of stage 0, or has experts: see `read_deepspeed_experts`.
    """
    place = find_checkpoint(pathlib.Path(directory), tag)
    return _read_universal(place) if (place / "zero").is_dir() else _read_partitions(place)


def find_checkpoint(directory: pathlib.Path, tag: str | None) -> pathlib.Path:
    """Returns the directory of a checkpoint."""
    if tag is None:
        tags = [directory / name for name in ("latest", "latest_universal") if (directory / name).is_file()]
        if not tags:
            raise FileNotFoundError(f"{directory} has no file 'latest' that names a checkpoint. Pass tag=.")
        tag = tags[0].read_text().strip()
    if not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise ValueError(f"{directory} has no checkpoint with the name {tag!r}.")
    place = directory / tag
    if not place.is_dir():
        found = sorted(p.name for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []
        raise FileNotFoundError(f"no checkpoint {tag!r} in {directory}, which has {found}.")
    return place


def load_file(path: pathlib.Path) -> Any:
    """Returns the contents of a file, which may have only tensors and plain containers."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as problem:
        raise ValueError(f"{path} is not a file of a checkpoint: {str(problem).splitlines()[0]}") from problem
    odd = [x for x in names if x not in _INERT]
    if odd:
        raise ValueError(f"{path} has objects that are not tensors, {', '.join(odd)}, so the file is not opened.")
    try:
        with torch.serialization.safe_globals([(_Inert, x) for x in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as problem:
        raise ValueError(f"{path} is not a file of a checkpoint: {str(problem).splitlines()[0]}") from problem


def load_optimizers(place: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the states of a ZeRO optimizer, by rank.

    Raises:
        FileNotFoundError: states of some ranks are missing.
        ValueError: there are no states, or states of several model-parallel ranks.
    """
    files: dict[int, pathlib.Path] = {}
    for path in place.iterdir():
        found = _OPTIM.fullmatch(path.name)
        if found and int(found[2]):
            raise ValueError(f"{place} is of several model-parallel ranks. Make a universal checkpoint of it first.")
        if found:
            files[int(found[1])] = path
    if not files:
        raise ValueError(
            f"{place} has no states of a ZeRO optimizer. Stage 0 saves only weights, and the states in another form."
        )
    missing = sorted(set(range(len(files))) - set(files))
    if missing:
        raise FileNotFoundError(f"{place} has no optimizer states of ranks {missing}.")
    optims = [load_file(files[rank])["optimizer_state_dict"] for rank in range(len(files))]
    count = optims[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    if count != len(files):
        raise FileNotFoundError(
            f"{place} must have the optimizer states of all {count} ranks that have written, got {len(files)}."
        )
    return optims


def _read_partitions(place: pathlib.Path) -> DeepSpeedState:
    experts = [p.name for p in place.iterdir() if "_expert_" in p.name or p.name.startswith("expp_rank_")]
    if experts:
        raise ValueError(
            f"{place} has experts in separate files such as {experts[0]}. Read the checkpoint with"
            " read_deepspeed_experts, or only the weights with read_deepspeed_weights."
        )
    optims = load_optimizers(place)
    third = "fp32_flat_groups" in optims[0]
    models = load_models(place)
    if not models:
        raise FileNotFoundError(f"{place} has no mp_rank_00_model_states.pt.")
    if third and len(models) != len(optims):
        raise FileNotFoundError(
            f"{place} must have the model states of all {len(optims)} ranks that have written, got {len(models)}."
        )
    states: dict[str, dict[str, Tensor]] = {}
    step = 0
    ranks = [(_read_stage_three if third else read_flat_groups)(x) for x in optims]
    groups = models[0]["param_shapes"]
    # At stage 3 flat groups are cut by size, not by the optimizer's groups: all of a rank's are one sequence.
    for number, shapes in enumerate([_join_shapes(groups)] if third else groups):
        parts = [own[number] for own in ranks]
        step = max(step, parts[0].step)
        gaps = read_paddings(optims[0], number, shapes)
        for kind, own in split_states(parts, shapes, gaps, third=third, where=f"{place}, group {number}").items():
            states.setdefault(kind, {}).update(own)
    params = states.pop("fp32", {})
    return add_module(place, models, DeepSpeedState(params, states, step, {}, {}))


def add_module(place: pathlib.Path, models: Sequence[Mapping[str, Any]], own: DeepSpeedState) -> DeepSpeedState:
    """Returns the state in the optimizer's files, completed from the module's files."""
    if not models:
        return own
    _check_rounded(place, own.params, models[0])
    return own._replace(
        params=own.params | _read_frozen(place, models, own.params),
        step=own.step or count_updates(models[0]),
        shared=read_tied_names(models[0]),
        buffers=read_buffers(models[0]),
    )


class _Flat(NamedTuple):
    """Part of a group on a single rank: the step, and "fp32" and each state of the elements, flat."""

    step: int
    states: dict[str, Tensor]


def read_flat_groups(optim: Mapping[str, Any]) -> list[_Flat]:
    """Returns a rank's parts of the groups, below stage 3."""
    inner = optim["base_optimizer_state"].get("state", {})
    flat = optim["single_partition_of_fp32_groups"]
    return [_read_flat(x, inner.get(number) or {}) for number, x in enumerate(flat)]


def _read_stage_three(optim: Mapping[str, Any]) -> list[_Flat]:
    inner = optim["optimizer_state_dict"].get("state", {})
    parts = [_read_flat(x, inner.get(number) or {}) for number, x in enumerate(optim["fp32_flat_groups"])]
    # A state that a flat group lacks is too short when joined, which the cut detects.
    names = {name for part in parts for name in part.states}
    whole = {name: torch.cat([part.states[name] for part in parts if name in part.states]) for name in names}
    return [_Flat(max([0, *(part.step for part in parts)]), whole)]


def _read_flat(fp32: Tensor, inner: Mapping[str, Any]) -> _Flat:
    # States of the last ranks may be shorter than the "fp32", by the padding.
    states = {k: x for k, x in inner.items() if isinstance(x, Tensor) and x.ndim == 1 and k != "step"}
    return _Flat(int(inner.get("step", 0)), {"fp32": fp32.detach().flatten(), **states})


def _join_shapes(groups: Sequence[Mapping[str, torch.Size]]) -> dict[str, torch.Size]:
    return {name: shape for group in groups for name, shape in group.items()}


def load_models(place: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the module's files by rank, without files of experts. Below stage 3 there is a single file."""
    paths = [path for path in place.glob("*mp_rank_00_model_states.pt") if "expert_" not in path.name]
    return [load_file(path) for path in sorted(paths, key=lambda p: int((_RANK.search(p.name) or ["", "0"])[1]))]


def read_tied_names(model: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of tied parameters, with the first name of each."""
    return dict(model.get("shared_params") or {})


def read_buffers(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the module's buffers."""
    names = model.get("buffer_names") or ()
    return {name: model["module"][name].clone() for name in names if name in model["module"]}


def count_updates(model: Mapping[str, Any]) -> int:
    """Returns the number of updates, also for optimizers without a count, such as torch's SGD."""
    return int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0)


def _read_frozen(
    place: pathlib.Path, models: Sequence[Mapping[str, Any]], others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns parameters outside of the optimizer: from fragments where cut, else whole from the module."""
    first, out = models[0], {}
    for name, size in (first.get("frozen_param_shapes") or {}).items():
        # A tuple in checkpoints with experts.
        shape = torch.Size(size)
        parts = torch.cat([model["frozen_param_fragments"][name].flatten() for model in models])
        if parts.numel() < shape.numel():
            have = f"{parts.numel()} elements are there of {len(models)} ranks, too few for"
            raise ValueError(f"{place}, frozen parameters: {have} {name} {tuple(shape)}.")
        out[name] = parts[: shape.numel()].view(shape).float()
    # Stage 1 writes no fragments. Stage 3 has empty parts in the module, and no part is left over.
    known = {*others, *out, *read_tied_names(first), *(first.get("buffer_names") or ())}
    rest = {name: x for name, x in (first.get("module") or {}).items() if name not in known and isinstance(x, Tensor)}
    return out | {name: x.float().clone() for name, x in rest.items()}


def _check_rounded(place: pathlib.Path, params: Mapping[str, Tensor], model: Mapping[str, Any]) -> None:
    """Compares the module's weights, in the files below stage 3, with the rounded masters."""
    module = model.get("module") or {}
    both = [(name, x, module[name]) for name, x in params.items() if name in module and module[name].numel()]
    odd = [f"{name} {tuple(x.shape)}" for name, x, own in both if not torch.equal(x.to(own.dtype), own)]
    raise_all(
        ValueError,
        f"in {place} the module's weights are not the optimizer's, rounded. Where it is a universal checkpoint, read"
        " the one that it was made of: ds_to_universal mixes values up under round_robin_gradients.",
        odd,
    )


def read_paddings(optim: Mapping[str, Any], number: int, shapes: Mapping[str, torch.Size]) -> Sequence[int]:
    """Returns the number of unused elements after each parameter, in a job with `parameter_alignment`."""
    found = optim.get("param_alignment_paddings")
    return found[number] if found else [0] * len(shapes)


def split_states(
    parts: Sequence[_Flat], shapes: Mapping[str, torch.Size], gaps: Sequence[int], *, third: bool = False, where: str
) -> dict[str, dict[str, Tensor]]:
    """Returns the parameters of a group, "fp32", and each state, by kind and name."""
    kinds = ["fp32", *sorted(parts[0].states.keys() - {"fp32"})]
    flats = {kind: [x.states[kind] for x in parts if kind in x.states] for kind in kinds}
    return {k: _cut_params(x, shapes, gaps, third=third, where=f"{where}, {k}") for k, x in flats.items()}


def _cut_params(
    flat: Sequence[Tensor], shapes: Mapping[str, torch.Size], gaps: Sequence[int], *, third: bool, where: str
) -> dict[str, Tensor]:
    """Returns the parameters of a group, from its ranks' flat parts."""
    if len(gaps) != len(shapes):
        raise ValueError(f"{where}: there are {len(gaps)} paddings of {len(shapes)} parameters.")
    out: dict[str, Tensor] = {}
    whole = None if third else torch.cat([x.flatten() for x in flat])
    have, at = sum(x.numel() for x in flat), 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        size = shape.numel()
        if whole is not None:
            piece, step = whole[at : at + size], size
        else:
            step = -(-size // len(flat))
            piece = torch.cat([x[at : at + step] for x in flat])[:size]
        if piece.numel() != size:
            raise ValueError(f"{where}: {have} elements are there, too few for {name} {tuple(shape)}.")
        out[name] = piece.view(shape).float().clone()
        at += step + gap
    used = at * (len(flat) if third else 1)
    # Partitions end at a multiple of twice the number of ranks.
    if have - used >= (1 if third else 2 * len(flat)):
        raise ValueError(f"{where}: {have} elements are there, and the parameters have {used}.")
    return out


def _read_universal(place: pathlib.Path) -> DeepSpeedState:
    models = load_models(place)
    model = models[0] if models else {}
    shapes = _join_shapes(model.get("param_shapes") or ())
    shared, buffers = read_tied_names(model), read_buffers(model)
    params: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    step = 0
    for path in sorted(p for p in (place / "zero").iterdir() if p.is_dir()):
        name = path.name
        if name in shared or name in buffers:  # which are written again as if parameters
            continue
        params[name] = _read_state(path / "fp32.pt", shapes.get(name))
        for state in sorted(p for p in path.glob("*.pt") if p.stem not in _APART):
            moments.setdefault(state.stem, {})[name] = _read_state(state, shapes.get(name))
        if (path / "step.pt").is_file():
            step = max(step, *_read_steps(load_file(path / "step.pt")))
    own = place / "zero" / "optimizer_state.pt"
    if not step and own.is_file():  # where stage 3 has the step
        step = max([0, *_read_steps(load_file(own))])
    return add_module(place, models, DeepSpeedState(params, moments, step, {}, {}))


def _read_state(path: pathlib.Path, shape: torch.Size | None) -> Tensor:
    """Returns a state in the parameter's shape. Stage 3 writes states flat, as bare tensors."""
    found = load_file(path)
    tensor = found["param"] if isinstance(found, dict) and "param" in found else found
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} must have a tensor, got a {type(tensor).__name__}.")
    if tensor is not found:
        return tensor.float().clone()
    if shape is None:
        raise FileNotFoundError(
            f"{path} is flat, and needs a *_model_states.pt with the shapes in the same directory. Copy the files"
            " there."
        )
    if tensor.numel() != shape.numel():
        raise ValueError(f"{path} has {tensor.numel()} elements, and its parameter is {tuple(shape)}.")
    return tensor.float().reshape(shape).clone()


def _read_steps(found: Any) -> list[int]:
    """Returns the steps in a state: a number, a number for each rank, or the steps of a whole optimizer."""
    if not isinstance(found, dict):
        return [int(found)]
    if "optimizer_state_dict" in found:
        groups = found["optimizer_state_dict"].get("state", {}).values()
        return [int(x["step"]) for x in groups if "step" in x]
    return [int(x) for x in found.values() if isinstance(x, int | float | Tensor)]
