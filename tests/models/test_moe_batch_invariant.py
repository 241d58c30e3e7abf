"""Covers exact models with experts: a token's logits have the bits that they have alone; gradients, ranks, refusals."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import models, nn
from shardfn.core import block_slices, tree_flatten, tree_leaves, tree_map, tree_unflatten
from shardfn.inference import Engine, Sampling, decoder
from shardfn.models import gpt
from shardfn.models.moe import Experts
from shardfn.nn import moe
from shardfn.testing import distributed
from tests.models.test_gpt_batch_invariant import BASE, LLAMA, params_of, tokens_of

NIGHTLY = pytest.mark.nightly
GROUPS = functools.partial(moe.sigmoid_groups, groups=2, groups_kept=1, scale=2.5)
AFTER = functools.partial(moe.top_k, softmax="after")
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {**LLAMA, "num_kv_heads": 2, "experts": Experts(num=5, d_ff=37)},
    "qwen3": {**LLAMA, "experts": Experts(num=16, top_k=8, d_ff=9), "stacked": True},
    "gshard": {"tie_embeddings": True, "experts": Experts(num=4, every=2), "stacked": True},
    "deepseek": {**LLAMA, "experts": Experts(num=6, d_ff=12, first=1, shared=True, route=GROUPS, z=1e-3)},
    "gpt-oss": {**LLAMA, "experts": Experts(num=5, top_k=3, route=AFTER), "window": 4, "chunks": 3},
}
NAMES = [pytest.param(x, marks=() if x in ("mixtral", "gshard") else NIGHTLY) for x in SETTINGS]


def config_of(name: str, **changes: Any) -> gpt.Config:
    return gpt.Config(**{**BASE, **SETTINGS[name], "batch_invariant": True, **changes})


@pytest.mark.day("gpt-oss")
@pytest.mark.parametrize("name", SETTINGS)
def test_samples_and_prefixes_have_the_bits_that_they_have_alone(name: str) -> None:
    config, tokens = config_of(name), tokens_of(3, 34)
    params = params_of(config)
    logits = gpt.apply(config, params, tokens)
    torch.testing.assert_close(logits, gpt.apply(dataclasses.replace(config, batch_invariant=False), params, tokens))
    for rows, length in ((slice(1, 2), 34), (slice(0, 1), 1), (slice(2, 3), 7), (slice(0, 2), 32), (slice(1, 3), 33)):
        assert torch.equal(gpt.apply(config, params, tokens[rows, :length]), logits[rows, :length]), (rows, length)


@pytest.mark.day("mixtral", "gshard", "gpt-oss")
@pytest.mark.parametrize("name", SETTINGS)
def test_served_weights_have_the_logits_of_training(name: str) -> None:
    config, tokens_T = config_of(name), tokens_of(1, 9)[0]
    params = params_of(config)
    served, at_T = gpt.pack(config, params), torch.arange(9)
    rows_R = torch.tensor([8, 3])
    found = gpt.decode(
        dataclasses.replace(config, stacked=False),
        served,
        tokens_T,
        at_T,
        rows_R,
        [nn.BatchInvariant()] * config.num_layers,
    )
    assert torch.equal(found.logits, gpt.apply(config, params, tokens_T[None])[0, rows_R])


@NIGHTLY
@pytest.mark.parametrize("name", SETTINGS)
def test_threads_do_not_change_bits(name: str) -> None:
    config = config_of(name, d_model=136, d_ff=1409, vocab_size=1000)
    params, tokens, before = params_of(config), tokens_of(2, 33), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gpt.apply(config, params, tokens))
    torch.set_num_threads(before)
    assert torch.equal(*found)
    alone = [gpt.apply(config, params, tokens[:1, :n])[0, -1] for n in range(1, 34)]
    assert torch.equal(torch.stack(alone), found[0][0])


@pytest.mark.day("gshard")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first jvp
def test_gradients_are_those_of_torch_in_float64(name: str) -> None:
    config, batch = config_of(name), {"tokens": tokens_of(2, 6)}
    plain, params = dataclasses.replace(config, batch_invariant=False), gpt.init(config, sf.key(0))
    wide = tree_map(torch.Tensor.double, params)
    exact_loss, plain_loss = functools.partial(gpt.loss, config), functools.partial(gpt.loss, plain)
    got: Any = torch.func.grad(exact_loss)(params, batch)
    want: Any = torch.func.grad(plain_loss)(wide, batch)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert (a - b).abs().max() <= 2e-6 * (1 + b.abs().max())
    tangents = tree_map(lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)), params)
    pushed: Any = torch.func.jvp(lambda p: exact_loss(p, batch), (params,), (tangents,))[1]
    true: Any = torch.func.jvp(lambda p: plain_loss(p, batch), (wide,), (tree_map(torch.Tensor.double, tangents),))[1]
    # The tangent of a 0-d tensor times a number is float64 in torch.
    torch.testing.assert_close(pushed.float(), true.float(), rtol=1e-4, atol=1e-5)


@NIGHTLY
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_captured_programs_and_remat_have_the_bits_of_eager_code(name: str) -> None:
    config, tokens, mesh = config_of(name), tokens_of(3, 33), sf.make_mesh({"dp": 1})
    params = params_of(config)
    want = gpt.apply(config, params, tokens)
    assert torch.equal(gpt.apply(config, params, tokens, wrap=sf.remat), want)
    compiled = sf.sharded(sf.jit(functools.partial(gpt.apply, config)), mesh=mesh)
    shards = tree_map(lambda x: sf.collectives.shard(x, sf.P(), mesh), params)
    assert torch.equal(compiled(shards, tokens), want)


@pytest.mark.parametrize("name", NAMES)
def test_float64_has_the_same_laws(name: str) -> None:
    config, tokens = config_of(name), tokens_of(3, 12)
    params = tree_map(lambda x: x.double() * (1 + 1e-9), params_of(config))
    plain, logits = dataclasses.replace(config, batch_invariant=False), gpt.apply(config, params, tokens)
    torch.testing.assert_close(logits, gpt.apply(plain, params, tokens), rtol=1e-11, atol=1e-11)
    for rows, length in ((slice(1, 2), 12), (slice(0, 1), 1), (slice(1, 3), 7)):
        assert torch.equal(gpt.apply(config, params, tokens[rows, :length]), logits[rows, :length]), (rows, length)
    batch = {"tokens": tokens[:2, :7]}
    got, want = (torch.func.grad(functools.partial(gpt.loss, x))(params, batch) for x in (config, plain))
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# Ranks.


def own_blocks(config: gpt.Config, params: Any, mesh: sf.Mesh) -> Any:
    """This rank's blocks of whole parameters."""
    leaves, treedef = tree_flatten(params)
    kinds = tree_leaves(gpt.specs(config, tp="tp"), is_leaf=lambda x: isinstance(x, sf.P | sf.Sharding))
    specs = [kind.spec if isinstance(kind, sf.Sharding) else kind for kind in kinds]
    blocks = [block_slices(x.shape, spec, mesh.shape, mesh.coords) for x, spec in zip(leaves, specs, strict=True)]
    return tree_unflatten(treedef, [x[block] for x, block in zip(leaves, blocks, strict=True)])


