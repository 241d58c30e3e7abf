"""Pipeline schedules as data: lists of forwards and backwards, their costs, and pictures of them."""

from ._schedule import (
    Action as Action,
    Actions as Actions,
    Kind as Kind,
    StageAction as StageAction,
    PipelineSchedule as PipelineSchedule,
)
from ._schedule import as_text as as_text, loop_stages as loop_stages, parse as parse
from ._schedule import split_backwards as split_backwards, v_stages as v_stages
from ._named import gpipe as gpipe, one_f_one_b as one_f_one_b, zero_bubble_h1 as zero_bubble_h1
from ._named import dual_pipe_v as dual_pipe_v, interleaved as interleaved, zero_bubble_v as zero_bubble_v
from ._named import SCHEDULES as SCHEDULES, named_schedule as named_schedule
from ._timeline import Costs as Costs, ScheduleError as ScheduleError, Span as Span, Timeline as Timeline
from ._timeline import check_complete as check_complete, timeline as timeline
from ._timeline import as_picture as as_picture, as_svg as as_svg
from ._schedule import balance as balance
