"""`partition`: a loss that is written for one device, run on blocks along an axis: parity, collectives, errors."""

import functools
import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P, Zero, optim
from shardfn.core import tree_flatten, tree_map, tree_paths, tree_unflatten
from shardfn.models import gpt
from shardfn.testing import assert_parity, distributed

TINY: dict[str, Any] = {"vocab_size": 48, "num_layers": 2, "d_model": 24, "num_heads": 6, "max_len": 8}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
ODD: dict[str, Any] = {"vocab_size": 37, "num_layers": 2, "d_model": 20, "num_heads": 5, "max_len": 7}
CONFIGS = {
    "gpt2": gpt.Config(**TINY),
    "llama": gpt.Config(**{**TINY, "num_heads": 4}, **LLAMA, num_kv_heads=2, d_ff=36),
    "llama_gqa": gpt.Config(**TINY, **LLAMA, num_kv_heads=3, d_ff=35),
    "tied": gpt.Config(**ODD, tie_embeddings=True),
    "odd_gqa": gpt.Config(**{**ODD, "d_model": 24, "num_heads": 6}, **LLAMA, num_kv_heads=2, d_ff=11),
    "one_kv_head": gpt.Config(**ODD, **LLAMA, num_kv_heads=1, d_ff=11),
}


def some(config):
    """Parameters without zeros, in float64."""
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


DAILY = [("gpt2", megatron), ("llama_gqa", vocabulary), ("tied", vocabulary), ("one_kv_head", megatron)]
EVERY = [(name, specs) for name in CONFIGS for specs in (megatron, vocabulary)]


@pytest.mark.day("gpt2-megatron")
@pytest.mark.parametrize(
    "name, specs", [x if x in DAILY else pytest.param(*x, marks=pytest.mark.nightly) for x in EVERY]
)
def test_two_ranks_equal_one(name, specs):
    two_ranks(name, specs, False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(CONFIGS))
def test_three_ranks_equal_one(name):
    three_ranks(name, vocabulary, False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "odd_gqa"])
def test_a_captured_step_computes_the_same(name):
    two_ranks(name, vocabulary, True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage, jitted",
    [(3, False), *(pytest.param(*x, marks=pytest.mark.nightly) for x in [(0, False), (0, True), (3, True)])],
)
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


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def test_a_block_has_megatrons_collectives(name):
    forward, both, text = collectives_of_a_step(name)[0]
    config = CONFIGS[name]
    each = 4 * config.max_len * config.d_model * 4  # bytes of rows x tokens x D; a ring sends 2 (n - 1) / n of them
    assert forward == {("psum", ("tp",)): [2 * config.num_layers, 2 * config.num_layers * each]}
    assert both["psum", ("tp",)] == [4 * config.num_layers + 1, 4 * config.num_layers * each + 8]  # and the norm
    assert {op for op, axes in both if axes} == {"psum"}
    assert text.count("psum of") == text.count("pvary of") == 2 * config.num_layers
    assert text.count("models/_gpt_block.py") == 4 * config.num_layers


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


@pytest.mark.nightly
def test_blocks_that_are_recomputed_send_their_sums_again():
    # A block's last sum is not needed for its gradients, and is not recomputed.
    both = rematerialised()[0]
    config = CONFIGS["gpt2"]
    assert both["psum", ("tp",)][0] in (5 * config.num_layers + 1, 6 * config.num_layers + 1), both


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return 2 * grads[0]


def hooked(w, x):
    w = w * 1
    w.register_hook(lambda g: 2 * g)
    return (x @ w).sum()


def written(w, x):
    w.detach()[0].mul_(2)
    return (x @ w).sum()


def checkpointed(w, x):
    return checkpoint(lambda w: (x @ w).sum(), w, use_reentrant=False)


REFUSED = {
    "functions with a backward": (lambda w, x: (x @ Doubled.apply(w)).sum(), "Doubled; write it in operations"),
    "hooks": (hooked, "Tensor.register_hook, is not in the graph"),
    "writes to a view": (written, r"test_partition.py:\d+ in written: aten.mul_.*an argument of the loss"),
    "recomputation of torch": (checkpointed, r"test_partition.py:\d+.*use sf.remat"),
    "collectives": (lambda w, x: sf.psum((x @ w).sum(), "tp"), "a collective of shardfn; leave"),
    "draws": (lambda w, x: torch.nn.functional.dropout(x @ w).sum(), "draw by a key"),
    "values": (lambda w, x: (x @ w).sum() if w.sum() > 0 else w.sum(), "needs the value of a tensor"),
}


