"""`progress`: the one place that decides whether a bar of progress is shown."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from ._mesh import Mesh

# Work that is done sooner shows no bar, if it is a part of other work.
_SOON = 1.0


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    initial: int = 0,
    desc: str = "",
    unit: str = "it",
    mesh: Mesh | None = None,
    part: bool = False,
) -> Any:
    """Returns a bar of tqdm on stderr: on the first rank alone, and only where stderr is a terminal.

    Saving, restoring, captures and `shardfn plan --search` show such bars by themselves when they take longer than a
    second. The environment variable `TQDM_DISABLE=1`, which tqdm reads, hides all of them.

    Args:
        iterable: items are passed on and counted, or None for a bar whose `update(n)` counts.
        total: the number of items. Default: the length of `iterable`, where it has one.
        initial: the number of items that an earlier run has done.
        desc: words before the bar.
        unit: unit of an item; "B" counts bytes.
        mesh: the first rank of this mesh shows the bar. Default: the first of all.
        part: whether it belongs to other work: it is shown after a second, and removed at its end.

    Returns:
        A `tqdm`: an iterator and a context manager with `update(n)`, `set_postfix(loss=...)`, `write(text)`, `close()`.
        Where no bar is shown, an object with these whose `disable` is True. Its `write` prints on the first rank.

    Example:
        >>> for step in progress(range(3), desc="training", unit="step"):
        ...     pass
        >>> step
        2
    """
    first = _is_first(mesh)
    if not (first and sys.stderr is not None and sys.stderr.isatty()):
        return _Hidden(iterable, prints=first)
    from tqdm import tqdm  # starts a thread, which programs without bars do without

    look: dict[str, Any] = {"leave": False, "delay": _SOON} if part else {}
    if unit == "B":
        look |= {"unit_scale": True, "unit_divisor": 1024}
    return tqdm(iterable, desc or None, total, unit=unit, initial=initial, dynamic_ncols=True, **look)


class _Hidden:
    """A bar that is not shown."""

    disable = True

    def __init__(self, iterable: Iterable[Any] | None, *, prints: bool) -> None:
        self._iterable, self._prints = iterable, prints

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable or ())

    def __enter__(self) -> "_Hidden":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        """Counts nothing."""

    def set_postfix(self, *args: Any, **values: Any) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Has nothing to end."""

    def write(self, text: str, file: Any = None) -> None:
        """Prints a line on the first rank, as `tqdm.write` does above the bar."""
        if self._prints:
            print(text, file=file or sys.stdout)


def _is_first(mesh: Mesh | None) -> bool:
    if mesh is not None:
        return mesh.rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0
