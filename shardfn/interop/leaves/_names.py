"""Names of leaves as other libraries have them: the keys of a tree with dots between."""

import re

from torch import nn

from shardfn.core import named_parameters

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def join_keys(path: str) -> str:
    """Returns the keys of a path with dots between: the module's name where the tree is `from_module`'s.

    Example:
        >>> join_keys("['blocks'][0]['w']"), join_keys("['0.weight']")
        ('blocks.0.w', '0.weight')
    """
    return ".".join(a or b or c for a, b, c in _KEYS.findall(path))


def parameter_names(module: nn.Module) -> dict[str, list[str]]:
    """Returns a mapping from the first name to all names of a parameter."""
    firsts = {id(p): name for name, p in named_parameters(module)}
    out: dict[str, list[str]] = {name: [] for name in firsts.values()}
    for name, p in named_parameters(module, remove_duplicate=False):
        out[firsts[id(p)]].append(name)
    return out
