"""Batches of a corpus, and mixtures of sources, as functions of numbers.

`Batches`: row i of batch n is a window of the corpus determined by (seed, n, i). The corpus is cut into windows of T
ids (each read with the next id, the last target). A fixed shuffle orders the windows, and training and validation take
disjoint ranges of this order. Each epoch visits the range once, in a different order:

    g = n B + i,   epoch, k = divmod(g, W),   window = shuffle(first + permute(k, W, seed, epoch))

There is no state between batches: resuming at batch n needs only n, and any rank can compute any rows.

`ExampleBatches`: row i of batch n is an example of a map-style dataset determined by (seed, n, i).

    g = n B + i,   epoch, k = divmod(g, N),   example = permute(k, N, seed, epoch)

`Mixture`: one endless sequence of numbered examples, with row g determined by (seed, g). Rows come in blocks of
M = 65,536. Each block has c_s rows of source s, the apportionment of M by the weights, in an order that a keyed
permutation determines. Within a source rows are consecutive:

    b, k = divmod(g, M);   s = source of place permute(k, M, seed, b);   j = b c_s + rows of s before k in the block
    example = sources[s][shuffled(j, N_s, seed)]

So any rank can compute any row, a resumed run needs only the row's number, and after each block the counts are exact.
A mixture of one source has the order of `ExampleBatches`.
"""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import core

from ._collate import first_rows
from ._permute import digest_bytes, digest_examples, permute, sampled_rows, shuffled

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


@runtime_checkable
class TokenSource(Protocol):
    """Source of `Batches`: numbered token ids, such as a `TokenFile`."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of ids."""
        ...

    def read(self, starts: Int64[np.ndarray, " n"], count: int) -> Int64[np.ndarray, "n count"]:
        """Returns the `count` ids from each start on."""
        ...


