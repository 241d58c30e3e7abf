"""Covers the directory of checkpoints at the instants between two names: a kill there loses nothing."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from shardfn import checkpoint
from shardfn.checkpoint import Manager

ROOT = pathlib.Path(__file__).parents[2]
# For each directory in turn a fork that saves, and ends in the place of its n-th rename, as a loss of power does. One
# process for all, as a start takes seconds.
KILLED = """
import os, sys
import torch
from shardfn import checkpoint

rename = os.rename
for nth, directory in enumerate(sys.argv[1:], 1):
    if not (child := os.fork()):
        left = nth

        def counting(old, new):
            global left
            left -= 1
            if not left:
                os._exit(9)
            rename(old, new)

        os.rename = counting
        checkpoint.save(directory, {"w": torch.full((3,), 2.0)}, step=5, replace=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[pathlib.Path, int]]:
    """By number of the rename that a save did not come to: its directory, and how its process ended."""
    places = [tmp_path_factory.mktemp(f"kill{nth}") for nth in range(1, 5)]
    for place in places:
        checkpoint.save(place, {"w": torch.ones(3)}, step=5)
    run = [sys.executable, "-c", KILLED, *map(str, places)]
    done = subprocess.run(run, cwd=ROOT, timeout=240, check=True, capture_output=True, text=True)
    return dict(enumerate(zip(places, map(int, done.stdout.split()), strict=True), 1))


@pytest.mark.nightly
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_kill_while_one_checkpoint_gives_way_to_another_keeps_one(
    killed: dict[int, tuple[pathlib.Path, int]], nth: int
) -> None:
    """Each of the renames in turn: the old one until the new one has its name, and the new one from then on."""
    place, code = killed[nth]
    assert code == (9 if nth < 4 else 0)
    with Manager(place) as manager:
        assert manager.steps() == [5]
    assert sorted(p.name for p in place.iterdir()) == ["owner", "step_000005"]
    assert checkpoint.verify(place).step == 5
    got = checkpoint.restore(place, {"w": torch.zeros(3)}).tree["w"]
    assert got.tolist() == ([1.0] * 3 if nth < 3 else [2.0] * 3)


def test_where_the_new_one_cannot_have_the_name_the_old_one_has_it_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=5)
    rename = os.rename

    def failing(old: pathlib.Path, new: pathlib.Path) -> None:
        if ".tmp-" in old.name:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.save(tmp_path, {"w": torch.full((3,), 2.0)}, step=5, replace=True)
    assert checkpoint.restore(tmp_path, {"w": torch.zeros(3)}).tree["w"].tolist() == [1.0] * 3


def test_one_that_was_being_removed_does_not_come_back(tmp_path: pathlib.Path) -> None:
    place = pathlib.Path(checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=5).path)
    place.rename(tmp_path / "step_000005.old-00ff")
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["owner", "step_000006"]


def test_files_are_on_the_disk_before_the_manifest_and_that_before_the_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the name has all of it, whenever the power fails."""
    did: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def flushed(fd: int) -> None:
        did.append(("flushed", pathlib.Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def renamed(old: os.PathLike[str], new: os.PathLike[str]) -> None:
        did.append(("renamed", pathlib.Path(new).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    checkpoint.save(tmp_path, {"a": torch.ones(50), "b": torch.ones(50)}, step=5, file_bytes=100)
    monkeypatch.undo()
    files = [p.name for p in (tmp_path / "step_000005").glob("*.safetensors")]
    manifest, named = did.index(("flushed", "manifest.json")), did.index(("renamed", "step_000005"))
    assert len(files) == 2 and all(did.index(("flushed", name)) < manifest for name in files)
    assert manifest < named and ("flushed", tmp_path.name) in did[named:]
