"""The command line: `plan` estimates a run's needs, `checkpoint` inspects its files, `env` describes the machine."""

from ._main import main as main
from ._kernels import STEPS as STEPS, decode_step as decode_step, training_step as training_step
from ._kernels import write_tasks as write_tasks
from ._models import PRESETS as PRESETS, Preset as Preset, parse_model as parse_model
from ._states import PRECISIONS as PRECISIONS, Precision as Precision, Setup as Setup, States as States
from ._states import model_states as model_states
from ._layout import Activations as Activations, activation_bytes as activation_bytes
from ._layout import Pipeline as Pipeline, bubble as bubble, pipeline as pipeline
from ._exact import Exact as Exact, exact as exact
from ._time import Cost as Cost, PlannedTransfer as PlannedTransfer, step_cost as step_cost
from ._plan import JobPlan as JobPlan, plan as plan
from ._report import (
    search_json as search_json,
    search_text as search_text,
    plan_json as plan_json,
    plan_text as plan_text,
)
from ._recipes import RECIPES as RECIPES, Recipe as Recipe, recipe as recipe, recipe_text as recipe_text
from ._recipes import recipes_text as recipes_text
from ._report import write_chart as write_chart
from ._search import SearchResult as SearchResult, search as search
from ._search import MLP_WIDTH as MLP_WIDTH, LongestSequence as LongestSequence, LongSettings as LongSettings
from ._search import longest as longest, peak_bytes as peak_bytes
