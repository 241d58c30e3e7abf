"""The plan of a step: layout of each leaf, chunks, orders of use, phases of an optimizer."""

from ._checks import (
    check_has_rows as check_has_rows,
    check_has_values as check_has_values,
    check_trains as check_trains,
)
from ._chunks import (
    Chunks as Chunks,
    Node as Node,
    push as push,
    tree_sum as tree_sum,
)
from ._planner import (
    LeafView as LeafView,
    LeafViews as LeafViews,
    Pick as Pick,
    every_leaf as every_leaf,
)
from ._checks import (
    warn_of_narrow_updates as warn_of_narrow_updates,
)
from ._plan import (
    Turn as Turn,
    UseOrder as UseOrder,
)
from ._phases import (
    check_phases as check_phases,
    phase_of as phase_of,
    reduced_for as reduced_for,
)
from ._plan import (
    Plan as Plan,
)
from ._planner import (
    MOVE_THEM as MOVE_THEM,
    OF_A_STATE as OF_A_STATE,
    Planner as Planner,
    Words as Words,
)
from ._plan import (
    ActivationShapes as ActivationShapes,
)
