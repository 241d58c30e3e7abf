"""Covers `nn/recurrent`: layers against torch's modules and formulas, structured maps against their matrices."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.nn import recurrent
from shardfn.nn.recurrent import CellWeights, Structure, apply_map, count_flops, dense_matrix, map_shapes, map_specs
from shardfn.testing import distributed

B, T, D, H = 3, 6, 5, 7
STRUCTURES = {
    "dense": recurrent.dense(),
    "block_diagonal": recurrent.block_diagonal(3),
    "shuffled": recurrent.shuffled(2),
    "grouped_low_rank": recurrent.grouped_low_rank(2, 4),
    "low_rank": recurrent.low_rank(3),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves_of(structure: Structure, gates: int, outputs: int, inputs: int, seed: int = 0) -> Any:
    shapes = map_shapes(structure, gates, outputs, inputs)
    if isinstance(shapes, dict):
        return {name: drawn(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    return drawn(*shapes, seed=seed)


def of_torch(kind: str) -> tuple[torch.nn.RNNBase, CellWeights]:
    """A layer of torch, and the same weights."""
    torch.manual_seed(0)
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](D, H, batch_first=True).double()
    p, gates = dict(module.named_parameters()), {"lstm": 4, "gru": 3}[kind]
    of_x, of_h = p["bias_ih_l0"].view(gates, H), p["bias_hh_l0"].view(gates, H)
    b = of_x + of_h if kind == "lstm" else torch.stack([of_x[0] + of_h[0], of_x[1] + of_h[1], of_x[2], of_h[2]])
    return module, CellWeights(p["weight_ih_l0"].view(gates, H, D), p["weight_hh_l0"].view(gates, H, H), b)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_layers_equal_those_of_torch_from_any_state_with_gradients(kind: str) -> None:
    module, weights = of_torch(kind)
    x, h, c = drawn(B, T, D).requires_grad_(), drawn(B, H, seed=1), drawn(B, H, seed=2)
    want, last = module(x, (h[None], c[None]) if kind == "lstm" else h[None])
    layer = getattr(recurrent, kind)
    state = recurrent.LSTMState(h, c) if kind == "lstm" else h
    got, new = layer(x, weights, state, hidden=H)
    pairs = (
        [(got, want), *zip(new, (y[0] for y in last), strict=True)] if kind == "lstm" else [(got, want), (new, last[0])]
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    leaves = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(want.sin().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_lstm_under_vmap_and_with_a_dense_structure_of_full_rank_equals_torchs_op() -> None:
    _, w = of_torch("lstm")
    w = CellWeights(*(x.detach() for x in w))
    xs = drawn(2, B, T, D)
    mapped = torch.func.vmap(lambda x: recurrent.lstm(x, w, hidden=H)[0])(xs)
    torch.testing.assert_close(mapped[1], recurrent.lstm(xs[1], w, hidden=H)[0], rtol=1e-12, atol=1e-12)
    factored = {"first": torch.eye(H, dtype=torch.float64)[None], "last": w.w_h}
    maps = (recurrent.dense(), recurrent.low_rank(H))
    got = recurrent.lstm(xs[0], w._replace(w_h=factored), hidden=H, maps=maps)[0]
    torch.testing.assert_close(got, mapped[0], rtol=1e-12, atol=1e-12)


def test_a_highway_layer_is_its_formulas() -> None:
    depth = 3
    w = CellWeights(drawn(2, H, D), drawn(depth, 2, H, H, seed=1), drawn(depth, 2, H, seed=2))
    x = drawn(B, T, D, seed=3)
    got, state = recurrent.highway(x, w, hidden=H)
    for b in range(B):
        s = torch.zeros(H, dtype=torch.float64)
        for t in range(T):
            for k in range(depth):
                n, gate = (w.w_h[k, j] @ s + w.b[k, j] + (w.w_x[j] @ x[b, t] if k == 0 else 0) for j in range(2))
                gate = 1 / (1 + torch.exp(-gate))
                s = torch.tanh(n) * gate + s * (1 - gate)
            torch.testing.assert_close(got[b, t], s, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[b], s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structured_map_is_its_matrix_with_the_counted_flops(name: str) -> None:
    structure, x = STRUCTURES[name], drawn(B, T, 6)
    leaves = leaves_of(structure, 4, H, 6)
    matrix = dense_matrix(structure, leaves, outputs=H, inputs=6)
    want = torch.einsum("knm,btm->btkn", matrix, x)
    torch.testing.assert_close(apply_map(structure, leaves, x, outputs=H), want, rtol=1e-12, atol=1e-12)
    parts = leaves.values() if isinstance(leaves, dict) else [leaves]
    assert count_flops(structure, 4, H, 6) == 2 * sum(part.numel() for part in parts)
    by_hand = torch.zeros_like(matrix)
    if name == "block_diagonal":  # 7 outputs in groups of 3, 6 inputs in groups of 2
        for n in range(H):
            by_hand[:, n, n // 3 * 2 : n // 3 * 2 + 2] = leaves[n // 3, :, n % 3]
        assert torch.equal(matrix, by_hand)
    assert torch.linalg.matrix_rank(matrix.flatten(0, 1)) == {"grouped_low_rank": 4, "low_rank": 3}.get(name, 6)


def test_a_shuffled_map_lets_all_outputs_see_all_inputs() -> None:
    structure = recurrent.shuffled(3)
    matrix = dense_matrix(structure, leaves_of(structure, 1, 9, 9), outputs=9, inputs=9)
    assert (matrix != 0).all()


def test_structures_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups must be at least 1, got 0"):
        recurrent.block_diagonal(0)
    with pytest.raises(ValueError, match=r"(?s)groups=9 of a map from 6 to 7 features.*"):
        map_shapes(recurrent.block_diagonal(9), 1, 7, 6)
    with pytest.raises(ValueError, match=r"rank=7 of a map from 6 to 28 features; a rank is at most 6"):
        map_shapes(recurrent.low_rank(7), 4, 7, 6)
    with pytest.raises(ValueError, match=r"hidden=7 over 1 ranks must have biases of shape \(4, 7\), got \(4, 6\)"):
        recurrent.gru(drawn(1, 1, D), CellWeights(drawn(3, 6, D), drawn(3, 6, 6), drawn(4, 6)), hidden=7)


@distributed(world=2)
def test_structured_maps_on_two_ranks() -> None:
    mesh = sf.make_mesh({"tp": 2})
    x = drawn(B, 6)
    for name, structure in STRUCTURES.items():
        groups = structure.groups if structure.groups == 1 else 4  # whole groups on each rank
        structure = Structure(groups, structure.first_groups, structure.rank, structure.shuffle)
        if structure.shuffle:
            structure = recurrent.shuffled(4)
        leaves = leaves_of(structure, 4, 8, 6)

        def run(leaves: Any, x: Tensor, structure: Structure = structure) -> Tensor:
            y = apply_map(structure, leaves, sf.nn.enter_parallel(x, "tp"), outputs=8, axis="tp")
            return sf.all_gather_invariant(y, "tp", dim=-1, size=8)

        specs = map_specs(structure, "tp")
        got = sf.shard_map(run, mesh=mesh, in_specs=(specs, sf.P()), out_specs=sf.P())(leaves, x)
        torch.testing.assert_close(got, apply_map(structure, leaves, x, outputs=8), rtol=1e-12, atol=1e-12, msg=name)
    odd = recurrent.block_diagonal(3)

    def run_odd(w: Tensor, x: Tensor) -> Tensor:
        return apply_map(odd, w, x, outputs=6, axis="tp")

    with pytest.raises(ValueError, match="must have whole groups on each rank"):
        specs = (map_specs(odd, "tp"), sf.P())
        sf.shard_map(run_odd, mesh=mesh, in_specs=specs, out_specs=sf.P("tp"))(leaves_of(odd, 1, 6, 6), x)
