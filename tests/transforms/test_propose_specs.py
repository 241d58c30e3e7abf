"""`propose_specs`: no dearer than Megatron's layout, within the limit, and right; its errors."""

import functools
import math
import re
import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import shardfn as sf
from shardfn import P, Sharding, optim
from shardfn.core import tree_flatten, tree_leaves
from shardfn.graph import Cluster, Device, Link
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
def test_it_sends_no_more_than_megatrons_and_equals_one_device(name, layout):
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


def test_leaves_that_fit_stay_whole_and_unused_ones_are_cut():
    found = sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), memory=1e9)
    assert found == {"up": P(), "down": P(), "unused": P("tp")}


@pytest.mark.day("tree-unused")
@pytest.mark.parametrize("kept", ["up", "unused"])
@pytest.mark.parametrize("labels", ["tree", "function"])
def test_states_count_by_the_label_of_their_leaf(labels, kept):
    named = {name: "adam" if name == kept else "plain" for name in MLP}
    rules = {"adam": optim.adamw(0.1), "plain": optim.sgd(0.1)}
    tx = optim.multi_transform(rules, named if labels == "tree" else lambda params: named)
    halves = sum(4 * x.numel() * (3 if name == kept else 1) for name, x in MLP.items()) // 2
    with pytest.raises(ValueError, match="holds at least") as error:
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), optimizer=tx, memory=1000)
    found = re.search(r"at least (\d+)", str(error.value))
    assert found is not None and halves <= int(found[1]) <= halves + 50  # and counts of steps


@pytest.mark.nightly
def test_states_of_the_optimizer_count():
    whole = sum(4 * x.numel() for x in MLP.values())
    assert sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), memory=whole)["up"] == P()
    with pytest.raises(ValueError, match="holds at least"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), optimizer=optim.adamw(0.1), memory=whole)


def test_an_error_for_memory_names_leaves_and_a_limit_that_suffices():
    with pytest.raises(ValueError, match=r"at least 73728.*biggest leaves: params\['up'\], 65536 bytes.*memory=73728"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), memory=1000)


def test_an_axis_that_is_missing():
    with pytest.raises(ValueError, match="must be different axes of the mesh"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), axes="dp")
    with pytest.raises(ValueError, match="must be different axes of the mesh"):
        sf.propose_specs(mlp, MLP, ABSTRACT, torch.ones(8, 64), axes=("tp", "sp"))
    with pytest.raises(ValueError, match="expected the loss without partition, got a partitioned loss"):
        sf.propose_specs(sf.partition(mlp), MLP, ABSTRACT, torch.ones(8, 64))


SQUARE = sf.make_mesh({"tp": 2, "sp": 2}, abstract=True)


def residual(p, x):
    return (x + ((x + p["shift"]) @ p["up"]).relu() @ p["down"]).square().mean()


def uneven(width, inner):
    return {"shift": torch.ones(width), "up": torch.ones(width, inner), "down": torch.ones(inner, width)}


def share_of_largest(params, specs, mesh):
    """The elements of the rank with the most, as a multiple of an even share."""
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


@pytest.mark.nightly
def test_by_default_a_rank_holds_an_even_share_and_a_quarter_more_of_all_ranks_along_all_axes():
    params = uneven(5, 7)
    found = sf.propose_specs(residual, params, SQUARE, torch.ones(8, 5), axes=("tp", "sp"))
    assert share_of_largest(params, found, SQUARE) <= 1.25


@pytest.mark.nightly
@pytest.mark.parametrize(
    "multiple",
    [
        1.25,
        1.5,
        1.75,
        2.0,
    ],
)
def test_a_model_that_fits_if_the_first_axis_cuts_more_is_not_refused(multiple):
    params = uneven(13, 31)
    even = sum(4 * x.numel() for x in params.values()) / 4
    found = sf.propose_specs(residual, params, SQUARE, torch.ones(8, 13), axes=("tp", "sp"), memory=multiple * even)
    assert share_of_largest(params, found, SQUARE) <= multiple


@pytest.mark.nightly
def test_an_error_for_memory_along_two_axes_names_whole_leaves_and_a_limit_that_suffices():
    params = uneven(5, 7)
    how: Any = {"axes": ("tp", "sp")}
    with pytest.raises(ValueError, match=r"are 300 bytes.*params\['up'\], 140 bytes.*memory=\d+") as refused:
        sf.propose_specs(residual, params, SQUARE, torch.ones(8, 5), **how, memory=75)
    enough = int(re.findall(r"memory=(\d+)", str(refused.value))[-1])
    found = sf.propose_specs(residual, params, SQUARE, torch.ones(8, 5), **how, memory=enough)
    assert 4 * share_of_largest(params, found, SQUARE) * 75 / 4 <= enough


