"""Covers `speculators/_recurrent.py`: the formulas, written as loops over single tokens, and steps on ranks."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, core
from shardfn.speculators import EagleConfig, RecurrentConfig, apply, init, loss, specs
from shardfn.testing import distributed

CONFIGS = {kind: RecurrentConfig(kind, vocab_size=13, d_model=10, num_layers=2, d_inner=6) for kind in ("mlp", "lstm")}


def normalised(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w * (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() + b


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def head_logits(config: RecurrentConfig, p: dict[str, Tensor], hidden: Tensor, tokens: list[int]) -> list[Tensor]:
    """The logits of each head after one state, by the formulas."""
    n, E = config.num_drafts, config.d_inner
    weight = 0.5 ** (0.5 / n)
    a = math.sqrt((1 - weight**2) * E / 2) / weight
    h, c, found = hidden / (hidden.square().mean() + 1e-5).sqrt() / math.sqrt(2), torch.zeros(E).double(), []
    for i, token in enumerate(tokens):
        parts = ((p["later"] if i else p["first"]) @ h).split(E)
        z = a * p["embed"][token]
        g = gelu(normalised(parts[-1] + z, p["norm_w"], p["norm_b"]))
        if config.kind == "mlp":
            h = g
        else:
            f, k, o = (1 / (1 + torch.exp(-(part + z))) for part in parts[:3])
            c = f * c + k * g
            h = o * gelu(normalised(c, p["cell_norm_w"], p["cell_norm_b"]))
        found.append(p["head"] @ h)
    return found


def batch_of(config: RecurrentConfig | EagleConfig, rows: int = 4, length: int = 9) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, length, config.d_model, generator=drawn)
    return {"hidden": hidden, "tokens": torch.randint(config.vocab_size, (rows, length), generator=drawn)}


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_loss_is_that_of_the_formulas(kind: str) -> None:
    config = CONFIGS[kind]
    p = {name: x.double() + 0.1 for name, x in init(config, core.key(0)).items()}
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch_of(config, rows=2).items()}
    total, count = 0.0, 0
    for hidden_SD, tokens_S in zip(batch["hidden"], batch["tokens"].tolist(), strict=True):
        for t in range(len(tokens_S) - 1 - config.num_drafts):
            logits = head_logits(config, p, hidden_SD[t], tokens_S[t + 1 : t + 1 + config.num_drafts])
            total -= sum(float(x.log_softmax(0)[tokens_S[t + i + 2]]) for i, x in enumerate(logits))
            count += 1
    got = loss(config, p, batch)
    assert got.weight.item() == count == 10
    assert got.total.item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("kind", ["lstm", "eagle3"])
def test_tokens_outside_of_a_vocabulary_for_drafts_add_nothing(kind: Any) -> None:
    full: Any = CONFIGS["lstm"] if kind == "lstm" else EagleConfig(13, 10, 2, 6, (2,))
    config, ids = dataclasses.replace(full, draft_vocab=4), torch.tensor([0, 3, 7, 12])
    params, batch = init(config, core.key(0)) | {"draft_tokens": ids}, batch_of(full)
    n, tokens, total = full.num_drafts, batch["tokens"], torch.zeros(())
    windows = tokens[:, 1:].unfold(1, n + 1, 1)
    for i, logits in enumerate(apply(config, params, batch["hidden"][:, : windows.shape[1]], windows[..., :n])):
        logprobs = logits.log_softmax(-1)
        assert logprobs.shape[-1] == 4
        for number, token in enumerate(ids.tolist()):
            total -= config.step_weights[i] * (logprobs[..., number] * (windows[..., i + 1] == token)).sum()
    got = loss(config, params, batch)
    torch.testing.assert_close(got.total, total)
    assert got.weight == windows[..., 0].numel()
    with pytest.raises(ValueError, match=r"draft_vocab must be None or an integer from 1 to vocab_size=13, got 14"):
        dataclasses.replace(full, draft_vocab=14)


def test_bad_batches_are_refused() -> None:
    config = CONFIGS["mlp"]
    params = init(config, core.key(0))
    for batch in (batch_of(config, length=4), batch_of(config) | {"hidden": torch.ones(4, 9, 11)}):
        with pytest.raises(ValueError, match=r"a state of 10 numbers for each token, and 5 tokens or more"):
            loss(config, params, batch)
    with pytest.raises(ValueError, match=r"kind must be one of mlp, lstm, owl, got 'lstn'. Did you mean 'lstm'"):
        RecurrentConfig("lstn", vocab_size=13, d_model=10, num_layers=2, d_inner=6)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"(?s)d_inner must be an integer of at least 1, got 0.*num_drafts .* got 2.5"):
        RecurrentConfig("mlp", 13, 10, 2, d_inner=0, num_drafts=2.5)  # pyright: ignore[reportArgumentType]


def trained(
    config: RecurrentConfig | EagleConfig, mesh: Any, axes: dict[str, Any], **options: Any
) -> tuple[list[float], Any]:
    """Losses of three steps, and the parameters after them."""
    step = sf.sharded_step(
        functools.partial(loss, config, axis=axes.get("tp")),
        sf.optim.adamw(1e-2),
        mesh=mesh,
        specs=specs(config, tp=axes.get("tp")),
        batch=P(axes.get("dp")),
        **options,
    )
    state, losses = step.init(init(config, core.key(0))), []
    batch = batch_of(config)
    if (axis := axes.get("dp")) is not None:
        n, i = mesh.axis_size(axis), mesh.axis_index(axis)
        rows = [[0, 1, 2], [3]][i] if n == 2 else slice(None)  # unequal numbers of rows
        batch = {name: x[rows] for name, x in batch.items()}
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, {name: sf.unshard(x) for name, x in state.params.items()}


EAGLE = EagleConfig(13, d_model=10, num_layers=2, d_inner=8, layers=(2,), num_heads=2, num_drafts=3)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*CONFIGS, "eagle3"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
@distributed(world=2)
def test_steps_on_ranks_equal_one_device(kind: str, axis: str) -> None:
    config = EAGLE if kind == "eagle3" else CONFIGS[kind]
    zero = {"zero": sf.Zero(stage=3, axis="dp")} if axis == "dp" else {}
    alone = trained(config, sf.make_mesh({}, alone=True), {})
    cut = trained(config, sf.make_mesh({axis: 2}), {axis: axis}, **zero)
    assert cut[0] == pytest.approx(alone[0], rel=1e-5)
    for name, x in alone[1].items():
        torch.testing.assert_close(cut[1][name], x, rtol=1e-4, atol=1e-5)


def test_heads_see_only_their_tokens() -> None:
    config = CONFIGS["lstm"]
    params, batch = init(config, core.key(0)), batch_of(config)
    tokens = batch["tokens"][:, :3].reshape(4, 1, 3)
    before = apply(config, params, batch["hidden"][:, :1], tokens)
    changed = tokens.clone()
    changed[..., 1] = (changed[..., 1] + 1) % 13
    after = apply(config, params, batch["hidden"][:, :1], changed)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, False]