def with_exchange(name: str, exchange: moe.Exchange, **changes: Any) -> gpt.Config:
    experts = dataclasses.replace(SETTINGS[name]["experts"], exchange=exchange)
    return config_of(name, experts=experts, d_ff=48, per_head=True, chunks=8, **changes)


EXCHANGES: list[tuple[moe.Exchange, bool]] = [
    (moe.AllReduce("tp", in_order=True), False),
    (moe.AllToAll("tp"), True),
    (moe.GatherExperts("tp"), True),
]


@pytest.mark.day("gshard-exchange0-False", "gshard-exchange1-True")
@pytest.mark.parametrize("exchange, sequence", EXCHANGES)
@pytest.mark.parametrize("name", NAMES)
@distributed(world=2)
def test_two_ranks_have_the_bits_of_one(name: str, exchange: moe.Exchange, sequence: bool) -> None:
    torch.set_num_threads(1)
    config, mesh = with_exchange(name, exchange), sf.make_mesh({"tp": 2})
    params, tokens = params_of(config), tokens_of(2, 7)
    want = gpt.apply(with_exchange(name, moe.Local()), params, tokens)
    with sf.collectives.bind_mesh(mesh):
        logits = gpt.apply(config, own_blocks(config, params, mesh), tokens, axis="tp", sequence=sequence)
        assert torch.equal(sf.all_gather_invariant(logits, "tp", dim=-1, size=config.vocab_size), want)


