"""`partition` along several axes: parity where leaves are cut over one, the other, both in one dim or in two."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 24, "num_heads": 4, "max_len": 8, "vocab_size": 48}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
CONFIGS = {
    "gpt2": gpt.Config(**SIZES),
    "llama": gpt.Config(**SIZES, **LLAMA, num_kv_heads=4, d_ff=36),
    # No size is divisible by two or by three, and one of three ranks has a single head or none.
    "odd": gpt.Config(num_layers=2, d_model=20, num_heads=5, max_len=8, vocab_size=37, d_ff=35),
    "odd_llama": gpt.Config(
        **{**SIZES, "d_model": 20, "num_heads": 5, "vocab_size": 37}, **LLAMA, num_kv_heads=1, d_ff=11
    ),
}
BOTH = ("tp", "sp")
# Which dims of a weight, [out, in], are cut over which axes.
TWO_DIMS = {
    **dict.fromkeys(["wq", "wk", "wv", "w_up", "w_gate"], P("tp", "sp")),
    **dict.fromkeys(["wo", "w_down"], P("sp", "tp")),
    **dict.fromkeys(["bq", "bk", "bv", "b_up"], P("tp")),
}
ONE_DIM = {
    **dict.fromkeys(["wq", "wk", "wv", "w_up", "w_gate", "bq", "bk", "bv", "b_up", "embed"], P(BOTH)),
    **dict.fromkeys(["wo", "w_down"], P(None, BOTH)),
}
MIXED = {
    **dict.fromkeys(["wq", "wk", "wv", "bq", "bk", "bv"], P("tp")),
    "wo": P(None, "tp"),
    **dict.fromkeys(["w_up", "w_gate", "b_up"], P("sp")),
    "w_down": P(None, "sp"),
    "embed": P("tp"),
}
LAYOUTS = {"two dims": TWO_DIMS, "one dim": ONE_DIM, "mixed": MIXED}


def check(name, layout, mesh, *, jitted=False, **options):
    config = CONFIGS[name]
    generator = torch.Generator().manual_seed(2)
    init = gpt.init(config, sf.key(0))
    params = tree_map(lambda x: x.double() + 0.1 * torch.randn(x.shape, generator=generator).double(), init)
    names = [path.rsplit("['", 1)[-1].removesuffix("']") for path in tree_paths(params, "params")]
    specs = tree_unflatten(tree_flatten(params)[1], [LAYOUTS[layout].get(x, P()) for x in names])
    loss = functools.partial(gpt.loss, config)
    parted = sf.partition(loss, axes=BOTH)
    drawn = [{"tokens": torch.randint(0, config.vocab_size, (4, 9), generator=generator)} for _ in range(2)]
    with sf.make_mesh(mesh) as on:
        batch = P("dp") if "dp" in mesh else P()
        how = {"mesh": on, "specs": specs, "batch": batch, "reference": loss, **options}
        assert_parity(sf.jit(parted, backend="graph") if jitted else parted, optim.sgd(0.5), params, drawn, **how)
    return {x.axis: [sent.name for sent in x.sent] for x in parted.programs()}


@distributed(world=4, timeout=240)
def four_ranks(name, layout, **how):
    return check(name, layout, {"tp": 2, "sp": 2}, **how)


@distributed(world=2)
def two_ranks(mesh):
    return check("gpt2", "mixed", mesh)


@distributed(world=8, timeout=240)
def beside_zero(layout):
    zero = Zero(stage=3, axis="dp", persist_elements=0)
    return check("llama", layout, {"dp": 2, "tp": 2, "sp": 2}, zero=zero)


@pytest.mark.nightly
def test_four_ranks_equal_one():
    sent = four_ranks("gpt2", "mixed")[0]
    assert sent["sp"] == ["pvary", "psum"] * 2  # the MLPs of two layers
    assert sent["tp"].count("psum") >= 3  # the embedding, and the attention of two layers


@pytest.mark.nightly
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_layout_equals_one_rank(name, layout):
    four_ranks(name, layout)


@pytest.mark.nightly
def test_a_captured_step_computes_the_same():
    four_ranks("llama", "mixed", jitted=True)


@pytest.mark.nightly
@pytest.mark.parametrize("axis, mesh", [("tp", {"tp": 2, "sp": 1}), ("sp", {"tp": 1, "sp": 2}), ("sp", {"sp": 2})])
def test_an_axis_of_one_rank_is_as_if_it_were_not_named(axis, mesh):
    assert list(two_ranks(mesh)[0]) == [axis]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["two dims", "one dim"])
def test_beside_zero(layout):
    beside_zero(layout)


@distributed(world=6, timeout=240)
def six_ranks(name, layout, mesh, **how):
    return check(name, layout, mesh, **how)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name, layout",
    [*(("odd", x) for x in ("mixed", "two dims", "one dim")), *(("odd_llama", x) for x in LAYOUTS)],
)
def test_sizes_that_no_axis_divides(name, layout):
    four_ranks(name, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["odd", "odd_llama"])
def test_a_captured_step_of_sizes_that_no_axis_divides(name):
    four_ranks(name, "two dims", jitted=True)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"tp": 3, "sp": 2}, {"tp": 2, "sp": 3}], ids=str)
@pytest.mark.parametrize("name, layout", [(n, x) for n in ("odd", "odd_llama") for x in LAYOUTS])
def test_three_ranks_of_an_axis(name, layout, mesh):
    six_ranks(name, layout, mesh)


@distributed(world=4)
def refused(specs, error):
    mesh = sf.make_mesh({"tp": 2, "sp": 2})
    params = {"w": torch.ones(6, 5), "v": torch.ones(6, 5)}

    def loss(p, x):
        return (x @ p["w"] @ p["v"].T).square().mean()

    step = sf.sharded_step(sf.partition(loss, axes=BOTH), optim.sgd(0.1), mesh=mesh, specs=specs, batch=P())
    with pytest.raises(ValueError, match=error):
        step(step.init(params), torch.ones(4, 6))


def test_an_order_of_axes_that_is_not_theirs_is_refused():
    refused({"w": P(("sp", "tp")), "v": P()}, "along several axes")


def test_names_are_checked():
    for axes in ((), ("tp", "tp")):
        with pytest.raises(ValueError, match="name a mesh axis, or several, each once"):
            sf.partition(lambda p: p, axes=axes)


def _sizes_take_turns(mesh: sf.Mesh, axes: tuple[str, ...]) -> None:
    """Programs of sizes that take turns, beyond those that are kept, compute what one rank computes."""
    g = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(5, 7, generator=g).double(), "down": torch.randn(7, 5, generator=g).double()}
    specs = {"up": P("sp" if "sp" in axes else None, "tp"), "down": P("tp", "sp" if "sp" in axes else None)}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ p["up"]) @ p["down"]).square().mean()

    parted = sf.partition(loss, axes=axes)
    parted._programs.size = 2  # in place of as many shapes as 64
    f = sf.sharded(parted, mesh=mesh, specs=specs)
    held = f.init(params)
    for num in (1, 2, 3, 1, 3, 2, 2):
        x = torch.randn(num, 5, generator=g).double()
        torch.testing.assert_close(f(held, x), loss(params, x))
        assert len(parted._programs) <= 2
        (axis,) = {x.axis for x in parted.programs()} - {"sp"}
        assert axis == "tp"
    assert len(parted._programs) == 2


@distributed(world=2)
def test_programs_of_sizes_that_take_turns() -> None:
    with sf.make_mesh({"tp": 2}, device="cpu") as mesh:
        _sizes_take_turns(mesh, ("tp",))


@pytest.mark.nightly
@distributed(world=4, timeout=240)
def test_programs_along_two_axes_of_sizes_that_take_turns() -> None:
    with sf.make_mesh({"tp": 2, "sp": 2}, device="cpu") as mesh:
        _sizes_take_turns(mesh, BOTH)
