"""`read_deepspeed_weights`, `read_deepspeed_experts`: DeepSpeed's checkpoints of models with experts.

    layer_{l}_expert_{e}_mp_rank_00_model_states.pt   expert e, of all ranks', of the l-th layer with experts
    mp_rank_00_model_states.pt                        the rest of the module
    expp_rank_{r}_mp_rank_00_optim_states.pt          stage 0: states of all parameters by number, the experts of rank r
                                                      last

At stages 1 and 2 experts are in separate groups, each cut over the ranks with the same experts. Names count the experts
of a single rank. A native layer (`deepspeed.moe.layer.MoE`) has a module for each expert. A layer of AutoEP has one
tensor for all.

E experts, n ranks with different experts.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import raise_all

from ._read import (
    DeepSpeedState,
    add_module,
    count_updates,
    find_checkpoint,
    load_file,
    load_models,
    load_optimizers,
    read_buffers,
    read_flat_groups,
    read_paddings,
    read_tied_names,
    split_states,
)

_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OLD = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")
NATIVE = re.compile(r"\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.")
FUSED = re.compile(r"(.*experts\.w[123])\.(\d+)")

# Files by the number of the layer and of the expert.
_Paths = dict[tuple[int, int], pathlib.Path]


def read_deepspeed_weights(directory: str, tag: str | None = None) -> DeepSpeedState:
    """Reads the weights of a checkpoint with experts, DeepSpeed's native or AutoEP's, of any `ep_size`.

    Names and shapes are as in the module on a single rank, with all experts. Weights are the module's, converted to
    float32: the optimizer's states are not read, and `moments` is empty. `read_deepspeed_experts` reads the masters and
    moments as well, and `read_deepspeed` where there are no experts.

    Args:
        directory: directory passed to `save_checkpoint`.
        tag: tag of the checkpoint. Default: the tag in `latest`.

    Raises:
        FileNotFoundError: no such checkpoint, or experts without a file. The message names all.
        ValueError: there are no experts, or a file does not fit the other files, has other objects than tensors, or is
            of several model-parallel ranks, or experts are in the optimizer's states, where AutoEP has them at stage 3.

    Example:
        >>> import tempfile
        >>> directory = pathlib.Path(tempfile.mkdtemp(), "tag")
        >>> directory.mkdir()
        >>> name = "mlp.deepspeed_moe.experts.deepspeed_experts.{}.weight"
        >>> for e in range(2):
        ...     path = directory / f"layer_0_expert_{e}_mp_rank_00_model_states.pt"
        ...     torch.save({name.format(e): torch.full((3, 2), float(e))}, path)
        >>> model = {"module": {"head": torch.ones(2)}, "num_experts": [2]}
        >>> torch.save(model, directory / "mp_rank_00_model_states.pt")
        >>> params = read_deepspeed_weights(str(directory.parent), "tag").params
        >>> torch.stack([params[name.format(e)] for e in range(2)]).shape  # a leaf of `nn.moe`, to be cut by P("ep")
        torch.Size([2, 3, 2])
    """
    place = find_checkpoint(pathlib.Path(directory), tag)
    files, models = _find_files(place), load_models(place)
    if not models:
        raise FileNotFoundError(f"{place} has no mp_rank_00_model_states.pt.")
    model = models[0]
    if not files:
        raise ValueError(_explain_missing(place, model))
    if len(models) > 1:
        raise ValueError(
            f"experts can only be read below stage 3, but {place} has a module cut over {len(models)} ranks."
        )
    _check_numbers(place, files, model.get("num_experts"))
    params = _read_experts(files)
    buffers, shared = read_buffers(model), read_tied_names(model)
    rest = {n: x for n, x in model["module"].items() if n not in buffers and n not in shared and isinstance(x, Tensor)}
    raise_all(
        ValueError,
        f"tensors of {place} are there twice, in files of experts and in the module's:",
        sorted(params.keys() & rest.keys()),
    )
    whole = {name: x.float().clone() for name, x in rest.items()} | params
    return DeepSpeedState(whole, {}, count_updates(model), shared, buffers)


def _find_files(place: pathlib.Path) -> _Paths:
    names = sorted(path.name for path in place.iterdir())
    matches = [m for m in map(_FILE.fullmatch, names) if m]
    if any(int(m[3]) for m in matches):
        raise ValueError(f"{place} is of several model-parallel ranks, whose parts of experts are not joined.")
    if old := [name for name in names if _OLD.fullmatch(name)]:
        raise ValueError(f"{place} has files such as {old[0]}, of no layer. Load and save it by a newer DeepSpeed.")
    return {(int(m[1]), int(m[2])): place / m[0] for m in matches}


def _explain_missing(place: pathlib.Path, model: Mapping[str, Any]) -> str:
    if model.get("ds_autoep_layers"):
        return (
            f"{place} has its experts in the states of the optimizer's ranks, as AutoEP writes them at stage 3; save it"
            " below stage 3."
        )
    return f"{place} has no files of experts: read_deepspeed reads it, with its moments."


def _check_numbers(place: pathlib.Path, files: _Paths, numbers: Any) -> None:
    """Compares the files with the number of experts of each layer. In older files the highest number counts."""
    layers = sorted({layer for layer, _ in files})
    if not numbers:
        numbers = [1 + max((e for at, e in files if at == layer), default=0) for layer in range(layers[-1] + 1)]
    wanted = {(layer, e) for layer, num in enumerate(numbers) for e in range(num)}
    lost = [f"expert {e} of layer {layer}" for layer, e in sorted(wanted - files.keys())]
    raise_all(FileNotFoundError, f"{place} lacks files of experts; layers have {list(numbers)}:", lost)
    more = [f"{files[key].name}" for key in sorted(files.keys() - wanted)]
    raise_all(ValueError, f"{place} has files of more experts than layers have, {list(numbers)}:", more)


def _read_experts(files: _Paths) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {}
    fused: dict[str, dict[int, Tensor]] = {}
    for (_, expert), path in sorted(files.items()):
        for name, x in _read_tensors(path):
            native, whole = NATIVE.search(name), FUSED.fullmatch(name)
            number = native[1] if native else whole[2] if whole else None
            if number is None or int(number) != expert:
                raise ValueError(f"{path} has {name}, which is not a weight of expert {expert}.")
            if whole and not native:
                fused.setdefault(whole[1], {})[expert] = x
            else:
                params[name] = x.float().clone()
    return params | {name: _stack_experts(name, parts) for name, parts in fused.items()}


def _read_tensors(path: pathlib.Path) -> Iterable[tuple[str, Tensor]]:
    found = load_file(path)
    odd = [] if isinstance(found, dict) else [type(found).__name__]
    odd += [f"{name!r}" for name, x in found.items() if not isinstance(x, Tensor)] if not odd else []
    if odd:
        raise ValueError(f"{path} has {', '.join(odd)}, and is to have tensors by name.")
    return found.items()


def _stack_experts(name: str, parts: Mapping[int, Tensor]) -> Tensor:
    shapes = {tuple(x.shape) for x in parts.values()}
    if len(shapes) > 1 or sorted(parts) != list(range(len(parts))):
        raise ValueError(
            f"{name}: all experts must have one shape, got {sorted(shapes)} of the experts {sorted(parts)}."
        )
    return torch.stack([parts[e].float() for e in range(len(parts))])


_LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")
_FUSED = re.compile(r".*experts\.w[123]")
_RANK = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")

States = dict[str, dict[str, Tensor]]


def read_deepspeed_experts(directory: str, tag: str | None = None) -> DeepSpeedState:
    """Reads a checkpoint with experts that `engine.save_checkpoint` wrote at ZeRO stage 0, 1 or 2, of any `ep_size`.

    Names and shapes are as in the module on a single rank, with all experts, as from `read_deepspeed_weights`.
    Parameters are masters where there are any. Give the result to `restore_deepspeed`: a leaf that stacks experts is
    read expert by expert, for `names` gets the name with an expert's number between the parts.

    Args:
        directory: directory passed to `save_checkpoint`.
        tag: tag of the checkpoint. Default: the tag in `latest`.

    Raises:
        FileNotFoundError: no such checkpoint, or files of some ranks or experts are missing. The message names all.
        ValueError: there are no experts, or a file does not fit the other files, or has other objects than tensors, or
            the checkpoint is of several model-parallel ranks or of stage 3, or of stage 0 in 16 bits, or the groups do
            not determine the names of parameters.
    """
    weights = read_deepspeed_weights(directory, tag)
    place = find_checkpoint(pathlib.Path(directory), tag)
    model = load_models(place)[0]
    found = (_read_stage_zero if model.get("param_shapes") is None else _read_partitions)(place, model, weights)
    rest = {name: x for name, x in weights.params.items() if name not in found.params}
    _check_masters(place, found.params, weights.params, model)
    return found._replace(params=found.params | rest)


def _read_partitions(place: pathlib.Path, model: Mapping[str, Any], weights: DeepSpeedState) -> DeepSpeedState:
    """Reads the states of stages 1 and 2."""
    del weights
    optims = load_optimizers(place)
    if "fp32_flat_groups" in optims[0]:
        raise ValueError(f"experts can only be read below stage 3, but {place} is of stage 3.")
    ranks, step = [read_flat_groups(x) for x in optims], 0
    states: States = {}
    numbers = _numbers_of_one_rank(name for group in model["param_shapes"] for name in group)
    for number, group in enumerate(model["param_shapes"]):
        shapes = {name: torch.Size(shape) for name, shape in group.items()}
        gaps = read_paddings(optims[0], number, shapes)
        sharing = _expert_groups(model, len(ranks), optims[0]["partition_count"][number])
        own = []
        for e, members in enumerate(sharing):
            parts = [ranks[r][number] for r in members]
            own.append(split_states(parts, shapes, gaps, where=f"{place}, group {number} of experts' rank {e}"))
            step = max(step, parts[0].step)
        for kind in own[0]:
            states.setdefault(kind, {}).update(_join_ranks([x[kind] for x in own], numbers))
    params = states.pop("fp32", {})
    return add_module(place, [dict(model)], DeepSpeedState(params, states, step, {}, {}))


def _expert_groups(model: Mapping[str, Any], ranks: int, count: int) -> list[list[int]]:
    """Returns the ranks with the same experts, by the rank among the experts."""
    n = ranks // count
    if (model.get("ds_config") or {}).get("use_data_before_expert_parallelism"):
        return [[e * count + i for i in range(count)] for e in range(n)]
    return [[i * n + e for i in range(count)] for e in range(n)]


def _numbers_of_one_rank(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of a rank's experts in each layer, also with experts in several groups."""
    numbers: dict[str, int] = {}
    for found in filter(None, map(_LOCAL.fullmatch, names)):
        numbers[found[1]] = max(numbers.get(found[1], 0), int(found[2]) + 1)
    return numbers


