"""Numbers as text: GiB are 2^30 bytes, GB are 10^9."""

import math
from typing import NamedTuple


def gib(nbytes: float) -> str:
    """Returns bytes in GiB, to at least three figures.

    Example:
        >>> gib(3 << 30), gib(80 << 30), gib(1 << 20)
        ('3.000', '80.00', '0.000977')
    """
    return _format_number(nbytes / 2**30)


def gb(nbytes: float) -> str:
    """Returns bytes in GB, to at least three figures."""
    return _format_number(nbytes / 1e9)


class ByteUnit(NamedTuple):
    """A unit of bytes.

    Attributes:
        name: name of the unit, such as "MiB".
        nbytes: size in bytes.
    """

    name: str
    nbytes: int

    def of(self, nbytes: float) -> str:
        """Returns bytes in this unit, without the name."""
        return _format_number(nbytes / self.nbytes)


def unit_of(nbytes: float) -> ByteUnit:
    """Returns the unit for a table with this largest entry, for example GiB from 0.1 GiB on.

    Example:
        >>> [unit_of(n).name for n in (80 << 30, 1 << 28, 1 << 20, 100)]
        ['GiB', 'GiB', 'MiB', 'KiB']
    """
    for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size / 10:
            return ByteUnit(name, size)
    return ByteUnit("KiB", 1 << 10)


def with_unit(nbytes: float) -> str:
    """Returns bytes with the unit that fits.

    Example:
        >>> with_unit(3 << 30), with_unit(1 << 20)
        ('3.000 GiB', '1.000 MiB')
    """
    unit = unit_of(nbytes)
    return f"{unit.of(nbytes)} {unit.name}"


def of_limit(nbytes: float, limit: float) -> str:
    """Returns bytes of a limit, in one unit if possible.

    Example:
        >>> of_limit(3 << 30, 80 << 30), of_limit(1 << 20, 80 << 30)
        ('3.000 of 80.00 GiB', '1.000 MiB of 80.00 GiB')
    """
    unit, whole = unit_of(nbytes), unit_of(limit)
    return f"{unit.of(nbytes)}{'' if unit == whole else f' {unit.name}'} of {whole.of(limit)} {whole.name}"


def count(n: int) -> str:
    """Returns a number of parameters.

    Example:
        >>> count(106_816), count(7_500_000_000)
        ('106,816', '7.500e9')
    """
    return f"{n / 1e9:,.3f}e9" if n >= 10**8 else f"{n:,}"


def seconds(t: float) -> str:
    """Returns a time, in milliseconds below a second.

    Example:
        >>> seconds(12.345), seconds(0.012345)
        ('12.3 s', '12.3 ms')
    """
    return f"{t:,.1f} s" if t >= 100 else f"{t:.3g} s" if t >= 1 else f"{t * 1e3:.3g} ms"


def _format_number(x: float) -> str:
    if 0 < x < 0.1:
        return f"{x:.{2 - math.floor(math.log10(x))}f}"
    return f"{x:.3f}" if x < 10 else f"{x:,.2f}"
