"""`memory_in_use`: the memory of a device, or of this process, as metrics."""

import pathlib
import resource
import sys

import torch


def memory_in_use(device: torch.device | str = "cpu") -> dict[str, float]:
    """The memory of this rank in bytes, now and at its highest since the program began.

    Of a GPU it is the memory of tensors, as torch allocates it; of a CPU the resident memory of the process.

    Args:
        device: such as `mesh.device`.

    Returns:
        "memory_bytes" and "peak_memory_bytes".

    Example:
        >>> found = memory_in_use()
        >>> 0 < found["memory_bytes"] and 0 < found["peak_memory_bytes"]
        True
    """
    device = torch.device(device)
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        # In KiB, but in bytes on macOS.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        now = _resident() or peak
    return {"memory_bytes": float(now), "peak_memory_bytes": float(peak)}


def _resident() -> int | None:
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not on Linux
        return None
    return pages * resource.getpagesize()
