"""Covers README.md and docs/: their Python runs, the commands exist, and so do the tests and links that are named."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import shardfn as sf
from shardfn.testing import distributed

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
DESIGN = [
    "docs/design/0001-laws.md",
    "docs/design/0002-global-tensor.md",
    "docs/design/0003-graph.md",
    "docs/design/0004-scan.md",
    "docs/design/0005-memory.md",
    "docs/design/0006-precision.md",
    "docs/design/0007-activations.md",
    "docs/design/0008-compressed-communication.md",
    "docs/design/0009-zero-plus-plus.md",
    "docs/design/0010-placements-and-routes.md",
    "docs/design/0011-one-step.md",
    "docs/design/0012-optimizers.md",
    "docs/design/0013-op-table-and-types.md",
    "docs/design/0014-zero.md",
    "docs/design/0015-pipeline.md",
    "docs/design/0016-partition.md",
    "docs/design/0017-tensor-layers.md",
    "docs/design/0018-checkpoints.md",
    "docs/design/0019-attention.md",
    "docs/design/0020-shared-memory.md",
    "docs/design/0021-canonical-sums.md",
    "docs/design/0025-opened-step.md",
    "docs/design/0028-schedule-and-pool.md",
]
# Pages whose programs run by day; those of the others run by night.
DAILY = ["README.md", "docs/index.md", "docs/ten_lines.md", "docs/training_loop.md", "docs/sharded.md"]
DOCS = [
    "docs/index.md",
    "docs/install.md",
    "docs/ten_lines.md",
    "docs/finetune.md",
    "docs/pretrain.md",
    "docs/examples.md",
    "docs/from_fsdp2.md",
    "docs/from_jax.md",
    "docs/failures.md",
    "docs/works.md",
    "docs/a_step.md",
    "docs/mistakes.md",
    "docs/jit.md",
    "docs/partition.md",
    "docs/scan.md",
    "docs/pipeline.md",
    "docs/passes.md",
    "docs/sharded.md",
    "docs/collectives.md",
    "docs/transforms.md",
    "docs/modules.md",
    "docs/model_state.md",
    "docs/losses.md",
    "docs/experts.md",
    "docs/two_models.md",
    "docs/opened_step.md",
    "docs/multimodal.md",
    "docs/precision.md",
    "docs/offload.md",
    "docs/memory.md",
    "docs/kernels.md",
    "docs/optimizers.md",
    "docs/averages.md",
    "docs/unfreezing.md",
    "docs/activations.md",
    "docs/zero_plus_plus.md",
    "docs/plan.md",
    "docs/compression.md",
    "docs/reshard.md",
    "docs/reproducible.md",
    "docs/checkpoints.md",
    "docs/elastic.md",
    "docs/parallelism.md",
    "docs/long_sequences.md",
    "docs/sparse_attention.md",
    "docs/huggingface.md",
    "docs/from_deepspeed.md",
    "docs/from_trainer.md",
    "docs/training_loop.md",
    "docs/loggers.md",
    "docs/lora.md",
    "docs/recurrent.md",
    "docs/seq2seq.md",
    "docs/speculators.md",
    "docs/swiftkv.md",
    "docs/frozen.md",
    "docs/rlhf.md",
    *DESIGN,
]
COMMANDS = [code.strip() for language, code in BLOCKS if language == "bash"]


def _python(page: str) -> list[str]:
    return [code for code, _ in _printing(page)]


def _printing(page: str) -> list[tuple[str, str | None]]:
    """Blocks of Python, each with its output, the block of text below it."""
    block = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S)
    return [(found[1], found[2]) for found in block.finditer((ROOT / page).read_text())]


def test_the_example_has_ten_lines() -> None:
    lines = [
        line for line in _python("README.md")[0].splitlines() if line and not line.startswith(("import ", "from "))
    ]
    assert len(lines) <= 10


def test_the_first_two_blocks_are_the_two_commands() -> None:
    assert [language for language, _ in BLOCKS[:2]] == ["bash", "bash"]
    assert COMMANDS == ["./scripts/train", "./scripts/test"]
    for command in COMMANDS:
        assert os.access(ROOT / command, os.X_OK)
    assert "examples/train_gpt.py" in (ROOT / "scripts/train").read_text()
    assert "pytest" in (ROOT / "scripts/test").read_text()


@pytest.mark.nightly
def test_the_training_program_has_the_options_that_are_named() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), "--help"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    for option in ("--data", "--steps", "--minutes", "--out", "--zero", "--accumulate"):
        assert option in TEXT
        assert option in done.stdout


@pytest.mark.day("2-docs/index.md")
@pytest.mark.parametrize(
    "page", [pytest.param(x, marks=() if x in DAILY else pytest.mark.nightly) for x in ["README.md", *DOCS]]
)
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_python_runs_on_ranks(world: int, page: str) -> None:
    # Processes of a user draw random numbers each on its own; a page whose ranks need the same ones has to seed them.
    torch.manual_seed(1 + (torch.distributed.get_rank() if world > 1 else 0))
    names: dict[str, object] = {"__name__": "page"}
    for number, (code, printed) in enumerate(_printing(page)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"{page}, Python block {number}", "exec"), names)
        assert printed in (None, out.getvalue()), f"{page} is stale: run python docs/make_printed.py {page}"


def test_files_that_are_named_exist() -> None:
    tests = re.findall(r"`(tests/[^`]+)`", TEXT + (ROOT / "docs/works.md").read_text())
    assert len(tests) > 60
    assert [x for x in tests if not (ROOT / x).exists()] == []
    for page in ("README.md", *DOCS):
        links = [x for x in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()) if "://" not in x]
        assert links
        assert [x for x in links if not ((ROOT / page).parent / x).exists()] == []


def test_names_that_are_used_exist() -> None:
    prose = TEXT + "".join(
        (ROOT / page).read_text() for page in ("docs/works.md", "docs/from_fsdp2.md", "docs/from_jax.md")
    )
    for name in set(re.findall(r"\bsf\.([\w.]*\w)", prose)):
        value = sf
        for part in name.split("."):
            value = getattr(value, part)


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 3])
def test_shard_map_is_a_function_of_whole_tensors(world: int) -> None:
    """Blocks of 7 rows and of 5 columns over an axis; values and gradients of the matrix product."""
    mesh = sf.make_mesh({"tp": world})

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return sf.psum(a @ b, "tp")

    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((4, 7), (7, 5)))
    product = sf.shard_map(f, mesh=mesh, in_specs=(sf.P(None, "tp"), sf.P("tp")), out_specs=sf.P())
    tanh = sf.shard_map(torch.tanh, mesh=mesh, in_specs=sf.P(None, "tp"), out_specs=sf.P(None, "tp"))
    got, want = tanh(product(a, b)), torch.tanh(a @ b)
    torch.testing.assert_close(got, want)
    for x, y in zip(
        torch.autograd.grad(got.square().sum(), (a, b)), torch.autograd.grad(want.square().sum(), (a, b)), strict=True
    ):
        torch.testing.assert_close(x, y)
