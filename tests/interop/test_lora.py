"""Covers shardfn/interop/lora.py: adapters train alone, under every stage and jit, and peft has the same."""

import copy
import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import lora
from shardfn.core import tree_leaves, tree_map
from shardfn.models import gpt
from shardfn.testing import RTOL, distributed

CONFIG = gpt.Config(vocab_size=31, num_layers=2, d_model=12, num_heads=3, stacked=True)
ADAPTERS = lora.Adapters(rank=2, alpha=8.0, targets=["wq", "w_up"])
BATCH = {"tokens": torch.arange(6 * 5).view(6, 5) * 7 % 31}


def tree_of() -> Any:
    params = tree_map(torch.Tensor.double, gpt.init(CONFIG, sf.key(0)))
    return lora.init(ADAPTERS, params, sf.key(1))


def run(rows: Any, mesh: Any, stage: int, jit: bool, steps: int = 3) -> Any:
    loss = functools.partial(gpt.loss, CONFIG, wrap=lora.merging(ADAPTERS))
    specs = lora.specs(ADAPTERS, None, gpt.specs(CONFIG))
    tree = tree_of()
    options: dict[str, Any] = {"specs": specs, "trainable": lora.trainable(tree), "mesh": mesh}
    zero = sf.Zero(stage=stage, persist_elements=0)
    step = sf.sharded_step(
        sf.jit(loss) if jit else loss, sf.optim.adamw(1e-2, eps=1e-3, weight_decay=0.0), zero=zero, **options
    )
    state = step.init(tree)
    for _ in range(steps):
        state, _ = step(state, rows)
    return sf.unshard(state.params)


def by_hand(steps: int = 3) -> Any:
    """Torch's loop over merged weights."""
    tree = tree_of()
    learns = lora.trainable(tree)
    train = [x.requires_grad_() for x, y in zip(tree_leaves(tree), tree_leaves(learns), strict=True) if y]
    optimizer = torch.optim.AdamW(train, 1e-2, eps=1e-3, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        gpt.loss(CONFIG, lora.merged(ADAPTERS, tree), BATCH).backward()
        optimizer.step()
    return tree


@distributed(world=2)
def test_only_factors_learn_under_every_stage_and_jit(world: int) -> None:
    mesh = sf.make_mesh({"dp": world}, device="cpu")
    own = {"tokens": BATCH["tokens"].chunk(world)[mesh.rank]}
    want, first = by_hand(), tree_of()
    learns = tree_leaves(lora.trainable(first))
    for stage, jit in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        found = run(own, mesh, stage, jit)
        for x, y, z, t in zip(*map(tree_leaves, (found, want, first)), learns, strict=True):
            assert torch.equal(x, z) != t
            y, tol = y.detach(), RTOL[x.dtype]
            torch.testing.assert_close(x, y, rtol=0, atol=tol * float(y.abs().max()))


@pytest.mark.parametrize("rslora", [False, True])
def test_a_merged_weight_is_the_formula(rslora: bool) -> None:
    adapters = lora.Adapters(4, 6.0, [r"0\.weight"], rslora)
    params, apply = sf.from_module(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    tree = lora.init(adapters, params, sf.key(0))
    assert torch.equal(lora.merged(adapters, tree)["0.weight"], params["0.weight"])
    tree["0.weight_lora_b"] = torch.ones(3, 4)
    x = torch.ones(2, 5)
    low = x @ tree["0.weight_lora_a"].T @ tree["0.weight_lora_b"].T
    want = (x @ params["0.weight"].T + params["0.bias"] + low * 6.0 / (2 if rslora else 4)) @ params["1.weight"].T
    torch.testing.assert_close(apply(lora.merged(adapters, tree), x), want + params["1.bias"])


def test_what_cannot_be_adapted_is_listed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError) as error:
        lora.init(lora.Adapters(2, 1.0, ["bias", "nothing"]), {"w": torch.ones(2, 2), "bias": torch.ones(2)}, sf.key(0))
    assert "bias is (2,)" in str(error.value) and "'nothing' names no leaf" in str(error.value)
    with pytest.raises(ValueError, match="w has spec"):
        lora.specs(lora.Adapters(2, 1.0, ["w"]), None, {"w": sf.P("tp")})


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_and_writes_the_same(rslora: bool, tmp_path: pathlib.Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    params, apply = sf.from_module(module)
    params = {name: x.clone() for name, x in params.items()}
    adapters = lora.Adapters(2, 6.0, [r"[02]\.weight"], rslora)
    tree = lora.init(adapters, params, sf.key(0))
    tree["0.weight_lora_b"], tree["2.weight_lora_b"] = torch.randn(3, 2), torch.randn(2, 2)
    lora.save_peft(tmp_path / "ours", adapters, tree)
    x = torch.randn(4, 5)
    other = peft.PeftModel.from_pretrained(copy.deepcopy(module), str(tmp_path / "ours"))
    want = apply(lora.merged(adapters, tree), x)
    torch.testing.assert_close(other(x), want)
    other.save_pretrained(str(tmp_path / "theirs"))
    again, back = lora.load_peft(tmp_path / "theirs", params)
    assert again.scale == adapters.scale and back.keys() == tree.keys()
    assert all(torch.equal(back[name], tree[name]) for name in tree)
