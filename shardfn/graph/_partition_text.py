"""The text of a partitioned program: each collective, with its bytes and the line that asks for it."""

from ._partition_program import PartitionProgram


def program_text(program: PartitionProgram) -> str:
    """One line a collective, in order, then the sums.

    Example:
        >>> print(program_text(PartitionProgram("tp", 2)))
        along "tp", 2 ranks: 0 collectives, 0 bytes a rank in the forward and 0 in the backward
    """
    sent = program.sent
    forward, backward = (int(sum(getattr(x, name) for x in sent)) for name in ("forward", "backward"))
    head = (
        f'along "{program.axis}", {program.num} ranks: {len(sent)} collectives, {forward} bytes a rank in the forward'
        f" and {backward} in the backward"
    )
    return "\n".join([head, *map(_line, sent)])


def _line(x: object) -> str:
    name, shape, forward, backward, line, because = x  # pyright: ignore[reportGeneralTypeIssues]
    why = f"; {because} takes it whole" if because else ""
    return f"  {name} of {list(shape)}: {int(forward)} + {int(backward)} bytes, {line}{why}"