def _join_ranks(by_rank: Sequence[Mapping[str, Tensor]], numbers: Mapping[str, int]) -> dict[str, Tensor]:
    """Joins the tensors of all ranks under the names of a single rank with all experts."""
    out: dict[str, Tensor] = {}
    for e, own in enumerate(by_rank):
        for name, x in own.items():
            found = _LOCAL.fullmatch(name)
            out[name if found is None else f"{found[1]}{e * numbers[found[1]] + int(found[2])}{found[3]}"] = x
    fused = [name for name in out if len(by_rank) > 1 and _FUSED.fullmatch(name)]
    return out | {name: torch.cat([own[name] for own in by_rank]) for name in fused}


def _read_stage_zero(place: pathlib.Path, model: Mapping[str, Any], weights: DeepSpeedState) -> DeepSpeedState:
    """Reads stage 0 in float32: torch's state of an optimizer, where parameters have numbers."""
    files = {int(m[1]): path for path in place.iterdir() if (m := _RANK.fullmatch(path.name))}
    missing = sorted(set(range(max([0, *files]) + 1)) - set(files))
    if missing:
        raise FileNotFoundError(f"{place} lacks the optimizer's states of experts' ranks {missing}.")
    states: States = {}
    step = 0
    for rank in range(len(files)):
        optim = load_file(files[rank])["optimizer"]
        if optim is None or "param_groups" not in optim:
            raise ValueError(
                f"{files[rank]} has no states of a plain optimizer. Read weights, or save at stage 1 or 2."
            )
        for name, number in _param_numbers(files[rank], optim, weights, rank, len(files)).items():
            own = optim["state"].get(number, {})
            step = max(step, int(own.get("step", 0)))
            for kind, x in own.items():
                if isinstance(x, Tensor) and kind != "step":
                    states.setdefault(kind, {})[name] = x.float().reshape(weights.params[name].shape).clone()
    return weights._replace(moments=states, step=step or count_updates(model))


