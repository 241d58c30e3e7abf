"""Files of other libraries with quantised weights, read as floats or as blocks of codes.

Only weights are decoded: activations stay floats, also where a config asks for rounded activations.
`quantization_config` of `config.json` has the settings.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardfn.checkpoint import SafetensorsEntry
from shardfn.core import did_you_mean, raise_all
from shardfn.interop.leaves import Archive
from shardfn.kernels import BLOCK_BYTES, Codes, Quantization

from ._formats import Finder, LayerTensors, find_awq, find_bytes, find_fp8, find_gptq, find_packed
from ._mxfp4 import MXFP4Archive
from ._weight import QuantizedWeight, Span


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


_MXFP4 = "mxfp4"  # of experts, [E, K, N]


def find_weights(archive: Archive, config: Mapping[str, Any]) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Returns the quantised weights by name, and the names of their tensors."""
    problems: list[str] = []
    _check_choice("quant_method", config.get("quant_method"), (*_METHODS, _MXFP4), problems)
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
    """Returns whether the format of a `quantization_config` is supported, for example GPTQ or AWQ."""
    return settings is not None and settings.get("quant_method") in (*_METHODS, _MXFP4)


# Tensors for activations, which stay floats.
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_g_idx", ".output_scale")


class QuantizedEntry(NamedTuple):
    """Decoded weight: the dtype of the scales, and the shape [N, K]."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class CodedArchive(Protocol):
    """Files of a model in which some weights [N, K] are quantised, in any format.

    Attributes:
        directory: path of the files.
        codes: name -> the codes of the kernels that hold a weight without any change of a value. Other weights are
            only read decoded.
    """

    directory: pathlib.Path

    @property
    def codes(self) -> Mapping[str, Codes]: ...

    def __getitem__(self, name: str, /) -> SafetensorsEntry | QuantizedEntry: ...

    def __iter__(self) -> Iterator[str]: ...

    def __contains__(self, name: object, /) -> bool: ...

    def box(self, name: str, box: Sequence[Span], shape: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor, as `Archive.box` does. Quantised weights are decoded to float32."""
        ...

    def blocks(self, name: str, rows: Span, groups: Span) -> Tensor:
        """Returns blocks of codes of a weight, in the form of `kernels.quantize_blocks`.

        Args:
            name: name of the weight, which must be in `codes`.
            rows: range of outputs.
            groups: range of blocks of 32 inputs, for example (1, 3) for inputs 32 to 95.
        """
        ...


class QuantizedArchive(Mapping[str, SafetensorsEntry | QuantizedEntry]):
    """Tensors of an archive, with decoded weights in place of the tensors of a format.

    Only requested parts are read and decoded.

    Args:
        archive: files of the model.
        settings: `quantization_config` of the model.

    Raises:
        ValueError: the format, its version, bits or block sizes are not known, or tensors are missing or do not fit one
            another. The message lists all.
    """

    def __init__(self, archive: Archive, settings: Mapping[str, Any]) -> None:
        self.directory, self._archive = archive.directory, archive
        self._codes: dict[str, Quantization] | None = None
        self._weights, taken = find_weights(archive, settings)
        self._plain = [name for name in archive if name not in taken and not name.endswith(_ACTIVATIONS)]

    def __getitem__(self, name: str) -> SafetensorsEntry | QuantizedEntry:
        if name in self._weights:
            return QuantizedEntry(self._weights[name].dtype, self._weights[name].shape)
        if name not in self._plain:
            raise KeyError(name)
        return self._archive[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._weights

    def __len__(self) -> int:
        return len(self._plain) + len(self._weights)

    def box(self, name: str, box: Sequence[Span], shape: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor: see `CodedArchive`."""
        if name not in self._weights:
            return self._archive.box(name, box, shape)
        weight = self._weights[name]
        sizes = [hi - lo for lo, hi in box]
        if not math.prod(sizes):
            return torch.empty(sizes)
        dims = tuple(weight.shape if shape is None else shape)
        split = _split_dims(dims, weight.shape)
        strides = [math.prod(dims[d + 1 : split]) for d in range(split)]
        strides += [math.prod(dims[d + 1 :]) for d in range(split, len(dims))]
        (row, rows), (col, cols) = (_bound(box[part], strides[part]) for part in (slice(split), slice(split, None)))
        decoded = weight.decode((row, rows), (col, cols))
        width = cols - col
        return decoded.as_strided(sizes, [n * width for n in strides[:split]] + strides[split:]).clone()

    @property
    def codes(self) -> dict[str, Quantization]:
        """Returns the codes that hold a weight exactly, by name: see `CodedArchive`.

        Symmetric weights of 4 bits are held by "int4", and other integers of up to 8 bits by "int8", where the scales
        are exact in float16 and groups are multiples of 32 consecutive inputs.
        """
        if self._codes is None:
            codes: dict[str, Quantization] = {}
            for name, weight in self._weights.items():
                if (code := weight.find_codes()) is not None:
                    codes[name] = code
            self._codes = codes
        return self._codes

    def blocks(self, name: str, rows: Span, groups: Span) -> Tensor:
        """Returns blocks of codes of a weight: see `CodedArchive`."""
        codes = self.codes[name]
        if rows[0] >= rows[1] or groups[0] >= groups[1]:
            return torch.empty(rows[1] - rows[0], (groups[1] - groups[0]) * BLOCK_BYTES[codes], dtype=torch.uint8)
        return self._weights[name].blocks(codes, rows, groups)


OpenedArchive = Archive | QuantizedArchive | MXFP4Archive


def open_archive(directory: str | os.PathLike[str]) -> OpenedArchive:
    """Returns the tensors of a directory, decoded where `config.json` has a `quantization_config`.

    Raises:
        ValueError: see `QuantizedArchive` and `MXFP4Archive`.
        FileNotFoundError: see `Archive`.
    """
    archive, settings = Archive(directory), read_quantization(directory)
    if settings is None:
        return archive
    if _read_config(directory).get("model_type") == "gpt2":
        raise ValueError(
            f"{directory}: quantised weights must be of layers with weights [outputs, inputs], but GPT-2 has weights"
            " [inputs, outputs]. Use the model's files without quantization."
        )
    if settings.get("quant_method") == _MXFP4:
        return MXFP4Archive(archive)
    return QuantizedArchive(archive, settings)


def read_quantization(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the `quantization_config` in a directory's `config.json`, or None."""
    found = _read_config(directory).get("quantization_config")
    return found if isinstance(found, dict) else None


def _read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    path = pathlib.Path(directory) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


def _split_dims(dims: Sequence[int], shape: tuple[int, int]) -> int:
    """Returns the number of first dims of a view that make up the outputs of a weight."""
    found = [d for d in range(len(dims) + 1) if math.prod(dims[:d]) == shape[0] and math.prod(dims[d:]) == shape[1]]
    if not found:
        raise ValueError(f"a quantised weight of shape {shape} must be split between outputs and inputs, got {dims}.")
    return found[0]


def _bound(box: Sequence[Span], strides: Sequence[int]) -> Span:
    """Returns the range of flat indices from the first to the last element of a box."""
    first = sum(lo * n for (lo, _), n in zip(box, strides, strict=True))
    last = sum((hi - 1) * n for (_, hi), n in zip(box, strides, strict=True))
    return first, last + 1
