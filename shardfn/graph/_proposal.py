"""What a proposal of forms says, and what it is to spare."""

from typing import NamedTuple

from torch.fx import Node

from ._forms import Form


class HeldBytes(NamedTuple):
    """What is kept of a leaf, its optimizer state included.

    Attributes:
        per_element: bytes an element, of what is cut with the leaf.
        fixed: bytes of what each rank has.
    """

    per_element: float
    fixed: float = 0.0


class Proposal(NamedTuple):
    """How leaves may be cut.

    Attributes:
        forms: by leaf.
        held: bytes that the rank with the most keeps of them.
        sent: bytes that a rank sends, forward and backward; and what it computes, where that has a price.
    """

    forms: dict[Node, Form]
    held: float
    sent: float
