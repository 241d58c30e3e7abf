"""`partition(sequence=True)`: values between blocks stay cut; the same bytes, in gathers and scatters, and parity."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 24, "num_heads": 6, "max_len": 8}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
CONFIGS = {
    "gpt2": gpt.Config(vocab_size=48, **SIZES),
    "llama": gpt.Config(vocab_size=37, **SIZES, **LLAMA, num_kv_heads=3, d_ff=35),
    "tied": gpt.Config(vocab_size=37, **SIZES, tie_embeddings=True),
}
CUT = {"wq": 0, "wk": 0, "wv": 0, "bq": 0, "bk": 0, "bv": 0, "w_up": 0, "w_gate": 0, "b_up": 0, "wo": 1, "w_down": 1}


def some(config):
    generator = torch.Generator().manual_seed(2)
    init = gpt.init(config, sf.key(0))
    return tree_map(lambda x: x.double() + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64), init)


def megatron(params):
    """Columns, rows, and the vocabulary."""

    def spec(path):
        name = path.rsplit("['", 1)[-1].removesuffix("']")
        if name in ("embed", "head"):
            return P("tp")
        return P(*[None] * CUT[name], "tp") if name in CUT else P()

    return tree_unflatten(tree_flatten(params)[1], [spec(p) for p in tree_paths(params, "params")])


def check(name, mesh, *, rows=4, jitted=False, **options):
    config = CONFIGS[name]
    params, loss = some(config), functools.partial(gpt.loss, config)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, config.vocab_size, (rows, 9), generator=generator) for _ in range(2)]
    parted, plain = sf.partition(loss, sequence=True), sf.partition(loss)
    batch = P("dp") if "dp" in mesh else P()
    with sf.make_mesh(mesh) as on:
        how = {"mesh": on, "specs": megatron(params), "batch": batch, "reference": loss, **options}
        given = sf.jit(parted, backend="graph") if jitted else parted
        assert_parity(given, optim.sgd(0.5), params, [{"tokens": x} for x in drawn], **how)
        step = sf.sharded_step(plain, optim.sgd(0.5), mesh=on, specs=megatron(params), batch=batch)
        step(step.init(params), {"tokens": drawn[0][: rows // on.shape.get("dp", 1)]})
    return [[(x.name, x.forward + x.backward, tuple(x.shape)) for x in f.programs()[0].sent] for f in (parted, plain)]


@distributed(world=2)
def two_ranks(name, **how):
    return check(name, {"tp": 2}, **how)


@distributed(world=3)
def three_ranks(name, **how):
    return check(name, {"tp": 3}, **how)


@distributed(world=4)
def with_zero(name):
    return check(name, {"dp": 2, "tp": 2}, zero=Zero(stage=3, axis="dp", persist_elements=0))


def large(sent):
    """The names and bytes of messages that are larger than a norm's weight."""
    return [name for name, _, shape in sent if len(shape) > 1], sum(n for _, n, shape in sent if len(shape) > 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_sums_become_scatters_and_gathers_of_the_same_volume(name):
    cut, whole = two_ranks(name)[0]
    names, volume = large(cut)
    pairs = [x for x in names if x in ("psum_scatter", "all_gather")]
    assert pairs == ["psum_scatter", "all_gather"] * 5  # the embedding's sum, two layers of two pairs, the output layer
    assert "psum" not in names[: names.index("all_gather") + 8]
    _, before = large(whole)
    assert volume <= before * 1.1, (volume, before)


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(CONFIGS))
def test_sizes_that_ranks_do_not_divide(name):
    three_ranks(name, rows=1)


@pytest.mark.nightly
@pytest.mark.parametrize("jitted", [False, True])
def test_one_sample_is_cut_along_its_sequence(jitted):
    cut, _ = two_ranks("llama", rows=1, jitted=jitted)[0]
    assert [x for x in large(cut)[0] if x == "all_gather"]


@pytest.mark.nightly
def test_beside_zero():
    with_zero("tied")
