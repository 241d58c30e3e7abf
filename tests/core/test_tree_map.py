"""Covers the functions of trees in users' scripts: mapping over a state gives a state, for type checkers as well."""

from typing import assert_type

import torch

import shardfn as sf


def test_a_state_becomes_a_state() -> None:
    step = sf.sharded_step(lambda p, x: (p["w"] * x).mean(), sf.optim.adamw(0.1))
    state = step.init({"w": torch.ones(3)})
    shapes = sf.tree_map(lambda x: tuple(x.shape), state)
    assert_type(shapes, sf.TrainState)
    assert isinstance(shapes, sf.TrainState) and shapes.params == {"w": (3,)}
    leaves, structure = sf.tree_flatten(state)
    assert structure == sf.tree_structure(state) and leaves == sf.tree_leaves(state)
    assert sf.tree_paths(state, "state")[0] == "state.params['w']"
    again = sf.tree_unflatten(structure, leaves)
    assert isinstance(again, sf.TrainState) and again.params["w"] is state.params["w"]


def test_trees_of_several_kinds() -> None:
    tree = {"b": [1, None], "a": (2,)}
    assert sf.tree_map(lambda x, y: x + y, tree, tree) == {"b": [2, None], "a": (4,)}
    assert sf.tree_map(lambda x: x, {"a": (1, 2)}, is_leaf=lambda x: isinstance(x, tuple)) == {"a": (1, 2)}
    assert sf.tree_leaves(tree, none_is_leaf=True) == [2, 1, None]
