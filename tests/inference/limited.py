"""A program that generates under a limit of the system on its memory.

    python limited.py DIRECTORY KIND BYTES [LAYERS [TIMES]]      TIMES as wide

The limit is on private memory beyond that of the program after a first, small model. It prints tokens and log
probabilities, and to stderr the bytes of weights and the memory in use.
"""

import pathlib
import resource
import sys
from typing import Any

import torch

import shardfn as sf
from shardfn.core import Draw, tree_leaves, tree_map
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.models import gpt

LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False, "batch_invariant": True}
LARGE: dict[str, Any] = {
    "num_layers": 13,
    "d_model": 804,
    "num_heads": 6,
    "num_kv_heads": 3,
    "d_ff": 2133,
    "vocab_size": 1003,
}
SMALL: dict[str, Any] = LARGE | {"num_layers": 2, "d_model": 120, "d_ff": 133}


def generate(directory: pathlib.Path, kind: str, sizes: dict[str, Any]) -> tuple[Engine, list[Any]]:
    """Generates with parameters that are drawn when they are used."""
    config = gpt.Config(**LLAMA, **sizes, max_len=48)
    shapes = tree_leaves(sf.eval_shape(lambda: gpt.init(config, sf.key(0))))
    seeds = iter(range(len(shapes)))

    def drawn(x: torch.Tensor) -> Draw:
        seed = next(seeds)

        def draw(at: Any) -> torch.Tensor:
            return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).mul_(0.05)[at]

        return Draw(draw, x.shape, x.dtype, torch.device("cpu"))

    params = tree_map(drawn, sf.eval_shape(lambda: gpt.init(config, sf.key(0))))
    made = decoder(config)
    how = {"weights": "disk", "disk": sf.Disk(str(directory))} if kind == "disk" else {}
    engine = Engine(made, params, limits=limits_of(made, running=2, buckets=(4,)), **how)
    out = engine.generate([[5, 6, 7], [1, 2, 3, 4, 5, 6, 7]], Sampling(max_tokens=4, seed=3))
    return engine, [(c.tokens, c.logprobs) for c in out]


def private() -> int:
    """The bytes on which the limit is."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def main() -> None:
    directory, kind, limit = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    generate(directory / "small", kind, SMALL)
    before = private()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
    layers, times = (*map(int, sys.argv[4:]), *(LARGE["num_layers"], 1)[len(sys.argv) - 4 :])
    wide = {name: LARGE[name] * times for name in ("d_model", "num_heads", "num_kv_heads", "d_ff")}
    engine, out = generate(directory / "large", kind, LARGE | wide | {"num_layers": layers})
    nbytes = sum(x.held.nbytes for x in tree_leaves(engine.core.weights))
    print(nbytes, private() - before, engine.memory(), nbytes / max(limit, 1), file=sys.stderr)
    assert nbytes >= 3 * limit
    print(out)


if __name__ == "__main__":
    main()
