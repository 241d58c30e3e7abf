"""Covers several GPUs with NCCL between them: every stage equals one device. Never run so far."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

HERE = pathlib.Path(__file__).parent


@pytest.mark.cuda(devices=2)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_with_a_gpu_each_equal_one_device(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices; this machine has {torch.cuda.device_count()}")
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*torchrun, str(HERE / "nccl_program.py")], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal:") == 7
