"""Covers `models/seq2seq.py`: encoder-decoder models under ZeRO, tensor and expert parallelism, `sf.jit`; padding."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import nn, optim
from shardfn.core import tree_map
from shardfn.models import gpt, seq2seq
from shardfn.models.moe import Experts
from shardfn.models.seq2seq import Config, KeyCache
from shardfn.nn import moe
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {"vocab_size": 13, "d_model": 12, "num_heads": 4, "num_layers": 2, "d_head": 5, "d_ff": 10}
EXPERTS = Experts(num=4, top_k=2, d_ff=6, every=2, balance=0.1)
BART: dict[str, Any] = {**SIZES, "d_head": 3, "num_heads": 4, "embedding_norm": True, "max_len": 9, "mlp": "gelu_erf"}
UNEVEN: dict[str, Any] = {**SIZES, "num_heads": 3, "num_kv_heads": 1}
DEEP: dict[str, Any] = {**SIZES, "num_layers": 4, "mlp": "gelu", "stacked": True}
CONFIGS = {
    "t5": Config.t5_like(**SIZES, buckets=6, max_distance=5, decoder={"num_layers": 3}),
    "flan": Config.t5_like(**SIZES, mlp="geglu", tied=False, dropout=0.25, attention_dropout=0.25),
    "experts": Config.t5_like(**SIZES, mlp="gelu", experts=EXPERTS),
    "bart": Config(gpt.Config(**BART, causal=False), gpt.Config(**BART, head_bias=True), norm_sums=True),
    "uneven": Config.t5_like(**UNEVEN, per_head=True),
    "stacked": Config.t5_like(**DEEP, buckets=6, max_distance=5, experts=EXPERTS, dropout=0.25),
}
STAGES = [None, *(sf.Zero(stage=stage, persist_elements=0) for stage in (1, 2, 3))]


def draw_params(config: Config) -> Any:
    """Parameters in float64 that are neither small nor 0, so that each part counts."""
    made = tree_map(lambda x: x.double(), seq2seq.init(config, sf.key(0)))
    return tree_map(lambda x: x + 0.3 * x.sin() + 0.1 * (x == 0), made)


def draw_batches(rows: int = 4, source: int = 7, target: int = 5, num: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randint, 13, generator=generator)
    lengths = torch.tensor([source, 3, source - 2, 5])[:rows, None]
    targets = draw((rows, target)).masked_fill(torch.arange(target) >= torch.tensor([5, 4, 2, 5])[:rows, None], -100)
    return [
        {
            "source": draw((rows, source)),
            "source_mask": torch.arange(source) < lengths,
            "targets": targets,
            "mask": targets >= 0,
            "index": torch.arange(rows) + rows * n,
        }
        for n in range(num)
    ]


def spread(config: Config, axis: str, exchange: moe.Exchange) -> Config:
    """The config with experts of both halves over the ranks of the batch."""
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(half, experts=dataclasses.replace(half.experts, axes=axis, exchange=exchange))
            for name, half in config.halves.items()
            if half.experts is not None
        },
    )


def parity(
    config: Config, mesh: sf.Mesh | None, zero: sf.Zero | None, *, jit: bool = False, batch: str = "dp", **how: Any
) -> None:
    torch.set_num_threads(1)
    cut = spread(config, batch, how.pop("exchange", moe.Local()))
    loss = functools.partial(seq2seq.loss, cut, axis="tp", **how)
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        # Biases of keys have the gradient 0, to rounding, which Adam would enlarge.
        optim.sgd(0.1) if config.decoder.bias else optim.adam(0.01),
        draw_params(config),
        draw_batches(),
        mesh=mesh,
        reference=functools.partial(seq2seq.loss, config),
        key=sf.key(5) if config.decoder.dropout else None,
        zero=zero,
        specs=seq2seq.specs(cut, tp="tp"),
        batch=sf.P(batch),
    )


@pytest.mark.day("t5", "experts")
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=2)
def test_two_ranks_equal_one_device(name: str) -> None:
    parity(CONFIGS[name], sf.make_mesh({"tp": 2}), None)
    parity(CONFIGS[name], sf.make_mesh({"dp": 2}), STAGES[3], wrap=sf.remat)


@pytest.mark.day("tokens")
@pytest.mark.parametrize("exchange", ["tokens", "weights"])
@distributed(world=2)
def test_experts_of_both_halves_over_ranks(exchange: str) -> None:
    made = {"tokens": moe.AllToAll("ep"), "weights": moe.GatherExperts("ep")}[exchange]
    for zero in (sf.Zero(stage=0), sf.Zero(stage=3, axis="ep", persist_elements=0)):
        parity(CONFIGS["experts"], sf.make_mesh({"ep": 2}), zero, batch="ep", exchange=made)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=4)
def test_every_stage_on_dp_times_tp(name: str) -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2})
    for zero in STAGES:
        parity(CONFIGS[name], mesh, zero)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", range(4))
@distributed(world=4)
def test_every_stage_on_ep_times_tp(stage: int) -> None:
    zero = sf.Zero(stage=stage, axis="ep", persist_elements=0)
    mesh = sf.make_mesh({"ep": 2, "tp": 2})
    parity(CONFIGS["experts"], mesh, zero, batch="ep", exchange=moe.AllToAll("ep"), jit=stage == 3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=2)
def test_captured_steps(name: str) -> None:
    parity(CONFIGS[name], sf.make_mesh({"tp": 2}), None, jit=True)
    parity(CONFIGS[name], sf.make_mesh({"dp": 2}), STAGES[3], jit=True)


def test_stacked_layers_are_those_of_lists() -> None:
    config, batch = CONFIGS["stacked"], draw_batches()[0]
    params = draw_params(config)
    lists, own = seq2seq.unstack(config, params)
    assert [len(own[name]["blocks"]) for name in lists.halves] == [4, 4]
    want, got = seq2seq.loss(lists, own, batch, sf.key(5)), seq2seq.loss(config, params, batch, sf.key(5))
    torch.testing.assert_close(got.total, want.total, rtol=1e-12, atol=0)
    assert seq2seq.num_params(config) == sum(x.numel() for x in sf.tree_leaves(params))


@pytest.mark.parametrize("name", ["t5", "experts", "bart"])
def test_stages_are_the_loss(name: str) -> None:
    config, batch = CONFIGS[name], draw_batches()[0]
    params = draw_params(config)
    staged = sf.pipeline(*seq2seq.stages(config), blocks=functools.partial(seq2seq.stage_leaves, config))
    got, want = staged(params, batch), seq2seq.loss(config, params, batch)
    torch.testing.assert_close(got.mean(), want.mean(), rtol=1e-12, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["t5", "experts", "bart", "uneven"])
@distributed(world=4, timeout=600)
def test_pipelines_equal_one_device(name: str) -> None:
    """Five or four layers on two stages: the second one begins inside the decoder, or at its first layer."""
    config = CONFIGS[name]
    exchange = moe.AllToAll("dp") if name == "experts" else moe.Local()
    for sizes, stage, jit in (
        ({"pp": 2, "dp": 2}, 1, False),
        ({"pp": 2, "dp": 2}, 3, True),
        ({"pp": 2, "tp": 2}, 0, False),
    ):
        if "tp" in sizes and name == "experts":
            continue
        cut = spread(config, "dp", exchange)
        axis = "tp" if "tp" in sizes else None
        loss: Any = sf.pipeline(
            *seq2seq.stages(cut, wrap=sf.remat, axis=axis),
            blocks=functools.partial(seq2seq.stage_leaves, cut),
            num_microbatches=1 if name == "experts" else 2,
        )
        assert_parity(
            sf.jit(loss, backend="graph") if jit else loss,
            optim.sgd(0.1),
            draw_params(config),
            draw_batches(),
            mesh=sf.make_mesh(sizes),
            reference=functools.partial(seq2seq.loss, config),
            zero=STAGES[stage] if "dp" in sizes else None,
            specs=seq2seq.specs(cut, tp=axis),
            batch=sf.P("dp"),
        )


@pytest.mark.nightly
def test_a_captured_step_has_the_bits_of_the_step() -> None:
    config, found = CONFIGS["t5"], []
    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        step = sf.sharded_step(wrap(functools.partial(seq2seq.loss, config)), optim.sgd(0.1))
        state, metrics = step(step.init(draw_params(config)), draw_batches()[0])
        found.append([metrics["loss"], *sf.tree_leaves(sf.unshard(state.params))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_no_example(name: str) -> None:
    config = CONFIGS[name]
    params, batch = draw_params(config), draw_batches()[0]
    if config.decoder.experts is not None:  # the balance is of a whole batch
        free = {"experts": dataclasses.replace(EXPERTS, balance=0.0)}
        config = dataclasses.replace(
            config, **{n: dataclasses.replace(half, **free) for n, half in config.halves.items()}
        )
    whole = seq2seq.loss(config, params, batch)
    total, weight = torch.tensor(0.0, dtype=torch.float64), 0
    for source, keep, targets, mask in zip(
        *(batch[n] for n in ("source", "source_mask", "targets", "mask")), strict=True
    ):
        alone = {"source": source[keep][None], "targets": targets[mask][None]}
        one = seq2seq.loss(config, params, alone)
        total, weight = total + one.total, weight + int(one.weight)
    torch.testing.assert_close(whole.total, total, rtol=1e-12, atol=0)
    assert int(whole.weight) == weight
    other = batch | {"source": batch["source"].where(batch["source_mask"], 12)}
    assert torch.equal(seq2seq.loss(config, params, other).total, whole.total)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_of_earlier_tokens_and_of_the_source_gives_the_logits_of_apply(name: str) -> None:
    config = CONFIGS[name]
    params, batch = draw_params(config), draw_batches()[0]
    inputs, mask = seq2seq.shift_right(config, batch["targets"]), batch["source_mask"]
    want = seq2seq.apply(config, params, batch["source"], inputs, source_mask=mask)
    sources = seq2seq.project_source(config, params, seq2seq.encode(config, params, batch["source"], mask=mask))
    bodies: list[Any] = [KeyCache() for _ in range(config.decoder.num_layers)]
    for start, stop in ((0, 2), (2, 3), (3, 5)):
        at_T = torch.arange(start, stop)
        found = seq2seq.decode(config, params, inputs[:, start:stop], at_T, bodies, sources)
        torch.testing.assert_close(found, want[:, start:stop], rtol=1e-12, atol=1e-12)


def test_batches_of_inputs_and_of_targets_have_equal_losses() -> None:
    config = CONFIGS["t5"]
    params, source = draw_params(config), draw_batches()[0]["source"]
    targets = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(3))
    inputs = seq2seq.shift_right(config, targets)
    whole = torch.cat([inputs[:, :1], targets], 1)
    want = seq2seq.loss(config, params, {"source": source, "tokens": whole})
    for batch in ({"targets": targets}, {"targets": targets, "tokens": inputs}):
        torch.testing.assert_close(seq2seq.loss(config, params, {"source": source, **batch}).mean(), want)
    assert seq2seq.num_params(config) == sum(x.numel() for x in sf.tree_leaves(params))


def test_bad_settings_and_batches_are_refused() -> None:
    for num in (0, 1, 7):
        with pytest.raises(ValueError, match=f"relative buckets must be an even number of 2 or more, got {num}"):
            Config.t5_like(**SIZES, buckets=num)
    with pytest.raises(ValueError, match=r"max_distance must be above 16, .*got 16"):
        nn.relative_buckets(32, 16, causal=True)
    with pytest.raises(
        ValueError, match=r"(?s)vocab_size must be the same in both halves, got 13 .* and 14 .*start must"
    ):
        Config.t5_like(**SIZES, decoder={"vocab_size": 14}, start=14)
    with pytest.raises(ValueError, match=r"(?s)encoder.causal must be False.*decoder must have position=None"):
        Config(gpt.Config(**SIZES), gpt.Config(**SIZES, position="alibi"))
    stacked = CONFIGS["stacked"]
    with pytest.raises(ValueError, match=r"layers must be lists, got stacked=True. Use seq2seq.unstack"):
        seq2seq.stages(stacked)
    with pytest.raises(ValueError, match="got stacked=True in the encoder and the decoder"):
        sf.inference.seq2seq_decoder(stacked)
    config, batch = CONFIGS["bart"], draw_batches()[0]
    params = draw_params(config)
    with pytest.raises(ValueError, match=r"a source of 10 tokens for Config\(encoder=Config\(max_len=9\)\)"):
        seq2seq.encode(config, params, torch.zeros(1, 10, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"a target of 11 tokens for Config\(decoder=Config\(max_len=9\)\)"):
        seq2seq.apply(config, params, batch["source"], torch.zeros(4, 11, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the batch has no decoder inputs.*\['source'\]"):
        seq2seq.loss(config, params, {"source": batch["source"]})
    with pytest.raises(TypeError, match=r"a batch of seq2seq is .*this is a dict with \['tokens'\]"):
        seq2seq.loss(config, params, {"tokens": batch["source"]})
    with pytest.raises(ValueError, match=r'the "source_mask" of a batch is torch.int64 of shape \(4, 7\)'):
        seq2seq.loss(config, params, batch | {"source_mask": batch["source_mask"].long()})
    with pytest.raises(ValueError, match=r"2 rows of decoder inputs for the states of 4 sources"):
        seq2seq.loss(config, params, {"source": batch["source"], "targets": batch["source"][:2]})
    with pytest.raises(ValueError, match=r"dropout 0.5 needs the samples' global numbers"):
        noisy = Config.t5_like(**SIZES, dropout=0.5)
        seq2seq.loss(noisy, draw_params(noisy), {"source": batch["source"], "targets": batch["source"]}, sf.key(1))
    with pytest.raises(ValueError, match=r"1 bodies for 2 layers of the decoder"):
        source = seq2seq.encode(config, params, batch["source"])
        keys = seq2seq.project_source(config, params, source)
        seq2seq.decode(config, params, batch["source"][:, :1], torch.zeros(1).long(), [KeyCache()], keys)
