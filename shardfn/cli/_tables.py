"""The tables of the documentation: plans of published configurations."""

import math
from collections.abc import Mapping

from shardfn.core import Zero
from shardfn.graph import cluster
from shardfn.models import gpt

from ._models import PRESETS
from ._plan import plan
from ._report import plan_text, table
from ._states import Setup, model_states
from ._units import gb, gib, seconds

# GB (10^9 bytes) of model states on a GPU, by stage: Rajbhandari et al. 2019, arXiv 1910.02054, figure 1 and section 5.
_ZERO_PAPER: Mapping[int, str] = {0: "120", 1: "31.4", 2: "16.6", 3: "1.88"}
_RANKS = 64
# The largest machine in the last table.
_MOST_RANKS = 1 << 14


def preset_tables() -> str:
    """Returns all tables, as Markdown."""
    return "\n\n".join((_zero_paper(), _trillion_table(), _turing_table(), _preset_table(), _example_plan())) + "\n"


def _make_setup(name: str, mesh: dict[str, int], stage: int, device: str = "a100-80", **more: int | bool) -> Setup:
    zero, config = Zero(stage=stage), PRESETS[name].config
    length = min(config.max_len, 2048)
    return Setup(name, config, mesh, cluster(device), zero, "fp16-adam", seq=length, **more)  # type: ignore[arg-type]


def _zero_paper() -> str:
    rows = []
    for stage, published in _ZERO_PAPER.items():
        s = model_states(_make_setup("zero-7.5b", {"dp": _RANKS}, stage))
        kinds = (gb(s.params), gb(s.grads), gb(s.optimizer))
        rows.append((str(stage), *kinds, f"**{gb(s.total)}**", published))
    head = ("stage", "params", "grads", "optimizer", "sum", "published")
    title = f"### The ZeRO paper's 7.5B on {_RANKS} GPUs: GB (10^9 bytes) of model states each, fp16 Adam\n\n"
    return title + table(head, rows)


def _trillion_table() -> str:
    run = _make_setup("1t", {"dp": 1024}, 3)
    total = model_states(run).total
    row = (f"{gpt.num_params(run.config) / 1e12:.4f}e12", "1024", "3", gb(total), gib(total), "16 GB")
    head = ("parameters", "GPUs", "stage", "GB (10^9)", "GiB (2^30)", "published")
    return "### A trillion parameters: model states of each GPU, fp16 Adam\n\n" + table(head, [row])


def _turing_table() -> str:
    rows = []
    for stage, tp in ((0, 1), (0, 4), (1, 4), (1, 16), (2, 4), (3, 1)):
        dp = 256 // tp
        p = plan(_make_setup("turing-nlg-17b", {"dp": dp, "tp": tp}, stage, "v100-32", batch=512 // dp, remat=True))
        kinds = (gb(p.states.total), gb(p.peak), "yes" if p.fits else "no")
        rows.append((f"dp={dp},tp={tp}", str(stage), *kinds, seconds(p.cost.seconds), f"{p.cost.mfu:.1%}"))
    head = ("mesh", "stage", "model states, GB", "peak, GB", "fits", "step", "MFU")
    title = "### Turing-NLG 17B on 256 V100 of 32 GB, 512 sequences of 1024 tokens a step, remat\n\n"
    tail = (
        "\n\nPublished (Microsoft Research, February 2020): 78 layers, hidden 4256, 28 heads; ZeRO stage 1 with"
        " a tensor parallelism of 4 at a global batch of 512 on 256 GPUs. 16 ranks do not divide 28 heads; blocks here"
        " may be uneven, and the time is that of even ones."
    )
    return title + table(head, rows) + tail


def _preset_table() -> str:
    rows = []
    for name, preset in PRESETS.items():
        states = [gb(model_states(_make_setup(name, {"dp": _RANKS}, stage)).total) for stage in range(4)]
        rows.append((name, f"{gpt.num_params(preset.config) / 1e9:.3f}", *states, _smallest_mesh(name)))
    head = ("model", "10^9 parameters", *(f"stage {s}" for s in range(4)), "GPUs")
    title = (
        f"### Model states on each of {_RANKS} GPUs (GB, fp16 Adam), and how many A100 of 80 GB stage 3 needs\n\n"
        "The last column is the smallest power of two that fits with remat and one sequence a GPU.\n\n"
    )
    return title + table(head, rows)


def _smallest_mesh(name: str) -> str:
    total = model_states(_make_setup(name, {"dp": 1}, 0)).total
    ranks = 1 << math.floor(math.log2(max(1.0, total / cluster("a100-80").device.memory)))
    while ranks < _MOST_RANKS and not plan(_make_setup(name, {"dp": ranks}, 3, remat=True)).fits:
        ranks *= 2
    return str(ranks)


def _example_plan() -> str:
    text = plan_text(plan(_make_setup("1t", {"dp": 1024}, 3, remat=True)))
    command = "shardfn plan --model 1t --mesh dp=1024 --zero 3 --precision fp16-adam --remat"
    return f"### One plan: `{command}`\n\n" + text.replace("\n## ", "\n#### ").replace("# 1t", "#### 1t", 1).rstrip()
