"""A proposal of forms, and the bytes of leaves that it is to save."""

from typing import NamedTuple

from torch.fx import Node

from shardfn.graph import Form


class HeldBytes(NamedTuple):
    """The bytes kept for a leaf, its optimizer state included.

    Attributes:
        per_element: bytes an element, of values that are cut with the leaf.
        fixed: bytes of values that each rank has whole.
    """

    per_element: float
    fixed: float = 0.0


class Proposal(NamedTuple):
    """How leaves may be cut.

    Attributes:
        forms: by leaf.
        held: bytes that the rank with the most keeps of them.
        sent: bytes that a rank sends, forward and backward; plus its operations, if they have a price.
    """

    forms: dict[Node, Form]
    held: float
    sent: float
