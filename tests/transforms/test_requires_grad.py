"""Covers the default of `trainable` for parameters of a module: those with requires_grad=False do not change."""

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn.testing import distributed

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
ZERO = sf.Zero(stage=3, persist_elements=0)
FROZEN = ("0.weight", "0.bias")


class Layered(nn.Module):
    """Two layers in a list, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def _module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    module[0].requires_grad_(False)
    return module


def _trained(module: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """The parameters after steps of torch's AdamW, which sees those with gradients alone."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def _step(apply: Any, mesh: Any = None, wrap: Any = lambda f: f, **options: Any) -> Any:
    optimizer = sf.optim.adamw(1e-2, weight_decay=0.1)
    return sf.sharded_step(wrap(lambda p, x: apply(p, x).square().mean()), optimizer, mesh=mesh, **options)


def _run(step: Any, params: Any, *args: Any, steps: int = 2) -> Any:
    state = step.init(params, *args)
    for _ in range(steps):
        state, _ = step(state, X[step.rows(6)])
    return state


def _assert_same(state: Any, module: nn.Module) -> None:
    want, before = _trained(module), dict(module.named_parameters())
    for name, x in sf.unshard(state.params).items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(x, before[name].detach()) is not before[name].requires_grad


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_a_step_equals_torch_with_frozen_parameters(world: int) -> None:
    module, mesh = _module(), sf.make_mesh({"dp": -1}, device="cpu")
    params, apply = sf.from_module(module)
    for zero in (0, 2, ZERO):
        state = _run(_step(apply, mesh, zero=zero), params)
        _assert_same(state, module)
        moments = state.opt_state[0] if isinstance(state.opt_state, tuple) else state.opt_state
        assert len(sf.tree_leaves(moments)) == len(sf.tree_leaves(_run(_step(apply, mesh), params, steps=0).opt_state))
    _assert_same(_run(_step(apply, mesh, sf.jit, zero=ZERO), params), module)


@pytest.mark.parametrize(
    "journey",
    [
        lambda params, module: sf.tree_map(torch.clone, params),
        pytest.param(
            lambda params, module: {name: x.double().float() for name, x in params.items()}, marks=pytest.mark.nightly
        ),
        pytest.param(lambda params, module: dict(module.named_parameters()), marks=pytest.mark.nightly),
        lambda params, module: lambda: sf.from_module(_module())[0],
    ],
    ids=["clone", "convert", "named_parameters", "function"],
)
def test_the_flag_survives(journey: Any) -> None:
    module = _module()
    params, apply = sf.from_module(module)
    _assert_same(_run(_step(apply), journey(params, module)), module)


@pytest.mark.nightly
def test_a_state_without_data_has_no_moments_of_frozen_leaves() -> None:
    params, apply = sf.from_module(_module())
    step = _step(apply)
    for given in (params, {name: x.to("meta") for name, x in params.items()}, lambda: params):
        state = sf.eval_shape(step.init, given)
        assert [x.shape for x in sf.tree_leaves(state.opt_state)] == [
            x.shape for x in sf.tree_leaves(step.init(params).opt_state)
        ]
    assert step.lower(params, X).memory_analysis().peak == step.lower(step.init(params), X).memory_analysis().peak


def test_another_step_and_a_checkpoint_leave_it_frozen(tmp_path: pathlib.Path) -> None:
    module = _module()
    params, apply = sf.from_module(module)
    state = _run(_step(apply), params, steps=1)
    sf.checkpoint.save(tmp_path, state)
    blank = {name: x if name in FROZEN else torch.zeros_like(x) for name, x in params.items()}
    restored = sf.checkpoint.restore(tmp_path, _step(apply).init(blank)).tree
    for now in (restored, state):
        now, _ = _step(apply)(now, X)  # a step that has made no state of its own
        _assert_same(now, module)