def _param_numbers(
    path: pathlib.Path, optim: Mapping[str, Any], weights: DeepSpeedState, rank: int, n: int
) -> dict[str, int]:
    """Returns the numbers of an experts' rank's parameters: dense parameters first, in the module's order."""
    experts = [name for name in weights.params if NATIVE.search(name)]
    dense = [name for name in weights.params if not NATIVE.search(name)]
    plain, moe = ([x["params"] for x in optim["param_groups"] if bool(x.get("moe")) == on] for on in (False, True))
    own = [name for name in experts if _expert_owner(name, experts, n) == rank]
    names, numbers = dense + own, [k for x in (*plain, *moe) for k in x]
    shapes = [tuple(weights.params[name].shape) for name in names]
    kept = [_state_shape(optim["state"].get(k, {})) for k in numbers]
    fits = len(names) == len(numbers) and len(plain) == 1 and len(plain[0]) == len(dense)
    if not fits or any(b not in (None, a) for a, b in zip(shapes, kept, strict=True)):
        raise ValueError(
            f"the parameters of {path} have numbers in place of names, and do not match the module: expected"
            f" {len(dense)} dense and {len(own)} expert parameters, got groups of {[len(x) for x in plain]} and"
            f" {[len(x) for x in moe]}. Save at stage 1 or 2, where parameters have names."
        )
    return dict(zip(names, numbers, strict=True))


