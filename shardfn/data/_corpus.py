"""A corpus that every machine with Python has: the sources of its standard library."""

import pathlib
import sysconfig

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}


def default_corpus(*, tests: bool = False) -> list[pathlib.Path]:
    """The `.py` files of this Python's standard library, sorted by their path inside it.

    Args:
        tests: also take the library's own tests, which are about as large as the library.

    Returns:
        Paths of files; about 12 MB of text without tests.

    Raises:
        FileNotFoundError: this Python keeps no sources (a frozen or zipped installation).

    Example:
        >>> any(path.name == "heapq.py" for path in default_corpus())
        True
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = _NOT_LIBRARY if tests else _NOT_LIBRARY | _TESTS
    inner = (path.relative_to(root) for path in root.rglob("*.py"))
    paths = [root / p for p in sorted(inner, key=lambda p: p.as_posix()) if skip.isdisjoint(p.parts)]
    if not paths:
        raise FileNotFoundError(f"{root} holds no .py files; name text files of your own instead.")
    return paths
