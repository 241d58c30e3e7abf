"""`partition` of losses with scans: one layer is planned, and all equal one device."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, Sharding, Zero, nn, optim
from shardfn.core import tree_map
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

LAYERS = 5
TINY: dict[str, Any] = {"vocab_size": 37, "num_layers": LAYERS, "d_model": 24, "num_heads": 6, "max_len": 7}
CONFIG = gpt.Config(**TINY, stacked=True)


def some(params):
    generator = torch.Generator().manual_seed(2)
    return tree_map(lambda x: x.double() + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64), params)


def batches(config, rows=4):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, config.vocab_size, (rows, config.max_len + 1), generator=generator) for _ in range(2)]
    return [{"tokens": x, "index": torch.arange(rows)} for x in tokens]


def check_gpt(mesh, *, jitted=False, config=CONFIG, wrap=lambda f: f, outer=lambda f: f, key=None, stage=0):
    loss = functools.partial(gpt.loss, config, wrap=wrap)
    parted = sf.partition(outer(loss))
    with sf.make_mesh(mesh) as on:
        assert_parity(
            sf.jit(parted, backend="graph") if jitted else parted,
            optim.sgd(0.5),
            some(gpt.init(config, sf.key(0))),
            batches(config),
            mesh=on,
            reference=loss,
            specs=gpt.specs(config, tp="tp"),
            batch=P("dp") if "dp" in mesh else P(),
            zero=Zero(stage=stage, axis="dp", persist_elements=0) if "dp" in mesh else None,
            key=key,
        )
    return parted


@distributed(world=2)
def plain(jitted):
    (program,) = check_gpt({"tp": 2}, jitted=jitted).programs()
    return [(x.name, x.times) for x in program.sent]


@pytest.mark.nightly
@pytest.mark.parametrize("jitted", [False, True])
def test_one_layer_is_planned_with_megatrons_collectives(jitted):
    sent = plain(jitted)[0]
    assert [x for x in sent if x[1] > 1] == [(name, LAYERS) for name in ("pvary", "psum") * 2]
    assert len(sent) == 4 + 4  # and a sum of embeddings, those of logits, and of the loss


DROPPED = gpt.Config(**TINY, stacked=True, dropout=0.3)
OTHERS: dict[str, dict[str, Any]] = {
    "remat of layers": {"wrap": sf.remat},
    "remat of layers, captured": {"wrap": sf.remat, "jitted": True},
    "remat of all": {"outer": sf.remat},
    "keys and remat": {"config": DROPPED, "wrap": sf.remat, "key": sf.key(3)},
    "keys, captured": {"config": DROPPED, "jitted": True, "key": sf.key(3)},
}


@distributed(world=2)
def with_others(name):
    check_gpt({"tp": 2}, **OTHERS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_recomputed_layers_and_keys(name):
    with_others(name)


@distributed(world=4)
def with_zero(jitted):
    check_gpt({"dp": 2, "tp": 2}, stage=3, jitted=jitted)


@pytest.mark.nightly
@pytest.mark.parametrize("jitted", [False, True])
def test_stacked_leaves_that_zero_has_cut(jitted):
    with_zero(jitted)


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)


PARAMS = {"up": drawn(LAYERS, 6, 9), "down": drawn(LAYERS, 9, 6), "shift": drawn(6), "last": drawn(9)}
STACK = {name: Sharding(spec, stacked=True) for name, spec in (("up", P(None, None, "tp")), ("down", P(None, "tp")))}
SPECS = STACK | {"shift": P(), "last": P("tp")}


def layer(p, h, x):
    """It closes over a leaf, which all layers use."""
    return torch.tanh((h + p["shift"]) @ x["up"]) @ x["down"]


def blocks(p):
    return {"up": p["up"], "down": p["down"]}


def with_ys(p, x):
    """The ys of each layer are cut, and used."""

    def body(h, w):
        y = torch.tanh((h + p["shift"]) @ w["up"])
        return h + y @ w["down"], y

    h, ys = nn.scan(body, x, blocks(p))
    return (h.square().mean() + ys.sin().mean() + (ys[1] @ p["last"]).square().mean()).sum()


def late_gradients(p, x):
    """A carry of several values; one gets a gradient in later layers alone, and one is a number."""

    def body(carry, w):
        h, seen, count = carry
        h = h + layer(p, h, w)
        return (h, seen + h.sin(), count + 1), None

    (h, seen, count), _ = nn.scan(body, (x, torch.zeros_like(x), torch.zeros((), dtype=torch.int64)), blocks(p))
    return (h * seen).square().mean() / count


def nested(p, x):
    """Each layer runs three times before the next one."""

    def body(h, w):
        inner = sf.remat(lambda h, step: (h + layer(p, h, w) * step, (h @ w["up"]).square().mean()))
        h, ys = nn.scan(inner, h, torch.arange(1.0, 4.0, dtype=torch.float64))
        return h, ys.sum()

    h, ys = nn.scan(sf.remat(body), x, blocks(p))
    return h.square().mean() + ys.mean()


def without_x(p, x):
    h, _ = nn.scan(lambda h, _: (h + layer(p, h, {k: v[0] for k, v in blocks(p).items()}), None), x, length=4)
    return h.square().mean()


def stopped(p, x):
    with torch.no_grad():
        scale, _ = nn.scan(lambda h, w: (h + layer(p, h, w), None), x, blocks(p))
    h, _ = nn.scan(lambda h, w: (h + layer(p, h, w).detach() + w["down"].sum(0), None), x, blocks(p))
    return (h * scale).square().mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ys": with_ys,
    "late": late_gradients,
    "nested": nested,
    "length": without_x,
    "stopped": stopped,
}


@distributed(world=[2, 3])
def small_losses(world):
    with sf.make_mesh({"tp": world}) as mesh:
        for loss in LOSSES.values():
            how = {"mesh": mesh, "specs": SPECS, "batch": P(), "reference": loss}
            for around in (lambda f: f, functools.partial(sf.jit, backend="graph")):
                assert_parity(around(sf.partition(loss)), optim.sgd(0.1), PARAMS, [drawn(4, 6)] * 2, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
def test_small_losses_equal_one_device(world):
    small_losses(world=world)


def impure(p, x):
    count = iter(range(100))
    h, _ = nn.scan(lambda h, w: (h + layer(p, h, w) * next(count), None), x, blocks(p))
    return h.square().mean()


def leaking(p, x):
    kept = []

    def body(h, w):
        kept.append(h @ w["up"])
        return h + layer(p, h, w), None

    h, _ = nn.scan(body, x, blocks(p))
    return h.square().mean() + kept[0].mean()


REFUSED = {
    "must run the same operations for all layers": impure,
    "a tensor that the function of a scan has made is used outside of the function": leaking,
}


@distributed(world=2)
def test_scans_that_cannot_be_partitioned_are_an_error():
    mesh = sf.make_mesh({"tp": 2})
    for text, loss in REFUSED.items():
        step = sf.sharded_step(sf.partition(loss), optim.sgd(0.1), mesh=mesh, specs=SPECS, batch=P())
        with pytest.raises((ValueError, RuntimeError), match=text):
            step(step.init(PARAMS), drawn(4, 6))
