"""`memory_in_use`: the memory of a device, or of this process, as metrics."""

import pathlib
import sys

import torch


def memory_in_use(device: torch.device | str = "cpu") -> dict[str, float]:
    """Returns the memory of this rank in bytes, now and at the highest since the program began.

    For a GPU the memory of tensors, as torch allocates memory. For a CPU the resident memory of the process.

    Args:
        device: device, such as `mesh.device`.

    Returns:
        "memory_bytes" and "peak_memory_bytes". On macOS the two are equal.

    Raises:
        OSError: the process is on Windows, and `device` is a CPU.

    Example:
        >>> found = memory_in_use()
        >>> 0 < found["memory_bytes"] and 0 < found["peak_memory_bytes"]
        True
    """
    device = torch.device(device)
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        now, peak = _process_memory()
    return {"memory_bytes": float(now), "peak_memory_bytes": float(peak)}


def _process_memory() -> tuple[int, int]:
    try:
        import resource
    except ImportError:  # on Windows
        raise OSError(
            "memory_in_use reads the memory of a process on Linux and macOS, and of a GPU anywhere. Leave"
            " the call out here."
        ) from None
    # In KiB, but in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # on macOS, which has no such file
        return peak, peak
    return pages * resource.getpagesize(), peak