def test_an_explicit_tree_overrides_the_flag() -> None:
    module = _module()
    params, apply = sf.from_module(module)
    before = {name: x.clone() for name, x in params.items()}
    state = _run(_step(apply, trainable=True), params)
    assert not any(torch.equal(x, before[name]) for name, x in sf.unshard(state.params).items())
    state = _run(_step(apply, trainable={name: name in FROZEN for name in params}), params)
    assert [n for n, x in sf.unshard(state.params).items() if not torch.equal(x, before[n])] == list(FROZEN)


def test_a_wholly_frozen_module_is_refused() -> None:
    params, apply = sf.from_module(_module().requires_grad_(False))
    with pytest.raises(ValueError, match=r"requires_grad=False.*params\['0.weight'\]"):
        _step(apply).init(params)
    state = _run(_step(apply, trainable=False), params)
    assert sf.tree_leaves(state.opt_state)[1:] == []


def test_leaves_beside_a_module_are_trained() -> None:
    params, apply = sf.from_module(_module())
    step = sf.sharded_step(lambda p, x: (apply(p["net"], x) * p["scale"]).square().mean(), sf.optim.sgd(0.1))
    state, _ = step(step.init({"net": params, "scale": torch.ones(())}), X)
    assert state.params["scale"].full_tensor() != 1
    assert torch.equal(state.params["net"]["0.weight"].full_tensor(), params["0.weight"])


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_are_frozen_as_a_stack(stacked: bool) -> None:
    torch.manual_seed(0)
    module = Layered()
    module.layers.requires_grad_(False)
    params, apply = sf.from_module(module, layers="layers")
    specs = {name: sf.Sharding(sf.P(), stacked=stacked) if name == "layers" else sf.P() for name in params}
    state = _run(_step(apply, specs=specs), params)
    want = _trained(module)
    for name, x in sf.unshard(state.params["layers"]).items():
        assert torch.equal(x, params["layers"][name])
    torch.testing.assert_close(state.params["last.weight"].full_tensor(), want["last.weight"], rtol=1e-5, atol=1e-6)


