"""Covers `speculators/_forcing.py` and `_trajectories.py`: packed rows and separate forwards, the loss, the states."""

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P, core, nn
from shardfn.inference import Engine, MultiBlockJacobi, Sampling, decoder
from shardfn.models import gpt
from shardfn.speculators import (
    ForcingConfig,
    Trajectory,
    draw_trajectories,
    forcing_loss,
    load_trajectories,
    make_forcing_batch,
    measure_acceptance,
    pack_blocks,
    pick_noise,
    save_trajectories,
)
from shardfn.testing import distributed

BASE: dict[str, Any] = {"vocab_size": 13, "num_layers": 2, "d_model": 8, "num_heads": 2, "max_len": 40}
MODELS = {
    "learned": gpt.Config(**BASE),
    "llama": gpt.Config(**BASE, position="rope", norm="rms", mlp="swiglu", bias=False, num_kv_heads=1),
}
CONFIG = ForcingConfig(block=3, window=2, temperature=1.5, text_weight=4.0)


def batch_of(rows: int = 2) -> dict[str, Tensor]:
    """Prompts of 4 tokens, and 4 blocks. The third block is wholly right."""
    drawn = torch.Generator().manual_seed(0)
    prompt, clean = torch.randint(13, (rows, 4), generator=drawn), torch.randint(13, (rows, 4, 3), generator=drawn)
    noisy = clean.clone()
    noisy[:, 0, 2] = (noisy[:, 0, 2] + 1) % 13
    noisy[:, 1, 0] = (noisy[:, 1, 0] + 5) % 13
    noisy[:, 3, 1] = (noisy[:, 3, 1] + 2) % 13
    return {"prompt": prompt, "noisy": noisy, "clean": clean}


def params_of(model: gpt.Config) -> Any:
    return core.tree_map(lambda x: x.double() * 4, gpt.init(model, core.key(0)))


def block_logits(model: gpt.Config, params: Any, batch: dict[str, Tensor], b: int) -> tuple[Tensor, list[Tensor]]:
    """Logits of the clean text, and those at each noisy block, by a forward of each text."""
    prompt, noisy, clean = (batch[name][b] for name in ("prompt", "noisy", "clean"))
    whole = gpt.apply(model, params, torch.cat([prompt, clean.flatten()])[None])[0]
    found = []
    for j in range(4):
        first = j // CONFIG.window * CONFIG.window
        text = torch.cat([prompt, clean[:first].flatten(), noisy[first : j + 1].flatten()])
        found.append(gpt.apply(model, params, text[None])[0, -3:])
    return whole, found


@pytest.mark.parametrize("kind", list(MODELS))
def test_packed_rows_are_separate_forwards(kind: str) -> None:
    model, batch = MODELS[kind], batch_of()
    params, mask = params_of(model), nn.JacobiBlocks(4, 3, CONFIG.window)
    packed = dataclasses.replace(model, layout=lambda num: mask)
    tokens = pack_blocks(batch)
    logits, _ = gpt.apply_and_hidden(packed, params, tokens, positions=mask.find_positions(tokens.shape[1]))
    pairs = logits[:, 4:].unflatten(1, (4, 2, 3))
    for b in range(2):
        whole, noisy = block_logits(model, params, batch, b)
        clean = torch.cat([logits[b, :4], pairs[b, :, 1].flatten(0, 1)])
        torch.testing.assert_close(clean, whole, rtol=1e-12, atol=1e-12)
        for j in range(4):
            torch.testing.assert_close(pairs[b, j, 0], noisy[j], rtol=1e-12, atol=1e-12)


def loss_by_hand(model: gpt.Config, params: Any, batch: dict[str, Tensor]) -> Tensor:
    """Token by token. The logits of the clean text have no gradient in the second part."""
    total, tau = torch.zeros((), dtype=torch.float64), CONFIG.temperature
    for b in range(len(batch["prompt"])):
        whole, noisy = block_logits(model, params, batch, b)
        text = torch.cat([batch["prompt"][b], batch["clean"][b].flatten()]).tolist()
        entropies = [-whole[t].log_softmax(0)[text[t + 1]] for t in range(len(text) - 1)]
        total = total + CONFIG.text_weight * torch.stack(entropies).mean()
        parts = []
        for j in range(4):
            wrong = False
            for i in range(3):
                wrong = wrong or int(batch["noisy"][b, j, i]) != int(batch["clean"][b, j, i])
                teacher, student = whole[4 + 3 * j + i].detach() / tau, noisy[j][i] / tau
                parts += [-(teacher.softmax(0) @ student.log_softmax(0))] if wrong else []
        total = total + tau**2 / 4 * torch.stack(parts).mean()
    return total


