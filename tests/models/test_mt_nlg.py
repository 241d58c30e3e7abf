"""Covers the step of MT-NLG lowered over three axes: the bytes on each link, against formulas by hand."""

import dataclasses
import importlib.util
import pathlib
from typing import Any

import pytest


def _bench() -> Any:
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_mt_nlg.py"
    spec = importlib.util.spec_from_file_location("bench_mt_nlg", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.nightly
def test_a_tiny_clone_sends_the_bytes_of_the_formulas() -> None:
    bench = _bench()
    tiny = {"num_layers": 9, "d_model": 64, "num_heads": 8, "d_ff": 256, "max_len": 32, "vocab_size": 128}
    config, sizes = dataclasses.replace(bench.CONFIG, **tiny), {"pp": 3, "dp": 2, "tp": 4}
    for microbatches in (2, 5):
        found = bench.lowered(1, microbatches, sizes, config)
        assert bench.compared(found, bench.by_hand(config, sizes, microbatches)) == []


@pytest.mark.nightly
def test_a_stage_of_530_billion_parameters_sends_the_bytes_of_the_formulas() -> None:
    """Stage 17 of 35, on one of 2,240 ranks; with 4 microbatches of the run's 240."""
    bench = _bench()
    found, expected = bench.lowered(17, 4), bench.by_hand(bench.CONFIG, bench.SIZES, 4)
    assert bench.compared(found, expected) == []
    # The bytes gathered along dp, in bf16, are the rank's parameters less its own eighth.
    params = found.lowered.memory_analysis().by_kind["params"]
    assert params == pytest.approx(expected["all_gather", "dp"] * 8 / 7, rel=1e-3)
