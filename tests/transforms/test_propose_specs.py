"""`propose_specs`: no dearer than Megatron's layout, within the limit, and right; its errors."""

import functools
import math
import re
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import shardfn as sf
from shardfn import P, Sharding, optim
from shardfn.core import tree_flatten, tree_leaves
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

from .test_partition import CONFIGS, batches, megatron, some, vocabulary
from .test_partition_zoo import model
from .test_partition_zoo import specs as zoo_specs


def held(params, specs, num):
    """Bytes that the first rank holds."""
    total = 0
    for x, spec in zip(tree_leaves(params), tree_flatten(specs)[0], strict=True):
        spec = spec.spec if isinstance(spec, Sharding) else spec
        shape = [-(-n // num) if d < len(spec) and spec.dim_axes(d) else n for d, n in enumerate(x.shape)]
        total += torch.Size(shape).numel() * x.element_size()
    return total


def sent_of(loss, params, batch, specs, mesh):
    """Bytes that the plan of a step sends."""
    parted = sf.partition(loss)
    step = sf.sharded_step(parted, optim.sgd(0.5), mesh=mesh, specs=specs, batch=P())
    step(step.init(params), batch)
    return sum(x.times * (x.forward + x.backward) for x in parted.programs()[0].sent)


def compared(loss, params, data, given):
    """Against specs by hand, under the limit that they need; and against one device."""
    num = torch.distributed.get_world_size()
    with sf.make_mesh({"tp": num}) as mesh:
        limit = held(params, given, num)
        found = sf.propose_specs(loss, params, mesh, data[0], memory=limit)
        assert held(params, found, num) <= limit
        assert sent_of(loss, params, data[0], found, mesh) <= sent_of(loss, params, data[0], given, mesh)
        how: Any = {"mesh": mesh, "specs": found, "batch": P(), "reference": loss}
        assert_parity(sf.partition(loss), optim.sgd(0.5), params, data, **how)


def of_gpt(name, layout):
    config = CONFIGS[name]
    compared(functools.partial(gpt.loss, config), some(config), batches(config), layout(config))


@distributed(world=2, timeout=120)
def scanned():
    config = gpt.Config(vocab_size=48, num_layers=3, d_model=24, num_heads=6, max_len=8, stacked=True)
    compared(functools.partial(gpt.loss, config), some(config), batches(config), gpt.specs(config, tp="tp"))


@distributed(world=2, timeout=120)
def decoder(name):
    params, apply = model(name)
    tokens = [torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    compared(functools.partial(loss_of_logits, apply), params, tokens, zoo_specs(params))


def loss_of_logits(apply, params, tokens):
    """In float64 throughout: the loss inside a decoder rounds its logits to float32, and a sum of another order may
    round to another float32."""
    logits = apply(params, input_ids=tokens).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@distributed(world=2, timeout=120)
def two_ranks(name, layout):
    of_gpt(name, layout)


@distributed(world=4, timeout=240)
def four_ranks(name, layout):
    of_gpt(name, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("name, layout", [(n, x) for n in CONFIGS for x in (megatron, vocabulary)])
def test_it_sends_no_more_than_megatrons_and_computes_what_one_device_does(name, layout):
    two_ranks(name, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_four_ranks(name):
    four_ranks(name, megatron)


@pytest.mark.nightly
def test_layers_of_a_scan():
    scanned()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen2", "Mistral"])
def test_unmodified_decoders(name):
    decoder(name)


def mlp(p, x):
    return ((x + 1) @ p["up"]).relu().matmul(p["down"]).square().mean()


MLP = {"up": torch.ones(64, 256), "down": torch.ones(256, 64), "unused": torch.ones(64, 64)}
ABSTRACT = sf.make_mesh({"tp": 2}, abstract=True)


def test_what_fits_whole_stays_whole_and_what_the_loss_does_not_use_is_cut():
    found = sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), memory=1e9)
    assert found == {"up": P(), "down": P(), "unused": P("tp")}


def test_states_of_the_optimizer_count():
    whole = sum(4 * x.numel() for x in MLP.values())
    assert sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), memory=whole)["up"] == P()
    with pytest.raises(ValueError, match="holds at least"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), optimizer=optim.adamw(0.1), memory=whole)


def test_what_does_not_fit_names_leaves_and_what_would():
    with pytest.raises(ValueError, match=r"at least 73728.*biggest leaves: params\['up'\], 65536 bytes.*memory=73728"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), memory=1000)


def test_an_axis_that_is_missing():
    with pytest.raises(ValueError, match="name one of them"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), axes="dp")
    with pytest.raises(ValueError, match="name one of them, or several, each once"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), axes=("tp", "sp"))
    with pytest.raises(ValueError, match="give it the loss itself, without partition"):
        sf.propose_specs(sf.partition(mlp), MLP, ABSTRACT, torch.ones(8, 64))


SQUARE = sf.make_mesh({"tp": 2, "sp": 2}, abstract=True)


def residual(p, x):
    return (x + ((x + p["shift"]) @ p["up"]).relu() @ p["down"]).square().mean()


def uneven(width, inner):
    return {"shift": torch.ones(width), "up": torch.ones(width, inner), "down": torch.ones(inner, width)}


def share_of_largest(params, specs, mesh):
    """What the rank with the most holds, as a multiple of an even share."""
    even = sum(x.numel() for x in params.values()) / mesh.size
    blocks = 0
    for name, x in params.items():
        spec = specs[name]
        names = [spec.dim_axes(d) if d < len(spec) else () for d in range(x.ndim)]
        blocks += math.prod(
            functools.reduce(lambda n, a: -(-n // mesh.shape[a]), axes, n)
            for n, axes in zip(x.shape, names, strict=True)
        )
    return blocks / even


def test_by_default_a_rank_holds_an_even_share_and_a_quarter_more_of_all_ranks_along_all_axes():
    params = uneven(5, 7)
    found = sf.propose_specs(residual, params, SQUARE, torch.ones(8, 5), axes=("tp", "sp"))
    assert share_of_largest(params, found, SQUARE) <= 1.25


@pytest.mark.parametrize("multiple", [1.25, 1.5, 1.75, 2.0])
def test_what_fits_if_the_first_axis_cuts_more_is_not_refused(multiple):
    params = uneven(13, 31)
    even = sum(4 * x.numel() for x in params.values()) / 4
    found = sf.propose_specs(residual, params, SQUARE, torch.ones(8, 13), axes=("tp", "sp"), memory=multiple * even)
    assert share_of_largest(params, found, SQUARE) <= multiple


def test_what_does_not_fit_along_two_axes_names_whole_leaves_and_a_limit_that_suffices():
    params = uneven(5, 7)
    how: Any = {"axes": ("tp", "sp")}
    with pytest.raises(ValueError, match=r"are 300 bytes.*params\['up'\], 140 bytes.*memory=\d+") as refused:
        sf.propose_specs(residual, params, SQUARE, torch.ones(8, 5), **how, memory=75)
    enough = int(re.findall(r"memory=(\d+)", str(refused.value))[-1])
    found = sf.propose_specs(residual, params, SQUARE, torch.ones(8, 5), **how, memory=enough)
    assert 4 * share_of_largest(params, found, SQUARE) * 75 / 4 <= enough
