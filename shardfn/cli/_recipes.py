"""Published runs by name: their settings, the figures of their authors, and whether they fit."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardfn import core
from shardfn.graph import cluster

from ._layout import bubble
from ._models import PRESETS
from ._plan import JobPlan, plan
from ._report import plan_json, plan_text, table
from ._search import LongSettings, peak_bytes
from ._states import Setup
from ._units import gb, of_limit, seconds

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
    """Published training run, for example the hardware and the measured speed.

    Attributes:
        setup: settings of the run.
        published: values reported by the authors, by the figure's name.
        source: authors and paper, and settings that were chosen here.
        claim: published result, in a few words.
        fits: whether the run fits, by its authors.
        tokens: tokens of one sequence, cut over all ranks, where the claim is about the length of a sequence, or 0.
    """

    setup: Setup
    published: Mapping[str, str]
    source: str
    claim: str = ""
    fits: bool = True
    tokens: int = 0

    def plan(self) -> JobPlan:
        """Returns the plan. A long sequence has the tiles and the moves of `plan --longest`."""
        s = self.setup
        made = plan(dataclasses.replace(s, seq=min(s.seq, s.config.max_len)))
        if not self.tokens:
            return made
        states = sum(0 if kind in s.homes else getattr(made.states, kind) for kind in ("params", "optimizer"))
        kept = s.config.num_layers * -(-self.tokens // s.world) * s.config.d_model * s.bytes_of.params
        outside = {memory: dict(kinds) for memory, kinds in made.outside.items()}
        outside.setdefault("host", {})["activations"] = kept
        peak = peak_bytes(s, _LONG, self.tokens)
        memory = {"model states": states, "window, activations, temporaries": peak - states}
        notes = (*made.notes, f"The time is of {made.setup.seq:,} tokens on each rank, without the others' keys.")
        return dataclasses.replace(made, memory=memory, outside=outside, notes=notes)


# Tiles of the loss and the MLP, and the inputs of blocks on the host.
_LONG = LongSettings(256, tiled_mlp=True, offload=True)


def recipe(name: str) -> Recipe:
    """Returns the recipe of that name.

    Raises:
        ValueError: the name is unknown. The message has the nearest.

    Example:
        >>> recipe("mt-nlg-530b").setup.world
        2240
    """
    if name not in RECIPES:
        raise ValueError(
            f"--recipe {name!r} is not known.{core.did_you_mean(name, RECIPES)} Known: {', '.join(RECIPES)}."
        )
    return RECIPES[name]


def recipe_text(name: str) -> str:
    """Returns the plan of a recipe as Markdown, next to the published values.

    Example:
        >>> recipe_text("zero-1t").splitlines()[0]
        '# Recipe zero-1t'
    """
    found = recipe(name)
    made = found.plan()
    rows = [(what, say(made), found.published.get(what, "")) for what, say in _FIGURES.items()]
    head = f"# Recipe {name}\n\n{found.source}\n\n"
    return head + table(("figure", "planned", "published"), rows) + "\n\n#" + plan_text(made)


def recipe_json(name: str) -> dict[str, Any]:
    """Returns the plan of a recipe as JSON's types, and the published values."""
    found = recipe(name)
    return plan_json(found.plan()) | {"recipe": name, "published": dict(found.published), "source": found.source}


def recipes_text() -> str:
    """Returns all recipes as a Markdown table: the bytes of a rank in each memory, and the published results.

    Example:
        >>> recipes_text().splitlines()[0]
        '# Published runs: bytes of a rank, and whether they fit'
    """
    rows = [_make_row(name, found, found.plan()) for name, found in RECIPES.items()]
    names = ("recipe", "ranks", "device", "host", "disk", "fits", "by its authors", "published")
    title = "# Published runs: bytes of a rank, and whether they fit\n\n"
    text = (
        "\n\nA device has 6% less than its memory, as has the host. Each recipe alone: `shardfn plan --recipe NAME`.\n"
    )
    return title + table(names, rows) + text


def recipes_json() -> dict[str, Any]:
    """Returns all recipes as JSON's types."""
    return {"recipes": [recipe_json(name) for name in RECIPES]}