@distributed(world=2)
def refusals():
    told = {}
    with sf.make_mesh({"tp": 2}) as mesh:
        for name, (loss, _) in REFUSED.items():
            step = sf.sharded_step(sf.partition(loss), optim.sgd(0.1), mesh=mesh, specs=P(None, "tp"), batch=P())
            try:
                step(step.init(torch.ones(4, 6)), torch.ones(2, 4))
            except (ValueError, RuntimeError) as error:
                told[name] = str(error)
    return told


@pytest.mark.nightly
def test_operations_that_a_graph_of_the_forward_cannot_hold_are_refused():
    told = refusals()[0]
    for name, (_, message) in REFUSED.items():
        assert re.search(message, told.get(name, "nothing")), (name, told.get(name))


def stopped(w, x):
    """Parts that get no gradient, a write to a fresh value, and a constant that is closed over."""
    y = (x @ w).sin_() + 2
    with torch.no_grad():
        top = y.amax(-1, keepdim=True)
        scale = (y * y).mean()
    y = y / (y.detach().sum(-1, keepdim=True) + top) + OFFSET
    return (y * scale.log()).square().sum(-1).mean() + w.detach().sum() * w.flip(0).square().sum()


OFFSET = torch.linspace(0, 1, 7, dtype=torch.float64)


@distributed(world=2)
def gradients_that_stop():
    w = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss = sf.partition(stopped)
    with sf.make_mesh({"tp": 2}) as mesh:
        for spec in (P(None, "tp"), P("tp"), P()):
            how = {"mesh": mesh, "specs": spec, "batch": P(), "reference": stopped}
            assert_parity(loss, optim.sgd(0.01), w, [x, x], **how)
            assert_parity(sf.jit(loss, backend="graph"), optim.sgd(0.01), w, [x, x], **how)
    return loss.as_text()


@pytest.mark.nightly
def test_detach_stops_gradients_and_ops_without_a_rule_are_whole():
    text = gradients_that_stop()[0]
    # Since flip has no rule, w is joined; detach, which comes first, then takes the whole too.
    assert re.search(r"all_gather\w* of \[5, 7\].*aten.detach.default takes it whole", text), text


@distributed(world=2)
def captured_microbatches():
    config = CONFIGS["gpt2"]
    loss = functools.partial(gpt.loss, config)
    around = sf.jit(sf.partition(sf.accumulate(loss, 2)), backend="graph")
    with sf.make_mesh({"tp": 2}) as mesh:
        how = {"mesh": mesh, "specs": megatron(config), "batch": P(), "reference": loss}
        assert_parity(around, optim.sgd(0.5), some(config), batches(config), **how)


@pytest.mark.nightly
def test_captured_microbatches_compute_the_same():
    captured_microbatches()


@distributed(world=2)
def with_other_transforms():
    """Microbatches, keys and dropout, precision."""
    config = gpt.Config(**{**TINY, "dropout": 0.3})
    loss = functools.partial(gpt.loss, config)
    parted = sf.partition(loss)
    rows = [{**b, "index": torch.arange(4)} for b in batches(config)]
    with sf.make_mesh({"tp": 2}) as mesh:
        how = {"mesh": mesh, "specs": megatron(config), "batch": P(), "reference": loss, "key": sf.key(3)}
        assert_parity(sf.accumulate(parted, 2), optim.sgd(0.5), some(config), rows, **how)
        step = sf.sharded_step(parted, optim.sgd(0.5), **{k: v for k, v in how.items() if k != "reference"})
        state = step.init(some(config))
        key = sf.key(5)
        value = step.apply(parted, state, rows[0], key)
        torch.testing.assert_close(value, loss(some(config), rows[0], key), rtol=1e-12, atol=0)
        grads = torch.func.grad(step.loss)(state.params, rows[0], key)
        want = torch.func.grad(loss)(some(config), rows[0], key)
        torch.testing.assert_close(grads["embed"].full_tensor(), want["embed"], rtol=1e-10, atol=1e-12)
        own = grads["blocks"][0]["wq"]
        torch.testing.assert_close(own.full_tensor(), want["blocks"][0]["wq"], rtol=1e-10, atol=1e-12)


@pytest.mark.nightly
def test_other_transforms_nest_inside_and_outside():
    with_other_transforms()


@pytest.mark.parametrize("wrong", [lambda f: sf.remat(sf.partition(f)), lambda f: sf.partition(sf.partition(f))])
def test_orders_that_mean_nothing(wrong):
    with pytest.raises(ValueError, match="partition"):
        wrong(lambda w, x: (w * x).sum())


@pytest.mark.parametrize("batch", [None, P("tp")])
def test_a_batch_that_is_cut_along_the_axis_is_refused(batch):
    mesh = sf.make_mesh({"tp": 2}, abstract=True)
    with pytest.raises(ValueError, match="the batch is cut along 'tp'"):
        sf.sharded_step(sf.partition(lambda w, x: (w * x).sum()), optim.sgd(0.1), mesh=mesh, batch=batch)
