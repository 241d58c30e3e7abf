"""`Travel`: how leaves that ZeRO keeps in pieces cross the mesh."""

import dataclasses

from ._errors import did_you_mean

BITS = {"int8": 8, "int4": 4}
# The default number of elements that share a scale.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Travel:
    """Bits, axes and messages in which leaves and gradients are sent.

    `gather` and `reduce` round messages. `secondary_axis` and `bucket_bytes` never change a bit of the result.

    Attributes:
        gather: at stage 3, the format in which sharded leaves are gathered: "int8" or "int4" with a scale for each
            block (ZeRO++'s qwZ). None means the loss's dtype.
        reduce: the format in which gradients of leaves with more than `Zero.persist_elements` elements are sent: "int8"
            or "int4" (ZeRO++'s qgZ). With `secondary_axis` gradients are summed along this axis first. None means the
            `reduce` dtype of the precision policy.
        block_elements: with `gather` or `reduce`, the number of elements that share a scale.
        secondary_axis: at stage 3, the axes in `Zero.axis` that are within a node, such as "gpu" of ("node", "gpu"). A
            leaf is sent along the other axes once per step. The result is stored until the end of the step, cut along
            the secondary axes, and later gathers of the step run only along these axes (ZeRO++'s hpZ).
        bucket_bytes: the size up to which smaller leaves are sent together in a message. Larger leaves are sent
            separately.

    Raises:
        ValueError: a field is out of range, or has no effect.

    Example:
        >>> Travel(gather="int8").block_elements
        256

    References:
        Wang et al., ZeRO++, 2023, https://arxiv.org/abs/2306.10209
    """

    gather: str | None = None
    reduce: str | None = None
    block_elements: int = BLOCK
    secondary_axis: str | tuple[str, ...] | None = None
    bucket_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.reduce in ("each", "once"):
            raise ValueError(
                f"Travel(reduce={self.reduce!r}): reduce chooses in how many bits gradients travel; the time for those"
                f" of microbatches is Pace(accumulate={self.reduce!r})."
            )
        for name in ("gather", "reduce"):
            how = getattr(self, name)
            if how is not None and how not in BITS:
                hint = did_you_mean(str(how), BITS)
                raise ValueError(f"Travel({name}={how!r}): use None or one of {tuple(BITS)}.{hint}")
        if self.block_elements != BLOCK and self.gather is None and self.reduce is None:
            raise ValueError(
                f"Travel(block_elements={self.block_elements!r}): block_elements would have no effect: no option"
                " quantises."
            )
        if self.block_elements < 2 or self.block_elements % 2:
            raise ValueError(f"Travel(block_elements={self.block_elements}): must be even and at least 2.")
        if self.bucket_bytes < 0:
            raise ValueError(f"Travel(bucket_bytes={self.bucket_bytes}): must not be negative.")
