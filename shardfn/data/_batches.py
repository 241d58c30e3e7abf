"""Batches as a function: row i of batch n is a window of the corpus determined by (seed, n, i).

The corpus is cut into windows of T ids (each read with the next id, the last target). A fixed shuffle orders the
windows, and training and validation take disjoint ranges of this order. Each epoch visits the range once, in a
different order:

    g = n B + i,   epoch, k = divmod(g, W),   window = shuffle(first + permute(k, W, seed, epoch))

There is no state between batches: resuming at batch n needs only n, and any rank can compute any rows.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn.core import chunk_bounds

from ._permute import digest_bytes, permute, sampled_rows, shuffled


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
        return self.rows(n, *chunk_bounds(self.batch_size, world, rank))

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
