"""Exact live bytes of a process: `_heap.c`, compiled on first use and preloaded in front of glibc's allocator.

torch.profiler counts only the threads it was started on and nothing that existed before it, so gloo's threads and the
parameters escape it. Standing in front of malloc misses nothing, and the numbers are requested bytes, not pages.
"""

import ctypes
import hashlib
import os
import pathlib
import subprocess
import tempfile

SOURCE = pathlib.Path(__file__).with_name("_heap.c")
TENSOR, OTHER = 0, 1


def build() -> str:
    """Compiles the counter and returns the path to put into `LD_PRELOAD` before a process starts."""
    tag = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    out = pathlib.Path(tempfile.gettempdir()) / f"shardfn-heap-{tag}.so"
    if not out.exists():
        part = out.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(part), str(SOURCE)], check=True)
        part.rename(out)
    return str(out)


class Heap:
    """Reads the counter of this process.

    Raises:
        RuntimeError: the process was started without the counter.
    """

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(None)
        if not hasattr(self._lib, "heap_live"):
            raise RuntimeError("this process counts no memory: start it with LD_PRELOAD=_heap.build()")
        for name in ("heap_live", "heap_peak", "heap_malloc_at_peak"):
            getattr(self._lib, name).restype = ctypes.c_size_t

    def live(self, kind: int = TENSOR) -> int:
        """Bytes alive now."""
        return self._lib.heap_live(kind)

    def peak(self) -> int:
        """The most tensor bytes alive at once since `reset`."""
        return self._lib.heap_peak()

    def other_at_peak(self) -> int:
        """Bytes that malloc held at the peak: gloo's buffers, Python, numpy."""
        return self._lib.heap_malloc_at_peak()

    def reset(self) -> None:
        """Begins a new peak at the bytes alive now."""
        self._lib.heap_reset_peak()

    def sizes_at_peak(self) -> dict[int, int]:
        """Block size -> how many such tensors were alive at the peak, largest total first; blocks of 64 KiB or more."""
        room = 4096
        sizes, counts = (ctypes.c_size_t * room)(), (ctypes.c_size_t * room)()
        n = self._lib.heap_classes_at_peak(sizes, counts, room)
        pairs = [(sizes[i], counts[i]) for i in range(n)]
        return dict(sorted(pairs, key=lambda p: -p[0] * p[1]))
