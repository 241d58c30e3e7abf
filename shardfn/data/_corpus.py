"""A corpus that every machine with Python has: the sources of the standard library."""

import os
import pathlib
import sysconfig

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}


def default_corpus(*, tests: bool = False) -> list[pathlib.Path]:
    """Returns the `.py` files of this Python's standard library, sorted by relative path.

    Args:
        tests: whether to include the library's tests, about as large as the library.

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
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - skip
        paths += [pathlib.Path(folder, name) for name in files if name.endswith(".py")]
    if not paths:
        raise FileNotFoundError(f"{root} holds no .py files. Name text files of your own instead.")
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())