@pytest.mark.parametrize("kind", list(MODELS))
def test_loss_and_gradient_are_those_of_a_loop(kind: str) -> None:
    model, batch = MODELS[kind], batch_of()
    params = core.tree_map(lambda x: x.requires_grad_(), params_of(model))
    found, want = forcing_loss(model, CONFIG, params, batch), loss_by_hand(model, params, batch)
    assert found.weight.item() == 2
    assert found.total.item() == pytest.approx(want.item(), rel=1e-12)
    leaves = core.tree_leaves(params)
    grads = (torch.autograd.grad(x, leaves, allow_unused=True) for x in (found.total, want))
    for mine, other in zip(*grads, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_blocks_without_a_wrong_guess_have_only_the_text() -> None:
    model, batch = MODELS["llama"], batch_of()
    batch["noisy"] = batch["clean"]
    params = params_of(model)
    entropies = [
        torch.nn.functional.cross_entropy(gpt.apply(model, params, text[None, :-1])[0], text[1:])
        for text in torch.cat([batch["prompt"], batch["clean"].flatten(1)], 1)
    ]
    found = forcing_loss(model, CONFIG, params, batch)
    assert float(found.total) == pytest.approx(4.0 * float(sum(entropies)), rel=1e-12)


def trained(mesh: Any, axis: str | None, **options: Any) -> tuple[list[float], list[Tensor]]:
    model = MODELS["llama"]
    loss = functools.partial(forcing_loss, model, CONFIG)
    step = sf.sharded_step(loss, sf.optim.adamw(1e-2), mesh=mesh, batch=P(axis), **options)
    state, losses, batch = step.init(gpt.init(model, core.key(0))), [], batch_of(4)
    if axis is not None:
        batch = {name: x[[[0, 1, 2], [3]][mesh.axis_index("dp")]] for name, x in batch.items()}
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, core.tree_leaves(core.tree_map(sf.unshard, state.params))


@pytest.mark.nightly
@distributed(world=2)
def test_steps_on_ranks_equal_one_device() -> None:
    alone = trained(sf.make_mesh({}, alone=True), None)
    cut = trained(sf.make_mesh({"dp": 2}), "dp", zero=sf.Zero(stage=3, axis="dp"))
    assert cut[0] == pytest.approx(alone[0], rel=1e-5)
    for mine, other in zip(cut[1], alone[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@functools.cache
def drawn() -> tuple[Any, Any, list[Trajectory]]:
    config = gpt.Config(**BASE, batch_invariant=True)
    made, params = decoder(config), core.tree_map(lambda x: x * 8, gpt.init(config, core.key(0)))
    return made, params, list(draw_trajectories(made, params, [[1, 2, 3], [4, 5, 6]], block=4, num_blocks=3))


def test_trajectories_are_the_iterations_of_jacobi() -> None:
    """Each state has the most probable token of each place after the state before, and the last state is greedy."""
    made, params, found = drawn()
    plain = Engine(made, params)
    for one in found:
        text, steps = list(one.prompt), 0
        for states in one.states:
            for before, after in itertools.pairwise(states):
                logits = gpt.apply(made.config, params, torch.tensor([text + before]))[0]
                assert logits[len(text) - 1 : -1].argmax(-1).tolist() == after
                steps += before != after
            text += states[-1]
        assert plain.generate([one.prompt], Sampling(12, temperature=0.0))[0].tokens == text[3:] and steps > 3


def test_noise_grows_over_a_window() -> None:
    states = [[9, 9, 9, 9], [1, 9, 9, 9], [1, 2, 9, 4], [1, 2, 3, 9], [1, 2, 3, 4]]
    config = ForcingConfig(block=4, window=3)
    assert [pick_noise(config, states, j) for j in range(4)] == [states[4], states[2], states[0], states[4]]
    narrow = ForcingConfig(block=4, window=2, least=0.25, most=0.7)
    assert [pick_noise(narrow, states, j) for j in range(2)] == [states[3], states[1]]
    text = [Trajectory([7], [states, states])]
    noisy = [make_forcing_batch(config, text, shift=shift)["noisy"][0].tolist() for shift in range(3)]
    assert noisy == [[states[4], states[2]], [states[2], states[0]], [states[0], states[4]]]


def test_files_know_the_weights(tmp_path: pathlib.Path) -> None:
    made, params, found = drawn()
    path = tmp_path / "trajectories.json"
    save_trajectories(path, found, made, params)
    assert load_trajectories(path, made, params) == found
    further = core.tree_map(lambda x: x.clone(), params)
    further["blocks"][1]["w_up"] += 0.01
    message = r"(?s)trajectories of other weights. Draw them again:.*\['blocks'\]\[1\]\['w_up'\] has the digest"
    with pytest.raises(ValueError, match=message):
        load_trajectories(path, made, further)
    other = gpt.Config(**BASE, position="rope", batch_invariant=True)
    with pytest.raises(ValueError, match=r"the model's digest is [0-9a-f]{16}, and the trajectories have [0-9a-f]{16}"):
        load_trajectories(path, decoder(other), gpt.init(other, core.key(0)))
    path.write_text(json.dumps({"format": "gguf"}))
    with pytest.raises(ValueError, match=r"must have the format 'shardfn-trajectories', got 'gguf'"):
        load_trajectories(path, made, params)


def test_bad_sizes_are_refused() -> None:
    made, params, found = drawn()
    with pytest.raises(ValueError, match=r"block must be an integer of at least 1, got 0"):
        list(draw_trajectories(made, params, [[1]], block=0, num_blocks=1))
    with pytest.raises(ValueError, match=r"at most the context 40, got 42 tokens"):
        list(draw_trajectories(made, params, [[1]], block=4, num_blocks=10))
    with pytest.raises(ValueError, match=r"blocks of 3 tokens, got \[\(3, 3\)\] and blocks of \[4\]"):
        make_forcing_batch(CONFIG, found)
    with pytest.raises(ValueError, match=r"(?s)block must be .* got 0.*ascending from 0 to 1, got 0.5 and 0.2"):
        ForcingConfig(block=0, least=0.5, most=0.2)
    with pytest.raises(ValueError, match=r"window must be at least 1, got 0"):
        nn.JacobiBlocks(1, 1, 0)
    batch = batch_of()
    with pytest.raises(ValueError, match=r"(?s)has windows.*blocks must have 2 tokens, got 3.*16 tokens do not fit"):
        model = dataclasses.replace(MODELS["llama"], max_len=15, window=4)
        forcing_loss(model, ForcingConfig(block=2), gpt.init(model, core.key(0)), batch)
    small = Engine(made, params, limits=sf.inference.limits_of(made, drafts=7)).limits
    with pytest.raises(ValueError, match=r"the drafter has blocks of 8 drafts, and limits.drafts is 7"):
        Engine(made, params, limits=small, drafter=MultiBlockJacobi(4))


@pytest.mark.nightly
def test_a_trained_model_needs_fewer_steps() -> None:
    """On texts in which each token follows from the place in a line of digits: 1.3 tokens a step, plain 1.0.

    The trajectories are of the weights so far, and each block has another noise in each step. With one noise for each
    block the model learns the noisy rows by heart, and has fewer than 1.25 tokens a step after as many steps.
    """
    config = dataclasses.replace(MODELS["llama"], d_model=32, batch_invariant=True)
    made, drafter, settings = decoder(config), MultiBlockJacobi(4), ForcingConfig(block=4, window=3)
    lines = torch.stack([torch.arange(i, i + 33) % 11 for i in range(11)])
    step = sf.sharded_step(functools.partial(gpt.loss, config), sf.optim.adamw(3e-3))
    state = step.init(gpt.init(config, core.key(0)))
    for _ in range(60):
        state, _ = step(state, {"tokens": lines})
    params = core.tree_map(sf.unshard, state.params)
    prompts, how = [line[:3].tolist() for line in lines], Sampling(24, temperature=0.0)
    before = measure_acceptance(Engine(made, params, drafter=drafter), prompts, how)
    forcing = sf.sharded_step(functools.partial(forcing_loss, config, settings), sf.optim.adamw(3e-3))
    state = forcing.init(params)
    for _ in range(3):
        params = core.tree_map(sf.unshard, state.params)
        found = list(draw_trajectories(made, params, prompts, block=4, num_blocks=6))
        batches = [make_forcing_batch(settings, found, shift=shift) for shift in range(3)]
        for i in range(50):
            state, _ = forcing(state, batches[i % 3])
    params = core.tree_map(sf.unshard, state.params)
    guessing, plain = Engine(made, params, drafter=drafter), Engine(made, params)
    assert guessing.generate(prompts, how) == plain.generate(prompts, how)
    after = measure_acceptance(guessing, prompts, how)
    assert before < 0.1 and after > before + 0.3
