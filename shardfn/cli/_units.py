"""Numbers as text: GiB are 2^30 bytes, GB are 10^9."""

import math


def gib(nbytes: float) -> str:
    """Bytes in GiB, to at least three figures.

    Example:
        >>> gib(3 << 30), gib(80 << 30), gib(1 << 20)
        ('3.000', '80.00', '0.000977')
    """
    return _number(nbytes / 2**30)


def gb(nbytes: float) -> str:
    """Bytes in GB, to at least three figures."""
    return _number(nbytes / 1e9)


def count(n: int) -> str:
    """A number of parameters.

    Example:
        >>> count(106_816), count(7_500_000_000)
        ('106,816', '7.500e9')
    """
    return f"{n / 1e9:,.3f}e9" if n >= 10**8 else f"{n:,}"


def seconds(t: float) -> str:
    """A time, in milliseconds below a second.

    Example:
        >>> seconds(12.345), seconds(0.012345)
        ('12.3 s', '12.3 ms')
    """
    return f"{t:,.1f} s" if t >= 100 else f"{t:.3g} s" if t >= 1 else f"{t * 1e3:.3g} ms"


def _number(x: float) -> str:
    if 0 < x < 0.1:
        return f"{x:.{2 - math.floor(math.log10(x))}f}"
    return f"{x:.3f}" if x < 10 else f"{x:,.2f}"
