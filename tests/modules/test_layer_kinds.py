"""Covers the kinds of layers of a list: those that share a stack, and the ranks' layers of stacks that are cut."""

import pytest
import torch
from torch import nn

from shardfn.modules import from_module
from shardfn.modules._layers import LayerKinds


def _kinds(pattern: str) -> LayerKinds:
    """Layers of a kind for each letter."""
    sizes = {"a": 2, "b": 3, "c": 4}
    return LayerKinds.of("layers", [nn.Linear(1, sizes[letter]) for letter in pattern])


def _ends(kinds: LayerKinds, rows: list[list[int]]) -> list[int]:
    """The number of layers of each rank, as the rank itself finds it."""
    shares, start = kinds.shares(rows), 0
    for rank, num in enumerate(shares):
        own = [by_rank[rank] for by_rank in rows]
        assert kinds.end(start, own, last=rank == len(shares) - 1) == start + num
        start += num
    return shares


def test_layers_share_a_stack_if_their_leaves_are_alike() -> None:
    kinds = _kinds("abacb")
    assert [(kind.key, kind.layers) for kind in kinds.kinds] == [("0", (0, 2)), ("1", (1, 4)), ("3", (3,))]
    assert kinds.num_layers == 5
    assert kinds.tree(["x", "y", "z"]) == {"0": "x", "1": "y", "3": "z"}
    alike = _kinds("aaa")
    assert alike.tree(["x"]) == "x"


def test_the_rows_of_a_stack_are_those_of_its_layers() -> None:
    kinds = _kinds("abab")
    stacks = [{name: torch.arange(2.0) + 10 * k for name in ("weight", "bias")} for k in (0, 1)]
    tree = kinds.tree(stacks)
    every = kinds.flat(tree, 0, 4)
    assert [float(every[f"layers.{i}.weight"]) for i in range(4)] == [0.0, 10.0, 1.0, 11.0]
    own = kinds.flat({"0": {name: x[1:] for name, x in stacks[0].items()}, "1": stacks[1]}, 2, 2)
    assert {name: float(x) for name, x in own.items() if "bias" in name} == {
        "layers.2.bias": 1.0,
        "layers.3.bias": 11.0,
    }
    with pytest.raises(ValueError, match=r"params\['layers'\]\['0'\] should have 1 layers, and has {'weight': 3"):
        kinds.flat({"0": {name: torch.zeros(3) for name in ("weight", "bias")}, "1": stacks[1]}, 2, 2)
    with pytest.raises(
        ValueError, match=r"params\['layers'\] must have the kinds of the layers, \['0', '1'\], got \['0'\]"
    ):
        kinds.flat({"0": stacks[0]}, 0, 4)
    with pytest.raises(
        ValueError, match=r"params\['layers'\]\['1'\] must have the parameters of the layers.*got \['bias'\]"
    ):
        kinds.flat({"0": stacks[0], "1": {"bias": stacks[1]["bias"]}}, 0, 4)


@pytest.mark.parametrize(
    ("pattern", "rows", "shares"),
    [
        ("abababab", [[2, 2], [2, 2]], [4, 4]),
        pytest.param("aaabaaab", [[3, 3], [1, 1]], [4, 4], marks=pytest.mark.nightly),
        pytest.param(
            "abbbb", [[1, 1], [2, 2]], [3, 2], marks=pytest.mark.nightly
        ),  # one dense layer, which all ranks have
        ("aabbbbb", [[2, 2, 2], [2, 2, 1]], [4, 2, 1]),
        pytest.param("bbbba", [[2, 2], [1, 1]], [2, 3], marks=pytest.mark.nightly),
        pytest.param(
            "bbabb", [[2, 2], [1, 1]], [2, 3], marks=pytest.mark.nightly
        ),  # an uncut layer runs with the cut one after it
        ("abbbb", [[1, 1, 1], [2, 2, 0]], [3, 2, 0]),
        pytest.param("bbbba", [[2, 2, 0], [1, 1, 1]], [2, 2, 1], marks=pytest.mark.nightly),
    ],
)
def test_ranks_have_layers_one_after_another(pattern: str, rows: list[list[int]], shares: list[int]) -> None:
    assert _ends(_kinds(pattern), rows) == shares


def test_stacks_whose_parts_are_not_in_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)rank 1 of 2.*\['0'\] from layer 1 on.*\['2'\] from layer 4 on.*P\(\)"):
        _kinds("aabbbb").shares([[1, 1], [2, 2]])


def test_a_module_of_several_kinds_is_a_function_of_a_stack_for_each() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2)])
    net.forward = lambda x: net.layers[2](net.layers[1](net.layers[0](x)))  # pyright: ignore
    params, apply = from_module(net, layers="layers")
    shapes = {key: {name: tuple(x.shape) for name, x in stack.items()} for key, stack in params["layers"].items()}
    assert shapes == {"0": {"weight": (2, 2, 2), "bias": (2, 2)}, "1": {"weight": (1, 2, 2)}}
    x = torch.randn(3, 2)
    torch.testing.assert_close(apply(params, x), net(x))
