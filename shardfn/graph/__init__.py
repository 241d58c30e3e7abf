"""Captured steps: graphs of aten ops and transfers, passes over them, analyses, and back ends that run them."""

# Schedules, orders, and passes over them.
from ._choose import Schedule as Schedule
from ._choose import Choice as Choice, Scored as Scored, check_fits as check_fits, choose as choose
from ._hazards import Memory as Memory, dependences as dependences, legal_order as legal_order
from ._edit import reorder_graph as reorder_graph
from ._reuse import reuse_gathers as reuse_gathers
from ._bucket import bucket as bucket
from ._overlap import overlap_reductions as overlap_reductions
from ._prefetch import prefetch as prefetch
from ._reorder import sink_waits as sink_waits
from ._rematerialise import rematerialise as rematerialise
from ._exact_rows import exact_rows as exact_rows
from ._reorder import free_at_last_use as free_at_last_use
from ._donate import donate as donate

# Values and ops.
from ._values import phases_of as phases_of, storage_of as storage_of, tensors_in as tensors_in, where_of as where_of
from ._op import Op as Op
from ._ops import OPS as OPS, find_op as find_op, op_of as op_of
from ._functional import (
    Body as Body,
    LoopMark as LoopMark,
    bodies_of as bodies_of,
    loop_input as loop_input,
    looped as looped,
    reads as reads,
)
from ._functional import without_writes as without_writes

# Transfers, memory, time.
from ._transfers import Transfer as Transfer, channel_axes as channel_axes, transfers as transfers
from ._transfers import MemoryMove as MemoryMove, memory_of as memory_of, moves as moves
from ._memory import MemoryAnalysis as MemoryAnalysis, memory_analysis as memory_analysis
from ._cost import (
    CostAnalysis as CostAnalysis,
    Estimate as Estimate,
    cost_analysis as cost_analysis,
    estimate as estimate,
    transfer_seconds as transfer_seconds,
)
from ._cost import arithmetic as arithmetic, node_flops as node_flops
from ._device import DEVICES as DEVICES, Cluster as Cluster, Device as Device, Link as Link, cluster as cluster
from ._device import Machine as Machine
from ._calibrate import calibrate as calibrate
from ._calibrate import machine_memory as machine_memory
from ._calibrate import peak_flops as peak_flops

# Reports.
from ._show import as_text as as_text
from ._show import chrome_trace as chrome_trace
from ._show import picture_of_memory as picture_of_memory, picture_of_time as picture_of_time

# Checks: the same collectives on all ranks, and types along mesh axes.
from ._check import (
    Events as Events,
    collective_events as collective_events,
    compare_events as compare_events,
    compare_sequences as compare_sequences,
    prove_no_hang as prove_no_hang,
)
from ._type_check import Leaf as Leaf
from ._type_check import AxisTypeError as AxisTypeError, check_types as check_types, value_types as value_types

# Sharding rules.
from ._forms import (
    PARTIAL as PARTIAL,
    VARYING as VARYING,
    WHOLE as WHOLE,
    Form as Form,
    OpUse as OpUse,
    Owner as Owner,
    Operand as Operand,
    Ranks as Ranks,
    Strategy as Strategy,
    blocks as blocks,
    cut as cut,
    lengths as lengths,
    multiple_of as multiple_of,
    whole as whole,
)
from ._einsum_rules import convert_form as convert_form
from ._shape_rules import whole_look as whole_look

# Back ends.
from ._inductor import Compiled as Compiled, compile_graph as compile_graph, resolve_backend as resolve_backend
