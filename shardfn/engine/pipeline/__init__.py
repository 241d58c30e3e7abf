"""Pipeline parallelism of losses: stacks, links between stages, state of stages."""

from ._stacks import (
    padded as padded,
    unpadded as unpadded,
)
from ._pipelined import (
    Pipelined as Pipelined,
    PipelinedLayers as PipelinedLayers,
    Place as Place,
    pipelined_in as pipelined_in,
    stage_axes as stage_axes,
    table_of as table_of,
)
from ._pipelined_module import (
    PipelinedFunctions as PipelinedFunctions,
)
from ._pipelined_module import (
    LeafAdapters as LeafAdapters,
    PipelinedModule as PipelinedModule,
)
from ._stage_layout import (
    check_layout as check_layout,
    check_stages as check_stages,
    first_kept as first_kept,
    leaf_uses as leaf_uses,
)
from ._stage_state import (
    PipelineState as PipelineState,
)
from ._staged import (
    Staged as Staged,
)
