"""`partition`: a loss that is written for one device, run on blocks along an axis: parity, collectives, errors."""

import functools
import re

import pytest
import torch

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

TINY = {"vocab_size": 48, "num_layers": 2, "d_model": 24, "num_heads": 6, "max_len": 8}
LLAMA = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
ODD = {"vocab_size": 37, "num_layers": 2, "d_model": 20, "num_heads": 5, "max_len": 7}
CONFIGS = {
    "gpt2": gpt.Config(**TINY),
    "llama": gpt.Config(**{**TINY, "num_heads": 4}, **LLAMA, num_kv_heads=2, d_ff=36),
    "llama_gqa": gpt.Config(**TINY, **LLAMA, num_kv_heads=3, d_ff=35),
    "tied": gpt.Config(**ODD, tie_embeddings=True),
    "odd_gqa": gpt.Config(**{**ODD, "d_model": 24, "num_heads": 6}, **LLAMA, num_kv_heads=2, d_ff=11),
    "one_kv_head": gpt.Config(**ODD, **LLAMA, num_kv_heads=1, d_ff=11),
}


def some(config):
    """Parameters none of which is zero, in float64."""
    generator = torch.Generator().manual_seed(2)
    init = gpt.init(config, sf.key(0))
    return tree_map(lambda x: x.double() + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64), init)


def megatron(config):
    """Megatron's specs: the projections into a block are cut by rows, those out of it by columns."""

    def spec(path):
        name = re.findall(r"\w+", path)[-1]
        if name in ("wq", "wk", "wv", "bq", "bk", "bv", "w_up", "w_gate", "b_up"):
            return P("tp")
        return P(None, "tp") if name in ("wo", "w_down") else P()

    params = gpt.init(config, sf.key(0))
    return tree_unflatten(tree_flatten(params)[1], [spec(p) for p in tree_paths(params, "params")])


def batches(config, num=2, rows=4):
    generator = torch.Generator().manual_seed(1)
    return [
        {"tokens": torch.randint(0, config.vocab_size, (rows, config.max_len + 1), generator=generator)}
        for _ in range(num)
    ]


def vocabulary(config):
    """Megatron's, and the embedding and the output layer cut by the vocabulary."""
    return {**megatron(config), "embed": P("tp")} | ({} if config.tie_embeddings else {"head": P("tp")})


def check(name, mesh, *, stage=0, jitted=False, specs=megatron, wrap=lambda loss: loss, reference=None, **options):
    config = CONFIGS[name]
    loss = functools.partial(gpt.loss, config)
    parted = sf.partition(loss)
    around = wrap(parted)
    with sf.make_mesh(mesh) as on:
        return parted, assert_parity(
            sf.jit(around, backend="graph") if jitted else around,
            optim.sgd(0.5),
            some(config),
            batches(config),
            mesh=on,
            reference=reference or loss,
            specs=specs(config),
            batch=P("dp") if "dp" in mesh else P(),
            zero=Zero(stage=stage, axis="dp", persist_elements=0) if "dp" in mesh else None,
            **options,
        )


@distributed(world=2)
def two_ranks(name, specs, jitted):
    check(name, {"tp": 2}, specs=specs, jitted=jitted)


@distributed(world=3)
def three_ranks(name, specs, jitted):
    check(name, {"tp": 3}, specs=specs, jitted=jitted)


@distributed(world=4)
def four_ranks(name, stage, jitted):
    check(name, {"dp": 2, "tp": 2}, stage=stage, jitted=jitted)


@pytest.mark.parametrize("specs", [megatron, vocabulary])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_two_ranks_compute_what_one_computes(name, specs):
    two_ranks(name, specs, False)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_three_ranks_compute_what_one_computes(name):
    three_ranks(name, vocabulary, False)


@pytest.mark.parametrize("name", ["gpt2", "odd_gqa"])
def test_a_captured_step_computes_the_same(name):
    two_ranks(name, vocabulary, True)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_with_zero_over_the_other_axis(stage, jitted):
    four_ranks("tied", stage, jitted)


@distributed(world=2)
def collectives_of_a_step(name):
    config = CONFIGS[name]
    loss = sf.partition(functools.partial(gpt.loss, config))
    with sf.make_mesh({"tp": 2}) as mesh:
        step = sf.sharded_step(loss, optim.sgd(0.5), mesh=mesh, specs=megatron(config), batch=P())
        state = step.init(gpt.init(config, sf.key(0)))
        state, _ = step(state, batches(config)[0])
        with sf.count_traffic() as traffic:
            step.apply(loss, state, batches(config)[0])
        forward = dict(traffic.by_op)
        with sf.count_traffic() as traffic:
            step(state, batches(config)[0])
    return forward, dict(traffic.by_op), loss.as_text()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_block_has_megatrons_collectives(name):
    forward, both, text = collectives_of_a_step(name)[0]
    config = CONFIGS[name]
    each = 4 * config.max_len * config.d_model * 4  # bytes of rows x tokens x D; a ring sends 2 (n - 1) / n of them
    assert forward == {("psum", ("tp",)): [2 * config.num_layers, 2 * config.num_layers * each]}
    assert both["psum", ("tp",)] == [4 * config.num_layers + 1, 4 * config.num_layers * each + 8]  # and the norm
    assert {op for op, axes in both if axes} == {"psum"}
    assert text.count("psum of") == text.count("pvary of") == 2 * config.num_layers
    assert text.count("models/gpt.py") == 4 * config.num_layers


@distributed(world=2)
def rematerialised():
    """The collectives of a step whose blocks are recomputed."""
    config = CONFIGS["gpt2"]
    loss = functools.partial(gpt.loss, config, wrap=sf.remat)
    parted = sf.partition(loss)
    with sf.make_mesh({"tp": 2}) as mesh:
        how = {"mesh": mesh, "specs": megatron(config), "batch": P(), "reference": loss}
        assert_parity(parted, optim.sgd(0.5), some(config), batches(config), **how)
        assert_parity(sf.jit(parted, backend="graph"), optim.sgd(0.5), some(config), batches(config), **how)
        step = sf.sharded_step(parted, optim.sgd(0.5), mesh=mesh, specs=how["specs"], batch=P())
        with sf.count_traffic() as traffic:
            step(step.init(some(config)), batches(config)[0])
    return dict(traffic.by_op)


def test_blocks_that_are_recomputed_send_their_sums_again():
    # A block's last sum is not needed for its gradients, and is not recomputed.
    both = rematerialised()[0]
    config = CONFIGS["gpt2"]
    assert both["psum", ("tp",)][0] in (5 * config.num_layers + 1, 6 * config.num_layers + 1), both
