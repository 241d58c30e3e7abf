"""Restricts an iterable dataset to the examples of this rank, and of this worker of a loader."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


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
