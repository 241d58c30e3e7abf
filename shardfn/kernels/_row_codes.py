"""Weights in codes: groups of 32 inputs of an output share a scale, and in int4 also the smallest value.

    int8    w = scale q,            q from -127 to 127    GGUF's Q8_0: 34 bytes a group
    int4    w = scale q + least,    q from 0 to 15        GGUF's Q4_1: 20 bytes a group
    int4_wide    the same, with float32 scales of at most 20 bits, such as of GGUF's Q4_K: 24 bytes a group

Scales and least values of the others are float16. So scale * q is exact in float32, and a weight is rounded at most
once.

A panel of 64 outputs keeps a record for each group, with the bytes of 64 blocks of GGUF: the scales of all outputs, in
int4 also the least values, then rows of codes. A row has the codes of 4 inputs, side by side for each output, since
processors multiply and add up 4 whole numbers in one instruction. In int4 the next 4 inputs are in the high nibbles.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ._arguments import threads_for
from ._build import function
from ._op import KernelOp

_SOURCE = "_row_linear.cpp"
_FEW = 1 << 16  # elements of a decoding up to which a single thread is fastest
PANEL, GROUP = 64, 32
Quantization = Literal["int8", "int4"]
Codes = Literal["int8", "int4", "int4_wide"]
# The bytes of a block. Blocks of "int4_wide" have scale and least value in float32, and then nibbles as of "int4".
BLOCK_BYTES: dict[Codes, int] = {"int8": 34, "int4": 20, "int4_wide": 24}
CODES: tuple[Codes, ...] = tuple(BLOCK_BYTES)
_LARGEST = torch.finfo(torch.float16).max


def quantize_blocks(weight: Float[Tensor, "n k"], quantization: Quantization) -> UInt8[Tensor, "n bytes"]:
    """Rounds a weight to codes, as the blocks of GGUF's Q8_0 or Q4_1.

    For each element |w - decoded| is at most half of the scale, max|w| / 127 or (max w - min w) / 15, plus the rounding
    of float16: 2^-11 max|w|, and 2^-18 in int8 or 2^-21 in int4, important where a scale is below 2^-14. A group with
    an infinite or NaN value or scale is decoded as NaN.

    Args:
        weight: weight of floats, where k is a multiple of 32.
        quantization: "int8" or "int4".

    Returns:
        The blocks of each row in order: 34 or 20 bytes for 32 elements. For example an int8 row of 128 elements has 136
        bytes.

    Raises:
        ValueError: for other codes, or another k.

    Example:
        >>> quantize_blocks(torch.ones(2, 64), "int4").shape
        torch.Size([2, 40])
    """
    check_codes(quantization)
    n, k = weight.shape
    if k % GROUP:
        raise ValueError(f"rows of weight must be a multiple of {GROUP}, a block of codes, got {k}. Pad with zeros.")
    if weight.is_meta or not weight.numel():
        return weight.new_empty(n, k // GROUP * BLOCK_BYTES[quantization], dtype=torch.uint8)
    x = weight.float().reshape(n, k // GROUP, GROUP)
    if quantization == "int8":
        scale = (x.abs().amax(-1, keepdim=True) / 127).half()
        q = _round_values(x, scale, -127, 127).to(torch.int8).view(torch.uint8)
        return torch.cat([_spoil_scale(scale).view(torch.uint8), q], -1).view(n, -1)
    least = x.amin(-1, keepdim=True).half()
    scale = ((x.amax(-1, keepdim=True) - least.float()) / 15).clamp_min(0).half()
    q = _round_values(x - least.float(), scale, 0, 15).to(torch.uint8)
    nibbles = q[..., : GROUP // 2] | q[..., GROUP // 2 :] << 4
    return torch.cat([_spoil_scale(scale).view(torch.uint8), least.view(torch.uint8), nibbles], -1).view(n, -1)


def _round_values(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    step = torch.where(scale > 0, scale.float(), torch.inf)
    return (x / step).round().clamp(low, high).nan_to_num(0)


def _spoil_scale(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() <= _LARGEST, scale, torch.nan)


def pack_blocks(blocks: UInt8[Tensor, "n bytes"], k: int) -> UInt8[Tensor, "panels groups record"]:
    """Returns blocks of codes in the order in which `row_linear` reads blocks. Values do not change.

    Args:
        blocks: blocks of GGUF's Q8_0 or Q4_1, the rows of a weight [n, k], as from `quantize_blocks`, or blocks of
            "int4_wide": scale and least value in float32, and then nibbles as of Q4_1.
        k: elements of a row, a multiple of 32.

    Returns:
        Panels of 64 outputs, padded with zeros, with as many bytes as the blocks.

    Raises:
        TypeError: blocks are not uint8.
        ValueError: rows are not made of blocks of a single kind.

    Example:
        >>> pack_blocks(quantize_blocks(torch.ones(3, 64), "int8"), 64).shape
        torch.Size([1, 2, 2176])
    """
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks are {blocks.dtype}, must be torch.uint8: the bytes of GGUF's blocks")
    (n, size), groups = blocks.shape, k // GROUP
    kinds: list[Codes] = [c for c in BLOCK_BYTES if k % GROUP == 0 and size == groups * BLOCK_BYTES[c]]
    if not kinds:
        raise ValueError(
            f"blocks have rows of {size} bytes, and rows of {k} elements have {groups * 34} (Q8_0) or {groups * 20}"
            f" (Q4_1), with k a multiple of {GROUP}. Pass another k, or blocks of one of these kinds."
        )
    size, panels = BLOCK_BYTES[kinds[0]], -(-n // PANEL)
    out = blocks.new_empty(panels, groups, PANEL * size)
    if blocks.is_meta or not blocks.numel():
        return out
    if n % PANEL or blocks.storage_offset() % 4:
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -n % PANEL))
    by_output = blocks.view(panels, PANEL, groups, size)
    # Numbers of two bytes, and codes of four inputs, move as a whole.
    if kinds[0] == "int8":
        numbers, q = by_output[..., :2].contiguous(), by_output[..., 2:].contiguous()
        _split_panels(out[..., : 2 * PANEL], torch.int16).copy_(numbers.view(torch.int16).permute(0, 2, 3, 1))
        _split_panels(out[..., 2 * PANEL :], torch.int32).copy_(q.view(torch.int32).permute(0, 2, 3, 1))
        return out
    words = by_output.view(torch.int32).permute(0, 2, 3, 1).contiguous()  # two numbers, and 4 times 8 nibbles
    made, head = _split_panels(out, torch.int32), 1 if kinds[0] == "int4" else 2
    if kinds[0] == "int4":
        numbers = words[:, :, 0].contiguous().view(torch.int16).unflatten(-1, (PANEL, 2))
        _split_panels(out[..., : 4 * PANEL], torch.int16).copy_(numbers.transpose(-1, -2))
    else:
        made[:, :, :2] = words[:, :, :2]
    # Bytes 8 i + 4 h + j have the inputs 8 i + 4 h + j in the low and 16 + 8 i + 4 h + j in the high nibbles.
    first, last = words[:, :, head::2], words[:, :, head + 1 :: 2]
    made[:, :, head : head + 2] = (first & _LOW) | (last & _LOW) << 4
    made[:, :, head + 2 :] = (first >> 4 & _LOW) | (last & ~_LOW)
    return out


# Low nibbles of four bytes.
_LOW = 0x0F0F0F0F


def _split_panels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a view of packed bytes with the outputs of a panel along the last dim."""
    return x.view(dtype).unflatten(-1, (-1, PANEL))


