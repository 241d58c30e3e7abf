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
from ._captured import (
    CapturedSteps as CapturedSteps,
)
from ._donated import (
    Donated as Donated,
)
from ._eager_calls import (
    EagerSteps as EagerSteps,
)
from ._evaluation import (
    evaluation as evaluation,
    has_rows as has_rows,
    one_row as one_row,
    without_values as without_values,
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
from ._opened import (
    GradientCall as GradientCall,
    Passed as Passed,
    check_passed_state as check_passed_state,
    refuse_own_averages as refuse_own_averages,
)
from ._step_parts import (
    check_pure as check_pure,
    check_scale as check_scale,
    step_lines as step_lines,
    step_parts as step_parts,
)
from ._traced_function import (
    FunctionProgram as FunctionProgram,
    capture_function as capture_function,
    tensors_of as tensors_of,
)
from ._update import (
    decided_on as decided_on,
    own_rows as own_rows,
    rule_of as rule_of,
    whole as whole,
    wrap as wrap,
)
