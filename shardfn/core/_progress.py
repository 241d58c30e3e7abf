"""`progress`: decides in a single place whether a bar of progress is shown."""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from ._mesh import Mesh

# Work that is done sooner, as a part of other work, shows no bar.
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
    """Returns a bar of tqdm on stderr: only on the first rank, and only if stderr is a terminal.

    Saving, restoring, captures and `shardfn plan --search` show bars without a call when the work takes longer than a
    second. The environment variable `TQDM_DISABLE=1`, which tqdm reads, hides all of them.

    Args:
        iterable: items to pass on and count, or None for a bar that counts by `update(n)`.
        total: the number of items. Default: the length of `iterable`, if known.
        initial: the number of items that an earlier run has done.
        desc: words before the bar.
        unit: unit of an item; "B" counts bytes.
        mesh: the first rank of this mesh shows the bar. Default: the first rank of all.
        part: whether the bar belongs to other work. Such a bar is shown after a second, and removed at the end.

    Returns:
        A `tqdm`: an iterator and a context manager with `update(n)`, `set_postfix(loss=...)`, `write(text)`, `close()`.
        Without a visible bar, an object with the same methods and `disable` True. The `write` method prints on the
        first rank.

    Example:
        >>> for step in progress(range(3), desc="training", unit="step"):
        ...     pass
        >>> step
        2
    """
    first = _is_first(mesh)
    hidden = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")  # tqdm reads the variable only at its import
    if hidden or not (first and sys.stderr is not None and sys.stderr.isatty()):
        return _Hidden(iterable, prints=first)
    from tqdm import tqdm  # starts a thread, not needed without bars

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
        """Does nothing, as there is no bar."""

    def set_postfix(self, *args: Any, **values: Any) -> None:
        """Does nothing, as there is no bar to show values."""

    def close(self) -> None:
        """Does nothing, as there is no bar to end."""

    def write(self, text: str, file: Any = None) -> None:
        """Prints a line on the first rank, as `tqdm.write` does above the bar."""
        if self._prints:
            print(text, file=file or sys.stdout)


def _is_first(mesh: Mesh | None) -> bool:
    if mesh is not None:
        return mesh.rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0
