"""Restricts a `torch.utils.data.DataLoader` of global batches to this rank's rows. Only these rows are read."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, get_worker_info

from shardfn.core import chunk_bounds

from ._collate import first_rows


def shard_rows(loader: DataLoader[Any], *, rank: int = 0, world: int = 1) -> DataLoader[Any]:
    """Returns a loader like `loader`, for the rows of each batch on rank `rank` of `world`.

    `loader` is the loader for a single device, with global batches. The batches of all ranks, in order, concatenate to
    the global batches. For example, batches of 8 rows become 4 rows on each of 2 ranks. If the last batch is too short
    for all ranks, a rank may get tensors without rows. Workers, pinning, collation and samplers stay unchanged. A
    `torchdata.stateful_dataloader.StatefulDataLoader` gives a `StatefulDataLoader` that resumes with the same rows.

    Args:
        loader: loader of a map-style dataset, with `batch_size` or a `batch_sampler`. The order must be the same on all
            ranks: a random order needs a seeded `generator`.
        rank: index of the rank along the batch axis.
        world: ranks along the batch axis.

    Raises:
        TypeError: the dataset is only iterable, so that rows cannot be read by index, or there are no batches.
        ValueError: the order is random and has no `generator`: each rank would shuffle differently. Or a
            `DistributedSampler` has cut the batches already: a part of the data would never be read.

    Example:
        >>> loader = DataLoader([*range(5)], batch_size=3)
        >>> [[x.tolist() for x in shard_rows(loader, rank=r, world=2)] for r in (0, 1)]
        [[[0, 1], [3]], [[2], [4]]]
    """
    batches = _checked_batches(loader, world)
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    if hasattr(loader, "state_dict"):  # torchdata's loader is a subclass with an attribute for each option
        workers["snapshot_every_n_steps"] = vars(loader)["snapshot_every_n_steps"]
    kind = type(loader) if hasattr(loader, "state_dict") else DataLoader
    return kind(
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


def _checked_batches(loader: DataLoader[Any], world: int) -> Any:
    """Returns the loader's batches of indices, if each rank can take rows of each batch."""
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"shard_rows: {type(loader.dataset).__name__} is an IterableDataset, whose examples have no numbers. Cut"
            " the stream before batches are made of it: sf.data.OwnExamples(dataset, rank=, world=). One of Hugging"
            " Face by datasets.distributed.split_dataset_by_node. Then sf.data.Stream(loader, mesh)."
        )
    batches = loader.batch_sampler
    if batches is None:
        raise TypeError("shard_rows: the loader has batch_size=None, and so no batches to cut. Give it a batch_size.")
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 and world > 1:
        raise ValueError(
            f"shard_rows: the loader's DistributedSampler already divides the examples among num_replicas="
            f"{sampler.num_replicas} ranks, so shard_rows would skip all but 1/{world} of them. Pass"
            " a loader of the global batches, without sampler= (shuffle=True, generator=torch.Generator().manual_seed("
            "seed)), or leave shard_rows out and pass this loader's batches to the step."
        )
    # A StatefulDataLoader seeds an internal sampler from the global seed.
    random = isinstance(sampler, RandomSampler) and sampler.generator is None
    random |= type(sampler).__module__.startswith("torchdata.") and hasattr(sampler, "replacement")
    if world > 1 and random and loader.generator is None:
        raise ValueError(
            "shard_rows: the loader shuffles by torch's global seed, by which ranks may differ: pass"
            " DataLoader(..., generator=torch.Generator().manual_seed(seed)), the same seed on all ranks."
        )
    return batches


class _OwnRows:
    """This rank's indices of each batch, marked True. A rank without rows has the first index, marked False."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not one of the {world} ranks along the batch axis.")
        self._batches, self._rank, self._world = batches, rank, world

    @property
    def sampler(self) -> Any:
        return getattr(self._batches, "sampler", None)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> "_OwnBatches":
        kind = _StatefulOwnBatches if hasattr(batches := iter(self._batches), "state_dict") else _OwnBatches
        return kind(batches, self._rank, self._world)


class _OwnBatches:
    """Iterator over this rank's marked indices of batches."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self._batches, self._rank, self._world = batches, rank, world

    def __iter__(self) -> "_OwnBatches":
        return self

    def __next__(self) -> list[tuple[Any, bool]]:
        batch = next(self._batches)
        lo, hi = chunk_bounds(len(batch), self._world, self._rank)
        return [(i, True) for i in batch[lo:hi]] or [(batch[0], False)]


class _StatefulOwnBatches(_OwnBatches):
    """Iterator with the position of the global batches, for a StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)

    def update_state_dict(self) -> None:
        getattr(self._batches, "update_state_dict", bool)()


class _Marked(Dataset[Any]):
    """Dataset by marked indices."""

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
    """Collator of marked examples that drops the rows of examples of other ranks."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, marked: list[tuple[Any, bool]]) -> Any:
        batch = self._collate([x for x, _ in marked])
        return batch if marked[0][1] else first_rows(batch, 0)


class OwnExamples(IterableDataset[Any]):
    """The examples of a stream that belong to this rank.

    Example i belongs to rank i mod `world`. For example, rank 1 of 4 gets examples 1, 5, 9, ...

    Each of n workers of a `DataLoader` yields every n-th of the rank's examples. Else each worker would yield the whole
    stream. Other examples are read and dropped. A stream that can skip examples is faster.

    A `StatefulDataLoader` can save and load the position: by the stream's `state_dict` if present, and else by reading
    the stream again from the start. The examples are the same if the order is fixed.

    Args:
        examples: iterable that restarts with each `iter`, such as a `torch.utils.data.IterableDataset`. The order must
            be the same on all ranks.
        rank: index of the rank along the batch axis.
        world: ranks along the batch axis.

    Raises:
        TypeError: the stream is a dataset of Hugging Face, which divides examples among workers. The message names the
            function to use.
        ValueError: `rank` is not below `world`.

    Example:
        >>> [list(OwnExamples(range(5), rank=r, world=2)) for r in (0, 1)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(self, examples: Iterable[Any], *, rank: int = 0, world: int = 1) -> None:
        if type(examples).__module__.partition(".")[0] == "datasets":
            raise TypeError(
                "OwnExamples: a dataset of Hugging Face divides itself among the workers of a loader, and would lose"
                " examples here. Use datasets.distributed.split_dataset_by_node(dataset, rank=, world_size=) instead."
            )
        if not 0 <= rank < world:
            raise ValueError(f"OwnExamples: rank={rank} is not one of the {world} ranks along the batch axis.")
        self._examples, self._rank, self._world = examples, rank, world
        # The number of examples that the stream has given, to all ranks, and the place from which the next pass starts.
        self._at, self._from = 0, dict[str, Any]()
        # Only if the stream has `set_epoch`. Without `set_epoch`, `Stream` must read earlier passes again.
        if callable(set_epoch := getattr(examples, "set_epoch", None)):
            self.set_epoch = set_epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        start, self._from = self._from, {}
        self._at = start.get("at", 0)
        inner = start.get("inner")
        if inner is not None:
            self._examples.load_state_dict(inner)  # pyright: ignore[reportAttributeAccessIssue]
        skipped = self._at if inner is None else 0
        for i, example in enumerate(self._examples):
            if i < skipped:
                continue
            number = self._at
            self._at += 1
            if number % self._world == self._rank and number // self._world % workers == worker:
                yield example

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last yielded example."""
        own = getattr(self._examples, "state_dict", None)
        return {"at": self._at, "inner": None if own is None else own()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves the start of the next pass to a position."""
        self._from, self._at = dict(state), state["at"]
