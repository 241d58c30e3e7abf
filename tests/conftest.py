"""Shape checks for the whole package, here and in the workers of `shardfn.testing.distributed`."""

import jaxtyping
import torch

# Must precede the first import of shardfn. The tower lets an int stand for a float, as Python's type checkers do. The
# rooms of graphs and of the command line have no tensors in their signatures; checking every call there takes minutes.
CHECKED = ["core", "collectives", "memory", "optim", "nn", "data", "models", "transforms", "testing"]
jaxtyping.install_import_hook(
    [f"shardfn.{room}" for room in CHECKED], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)
torch.set_num_threads(1)

from shardfn.testing import worker_setup  # noqa: E402  # see above

worker_setup(__file__)