# Where work has a price: two products of 2 B D F operations each; the first has a gradient of its weight alone, the
# second of both operands. That makes five such products, and cut leaves halve a rank's work. They send a sum of [B, D]
# in the forward: each of two ranks sends B D elements. Between, the layouts cost the same.
ROWS, WIDTH, INNER = 8, 16, 64
WIDE = {"up": torch.ones(WIDTH, INNER), "down": torch.ones(INNER, WIDTH)}
WHOLE, CUT = {"up": P(), "down": P()}, {"up": P(None, "tp"), "down": P("tp")}
PRODUCT = 2 * ROWS * WIDTH * INNER
RATE = 1e9


def box(wire: float, between: float | None = None, per_node: int = 2, **rates: float) -> Cluster:
    """Devices whose wires carry `wire` bytes a second, and compute at `RATE`."""
    device = Device("box", 1 << 30, rates or {"float32": RATE}, 1e9)
    return Cluster(device, per_node, Link(wire, 0.0), Link(wire if between is None else between, 0.0))


def priced(cluster, dtype=torch.float32, mesh=ABSTRACT):
    params = {name: x.to(dtype) for name, x in WIDE.items()}
    return sf.propose_specs(mlp, params, mesh, torch.ones(ROWS, WIDTH, dtype=dtype), memory=1e9, cluster=cluster)


def even_wire(rate=RATE, itemsize=4):
    """Bytes a second at which cutting costs as much as it saves, by hand."""
    return ROWS * WIDTH * itemsize / (2.5 * PRODUCT / rate)


def test_without_a_cluster_leaves_that_fit_are_whole():
    assert priced(None) == WHOLE


@pytest.mark.nightly
def test_work_costs_its_operations_by_the_rate():
    assert priced(box(0.99 * even_wire())) == WHOLE
    assert priced(box(1.01 * even_wire())) == CUT


@pytest.mark.nightly
def test_the_slow_wire_counts_for_ranks_on_several_nodes():
    fast, slow = 2 * even_wire(), 0.5 * even_wire()
    assert priced(box(fast, slow, per_node=2)) == CUT
    assert priced(box(fast, slow, per_node=1)) == WHOLE
    # Along the inner axis of two nodes ranks are neighbours.
    inner = sf.make_mesh({"dp": 2, "tp": 2}, abstract=True)
    outer = sf.make_mesh({"tp": 2, "dp": 2}, abstract=True)
    assert priced(box(fast, slow, per_node=2), mesh=inner) == CUT
    # Along the outer one two of each node share the wire between nodes, each with a half of it.
    assert priced(box(fast, slow, per_node=2), mesh=outer) == WHOLE


@pytest.mark.nightly
def test_the_rate_is_that_of_the_dtype():
    rates: Any = {"float32": RATE, "bfloat16": 10 * RATE}
    wire = 2 * even_wire()
    assert priced(box(wire, **rates)) == CUT
    assert priced(box(wire, **rates), torch.bfloat16) == WHOLE
    assert priced(box(1.01 * even_wire(10 * RATE, 2), **rates), torch.bfloat16) == CUT
    with pytest.raises(ValueError, match="box does not compute in float64: the dtype must be one of float32, bfloat16"):
        priced(box(wire, **rates), torch.float64)


def test_a_limit_holds_at_any_cost_of_work():
    params = {**WIDE, "up": torch.ones(WIDTH, INNER)}
    limit = sum(4 * x.numel() for x in params.values()) / 2
    found = sf.propose_specs(mlp, params, ABSTRACT, torch.ones(ROWS, WIDTH), memory=limit, cluster=box(1.0))
    assert found == CUT


def test_a_value_that_is_no_cluster():
    with pytest.raises(ValueError, match=r"device 'h10' is not known. *Did you mean 'h100'"):
        priced("h10")
    with (
        sys.modules["shape_checks"].unchecked(),
        pytest.raises(TypeError, match=r"propose_specs\(cluster=Device.*\): a Cluster, as sf.graph"),
    ):
        priced(box(1e9).device)
    with pytest.raises(ValueError, match=r"Cluster\(per_node=0\): a node must have 1 rank or more"):
        box(1e9, per_node=0)


@distributed(world=2)
def test_ranks_with_unequal_rows_get_the_same_specs() -> None:
    mesh = sf.make_mesh({"tp": 2}, device="cpu")
    params = {"up": torch.ones(64, 64), "down": torch.ones(64, 64)}

    def loss(p, x):
        up, down = (p["up"], p["down"]) if len(x) > 8 else (p["up"].t(), p["down"].t())
        return (torch.tanh(x @ up) @ down).square().mean()

    def alone(rows):
        return sf.propose_specs(loss, params, ABSTRACT, torch.ones(rows, 64))

    few, many = alone(1), alone(16)
    assert few != many
    found = sf.propose_specs(loss, params, mesh, torch.ones(1 if mesh.rank else 16, 64))
    assert found == many
    assert sf.propose_specs(loss, params, mesh, torch.ones(1, 64)) == few
    told = r"rank 0: batch\[0\] \(3, 64\) torch.float32\n  - rank 1: batch\[0\]\['x'\] \(3, 64\)"
    with pytest.raises(sf.RankError, match=told):
        x = torch.ones(3, 64)
        sf.propose_specs(loss, params, mesh, {"x": x} if mesh.rank else x)