def _expert_owner(name: str, experts: Sequence[str], n: int) -> int:
    """Returns the experts' rank that has a parameter of an expert."""
    found = _LOCAL.fullmatch(name)
    assert found is not None
    same = [m for m in map(_LOCAL.fullmatch, experts) if m and (m[1], m[3]) == (found[1], found[3])]
    return int(found[2]) * n // len(same)


def _state_shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = [tuple(x.shape) for k, x in state.items() if isinstance(x, Tensor) and k != "step"]
    return shapes[0] if shapes else None


def _check_masters(
    place: pathlib.Path, params: Mapping[str, Tensor], weights: Mapping[str, Tensor], model: Mapping[str, Any]
) -> None:
    """Compares the weights in files of experts with the masters, rounded.

    The module's weights are compared elsewhere.
    """
    # A buffer, or a router, may be in another dtype than experts.
    dtypes = {x.dtype for x in model["module"].values() if isinstance(x, Tensor) and x.is_floating_point()}
    odd = [
        f"{name} {tuple(x.shape)}"
        for name, x in params.items()
        if (NATIVE.search(name) or _FUSED.fullmatch(name))
        and (name not in weights or not any(torch.equal(x.to(d).float(), weights[name]) for d in dtypes))
    ]
    raise_all(ValueError, f"in {place} the weights of experts are not the optimizer's, rounded:", odd)
