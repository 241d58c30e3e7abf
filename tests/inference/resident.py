"""A program whose ranks load a model of transformers from files, and print their resident memory.

`python -m tests.inference.resident make DIRECTORY` writes the files of a small model and of a large one.
`torchrun -m tests.inference.resident KIND DIRECTORY` loads the large one, after the small one, which loads all code.
KIND is "parts", or "whole", where transformers reads the model in each rank. A rank prints a line of JSON with numbers
of bytes.
"""

import json
import pathlib
import sys
from typing import Any

import torch
import transformers

import shardfn as sf
from shardfn.inference import Engine, Sampling, hf_decoder, limits_of
from shardfn.interop import ArchiveWriter, module_from_hf, without_weights

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "vocab_size": 8192}
MORE: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 64}


def make(folder: pathlib.Path, sizes: dict[str, Any]) -> None:
    """Writes a model, a leaf at a time."""
    module = bare(transformers.LlamaConfig(**sizes, **MORE))
    module.config.save_pretrained(folder)
    draw = torch.Generator().manual_seed(0)
    with ArchiveWriter(folder, {name: (x.dtype, tuple(x.shape)) for name, x in module.named_parameters()}) as out:
        for name, x in module.named_parameters():
            out.put(name, torch.randn(x.shape, generator=draw).mul_(0.02))


def bare(config: Any) -> Any:
    """A model without weights."""
    with without_weights():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def served(folder: pathlib.Path, kind: str) -> Engine:
    """An engine that has generated."""
    mesh = sf.make_mesh({"tp": -1})
    if kind == "parts":
        module = bare(transformers.AutoConfig.from_pretrained(folder))
        made, params = hf_decoder(module, tp="tp", params=module_from_hf(module, folder))
    else:
        module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        made, params = hf_decoder(module, tp="tp")
    limits = limits_of(made, running=2, buckets=(4, 16))
    engine = Engine(made, params, mesh=mesh, limits=limits)
    engine.generate([[5, 6, 7], [1, 2, 3, 4, 5]], Sampling(max_tokens=4, seed=3))
    return engine


def status(field: str) -> int:
    """A number of bytes of this process, as the system counts them."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Makes files, or loads them."""
    torch.set_num_threads(1)
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if kind == "make":
        for name, sizes in (("small", SMALL), ("large", LARGE)):
            make(folder / name, sizes)
        return
    served(folder / "small", kind)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status("VmRSS")
    plan = served(folder / "large", kind).memory()
    peak, after = status("VmHWM") - before, status("VmRSS") - before
    print(json.dumps({"peak": peak, "after": after, "before": before, "planned": plan.total, "weights": plan.weights}))


if __name__ == "__main__":
    main()
