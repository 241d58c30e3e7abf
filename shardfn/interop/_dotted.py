"""Names of leaves as other libraries have them: the keys of a tree with dots between."""

import re

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def dotted(path: str) -> str:
    """Returns the keys of a path with dots between: the module's name where the tree is `from_module`'s.

    Example:
        >>> dotted("['blocks'][0]['w']"), dotted("['0.weight']")
        ('blocks.0.w', '0.weight')
    """
    return ".".join(a or b or c for a, b, c in _KEYS.findall(path))
