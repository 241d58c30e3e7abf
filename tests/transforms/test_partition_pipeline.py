"""`partition` and `pipeline`: stages for one device, cut along tp by specs alone, equal one device."""

import dataclasses
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, Sharding, Zero, optim
from shardfn.core import tree_flatten, tree_map, tree_unflatten
from shardfn.models import gpt
from shardfn.nn import DeferredGradients
from shardfn.testing import assert_parity, distributed

NIGHTLY = pytest.mark.nightly
LAYERS, ROWS = 3, 4
TINY: dict[str, Any] = {"vocab_size": 37, "num_layers": LAYERS, "d_model": 24, "num_heads": 6, "max_len": 8}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
CONFIGS = {
    "tied": gpt.Config(**TINY, stacked=True, tie_embeddings=True),
    "llama": gpt.Config(**TINY, **LLAMA, num_kv_heads=3, d_ff=35, stacked=True),
    "odd": gpt.Config(**{**TINY, "d_model": 20, "num_heads": 5}, stacked=True),
}


def some(config, chunks=1):
    """Parameters without zeros, in float64; with several chunks the stack is cut in that many."""
    generator = torch.Generator().manual_seed(2)
    init = gpt.init(config, sf.key(0))
    params = tree_map(lambda x: x.double() + 0.1 * torch.randn(x.shape, generator=generator).double(), init)
    return params if chunks == 1 else {**params, "blocks": stacks(params["blocks"], chunks)}


def stacks(stack, chunks):
    columns = [x.tensor_split(chunks) for x in tree_flatten(stack)[0]]
    return [tree_unflatten(tree_flatten(stack)[1], [c[i] for c in columns]) for i in range(chunks)]


def specs(config, chunks=1, stacked=False):
    """Megatron's, of stages."""
    made = gpt.specs(config, tp="tp", pp="pp")
    blocks = made["blocks"]
    if stacked:
        blocks = tree_map(lambda x: Sharding(x, stacked=True), blocks, is_leaf=lambda x: isinstance(x, P))
    return {**made, "blocks": blocks if chunks == 1 else [blocks] * chunks}


