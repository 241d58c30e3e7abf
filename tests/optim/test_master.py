"""Covers master_weights: small updates are not lost, in place equals pure, mixed trees, structure errors."""

import pytest
import torch

from shardfn import optim
from shardfn.core import tree_leaves

BF16 = torch.bfloat16


@pytest.mark.nightly
def test_a_thousand_small_steps_are_lost_without_a_master_and_kept_with_one() -> None:
    start, g = torch.linspace(1.0, 1.99, 64), torch.ones(64)
    plain = master = None
    for tx in (optim.sgd(1e-4), optim.master_weights(optim.sgd(1e-4))):
        w = [start.to(BF16)]
        state = tx.init(w)
        for _ in range(1000):
            w, state = tx.apply([g], state, w) if tx.apply else pytest.fail("no in-place form")
        plain, master = (w[0], master) if plain is None else (plain, w[0])
    assert plain is not None and master is not None
    assert torch.equal(plain, start.to(BF16))  # every update was rounded away
    torch.testing.assert_close(master.float(), start - 0.1, rtol=2**-8, atol=0.0)


def _tree() -> dict:
    g = torch.Generator().manual_seed(0)
    return {"a": torch.randn(5, 3, generator=g).to(BF16), "b": None, "c": torch.randn(4, generator=g)}


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        pytest.param("sgd", marks=pytest.mark.nightly),
        pytest.param("lamb", marks=pytest.mark.nightly),
        "lion",
        pytest.param("clipped", marks=pytest.mark.nightly),
    ],
)
def test_in_place_equals_pure_and_equals_float32(name: str) -> None:
    inner = {
        "adamw": optim.adamw(1e-2),
        "sgd": optim.sgd(1e-2, momentum=0.9),
        "lamb": optim.lamb(1e-2),
        "lion": optim.lion(1e-3),
        "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adam(1e-2)),
    }[name]
    tx = optim.master_weights(inner)
    pure = _tree()
    state = tx.init(pure)
    assert state.master["c"] is None and state.master["a"].dtype == torch.float32
    wide = {k: None if x is None else x.float() for k, x in _tree().items()}
    inside = inner.init(wide)
    fast, fast_state = _tree(), tx.init(_tree())
    for n in range(3):
        g = torch.Generator().manual_seed(10 + n)
        grads = {"a": torch.randn(5, 3, generator=g), "b": None, "c": torch.randn(4, generator=g)}
        u, state = tx.update(grads, state, pure)
        pure = optim.apply_updates(pure, u)
        u, inside = inner.update(grads, inside, wide)
        wide = optim.apply_updates(wide, u)
        assert torch.equal(pure["a"], wide["a"].to(BF16)) and torch.equal(pure["c"], wide["c"])
        copies = {k: None if x is None else x.clone() for k, x in grads.items()}
        fast, fast_state = optim.inplace(tx)(copies, fast_state, fast)
    for a, b in zip(tree_leaves((fast, fast_state)), tree_leaves((pure, state)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 2**-7, atol=1e-7)
    assert torch.equal(fast["a"], fast_state.master["a"].to(BF16))


def test_masters_start_from_unrounded_values() -> None:
    w = torch.tensor([1.001, 2.003])
    state = optim.master_weights(optim.sgd(0.1), param_dtypes=BF16).init([w])
    assert torch.equal(state.master[0], w) and state.master[0] is not w
    tree = optim.master_weights(optim.sgd(0.1), param_dtypes={"n": torch.float32, "w": BF16}).init({"n": w, "w": w})
    assert tree.master["n"] is None


def test_errors_name_the_leaf() -> None:
    tx = optim.master_weights(optim.sgd(0.1))
    narrow, wide = {"w": torch.ones(2, dtype=BF16)}, {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"state\.master\['w'\]"):
        tx.update(wide, tx.init(narrow), wide)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(wide, tx.init(narrow))
    with pytest.raises(ValueError, match="MasterState"):
        tx.update(narrow, optim.EmptyState(), narrow)
