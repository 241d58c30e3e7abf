"""Settings of quantised files: `quantization_config` in `config.json`, checked, and the weights of the files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardfn.core import did_you_mean, raise_all
from shardfn.interop.leaves import Archive

from ._formats import Finder, LayerTensors, find_awq, find_bytes, find_fp8, find_gptq, find_packed
from ._weight import QuantizedWeight


class _Format(NamedTuple):
    """Format of a config: the checked settings, the tensor that marks a layer, all tensors, and the finder."""

    settings: Mapping[str, Any]
    marker: str
    names: tuple[str, ...]
    find: Finder


def _check_choice(name: str, value: Any, choices: Sequence[Any], problems: list[str]) -> None:
    if value not in choices:
        near = did_you_mean(value, [x for x in choices if isinstance(x, str)]) if isinstance(value, str) else ""
        problems.append(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.{near}")


def _check_group(value: Any, problems: list[str]) -> None:
    if type(value) is not int or (value != -1 and value < 1):
        problems.append(f"group_size must be -1, or 1 or more, got {value!r}.")


def _read_gptq(config: Mapping[str, Any], problems: list[str]) -> _Format:
    _check_choice("bits", config.get("bits"), (2, 4, 8), problems)
    _check_choice("checkpoint_format", config.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"), problems)
    _check_group(config.get("group_size"), problems)
    return _Format(config, "qweight", ("qweight", "qzeros", "scales", "g_idx"), find_gptq)


def _read_awq(config: Mapping[str, Any], problems: list[str]) -> _Format:
    _check_choice("bits", config.get("bits"), (4,), problems)
    _check_choice("version", str(config.get("version", "gemm")).lower(), ("gemm",), problems)
    _check_choice("zero_point", config.get("zero_point", True), (True,), problems)
    _check_group(config.get("group_size"), problems)
    return _Format(config, "qweight", ("qweight", "qzeros", "scales"), find_awq)


def _read_compressed(config: Mapping[str, Any], problems: list[str]) -> _Format:
    form = config.get("format")
    _check_choice("format", form, ("pack-quantized", "int-quantized", "float-quantized"), problems)
    if config.get("kv_cache_scheme"):
        problems.append("kv_cache_scheme must be null: the cache has floats.")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        problems.append(f"sparsity_config must be dense, got {config['sparsity_config'].get('format')!r}.")
    groups = config.get("config_groups")
    schemes = [x.get("weights") for x in groups.values()] if isinstance(groups, dict) else []
    if len(schemes) != 1 or not isinstance(schemes[0], dict):
        problems.append(f"config_groups must be one group with weights, got {len(schemes)} groups.")
        return _Format({}, "weight_packed", (), find_packed)
    (scheme,) = schemes
    strategy, kind, bits = scheme.get("strategy"), scheme.get("type", "int"), scheme.get("num_bits")
    _check_choice("strategy", strategy, ("group", "channel", "tensor"), problems)
    _check_choice("type", kind, ("float",) if form == "float-quantized" else ("int",), problems)
    _check_choice("num_bits", bits, (4, 8) if form == "pack-quantized" else (8,), problems)
    size = scheme.get("group_size") if strategy == "group" else None
    if strategy == "group":
        _check_group(size, problems)
    settings = {"bits": bits, "strategy": strategy, "type": kind, "symmetric": scheme.get("symmetric", True)}
    settings["group_size"] = None if size == -1 else size
    names = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    if form == "pack-quantized":
        return _Format(settings, "weight_packed", ("weight_packed", *names), find_packed)
    return _Format(settings, "weight_scale", ("weight", *names), find_bytes)


def _read_fp8(config: Mapping[str, Any], problems: list[str]) -> _Format:
    size = config.get("weight_block_size")
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(type(x) is int and x > 0 for x in size)):
        problems.append(f"weight_block_size must be two numbers such as [128, 128], got {size!r}.")
    _check_choice("fmt", config.get("fmt", "e4m3"), ("e4m3",), problems)
    return _Format(config, "weight_scale_inv", ("weight", "weight_scale_inv"), find_fp8)


_METHODS = {"gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_compressed, "fp8": _read_fp8}


def find_weights(archive: Archive, config: Mapping[str, Any]) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Returns the quantised weights by name, and the names of their tensors."""
    problems: list[str] = []
    _check_choice("quant_method", config.get("quant_method"), tuple(_METHODS), problems)
    made = None if problems else _METHODS[config["quant_method"]](config, problems)
    raise_all(ValueError, f"{archive.directory}: quantization_config in config.json is not supported:", problems)
    assert made is not None
    weights: dict[str, QuantizedWeight] = {}
    taken: set[str] = set()
    paths = [name.removesuffix(f".{made.marker}") for name in archive if name.endswith(f".{made.marker}")]
    for path in paths:
        weight = made.find(LayerTensors(archive, path, problems), made.settings)
        taken |= {f"{path}.{name}" for name in made.names}
        if weight is not None:
            weights[f"{path}.weight"] = weight
    narrow = [name for name, x in archive.items() if x.dtype == torch.float8_e4m3fn and name not in taken]
    problems += [f"{name} is in e4m3, but its {made.marker.rpartition('.')[2]} is missing" for name in narrow]
    loose = [name for name in archive if name.endswith((".scales", ".qzeros", ".weight_scale")) and name not in taken]
    problems += [f"{name.rpartition('.')[0]}.{made.marker} is missing" for name in loose]
    if not paths and not problems:
        problems.append(f"there is no tensor named *.{made.marker}")
    raise_all(ValueError, f"{archive.directory} does not fit its quantization_config:", problems)
    return weights, taken


def can_decode(settings: Mapping[str, Any] | None) -> bool:
    """Returns whether a `quantization_config` has a format of this room."""
    return settings is not None and settings.get("quant_method") in _METHODS
