"""Covers shardfn/metrics/_values.py: tokens a second and utilisation."""

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.metrics import Throughput, flops_per_token, memory_in_use


def test_time_counts_from_call_to_call() -> None:
    now = iter([10.0, 12.0, 16.0])
    speed = Throughput(clock=lambda: next(now))
    assert [speed(8), speed(8)] == [{"tokens_per_s": 4.0}, {"tokens_per_s": 2.0}]


def test_utilisation_is_of_all_devices() -> None:
    now = iter([0.0, 1.0])
    speed = Throughput(flops_per_token(10), peak_flops=1200.0, clock=lambda: next(now))
    assert speed(10) == {"tokens_per_s": 10.0, "mfu": 0.5}


def test_half_of_its_arguments_are_an_error() -> None:
    with pytest.raises(ValueError, match="needs peak_flops and one of the others, all above 0"):
        Throughput(6.0)


def test_time_of_evaluations_and_saves_does_not_count() -> None:
    now = iter([0.0, 1.0, 5.0, 6.0, 8.0, 9.0, 10.0])
    speed = Throughput(clock=lambda: next(now))
    with speed.pause():  # 1 to 5
        with speed.pause():
            pass
    assert speed(8) == {"tokens_per_s": 4.0}  # at 6, after 2 seconds
    with pytest.raises(RuntimeError):
        with speed.pause():  # 8 to 9
            raise RuntimeError
    assert speed(9) == {"tokens_per_s": 3.0}  # at 10, after 3 seconds


def test_utilisation_of_counted_steps() -> None:
    now = iter([0.0, 2.0])
    speed = Throughput(flops_per_step=300.0, peak_flops=1200.0, clock=lambda: next(now))
    assert speed(10, steps=4) == {"tokens_per_s": 5.0, "mfu": 0.5}
    mistakes: Any = ({"flops_per_step": 1.0}, {"flops_per_step": 1.0, "flops_per_token": 1.0, "peak_flops": 1.0})
    for wrong in mistakes:
        with pytest.raises(ValueError, match="needs peak_flops and one of the others, all above 0"):
            Throughput(**wrong)


def test_utilisation_from_the_op_table_and_the_device() -> None:
    step = sf.sharded_step(lambda w, x: (x @ w).square().mean(), sf.optim.sgd(0.1))
    state, x = step.init(torch.ones(64, 64)), torch.ones(32, 64)
    flops = step.lower(state, x).cost_analysis().flops
    assert flops >= 2 * 2 * 32 * 64 * 64  # two products
    speed = Throughput(flops_per_step=flops, peak_flops=sf.graph.peak_flops("cpu", torch.float32, seconds=0.05))
    step(state, x)
    assert 0 < speed(32)["mfu"] < 1


def test_the_memory_of_a_process() -> None:
    before = memory_in_use()
    more = torch.ones(1 << 24)
    after = memory_in_use()
    assert after["memory_bytes"] - before["memory_bytes"] > more.nbytes / 2
    assert after["peak_memory_bytes"] >= before["peak_memory_bytes"] > 1 << 20
