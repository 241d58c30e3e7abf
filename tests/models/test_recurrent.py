"""Covers `models/recurrent.py`: LSTM, GRU and highway language models under ZeRO, tensor parallelism and `sf.jit`."""

import functools
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_map
from shardfn.models import recurrent
from shardfn.models.recurrent import Config
from shardfn.nn.recurrent import block_diagonal, grouped_low_rank, shuffled
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {"vocab_size": 11, "d_model": 6, "hidden": (8, 7)}
CONFIGS = {
    "lstm": Config(**SIZES),
    "gru": Config(**SIZES, kind="gru"),
    "highway": Config(**{**SIZES, "hidden": (6, 6)}, kind="highway", depth=2, tie_embeddings=True),
    "structured": Config(**{**SIZES, "hidden": (8, 8)}, maps=(grouped_low_rank(2, 4), block_diagonal(4))),
    "shuffled": Config(**{**SIZES, "hidden": (8,)}, kind="gru", maps=(shuffled(2), shuffled(4))),
}
STAGES = [None, *(sf.Zero(stage=stage, persist_elements=0) for stage in (1, 2, 3))]


def batches_of(config: Config, rows: int = 4, tokens: int = 5) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    make = functools.partial(torch.randint, config.vocab_size, (rows, tokens + 1), generator=generator)
    return [{"tokens": make(), "index": torch.arange(rows) + rows * n} for n in range(2)]


def parity(config: Config, mesh: sf.Mesh | None, zero: sf.Zero | None, *, jit: bool = False) -> None:
    torch.set_num_threads(1)
    loss = functools.partial(recurrent.loss, config, axis="tp")
    assert_parity(
        sf.jit(loss, backend="graph") if jit else loss,
        optim.adam(0.01),
        tree_map(lambda x: x.double(), recurrent.init(config, sf.key(0))),
        batches_of(config),
        mesh=mesh,
        reference=functools.partial(recurrent.loss, config),
        key=sf.key(5) if config.dropout else None,
        zero=zero,
        specs=recurrent.specs(config, tp="tp"),
        batch=sf.P("dp"),
    )


@pytest.mark.day("structured")
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=2)
def test_units_on_two_ranks_equal_one_device(name: str) -> None:
    parity(CONFIGS[name], sf.make_mesh({"tp": 2}), None)


@pytest.mark.nightly
@distributed(world=4)
def test_every_stage_on_dp_times_tp() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 2})
    for n, zero in enumerate(STAGES):
        config = [*CONFIGS.values()][n]
        parity(Config(**{**vars(config), "dropout": 0.25}), mesh, zero)
        parity(config, sf.make_mesh({"dp": 4}), zero)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGS)
@distributed(world=2)
def test_captured_steps(name: str) -> None:
    parity(CONFIGS[name], sf.make_mesh({"tp": 2}), None, jit=True)
    parity(CONFIGS[name], sf.make_mesh({"dp": 2}), STAGES[3], jit=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_step_on_one_device_has_the_bits_of_the_step(name: str) -> None:
    config = CONFIGS[name]
    params, batch = recurrent.init(config, sf.key(0)), batches_of(config)[0]
    found = []
    for wrap in (lambda f: f, functools.partial(sf.jit, backend="graph")):
        step = sf.sharded_step(wrap(functools.partial(recurrent.loss, config)), optim.sgd(0.1))
        state, metrics = step(step.init(params), batch)
        found.append((sf.unshard(state.params), metrics["loss"]))
    (a, loss_a), (b, loss_b) = found
    assert torch.equal(loss_a, loss_b)
    assert all(torch.equal(x, y) for x, y in zip(sf.tree_leaves(a), sf.tree_leaves(b), strict=True))


def test_counted_parameters_and_targets_that_do_not_count() -> None:
    for config in CONFIGS.values():
        params = recurrent.init(config, sf.key(0))
        assert recurrent.num_params(config) == sum(x.numel() for x in sf.tree_leaves(params))
        tokens = batches_of(config)[0]["tokens"]
        whole = recurrent.loss(config, params, {"tokens": tokens})
        targets = tokens[:, 1:].clone()
        torch.testing.assert_close(
            recurrent.loss(config, params, {"tokens": tokens[:, :-1], "targets": targets}).mean(), whole
        )
        targets[:, 3:] = -100
        short = recurrent.loss(config, params, {"tokens": tokens[:, :4]})
        found = recurrent.loss(config, params, {"tokens": tokens[:, :-1], "targets": targets})
        torch.testing.assert_close(found.mean(), short)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)depth=2 has an effect only on kind='highway'.*d_model=7.*got 6"):
        Config(**SIZES, depth=2, tie_embeddings=True)
    config = Config(**SIZES, dropout=0.5)
    params, tokens = recurrent.init(config, sf.key(0)), batches_of(config)[0]["tokens"]
    with pytest.raises(ValueError, match="dropout needs the samples' global numbers"):
        recurrent.loss(config, params, {"tokens": tokens}, sf.key(1))
    with pytest.raises(ValueError, match="Only dense maps lose units"):
        recurrent.units(CONFIGS["structured"])
