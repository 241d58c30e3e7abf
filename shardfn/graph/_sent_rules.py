"""Sharding rules of transfers along another axis. For this axis, such a transfer leaves most dims unchanged."""

from typing import Any

from ._forms import Form, OpUse
from ._labelled import Dims, Labels


def sent_along(x: Any, axis: str, before: Any, after: Any, shape: Any) -> Any:
    """Target of a node: a value of this `shape` goes from form to form along an axis outside of this graph.

    A graph's arguments are plain: forms are tuples here.
    """


def label_sent(use: OpUse) -> Labels:
    """Labels the dims that the other axis does not cut. The op is a sum of blocks, so partial values stay partial."""
    before, after = (Form(*form) for form in use.args[2:4])
    cut = {form.dim for form in (before, after) if form.kind == "cut"}
    own: Dims = tuple(None if i in cut else i for i in range(use.operands[0].ndim))
    return Labels((own,), (own,), together=(0,))
