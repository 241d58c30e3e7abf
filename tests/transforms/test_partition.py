"""`partition`: a loss that is written for one device, run on blocks along an axis: parity, collectives, errors."""

import functools
import re

import pytest
import torch

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_map_with_path
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

TINY = {"vocab_size": 48, "num_layers": 2, "d_model": 24, "num_heads": 6, "max_len": 8}
LLAMA = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
CONFIGS = {
    "gpt2": gpt.Config(**TINY),
    "llama_gqa": gpt.Config(**TINY, **LLAMA, num_kv_heads=3, d_ff=36),
}


def megatron(config):
    """Megatron's specs: the projections into a block are cut by rows, those out of it by columns."""

    def spec(path, x):
        name = re.findall(r"\w+", str(path[-1]))[-1]
        if name in ("wq", "wk", "wv", "bq", "bk", "bv", "w_up", "w_gate", "b_up"):
            return P("tp")
        return P(None, "tp") if name in ("wo", "w_down") else P()

    return tree_map_with_path(spec, gpt.init(config, sf.key(0)))


def batches(config, num=2, rows=4):
    generator = torch.Generator().manual_seed(1)
    return [
        {"tokens": torch.randint(0, config.vocab_size, (rows, config.max_len + 1), generator=generator)}
        for _ in range(num)
    ]


@distributed(world=2)
def parity_on_two(name, stage, jitted):
    check(CONFIGS[name], {"tp": 2}, stage, jitted)


def check(config, mesh, stage, jitted, specs=None):
    loss = functools.partial(gpt.loss, config)
    parted = sf.partition(loss)
    with sf.make_mesh(mesh) as on:
        assert_parity(
            sf.jit(parted, backend="graph") if jitted else parted,
            optim.adam(1e-2),
            gpt.init(config, sf.key(0)),
            batches(config),
            mesh=on,
            reference=loss,
            specs=specs or megatron(config),
            batch=P("dp") if "dp" in mesh else P(),
            zero=Zero(stage=stage, axis="dp", persist_elements=0) if "dp" in mesh else None,
        )
    return parted


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_two_ranks_with_megatrons_specs_compute_what_one_computes(name, jitted):
    parity_on_two(name, 0, jitted)
