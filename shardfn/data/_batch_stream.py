"""Batches of a loader without numbers, as an iterator that ends on all ranks together and can be resumed.

`prefetch`: the next batches, computed by a thread while the step runs.
"""

import base64
import contextlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from shardfn import core
from shardfn.engine.agreement import comms_of
from shardfn.engine.loss import agree_on_step, told_before

T = TypeVar("T")
_POLL = 0.05  # seconds after which a writer to a full queue checks for a reader


def prefetch(iterable: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yields the same items in the same order, computed up to `depth` ahead by a background thread.

    The thread starts with the first `next` and has ended when the iterator is exhausted, closed (`.close()`, or a `for`
    loop left and the iterator dropped) or has raised. An exception of `iterable` is raised here, at the same place in
    the order. Closing waits for an item that is being computed.

    Args:
        iterable: source of items, read in the thread.
        depth: number of items that may wait.

    Raises:
        ValueError: `depth` is below 1.

    Example:
        >>> list(prefetch(range(4)))
        [0, 1, 2, 3]
    """
    if depth < 1:
        raise ValueError(f"prefetch(depth={depth}): must be at least 1.")
    return _yield_items(iterable, depth)


def _yield_items(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    # The thread writes, the iterating thread reads. The last entry is "end" or "error".
    items: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
    left = threading.Event()
    thread = threading.Thread(
        target=core.adopting(_fill_queue), args=(iterable, items, left), name="shardfn-prefetch", daemon=True
    )
    thread.start()
    try:
        while True:
            kind, item = items.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(item, BaseException)
                raise item
            yield item  # pyright: ignore[reportReturnType] -- `kind` determines the member of the union
    finally:
        # The reader has stopped, possibly early: the thread must not wait for room forever.
        left.set()
        thread.join()


def _fill_queue(
    iterable: Iterable[T], items: "queue.Queue[tuple[str, T | BaseException | None]]", left: threading.Event
) -> None:
    def put_item(kind: str, item: T | BaseException | None) -> bool:
        while not left.is_set():
            try:
                items.put((kind, item), timeout=_POLL)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in iterable:
            if not put_item("item", item):
                return
        put_item("end", None)
    except BaseException as error:  # the reader gets every exception
        put_item("error", error)


_MARK = "is a"


def to_json(x: Any) -> Any:
    """Returns a nested state as values of JSON.

    Raises:
        TypeError: the state has an object of another type. The message names the type.

    Example:
        >>> state = {"order": torch.tensor([2, 0, 1]), "pair": (1, b"x")}
        >>> back = of_json(to_json(state))
        >>> back["order"], back["pair"]
        (tensor([2, 0, 1]), (1, b'x'))
    """
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, np.generic):
        return to_json(x.item())
    if isinstance(x, bytes):
        return {_MARK: "bytes", "base64": base64.b64encode(x).decode()}
    if isinstance(x, Tensor | np.ndarray):
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else x
        if array.dtype.hasobject:
            raise TypeError(f"the loader's state has an array of {array.dtype}, which no JSON holds.")
        kind = "tensor" if isinstance(x, Tensor) else "array"
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {_MARK: kind, "dtype": array.dtype.str, "shape": list(array.shape), "base64": data}
    if isinstance(x, list):
        return [to_json(y) for y in x]
    if isinstance(x, tuple):
        return {_MARK: "tuple", "items": [to_json(y) for y in x]}
    if isinstance(x, dict):
        return {_MARK: "dict", "items": [[to_json(k), to_json(v)] for k, v in x.items()]}
    raise TypeError(
        f"the loader's state has a {type(x).__module__}.{type(x).__qualname__}, which no JSON holds. Let its"
        " state_dict() return numbers, texts, bytes, tensors, lists, tuples and dicts, or pass resume='replay'."
    )


def of_json(x: Any) -> Any:
    """Returns the state that `to_json` converted to `x`."""
    if isinstance(x, list):
        return [of_json(y) for y in x]
    if not isinstance(x, dict):
        return x
    if x[_MARK] == "dict":
        return {of_json(k): of_json(v) for k, v in x["items"]}
    if x[_MARK] == "tuple":
        return tuple(of_json(y) for y in x["items"])
    data = base64.b64decode(x["base64"])
    if x[_MARK] == "bytes":
        return data
    array = np.frombuffer(data, np.dtype(x["dtype"])).reshape(x["shape"]).copy()
    return torch.from_numpy(array) if x[_MARK] == "tensor" else array


class Stream:
    """Resumable iterator over the batches of a loader of this rank's rows.

    For data that only comes in order: an `IterableDataset`, a streamed dataset of Hugging Face, a `StatefulDataLoader`.
    Prefer `Cursor` for data that has numbers. The loader must yield only this rank's rows: use for example
    `OwnExamples`, `datasets.distributed.split_dataset_by_node`, a `DistributedSampler` or `shard_rows`. At the
    beginning of each pass, `set_epoch` of the dataset and of the sampler is called, if present.

    Before each batch the ranks agree that all ranks have a batch, by a message of a few bytes. So a stream that ends
    early or raises on a single rank is an error on all ranks, without a deadlock. Iteration is collective: all ranks of
    the mesh must take the same number of batches.

    Args:
        loader: iterable of batches that restarts with each `iter`.
        mesh: mesh of the step, or None for a single rank.
        ends: "together": all ranks must have the same number of batches. "first": a pass ends on all ranks with the
            shortest stream, and remaining batches of other ranks are dropped.
        resume: "state": a position is the state that the loader saves. "replay": a position is a number, and resuming
            reads and drops all earlier batches, also of earlier passes unless the loader has `set_epoch`. Replay is
            exact for any loader with a fixed order, at the cost of reading.

    Attributes:
        passes: complete passes over the loader.
        next: number of the next batch in this pass.

    Raises:
        ValueError: an option has another value, or workers that persist would not learn of the number of a pass.

    Example:
        >>> stream = Stream([10, 20, 30], resume="replay")
        >>> next(stream), next(stream), stream.state()
        (10, 20, {'pass': 0, 'next': 2, 'ranks': 1})
        >>> list(Stream([10, 20, 30], resume="replay").at(stream.state()))
        [30]
    """

    def __init__(
        self,
        loader: Iterable[core.PyTree],
        mesh: core.Mesh | None = None,
        *,
        ends: str = "together",
        resume: str = "state",
    ) -> None:
        for name, given, known in (("ends", ends, ("together", "first")), ("resume", resume, ("state", "replay"))):
            if given not in known:
                raise ValueError(f"Stream({name}={given!r}): it is {known[0]!r} or {known[1]!r}.")
        _check_workers(loader)
        self.passes = self.next = 0
        self._loader, self._mesh, self._ends, self._resume = loader, mesh, ends, resume
        self._batches: Iterator[core.PyTree] | None = None  # batches of a pass that has begun
        self._started = False  # whether the loader's state is the state of some batch

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> core.PyTree:
        """Returns this rank's rows of the next batch.

        At the end of a pass raises StopIteration. Then the next pass begins.

        Raises:
            RankError: the stream has ended only on some ranks, or has raised an error on another rank. The message
                names the ranks.
            ValueError: a pass has no batches.
        """
        batch, have = self._read_batch()
        if not self._agree_on_batch(have):
            if not self.next:
                raise ValueError(
                    f"Stream: pass {self.passes} has no batch on any rank. A generator can be read only once: pass an"
                    " object whose __iter__ begins anew, and see whether the dataset is empty on this rank."
                )
            self.passes, self.next, self._batches = self.passes + 1, 0, None
            raise StopIteration
        self.next += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the position, to save with the state of the step by `Manager.save(user=...)`. Collective.

        The position has the states of the loaders of all ranks, and is equal on all ranks.

        Raises:
            TypeError: the loader has no `state_dict`.
            ValueError: the loader's state would not lead to the same batches. The message names the reason.
        """
        place: dict[str, Any] = {"pass": self.passes, "next": self.next, "ranks": self._loader_size}
        if self._resume == "replay":
            return place
        with self._send_errors():
            self._check_exact()
            own = to_json(self._loader_place()) if self._started else None
        if self._mesh is None:
            return place | {"loaders": [own]}
        control = comms_of(self._mesh).control
        agree_on_step(control, "sf.data.Stream, state")
        return place | {"loaders": control.gather(own)}

    def at(self, state: dict[str, Any]) -> "Stream":
        """Moves this stream to the position of `state`, taken on the same number of ranks, and returns the stream.

        Raises:
            ValueError: `state` was taken on another number of ranks, or with another `resume`.
        """
        if state["ranks"] != self._loader_size:
            raise ValueError(
                f"Stream: the position was saved by {state['ranks']} ranks, but this run has {self._loader_size}. Each"
                " rank has a separate position. Continue with the same number of ranks, or leave at() out to start"
                " from the beginning."
            )
        if ("loaders" in state) != (self._resume == "state"):
            was = "state" if "loaders" in state else "replay"
            raise ValueError(f"Stream(resume={self._resume!r}): the position was saved with resume={was!r}. Pass that.")
        self._batches = None
        if self._resume == "replay":
            self._replay_batches(state["pass"], state["next"])
            return self
        self.passes, self.next = state["pass"], state["next"]
        own = state["loaders"][0 if self._mesh is None else self._mesh.rank]
        if own is not None:
            self._go_to(**of_json(own))
        return self

    @property
    def _loader_size(self) -> int:
        return 1 if self._mesh is None else self._mesh.size

    def _loader_place(self) -> dict[str, Any]:
        generator = getattr(self._loader, "generator", None)
        return {
            "loader": self._state_keeper().state_dict(),
            "order": None if generator is None else generator.get_state(),
        }

    def _go_to(self, loader: Any, order: Any) -> None:
        """Moves the loader to a position.

        The generator that shuffles is set last: torchdata saves its state at the beginning of the pass, and draws less
        from the generator while loading than before saving, so that the next pass would have another order.
        """
        self._set_epoch()
        self._started = True
        if self.next or order is None:
            self._state_keeper().load_state_dict(loader)
        if self.next:
            self._batches = iter(self._loader)
        if order is not None:
            vars(self._loader)["generator"].set_state(order)

    def _read_batch(self) -> tuple[core.PyTree, bool]:
        """Returns the next batch, and whether a batch was left."""
        with self._send_errors():
            if self._batches is None:
                self._set_epoch()
                self._batches = iter(self._loader)
                self._started = True
            try:
                return next(self._batches), True
            except StopIteration:
                return None, False

    def _agree_on_batch(self, have: bool) -> bool:
        """Returns whether all ranks have a batch. Collective."""
        if self._mesh is None or self._mesh.size == 1:
            return have
        call = f"sf.data.Stream, pass {self.passes}, batch {self.next}"
        agreed = agree_on_step(comms_of(self._mesh).control, call, ("", (int(have),)))
        if agreed.even:
            return have
        ended = [rank for rank, (count,) in enumerate(agreed.sizes) if not count]
        if self._ends == "together":
            raise core.RankError(
                f"all ranks must have equally many batches, but the stream has ended on rank{'s' * (len(ended) > 1)}"
                f" {', '.join(map(str, ended))} after {self.next} batches of pass {self.passes}. Pad the shards, cut"
                " the stream with sf.data.OwnExamples and drop_last=True, or end each pass with the shortest stream:"
                " Stream(..., ends='first')."
            )
        return False

    def _replay_batches(self, passes: int, batches: int) -> None:
        takes_epoch = any(True for _ in self._epoch_takers())
        for self.passes in range(passes if takes_epoch else 0, passes + 1):
            self._set_epoch()
            self._batches = iter(self._loader)
            if self.passes < passes:
                for _ in self._batches:
                    pass
        self.passes, self.next = passes, batches
        for n in range(batches):
            if self._batches is None or next(self._batches, self) is self:
                raise ValueError(
                    f"Stream: the position is after batch {batches} of pass {passes}, and now the stream ends after"
                    f" {n}: it is not the stream that was saved."
                )
        self._started = True

    def _send_errors(self) -> Any:
        """Returns a context that sends an error of this rank to all other ranks."""
        return told_before(comms_of(self._mesh).control) if self._mesh is not None else contextlib.nullcontext()

    def _epoch_takers(self) -> Iterator[Any]:
        loader: Any = self._loader
        sampler = getattr(loader, "batch_sampler", None)
        parts = (loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None), sampler)
        for x in (*parts, getattr(sampler, "sampler", None)):
            if callable(getattr(x, "set_epoch", None)):
                yield x

    def _set_epoch(self) -> None:
        for x in self._epoch_takers():
            x.set_epoch(self.passes)

    def _state_keeper(self) -> Any:
        """Returns the object that knows the position: the loader, or the dataset if no worker reads ahead."""
        loader: Any = self._loader
        if callable(getattr(loader, "load_state_dict", None)):
            return loader
        dataset = getattr(loader, "dataset", None)
        if getattr(loader, "num_workers", 1) == 0 and callable(getattr(dataset, "load_state_dict", None)):
            return dataset
        raise TypeError(
            f"Stream: a {type(loader).__name__} keeps no place to resume from. Use"
            " torchdata.stateful_dataloader.StatefulDataLoader (pip install torchdata), which takes the arguments of"
            " DataLoader, or Stream(..., resume='replay'), which reads the stream again up to the place."
        )

    def _check_exact(self) -> None:
        loader: Any = self._loader
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if type(sampler) is RandomSampler:
            raise ValueError(
                "Stream: the state of the loader lacks that of torch's RandomSampler, and another order would follow."
                " Pass shuffle=True and generator= to the StatefulDataLoader in place of sampler=."
            )
        if _has_buffer(getattr(loader, "dataset", loader)):
            raise ValueError(
                "Stream: dataset.shuffle(buffer_size=) of Hugging Face does not save the examples in the buffer, so a"
                " resumed run would skip them. Pass Stream(..., resume='replay'), which reads the stream again up to"
                " the position, or shuffle only the shards with buffer_size=1."
            )


def _check_workers(loader: Any) -> None:
    """Refuses workers that keep copies of a dataset, because each pass would have the order of the first pass."""
    dataset = getattr(loader, "dataset", None)
    shared = type(dataset).__module__.partition(".")[0] == "datasets"  # the epoch is in memory that workers share
    if getattr(loader, "persistent_workers", False) and hasattr(dataset, "set_epoch") and not shared:
        raise ValueError(
            f"Stream: with persistent_workers=True the workers keep copies of the {type(dataset).__name__}, which its"
            " set_epoch does not reach: all passes would have the order of the first. Pass persistent_workers=False."
        )


def _has_buffer(x: Any) -> bool:
    """Returns whether a streamed dataset of `datasets` shuffles by a buffer.

    The state of `datasets` does not save the buffer (version 5.2).
    """
    if type(x).__name__ == "BufferShuffledExamplesIterable" and getattr(x, "buffer_size", 2) > 1:
        return True
    inner = [getattr(x, name, None) for name in ("_ex_iterable", "ex_iterable", "_examples", "dataset")]
    inner += getattr(x, "ex_iterables", None) or []
    return any(_has_buffer(y) for y in inner if y is not None)
