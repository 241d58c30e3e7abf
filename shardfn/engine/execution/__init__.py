"""One call executed: eager, captured, pure; forward and backward, update, metrics."""

from ._arguments import (
    Argument as Argument,
    on_device as on_device,
    refuse_away as refuse_away,
    Donated as Donated,
    taking_the_place_of as taking_the_place_of,
)
from ._function_program import (
    FunctionArgs as FunctionArgs,
    FunctionPrograms as FunctionPrograms,
    MAX_APPLIED as MAX_APPLIED,
)
from ._functional import (
    global_mean as global_mean,
    pure_apply as pure_apply,
    pure_gradients as pure_gradients,
    pure_loss as pure_loss,
    pure_step as pure_step,
    pure_update as pure_update,
)
from ._graphs import (
    Graphs as Graphs,
    ProgramCall as ProgramCall,
    Ready as Ready,
    signature as signature,
)
from ._interface import (
    Interface as Interface,
    REMEDY as REMEDY,
    block_of as block_of,
    entered_argument as entered_argument,
    entered_as_rows as entered_as_rows,
    size_along as size_along,
)
from ._step_parts import (
    check_descends as check_descends,
    check_leaves_descend as check_leaves_descend,
    step_lines as step_lines,
    step_parts as step_parts,
)
from ._step_programs import (
    StepPrograms as StepPrograms,
)
from ._step_run import (
    UpdateArgs as UpdateArgs,
    exact as exact,
)
from ._update import (
    shard_rows as shard_rows,
    rule_of as rule_of,
    wrap as wrap,
)
