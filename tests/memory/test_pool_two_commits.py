"""Covers commits of several processes: the last two are kept until all have the newer, and either can be opened."""

import pathlib

import pytest
import torch

from shardfn.memory import Pool
from shardfn.memory import _manifest as manifest


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


def test_a_value_committed_by_two_names_is_one_file_when_it_is_opened_again(tmp_path: pathlib.Path) -> None:
    with Pool(tmp_path) as pool:
        x = pool.write(_value(1).view(50, 100)).result()
        pool.commit({"x": x, "flat": x.flat(), "again": x}, 0)
        del x
    pool, values, _ = Pool.open(tmp_path)
    pool.commit({"x": values["x"]}, 1)
    del values["flat"], values["again"]
    others = [pool.write(_value(n).view(50, 100)).result() for n in (2, 3)]
    assert torch.equal(values["x"].load(), _value(1).view(50, 100))
    assert [int(o.load()[0, 0]) for o in others] == [2, 3]
    pool.close()


@pytest.mark.parametrize("fails", ["forget_before", "sync"])
def test_a_commit_that_fails_after_its_manifest_is_there_keeps_the_files_that_it_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    with Pool(tmp_path) as pool:
        pool.commit({"x": pool.write(_value(0)).result()}, 0)
        new = pool.write(_value(1)).result()
        with monkeypatch.context() as patch:

            def broken(path: pathlib.Path) -> None:
                if fails == "forget_before" or path == tmp_path:
                    raise OSError("no such device")

            patch.setattr(manifest, fails, broken)
            with pytest.raises(OSError, match="no such device"):
                pool.commit({"x": new}, 1, durable=True)
        del new
        written = [pool.write(_value(n)).result() for n in (7, 8)]
        del written
    pool, values, step = Pool.open(tmp_path)
    assert step == 1 and torch.equal(values["x"].load(), _value(1))
    pool.close()
