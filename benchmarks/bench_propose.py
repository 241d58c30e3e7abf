"""CPU seconds of `propose_specs` for a GPT of many layers, as a scan and unrolled, on a mesh without ranks.

python benchmarks/bench_propose.py --layers 96 --ranks 8
"""

import argparse
import functools
import time

import torch

import shardfn as sf
from shardfn.models import gpt


def main() -> None:
    """Measures, and prints a line a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--form", choices=["scan", "unrolled", "both"], default="both")
    args = parser.parse_args()
    mesh = sf.make_mesh({"tp": args.ranks}, abstract=True)
    batch = {"tokens": torch.zeros(4, 17, dtype=torch.int64)}
    for form in ["scan", "unrolled"] if args.form == "both" else [args.form]:
        sizes = {"vocab_size": 1024, "num_layers": args.layers, "d_model": 64, "num_heads": 8, "max_len": 16}
        config = gpt.Config(**sizes, stacked=form == "scan")
        params = gpt.init(config, sf.key(0))
        begun = time.process_time()
        sf.propose_specs(functools.partial(gpt.loss, config), params, mesh, batch)
        print(
            f"{form}: {args.layers} layers, {args.ranks} ranks: {time.process_time() - begun:.1f} s of CPU", flush=True
        )


if __name__ == "__main__":
    main()
