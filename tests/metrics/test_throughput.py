"""Covers shardfn/metrics/_throughput.py: tokens a second and utilisation."""

import pytest

from shardfn.metrics import Throughput, flops_per_token


def test_time_counts_from_call_to_call() -> None:
    now = iter([10.0, 12.0, 16.0])
    speed = Throughput(clock=lambda: next(now))
    assert [speed(8), speed(8)] == [{"tokens_per_s": 4.0}, {"tokens_per_s": 2.0}]


def test_utilisation_is_of_all_devices() -> None:
    now = iter([0.0, 1.0])
    speed = Throughput(flops_per_token(10), peak_flops=1200.0, clock=lambda: next(now))
    assert speed(10) == {"tokens_per_s": 10.0, "mfu": 0.5}


def test_half_of_what_it_needs_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs both"):
        Throughput(6.0)
