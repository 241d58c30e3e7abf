"""28 heads on 8 and on 16 ranks, as Turing-NLG has them: layers written with an axis, and a loss for one device."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, nn, optim
from shardfn.core import tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {"vocab_size": 13, "num_layers": 1, "d_model": 56, "num_heads": 28, "max_len": 6, "d_ff": 20}
CUT = {"wq": 0, "wk": 0, "wv": 0, "bq": 0, "bk": 0, "bv": 0, "w_up": 0, "b_up": 0, "embed": 0, "wo": 1, "w_down": 1}


def drawn(config):
    generator = torch.Generator().manual_seed(2)
    params = tree_map(
        lambda x: x.double() + 0.1 * torch.randn(x.shape, generator=generator).double(), gpt.init(config, sf.key(0))
    )
    return params, [{"tokens": torch.randint(0, 13, (2, 7), generator=generator)} for _ in range(2)]


def layers(config, num):
    """The layers of `nn`; ranks without a head go through the same program."""
    params, batches = drawn(config)
    keep = ["'bk'" not in path for path in tree_paths(params)]  # its gradient is zero
    with sf.make_mesh({"tp": num}) as mesh:
        assert_parity(
            functools.partial(gpt.loss, config, axis="tp"),
            optim.sgd(0.1),
            params,
            batches,
            mesh=mesh,
            reference=functools.partial(gpt.loss, config),
            trainable=tree_unflatten(tree_flatten(params)[1], keep),
            specs=gpt.specs(config, tp="tp"),
            batch=P(),
        )


def unmodified(config, num):
    """The loss for one device."""
    params, batches = drawn(config)
    names = [path.rsplit("['", 1)[-1].removesuffix("']") for path in tree_paths(params, "params")]
    specs = [P(*[None] * CUT[x], "tp") if x in CUT else P() for x in names]
    loss = functools.partial(gpt.loss, config)
    parted = sf.partition(loss)
    with sf.make_mesh({"tp": num}) as mesh:
        how = {"mesh": mesh, "specs": tree_unflatten(tree_flatten(params)[1], specs), "batch": P(), "reference": loss}
        assert_parity(parted, optim.sgd(0.1), params, batches, **how)
    return [x.name for x in parted.programs()[0].sent if len(x.shape) > 1]


def both(num):
    torch.set_num_threads(1)
    layers(gpt.Config(**SIZES, per_head=True), num)
    layers(gpt.Config(**SIZES, num_kv_heads=4, per_head=True), num)
    return unmodified(gpt.Config(**SIZES), num)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "body",
    [nn.Ulysses("sp", 6), nn.Chunked(3, "sp", 6)],
    ids=["ulysses", "chunked"],
)
@distributed(world=4)
def test_a_rank_without_a_head_has_its_part_of_a_sequence(body):
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"vocab_size": 7, "num_layers": 1, "d_model": 4, "num_heads": 1, "max_len": 6}
    config = gpt.Config(**sizes, per_head=True, attention=body)
    params, batches = drawn(config)
    rows = {"tokens": batches[0]["tokens"] % 7}
    want = gpt.loss(dataclasses.replace(config, attention=nn.Dense()), params, rows)
    with sf.make_mesh({"tp": 2, "sp": 2}) as mesh:
        loss = functools.partial(gpt.loss, config, axis="tp")
        how = {"mesh": mesh, "specs": gpt.specs(config, tp="tp"), "batch": P(None, "sp")}
        for f in (loss, sf.jit(loss, backend="graph")):
            step = sf.sharded_step(f, optim.sgd(0.1), **how)
            _, metrics = step(step.init(params), gpt.cut_sequences(config, rows, mesh))
            torch.testing.assert_close(metrics["loss"], want, rtol=1e-12, atol=0)


@distributed(world=8, timeout=300)
def eight_ranks():
    return both(8)


@distributed(world=16, timeout=300)
def sixteen_ranks():
    return both(16)


@pytest.mark.nightly
@pytest.mark.parametrize("run", [eight_ranks, sixteen_ranks])
def test_28_heads_equal_one_rank(run):
    sent = run()[0]
    # 28 heads on 8 ranks are seven times 4, and on 16 fourteen times 2; the rest have no head. The projections' blocks
    # of rows end where heads end, or else the values of queries, keys and values travel.
    assert sent.count("psum") >= 2
