"""Covers `speculators/_eagle.py`: the layer written as loops over single chains, and drafts from several states."""

import functools
import math
from array import array

import pytest
import torch
from torch import Tensor

from shardfn import core
from shardfn.inference import Context
from shardfn.speculators import EagleConfig, Speculator, apply, init, loss
from tests.speculators.trained import GREEDY

CONFIG = EagleConfig(13, d_model=6, num_layers=4, d_inner=8, layers=(1, 2, 4), num_heads=2, num_drafts=3, window=3)


@functools.cache
def params_of(config: EagleConfig) -> dict[str, Tensor]:
    return {name: x.double() + 0.05 for name, x in init(config, core.key(0)).items()}


def normalised(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.square().mean() + 1e-5).sqrt()


def rotated(x: Tensor, position: int) -> Tensor:
    """Each pair (x_k, x_(k + K/2)) of a head's vector, turned by its angle."""
    half = len(x) // 2
    powers = [position * 10000.0 ** (-2 * i / len(x)) for i in range(half)]
    angles = torch.tensor(powers, dtype=torch.float64)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def chain_logits(config: EagleConfig, p: dict[str, Tensor], states: Tensor, tokens: list[int], t: int) -> list[Tensor]:
    """The logits of each draft after position t, one position after the other. tokens[s + 1] is drawn from state s."""
    H, K = config.num_heads, config.head_dim
    keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()

    def inputs(g: Tensor, token: int) -> Tensor:
        return torch.cat([normalised(p["embed"][token], p["embed_norm_w"]), normalised(g, p["state_norm_w"])])

    def remember(x: Tensor, position: int) -> None:
        keys.append(torch.stack([rotated(h, position) for h in (p["wk"] @ x).view(H, K)]))
        values.append((p["wv"] @ x).view(H, K))

    first = max(0, t - config.window + 1)
    for s in range(first, t + 1):
        remember(inputs(p["fuse"] @ states[s], tokens[s + 1]), s)
    g = p["fuse"] @ states[t]
    for i in range(config.num_drafts):
        x = inputs(g, tokens[t + 1 + i])
        if i:
            remember(x, t + i)
        heads = []
        for h in range(H):
            q = rotated((p["wq"] @ x).view(H, K)[h], t + i)
            weights = torch.stack([q @ key[h] / math.sqrt(K) for key in keys]).softmax(0)
            heads.append(sum(w * v[h] for w, v in zip(weights, values, strict=True)))
        h = g + p["wo"] @ torch.cat(heads)
        z = normalised(h, p["norm_w"])
        gate = p["w_gate"] @ z
        g = h + p["w_down"] @ (gate * torch.sigmoid(gate) * (p["w_up"] @ z))
        found.append(p["head"] @ normalised(g, p["last_norm_w"]))
    return found


def test_logits_and_loss_are_those_of_single_chains() -> None:
    p, drawn = params_of(CONFIG), torch.Generator().manual_seed(1)
    states = torch.randn(2, 9, 18, generator=drawn, dtype=torch.float64)
    tokens = torch.randint(13, (2, 9), generator=drawn)
    total, n, T = 0.0, CONFIG.num_drafts, 9 - 1 - CONFIG.num_drafts
    windows = tokens[:, 1:].unfold(1, n + 1, 1)
    logits = torch.stack(apply(CONFIG, p, states[:, :T], windows[..., :n]))
    for b in range(2):
        for t in range(T):
            want = torch.stack(chain_logits(CONFIG, p, states[b], tokens[b].tolist(), t))
            torch.testing.assert_close(logits[:, b, t], want, rtol=1e-10, atol=1e-10)
            for i, x in enumerate(want):
                total -= 0.8**i * float(x.log_softmax(0)[tokens[b, t + 2 + i]])
    got = loss(CONFIG, p, {"hidden": states, "tokens": tokens})
    assert got.weight.item() == 2 * T
    assert got.total.item() == pytest.approx(total, rel=1e-12)


def test_drafts_are_the_most_probable_tokens_of_the_chain() -> None:
    """Of 1 to 3 states, in company."""
    drafter, drawn = Speculator(CONFIG, {k: x.float() for k, x in params_of(CONFIG).items()}), torch.Generator()
    contexts, want = list[Context](), list[list[int]]()
    for i in range(5):
        num = 1 + i % 4
        states, tokens = torch.randn(num, 18, generator=drawn.manual_seed(i)), [*range(i, i + num + 1)]
        contexts.append(Context(i, "a", 0, array("q", tokens), 1, sampling=GREEDY, states=tuple(states)))
        seen = states[-CONFIG.window :].double()
        known = tokens[-len(seen) - 1 :]
        for n in range(CONFIG.num_drafts):
            padded = [*known, *[0] * CONFIG.num_drafts]
            chain = chain_logits(CONFIG, params_of(CONFIG), seen, padded, len(seen) - 1)
            known.append(int(chain[n].argmax()))
        want.append(known[-CONFIG.num_drafts :])
    assert [list(x.tokens) for x in drafter.propose_all([(context, 9) for context in contexts])] == want
    assert len({*map(tuple, want)}) > 2


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"(?s)num_heads=3 must divide d_inner=8 into an even width"):
        EagleConfig(13, d_model=6, num_layers=4, d_inner=8, layers=(1, 2), num_heads=3)
    for layers in ((), (2, 1), (1, 1), [1]):
        with pytest.raises(ValueError, match=r"layers must be a tuple of ascending numbers"):
            EagleConfig(13, d_model=6, num_layers=4, d_inner=8, layers=layers)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"layers must be from 0 to num_layers=4, got \(2, 5\)"):
        EagleConfig(13, d_model=6, num_layers=4, d_inner=8, layers=(2, 5))
