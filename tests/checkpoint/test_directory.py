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
# Ends the process in the place of one rename, as a loss of power does.
KILLED = """
import os, sys
import torch
from shardfn import checkpoint

rename, left = os.rename, int(sys.argv[2])

def counting(old, new):
    global left
    left -= 1
    if not left:
        os._exit(9)
    rename(old, new)

os.rename = counting
checkpoint.save(sys.argv[1], {"w": torch.full((3,), 2.0)}, step=5, replace=True)
"""


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_kill_while_one_checkpoint_gives_way_to_another_keeps_one(tmp_path: pathlib.Path, nth: int) -> None:
    """Each of the renames in turn: the old one until the new one has its name, and the new one from then on."""
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, step=5)
    run = [sys.executable, "-c", KILLED, str(tmp_path), str(nth)]
    code = subprocess.run(run, cwd=ROOT, timeout=120, check=False).returncode
    assert code == (9 if nth < 4 else 0)
    with Manager(tmp_path) as manager:
        assert manager.steps() == [5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["owner", "step_000005"]
    assert checkpoint.verify(tmp_path).step == 5
    got = checkpoint.restore(tmp_path, {"w": torch.zeros(3)}).tree["w"]
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
