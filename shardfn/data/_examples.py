"""Batches of a map-style dataset as a function: row i of batch n is an example determined by (seed, n, i).

    g = n B + i,   epoch, k = divmod(g, N),   example = permute(k, N, seed, epoch)

As for `Batches`, there is no state between batches, and batches do not depend on the number of ranks.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from shardfn import core

from ._collate import first_rows
from ._permute import digest_examples, shuffled

ENDLESS = 1 << 62


@runtime_checkable
class Examples(Protocol):
    """A map-style dataset: numbered examples, such as a list, or a dataset of torch or Hugging Face."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Returns example `index`."""
        ...


@dataclasses.dataclass(frozen=True)
class BatchRamp:
    """Batch sizes that grow during the first rows of a run: Megatron's `--rampup-batch-size`.

    A batch that begins at row g has `start + increment * floor(g K / rows)` rows, where K is the number of increments
    up to the whole batch size. From row `rows` on batches have the whole size.

    Attributes:
        start: rows of the first batch.
        increment: rows by which batches grow. Divides the whole batch size less `start`.
        rows: number of rows during which batches grow.

    Raises:
        ValueError: a number is not positive.

    Example:
        >>> [BatchRamp(start=2, increment=2, rows=12).rows_of(n, 8) for n in range(6)]
        [(0, 2), (2, 2), (4, 4), (8, 6), (14, 8), (22, 8)]

    References:
        Smith et al., Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, 2022,
            https://arxiv.org/abs/2201.11990
    """

    start: int
    increment: int
    rows: int

    def __post_init__(self) -> None:
        wrong = [f"{name} must be at least 1, got {x}." for name, x in dataclasses.asdict(self).items() if x < 1]
        core.raise_all(ValueError, "BatchRamp:", wrong)

    def rows_of(self, n: int, batch_size: int) -> tuple[int, int]:
        """Returns the first row of batch n, and the number of rows.

        Args:
            n: number of the batch.
            batch_size: whole batch size.

        Raises:
            ValueError: `start` is above the whole batch size, or `increment` does not divide the difference.
        """
        firsts = _ramp_firsts(self.start, self.increment, self.rows, batch_size)
        if n < len(firsts) - 1:
            return firsts[n], firsts[n + 1] - firsts[n]
        return firsts[-1] + (n - len(firsts) + 1) * batch_size, batch_size


