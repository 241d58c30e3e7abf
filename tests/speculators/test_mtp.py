"""Covers `speculators/_mtp.py` and `_joint.py`: modules as loops over single positions, drafts, and the joint loss."""

import dataclasses
import functools
import math
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, core
from shardfn.inference import Context, Engine, decoder
from shardfn.models import gpt
from shardfn.speculators import (
    MTPConfig,
    Speculator,
    apply,
    init,
    joint_init,
    joint_loss,
    joint_specs,
    load,
    loss,
    save,
    take_speculator,
)
from shardfn.testing import distributed
from tests.speculators.test_eagle import normalised, rotated
from tests.speculators.trained import GREEDY

CONFIG = MTPConfig(13, d_model=8, num_layers=2, d_inner=8, num_heads=2, num_drafts=3, window=3)
MODEL = gpt.Config(vocab_size=13, num_layers=2, d_model=8, num_heads=2, max_len=32, position="rope")


@functools.cache
def params_of(config: MTPConfig) -> dict[str, Tensor]:
    return {name: x.double() + 0.05 for name, x in init(config, core.key(0)).items()}


def module_logits(p: dict[str, Tensor], states: Tensor, tokens: list[int], t: int) -> list[Tensor]:
    """The logits of each module at position t, position by position. tokens[s + 1] is drawn from state s."""
    H, K, W, found = CONFIG.num_heads, CONFIG.head_dim, CONFIG.window, list[Tensor]()
    g = {s: states[s] for s in range(t + 1)}
    for i in range(CONFIG.num_drafts):
        own = {name[2:]: x for name, x in p.items() if name.startswith(f"{i}.")}
        x, q, k, v = {}, {}, {}, {}
        for s in range(t + 1):
            e = p["embed"][tokens[s + 1 + i]]
            both = normalised(e, own["embed_norm_w"]), normalised(g[s], own["state_norm_w"])
            x[s] = own["project"] @ torch.cat(both)
            y = normalised(x[s], own["first_norm_w"])
            q[s], k[s] = ([rotated(h, s) for h in (own[name] @ y).view(H, K)] for name in ("wq", "wk"))
            v[s] = (own["wv"] @ y).view(H, K)
        for s in range(t + 1):
            heads = []
            for h in range(H):
                seen = range(max(0, s - W + 1), s + 1)
                weights = torch.stack([q[s][h] @ k[r][h] / math.sqrt(K) for r in seen]).softmax(0)
                heads.append(sum(w * v[r][h] for w, r in zip(weights, seen, strict=True)))
            h = x[s] + own["wo"] @ torch.cat(heads)
            z = normalised(h, own["norm_w"])
            gate = own["w_gate"] @ z
            g[s] = h + own["w_down"] @ (gate * torch.sigmoid(gate) * (own["w_up"] @ z))
        found.append(p["head"] @ normalised(g[t], own["last_norm_w"]))
    return found


def test_logits_and_loss_are_those_of_single_positions() -> None:
    p, drawn = params_of(CONFIG), torch.Generator().manual_seed(1)
    states = torch.randn(2, 10, 8, generator=drawn, dtype=torch.float64)
    tokens = torch.randint(13, (2, 10), generator=drawn)
    total, n, T = 0.0, CONFIG.num_drafts, 10 - 1 - CONFIG.num_drafts
    windows = tokens[:, 1:].unfold(1, n + 1, 1)
    logits = torch.stack(apply(CONFIG, p, states[:, :T], windows[..., :n]))
    for b in range(2):
        for t in range(T):
            want = torch.stack(module_logits(p, states[b], tokens[b].tolist(), t))
            torch.testing.assert_close(logits[:, b, t], want, rtol=1e-10, atol=1e-10)
            total -= sum(float(x.log_softmax(0)[tokens[b, t + 2 + i]]) for i, x in enumerate(want))
    got = loss(CONFIG, p, {"hidden": states, "tokens": tokens})
    assert got.weight.item() == 2 * T
    assert got.total.item() == pytest.approx(total, rel=1e-12)


