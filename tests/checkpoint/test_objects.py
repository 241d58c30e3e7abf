"""Covers checkpoints in object stores, by fsspec: manifests give the promises that names give in directories."""

import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import shardfn as sf
from shardfn import checkpoint
from shardfn.checkpoint import Manager
from shardfn.core import RankError
from shardfn.memory import DamagedError, InUseError
from shardfn.testing import distributed


@pytest.fixture
def url() -> Iterator[str]:
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def tree(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 7), float(step)), "frozen": torch.arange(1000.0), "n": torch.tensor(step)}


def names(url: str) -> list[str]:
    """The objects below a URL, without the tokens in their names."""
    fs, root = fsspec.url_to_fs(url)
    return sorted(re.sub(r"-[0-9a-f]{8}\.", ".", p.removeprefix(f"{root}/")) for p in fs.find(root))


def assert_has(url: str, step: int) -> None:
    assert checkpoint.verify(url, step).step == step
    got = checkpoint.restore(url, tree(0), step=step).tree
    for name, want in tree(step).items():
        assert torch.equal(got[name], want), name


def test_a_manager_writes_to_a_store_and_removes_from_it(url: str) -> None:
    with Manager(url, save_every=2, keep_last=2, keep_every=6) as manager:
        for step in range(11):
            manager.save(tree(step), step, user={"epoch": step})
        manager.wait()
        assert manager.steps() == checkpoint.steps(url) == [0, 6, 8, 10]
        restored = manager.restore(tree(0))
    assert (restored.step, restored.user, checkpoint.latest(url)) == (10, {"epoch": 10}, 10)
    for step in (0, 6, 8, 10):
        assert_has(url, step)
    assert all(x.startswith(("step_000000/", "step_000006/", "step_000008/", "step_000010/")) for x in names(url))
    assert "step 8" in checkpoint.inspect(f"{url}/step_000008")
    paths = [x.path for x in checkpoint.diff(url, url, steps=(8, 10))]
    assert paths == ["['n']", "['w']"]


def test_a_file_in_which_nothing_changed_is_copied_by_the_store(url: str) -> None:
    first = checkpoint.save(url, tree(1), 1, file_bytes=1)
    second = checkpoint.save(url, tree(2), 2, file_bytes=1)
    assert first.linked == 0 and second.linked > 4000 and second.bytes < first.bytes
    checkpoint.save(url, tree(3), 1, file_bytes=1, replace=True)
    for step, values in ((1, 3), (2, 2)):
        checkpoint.verify(url, step)
        got = checkpoint.restore(url, tree(0), step=step).tree
        assert torch.equal(got["w"], tree(values)["w"]) and torch.equal(got["frozen"], tree(0)["frozen"])


