"""Numbers of a run: metrics of a step, tokens per second, utilisation and memory.

Metrics as numbers, in a single transfer from each device, and norms by layer.

Tokens per second, model FLOPs utilisation, and memory in use.
"""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfn.core import PyTree, not_scalar, raise_all, tree_entries, tree_leaves


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as floats. All tensors of a device are stacked there and copied at once.

    Waits for the device, so a loop that calls the function only every few steps keeps the device busy.

    Args:
        metrics: 0-d tensors of any dtype, on any device, and numbers.

    Returns:
        The same names in the same order. Values pass through float64, exact for float32 and integers below 2^53. On a
        device without float64 values pass through float32.

    Raises:
        TypeError: a value is neither a tensor nor a number. The message lists all such values.

    Example:
        >>> to_floats({"loss": torch.tensor(0.5), "finite": torch.tensor(True), "learning_rate": 1e-3})
        {'loss': 0.5, 'finite': 1.0, 'learning_rate': 0.001}
    """
    raise_all(
        TypeError,
        "metrics are 0-d tensors or numbers; take a mean, or leave these out:",
        [f"metrics[{name!r}] is {told}" for name, x in metrics.items() if (told := not_scalar(x))],
    )
    by_device: dict[torch.device, list[str]] = {}
    for name, x in metrics.items():
        if isinstance(x, Tensor):
            by_device.setdefault(x.device, []).append(name)
    found: dict[str, float] = {}
    for device, names in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        row = torch.stack([metrics[name].detach().to(wide) for name in names])
        found |= dict(zip(names, row.tolist(), strict=True))
    return {name: found[name] if name in found else float(x) for name, x in metrics.items()}


def by_layer(norms: PyTree, prefix: str = "norm") -> dict[str, Tensor]:
    """Returns the Euclidean norms of layers: `sqrt(sum_i n_i^2)` over the leaves of each, as metrics with names.

    A leaf belongs to the layer of the leaf's path up to the first number: `blocks.3` of `params["blocks"][3]["wq"]`,
    and `model.layers.3` of `params["model.layers.3.mlp.up_proj.weight"]`. Without a number a leaf belongs to the
    parent, for example `embed` of `params["embed"]["weight"]`.

    Args:
        norms: tree of 0-d tensors, as `sf.leaf_norms` returns for gradients or parameters. A stacked leaf has a vector,
            with an entry for each layer.
        prefix: prefix of the names `prefix/layer`.

    Returns:
        0-d tensors by name, in the order of the leaves. `Logger.write` takes such a dict.

    Example:
        >>> three, four = torch.tensor(3.0), torch.tensor(4.0)
        >>> by_layer({"blocks": [{"w": three, "b": four}], "head": three}, "grad_norm")
        {'grad_norm/blocks.0': tensor(5.), 'grad_norm/head': tensor(3.)}
    """
    squares: dict[str, list[Tensor]] = {}
    for entries, norm in zip(tree_entries(norms), tree_leaves(norms), strict=True):
        for name, x in _split_layers(entries, norm):
            squares.setdefault(f"{prefix}/{name}" if name else prefix, []).append(x.square())
    return {name: torch.stack(xs).sum().sqrt() for name, xs in squares.items()}


def _split_layers(entries: tuple[Any, ...], norm: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the layers of a leaf, with the leaf's norm in each."""
    parts = [part for entry in entries for part in str(entry).split(".")]
    if norm.ndim:
        parent = ".".join(parts[:-1] or parts)
        return [(f"{parent}.{i}", x) for i, x in enumerate(norm.unbind())]
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    own = (parts[:-1] or parts) if number is None else parts[: number + 1]
    return [(".".join(own), norm)]


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

    References: Chowdhery et al., PaLM, 2022, appendix B, https://arxiv.org/abs/2204.02311
    """
    return 6.0 * num_params + 12.0 * num_layers * d_attention * length


class Throughput:
    """Speed of a loop, from a call to the next, without the time of `pause`.

    Call a `Throughput` where the loop has waited for the device (after `to_floats`). Before the wait, the time measures
    how fast steps are launched, not how fast steps run.

    Args:
        flops_per_token: see `flops_per_token`. None leaves "mfu" out.
        peak_flops: operations a second of all devices together in the dtype of the products, for example
            `mesh.size * sf.graph.peak_flops(mesh.device)`. None leaves "mfu" out.
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
                f"Throughput({shown}): 'mfu' needs peak_flops and one of the others, all above 0. Remove"
                " all three for a throughput without 'mfu'."
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

        Returns: "tokens_per_s", and "mfu", a fraction of 1, where known.
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

    Returns: "memory_bytes" and "peak_memory_bytes". On macOS the two are equal.

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
