"""Shape checks for the whole package, here and in the workers of `shardfn.testing.distributed`."""

import argparse
import fcntl
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator

import pytest
import torch

# The oracles of collectives and optimizers, in an environment of their own.
JAX = ["jax==0.10.2", "optax==0.2.8"]

# Must precede the first import of shardfn. The rooms of graphs and of the command line have no tensors in their
# signatures; checking every call there takes minutes.
CHECKED = ["core", "kernels", "collectives", "memory", "optim", "nn", "data", "models", "transforms", "testing"]
_spec = importlib.util.spec_from_file_location("shape_checks", pathlib.Path(__file__).with_name("shape_checks.py"))
assert _spec is not None and _spec.loader is not None
shape_checks = importlib.util.module_from_spec(_spec)
sys.modules["shape_checks"] = shape_checks
_spec.loader.exec_module(shape_checks)
shape_checks.install([f"shardfn.{room}" for room in CHECKED])
torch.set_num_threads(1)

try:
    from shardfn.testing import worker_setup
except (ImportError, AttributeError) as error:
    wanted = re.search(r'"torch==([^"]+)"', (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
    if wanted is None or torch.__version__.split("+")[0] == wanted[1]:
        raise
    raise ImportError(
        f"shardfn is made for torch {wanted[1]} and does not import on torch {torch.__version__}: install that version,"
        " for a GPU the build of it for the CUDA that the driver has, and run the tests again."
    ) from error

worker_setup(__file__)
if __name__.startswith("_worker_setup"):
    # In the process that workers are forked from: what a first capture imports, once rather than in each of them.
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes

# What these show others show too, on another number of ranks, stage or optimizer, and long tests; every night they run.
NIGHTLY = re.compile(
    "|".join(
        [
            r"test_(functional|mixed_precision|jit|primitives|zero)\.py::\w+\[4\b",
            r"test_(offload_jit|offload_ledger|offload_faults)\.py::\w+\[1\]"
            r"|test_activations\.py::test_(?!in_captured)\w+\[1\]",
            r"test_offload_ahead\.py::\w+\[(1-|2-(adamw, disk|delayed, host))",
            r"test_(phases|readme|functional)\.py::\w+\[1\b",
            r"test_(phases|step_failures|step_waits|onebit_exact)\.py::\w+\[3\b",
            r"test_primitives\.py::test_rows_mean_what_the_slow_spec_says\[3\]",
            r"test_compressed\.py::test_equals_the_formula_of_all_ranks\[4\]",
            r"test_failure_graph\.py::\w+\[\w+-3\]",
            r"test_parity\.py::test_stages_equal_one_device_and_one_another\[(2-(adam|lion|sgd|lamb)|1-(?!adamw)\w+)\]",
            r"test_parity\.py::test_(remat_is|reduce_once)\w+\[[24]\]",
            r"test_parity\.py::test_thresholds_never_change_a_bit\[3\]",
            r"test_lower\.py::test_predicted_bytes_are_the_counted_ones\[([01]|3-False)",
            r"test_parity\.py::test_dropout\w+\[[12]\]",
            r"test_offload\.py::test_placements_have_the_bits_of_none\[(2-1|2-2|1-2|1-3)\]",
            r"test_offload\.py::test_compositions_have_the_bits_of_none\[1\]",
            r"test_functional\.py::test_hypergradients_of_other_optimizers\b.*",
            r"test_functional\.py::test_tensor_parallel_leaves_and_other_axes",
            r"test_scan\.py::test_(the_graph_is_that_of_a_python_loop|tensor_parallel_layers|captured_steps_have)\w*",
            r"test_onebit_steps\.py::test_stages_give_the_same_bits",
            r"test_compressed\.py::test_equals_the_formula_of_all_ranks\[3\]",
            r"test_lower\.py::test_each_pass_and_all_of_them_keep_every_bit",
            r"test_distributed\.py::test_(error_beside_a_hang_does_not_wait_for_the_timeout|collectives\[4\])",
            r"test_functional\.py::test_(vmap_over_seeds_with_weights\w+\[3\]|hypergradients_through_three_steps\[2-odd\])",
            r"test_offload_jit\.py::test_(each_pass_and_all|what_is_fetched_comes_early)\w+",
            r"test_onebit_steps\.py::test_other_ranks_owe_what_the_old_ones_did",
            r"test_inductor\.py::test_a_second_process_finds_the_code_on_disk_and_no_worker_is_left",
            r"test_readme\.py::test_python_runs_on_ranks\[2-docs/jit\.md\]",
            r"test_zero_plus_plus\.py::test_a_captured_step_has_the_bits_of_the_eager_one\[all\]",
            r"test_lower\.py::test_predicted_bytes_are_the_counted_ones\[2-False-2\]",
            r"test_jit_cluster\.py::test_lower_shows_what_was_chosen_from",
            r"test_bigger_than_memory\.py::test_it_goes_on_with_the_losses_of_a_run_in_memory",
            r"test_activations\.py::test_they_compose_with_what_else_a_loss_is_wrapped_in",
            r"test_passes\.py::test_the_schedule_keeps_all_bits\[0\]",
            r"test_primitives\.py::test_rows_along_one_or_several_axes_of_a_grid",
            r"test_activations\.py::test_in_captured_steps_the_moves_are_ops\[2\]",
            r"test_huggingface\.py::test_unmodified_models_equal_one_device\[gpt2\]",
            r"test_passes\.py::test_the_schedule_keeps_all_bits\[2000\]",
            r"test_pipeline\.py::test_split_backwards\[3-",
            r"test_huggingface\.py::test_the_example_prints_the_plain_loop_s_losses\b.*",
            r"test_train_gpt\.py::test_(ctrl_c_under_torchrun|minutes_end_the_run)",
            r"test_gpt_sequence\.py::test_dp_and_tp_and_a_captured_step",
            r"test_uneven_heads\.py::test_sixteen_ranks_on_paper",
            r"test_partition_scans\.py::test_recomputed_layers_and_keys\[keys and remat\]",
            r"test_partition_search\.py::test_no_plan_is_dearer_than_that_of_greedy\[[18]\]",
            r"test_plan\.py::test_captured_step_agrees\[(False-1-[12]|True-2-[023])\]",
            r"test_jit\.py::test_ten_steps_have_the_bits_of_eager\[1\]",
            r"test_gpt_parallel\.py::test_every_style_on_two_ranks_in_float64\[(mqa|gpt2_tied)-",
            r"test_gpt_parallel\.py::test_a_block_sends_four_all_reduces_or_their_volume_in_pairs\[2-",
            r"test_partition\.py::test_(with_zero_over_the_other_axis\[3-False\]|a_captured_step_computes_the_same\[gpt2\])",
            r"test_pipeline(_module)?\.py::test_stages_equal_one_device\[2-",
            r"test_inductor\.py::test_gelu_and_its_gradient\[dtype(0-tanh|1-none)\]",
            r"test_canonical\.py::test_any_number_of_ranks_gives_the_same_bits\[[24]\]",
            r"test_zero\.py::test_one_gradient_tensor_for_two_leaves_is_not_overwritten\[2\]",
            r"test_partition_losses\.py::test_losses_and_gradients_are_those_of_one_device\[2\]",
        ]
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share 3/12`: of the tests that are left, those of one part of twelve."""
    parser.addoption("--share", metavar="K/N", type=_share, help="only part K of N (0 <= K < N) of the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts off to the night what takes long and seldom finds what the day does not; then takes the share asked for."""
    for item in items:
        if NIGHTLY.match(f"{item.path.name}::{item.name}"):
            item.add_marker(pytest.mark.nightly)
    share = config.getoption("--share")
    if share is not None:
        part, parts = share
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
        taken = set(mine)
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = mine


def _share(text: str) -> tuple[int, int]:
    """The part of a test depends on its name alone, so that tests keep their parts when others are added."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: K/N with 0 <= K < N, as in 3/12")
    return int(part), int(parts)


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="session")
def jax_python() -> str:
    """A Python that has jax and optax: `$JAX_PYTHON`, or one that the first test to need it installs from PyPI."""
    given = os.environ.get("JAX_PYTHON")
    if given:
        return given
    venv = pathlib.Path(tempfile.gettempdir()) / f"shardfn-jax-{os.getuid()}"
    python = venv / "bin" / "python"
    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one run of the tests share the environment
        if not (venv / "complete").exists():
            make = [[sys.executable, "-m", "venv", str(venv)], [str(python), "-m", "pip", "install", "-q", *JAX]]
            for command in make:
                if subprocess.run(command, capture_output=True, check=False).returncode:
                    pytest.skip(f"{' '.join(JAX)} cannot be installed: set JAX_PYTHON to a Python that has them")
            (venv / "complete").touch()
    return str(python)
