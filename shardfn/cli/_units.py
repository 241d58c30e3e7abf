"""Numbers as text: GiB are 2^30 bytes, GB are 10^9."""


def gib(nbytes: float) -> str:
    """Bytes in GiB, to at least three figures.

    Example:
        >>> gib(3 << 30), gib(80 << 30)
        ('3.000', '80.00')
    """
    return _number(nbytes / 2**30)


def gb(nbytes: float) -> str:
    """Bytes in GB, to at least three figures."""
    return _number(nbytes / 1e9)


def seconds(t: float) -> str:
    """A time, in milliseconds below a second.

    Example:
        >>> seconds(12.345), seconds(0.012345)
        ('12.3 s', '12.3 ms')
    """
    return f"{t:,.1f} s" if t >= 100 else f"{t:.3g} s" if t >= 1 else f"{t * 1e3:.3g} ms"


def _number(x: float) -> str:
    return f"{x:.3f}" if x < 10 else f"{x:,.2f}"