@functools.lru_cache(maxsize=8)
def _ramp_firsts(start: int, increment: int, rows: int, batch_size: int) -> list[int]:
    """Returns the first rows of the batches that grow, and the first row of the first whole batch."""
    if start > batch_size or (batch_size - start) % increment:
        raise ValueError(
            f"BatchRamp: batch_size - start must be a multiple of increment, and not negative, got batch_size="
            f"{batch_size}, start={start} and increment={increment}."
        )
    steps, firsts = (batch_size - start) // increment, [0]
    while firsts[-1] < rows and steps:
        firsts.append(firsts[-1] + start + increment * (firsts[-1] * steps // rows))
    return firsts


@dataclasses.dataclass(frozen=True)
class ExampleBatches:
    """Global batches of a map-style dataset, and every rank's rows.

    Attributes:
        examples: the dataset, the same on all ranks.
        batch_size: B, examples of a global batch, over all ranks.
        collate: function from a list of examples to a batch, such as `pad(...)`, `pack(...)` or torch's
            `default_collate`.
        seed: determines the order of each epoch. None: in the dataset's order.
        ramp: batch sizes of the first batches, or None. Batch n is then `ramp.rows_of(n, batch_size)`.

    Raises:
        ValueError: the dataset is empty, or `batch_size` is not positive. The ramp does not end at `batch_size`. A seed
            is given for a `Mixture`, which has an order.

    Example:
        >>> from shardfn.data import pad
        >>> batches = ExampleBatches([[1, 2, 3], [4], [5, 6]], batch_size=2, collate=pad(), seed=None)
        >>> batches(0)["tokens"].tolist(), batches(1)["tokens"].tolist()  # the second one reaches into the next epoch
        ([[1, 2, 3], [4, 0, 0]], [[5, 6, 0], [1, 2, 3]])
        >>> [batch["tokens"].tolist() for batch in batches.once(rank=1, world=2)]  # of the last batch it has no row
        [[[4]], []]
    """

    examples: Examples
    batch_size: int
    collate: Callable[[list[Any]], core.PyTree]
    seed: int | None = 0
    ramp: BatchRamp | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"ExampleBatches(batch_size={self.batch_size}): must be at least 1.")
        if not len(self.examples):
            raise ValueError("ExampleBatches: the dataset is empty.")
        if len(self.examples) >= ENDLESS and self.seed is not None:
            raise ValueError(
                f"ExampleBatches: seed must be None for an endless dataset, which has an order, got {self.seed}. Use"
                " Mixture.batches(batch_size, collate), and the seed of the mixture."
            )
        self._find_rows(0)

    @property
    def batches_per_epoch(self) -> float:
        """Returns N / B.

        Not an integer if the last batch of an epoch reaches into the next epoch, for example 2.5 for 10 examples and
        B = 4.
        """
        return len(self.examples) / self.batch_size

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Returns the values by which a `Cursor` recognises the data set.

        The number of examples, and the digest if the data set has a digest.

        The digest covers at most 64 rows at equal distances. Lists, tuples, arrays and tensors of plain values have a
        digest, and `JSONLines`, whose digest also covers the length of each line. So does each data set with a method
        `digest()` that returns a str. Other data sets are recognised by their number of examples only.
        """
        ramp = {} if self.ramp is None else {"ramp": list(dataclasses.astuple(self.ramp))}
        known = getattr(self.examples, "fingerprint", None)
        if isinstance(known, Mapping):
            return {**known, **ramp}
        digest = digest_examples(self.examples)
        return {"examples": len(self.examples)} | ({} if digest is None else {"digest": digest}) | ramp

    def __call__(self, n: int, *, rank: int = 0, world: int = 1) -> core.PyTree:
        """Returns batch n, or the rows of batch n on rank `rank` of `world`, collated separately.

        Args:
            n: number of the batch, from 0 on, through all epochs.
            rank: index of the rank along the batch axis.
            world: ranks along the batch axis. Rows are cut as `core.chunk_bounds` cuts them.

        Raises:
            ValueError: `n` is negative, or `rank` is not below `world`.
        """
        if n < 0 or not 0 <= rank < world:
            raise ValueError(
                f"batch {n} of rank {rank} of {world}: batches count from 0, and so do ranks, below {world}."
            )
        return self._read_rows(*self._find_rows(n), rank, world)

    def index(self, rows: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the example of each row number n B + i."""
        return shuffled(rows, len(self.examples), self.seed)

    def iterate(self, first: int, stop: int, *, rank: int = 0, world: int = 1) -> Iterator[core.PyTree]:
        """Batches `first` to `stop` (exclusive) in order."""
        return (self(n, rank=rank, world=world) for n in range(first, stop))

    def once(self, *, rank: int = 0, world: int = 1) -> Iterator[core.PyTree]:
        """Yields every example once, in the order of the first epoch, for evaluation. The last batch may be shorter."""
        size = len(self.examples)
        for first in range(0, size, self.batch_size):
            yield self._read_rows(first, min(self.batch_size, size - first), rank, world)

    def _find_rows(self, n: int) -> tuple[int, int]:
        if self.ramp is None:
            return n * self.batch_size, self.batch_size
        return self.ramp.rows_of(n, self.batch_size)

    def _read_rows(self, first: int, count: int, rank: int, world: int) -> core.PyTree:
        lo, hi = core.chunk_bounds(count, world, rank)
        # A rank without rows collates one row and keeps none, to have the names and dtypes.
        rows = np.arange(first + lo, first + hi, dtype=np.int64) if hi > lo else np.array([first], np.int64)
        batch = self.collate([self.examples[int(i)] for i in self.index(rows)])
        return first_rows(batch, 0) if hi == lo else batch


@dataclasses.dataclass
class Cursor:
    """Position in the batches of a run: a resumable iterator over this rank's rows.

    Attributes:
        batches: `batches(n, rank=, world=)`: an `ExampleBatches`, a `Batches`, or a function.
        stop: number of the batch after the last.
        mesh: selects this rank's rows. None means all rows.
        axes: axes of the mesh that cut the batch.
        next: number of the next batch.

    Example:
        >>> cursor = Cursor(lambda n, rank, world: 10 * n, stop=4)
        >>> next(cursor), next(cursor), cursor.state()
        (0, 10, {'next': 2})
        >>> list(Cursor(lambda n, rank, world: 10 * n, stop=4).at({'next': 2}))
        [20, 30]
    """

    batches: Callable[..., core.PyTree]
    stop: int
    mesh: core.Mesh | None = None
    axes: str | Sequence[str] = "dp"
    next: int = 0

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> core.PyTree:
        if self.next >= self.stop:
            raise StopIteration
        axes = self.axes if isinstance(self.axes, str) else tuple(self.axes)
        rank, world = (0, 1) if self.mesh is None else (self.mesh.axis_index(axes), self.mesh.axis_size(axes))
        batch = self.batches(self.next, rank=rank, world=world)
        self.next += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the position, as plain values to save with the state of the step by `Manager.save(user=...)`.

        The position includes seed, size and `fingerprint` of the batches, if available: under other values batch n
        would have other rows.
        """
        settings = {name: getattr(self.batches, name, None) for name in ("seed", "batch_size")}
        known = {name: x for name, x in settings.items() if x is not None}
        return {"next": self.next} | known | dict(self._source_fingerprint())

    def at(self, state: Mapping[str, Any]) -> "Cursor":
        """Moves this cursor to the position of `state`. The number of ranks may differ.

        A position of an earlier version of shardfn has no fingerprint, and is accepted with a warning.

        Raises:
            ValueError: the batches have another seed or size, or are of another data set. The message names both
                values.
        """
        mine = self.state()
        differ = [
            f"{name} must be {x!r}, as in the saved position, got {mine.get(name)!r}"
            for name, x in state.items()
            if name != "next" and mine.get(name) != x
        ]
        core.raise_all(ValueError, f"this position in the data is of other batches. {_REMEDY}", differ)
        missing = [name for name in self._source_fingerprint() if name not in state]
        if missing:
            warnings.warn(
                f"the saved position in the data does not name the data set ({', '.join(missing)}): an earlier version"
                f" of shardfn"
                " saved it. Make sure that the data is the same, otherwise rows are seen twice or never.",
                stacklevel=2,
            )
        self.next = state["next"]
        return self

    def _source_fingerprint(self) -> Mapping[str, Any]:
        found = getattr(self.batches, "fingerprint", {})
        return found if isinstance(found, Mapping) else {}


# For another order, the rows that were seen already are unknown.
_REMEDY = (
    "Pass the same data with the same seed and batch size. To go on with other data, leave out at(): its first epoch"
    " then starts from"
    " its first batch."
)