def test_drafts_are_the_most_probable_tokens_of_the_modules() -> None:
    """With 1 to 9 states, in company. The modules see 7 states."""
    drafter, drawn = Speculator(CONFIG, {k: x.float() for k, x in params_of(CONFIG).items()}), torch.Generator()
    contexts, want = list[Context](), list[list[int]]()
    assert drafter.hidden_window == 7
    for i in range(5):
        num = 1 + 2 * i
        states, tokens = torch.randn(num, 8, generator=drawn.manual_seed(i)), [x % 13 for x in range(i, i + num + 1)]
        contexts.append(Context(i, "a", 0, array("q", tokens), 1, sampling=GREEDY, states=tuple(states)))
        seen = states[-drafter.hidden_window :].double()
        known = tokens[-len(seen) - 1 :]
        for n in range(CONFIG.num_drafts):
            padded = [*known, *[0] * CONFIG.num_drafts]
            known.append(int(module_logits(params_of(CONFIG), seen, padded, len(seen) - 1)[n].argmax()))
        want.append(known[-CONFIG.num_drafts :])
    assert [list(x.tokens) for x in drafter.propose_all([(context, 9) for context in contexts])] == want
    assert [list(drafter.propose(context, 9).tokens) for context in contexts] == want
    assert len({*map(tuple, want)}) > 2


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    return {"tokens": torch.randint(13, (rows, 11), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("tied", [False, True])
def test_joint_loss_is_that_of_both_parts(tied: bool) -> None:
    """Also its gradient, which reaches the model through the modules, by finite differences in float64."""
    model = dataclasses.replace(MODEL, tie_embeddings=tied)
    params = core.tree_map(lambda x: x.double() * 4, joint_init(model, CONFIG, core.key(0)))
    batch = batch_of(2)
    own = take_speculator(model, CONFIG, params)
    logits, hidden = gpt.apply_and_hidden(model, params["model"], batch["tokens"][:, :-1])
    total, count, n = 0.0, 0, CONFIG.num_drafts
    for b in range(2):
        tokens = batch["tokens"][b].tolist()
        for t in range(10 - 1 - n):
            for i, x in enumerate(module_logits(own, hidden[b], tokens, t)):
                total -= float(x.log_softmax(0)[tokens[t + 2 + i]])
            count += 1
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
    found = joint_loss(model, CONFIG, params, batch, weight=0.7)
    assert float(found.total / found.weight) == pytest.approx(float(plain) + 0.7 * total / count / n, rel=1e-12)

    def of_embedding(embed: Tensor) -> Tensor:
        made = joint_loss(model, CONFIG, {**params, "model": params["model"] | {"embed": embed}}, batch)
        return made.total / made.weight

    embed, direction = params["model"]["embed"].clone().requires_grad_(), torch.linspace(-1, 1, 13 * 8).view(13, 8)
    [grad] = torch.autograd.grad(of_embedding(embed), embed)
    with torch.no_grad():
        ahead, behind = (of_embedding(embed + step * direction.double()) for step in (1e-5, -1e-5))
    assert float((grad * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)


def trained(mesh: Any, axes: dict[str, Any], **options: Any) -> tuple[list[float], Any]:
    """Losses of three steps, and the parameters after them."""
    step = sf.sharded_step(
        functools.partial(joint_loss, MODEL, CONFIG, axis=axes.get("tp")),
        sf.optim.adamw(1e-2),
        mesh=mesh,
        specs=joint_specs(MODEL, CONFIG, tp=axes.get("tp")),
        batch=P(axes.get("dp")),
        **options,
    )
    state, losses, batch = step.init(joint_init(MODEL, CONFIG, core.key(0))), [], batch_of()
    if axes.get("dp") is not None and mesh.axis_size("dp") == 2:
        batch = {"tokens": batch["tokens"][[[0, 1, 2], [3]][mesh.axis_index("dp")]]}
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, core.tree_leaves(core.tree_map(sf.unshard, state.params))


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["dp", "tp"])
@distributed(world=2)
def test_joint_steps_on_ranks_equal_one_device(axis: str) -> None:
    zero = {"zero": sf.Zero(stage=3, axis="dp")} if axis == "dp" else {}
    alone = trained(sf.make_mesh({}, alone=True), {})
    cut = trained(sf.make_mesh({axis: 2}), {axis: axis}, **zero)
    assert cut[0] == pytest.approx(alone[0], rel=1e-5)
    for mine, other in zip(cut[1], alone[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_model_and_its_modules_learn_and_are_served(tmp_path: Any) -> None:
    """By one loss, on a text that repeats. The drafts are then right."""
    text = torch.tensor([1, 2, 3, 4, 5] * 5)
    rows, config = torch.stack([text[i : i + 20] for i in range(5)]), dataclasses.replace(CONFIG, num_drafts=2)
    step = sf.sharded_step(functools.partial(joint_loss, MODEL, config), sf.optim.adamw(1e-2))
    state, losses = step.init(joint_init(MODEL, config, core.key(0))), []
    for _ in range(80):
        state, metrics = step(state, {"tokens": rows})
        losses.append(float(metrics["loss"]))
    params: Any = core.tree_map(sf.unshard, state.params)
    made = decoder(dataclasses.replace(MODEL, batch_invariant=True))
    save(tmp_path, config, take_speculator(MODEL, config, params), made, params["model"])
    guessing = Engine(made, params["model"], drafter=load(tmp_path, made, params["model"]))
    plain = Engine(made, params["model"])
    assert guessing.generate([[1, 2]], GREEDY) == plain.generate([[1, 2]], GREEDY)
    assert losses[-1] < 0.3 * losses[0] and guessing.stats.speculation.accepted > 3


def test_shapes_and_pairs_are_checked() -> None:
    with pytest.raises(ValueError, match=r"(?s)d_inner must be d_model=8, as for the model's head, got 6"):
        MTPConfig(13, d_model=8, num_layers=2, d_inner=6, num_heads=3)
    with pytest.raises(ValueError, match=r"window must be an integer of at least 1, got 0"):
        MTPConfig(13, d_model=8, num_layers=2, d_inner=8, window=0)
    other = dataclasses.replace(MODEL, vocab_size=11, dropout=0.1)
    with pytest.raises(ValueError, match=r"(?s)vocab_size is 13, and the model has 11.*dropout=0.1"):
        joint_init(other, CONFIG, core.key(0))
    params = joint_init(MODEL, CONFIG, core.key(0))
    with pytest.raises(ValueError, match=r"only 'tokens', got 0.3 and \['tokens', 'segment_ids'\]"):
        joint_loss(MODEL, CONFIG, params, batch_of() | {"segment_ids": torch.zeros(4, 11)})