@pytest.mark.day("True")
@pytest.mark.parametrize("exact", [True, False])
@distributed(world=2)
def test_a_step_of_two_ranks_has_the_update_of_one(exact: bool) -> None:
    torch.set_num_threads(1)
    config = with_exchange("mixtral", moe.AllReduce("tp", in_order=True), batch_invariant=exact)
    alone = with_exchange("mixtral", moe.Local(), batch_invariant=exact)
    params, batch = gpt.init(config, sf.key(0)), {"tokens": tokens_of(2, 7)}
    loss = functools.partial(gpt.loss, config, axis="tp")
    mesh, layout = sf.make_mesh({"tp": 2}), gpt.specs(config, tp="tp")
    step = sf.sharded_step(loss, sf.optim.sgd(1.0), mesh=mesh, specs=layout, batch=sf.P())
    state, metrics = step(step.init(params), batch)
    value, grads = sf.value_and_grad(functools.partial(gpt.loss, alone))(params, batch)
    torch.testing.assert_close(metrics["loss"], value)
    for a, p, g in zip(tree_leaves(sf.unshard(state.params)), tree_leaves(params), tree_leaves(grads), strict=True):
        torch.testing.assert_close(a, p - g, rtol=1e-4, atol=1e-5)


# Refusals.


def changed(**changes: Any) -> Experts:
    return Experts(num=4, **changes)


@pytest.mark.parametrize(
    "experts, said",
    [
        (changed(capacity=1.5), r"capacity=1\.5 drops a token's choices for those of other tokens"),
        (changed(route=moe.sinkhorn), "route=sinkhorn takes no batch_invariant=True. Use moe.top_k"),
        (
            changed(exchange=moe.AllReduce("tp")),
            r"adds results in the order of ranks. Use AllReduce\(axis='tp', in_order=True\)",
        ),
        (changed(exchange=moe.AllToAll("ep", 4, "drop")), r'drops choices. Use overflow="error"'),
    ],
)
def test_settings_that_are_not_exact_are_refused(experts: Experts, said: str) -> None:
    with pytest.raises(ValueError, match=f"batch_invariant=True with experts: .*{said}"):
        config_of("mixtral", experts=experts)


@distributed(world=2)
def test_features_of_experts_on_ranks_are_refused() -> None:
    config, mesh = with_exchange("mixtral", moe.Local()), sf.make_mesh({"tp": 2})
    own = own_blocks(config, params_of(config), mesh)
    with (
        sf.collectives.bind_mesh(mesh),
        pytest.raises(ValueError, match=r"Use exchange=moe.AllReduce\('tp', in_order=True\)"),
    ):
        gpt.apply(config, own, tokens_of(1, 3), axis="tp")


def test_narrow_scores_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float16: batch-invariant layers compute float32, or float64"):
        nn.batch_invariant_softmax(torch.zeros(2, 3, dtype=torch.float16))


@pytest.mark.parametrize("exact", [True, False])
def test_experts_that_are_chosen_by_biases_are_served(exact: bool) -> None:
    config = config_of("mixtral", experts=changed(route=GROUPS, bias_rate=0.1), batch_invariant=exact)
    params, tokens = params_of(config), tokens_of(1, 9)
    bias = torch.randn(models.moe.init_state(config)["bias"].shape, generator=torch.Generator().manual_seed(0))
    served = models.moe.add_biases(params, {"bias": bias})
    engine = Engine(decoder(config), served, eager_steps=100)
    [found] = engine.generate([tokens[0].tolist()], Sampling(max_tokens=5, temperature=0.0))
    whole = torch.cat([tokens, torch.tensor([found.tokens])], 1)
    logits = gpt.apply(config, params, whole, bias=bias)[0, 8:-1]
    assert logits.argmax(-1).tolist() == found.tokens
    want = logits.log_softmax(-1).gather(1, whole[0, 9:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), want, rtol=1e-5, atol=1e-5)
    plain = gpt.apply(config, params, whole, bias=torch.zeros_like(bias))[0, 8:-1]
    assert not torch.allclose(plain, logits)  # the biases count
    with pytest.raises(ValueError, match=r"got parameters without them. Pass models.moe.add_biases"):
        gpt.pack(config, params)
    with pytest.raises(ValueError, match=r"specs\['expert_bias'\] has no leaf in params"):
        Engine(decoder(config), params)
    with pytest.raises(ValueError, match="bias has shape"):
        Engine(decoder(config), models.moe.add_biases(params, {"bias": bias[:, :2]}))