def test_one_gives_way_when_the_new_one_is_complete_and_leaves_nothing(url: str, monkeypatch: Any) -> None:
    checkpoint.save(url, tree(1), 5)
    before = names(url)
    with pytest.raises(FileExistsError, match="bucket/run/step_000005 is there already"):
        checkpoint.save(url, tree(2), 5)
    put = MemoryFileSystem.pipe_file

    def failing(fs: Any, path: str, value: bytes, **options: Any) -> None:
        if path.endswith("manifest.json"):
            raise OSError(5, "the link is down")
        put(fs, path, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", failing)
        with pytest.raises(OSError, match="the link is down"):
            checkpoint.save(url, tree(2), 5, replace=True)
    assert names(url) == before and checkpoint.restore(url, tree(0)).tree["n"] == 1
    checkpoint.save(url, tree(2), 5, replace=True)
    assert names(url) == before and checkpoint.restore(url, tree(0)).tree["n"] == 2


def test_a_put_that_fails_after_it_arrived_loses_nothing(url: str, monkeypatch: Any) -> None:
    """The answer was lost, the manifest is there: its files must stay."""
    put = MemoryFileSystem.pipe_file

    def arriving(fs: Any, path: str, value: bytes, **options: Any) -> None:
        put(fs, path, value, **options)
        if path.endswith("manifest.json"):
            raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", arriving)
        with pytest.raises(TimeoutError):
            checkpoint.save(url, tree(3), 3)
    assert_has(url, 3)


def test_files_left_by_a_killed_job_are_no_checkpoint_and_are_removed(url: str, monkeypatch: Any) -> None:
    checkpoint.save(url, tree(1), 1)
    before = names(url)
    fs, root = fsspec.url_to_fs(url)

    with monkeypatch.context() as patch:
        patch.setattr("shardfn.checkpoint._located.ObjectDraft.publish", killed_with(KeyboardInterrupt))
        patch.setattr("shardfn.checkpoint._located.ObjectDraft.discard", killed_with(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(url, tree(2), 2)
    fs.pipe_file(f"{root}/step_000002/note.txt", b"somebody's own")
    assert len(names(url)) > len(before) + 2 and checkpoint.steps(url) == [1]
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 2"):
        checkpoint.restore(url, tree(0), step=2)
    checkpoint.save(url, tree(4), 4)
    assert [x for x in names(url) if x.startswith("step_000002")] == ["step_000002/note.txt"]


def killed_with(error: type[BaseException]) -> Callable[..., None]:
    def killed(*args: Any, **options: Any) -> None:
        raise error

    return killed


def test_the_job_that_came_last_publishes_and_the_one_before_raises(url: str) -> None:
    first = Manager(url, background=False)
    first.save(tree(1), 1)
    with Manager(url) as second:
        with pytest.raises(InUseError, match="another job has started to write"):
            first.save(tree(2), 2)
        second.save(tree(3), 3)
    first.close()
    assert checkpoint.steps(url) == [1, 3]
    assert_has(url, 3)


def test_one_that_loses_the_store_while_it_publishes_leaves_no_checkpoint(url: str, monkeypatch: Any) -> None:
    put = MemoryFileSystem.pipe_file

    def overtaken(fs: Any, path: str, value: bytes, **options: Any) -> None:
        if path.endswith("manifest.json"):
            put(fs, path.replace("step_000002/manifest.json", "writer.json"), b"another")
        put(fs, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overtaken)
    with pytest.raises(InUseError):
        checkpoint.save(url, tree(2), 2)
    assert checkpoint.steps(url) == []


def test_objects_that_changed_or_are_gone(url: str) -> None:
    checkpoint.save(url, tree(1), 1, file_bytes=1)
    fs, root = fsspec.url_to_fs(url)
    one, two, *_ = (p for p in fs.find(root) if p.endswith(".safetensors"))
    data = bytearray(fs.cat_file(one))
    data[-1] ^= 1
    fs.pipe_file(one, bytes(data))
    fs.pipe_file(two, fs.cat_file(two)[:-1])
    with pytest.raises(DamagedError, match=r"(?s)have changed.*were written"):
        checkpoint.verify(url)
    with pytest.raises(DamagedError):
        checkpoint.restore(url, tree(0))
    fs.rm_file(two)
    with pytest.raises(DamagedError, match="is gone"):
        checkpoint.verify(url)


def test_malformed_places(url: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint in memory"):
        checkpoint.restore(url, tree(0))
    with pytest.raises(ValueError, match="Pass it as a string"):
        checkpoint.save(pathlib.Path("s3://bucket/run"), tree(0), 1)
    with pytest.raises(ValueError, match="nothing"):
        checkpoint.save("nothing://bucket", tree(0), 1)
    assert checkpoint.steps(f"file://{tmp_path}/none") == []


@distributed(world=2, timeout=60)
def test_a_store_of_one_process_is_refused_by_several() -> None:
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    leaf = {"w": sf.shard(torch.ones(4), sf.P("dp"), mesh)}
    with pytest.raises(ValueError, match="ranks 1 do not see"):
        checkpoint.save("memory://here/run", leaf, 1)
    assert checkpoint.steps("memory://here/run") == []
    with pytest.raises((ValueError, RankError), match="nothing"):
        checkpoint.save("nothing://bucket", leaf, 1)


@distributed(world=[2, 3], timeout=60)
def _through_files(url: str, save: bool, world: int) -> int:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    like = {name: sf.shard(x, sf.P(*["dp"] * min(x.ndim, 1)), mesh) for name, x in tree(8).items()}
    if save:
        with Manager(url, mesh=mesh) as manager:
            manager.save(like, 7)
            manager.save(like, 8)
        return 0
    got = checkpoint.restore(url, like)
    for name, want in tree(8).items():
        assert torch.equal(got.tree[name].full_tensor(), want), name
    return got.read


def test_several_ranks_write_and_other_numbers_of_ranks_read(tmp_path: pathlib.Path) -> None:
    url = f"file://{tmp_path}/run"
    _through_files(url, True, world=2)
    _through_files(url, False, world=3)
    assert_has(url, 8)
    assert_has(str(tmp_path / "run"), 8)  # the same files, as a directory
    assert not list((tmp_path / "run").glob("step_*/draft-*"))
