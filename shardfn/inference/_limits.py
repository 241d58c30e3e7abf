"""Sizes of an engine, fixed before the first request, and equal on all ranks."""

from dataclasses import dataclass
from itertools import pairwise

from shardfn.core import explains_fields

DRAFTS = 15  # of an engine with a drafter
DEFAULT_LAYOUT = "tp"  # the first layout of each decoder
_LEAST = {
    "vocab": 1,
    "context": 2,
    "blocks": 2,
    "block": 1,
    "running": 1,
    "starvation_steps": 0,
    "drafts": 0,
    "source": 0,
}


@explains_fields(age="starvation_steps={value!r}")
@dataclass(frozen=True)
class Limits:
    """Sizes from which every plan follows.

    Args:
        vocab: number of tokens. Ids are 0 to `vocab - 1`.
        context: most tokens of a sequence, prompt and drawn tokens together.
        blocks: number of blocks of the KV cache, with block 0, which takes the writes of padding and is never read.
        block: tokens of a block.
        buckets: numbers of rows that a step may have, ascending, for example (8, 32, 128). The last is the budget of a
            step.
        running: most sequences that hold blocks at a time. Fewer than the budget, so that a prompt always advances next
            to the decodes (chunked prefill).
        starvation_steps: number of steps after its arrival from which a sequence comes before all later arrivals,
            whatever their priorities.
        cache_dtype: "float32", "bfloat16", "int8" or "fp8", part of the key of a block's content. The last two are
            codes of one byte, with a scale for each token and key head. "float64" is for parameters in float64.
        layouts: layouts of the decoder, each with the number of rows from which a step has it, ascending from 1. For
            example (("tp", 1), ("sp", 64)). A step with adapters has the first layout.
        drafts: most drafts of a step with a single row. Each further row takes the place of a draft. Where no place is
            left, drafts only fill rows that would be padding. 0 is no speculative decoding.
        source: most tokens of a source, in an engine of an encoder-decoder model. 0 is a model without an encoder.

    Raises:
        ValueError: a size is not positive, buckets do not ascend, or the budget is not larger than `running`.

    Example:
        >>> limits = Limits(vocab=100, context=64, blocks=9, block=16, buckets=(4, 8), running=4)
        >>> limits.budget, limits.width, limits.usable
        (8, 4, 8)
    """

    vocab: int
    context: int
    blocks: int
    block: int = 16
    buckets: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
    running: int = 32
    starvation_steps: int = 512
    cache_dtype: str = "float32"
    drafts: int = 0
    layouts: tuple[tuple[str, int], ...] = ((DEFAULT_LAYOUT, 1),)
    source: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
        sizes = self.buckets
        if (
            not sizes
            or any(type(size) is not int for size in sizes)
            or sizes[0] < 1
            or any(a >= b for a, b in pairwise(sizes))
        ):
            raise ValueError(f"buckets must be positive integers and ascend, got {sizes}.")
        if self.running >= sizes[-1]:
            raise ValueError(
                f"the largest bucket must have at least one row more than running={self.running}, so that a prompt"
                f" advances together with all decodes, got {sizes[-1]} rows. Add a larger bucket or lower `running`."
            )

        rows = [rows for _, rows in self.layouts]
        if rows[:1] != [1] or any(a >= b for a, b in pairwise(rows)):
            raise ValueError(
                "layouts must be pairs of a name and a number of rows, ascending from 1, such as"
                f" (('tp', 1), ('sp', 64)), got {self.layouts}."
            )

    @property
    def budget(self) -> int:
        """Returns the most rows of a step."""
        return self.buckets[-1]

    @property
    def width(self) -> int:
        """Returns the blocks of the longest sequence: the columns of a plan's block tables."""
        return self.blocks_of(self.context)

    @property
    def usable(self) -> int:
        """Returns the number of blocks that sequences can hold."""
        return self.blocks - 1

    @property
    def source_width(self) -> int:
        """Returns the blocks of the longest source."""
        return self.blocks_of(self.source)

    @property
    def source_blocks(self) -> int:
        """Returns the blocks of the cache of sources: the longest source for each sequence that runs, and block 0."""
        return self.running * self.source_width + 1 if self.source else 0

    def wanted(self, bucket: int) -> int:
        """Returns the most rows of a step of a bucket whose logits are wanted."""
        return min(bucket, max(self.running, self.drafts + 1 if self.drafts else 0))

    def blocks_of(self, tokens: int) -> int:
        """Returns the number of blocks for a number of tokens."""
        return -(-tokens // self.block)

    def bucket_of(self, rows: int) -> int:
        """Returns the smallest bucket with at least a number of rows."""
        return next(size for size in self.buckets if size >= rows)

    def layout_of(self, bucket: int, *, adapters: bool = False) -> str:
        """Returns the layout of a step.

        Args:
            bucket: number of rows with padding.
            adapters: whether a row has an adapter.

        Example:
            >>> limits = Limits(vocab=100, context=64, blocks=9, running=4, layouts=(("tp", 1), ("sp", 64)))
            >>> limits.layout_of(32), limits.layout_of(64), limits.layout_of(64, adapters=True)
            ('tp', 'sp', 'tp')
        """
        fitting = [name for name, rows in self.layouts if rows <= bucket]
        return fitting[0 if adapters else -1]

    def excess(self, rows: int, least: int) -> int:
        """Returns the rows beyond the next smaller bucket if dropping them saves more padding than rows, else 0.

        Args:
            rows: rows of a step.
            least: fewest rows that the step may have.

        Example:
            >>> limits = Limits(vocab=100, context=64, blocks=9, buckets=(4, 8), running=4)
            >>> limits.excess(5, least=1), limits.excess(5, least=5), limits.excess(6, least=1)
            (1, 0, 0)
        """
        excess = rows - max((size for size in self.buckets if least <= size <= rows), default=rows)
        return excess if excess < self.bucket_of(rows) - rows else 0
