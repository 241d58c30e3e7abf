"""Tokens per second, and model FLOPs utilisation."""

import time
from collections.abc import Callable


def flops_per_token(num_params: int, *, num_layers: int = 0, d_attention: int = 0, length: int = 0) -> float:
    """Floating-point operations of forward and backward for a token: `6 N + 12 L D T`.

    Counted as for model FLOPs utilisation: recomputation under `remat` does not count, and attention counts in full
    although a causal mask leaves half of it out.

    Args:
        num_params: N, parameters that a token meets: without the embedding table, unless it is the output layer too.
        num_layers: L.
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
    """The speed of a loop, from one call to the next.

    Call it where the loop has waited for the device (after `to_floats`): before that, the time measures how fast steps
    are launched, not how fast they run.

    Args:
        flops_per_token: see `flops_per_token`; None leaves "mfu" out.
        peak_flops: of all devices together, operations a second in the dtype of the products; None leaves "mfu" out.
        clock: returns the time in seconds.

    Raises:
        ValueError: one of the two numbers of "mfu" is given without the other, or is not positive.

    Example:
        >>> now = iter([0.0, 2.0])
        >>> speed = Throughput(6e6, peak_flops=1e12, clock=lambda: next(now))
        >>> speed(tokens=4096)
        {'tokens_per_s': 2048.0, 'mfu': 0.012288}
    """

    def __init__(
        self,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        given = {"flops_per_token": flops_per_token, "peak_flops": peak_flops}
        if sum(x is None for x in given.values()) == 1 or any(x is not None and x <= 0 for x in given.values()):
            told = ", ".join(f"{name}={x}" for name, x in given.items())
            raise ValueError(f"Throughput({told}): 'mfu' needs both, above 0; leave out both to go without.")
        self._flops, self._peak, self._clock = flops_per_token, peak_flops, clock
        # The time of the last call, or of the start: each call measures from there, and no time is counted twice.
        self._last = clock()

    def __call__(self, tokens: int) -> dict[str, float]:
        """The rates since the last call, or since the start.

        Args:
            tokens: the number of tokens trained on in that time, on all ranks.

        Returns:
            "tokens_per_s", and "mfu", a fraction of 1, where it is known.
        """
        now = self._clock()
        rate, self._last = tokens / max(now - self._last, 1e-9), now
        if self._flops is None or self._peak is None:
            return {"tokens_per_s": rate}
        return {"tokens_per_s": rate, "mfu": rate * self._flops / self._peak}
