"""Covers `sparse`: norms against sums over single elements, and smaller models against models with zeros."""

import functools
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim, sparse
from shardfn.core import tree_map
from shardfn.models import recurrent
from shardfn.models.recurrent import Config
from shardfn.sparse import (
    GroupFamily,
    LeafIndices,
    WeightGroups,
    compact,
    find_alive,
    group_lasso,
    group_norms,
    group_shrink,
)
from shardfn.testing import assert_parity, distributed

SIZES: dict[str, Any] = {"vocab_size": 11, "d_model": 6, "hidden": (8, 7)}
CONFIGS = {
    "lstm": Config(**SIZES),
    "gru": Config(**SIZES, kind="gru"),
    "highway": Config(**{**SIZES, "hidden": (7,)}, kind="highway", depth=2),
    "tied": Config(**{**SIZES, "hidden": (8, 6)}, tie_embeddings=True),
}
TOKENS = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))


def params_of(config: Config) -> Any:
    return tree_map(lambda x: x.double(), recurrent.init(config, sf.key(0)))


def mask_of(groups: WeightGroups, params: Any, name: str, k: int) -> Any:
    """1 at the elements of a group, element by element."""
    masks = {path: torch.zeros(shape, dtype=torch.float64) for path, shape in groups.shapes.items()}
    for at in groups.families[name].places:
        masks[at.path].select(at.dim, at.start + k).fill_(1)
    leaves, treedef = sf.tree_flatten(params)
    assert len(leaves) == len(masks)
    return sf.tree_unflatten(treedef, [masks[path] for path in sparse.leaf_shapes(params)])


def without(groups: WeightGroups, params: Any, dead: dict[str, list[int]]) -> Any:
    """Parameters with zeros in some groups."""
    for name, numbers in dead.items():
        for k in numbers:
            params = tree_map(lambda x, m: x * (1 - m), params, mask_of(groups, params, name, k))
    return params


