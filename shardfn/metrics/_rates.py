"""Tokens per second, model FLOPs utilisation, and memory in use."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import torch


def flops_per_token(num_params: int, *, num_layers: int = 0, d_attention: int = 0, length: int = 0) -> float:
    """Returns the floating-point operations of forward and backward for a token: `6 N + 12 L D T`.

    Counted as for model FLOPs utilisation: recomputation under `remat` does not count, and attention counts in full
    although a causal mask leaves half out.

    Args:
        num_params: N, parameters that a token meets: without the embedding table, unless the table is the output layer
            too.
        num_layers: L, number of layers.
        d_attention: D, heads times the width of a head.
        length: T, tokens of a sequence.

    Example:
        >>> flops_per_token(7_000_000, num_layers=8, d_attention=256, length=1024)
        67165824.0

    References:
        Chowdhery et al., PaLM, 2022, appendix B, https://arxiv.org/abs/2204.02311
    """
    return 6.0 * num_params + 12.0 * num_layers * d_attention * length


class Throughput:
    """Speed of a loop, from a call to the next, without the time of `pause`.

    Call a `Throughput` where the loop has waited for the device (after `to_floats`). Before the wait, the time measures
    how fast steps are launched, not how fast steps run.

    Args:
        flops_per_token: see `flops_per_token`. None leaves "mfu" out.
        peak_flops: operations a second of all devices together in the dtype of the products, for example `mesh.size *
            sf.graph.peak_flops(mesh.device)`. None leaves "mfu" out.
        clock: function that returns the time in seconds.
        flops_per_step: operations of a step in place of `flops_per_token`, of all devices together, for example
            `mesh.size * step.lower(state, batch).cost_analysis().flops`. The figure contains the operations that
            `remat` repeats: lower a step without `remat`, or call the result hardware utilisation.

    Raises:
        ValueError: a number for "mfu" is missing, not positive, or passed in two ways.

    Example:
        >>> now = iter([0.0, 1.0, 4.0, 5.0])
        >>> speed = Throughput(6e6, peak_flops=1e12, clock=lambda: next(now))
        >>> with speed.pause():  # an evaluation, or a save
        ...     pass
        >>> speed(tokens=4096)
        {'tokens_per_s': 2048.0, 'mfu': 0.012288}
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        flops_per_step: float | None = None,
    ) -> None:
        given = {"flops_per_token": flops_per_token, "flops_per_step": flops_per_step, "peak_flops": peak_flops}
        num = sum(x is not None for x in (flops_per_token, flops_per_step))
        if num != (peak_flops is not None) or any(x is not None and x <= 0 for x in given.values()):
            shown = ", ".join(f"{name}={x}" for name, x in given.items())
            raise ValueError(
                f"Throughput({shown}): for 'mfu', peak_flops and one of the others must be above 0. Leave"
                " out all to go without."
            )
        self._per_token, self._per_step, self._peak, self._clock = flops_per_token, flops_per_step, peak_flops, clock
        # The time of the last call, or of the start: each call measures from there, and no time is counted twice.
        self._last = clock()
        self._paused = False

    def __call__(self, tokens: int, steps: int = 1) -> dict[str, float]:
        """Returns the rates since the last call, or since the start.

        Args:
            tokens: number of tokens trained on in this time, on all ranks.
            steps: number of steps in this time. Only `flops_per_step` needs the number.

        Returns:
            "tokens_per_s", and "mfu", a fraction of 1, where known.
        """
        now = self._clock()
        seconds, self._last = max(now - self._last, 1e-9), now
        rates = {"tokens_per_s": tokens / seconds}
        if self._peak is not None:
            flops = tokens * self._per_token if self._per_token is not None else steps * (self._per_step or 0.0)
            rates["mfu"] = flops / seconds / self._peak
        return rates

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time of the body out, such as an evaluation or a save. A pause inside of a pause has no effect.

        On a GPU, earlier steps are still running when the body begins, unless the loop has waited for the steps.
        """
        if self._paused:
            yield
            return
        begin, self._paused = self._clock(), True
        try:
            yield
        finally:
            self._paused = False
            self._last += self._clock() - begin


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
