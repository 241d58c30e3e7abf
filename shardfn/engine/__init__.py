"""The engine of a step. Rooms: loss, plan, agreement, transfers, resharding, pipeline, partition, execution, step."""

from .agreement import (
    COMMS as COMMS,
    Spent as Spent,
    comms_of as comms_of,
    losing_no_peer as losing_no_peer,
    losing_no_peer_purely as losing_no_peer_purely,
    trace_steps as trace_steps,
)
from .execution import (
    Donated as Donated,
    Graphs as Graphs,
    Interface as Interface,
    block_of as block_of,
    signature as signature,
    size_along as size_along,
)
from .loss import (
    Accumulated as Accumulated,
    CacheInfo as CacheInfo,
    Jitted as Jitted,
    Loss as Loss,
    MAX_GRAPHS as MAX_GRAPHS,
    Mixed as Mixed,
    NoGradientError as NoGradientError,
    Split as Split,
    Transform as Transform,
    WeightedMean as WeightedMean,
    agree_on_step as agree_on_step,
    check_order as check_order,
    check_specs as check_specs,
    check_state as check_state,
    default_batch as default_batch,
    evaluate as evaluate,
    fold as fold,
    is_abstract as is_abstract,
    is_spec as is_spec,
    num_microbatches as num_microbatches,
    told_before as told_before,
)
from .partition import (
    HeldBytes as HeldBytes,
    Partitioned as Partitioned,
    Proposer as Proposer,
    SpecSearch as SpecSearch,
    Unplaced as Unplaced,
    in_section as in_section,
    prepare as prepare,
)
from .pipeline import (
    LeafAdapters as LeafAdapters,
    PipelineState as PipelineState,
    PipelinedFunctions as PipelinedFunctions,
    PipelinedLayers as PipelinedLayers,
    PipelinedModule as PipelinedModule,
    padded as padded,
    unpadded as unpadded,
)
from .plan import (
    Chunks as Chunks,
    Plan as Plan,
    Planner as Planner,
    tree_sum as tree_sum,
)
from .resharding import (
    reshard as reshard,
)
from .step import (
    BoundCall as BoundCall,
    Lowered as Lowered,
    Objective as Objective,
    Predicted as Predicted,
    Sharded as Sharded,
    ShardedStep as ShardedStep,
    StepProfile as StepProfile,
    build_step as build_step,
    sharded as sharded,
)
from .transfers import (
    StepParts as StepParts,
)