def _make_row(name: str, found: Recipe, made: JobPlan) -> tuple[str, ...]:
    sums = {memory: sum(kinds.values()) for memory, kinds in made.outside.items()}
    others = [of_limit(sums[x], made.room[x]) if x in sums else "" for x in ("host", "disk")]
    fits = ["yes" if x else "no" for x in (made.fits, found.fits)]
    ranks = f"{made.setup.world} x {made.setup.cluster.device.name}"
    return name, ranks, of_limit(made.peak, made.limit), *others, *fits, found.claim


def _device_rate(p: JobPlan) -> float:
    """Returns the operations per second and device, including a recomputed forward."""
    return p.cost.model_flops * (4 / 3 if p.setup.remat else 1) / p.cost.seconds / p.setup.world


def _make_setup(
    model: str,
    mesh: dict[str, int],
    stage: int,
    precision: str,
    batch: int,
    *,
    device: str = "a100-80",
    memory: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Setup:
    kinds = {name: kind for name, kind in memory.items() if name != "activations"}
    disk = core.Disk(".") if "disk" in kinds.values() else None
    zero = core.Zero(stage=stage, pace=core.Pace(accumulate="once"), disk=disk, **kinds)
    config = PRESETS[model].config
    settings: dict[str, Any] = {"seq": min(config.max_len, 2048), "remat": True, **more}
    settings["activations"] = memory.get("activations", "device")
    return Setup(model, config, mesh, cluster(device), zero, precision, batch=batch, **settings)


_OFFLOAD_PAPER = "Ren et al. 2021, arXiv 2101.06840"
_INFINITY_PAPER = "Rajbhandari et al. 2021, arXiv 2104.07857"
_TED_PAPER = "Singh et al. 2023, arXiv 2303.06318: a base of 6.7 billion with 16 experts on 128 V100 of Summit"
_QLORA_PAPER = "Dettmers et al. 2023, arXiv 2305.14314"
_PAGED = {"optimizer": "host"}
_OFFLOAD = {"grads": "host", "optimizer": "host"}
_ALST = {"grads": "host", "optimizer": "host", "activations": "host"}
_HOST = {**_ALST, "params": "host"}
_INFINITY = {"params": "disk", "grads": "disk", "optimizer": "disk", "activations": "host"}

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
        "530 billion at 126 TFLOP/s of a device",
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
        "176 billion at 150 TFLOP/s of a device",
    ),
    "turing-nlg-17b": Recipe(
        _make_setup("turing-nlg-17b", {"dp": 64, "tp": 4}, 1, "fp16-adam", 8, device="v100-32"),
        {"parameters": "17e9", "devices": "256", "model states of all, TB": "0.27"},
        "Microsoft Research, February 2020: 78 layers of 4256, 28 heads; ZeRO stage 1 with a tensor parallelism of 4"
        " and a batch of 512 on 256 V100, where Megatron alone needs 16, which does not divide 28 heads.",
        "17 billion with a tensor parallelism of 4",
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
        "a trillion parameters on 1024 devices",
    ),
    "zero-offload-13b": Recipe(
        _make_setup("zero-offload-13b", {"dp": 1}, 2, "fp16-adam", 2, device="v100-32", memory=_OFFLOAD),
        {"parameters": "13e9", "devices": "1"},
        f"{_OFFLOAD_PAPER}: gradients and the optimizer on the host.",
        "13 billion on one V100 of 32 GB",
    ),
    "zero-offload-13b-off": Recipe(
        _make_setup("zero-offload-13b", {"dp": 1}, 2, "fp16-adam", 2, device="v100-32"),
        {"parameters": "1.4e9 at most"},
        f"{_OFFLOAD_PAPER}: the same run with all states on the device.",
        "without it 1.4 billion at most",
        fits=False,
    ),
    "zero-offload-70b": Recipe(
        _make_setup("zero-offload-70b", {"dp": 2, "tp": 8}, 2, "fp16-adam", 2, device="v100-32", memory=_OFFLOAD),
        {"parameters": "70e9", "devices": "16"},
        f"{_OFFLOAD_PAPER}: with a tensor parallelism of 8 on one DGX-2.",
        "70 billion on one DGX-2 with model parallelism",
    ),
    "zero-infinity-1t": Recipe(
        _make_setup("1t", {"dp": 16}, 3, "fp16-adam", 1, device="v100-32", seq=1024, memory=_INFINITY),
        {"parameters": "1000e9", "devices": "16"},
        f"{_INFINITY_PAPER}: parameters, gradients and the optimizer on disk, inputs of blocks on the host.",
        "a trillion on one DGX-2",
    ),
    "zero-infinity-1t-host": Recipe(
        _make_setup("1t", {"dp": 16}, 3, "fp16-adam", 1, device="v100-32", seq=1024, memory=_HOST),
        {"parameters": "about 100e9"},
        f"{_INFINITY_PAPER}: the same run with all states on the host.",
        "needs the disks: the host holds a tenth",
        fits=False,
    ),
    "zero-infinity-32t": Recipe(
        _make_setup("zero-infinity-32t", {"dp": 32, "tp": 16}, 3, "fp16-adam", 1, device="v100-32", memory=_INFINITY),
        {"parameters": "32e12", "devices": "512"},
        f"{_INFINITY_PAPER}: 32 trillion on 32 DGX-2. Tensor parallelism of 16 in a machine takes the place of tiles of"
        " large leaves.",
        "32 trillion on 512 V100",
    ),
    "deepspeed-moe-1.3b-128": Recipe(
        _make_setup("moe-1.3b-128", {"dp": 128}, 1, "fp16-adam", 4, device="a100-40", ep=128),
        {"parameters": "52e9", "devices": "128", "step": "1.38 s (372 sequences a second)"},
        "Rajbhandari et al. 2022, arXiv 2201.05596, tables 1 and 3: 512 sequences of 2048 tokens a step, an expert on"
        " each of 128 A100. Remat is assumed.",
        "52 billion on 128 A100, 372 sequences a second",
    ),
    "ted-40b": Recipe(
        _make_setup("ted-40b", {"dp": 32, "tp": 4}, 1, "fp16-adam", 1, device="v100-16", ep=16),
        {"parameters": "40e9", "devices": "128"},
        f"{_TED_PAPER}, with a tensor parallelism of 4. One sequence a rank and step is assumed.",
        "40 billion on 128 V100 of 16 GB",
    ),
    "ted-40b-off": Recipe(
        _make_setup("ted-40b", {"dp": 128}, 1, "fp16-adam", 1, device="v100-16", ep=16),
        {"parameters": "a base 4 to 8 times smaller"},
        f"{_TED_PAPER}: the same run without tensor parallelism.",
        "without tensor parallelism a smaller base",
        fits=False,
    ),
    **{
        f"alst-8b-{n}": Recipe(
            _make_setup("llama3-8b", {"dp": n}, 3, "bf16-adam", 1, device="h100", memory=memory),
            {"devices": str(n)},
            "Bekman et al. 2025, arXiv 2506.13996: Llama 8B with tiles of loss and MLP, the inputs of blocks and the"
            f" optimizer on the host{', and the weights' if n == 1 else ''}; one sequence is cut over all devices.",
            f"{text} tokens on {n} H100",
            tokens=tokens,
        )
        for n, tokens, text, memory in (
            (1, 500_000, "500K", _HOST),
            (8, 3_700_000, "3.7M", _ALST),
            (32, 15_000_000, "15M", _ALST),
        )
    },
    "qlora-65b": Recipe(
        _make_setup(
            "llama-65b",
            {"dp": 1},
            0,
            "bf16-adam",
            1,
            device="a6000",
            seq=512,
            lora=64,
            quantization="int4",
            memory=_PAGED,
        ),
        {"parameters": "65e9", "devices": "1"},
        f"{_QLORA_PAPER}: adapters on all matrices in 4 bits, the optimizer on the host. Groups here have 5 bits a"
        " weight, theirs 4.13.",
        "65 billion on one device of 48 GB",
    ),
    "qlora-65b-off": Recipe(
        _make_setup("llama-65b", {"dp": 1}, 0, "bf16-adam", 1, device="a6000", seq=512, lora=64, memory=_PAGED),
        {"devices": "more than 780 GB for all weights"},
        f"{_QLORA_PAPER}: the same run without codes.",
        "without codes more than one device",
        fits=False,
    ),
    "alst-8b-1-off": Recipe(
        _make_setup("llama3-8b", {"dp": 1}, 3, "bf16-adam", 1, device="h100"),
        {"devices": "1"},
        "Bekman et al. 2025, arXiv 2506.13996: the same run with all states on the device.",
        "without the host 32K tokens on 8 H100",
        fits=False,
        tokens=500_000,
    ),
}
