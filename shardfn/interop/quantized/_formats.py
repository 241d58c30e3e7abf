"""Formats of quantised weights: the tensors of a layer, and how integers lie in them.

    gptq              qweight [K / p, N], qzeros [G, N / p], scales [G, N], g_idx [K]
    awq               qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]
    pack-quantized    weight_packed [N, K / p], weight_shape [2], weight_scale [N, G], weight_zero_point
    int-quantized     weight [N, K] of int8, and float-quantized of e4m3, weight_scale [N, G]
    fp8               weight [N, K] of e4m3, weight_scale_inv [N / a, K / b] for blocks of a x b elements

An int32 holds p = 32 / bits integers, the first in the lowest bits. AWQ has eight outputs in the order 0 2 4 6 1 3 5 7.

N outputs, K inputs, G groups of inputs.

References:
    Frantar et al., GPTQ, 2022, https://arxiv.org/abs/2210.17323
    Lin et al., AWQ, 2023, https://arxiv.org/abs/2306.00978
    https://github.com/vllm-project/compressed-tensors
    DeepSeek-AI, DeepSeek-V3, 2024, section 3.3, https://arxiv.org/abs/2412.19437
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfn.checkpoint import SafetensorsEntry
from shardfn.interop.leaves import Archive

from ._weight import Groups, QuantizedWeight, Span

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place in an int32 of each of eight outputs
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class LayerTensors(NamedTuple):
    """Tensors of a single layer, by the name behind the layer's path.

    Attributes:
        archive: files.
        path: path of the layer.
        problems: problems found so far.
    """

    archive: Archive
    path: str
    problems: list[str]

    def has(self, name: str) -> bool:
        """Returns whether the layer has a tensor."""
        return f"{self.path}.{name}" in self.archive

    def entry(self, name: str) -> SafetensorsEntry:
        """Returns the dtype and shape of a tensor."""
        return self.archive[f"{self.path}.{name}"]

    def load(self, name: str, *box: Span, shape: tuple[int, ...] | None = None) -> Tensor:
        """Returns a box of a tensor, or the whole tensor without a box."""
        return self.archive.box(f"{self.path}.{name}", box or [(0, n) for n in self.entry(name).shape], shape)

    def check(self, name: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...] | None) -> bool:
        """Returns whether a tensor has one of the dtypes and shapes, and otherwise records a problem.

        The shape None is any matrix.
        """
        if not self.has(name):
            self.problems.append(f"{self.path}.{name} is missing")
            return False
        dtype, shape = self.entry(name).dtype, tuple(self.entry(name).shape)
        if dtype in dtypes and any(shape == x or (x is None and len(shape) == 2) for x in shapes):
            return True
        wanted = " or ".join("[N, K]" if x is None else str(x) for x in shapes)
        kinds = " or ".join(map(str, dtypes))
        self.problems.append(f"{self.path}.{name} must be {kinds} of shape {wanted}, got {dtype} of shape {shape}")
        return False

    def check_groups(self, shape: tuple[int, int], group: int) -> bool:
        """Returns whether groups divide the inputs, and otherwise records a problem."""
        if shape[1] % group:
            self.problems.append(
                f"{self.path} of shape {shape} must have inputs in whole groups, got groups of {group} for {shape[1]}"
            )
        return shape[1] % group == 0

    def load_order(self, name: str, num: int, group: int) -> Tensor | None:
        """Returns the group of each input, by a tensor if the layer has the tensor. None after a problem."""
        if not self.has(name):
            return torch.arange(num) // group
        if not self.check(name, (torch.int32,), (num,)):
            return None
        order = self.load(name).long()
        if num and not 0 <= int(order.min()) <= int(order.max()) < num // group:
            self.problems.append(
                f"{self.path}.{name} must be from 0 to {num // group - 1}, got {order.min()} to {order.max()}"
            )
            return None
        return order


Finder = Callable[[LayerTensors, Mapping[str, Any]], QuantizedWeight | None]


def find_gptq(layer: LayerTensors, settings: Mapping[str, Any]) -> QuantizedWeight | None:
    """Finds a weight of GPTQ. The first version of the format stores zero - 1."""
    bits = settings["bits"]
    per_word, ints = 32 // bits, (torch.int32,)
    if not layer.check("qweight", ints, None):
        return None
    words, n = layer.entry("qweight").shape
    k = words * per_word
    group = k if settings["group_size"] == -1 else settings["group_size"]
    if n % per_word:
        layer.problems.append(f"{layer.path} must have a multiple of {per_word} outputs, got {n}")
    if n % per_word or not layer.check_groups((n, k), group):
        return None
    num = k // group
    order = layer.load_order("g_idx", k, group)
    fits = [layer.check("scales", _FLOATS, (num, n)), layer.check("qzeros", ints, (num, n // per_word))]
    if order is None or not all(fits):
        return None
    more = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def load_integers(rows: Span, cols: Span) -> Tensor:
        return _load_packed(layer, "qweight", (cols, rows), bits, 0).T

    def load_groups(rows: Span) -> Groups:
        zero = (_load_packed(layer, "qzeros", ((0, num), rows), bits, 1) + more) & (2**bits - 1)
        return Groups(layer.load("scales", (0, num), rows).T, zero.T)

    return _make_weight((n, k), layer.entry("scales").dtype, bits, order, group, load_integers, load_groups)


def find_awq(layer: LayerTensors, settings: Mapping[str, Any]) -> QuantizedWeight | None:
    """Finds a weight of AWQ, 4 bits."""
    ints = (torch.int32,)
    if not layer.check("qweight", ints, None):
        return None
    k, words = layer.entry("qweight").shape
    n, group = words * 8, k if settings["group_size"] == -1 else settings["group_size"]
    if not layer.check_groups((n, k), group):
        return None
    num = k // group
    fits = [layer.check("scales", _FLOATS, (num, n)), layer.check("qzeros", ints, (num, words))]
    if not all(fits):
        return None

    def load_outputs(name: str, at: Span, rows: Span) -> Tensor:
        lo, hi = rows[0] // 8, -(-rows[1] // 8)
        q = _unpack(layer.load(name, at, (lo, hi)), 4, 1).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
        return q[:, rows[0] - lo * 8 : rows[1] - lo * 8].T

    def load_integers(rows: Span, cols: Span) -> Tensor:
        return load_outputs("qweight", cols, rows)

    def load_groups(rows: Span) -> Groups:
        return Groups(layer.load("scales", (0, num), rows).T, load_outputs("qzeros", (0, num), rows))

    order = torch.arange(k) // group
    return _make_weight((n, k), layer.entry("scales").dtype, 4, order, group, load_integers, load_groups)


def find_packed(layer: LayerTensors, settings: Mapping[str, Any]) -> QuantizedWeight | None:
    """Finds a weight of compressed-tensors, packed in int32 with an offset of half of the range."""
    bits, ints = settings["bits"], (torch.int32,)
    if not layer.check("weight_packed", ints, None):
        return None
    if not layer.check("weight_shape", (torch.int64, torch.int32), (2,)):
        return None
    n, k = map(int, layer.load("weight_shape").tolist())
    if not layer.check("weight_packed", ints, (n, -(-k * bits // 32))):
        return None
    return _find_scaled(
        layer, settings, (n, k), lambda rows, cols: _load_packed(layer, "weight_packed", (rows, cols), bits, 1)
    )


def find_bytes(layer: LayerTensors, settings: Mapping[str, Any]) -> QuantizedWeight | None:
    """Finds a weight of compressed-tensors with an element in a byte, of int8 or e4m3."""
    floats = settings["type"] == "float"
    if not layer.check("weight", (torch.float8_e4m3fn if floats else torch.int8,), None):
        return None

    def load_integers(rows: Span, cols: Span) -> Tensor:
        q = layer.load("weight", rows, cols)
        return q.float() if floats else q.to(torch.int16) + 128

    n, k = layer.entry("weight").shape
    return _find_scaled(layer, settings, (n, k), load_integers)


def _find_scaled(
    layer: LayerTensors,
    settings: Mapping[str, Any],
    shape: tuple[int, int],
    load_integers: Callable[[Span, Span], Tensor],
) -> QuantizedWeight | None:
    """Finds the scales and zero points of a weight of compressed-tensors."""
    (n, k), bits, floats = shape, settings["bits"], settings["type"] == "float"
    group, offset = settings["group_size"] or max(k, 1), 0 if floats else 2 ** (bits - 1)
    if not layer.check_groups(shape, group):
        return None
    num = k // group
    scales = {"tensor": [(1,), (1, 1), ()], "channel": [(n, 1), (n,)], "group": [(n, num)]}[settings["strategy"]]
    order = layer.load_order("weight_g_idx", k, group)
    if order is None or not layer.check("weight_scale", _FLOATS, *scales):
        return None
    if not settings["symmetric"] and not layer.has("weight_zero_point"):
        layer.problems.append(f"{layer.path}.weight_zero_point is missing")
        return None
    has_zero, per_word = layer.has("weight_zero_point") and not floats, 32 // bits
    packed = has_zero and layer.entry("weight_zero_point").dtype == torch.int32
    zeros = [(-(-n // per_word), num)] if packed else [(n, num), *(scales if num <= 1 else [])]
    if has_zero and not layer.check("weight_zero_point", (torch.int32 if packed else torch.int8,), *zeros):
        return None

    def load_rows(name: str, rows: Span) -> Tensor:
        if math.prod(layer.entry(name).shape) == 1:
            return layer.load(name).reshape(1, 1).expand(rows[1] - rows[0], num)
        return layer.load(name, rows, (0, num), shape=(n, num))

    def load_groups(rows: Span) -> Groups:
        scale = load_rows("weight_scale", rows)
        if packed:
            return Groups(scale, _load_packed(layer, "weight_zero_point", (rows, (0, num)), bits, 0))
        zero = load_rows("weight_zero_point", rows).to(torch.int16) if has_zero else torch.zeros(scale.shape).short()
        return Groups(scale, zero + offset)

    dtype = layer.entry("weight_scale").dtype
    return _make_weight(shape, dtype, None if floats else bits, order, group, load_integers, load_groups)


def find_fp8(layer: LayerTensors, settings: Mapping[str, Any]) -> QuantizedWeight | None:
    """Finds a weight of e4m3 with a scale for each block, also for a part of a block at the end."""
    if not layer.check("weight", (torch.float8_e4m3fn,), None):
        return None
    (n, k), (a, b) = layer.entry("weight").shape, settings["weight_block_size"]
    num = -(-k // b)
    if not layer.check("weight_scale_inv", _FLOATS, (-(-n // a), num)):
        return None

    def load_integers(rows: Span, cols: Span) -> Tensor:
        return layer.load("weight", rows, cols).float()

    def load_groups(rows: Span) -> Groups:
        lo, hi = rows[0] // a, -(-rows[1] // a)
        scale = layer.load("weight_scale_inv", (lo, hi), (0, num))[torch.arange(*rows) // a - lo]
        return Groups(scale, torch.zeros(scale.shape))

    order = torch.arange(k) // b
    return _make_weight((n, k), layer.entry("weight_scale_inv").dtype, None, order, b, load_integers, load_groups)


def _make_weight(
    shape: tuple[int, int],
    dtype: torch.dtype,
    bits: int | None,
    order: Tensor,
    group: int,
    load_integers: Callable[[Span, Span], Tensor],
    load_groups: Callable[[Span], Groups],
) -> QuantizedWeight:
    consecutive = torch.equal(order, torch.arange(shape[1]) // group)
    return QuantizedWeight(shape, dtype, bits, order, group if consecutive else None, load_integers, load_groups)


def _load_packed(layer: LayerTensors, name: str, box: tuple[Span, Span], bits: int, dim: int) -> Tensor:
    """Returns a box of the integers in a matrix of int32, where `dim` is packed."""
    per_word, (start, stop) = 32 // bits, box[dim]
    lo, hi = start // per_word, -(-stop // per_word)
    words = layer.load(name, *(((lo, hi), box[1]) if dim == 0 else (box[0], (lo, hi))))
    return _unpack(words, bits, dim).narrow(dim, start - lo * per_word, stop - start)


def _unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Returns the integers in a matrix of int32 as int16, along a dim, the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    view = (-1, 1) if dim == 0 else (-1,)
    q = (words.unsqueeze(dim + 1) >> shifts.view(view)) & (2**bits - 1)
    return q.flatten(dim, dim + 1).to(torch.int16)
