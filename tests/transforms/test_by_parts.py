"""`by_parts`: there and back, errors, and the collectives of losses with fused leaves."""

import pytest
import torch

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.testing import assert_parity, distributed


def test_there_and_back():
    params = {"a": torch.randn(3, 6, 2), "b": [torch.randn(7)], "c": torch.ones(2)}
    split, whole = sf.by_parts(params, {r"\['a'\]": (-2, 3), r"b": (0, [4, 2, 1])})
    assert split["a"].shape == (3, 3, 2, 2) and [len(x) for x in split["b"][0]] == [4, 2, 1]
    back = whole(split)
    assert (
        torch.equal(back["a"], params["a"]) and torch.equal(back["b"][0], params["b"][0]) and back["c"] is params["c"]
    )


def test_parts_that_do_not_fit_are_listed():
    params = {"a": torch.ones(4, 6), "b": torch.ones(5)}
    parts = {"a": (2, 2), "b": (0, 2), r"\['b": (0, [2, 2]), "z": (0, 1)}
    with pytest.raises(ValueError) as error:
        sf.by_parts(params, parts)
    for words in (
        "params['a'] of shape (4, 6) has no dim 2",
        "params['b'] of shape (5,): dim 0 is not 2 equal parts; pass the size of each",
        "found by 'b' and by",
        "the parts [2, 2] are 4 long, dim 0 is 5",
        "no leaf's path has 'z'",
    ):
        assert words in str(error.value)


HEADS, GROUPS, SIZE = 6, 3, 4
D = HEADS * SIZE


def attention(q, k, v):
    q, k, v = (x.unflatten(-1, (-1, SIZE)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def equal_parts(p, x):
    """A block with queries, keys and values in one leaf, and a gated MLP with gate and up in one."""
    q, k, v = torch.nn.functional.linear(x, p["qkv"], p["bias"]).chunk(3, -1)
    x = x + attention(q, k, v) @ p["out"]
    gate, up = (x @ p["gate_up"]).split(p["down"].shape[0], -1)
    return (x + (torch.nn.functional.silu(gate) * up) @ p["down"]).square().mean()


def unequal_parts(p, x):
    """Queries of more heads than keys and values."""
    values = x @ p["qkv"]
    q, k, v = values[..., :D], values[..., D : D + GROUPS * SIZE], values[..., D + GROUPS * SIZE :]
    return (x + attention(q, k, v) @ p["out"]).square().mean()


def drawn(**shapes):
    generator = torch.Generator().manual_seed(3)
    return {name: 0.2 * torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def cases(name):
    if name == "equal":
        ffn = 10
        params = drawn(qkv=(3 * D, D), bias=(3 * D,), out=(D, D), gate_up=(D, 2 * ffn), down=(ffn, D))
        parts = {"qkv": (0, 3), "bias": (0, 3), "gate_up": (1, 2)}
        specs = {"qkv": P(None, "tp"), "bias": P(None, "tp"), "out": P("tp"), "gate_up": P(None, None, "tp")}
        return equal_parts, params, parts, {**specs, "down": P("tp")}
    params = drawn(qkv=(D, D + 2 * GROUPS * SIZE), out=(D, D))
    parts = {"qkv": (1, [D, GROUPS * SIZE, GROUPS * SIZE])}
    return unequal_parts, params, parts, {"qkv": (P(None, "tp"),) * 3, "out": P("tp")}


def check(name, mesh, jitted=False, **options):
    inner, params, parts, specs = cases(name)
    params, whole = sf.by_parts(params, parts)

    def loss(p, x):
        return inner(whole(p), x)

    parted = sf.partition(loss)
    x = [torch.randn(4, 5, D, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2)]
    with sf.make_mesh(mesh) as on:
        given = sf.jit(parted, backend="graph") if jitted else parted
        how = {"mesh": on, "specs": specs, "batch": P("dp") if "dp" in mesh else P(), "reference": loss, **options}
        assert_parity(given, optim.sgd(0.1), params, x, **how)
    return [x.name for x in parted.programs()[0].sent]


@distributed(world=2)
def two_ranks(name, jitted=False):
    return check(name, {"tp": 2}, jitted)


@distributed(world=3)
def three_ranks(name):
    return check(name, {"tp": 3})


@distributed(world=4)
def with_zero(name):
    return check(name, {"dp": 2, "tp": 2}, zero=Zero(stage=3, axis="dp", persist_elements=0))


@pytest.mark.nightly
@pytest.mark.parametrize("jitted", [False, True])
def test_equal_parts_are_cut_each_and_send_the_bytes_of_separate_leaves(jitted):
    assert two_ranks("equal", jitted)[0] == ["psum", "pvary", "psum"]  # of the batch no gradient is asked


@pytest.mark.nightly
def test_unequal_parts_are_leaves_each_and_stay_cut_where_they_are_joined():
    assert three_ranks("unequal")[0] == ["psum"]


@pytest.mark.nightly
def test_parts_that_end_inside_a_head_on_some_ranks():
    assert two_ranks("unequal")[0].count("psum") == 1  # three groups on two ranks: keys and values travel
    assert three_ranks("equal")[0] == ["psum", "pvary", "psum"]  # 10 on three ranks: 4, 4, 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["equal", "unequal"])
def test_parts_beside_zero(name):
    with_zero(name)
