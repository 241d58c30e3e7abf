"""Covers `Stream`: exact resume with the loaders of torch, torchdata and datasets, and an end on all ranks at once."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

import shardfn as sf
from shardfn.data import OwnExamples, Stream, shard_rows
from shardfn.testing import distributed

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # of torch, in torchdata
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Numbers(IterableDataset[int]):
    def __init__(self, size: int = 22) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist())


def _stateful(data: Any, **options: Any) -> Any:
    reason = "needs torchdata: pip install torchdata"
    torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)
    return torchdata.StatefulDataLoader(data, batch_size=4, **options)


def _assert_resumes(make: Callable[[], Stream], batches: list[int], passes: int = 2) -> None:
    """A stream that is made anew, and moved to a place of another, gives that one's further batches."""
    stream, seen, places = make(), list[Any](), dict[int, tuple[int, Any]]()
    for n in range(passes):
        assert stream.passes == n
        for batch in stream:
            seen.append(batch.tolist())
            if len(seen) in batches:
                places[len(seen)] = stream.passes, json.loads(json.dumps(stream.state()))
    assert places.keys() == set(batches)
    for count, (at, place) in places.items():
        again = make().at(place)
        rest = [batch.tolist() for _ in range(at, passes) for batch in again]
        assert rest == seen[count:], count


def _shuffled(workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(5)
    return _stateful([*range(22)], shuffle=True, generator=generator, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_exactly_by_its_own_state(workers: int) -> None:
    _assert_resumes(lambda: Stream(_shuffled(workers)), [1, 4, 6, 8])
    _assert_resumes(lambda: Stream(shard_rows(_shuffled(workers), rank=1, world=2)), [2, 7])
    data = lambda: OwnExamples(Numbers(44), rank=1, world=2)  # noqa: E731
    _assert_resumes(lambda: Stream(_stateful(data(), num_workers=workers)), [1, 3, 7])


def test_own_rows_of_torchdata_are_those_of_the_global_batches() -> None:
    whole = [batch.tolist() for batch in _shuffled()]
    parts = [[batch.tolist() for batch in shard_rows(_shuffled(), rank=r, world=2)] for r in (0, 1)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def _streamed(shards: int = 4, buffer: int = 0) -> Any:
    datasets: Any = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    data = datasets.Dataset.from_dict({"a": [*range(40)]}).to_iterable_dataset(num_shards=shards)
    return data.shuffle(seed=1, buffer_size=buffer) if buffer else data


def _of_hub(data: Any, loader: Any = _stateful, rank: int = 1, world: int = 2, **options: Any) -> Any:
    import datasets.distributed  # pyright: ignore[reportMissingImports]

    own = datasets.distributed.split_dataset_by_node(data, rank=rank, world_size=world)
    return loader(own, collate_fn=lambda rows: torch.tensor([r["a"] for r in rows]), **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face_resume_exactly(workers: int) -> None:
    _assert_resumes(lambda: Stream(_of_hub(_streamed(), num_workers=workers)), [1, 3, 5, 6])
    # Shards alone are shuffled, anew in each pass. With workers datasets 5.2 cannot load its own state of those.
    options: dict[str, Any] = {"resume": "replay"} if workers else {}
    _assert_resumes(lambda: Stream(_of_hub(_streamed(buffer=1), num_workers=workers), **options), [2, 7])
    seen = [batch.tolist() for r in (0, 1) for batch in Stream(_of_hub(_streamed(), rank=r, num_workers=workers))]
    assert sorted(x for batch in seen for x in batch) == [*range(40)]


def test_a_plain_loader_without_workers_resumes_by_the_datasets_state() -> None:
    def plain(data: Any, **options: Any) -> Any:
        return DataLoader(data, batch_size=4, **options)

    _assert_resumes(lambda: Stream(_of_hub(_streamed(), plain)), [1, 3, 6])
    with pytest.raises(TypeError, match=r"keeps no place to resume from.*StatefulDataLoader.*resume='replay'"):
        stream = Stream(_of_hub(_streamed(), plain, num_workers=1))
        next(stream)
        stream.state()


def test_a_shuffle_buffer_is_refused_and_can_be_replayed() -> None:
    stream = Stream(_of_hub(_streamed(buffer=8)))
    next(stream)
    with pytest.raises(ValueError, match=r"does not save the examples in the buffer.*resume='replay'"):
        stream.state()
    _assert_resumes(lambda: Stream(_of_hub(_streamed(buffer=8)), resume="replay"), [1, 3, 6])


@pytest.mark.day("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_any_loader_of_a_fixed_order_can_be_replayed(workers: int) -> None:
    def loader(data: Any, **options: Any) -> Any:
        return DataLoader(data, batch_size=4, num_workers=workers, **options)

    _assert_resumes(lambda: Stream(loader(OwnExamples(Numbers())), resume="replay"), [1, 6, 7])
    # Without set_epoch, by the passes before: this sampler's generator goes on from pass to pass.
    make = lambda: loader([*range(22)], shuffle=True, generator=torch.Generator().manual_seed(0))  # noqa: E731
    _assert_resumes(lambda: Stream(make(), resume="replay"), [2, 6, 9])
    with pytest.raises(ValueError, match=r"after batch 30 of pass 0, and now the stream ends after 6"):
        Stream(make(), resume="replay").at({"pass": 0, "next": 30, "ranks": 1})


def test_a_sampler_whose_order_is_not_saved_is_refused() -> None:
    data = [*range(8)]
    stream = Stream(_stateful(data, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(0))))
    next(stream)
    with pytest.raises(ValueError, match=r"lacks that of torch's RandomSampler.*shuffle=True"):
        stream.state()


def test_options_and_places_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"Stream\(ends='last'\): it is 'together' or 'first'"):
        Stream([1], ends="last")
    with pytest.raises(ValueError, match="saved by 2 ranks, but this run has 1"):
        Stream([1], resume="replay").at({"pass": 0, "next": 1, "ranks": 2})
    with pytest.raises(ValueError, match=r"saved with resume='replay'. Pass that"):
        Stream([1]).at({"pass": 0, "next": 1, "ranks": 1})
    with pytest.raises(ValueError, match="keep copies of the Numbers, which its set_epoch does not reach"):
        Stream(DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True))
    used = Stream(iter([1]), resume="replay")
    assert list(used) == [1]
    with pytest.raises(ValueError, match=r"pass 1 has no batch on any rank. A generator can be read only once"):
        next(used)


def _sized(rank: int) -> DataLoader[Any]:
    return DataLoader(OwnExamples(range(12 if rank else 8)), batch_size=4)


@distributed(world=3)
def test_a_stream_that_ends_early_on_one_rank_is_an_error_on_all_at_once() -> None:
    mesh = sf.make_mesh({"dp": 3}, device="cpu")
    stream, seen = Stream(_sized(mesh.rank), mesh), 0
    with pytest.raises(sf.RankError, match=r"ended on rank 0 after 2 batches of pass 0"):
        for _ in stream:
            seen += 1
    assert seen == 2
    short = Stream(_sized(mesh.rank), mesh, ends="first")
    assert [len(list(short)) for _ in range(2)] == [2, 2] and short.passes == 2


class Failing(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield 1
        if self.rank == 1:
            raise OSError("the shard is gone")
        yield 2


@distributed(world=2)
def test_a_stream_that_raises_on_one_rank_is_an_error_on_all() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    stream = Stream(DataLoader(Failing(mesh.rank), batch_size=1), mesh)
    next(stream)
    with pytest.raises(OSError if mesh.rank else sf.RankError, match="the shard is gone"):
        next(stream)


@distributed(world=2)
def test_ranks_at_different_calls_are_named() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    step = sf.sharded_step(lambda w, x: (w * x).mean(), sf.optim.sgd(0.1), mesh=mesh)
    state, stream = step.init(torch.ones(2)), Stream([torch.ones(2)], mesh, resume="replay")
    with pytest.raises(sf.RankError, match=r"(?s)rank 0: sf.data.Stream, pass 0, batch 0.*rank 1: step 0"):
        next(stream) if mesh.rank == 0 else step(state, torch.ones(2))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i), 1.0])