@dataclasses.dataclass(frozen=True)
class Batches:
    """Global batches of a corpus, and every rank's rows.

    Attributes:
        source: the token ids.
        batch_size: B, rows of a global batch, over all ranks.
        length: T, ids a row predicts. A row holds T + 1.
        seed: determines the order of windows. The windows held out by `split` do not depend on the seed.
        part: (first, stop) of the fixed shuffle of windows. None: all windows. Set by `split`.

    Raises:
        ValueError: the corpus is shorter than one window, or a size is not positive.
    """

    source: TokenSource
    batch_size: int
    length: int
    seed: int = 0
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"Batches({name}={getattr(self, name)}): must be at least 1.")
        if self._total_size < 1:
            raise ValueError(
                f"{self.source!r} has {self.source.num_tokens} ids, but one window of length={self.length}"
                f" needs {self.length + 1}. Use a longer corpus or a smaller length."
            )
        first, stop = self._rank_part
        if not 0 <= first < stop <= self._total_size:
            raise ValueError(f"Batches(part={self.part}): not a range of the {self._total_size} windows of the corpus.")

    @property
    def num_windows(self) -> int:
        """Returns W, the number of windows in an epoch. An epoch has W / batch_size batches."""
        first, stop = self._rank_part
        return stop - first

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Returns the values by which a `Cursor` recognises the corpus.

        Windows of an epoch, their length, and a digest.

        The digest covers `part`, the number of ids, and at most 64 windows at equal distances.
        """
        starts = np.array(sampled_rows(self._total_size), np.int64) * self.length
        ids = self.source.read(starts, self.length + 1)
        digest = digest_bytes([repr((self._rank_part, self.source.num_tokens)).encode(), ids.tobytes()])
        return {"windows": self.num_windows, "length": self.length, "digest": digest}

    def split(self, fraction: float) -> tuple["Batches", "Batches"]:
        """Returns two disjoint parts, for training and for validation.

        Validation gets `fraction` of the windows, drawn at random.

        The windows depend only on source and length, so runs with other seeds validate on the same text.

        Raises:
            ValueError: one of the parts would be empty.

        Example:
            >>> import tempfile, pathlib; from shardfn.data import ByteTokenizer, encode_files
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> _ = (folder / "a.txt").write_text("0123456789" * 10)
            >>> source = encode_files([folder / "a.txt"], folder / "a.bin", ByteTokenizer())
            >>> train, validation = Batches(source, batch_size=2, length=9).split(0.2)
            >>> train.num_windows, validation.num_windows, train(0)["tokens"].shape
            (9, 2, torch.Size([2, 10]))
        """
        first, stop = self._rank_part
        middle = stop - round(fraction * (stop - first))
        if not first < middle < stop:
            raise ValueError(
                f"split({fraction}) of {stop - first} windows leaves {middle - first} and {stop - middle}."
                " Both parts need at least one: use a longer corpus, a smaller length or another fraction."
            )
        return dataclasses.replace(self, part=(first, middle)), dataclasses.replace(self, part=(middle, stop))

    def __call__(self, n: int, *, rank: int = 0, world: int = 1) -> dict[str, Int64[Tensor, "..."]]:
        """Returns batch n, or the rows of batch n on rank `rank` of `world`.

        The rows of all ranks, in order, concatenate to the global batch. For example, 2 ranks hold 3 rows each of a
        batch of 6 rows.

        Args:
            n: number of the batch, from 0 on, through all epochs.
            rank: index of the rank along the batch axis.
            world: ranks along the batch axis. Rows are divided by `core.chunk_bounds`, for example 7 rows on 3 ranks as
                3, 3 and 1.

        Returns:
            "tokens": int64 [rows, T + 1], and "index": int64 [rows], the unique number n B + i of each row.

        Raises:
            ValueError: `n` is negative, or `rank` is not below `world`.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not one of the {world} ranks along the batch axis.")
        return self.rows(n, *core.chunk_bounds(self.batch_size, world, rank))

    def rows(self, n: int, first: int, stop: int) -> dict[str, Int64[Tensor, "..."]]:
        """Returns rows `first` to `stop` (exclusive) of batch n, in the form of `__call__`."""
        if n < 0 or not 0 <= first <= stop <= self.batch_size:
            raise ValueError(f"rows must be in 0:{self.batch_size} of a batch n >= 0, got {first}:{stop} of batch {n}.")
        index = n * self.batch_size + np.arange(first, stop, dtype=np.int64)
        return {"tokens": self.read_windows(self.windows(index)), "index": torch.from_numpy(index)}

    def read_windows(self, windows: Int64[np.ndarray, " n"]) -> Int64[Tensor, "n ids"]:
        """Returns the T + 1 ids of each window."""
        return torch.from_numpy(self.source.read(windows * self.length, self.length + 1))

    def windows(self, index: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the window of each row number n B + i. Window w starts at id w T."""
        return self.windows_at(shuffled(index, self.num_windows, self.seed))

    def windows_at(self, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Returns the windows at places from 0 to W - 1 of the part."""
        # Shuffled without the seed, so that parts are disjoint even with different seeds.
        return permute(places + self._rank_part[0], self._total_size)

    def iterate(self, first: int, stop: int, *, rank: int = 0, world: int = 1) -> Iterator[dict[str, Tensor]]:
        """Yields batches `first` to `stop` (exclusive) in order."""
        return (self(n, rank=rank, world=world) for n in range(first, stop))

    @property
    def _total_size(self) -> int:
        return (self.source.num_tokens - 1) // self.length

    @property
    def _rank_part(self) -> tuple[int, int]:
        return (0, self._total_size) if self.part is None else self.part


BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Endless map-style dataset of examples of several sources, by weights.

    Attributes:
        sources: map-style datasets by name, or `Batches` of tokens, whose windows are examples {"tokens": [T + 1]}.
        weights: part of the rows of each source, up to a common factor. For example {"code": 2, "web": 1}.
        temperature: T, in place of weights: the weight of a source of N examples is N^(1 / T). 1 draws each example
            equally often, and a larger T draws small sources more often. None with weights, and 1 without.
        seed: determines the order of sources, and the order of the examples of each source.

    Raises:
        ValueError: there is no source, a source is empty, a weight is missing, unknown, negative, not finite or so
            small that a block would have no row of the source, or both weights and a temperature are given. The message
            lists all problems by name.

    Example:
        >>> from shardfn.data import pad
        >>> mixture = Mixture({"a": [[1], [2]], "b": [[7]]}, weights={"a": 3, "b": 1})
        >>> mixture.counts(65536)
        {'a': 49152, 'b': 16384}
        >>> batches = mixture.batches(4, pad())
        >>> batches(5)["tokens"].shape, sum(mixture.counts(20).values())
        (torch.Size([4, 1]), 20)

    References:
        Conneau et al., Unsupervised Cross-lingual Representation Learning at Scale, 2020 (`temperature`),
            https://arxiv.org/abs/1911.02116
    """

    sources: Mapping[str, Examples | Batches]
    weights: Mapping[str, float] | None = None
    temperature: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        core.raise_all(ValueError, "Mixture:", [*self._find_problems()])
        rare = [name for name, count in zip(self.sources, self._block_counts, strict=True) if not count]
        core.raise_all(
            ValueError,
            "Mixture:",
            [
                f"the weight of {name!r} must give at least 1 of {BLOCK:,} rows, got {self.shares[name]:.3g} of all."
                " Use a larger weight, or remove the source."
                for name in rare
            ],
        )

    def __len__(self) -> int:
        """Returns 2^62: the sequence has no end, and sources are repeated."""
        return ENDLESS

    def __getitem__(self, row: int, /) -> Any:
        """Returns the example of a row."""
        name, index = self.locate(row)
        return self._examples[name][index]

    @functools.cached_property
    def shares(self) -> dict[str, float]:
        """Returns the part of the rows of each source, with sum 1."""
        given = self.weights
        if given is None:
            power = 1 / (1.0 if self.temperature is None else self.temperature)
            given = {name: len(x) ** power for name, x in self._examples.items()}
        total = sum(given.values())
        return {name: given[name] / total for name in self.sources}

    def locate(self, row: int) -> tuple[str, int]:
        """Returns the source of a row, and the number of the example there."""
        block, place = divmod(row, BLOCK)
        sources, before = _order_block(self._block_counts, self.seed, block)
        s = int(sources[place])
        name, count = list(self.sources)[s], self._block_counts[s]
        at = np.array([block * count + int(before[place])], np.int64)
        return name, int(shuffled(at, len(self._examples[name]), self.seed)[0])

    def counts(self, rows: int) -> dict[str, int]:
        """Returns how many of the first `rows` rows each source has.

        Divided by the size of a source, for example 3,000 rows of 1,000 examples, the count is its number of epochs.
        """
        blocks, rest = divmod(rows, BLOCK)
        sources, _ = _order_block(self._block_counts, self.seed, blocks)
        last = np.bincount(sources[:rest], minlength=len(self.sources))
        return {
            name: blocks * count + int(n) for name, count, n in zip(self.sources, self._block_counts, last, strict=True)
        }

    def batches(
        self, batch_size: int, collate: Callable[[list[Any]], core.PyTree], *, ramp: BatchRamp | None = None
    ) -> ExampleBatches:
        """Returns the batches of the rows in order: row i of batch n is row n `batch_size` + i.

        Args:
            batch_size: examples of a global batch, over all ranks.
            collate: function from a list of examples to a batch, such as `pad(...)`.
            ramp: batch sizes of the first batches, or None.
        """
        return ExampleBatches(self, batch_size, collate, seed=None, ramp=ramp)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Returns the values by which a `Cursor` recognises the mixture, by source."""
        found: dict[str, Any] = {"sources": list(self.sources), "mixture_seed": self.seed}
        for name, x in self.sources.items():
            known = x.fingerprint if isinstance(x, Batches) else {"examples": len(x), "digest": digest_examples(x)}
            found |= {f"{name}: {key}": value for key, value in known.items() if value is not None}
            found[f"{name}: rows of {BLOCK}"] = self._block_counts[list(self.sources).index(name)]
        return found

    @functools.cached_property
    def _examples(self) -> dict[str, Examples]:
        return {name: _TokenWindows(x) if isinstance(x, Batches) else x for name, x in self.sources.items()}

    @functools.cached_property
    def _block_counts(self) -> tuple[int, ...]:
        """Returns the rows of each source in a block: the apportionment by largest remainders."""
        exact = [BLOCK * share for share in self.shares.values()]
        counts = [math.floor(x) for x in exact]
        order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for i in itertools.islice(itertools.cycle(order), BLOCK - sum(counts)):
            counts[i] += 1
        return tuple(counts)

    def _find_problems(self) -> list[str]:
        problems = [] if self.sources else ["there must be at least one source, got none."]
        problems += [
            f"source {name!r} must have at least one example, got 0. Remove it, or look at its files."
            for name, x in self._examples.items()
            if not len(x)
        ]
        if self.weights is not None and self.temperature is not None:
            problems.append(f"weights and temperature={self.temperature} exclude each other. Remove one of them.")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            problems.append(f"temperature must be above 0 and finite, got {self.temperature}.")
        if self.weights is None:
            return problems
        problems += [
            f"source {name!r} must have a weight. Add it to weights."
            for name in self.sources
            if name not in self.weights
        ]
        for name, weight in self.weights.items():
            if name not in self.sources:
                problems.append(
                    f"the weight of {name!r} must belong to a source, got {', '.join(map(repr, self.sources))}."
                )
            elif not 0 < weight < math.inf:
                problems.append(f"the weight of {name!r} must be above 0 and finite, got {weight}.")
        return problems


@functools.lru_cache(maxsize=4)
def _order_block(
    counts: tuple[int, ...], seed: int, block: int
) -> tuple[Int64[np.ndarray, " block"], Int64[np.ndarray, " block"]]:
    """Returns the source of each row of a block, and how many earlier rows of the block the source has."""
    places = permute(np.arange(BLOCK, dtype=np.int64), BLOCK, seed, block)
    sources = np.searchsorted(np.cumsum(counts), places, side="right").astype(np.int64)
    before = np.empty(BLOCK, np.int64)
    for s, count in enumerate(counts):
        before[sources == s] = np.arange(count)
    return sources, before


class _TokenWindows:
    """Windows of tokens as examples."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches.num_windows

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return {"tokens": self._batches.read_windows(self._batches.windows_at(np.array([index], np.int64)))[0]}
