"""Transfers of parts of a tensor between device and host: rows to the device, elements to the host.

For values that are too large to be moved whole for each use, such as a KV cache on the host. Only the bytes of the part
are moved and counted in the ledger.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from shardfn.core import Pending

from ._ledger import default_device, record_move
from ._traced import capturing, traced_rows_to_device, traced_rows_to_host
from ._transfer import copies_to_device, on_thread, to_host


def rows_to_device(
    x: Shaped[Tensor, "n ..."], rows: Int[Tensor, "..."], device: torch.device | str | None = None
) -> Pending[Tensor]:
    """Starts the copy of some rows of a host tensor to a device. Not differentiable.

    Args:
        x: host tensor, contiguous. On CUDA, only tensors from `host_empty` are copied asynchronously.
        rows: indices of dim 0 on the CPU, in any order and with repetitions, for example [3, 0, 3].
        device: target device. Default: the accelerator if available, else the CPU.

    Returns:
        A tensor of `x`'s shape on the device, in flight. Other rows are not initialised. `x` must not be used until the
        copy is done. In a capture, the transfer is an op of the graph.

    Raises:
        ValueError: `rows` are not on the CPU, or (in a graph, when it runs) are out of range.

    Example:
        >>> x = torch.arange(6).view(3, 2)
        >>> rows_to_device(x, torch.tensor([2, 0, 2])).result()[[0, 2]]
        tensor([[0, 1],
                [4, 5]])
    """
    x = x.detach()
    place = torch.device(device) if device is not None else default_device()
    if rows.device.type != "cpu":
        raise ValueError(f"rows must be on the CPU, got {rows.device}. Pass rows.cpu().")
    if capturing():
        return traced_rows_to_device(x, rows, place)
    runs = _row_runs(rows.numpy().reshape(-1), len(x))
    out = torch.empty(x.shape, dtype=x.dtype, device=place)
    record_move("host", "device", sum(hi - lo for lo, hi in runs) * x[:1].nbytes)
    return copies_to_device(out, [(out[lo:hi], x[lo:hi]) for lo, hi in runs])


def rows_to_host(
    x: Shaped[Tensor, "n ..."], out: Shaped[Tensor, "..."], places: Sequence[Int[Tensor, " n"]]
) -> Pending[Tensor]:
    """Starts the copy of rows of a device tensor into places of a host tensor. Not differentiable.

        out[places[0][i], places[1][i], ...] = x[i]

    Args:
        x: device tensor.
        out: host tensor to write to.
        places: indices of the first dims of `out`, on the CPU. Rows of the same place must be equal.

    Returns:
        `out`, in flight. `out` and `x` must not be used until the copy is done. In a capture, the transfer is an op of
        the graph.

    Raises:
        ValueError: `places` are not on the CPU.

    Example:
        >>> out = torch.zeros(2, 2, 3)
        >>> rows_to_host(torch.ones(1, 3), out, [torch.tensor([1]), torch.tensor([0])]).result()[1]
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """
    x = x.detach()
    if any(at.device.type != "cpu" for at in places):
        raise ValueError("places must be on the CPU. Pass .cpu() of each place.")
    if capturing():
        return traced_rows_to_host(x, out, places)
    at = tuple(p.long() for p in places)
    if x.is_cuda:  # through a separate buffer: the host writes the rows to `out` when the buffer is filled
        return to_host(x).then(lambda rows: out.index_put_(at, rows))
    record_move("device", "host", x.nbytes)
    return on_thread("down", out, out.index_put_, at, x)


def _row_runs(rows: np.ndarray, num: int) -> list[tuple[int, int]]:
    """Returns the rows in order as ranges, `(lo, hi)`, that do not touch."""
    if len(rows) and not (0 <= rows.min() and rows.max() < num):
        raise ValueError(f"rows must be in 0 to {num - 1}, got {rows.min()} to {rows.max()}.")
    wanted = np.zeros(num + 2, np.int8)
    wanted[rows + 1] = 1
    edges = np.flatnonzero(np.diff(wanted)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
