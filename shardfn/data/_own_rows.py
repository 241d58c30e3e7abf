"""A `torch.utils.data.DataLoader` of global batches as one of this rank's rows: only those are read."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from shardfn.core import chunk_bounds

from ._collate import first_rows


def own_rows(loader: DataLoader[Any], *, rank: int = 0, world: int = 1) -> DataLoader[Any]:
    """A loader like `loader`, of the rows of its batches that rank `rank` of `world` holds.

    `loader` is the one that a single device would use: its batches are the global ones, and those of the ranks in order
    concatenate to them. If the last batch is too short for all ranks, a rank may get tensors without rows. Workers,
    pinning, collation and samplers stay unchanged.

    Args:
        loader: over a map-style dataset, with `batch_size` or a `batch_sampler`. It must have the same order on all
            ranks: a random one takes a `generator` with a seed of its own.
        rank: index of the rank along the batch axis.
        world: ranks along the batch axis.

    Raises:
        TypeError: the dataset is iterable only, so that its rows cannot be read by index; or there are no batches.
        ValueError: the order is random and has no `generator`: each rank would shuffle on its own.

    Example:
        >>> loader = DataLoader([*range(5)], batch_size=3)
        >>> [[x.tolist() for x in own_rows(loader, rank=r, world=2)] for r in (0, 1)]
        [[[0, 1], [3]], [[2], [4]]]
    """
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"own_rows: {type(loader.dataset).__name__} is an IterableDataset, of which nobody can read some rows; let"
            " it yield this rank's rows itself, and pass its loader to the loop as it is."
        )
    batches = loader.batch_sampler
    if batches is None:
        raise TypeError("own_rows: the loader has batch_size=None, and so no batches to cut; give it a batch_size.")
    sampler = batches.sampler if isinstance(batches, BatchSampler) else None
    if world > 1 and isinstance(sampler, RandomSampler) and sampler.generator is None:
        raise ValueError(
            "own_rows: the loader shuffles by torch's global seed, by which ranks may differ: pass"
            " DataLoader(..., generator=torch.Generator().manual_seed(seed)), the same seed on all ranks."
        )
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return DataLoader(
        _Marked(loader.dataset),
        batch_sampler=_OwnRows(batches, rank, world),
        collate_fn=_CollateMarked(loader.collate_fn),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **workers,
    )


class _OwnRows:
    """This rank's indices of each batch, marked True; without any, the batch's first one, marked False."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not one of the {world} ranks along the batch axis.")
        self._batches, self._rank, self._world = batches, rank, world

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple[Any, bool]]]:
        for batch in self._batches:
            lo, hi = chunk_bounds(len(batch), self._world, self._rank)
            yield [(i, True) for i in batch[lo:hi]] or [(batch[0], False)]


class _Marked(Dataset[Any]):
    """A dataset by marked indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, marked: tuple[Any, bool]) -> tuple[Any, bool]:
        return self._dataset[marked[0]], marked[1]

    def __getitems__(self, marked: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        at = [i for i, _ in marked]
        many = getattr(self._dataset, "__getitems__", None)
        found: Any = many(at) if callable(many) else [self._dataset[i] for i in at]
        return [(x, own) for x, (_, own) in zip(found, marked, strict=True)]


class _CollateMarked:
    """A collator of marked examples, which drops the rows of an example that is not this rank's."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, marked: list[tuple[Any, bool]]) -> Any:
        batch = self._collate([x for x, _ in marked])
        return batch if marked[0][1] else first_rows(batch, 0)
