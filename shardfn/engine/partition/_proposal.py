"""Proposals of forms, and the bytes of leaves that a proposal is to save."""

from typing import NamedTuple

from torch.fx import Node

from shardfn.graph import Form


class HeldBytes(NamedTuple):
    """Bytes kept for a leaf, including the optimizer state.

    Attributes:
        per_element: bytes an element, of values that are cut with the leaf.
        fixed: bytes of values that each rank has whole.
    """

    per_element: float
    fixed: float = 0.0


class Proposal(NamedTuple):
    """Proposed cuts of leaves.

    Attributes:
        forms: forms by leaf.
        held: bytes of leaves kept by the rank with the most.
        sent: bytes that a rank sends, forward and backward, and operations, if operations have a price.
    """

    forms: dict[Node, Form]
    held: float
    sent: float
