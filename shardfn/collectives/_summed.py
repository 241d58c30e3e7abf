"""What the graph of a value says of the collectives behind it."""

from torch import Tensor

from ._primitive import Call

# What makes a value the same on all ranks of an axis.
_JOINS = ("psum", "all_gather_invariant")


def is_summed(x: Tensor, axis: str) -> bool:
    """Whether each way from `x` back to a leaf leads through a sum along the axis before anything that varies there.

    False where the graph does not show it: without one, and where a node hides its own.
    """
    found, seen, left = False, set[object](), [x.grad_fn]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        call = getattr(node, "call", None)
        if isinstance(call, Call) and axis in call.line.axes:
            if call.name not in _JOINS:
                return False
            found = True
            continue
        before = [] if node is None else [n for n, _ in node.next_functions if n is not None]
        if not before:
            return False
        left += before
    return found
