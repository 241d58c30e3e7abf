"""`read_deepspeed`: DeepSpeed's checkpoints, ZeRO stages 1 to 3 and some universal ones, as whole named tensors.

Its files are pickles. They are opened by torch's unpickler for weights, which makes tensors and plain containers; the
few classes of DeepSpeed's own that lie between them become objects that do nothing, and any other name is refused.

    stage 1, 2   ranks' flat partitions, one after another, are the group; parameters lie in it in order
    stage 3      a parameter is cut in as many equal pieces as there are ranks, the last ones padded
    universal    a file for each parameter and each of its states
"""

import pathlib
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What lies in DeepSpeed's files and holds no tensor.
_INERT = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_TAG = re.compile(r"[\w.\-]+", re.ASCII)
_STATES = ("exp_avg", "exp_avg_sq")


class _Inert:
    """In the place of an object of DeepSpeed's."""

    def __new__(cls, *args: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class DeepSpeedState(NamedTuple):
    """What a checkpoint of DeepSpeed has.

    Attributes:
        params: whole parameters in float32, by the module's names: masters where there are any.
        moments: "exp_avg" and "exp_avg_sq", each by the same names; empty where the optimizer has none.
        step: of the optimizer; 0 if it says none.
        shared: names of tied parameters, and of the one in `params` that each is.
    """

    params: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    step: int
    shared: dict[str, str]


def read_deepspeed(directory: str, tag: str | None = None) -> DeepSpeedState:
    """Reads a checkpoint that `engine.save_checkpoint` wrote, or `ds_to_universal` made of one of stage 1 or 2.

    Files are mapped, not loaded, so what is in memory at a time is what is made of them. Give `params` to `step.init`,
    with a module's own names through `from_module`; moments have the names of parameters, so a tree of the optimizer's
    is made of them as of the parameters.

    A universal checkpoint made of stage 3 comes out flat, without a step. Frozen parameters are read at stages 2 and 3
    only. Buffers, and moments of optimizers other than Adam, are left out.

    Args:
        directory: what `save_checkpoint` was given.
        tag: which of the checkpoints; default the one that `latest` (or `latest_universal`) names.

    Raises:
        FileNotFoundError: no such checkpoint; says which files are missing.
        ValueError: a file has what is no tensor or plain container, or does not fit the others; or the checkpoint is of
            several model-parallel ranks, or of stage 0.
    """
    place = _place(pathlib.Path(directory), tag)
    return _universal(place) if (place / "zero").is_dir() else _partitioned(place)


def _place(directory: pathlib.Path, tag: str | None) -> pathlib.Path:
    if tag is None:
        said = [directory / name for name in ("latest", "latest_universal") if (directory / name).is_file()]
        if not said:
            raise FileNotFoundError(f"{directory} has no file 'latest' that names a checkpoint; pass tag=.")
        tag = said[0].read_text().strip()
    if not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise ValueError(f"{tag!r} is no name of a checkpoint in {directory}.")
    place = directory / tag
    if not place.is_dir():
        found = sorted(p.name for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []
        raise FileNotFoundError(f"no checkpoint {tag!r} in {directory}, which has {found}.")
    return place


def _loaded(path: pathlib.Path) -> Any:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as problem:
        raise ValueError(f"{path} is no file of a checkpoint: {str(problem).splitlines()[0]}") from problem
    odd = [x for x in names if x not in _INERT]
    if odd:
        raise ValueError(f"{path} has objects of {', '.join(odd)}, which are no tensors. It is not opened.")
    try:
        with torch.serialization.safe_globals([(_Inert, x) for x in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as problem:
        raise ValueError(f"{path} is no file of a checkpoint: {str(problem).splitlines()[0]}") from problem


def _partitioned(place: pathlib.Path) -> DeepSpeedState:
    files: dict[int, pathlib.Path] = {}
    for path in place.iterdir():
        found = _OPTIM.fullmatch(path.name)
        if found and int(found[2]):
            raise ValueError(f"{place} is of several model-parallel ranks. Make a universal checkpoint of it first.")
        if found:
            files[int(found[1])] = path
    if not files:
        raise ValueError(f"{place} has no states of a ZeRO optimizer: stage 0 keeps weights alone in a form of ours.")
    missing = sorted(set(range(len(files))) - set(files))
    if missing:
        raise FileNotFoundError(f"{place} has no optimizer states of ranks {missing}.")
    optims = [_loaded(files[rank])["optimizer_state_dict"] for rank in range(len(files))]
    count = optims[0]["partition_count"]
    if (count[0] if isinstance(count, list) else count) != len(files):
        raise FileNotFoundError(f"{place} has optimizer states of {len(files)} ranks; {count} have written.")
    third = "fp32_flat_groups" in optims[0]
    models = sorted(place.glob("*mp_rank_00_model_states.pt"))
    if not models:
        raise FileNotFoundError(f"{place} has no mp_rank_00_model_states.pt.")
    model = _loaded(models[0])
    groups = model["param_shapes"]
    params: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    step = 0
    for number, shapes in enumerate(groups):
        flat = [x["fp32_flat_groups" if third else "single_partition_of_fp32_groups"][number] for x in optims]
        params |= _cut(flat, shapes, third=third, where=f"{place}, group {number}")
        inner = [(x["optimizer_state_dict"] if third else x["base_optimizer_state"])["state"][number] for x in optims]
        step = max(step, int(inner[0].get("step", 0)))
        for name in _STATES:
            if all(name in x for x in inner):
                own = _cut([x[name] for x in inner], shapes, third=third, where=f"{place}, {name} of group {number}")
                moments.setdefault(name, {}).update(own)
    for name in model.get("frozen_param_shapes") or {}:
        fragments = [_loaded(path)["frozen_param_fragments"][name] for path in models]
        shape = model["frozen_param_shapes"][name]
        params[name] = torch.cat([x.flatten() for x in fragments])[: shape.numel()].view(shape).float()
    return DeepSpeedState(params, moments, step, dict(model.get("shared_params") or {}))


def _cut(flat: Sequence[Tensor], shapes: Mapping[str, torch.Size], *, third: bool, where: str) -> dict[str, Tensor]:
    """The parameters of a group, from its ranks' flat parts."""
    out: dict[str, Tensor] = {}
    whole = None if third else torch.cat([x.flatten() for x in flat])
    have, at = sum(x.numel() for x in flat), 0
    for name, shape in shapes.items():
        size = shape.numel()
        if whole is not None:
            piece, step = whole[at : at + size], size
        else:
            step = -(-size // len(flat))
            piece = torch.cat([x[at : at + step] for x in flat])[:size]
        if piece.numel() != size:
            raise ValueError(f"{where}: {have} elements are there, too few for {name} {tuple(shape)}.")
        out[name] = piece.view(shape).float().clone()
        at += step
    used = at * (len(flat) if third else 1)
    # Partitions end at a multiple of twice the number of ranks.
    if have - used >= (1 if third else 2 * len(flat)):
        raise ValueError(f"{where}: {have} elements are there, and the parameters have {used}.")
    return out


def _universal(place: pathlib.Path) -> DeepSpeedState:
    params: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    step = 0
    for path in sorted(p for p in (place / "zero").iterdir() if p.is_dir()):
        params[path.name] = _state_of(path / "fp32.pt")
        for name in _STATES:
            if (path / f"{name}.pt").is_file():
                moments.setdefault(name, {})[path.name] = _state_of(path / f"{name}.pt")
        if (path / "step.pt").is_file():
            step = max(step, *(int(x) for x in _numbers(_loaded(path / "step.pt"))))
    shared: dict[str, str] = {}
    for path in sorted(place.glob("*mp_rank_00_model_states.pt"))[:1]:
        shared = dict(_loaded(path).get("shared_params") or {})
    return DeepSpeedState(params, moments, step, shared)


def _state_of(path: pathlib.Path) -> Tensor:
    found = _loaded(path)
    tensor = found["param"] if isinstance(found, dict) and "param" in found else found
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path} has a {type(tensor).__name__}, and is to have a tensor.")
    return tensor.float().clone()


def _numbers(found: Any) -> Iterator[Any]:
    yield from found.values() if isinstance(found, dict) else [found]
