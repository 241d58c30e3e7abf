"""Published runs by name: the settings, and the figures reported by the authors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from shardfn.core import Pace, Zero, did_you_mean
from shardfn.graph import cluster

from ._models import PRESETS
from ._pipeline import bubble
from ._plan import JobPlan, plan
from ._report import plan_json, plan_text, table
from ._states import Setup
from ._units import gb, seconds

# The compared figures, each with its value in a plan.
_FIGURES: Mapping[str, Callable[[JobPlan], str]] = {
    "parameters": lambda p: f"{p.num_params / 1e9:,.1f}e9",
    "devices": lambda p: str(p.setup.world),
    "model states of all, TB": lambda p: f"{16 * p.num_params / 1e12:.2f}",
    "model states of a device, GB": lambda p: gb(p.states.total),
    "layers of a stage": lambda p: str(-(-p.setup.config.num_layers // p.setup.axis("pp"))),
    "bubble, of the busy time": lambda p: f"{bubble(p.setup):.1%}",
    "step": lambda p: seconds(p.cost.seconds),
    "TFLOP/s of a device, remat counted": lambda p: f"{_device_rate(p) / 1e12:.0f}",
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Published run.

    Attributes:
        setup: settings of the run.
        published: values reported by the authors, by the figure's name.
        source: authors and paper, and settings that were chosen here.
    """

    setup: Setup
    published: Mapping[str, str]
    source: str


def recipe(name: str) -> Recipe:
    """Returns the recipe of that name.

    Raises:
        ValueError: the name is unknown; suggests the nearest.

    Example:
        >>> recipe("mt-nlg-530b").setup.world
        2240
    """
    if name not in RECIPES:
        raise ValueError(f"--recipe {name!r} is not known.{did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}.")
    return RECIPES[name]


def recipe_text(name: str) -> str:
    """Returns the plan of a recipe as Markdown, next to the published values.

    Example:
        >>> recipe_text("zero-1t").splitlines()[0]
        '# Recipe zero-1t'
    """
    made, found = plan(recipe(name).setup), recipe(name)
    rows = [(what, say(made), found.published.get(what, "")) for what, say in _FIGURES.items()]
    head = f"# Recipe {name}\n\n{found.source}\n\n"
    return head + table(("figure", "planned", "published"), rows) + "\n\n#" + plan_text(made)


def recipe_json(name: str) -> dict[str, Any]:
    """Returns the plan of a recipe as JSON's types, and the published values."""
    found = recipe(name)
    return plan_json(plan(found.setup)) | {"recipe": name, "published": dict(found.published), "source": found.source}


def _device_rate(p: JobPlan) -> float:
    """Returns the operations per second and device, including a recomputed forward."""
    return p.cost.model_flops * (4 / 3 if p.setup.remat else 1) / p.cost.seconds / p.setup.world


def _make_setup(model: str, mesh: dict[str, int], stage: int, precision: str, batch: int, **more: object) -> Setup:
    once = Zero(stage=stage, pace=Pace(accumulate="once"))
    config, device = PRESETS[model].config, str(more.pop("device", "a100-80"))
    length = min(config.max_len, 2048)
    settings: dict[str, object] = {"batch": batch, "seq": length, "remat": True, **more}
    return Setup(model, config, mesh, cluster(device), once, precision, **settings)  # type: ignore[arg-type]


RECIPES: Mapping[str, Recipe] = {
    "mt-nlg-530b": Recipe(
        _make_setup("mt-nlg-530b", {"pp": 35, "dp": 8, "tp": 8}, 0, "bf16-adam", 240, accumulate=240),
        {
            "parameters": "530e9",
            "devices": "2240",
            "model states of all, TB": "about 10",
            "layers of a stage": "3",
            "step": "60.1 s",
            "TFLOP/s of a device, remat counted": "126",
        },
        "Smith et al. 2022, arXiv 2201.11990: tensor parallelism of 8 within a node, 35 stages, 8 replicas, a batch of"
        " 1920. Microbatches of one sequence, remat and the efficiency of 0.6 are assumed; states of 16 bytes a"
        " parameter, where the paper has up to 20.",
    ),
    "bloom-176b": Recipe(
        _make_setup("bloom-176b", {"pp": 12, "dp": 8, "tp": 4}, 1, "bf16-adam", 256, accumulate=128),
        {
            "parameters": "176.2e9",
            "devices": "384",
            "layers of a stage": "6 (72 with embedding and output layer)",
            "TFLOP/s of a device, remat counted": "150 to 156",
        },
        "BigScience 2022, arXiv 2211.05100: tensor parallelism of 4, 12 stages, 8 replicas, ZeRO stage 1, a batch of"
        " 2048. Microbatches of two sequences, remat and the efficiency of 0.6 are assumed. Gradients are 2 bytes here;"
        " BLOOM summed its in float32.",
    ),
    "turing-nlg-17b": Recipe(
        _make_setup("turing-nlg-17b", {"dp": 64, "tp": 4}, 1, "fp16-adam", 8, device="v100-32"),
        {"parameters": "17e9", "devices": "256", "model states of all, TB": "0.27"},
        "Microsoft Research, February 2020: 78 layers of 4256, 28 heads; ZeRO stage 1 with a tensor parallelism of 4"
        " and a batch of 512 on 256 V100, where Megatron alone needs 16, which does not divide 28 heads.",
    ),
    "zero-1t": Recipe(
        _make_setup("1t", {"dp": 1024}, 3, "fp16-adam", 1),
        {
            "parameters": "1000e9",
            "devices": "1024",
            "model states of all, TB": "16",
            "model states of a device, GB": "16",
        },
        "Rajbhandari et al. 2019, arXiv 1910.02054, section 1: a trillion parameters over 1024 devices at stage 3. The"
        " model is the trillion of Narayanan et al. 2021.",
    ),
}