def test_layers_cannot_be_stacked_if_some_are_frozen() -> None:
    module = Layered()
    module.layers[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers\.1\.weight\.requires_grad is True, layers\.0\.weight"):
        sf.from_module(module, layers="layers")


class Gate(nn.Module):
    """A layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _two_kinds() -> Layered:
    """Frozen linear layers, and a gate behind each."""
    torch.manual_seed(0)
    module = Layered()
    module.layers = nn.ModuleList([nn.Linear(5, 5), Gate(), nn.Linear(5, 5), Gate()])
    for layer in (module.layers[0], module.layers[2]):
        layer.requires_grad_(False)
    return module


def _assert_gates_train(state: Any, apply: Any, module: nn.Module) -> None:
    full = sf.unshard(state.params)
    flat = {name: x for name, x in full.items() if name != "layers"} | apply.kinds.flat(full["layers"], 0, 4)
    _assert_same(state._replace(params=flat), module)


def test_one_of_two_kinds_of_layers_is_frozen() -> None:
    module = _two_kinds()
    params, apply = sf.from_module(module, layers="layers")
    frozen, trained = params["layers"]["0"], params["layers"]["1"]
    assert all(sf.core.is_frozen(x) for x in frozen.values()) and not sf.core.is_frozen(trained["scale"])
    assert apply.trainable == {
        "layers": {"0": {"weight": False, "bias": False}, "1": {"scale": True}},
        "last.weight": True,
        "last.bias": True,
    }
    _assert_gates_train(_run(_step(apply), params), apply, module)
    plain = sf.tree_map(lambda x: x.detach().as_subclass(Tensor), params)
    _assert_gates_train(_run(_step(apply, trainable=apply.trainable), plain), apply, module)
    module.layers[3].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"(?s)all layers of a kind.*layers\.3\.scale\.requires_grad is False, layers\.1"
    ):
        sf.from_module(module, layers="layers")


def test_padded_stacks_are_frozen_as_the_layers() -> None:
    module = _two_kinds()
    module.layers[0].bias.requires_grad_(True)
    module.layers[2].bias.requires_grad_(True)
    stack = sf.from_module(module, layers="layers")[0]["layers"]["0"]
    padded = sf.pad_layers(stack, (1, 1))
    for leaves in (stack, padded, sf.unpad_layers(padded, (1, 1))):
        assert {name: sf.core.is_frozen(x) for name, x in leaves.items()} == {"weight": True, "bias": False}


@distributed(world=2)
def test_stages_leave_a_frozen_kind_of_layers() -> None:
    module, mesh = _two_kinds(), sf.make_mesh({"pp": 2}, device="cpu")
    params, apply = sf.from_module(module, layers="layers")
    specs: dict[str, Any] = {name: sf.P() for name in params}
    for cut in (sf.P("pp"), {"0": sf.P("pp"), "1": sf.P()}):
        piped = sf.pipeline_module(lambda p, x: apply(p, x).square().mean(), apply, num_microbatches=2)
        step = sf.sharded_step(
            piped, sf.optim.adamw(1e-2, weight_decay=0.1), mesh=mesh, specs={**specs, "layers": cut}, batch=sf.P()
        )
        _assert_gates_train(_run(step, params), apply, module)


def test_the_files_of_a_module_follow_its_flags(tmp_path: pathlib.Path) -> None:
    module = _module()
    sf.interop.module_to_hf(module, dict(module.named_parameters()), tmp_path)
    with sf.interop.without_weights():
        empty = _module()
    _, apply = sf.from_module(empty)
    state = _run(_step(apply), sf.interop.module_from_hf(empty, tmp_path))
    _assert_same(state, module)
    sf.to_module(state, empty)
    assert {name: p.requires_grad for name, p in empty.named_parameters()} == {
        name: p.requires_grad for name, p in module.named_parameters()
    }


def test_the_parity_harness_knows_the_default() -> None:
    params, apply = sf.from_module(_module())
    loss: Any = lambda p, x: apply(p, x).square().mean()  # noqa: E731
    run = sf.testing.assert_parity(loss, sf.optim.adamw(1e-2), params, [X, X], mesh=None)
    assert torch.equal(run.params["0.weight"], params["0.weight"])


def test_weights_from_elsewhere_take_the_flags_of_the_function() -> None:
    module = _module()
    params, apply = sf.from_module(module)
    elsewhere = {name: x.detach().clone() for name, x in module.named_parameters()}
    _assert_same(_run(_step(apply, trainable=apply.trainable), elsewhere), module)
    assert apply.trainable == {name: name not in FROZEN for name in params}
    layered = Layered()
    layered.layers.requires_grad_(False)
    _, apply = sf.from_module(layered, layers="layers")
    assert apply.trainable == {
        "layers": {"weight": False, "bias": False},
        "last.weight": True,
        "last.bias": True,
    }


def test_an_unfrozen_leaf_begins_as_at_init_and_the_others_go_on(tmp_path: pathlib.Path) -> None:
    params, apply = sf.from_module(_module())
    state = _run(_step(apply), params)
    sf.checkpoint.save(tmp_path, state)
    unfrozen = _step(apply, trainable=True)
    now = sf.checkpoint.restore(tmp_path, unfrozen.init(params), partial=True).tree
    assert int(now.step) == 2
    found = dict(zip(sf.core.tree_paths(now.opt_state, ""), sf.tree_leaves(sf.unshard(now.opt_state)), strict=True))
    kept = dict(zip(sf.core.tree_paths(state.opt_state, ""), sf.tree_leaves(sf.unshard(state.opt_state)), strict=True))
    assert found.keys() > kept.keys() and all(torch.equal(x, found[path]) for path, x in kept.items())
    assert all(not x.any() for path, x in found.items() if path not in kept)
    now, _ = unfrozen(now, X)
    assert not any(torch.equal(now.params[name].full_tensor(), params[name]) for name in FROZEN)
