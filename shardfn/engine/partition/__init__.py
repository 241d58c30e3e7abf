"""Tensor parallelism of losses that name no axis: capture, plan, run, proposed specs."""

from ._bind import (
    bind as bind,
)
from ._capture import (
    in_section as in_section,
)
from ._capture import (
    prepare as prepare,
)
from ._partitioned import (
    Partitioned as Partitioned,
)
from ._spec_search import (
    HeldBytes as HeldBytes,
)
from ._spec_search import (
    Proposer as Proposer,
)
from ._propose_specs import (
    SpecSearch as SpecSearch,
    Unplaced as Unplaced,
)
