"""Shape checks for the whole package, here and in the workers of `shardfn.testing.distributed`."""

import jaxtyping
import pytest
import torch

# Must precede the first import of shardfn. The tower lets an int stand for a float, as Python's type checkers do. The
# rooms of graphs and of the command line have no tensors in their signatures; checking every call there takes minutes.
CHECKED = ["core", "kernels", "collectives", "memory", "optim", "nn", "data", "models", "transforms", "testing"]
jaxtyping.install_import_hook(
    [f"shardfn.{room}" for room in CHECKED], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)
torch.set_num_threads(1)

from shardfn.testing import worker_setup  # noqa: E402  # see above

worker_setup(__file__)

# What these show on two ranks is shown again on others every night: (file, world).
NIGHTLY = {(f"test_{name}.py", 4) for name in ("functional", "mixed_precision", "jit", "primitives", "zero")}
NIGHTLY |= {("test_step_failures.py", 3), ("test_readme.py", 1), ("test_functional.py", 1)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts off to the night what takes long and seldom finds what the day does not."""
    for item in items:
        case = getattr(item, "callspec", None)
        if case is not None and (item.path.name, case.params.get("world")) in NIGHTLY:
            item.add_marker(pytest.mark.nightly)