def batches(config, num=2, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    shape = rows, config.max_len + 1
    made = [torch.randint(0, config.vocab_size, shape, generator=generator) for _ in range(num)]
    return [{"tokens": x, "index": torch.arange(rows)} for x in made]


def around(first, block, last, how, **options):
    """The stages, partitioned as one."""
    return sf.partition(sf.pipeline(first, block, last, **options), **how)


def inside(first, block, last, how, **options):
    """The functions, each partitioned."""
    return sf.pipeline(*(sf.partition(f, **how) for f in (first, block, last)), **options)


def check(name, mesh, *, parted=around, m=2, schedule="1f1b", chunks=1, stage=None, jitted=False, remat=False, **more):
    config = dataclasses.replace(CONFIGS[name], num_layers=more.pop("layers", LAYERS if chunks == 1 else 5))
    how = {"sequence": more.pop("sequence", False)}
    whole, functions = gpt.stages(config), gpt.stages(config, wrap=sf.remat if remat else lambda f: f)
    loss = parted(*functions, how, num_microbatches=m, schedule=schedule, num_chunks=chunks)
    with sf.make_mesh(mesh) as on:
        zero = None if stage is None else Zero(stage=stage, axis="dp", persist_elements=0)
        run = assert_parity(
            sf.jit(loss, backend="graph") if jitted else loss,
            optim.sgd(0.5),
            some(config, chunks),
            batches(config, rows=more.pop("rows", ROWS)),
            mesh=on,
            reference=plain(whole, chunks, schedule in ("zb-v", "dualpipe-v")),
            specs=specs(config, chunks, more.pop("stacked", False)),
            batch=P("dp"),
            zero=zero,
            **more,
        )
    return loss, run


def plain(functions, chunks=1, turns=False):
    """The loss of one device, without the pipeline's means; where stages turn, every second stack is reversed."""
    first, block, last = functions

    def loss(params, batch, *key):
        h = first(params, batch, *key)
        found = params["blocks"] if chunks > 1 else [params["blocks"]]
        ways = [slice(None, None, -1 if turns and n % 2 else 1) for n in range(chunks)]
        rows = [
            {k: x[i] for k, x in s.items()} for s, w in zip(found, ways, strict=True) for i in range(len(s["wq"]))[w]
        ]
        for i, p in enumerate(rows):
            h = block(p, h, *(sf.fold_in(k, i) for k in key))
        return last(params, h, batch, *key)

    return loss


@distributed(world=4, timeout=240)
def four_ranks(name, **how):
    check(name, {"pp": 2, "tp": 2}, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("parted", [around, inside])
def test_stages_for_one_device_are_cut_by_specs(parted):
    four_ranks("tied", parted=parted)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, how",
    [
        ("llama", {"stacked": True, "schedule": "zb-h1", "m": 4}),
        pytest.param("odd", {"sequence": True, "remat": True, "parted": around}, marks=NIGHTLY),
        pytest.param("odd", {"parted": inside, "remat": True, "jitted": True}, marks=NIGHTLY),
        *(
            pytest.param("llama", {"schedule": schedule, "chunks": chunks, "m": 4, "parted": parted}, marks=NIGHTLY)
            for schedule, chunks in [("gpipe", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)]
            for parted in (around, inside)
        ),
        *(
            pytest.param("tied", {"jitted": True, "schedule": schedule, "stacked": stacked}, marks=NIGHTLY)
            for schedule, stacked in [("1f1b", False), ("gpipe", True), ("zb-h1", True)]
        ),
    ],
)
def test_schedules_and_transforms(name, how):
    four_ranks(name, **how)


@distributed(world=8, timeout=300)
def eight_ranks(name, **how):
    check(name, {"dp": 2, "pp": 2, "tp": 2}, **how)


@NIGHTLY
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_three_axes(name, stage):
    eight_ranks(name, stage=stage, stacked=stage % 2 == 1, remat=stage == 2, rows=8)


@NIGHTLY
@pytest.mark.parametrize("stage", [0, 3])
def test_three_axes_captured(stage):
    eight_ranks("tied", stage=stage, stacked=True, jitted=True, rows=8)


@NIGHTLY
@pytest.mark.parametrize("parted", [around, inside])
def test_three_axes_by_functions_and_split_backwards(parted):
    eight_ranks("tied", stage=3, parted=parted, schedule="zb-h1", m=4, rows=8)


@distributed(world=6, timeout=240)
def uneven():
    check("odd", {"pp": 2, "tp": 3}, m=1)
    check("odd", {"pp": 3, "tp": 2}, stacked=True, schedule="zb-h1", m=4)


@NIGHTLY
def test_three_ranks_of_an_axis():
    uneven()


DROPPED = gpt.Config(**TINY, stacked=True, dropout=0.3)


@distributed(world=4, timeout=240)
def with_keys():
    for parted in (around, inside):
        parts = gpt.stages(DROPPED, wrap=sf.remat)
        loss = parted(*parts, {}, num_microbatches=2)
        how: dict[str, Any] = {"specs": specs(DROPPED), "batch": P(), "reference": plain(gpt.stages(DROPPED))}
        with sf.make_mesh({"pp": 2, "tp": 2}) as mesh:
            rows = batches(DROPPED)
            assert_parity(loss, optim.sgd(0.5), some(DROPPED), rows, mesh=mesh, key=sf.key(3), **how)
            step = sf.sharded_step(loss, optim.sgd(0.5), mesh=mesh, key=sf.key(3), specs=how["specs"], batch=P())
            state, key = step.init(some(DROPPED)), sf.key(5)
            want = how["reference"](some(DROPPED), rows[0], key)
            torch.testing.assert_close(step.apply(loss, state, rows[0], key), want, rtol=1e-12, atol=0)


@NIGHTLY
def test_dropout_has_the_masks_of_one_device():
    with_keys()


@distributed(world=4)
def collectives():
    """For each rank: its layers, and the sums along tp of a step, around the pipeline and inside."""
    config = CONFIGS["tied"]
    made = tree_map(lambda x: x, specs(config))
    made["embed"] = P()  # Megatron's sums of blocks, and no others
    out = []
    with sf.make_mesh({"pp": 2, "tp": 2}) as mesh:
        for parted in (around, inside):
            loss = parted(*gpt.stages(config), {}, num_microbatches=2)
            step = sf.sharded_step(loss, optim.sgd(0.5), mesh=mesh, specs=made, batch=P())
            state, _ = step(step.init(some(config)), batches(config)[0])
            with sf.count_traffic() as traffic:
                step(state, batches(config)[0])
            out.append(traffic.by_op["psum", ("tp",)])
            own = mesh.coords["pp"]
    return own, out


@pytest.mark.nightly
def test_a_block_has_megatrons_collectives():
    config = CONFIGS["tied"]
    one = ROWS // 2 * config.max_len * config.d_model * 8  # bytes of a microbatch's h, as a ring of two sends them
    for own, counted in collectives():
        layers = (2, 1)[own]
        for calls, sent in counted:
            assert (calls - 2 * 4 * layers, sent - 2 * 4 * layers * one) in [(0, 0), (1, 8)], (own, counted)


@distributed(world=4)
def products_put_off():
    """How many products a step puts off."""
    config, noted = CONFIGS["llama"], []
    note = DeferredGradients.note

    def counted(self, *args):
        noted[-1] += 1
        note(self, *args)

    DeferredGradients.note = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with sf.make_mesh({"pp": 2, "tp": 2}) as mesh:
            for parted in (around, inside):
                noted.append(0)
                loss = parted(*gpt.stages(config), {}, num_microbatches=4, schedule="zb-h1")
                step = sf.sharded_step(loss, optim.sgd(0.5), mesh=mesh, specs=specs(config), batch=P())
                step(step.init(some(config)), batches(config)[0])
            return mesh.coords["pp"], noted
    finally:
        DeferredGradients.note = note


@NIGHTLY
def test_split_backwards_put_off_all_products_with_weights():
    for own, noted in products_put_off():
        each = 7 * (2, 1)[own] + own  # q, k, v, out, gate, up, down of a layer; the output layer
        assert noted == [4 * each] * 2
