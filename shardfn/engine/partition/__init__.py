"""Tensor parallelism of losses that name no axis: capture, plan, run, proposed specs."""

from ._bound import (
    bind as bind,
)
from ._partition_capture import (
    in_section as in_section,
)
from ._partition_prepare import (
    prepare as prepare,
)
from ._partitioned import (
    Partitioned as Partitioned,
)
from ._proposal import (
    HeldBytes as HeldBytes,
)
from ._propose import (
    Proposer as Proposer,
)
from ._proposed import (
    SpecSearch as SpecSearch,
    Unplaced as Unplaced,
)
