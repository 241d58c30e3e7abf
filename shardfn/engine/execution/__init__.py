"""One call executed: eager, captured, pure; forward and backward, update, metrics."""

from ._argument import (
    Argument as Argument,
    on_device as on_device,
    refuse_away as refuse_away,
    taking_the_place_of as taking_the_place_of,
)
from ._backward import (
    run_forward as run_forward,
)
from ._donated import (
    Donated as Donated,
)
from ._evaluation import (
    evaluation as evaluation,
    has_rows as has_rows,
    one_row as one_row,
    without_values as without_values,
)
from ._function_program import (
    FunctionArgs as FunctionArgs,
    FunctionCall as FunctionCall,
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
    check_pure as check_pure,
    check_scale as check_scale,
    step_lines as step_lines,
    step_parts as step_parts,
)
from ._step_programs import (
    StepCall as StepCall,
    StepPrograms as StepPrograms,
)
from ._step_run import (
    UpdateArgs as UpdateArgs,
)
from ._update import (
    decided_on as decided_on,
    own_rows as own_rows,
    rule_of as rule_of,
    whole as whole,
    wrap as wrap,
)