def kind_of(packed: Tensor) -> Codes | None:
    """Returns the codes of a packed weight, or None for floats.

    Raises:
        ValueError: the weight has bytes, but not from `pack_blocks`.
    """
    if packed.dtype != torch.uint8:
        return None
    kinds: list[Codes] = [c for c in BLOCK_BYTES if packed.shape[-1] == PANEL * BLOCK_BYTES[c]]
    if not kinds or packed.ndim != 3:
        raise ValueError(f"packed must be from pack_rows or pack_blocks, got bytes of shape {tuple(packed.shape)}")
    return kinds[0]


def packed_shape(packed: Tensor, num: int, k: int) -> tuple[int, int, int]:
    """Returns the shape of a packed weight [num, k], in floats or in the codes of `packed`.

    Example:
        >>> packed_shape(torch.empty(1, 5, 64), 70, 5)
        (2, 5, 64)
    """
    if kind_of(packed) is None:
        return -(-num // PANEL), k, PANEL
    return -(-num // PANEL), -(-k // GROUP), packed.shape[-1]


def slice_panels(packed: Tensor, outputs: tuple[int, int], inputs: tuple[int, int]) -> tuple[Tensor, int]:
    """Returns the panels of a part of a weight, as a view, and the number of their outputs before the part's first.

    `row_linear` reads such a view in place.

    Args:
        packed: packed from `pack_rows` or `pack_blocks`.
        outputs: start and stop of the part's outputs.
        inputs: start and stop of the part's inputs. In codes the start is a multiple of 32.

    Example:
        >>> part, skipped = slice_panels(torch.ones(3, 8, 64), (70, 100), (4, 8))
        >>> part.shape, skipped
        (torch.Size([1, 4, 64]), 6)
    """
    each = 1 if kind_of(packed) is None else GROUP
    first, skipped = divmod(outputs[0], PANEL)
    return packed[first : -(-outputs[1] // PANEL), inputs[0] // each : -(-inputs[1] // each)], skipped


def has_dense_panels(packed: Tensor) -> bool:
    """Returns whether each panel is contiguous. Between panels there may be further inputs of a larger weight.

    Example:
        >>> has_dense_panels(torch.ones(2, 8, 64)[:, 4:]), has_dense_panels(torch.ones(2, 8, 128)[..., :64])
        (True, False)
    """
    _, rows, record = packed.stride()
    return record == 1 and (rows == packed.shape[2] or packed.shape[1] < 2) and packed.stride(0) % packed.shape[2] == 0


def densify_panels(packed: Tensor) -> Tensor:
    """Returns a packed weight whose panels are contiguous, as a copy if they are not."""
    return packed if has_dense_panels(packed) else packed.contiguous()


def rows_apart(packed: Tensor) -> int:
    """Returns the rows, or records of codes, from the beginning of a panel to the beginning of the next panel."""
    return packed.stride(0) // packed.shape[2]


def check_codes(quantization: str) -> None:
    """Refuses unknown codes.

    Raises:
        ValueError: unknown codes. The message names the known codes.
    """
    if quantization not in ("int8", "int4"):
        raise ValueError(f"codes must be 'int8' or 'int4', got {quantization!r}")


class _Parts(NamedTuple):
    """Views of a packed weight: scales and least values [p, 64, g], rows of codes [p, 64, g, rows, 4]."""

    scale: Tensor
    least: Tensor | None
    rows: Tensor


def _split_parts(packed: Tensor) -> _Parts:
    kind = kind_of(packed)
    head, dtype = {"int8": 2, "int4": 4}.get(kind or "", 8), torch.float32 if kind == "int4_wide" else torch.float16
    numbers, rows = packed[..., : head * PANEL].view(dtype), packed[..., head * PANEL :]
    scale, *least = numbers.transpose(1, 2).split(PANEL, 1)
    by_output = rows.unflatten(-1, (-1, PANEL, 4)).movedim(3, 1)
    return _Parts(scale, least[0] if least else None, by_output)


def unpack_rows(packed: Tensor, num: int, k: int) -> Float[Tensor, "num k"]:
    """Returns the weight of a packed weight, in float32, or float64 for a float64 weight.

    For codes, the values are the factors of `row_linear`.

    Args:
        packed: packed from `pack_rows` or `pack_blocks`.
        num: outputs.
        k: inputs.

    Example:
        >>> weight = torch.randn(3, 40)
        >>> blocks = quantize_blocks(torch.nn.functional.pad(weight, (0, 24)), "int8")
        >>> decoded = unpack_rows(pack_blocks(blocks, 64), 3, 40)
        >>> bool(((decoded - weight).abs() <= weight.abs().max() / 200).all())
        True
    """
    if kind_of(packed) is None:
        return packed.transpose(1, 2).flatten(0, 1)[:num, :k].to(torch.promote_types(packed.dtype, torch.float32))
    return _decode_rows(*_split_parts(packed)).flatten(0, 1)[:num, :k]


def take_rows(packed: Tensor, index: Int[Tensor, "*batch"], k: int) -> Float[Tensor, "*batch k"]:
    """Returns rows of a packed weight by index, for example embeddings of tokens. Indices are from 0 to num - 1.

    Args:
        packed: packed from `pack_rows` or `pack_blocks`.
        index: index of the rows.
        k: inputs.

    Returns:
        Rows in the dtype of a weight of floats, or float32 for codes.

    Example:
        >>> packed = pack_blocks(quantize_blocks(torch.arange(64.0).view(2, 32), "int8"), 32)
        >>> take_rows(packed, torch.tensor([1, 1]), 32).shape
        torch.Size([2, 32])
    """
    panel, lane = index // PANEL, index % PANEL
    if kind_of(packed) is None:
        return packed[panel, :, lane]
    scale, least, rows = _split_parts(packed)
    own = None if least is None else least[panel, lane]
    return _decode_rows(scale[panel, lane], own, rows[panel, lane])[..., :k]


def _decode_rows(scale: Tensor, least: Tensor | None, rows: Tensor) -> Tensor:
    """Returns values [*, inputs] of numbers [*, groups] and rows of codes [*, groups, rows, 4]."""
    q = _read_codes(rows, least is not None)
    value = scale[..., None].float() * q.float()
    return (value if least is None else value + least[..., None].float()).flatten(-2)


def _read_codes(rows: Tensor, nibbles: bool) -> Tensor:
    """Returns the codes [*, 32] of rows of codes [*, rows, 4], in the order of inputs."""
    if not nibbles:
        return rows.view(torch.int8).flatten(-2)
    return torch.stack([rows & 15, rows >> 4], -2).flatten(-3)


def split_codes(packed: Tensor, num: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns scales and least values [num, groups], float32, and codes [num, groups, 32] of a packed weight.

    Least values of int8 are None.
    """
    scale, least, rows = _split_parts(packed)
    numbers = [None if x is None else x.flatten(0, 1)[:num].float() for x in (scale, least)]
    assert numbers[0] is not None
    return numbers[0], numbers[1], _read_codes(rows, least is not None).flatten(0, 1)[:num]


def dequantize_blocks(
    blocks: UInt8[Tensor, "*rows bytes"], k: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows k"]:
    """Returns the values of blocks of codes: the factors of `row_linear`, rounded at most once.

        int8    scale q               int4    scale q + least

    Args:
        blocks: blocks of GGUF's Q8_0 or Q4_1, as from `quantize_blocks`, or of "int4_wide", with any dims before the
            last.
        k: number of elements of a row. Further elements, up to a multiple of 32, are left out.
        dtype: dtype of the result. The values are in float32, and are rounded to the dtype.

    Raises:
        TypeError: blocks are not uint8.
        ValueError: rows are not made of blocks of a single kind.

    Example:
        >>> dequantize_blocks(quantize_blocks(torch.ones(1, 64), "int4"), 40).unique()
        tensor([1.])
    """
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks are {blocks.dtype}, must be torch.uint8: the bytes of GGUF's blocks")
    groups = -(-k // GROUP)
    if not groups or blocks.shape[-1] not in [groups * n for n in BLOCK_BYTES.values()]:
        sizes = " or ".join(f"{groups * n} ({quantization})" for quantization, n in BLOCK_BYTES.items())
        raise ValueError(f"blocks have rows of {blocks.shape[-1]} bytes, and rows of {k} elements have {sizes}")
    return DECODE_BLOCKS(blocks, k, dtype)


def block_bytes(k: int, quantization: Codes) -> int:
    """Returns the bytes of the blocks of a row of k elements.

    Example:
        >>> block_bytes(40, "int4")
        40
    """
    return -(-k // GROUP) * BLOCK_BYTES[quantization]


def _decode_blocks(blocks: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    lead, groups = blocks.shape[:-1], -(-k // GROUP)
    by_group = blocks.reshape(-1, groups, blocks.shape[-1] // groups)
    wide = by_group.shape[-1] == BLOCK_BYTES["int4_wide"]
    head, numbers = (4, torch.float32) if wide else (2, torch.float16)
    if by_group.storage_offset() % head:  # numbers lie at multiples of their size
        by_group = by_group.clone()
    scale = by_group[..., :head].view(numbers).float()
    if by_group.shape[-1] == BLOCK_BYTES["int8"]:
        out = by_group[..., 2:].view(torch.int8).float().mul_(scale)
    else:
        q = by_group[..., 2 * head :]
        out = torch.empty(*by_group.shape[:-1], GROUP, device=blocks.device)
        out[..., : GROUP // 2], out[..., GROUP // 2 :] = q & 15, q >> 4
        # The products are exact, so the result is the same fused or not.
        out.mul_(scale).add_(by_group[..., head : 2 * head].view(numbers).float())
    out = out.view(*lead, groups * GROUP)
    return (out if k == groups * GROUP else out[..., :k]).to(dtype).contiguous()


def _decode_natively(blocks: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(*blocks.shape[:-1], k)
    kind = [block_bytes(k, codes) for codes in CODES].index(blocks.shape[-1])
    run = function(_SOURCE, "decode_blocks", "pp" + "i" * 4)
    run(blocks.data_ptr(), out.data_ptr(), out.numel() // k, k, kind, threads_for(out.numel(), _FEW))
    return out.to(dtype)


DECODE_BLOCKS = KernelOp(
    schema="dequantize_blocks(Tensor blocks, int k, ScalarType dtype) -> Tensor",
    abstract=lambda blocks, k, dtype: blocks.new_empty(*blocks.shape[:-1], k, dtype=dtype),
    reference=_decode_blocks,
    native=_decode_natively,
    source=_SOURCE,
    no_derivative="codes are not differentiated. Train an adapter next to the codes.",
)
