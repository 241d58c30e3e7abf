"""Conversions of values of a partitioned program to other forms, with the bytes sent."""

import math
from typing import Any, NamedTuple, Protocol

from shardfn.graph import VARYING, WHOLE, Form

from ._partition_values import PlannedValue


class Knows(Protocol):
    """Forms of values at a point of a program."""

    def form_of(self, value: PlannedValue) -> Form:
        """Returns the form in which a value is made."""
        ...

    def has(self, value: PlannedValue, form: Form) -> bool:
        """Returns whether a value is there in a form."""
        ...


class FormMove(NamedTuple):
    """Last step towards a form.

    Attributes:
        kind: "there", "made" (in this form), "look" (made again as a view of `source`), or "convert" (from form
            `before`).
        before: form to convert from.
        source: value to view.
    """

    kind: str
    before: Form = WHOLE
    source: PlannedValue | None = None


def needed_form(value: PlannedValue, form: Form) -> Form:
    """Returns the form to convert to: a value without a gradient needs no `pvary`, and stays whole."""
    return WHOLE if form == VARYING and not value.differentiable else form


def move_to(value: PlannedValue, form: Form, known: Knows) -> FormMove:
    """Returns the last step that brings a value into a form of `needed_form`."""
    if known.has(value, form):
        return FormMove("there")
    own = known.form_of(value)
    if form == own:
        return FormMove("made")
    source = value.look_at
    if source is not None and form.kind in ("whole", "varying") and own.kind != "varying":
        # Views cost nothing: the source, sent for another view, serves this view.
        like = known.form_of(source).kind == "cut" if own.kind == "cut" else known.form_of(source) == own
        if like and math.prod(source.seen.shape) <= math.prod(value.seen.shape):
            return FormMove("look", source=source)
    return FormMove("convert", _moves_from(value, own, form, known))


def _moves_from(value: PlannedValue, own: Form, form: Form, known: Knows) -> Form:
    if form == VARYING and (own.kind in ("partial", "rows") or known.has(value, WHOLE)):
        return WHOLE
    again = form.kind == own.kind == "cut"
    if again and (form.dim == own.dim or form.multiple * own.multiple > 1 or form.parts or own.parts):
        return needed_form(value, VARYING)
    if form.kind == "cut" and own.kind in ("partial", "rows") and known.has(value, WHOLE):
        return WHOLE
    return own


def conversion_bytes(
    before: Form, after: Form, numel: int, itemsize: int, num: int, *, differentiable: bool
) -> tuple[str, float, float]:
    """Returns the primitive that takes a value from a form to another, and a rank's bytes, forward and backward.

    Example:
        >>> conversion_bytes(WHOLE, VARYING, 8, 4, 2, differentiable=True)
        ('pvary', 0.0, 32.0)
    """
    part = numel * itemsize * (num - 1) / num
    if before == after:
        return "", 0.0, 0.0
    table: dict[Any, tuple[str, float, float]] = {
        ("whole", "varying"): ("pvary", 0.0, 2 * part),
        ("whole", "cut"): ("take_own_block", 0.0, part),
        ("cut", "whole"): ("all_gather_invariant", part, 0.0),
        ("cut", "varying"): ("all_gather", part, part),
        ("cut", "cut"): ("all_to_all", part / num, part / num),
        ("partial", "partial"): ("", 0.0, 0.0),
        ("partial", "whole"): ("psum", 2 * part, 0.0),
        ("partial", "cut"): ("psum_scatter", part, part),
        ("varying", "cut"): ("take", 0.0, 0.0),
    }
    kind = "partial" if before.kind == "rows" else before.kind
    name, forward, backward = table[kind, after.kind]
    return name, forward, backward if differentiable else 0.0


def sent_by(value: PlannedValue, before: Form, after: Form, num: int) -> tuple[str, float, float]:
    """Returns `conversion_bytes` of a value."""
    numel = math.prod(value.seen.shape)
    return conversion_bytes(before, after, numel, value.seen.itemsize, num, differentiable=value.differentiable)
