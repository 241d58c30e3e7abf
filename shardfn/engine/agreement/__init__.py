"""Ranks agree on a call before the first transfer. Replicas are compared, and times are measured."""

from ._agreement import (
    Agreement as Agreement,
)
from ._check_replicas import (
    check_replicas as check_replicas,
    compare_first_batch as compare_first_batch,
    compare_first_end as compare_first_end,
    compare_first_step as compare_first_step,
)
from ._collector import (
    catch_up as catch_up,
    collected as collected,
    uncollected as uncollected,
)
from ._agreement import (
    COMMS as COMMS,
    Comms as Comms,
    comms_of as comms_of,
    described as described,
    losing_no_peer as losing_no_peer,
    losing_no_peer_purely as losing_no_peer_purely,
    open_channels as open_channels,
    rounds_of as rounds_of,
)
from ._profiled import (
    Spans as Spans,
    Spent as Spent,
    measured_into as measured_into,
    named_range as named_range,
    trace_steps as trace_steps,
    traced_call as traced_call,
)