DEAD = {"lstm": {"layers.0": [0, 5], "layers.1": [6]}, "gru": {"layers.0": [7], "layers.1": [1, 2]}}
DEAD |= {"highway": {"layers.0": [3, 4]}, "tied": {"layers.0": [2], "layers.1": [0, 3]}}


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_count_each_element_once(name: str) -> None:
    config = CONFIGS[name]
    groups, params = recurrent.units(config), params_of(config)
    norms = group_norms(groups, params)
    for family in groups.families:
        for k in range(groups.families[family].size):
            mask = mask_of(groups, params, family, k)
            want = sum(((x * m) ** 2).sum() for x, m in zip(sf.tree_leaves(params), sf.tree_leaves(mask), strict=True))
            torch.testing.assert_close(norms[family][k], torch.as_tensor(want).sqrt(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_dead_units_equals_the_model_with_zeros(name: str) -> None:
    config = CONFIGS[name]
    groups = recurrent.units(config)
    params = without(groups, params_of(config), DEAD[name])
    alive = find_alive(groups, params)
    assert {family: len(kept) for family, kept in alive.items()} == {
        family: f.size - len(DEAD[name][family]) for family, f in groups.families.items()
    }
    smaller = recurrent.without_units(config, alive)
    want, got = (
        recurrent.apply(c, p, TOKENS) for c, p in ((config, params), (smaller, compact(groups, params, alive)))
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert recurrent.num_params(smaller) == sum(x.numel() for x in sf.tree_leaves(compact(groups, params, alive)))


def test_moments_follow_and_training_goes_on_as_with_zeros() -> None:
    config, batch = CONFIGS["lstm"], {"tokens": TOKENS}
    groups = recurrent.units(config)
    step = sf.sharded_step(functools.partial(recurrent.loss, config), optim.adam(0.01))
    state = step.init(without(groups, params_of(config), DEAD["lstm"]))
    state, _ = step(state, batch)
    alive = find_alive(groups, state.params)
    smaller = recurrent.without_units(config, alive)
    assert smaller.hidden == (6, 6)
    step_of_smaller = sf.sharded_step(functools.partial(recurrent.loss, smaller), optim.adam(0.01), donate=False)
    small = compact(groups, state, alive)
    for _ in range(2):
        small, a = step_of_smaller(small, batch)
        state, b = step(state, batch)
        torch.testing.assert_close(a["loss"], b["loss"], rtol=1e-12, atol=0)
    want = compact(groups, sf.unshard(state.params), alive)
    for x, y in zip(sf.tree_leaves(sf.unshard(small.params)), sf.tree_leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_group_shrink_is_the_proximal_step_of_groups_without_common_elements() -> None:
    groups = WeightGroups(
        {"rows": GroupFamily(3, (LeafIndices("w", 0), LeafIndices("b", 0, 1)))}, {"w": (3, 2), "b": (5,)}
    )
    generator = torch.Generator().manual_seed(0)
    p = {"w": torch.randn(3, 2, generator=generator, dtype=torch.float64)}
    p["b"] = torch.randn(5, generator=generator, dtype=torch.float64)
    p["w"][1], p["b"][2] = 0.4, 0.5
    updates, _ = group_shrink(groups, 1.2).update(tree_map(torch.zeros_like, p), (), p)
    new = {name: p[name] + updates[name] for name in p}
    assert torch.equal(new["b"][[0, 4]], p["b"][[0, 4]])
    for k in range(3):
        old, got = (torch.cat([q["w"][k], q["b"][k + 1 : k + 2]]) for q in (p, new))
        if not got.any():  # 0 is the minimum of |z - old|^2 / 2 + 1.2 |z| if and only if |old| <= 1.2
            assert old.norm() <= 1.2
        else:  # the gradient is 0
            torch.testing.assert_close(got - old + 1.2 * got / got.norm(), torch.zeros(3).double(), rtol=0, atol=1e-12)
    assert {bool(x) for x in new["w"].any(1)} == {True, False}


def test_group_shrink_takes_a_schedule() -> None:
    config, batch = CONFIGS["lstm"], {"tokens": TOKENS}
    groups = recurrent.units(config)
    strengths = [0.0, 0.4, 0.1]
    found = []
    for jitted in (False, True):
        loss: Any = functools.partial(recurrent.loss, config)
        loss = sf.jit(loss, backend="graph") if jitted else loss
        scheduled = group_shrink(groups, lambda count: 0.4 * (count == 1) + 0.1 * (count == 2))
        step = sf.sharded_step(loss, optim.chain(optim.sgd(0.1), scheduled))
        state = step.init(params_of(config))
        for _ in strengths:
            state, _ = step(state, batch)
        found.append(sf.unshard(state.params))
    params = params_of(config)
    for strength in strengths:  # the same by numbers
        step = sf.sharded_step(
            functools.partial(recurrent.loss, config), optim.chain(optim.sgd(0.1), group_shrink(groups, strength))
        )
        state, _ = step(step.init(params), batch)
        params = sf.unshard(state.params)
    for one in found:
        for x, y in zip(sf.tree_leaves(one), sf.tree_leaves(params), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)


def test_the_gradient_of_the_penalty() -> None:
    config = CONFIGS["highway"]
    groups, params = recurrent.units(config), params_of(config)

    def penalty(w: Tensor) -> Tensor:
        return group_lasso(groups, params | {"head": w}, 0.5)

    assert torch.autograd.gradcheck(penalty, (params["head"].requires_grad_(),))


@pytest.mark.nightly
@distributed(world=2)
def test_norms_penalties_and_shrinking_on_two_ranks() -> None:
    torch.set_num_threads(1)
    config = CONFIGS["tied"]
    groups, params = recurrent.units(config), params_of(config)
    for layout in ({"tp": 2}, {"dp": 2}):
        specs = recurrent.specs(config, tp="tp")

        def loss(params: Any, batch: Any, *, axis: Any = None, specs: Any = None) -> Tensor:
            found = recurrent.loss(config, params, batch, axis=axis)
            return found + group_lasso(groups, params, 0.01, specs=specs)

        run = assert_parity(
            functools.partial(loss, axis="tp", specs=specs),
            optim.chain(optim.sgd(0.1, momentum=0.5), group_shrink(groups, lambda count: 0.3 * (count + 1))),
            params,
            [{"tokens": TOKENS}] * 2,
            mesh=sf.make_mesh(layout),
            reference=loss,
            specs=specs,
            batch=sf.P("dp"),
            zero=sf.Zero(stage=3, persist_elements=0) if "dp" in layout else None,
        )
        assert min(x.min() for x in group_norms(groups, run.params).values()) < 1.0


def test_bad_groups_are_refused(tmp_path: pathlib.Path) -> None:
    shapes = {"w": (8, 3), "head": (2, 8)}
    wrong = r"(?s)'a' is in hed, which is not a leaf.*'head'.*'b' is in dim 2 of w.*'c' is in indices 5 to 8"
    with pytest.raises(ValueError, match=wrong):
        places = {"a": LeafIndices("hed", 0), "b": LeafIndices("w", 2), "c": LeafIndices("w", 0, 5)}
        WeightGroups({name: GroupFamily(4, (at,)) for name, at in places.items()}, shapes)
    with pytest.raises(ValueError, match=r"index 3 of dim 0 of w is in group 3 of 'a' and in group 0 of 'b'"):
        WeightGroups(
            {"a": GroupFamily(4, (LeafIndices("w", 0),)), "b": GroupFamily(4, (LeafIndices("w", 0, 3),))}, shapes
        )
    groups = WeightGroups({"a": GroupFamily(8, (LeafIndices("w", 0), LeafIndices("head", 1)))}, shapes)
    with pytest.raises(
        ValueError, match=r"all 8 groups of 'a' are at 0.0 or below, and a whole layer would be removed"
    ):
        find_alive(groups, {"w": torch.zeros(8, 3), "head": torch.zeros(2, 8)})
    with pytest.raises(ValueError, match=r"(?s)head is not in the tree, which has w.*"):
        find_alive(groups, {"w": torch.zeros(8, 3)})
    with pytest.raises(ValueError, match=r"nu.w is \(8,\), and its parameter \(8, 3\)"):
        compact(groups, {"nu": {"w": torch.zeros(8)}}, {"a": torch.arange(3)})
    with pytest.raises(ValueError, match=r"'a' would keep no group"):
        compact(groups, {}, {"a": torch.arange(0)})
    with pytest.raises(ValueError, match="strength must be at least 0, got -1"):
        group_shrink(groups, -1)
    text = json.dumps(
        {
            "u": [
                {"var_name": "w", "axis": 0, "start": 0, "end": 8},
                {"var_name": "head", "axis": 1, "start": 0, "end": 7},
            ]
        }
    )
    (tmp_path / "groups.json").write_text(text)
    with pytest.raises(ValueError, match=r"'u': a place must have 8 indices, as the first place"):
        sparse.read_groups(tmp_path / "groups.json", {"w": torch.zeros(8, 3), "head": torch.zeros(2, 8)})


def test_units_of_a_module_of_torch_by_json() -> None:
    class Tagger(torch.nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(3, hidden, batch_first=True), torch.nn.Linear(hidden, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    torch.manual_seed(0)
    params = {name: x.detach() for name, x in Tagger(6).named_parameters()}
    rows = [f"lstm.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    places = [{"var_name": n, "axis": 0, "start": 6 * k, "end": 6 * k + 6} for n in rows for k in range(4)]
    places += [{"var_name": n, "axis": 1, "start": 0, "end": 6} for n in ("lstm.weight_hh_l0", "head.weight")]
    groups = sparse.read_groups({"units": places}, params)
    params = {name: x.clone() for name, x in params.items()}
    for at in groups.families["units"].places:
        params[at.path].select(at.dim, at.start + 2).zero_()
    alive = find_alive(groups, params)
    assert alive["units"].tolist() == [0, 1, 3, 4, 5]
    x = torch.randn(2, 4, 3)
    want, got = (
        torch.func.functional_call(Tagger(hidden), p, (x,))
        for hidden, p in ((6, params), (5, compact(groups, params, alive)))
    )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
