"""Text of a partitioned program: each collective, with the bytes and the user's line."""

from ._partition_program import PartitionProgram


def program_text(program: PartitionProgram) -> str:
    """Returns a line per collective, for example a psum with bytes and the user's line, in order, then the sums.

    Example:
        >>> print(program_text(PartitionProgram("tp", 2)))
        along "tp", 2 ranks: 0 collectives, 0 bytes a rank in the forward and 0 in the backward
    """
    sent = program.sent
    forward, backward = (int(sum(x.times * getattr(x, name) for x in sent)) for name in ("forward", "backward"))
    number = sum(x.times for x in sent)
    head = (
        f'along "{program.axis}", {program.num} ranks: {number} collectives, {forward} bytes a rank in the forward'
        f" and {backward} in the backward"
    )
    return "\n".join([head, *map(_format_line, sent)])


def _format_line(x: object) -> str:
    name, shape, forward, backward, line, because, times = x  # pyright: ignore[reportGeneralTypeIssues]
    why = f"; {because} takes it whole" if because else ""
    often = f"{times} x " if times > 1 else ""
    return f"  {often}{name} of {list(shape)}: {int(forward)} + {int(backward)} bytes, {line}{why}"
