"""The step of MT-NLG 530B on 2,240 ranks (tp 8, pp 35, dp 8), lowered: CPU seconds, memory, bytes by link.

    python benchmarks/bench_mt_nlg.py [--stage 17] [--microbatches 240]

Nothing runs, and no rank exists: the program is that of one rank of a stage. Layers are stacked, so that one is
captured, and those of all microbatches are copies. The bytes on each link are compared with formulas, and must be
equal.
"""

import argparse
import dataclasses
import resource
import time
from typing import Any

import torch

import shardfn as sf
from shardfn import P
from shardfn.models import gpt

SIZES = {"pp": 35, "dp": 8, "tp": 8}
CONFIG = gpt.Config(
    vocab_size=51_200, num_layers=105, d_model=20_480, num_heads=128, max_len=2048, d_ff=81_920, stacked=True
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A lowered step, and the cost of lowering it."""

    lowered: Any
    seconds: float
    peak: int


def lowered(stage: int, microbatches: int, sizes: dict[str, int] = SIZES, config: gpt.Config = CONFIG) -> Found:
    """The step of a rank of one stage: bf16, remat, Adam with masters, ZeRO 1 along dp, microbatches of one row."""
    begun = time.process_time()
    mesh = sf.make_mesh(sizes, device="cpu", abstract={"pp": stage})
    stages = gpt.stages(config, axis="tp", wrap=sf.remat)
    loss = sf.mixed_precision(sf.pipeline(*stages, num_microbatches=microbatches), sf.Policy.bf16())
    step = sf.sharded_step(
        sf.jit(loss),
        sf.optim.adamw(1e-4),
        mesh=mesh,
        specs=gpt.specs(config, tp="tp", pp="pp"),
        batch=P("dp"),
        zero=sf.Zero(stage=1, axis="dp", pace=sf.Pace(accumulate="once")),
    )
    params = sf.eval_shape(lambda: gpt.init(config, sf.key(0)))
    tokens = torch.empty(microbatches, config.max_len + 1, dtype=torch.int64, device="meta")
    made = step.lower(params, {"tokens": tokens})
    return Found(made, time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def by_hand(config: gpt.Config, sizes: dict[str, int], microbatches: int) -> dict[tuple[str, str], int]:
    """Bytes that a rank of a middle stage sends by link, but for scalars: bf16 activations, float32 gradients."""
    h = config.max_len * config.d_model * 2
    positions = config.max_len * 8
    layers = config.num_layers // sizes["pp"]
    whole = dataclasses.replace(config, num_layers=layers)
    specs = gpt.specs(whole, tp="tp", pp="pp")
    params = sf.eval_shape(lambda: gpt.init(whole, sf.key(0)))
    kept, shared = 0, 0
    for x, spec in zip(
        sf.core.tree_leaves(params),
        sf.core.broadcast_prefix(specs, params, _is_spec, names=("specs", "params")),
        strict=True,
    ):
        own = x.numel() // (sizes["tp"] if "tp" in spec.axes else 1)
        kept += own
        shared += 0 if "pp" in spec.axes else own
    tp, dp, pp = (sizes[a] for a in ("tp", "dp", "pp"))
    return {
        # Two sums in a layer's forward, one of them again in its recomputation, two in its backward.
        ("psum", "tp"): 5 * layers * microbatches * (2 * h * (tp - 1) // tp),
        # h to the next stage, with the positions of its tokens; its gradient to the one before.
        ("send", "pp"): microbatches * (2 * h + positions),
        ("psum_scatter", "dp"): kept * 4 * (dp - 1) // dp,
        ("all_gather", "dp"): kept * 2 * (dp - 1) // dp,
        # Gradients of the leaves that all stages have; each rank along dp has a share of them.
        ("psum", "pp"): 2 * (shared // dp * 4) * (pp - 1) // pp,
    }


def compared(found: Found, expected: dict[tuple[str, str], int]) -> list[str]:
    """Differences from the formulas; scalars (the loss, norms, flags) are at most 64 bytes a sum."""
    traffic = found.lowered.cost_analysis().transfers
    out = []
    for key in {*traffic, *expected}:
        calls, sent = traffic.get(key, (0, 0))
        scalars = 64 * calls if key[0] == "psum" and key != ("psum", "tp") else 0
        if not expected.get(key, 0) <= sent <= expected.get(key, 0) + scalars:
            out.append(f"{key}: {sent:,} bytes, by hand {expected.get(key, 0):,}")
    return out


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def main() -> None:
    """Prints the results, as Markdown."""
    asked = argparse.ArgumentParser(description="The step of MT-NLG 530B on 2,240 ranks, lowered.")
    asked.add_argument("--stage", type=int, default=17)
    asked.add_argument("--microbatches", type=int, default=240)
    told = asked.parse_args()
    found = lowered(told.stage, told.microbatches)
    wrong = compared(found, by_hand(CONFIG, SIZES, told.microbatches))
    ops = len(found.lowered.gm.graph.nodes)
    print(f"stage {told.stage} of 35, {told.microbatches} microbatches: {ops:,} ops")
    print("\n| CPU seconds | peak of this process, GiB |\n|---:|---:|")
    print(f"| {found.seconds:.1f} | {found.peak / 2**30:.2f} |")
    print(f"\n{found.lowered.cost_analysis()}\n\n{found.lowered.memory_analysis()}")
    print("\nbytes by link are those of the formulas" if not wrong else "\n".join(["\nDIFFER:", *wrong]))


if __name__ == "__main__":
    main()
