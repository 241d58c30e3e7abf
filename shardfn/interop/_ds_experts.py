"""`read_deepspeed_weights`: the weights of DeepSpeed's checkpoints of models with experts.

    layer_{l}_expert_{e}_mp_rank_00_model_states.pt   expert e, of all ranks', of the l-th layer with experts
    mp_rank_00_model_states.pt                        the rest of the module

A native layer (`deepspeed.moe.layer.MoE`) has a module for each expert. A layer of AutoEP has one tensor for all.
"""

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import raise_all

from ._ds_checkpoint import DeepSpeedState, buffers_of, loaded, models_of, place_of, shared_of, updates_of

_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OLD = re.compile(r"expert_\d+_mp_rank_\d+_model_states\.pt")
NATIVE = re.compile(r"\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.")
FUSED = re.compile(r"(.*experts\.w[123])\.(\d+)")

Experts = dict[tuple[int, int], pathlib.Path]


def read_deepspeed_weights(directory: str, tag: str | None = None) -> DeepSpeedState:
    """Reads the weights of a checkpoint with experts, DeepSpeed's native or AutoEP's, of any `ep_size`.

    Names and shapes are as in the module on one rank, with all experts. Weights are the module's, converted to float32:
    the optimizer's states are not read, and `moments` is empty. `read_deepspeed_experts` reads the masters and moments
    as well, and `read_deepspeed` where there are no experts.

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
    place = place_of(pathlib.Path(directory), tag)
    files, models = _find_files(place), models_of(place)
    if not models:
        raise FileNotFoundError(f"{place} has no mp_rank_00_model_states.pt.")
    model = models[0]
    if not files:
        raise ValueError(_why_none(place, model))
    if len(models) > 1:
        raise ValueError(f"{place} has a module cut over {len(models)} ranks; experts are read below stage 3.")
    _check_numbers(place, files, model.get("num_experts"))
    params = _read_experts(files)
    buffers, shared = buffers_of(model), shared_of(model)
    rest = {n: x for n, x in model["module"].items() if n not in buffers and n not in shared and isinstance(x, Tensor)}
    raise_all(
        ValueError,
        f"tensors of {place} are there twice, in files of experts and in the module's:",
        sorted(params.keys() & rest.keys()),
    )
    whole = {name: x.float().clone() for name, x in rest.items()} | params
    return DeepSpeedState(whole, {}, updates_of(model), shared, buffers)


def _find_files(place: pathlib.Path) -> Experts:
    names = sorted(path.name for path in place.iterdir())
    matches = [m for m in map(_FILE.fullmatch, names) if m]
    if any(int(m[3]) for m in matches):
        raise ValueError(f"{place} is of several model-parallel ranks, whose parts of experts are not joined.")
    if old := [name for name in names if _OLD.fullmatch(name)]:
        raise ValueError(f"{place} has files such as {old[0]}, of no layer; load and save it by a newer DeepSpeed.")
    return {(int(m[1]), int(m[2])): place / m[0] for m in matches}


def _why_none(place: pathlib.Path, model: Mapping[str, Any]) -> str:
    if model.get("ds_autoep_layers"):
        return (
            f"{place} has its experts in the states of the optimizer's ranks, as AutoEP writes them at stage 3; save it"
            " below stage 3."
        )
    return f"{place} has no files of experts: read_deepspeed reads it, with its moments."


def _check_numbers(place: pathlib.Path, files: Experts, numbers: Any) -> None:
    """Compares the files with the number of experts of each layer. In older files the highest number counts."""
    layers = sorted({layer for layer, _ in files})
    if not numbers:
        numbers = [1 + max((e for at, e in files if at == layer), default=0) for layer in range(layers[-1] + 1)]
    wanted = {(layer, e) for layer, num in enumerate(numbers) for e in range(num)}
    lost = [f"expert {e} of layer {layer}" for layer, e in sorted(wanted - files.keys())]
    raise_all(FileNotFoundError, f"{place} lacks files of experts; layers have {list(numbers)}:", lost)
    more = [f"{files[key].name}" for key in sorted(files.keys() - wanted)]
    raise_all(ValueError, f"{place} has files of more experts than layers have, {list(numbers)}:", more)


def _read_experts(files: Experts) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {}
    fused: dict[str, dict[int, Tensor]] = {}
    for (_, expert), path in sorted(files.items()):
        for name, x in _read_tensors(path):
            native, whole = NATIVE.search(name), FUSED.fullmatch(name)
            number = native[1] if native else whole[2] if whole else None
            if number is None or int(number) != expert:
                raise ValueError(f"{path} has {name}, which is no weight of expert {expert}.")
            if whole and not native:
                fused.setdefault(whole[1], {})[expert] = x
            else:
                params[name] = x.float().clone()
    return params | {name: _stack_experts(name, parts) for name, parts in fused.items()}


def _read_tensors(path: pathlib.Path) -> Iterable[tuple[str, Tensor]]:
    found = loaded(path)
    odd = [] if isinstance(found, dict) else [type(found).__name__]
    odd += [f"{name!r}" for name, x in found.items() if not isinstance(x, Tensor)] if not odd else []
    if odd:
        raise ValueError(f"{path} has {', '.join(odd)}, and is to have tensors by name.")
    return found.items()


def _stack_experts(name: str, parts: Mapping[int, Tensor]) -> Tensor:
    shapes = {tuple(x.shape) for x in parts.values()}
    if len(shapes) > 1 or sorted(parts) != list(range(len(parts))):
        raise ValueError(f"{name}: experts {sorted(parts)} have the shapes {sorted(shapes)}; all must have one.")
    return torch.stack([parts[e].float() for e in range(len(parts))])
