"""Steps and sharded functions as users hold them: admission, first state, resume, evaluation."""

from ._bound_call import (
    BoundCall as BoundCall,
)
from ._build import (
    build_step as build_step,
)
from ._lower import (
    Lowered as Lowered,
)
from ._lower import (
    Predicted as Predicted,
    StepProfile as StepProfile,
)
from ._multi_loss import (
    Objective as Objective,
)
from ._sharded import (
    Sharded as Sharded,
    sharded as sharded,
)
from ._training_step import (
    ShardedStep as ShardedStep,
)
