"""Covers commits of several processes: the last two are kept until all have the newer, and either can be opened."""

import pathlib

import pytest
import torch

from shardfn.memory import Pool


def _value(n: int) -> torch.Tensor:
    return torch.full((5000,), float(n))


def test_either_of_two_kept_commits_can_be_opened(tmp_path: pathlib.Path) -> None:
    for wanted in (1, 2, None):
        place = tmp_path / str(wanted)
        with Pool(place) as pool:
            for step in (0, 1, 2):
                pool.commit({"x": pool.write(_value(step)).result()}, step, keep_before=True)
        assert Pool.steps(place) == (2, 1)
        pool, values, step = Pool.open(place, step=wanted)
        assert step == (wanted or 2) and torch.equal(values["x"].load(), _value(step))
        assert Pool.steps(place) == (step,) and len(list(place.glob("slot-*.bin"))) == 1
        pool.close()
    with pytest.raises(FileNotFoundError, match=r"steps \[2\], but none of step 7"):
        Pool.open(place, step=7)


def test_files_of_a_commit_are_free_once_it_is_given_up(tmp_path: pathlib.Path) -> None:
    with Pool(tmp_path) as pool:
        for step in range(4):
            pool.forget_before()
            value = pool.write(_value(step)).result()
            pool.commit({"x": value}, step, keep_before=True)
            del value
        pool.forget_before()
        assert Pool.steps(tmp_path) == (3,)
        assert len(list(tmp_path.glob("slot-*.bin"))) <= 2
