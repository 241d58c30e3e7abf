"""CPU seconds of `propose_specs` for a GPT of many layers on a mesh without ranks, and of lowering a partitioned step.

python benchmarks/bench_propose.py --layers 96 --ranks 8 [--size 175b] [--form scan]

The sizes are a width of 64, or those of GPT-3 175B; tensors have no data, and the time hardly depends on them.
"""

import argparse
import functools
import time
from typing import Any

import torch

import shardfn as sf
from shardfn.models import gpt

SIZES: dict[str, dict[str, Any]] = {
    "small": {"vocab_size": 1024, "d_model": 64, "num_heads": 8, "max_len": 16},
    "175b": {"vocab_size": 50_304, "d_model": 12_288, "num_heads": 96, "max_len": 2048},
}


def measured(config: gpt.Config, ranks: int) -> tuple[float, float, Any]:
    """CPU seconds of proposing specs and of lowering the step with them, and the lowered step."""
    mesh = sf.make_mesh({"tp": ranks}, device="cpu", abstract=True)
    batch = {"tokens": torch.empty(4, config.max_len + 1, dtype=torch.int64, device="meta")}
    params, loss = sf.eval_shape(lambda: gpt.init(config, sf.key(0))), functools.partial(gpt.loss, config)
    begun = time.process_time()
    specs = sf.propose_specs(loss, params, mesh, batch)
    proposed = time.process_time()
    step = sf.sharded_step(
        sf.jit(sf.partition(loss, axes="tp")), sf.optim.adamw(1e-4), mesh=mesh, specs=specs, batch=sf.P()
    )
    lowered = step.lower(params, batch)
    return proposed - begun, time.process_time() - proposed, lowered


def main() -> None:
    """Measures, and prints a line a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--form", choices=["scan", "unrolled", "both"], default="both")
    args = parser.parse_args()
    for form in ["scan", "unrolled"] if args.form == "both" else [args.form]:
        config = gpt.Config(**SIZES[args.size], num_layers=args.layers, stacked=form == "scan")
        proposed, lowering, lowered = measured(config, args.ranks)
        sent = ", ".join(f"{k[0]} {n} calls {b:,} bytes" for k, (n, b) in lowered.cost_analysis().transfers.items())
        print(
            f"{form}: {args.layers} layers, {args.ranks} ranks: proposed in {proposed:.1f} s of CPU, lowered in"
            f" {lowering:.1f} s, {len(lowered.gm.graph.nodes):,} ops; {sent}",
            flush=True,
        )


if __name__ == "__main__":
    main()
