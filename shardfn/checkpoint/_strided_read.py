"""Reads a box of a row-major tensor in a file, by contiguous runs of bytes or by bands of rows.

Bands are used if the gaps between runs are small, for example 100 columns of a matrix with 128 columns.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardfn.collectives import Box
from shardfn.memory import Bytes, as_bytes, on_host

# Bytes that are read at a time, where rows are not longer.
PIECE = 8 << 20
# Up to this many bytes between two runs are read and dropped: a file is read in pages anyway.
_PAGE = 4096
# Fills an array with the tensor's bytes, from a given byte on.
ReadBytes = Callable[[int, Bytes], None]


def read_box(shape: Sequence[int], box: Sequence[tuple[int, int]], out: Tensor, read: ReadBytes) -> None:
    """Fills `out` with a box of a tensor whose bytes `read` supplies.

    In addition to `out`, at most a band is in memory: some megabytes, or a row. A contiguous box needs no band.

    Args:
        shape: shape of the whole tensor.
        box: start and stop in each dim.
        out: host tensor of the box's shape and the tensor's dtype, of any strides.
        read: `read(start, data)` fills `data` with the tensor's bytes from `start` on.

    Example:
        >>> file = as_bytes(torch.arange(6.0))
        >>> out = torch.empty(2, 1)
        >>> read_box((2, 3), [(0, 2), (1, 2)], out, lambda start, data: data.put(range(len(data)), file[start:]))
        >>> out.flatten()
        tensor([1., 4.])
    """
    if not out.numel():
        return
    if all(lo == 0 and hi == n for (lo, hi), n in zip(box, shape, strict=True)):
        return _read_together(out, 0, read)
    itemsize = out.dtype.itemsize
    for band in _split_bands(shape, box, itemsize):
        begin = 0
        for (lo, _), size in zip(band, shape, strict=True):
            begin = begin * size + lo
        wanted = [(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in zip(box, band, strict=True)]
        target = out[tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(wanted, box, strict=True))]
        if all(x == y for x, y in zip(wanted, band, strict=True)):
            _read_together(target, begin * itemsize, read)
            continue
        here = staging([hi - lo for lo, hi in band], out.dtype)
        read(begin * itemsize, as_bytes(here))
        target.copy_(here[tuple(slice(lo - c, hi - c) for (lo, hi), (c, _) in zip(wanted, band, strict=True))])


def _read_together(target: Tensor, start: int, read: ReadBytes) -> None:
    """Reads contiguous bytes into a tensor of any strides."""
    here = target if target.is_contiguous() else staging(target.shape, target.dtype)
    data = as_bytes(here)
    for lo in range(0, len(data), PIECE):
        read(start + lo, data[lo : lo + PIECE])
    if here is not target:
        target.copy_(here)


def staging(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns temporary host memory for a read."""
    with on_host():
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def _split_bands(shape: Sequence[int], inner: Sequence[tuple[int, int]], itemsize: int) -> Iterator[Box]:
    """Yields boxes that are contiguous in a row-major tensor, and together cover `inner`.

    Every band has all of the last dims that `inner` needs whole, or almost whole.
    """
    dim, row = len(shape), itemsize
    while dim and (shape[dim - 1] - (inner[dim - 1][1] - inner[dim - 1][0])) * row <= _PAGE:
        # Bands have all of this dim, so a row of the dim before it has all of these bytes.
        row *= shape[dim - 1]
        dim -= 1
    tail = tuple((0, n) for n in shape[dim:])
    if dim == 0:
        first, last = inner[0]
        dim, tail, row = 1, tail[1:], row // max(shape[0], 1)
    else:
        first, last = inner[dim - 1]
    step = max(1, PIECE // max(row, 1))
    for at in itertools.product(*(range(lo, hi) for lo, hi in inner[: dim - 1])):
        for lo in range(first, last, step):
            yield (*((i, i + 1) for i in at), (lo, min(lo + step, last)), *tail)
