"""Shape checks for the whole package, here and in the workers of `shardfn.testing.distributed`."""

import jaxtyping
import torch

# Must precede the first import of shardfn. The tower lets an int stand for a float, as Python's type checkers do.
jaxtyping.install_import_hook("shardfn", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
torch.set_num_threads(1)

from shardfn.testing import worker_setup  # noqa: E402  # see above

worker_setup(__file__)