@pytest.mark.nightly
@distributed(world=2)
def test_a_run_that_goes_on_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Any) -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")

    def run(stop: int) -> list[float]:
        sampler = DistributedSampler(Rows(), num_replicas=2, rank=mesh.rank, seed=3)
        loader = DataLoader(Rows(), batch_size=3, sampler=sampler)
        stream = Stream(loader, mesh, resume="replay")
        step = sf.sharded_step(lambda w, x: (x @ w).square().mean(), sf.optim.sgd(1e-3), mesh=mesh)
        state, losses = step.init(torch.ones(2)), []
        with sf.checkpoint.Manager(tmp_path, mesh=mesh, save_every=1) as manager:
            if manager.steps():
                restored = manager.restore(state)
                state, stream = restored.tree, stream.at(restored.user)
            while int(state.step) < stop:
                for batch in stream:
                    state, metrics = step(state, batch)
                    losses.append(float(metrics["loss"]))
                    manager.save(state, int(state.step), user=stream.state())
                    if int(state.step) == stop:
                        break
        return losses

    first, then = run(6), run(9)
    manager = sf.checkpoint.Manager(tmp_path, mesh=mesh)
    assert len(first) == 6 and len(then) == 3 and manager.steps()
    tmp_path = tmp_path / "whole"
    assert run(9) == first + then
