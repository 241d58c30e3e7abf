"""Sharding rules of transfers along another axis: for this axis, operations that leave most dims unchanged."""

from typing import Any

from ._forms import Form, OpUse
from ._labelled import Dims, Labels


def sent_along(x: Any, axis: str, before: Any, after: Any, shape: Any) -> Any:
    """Target of a node: a value of this `shape` goes from form to form along an axis that is not this graph's.

    A graph's arguments are plain: forms are tuples here.
    """


def sent(use: OpUse) -> Labels:
    """Dims that the other axis does not cut. A sum of blocks, so that partial values stay so."""
    before, after = (Form(*form) for form in use.args[2:4])
    cut = {form.dim for form in (before, after) if form.kind == "cut"}
    own: Dims = tuple(None if i in cut else i for i in range(use.operands[0].ndim))
    return Labels((own,), (own,), together=(0,))
