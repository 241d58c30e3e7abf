"""Covers modules compiled by torch.compile, and their names."""

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn.testing import distributed

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Layers in a list and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x) * self.scale


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _whole(net: Any) -> Any:
    return torch.compile(net, backend="eager")


def _in_place(net: Any) -> Any:
    net.compile(backend="eager")
    return net


def _layers(net: Any) -> Any:
    for i, layer in enumerate(net.layers):
        net.layers[i] = torch.compile(layer, backend="eager")
    return net


COMPILED: list[Callable[[nn.Module], nn.Module]] = [_whole, _in_place, _layers, lambda net: _whole(_layers(net))]


def _from_module(module: nn.Module, **options: Any) -> Any:
    with pytest.warns(UserWarning, match=r'without torch.compile.*sf.jit\(loss, backend="inductor"\)'):
        return sf.from_module(module, **options)


@pytest.mark.nightly
@distributed(world=[2])
def test_a_step_over_a_compiled_module_is_that_of_the_module(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")

    def trained(params: Any, apply: Any) -> Any:
        zero = sf.Zero(stage=3, persist_elements=0)
        step = sf.sharded_step(lambda p, x: apply(p, x).square().mean(), sf.optim.sgd(0.1), mesh=mesh, zero=zero)
        state, _ = step(step.init(params), X[step.rows(4)])
        return state

    want = sf.unshard(trained(*sf.from_module(_net())).params)
    for n, compiled in enumerate(COMPILED):
        module = compiled(_net())
        state = trained(*_from_module(module))
        got = sf.unshard(state.params)
        assert got.keys() == want.keys() and all(torch.equal(x, want[name]) for name, x in got.items())
        sf.export(state, module, tmp_path / str(n))
        torch.distributed.barrier()
        assert set(sf.interop.Archive(tmp_path / str(n))) == {*want, "scale"}
        sf.to_module(state, module)
        written = {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}
        assert all(torch.equal(p, want[name]) for name, p in written.items())


@pytest.mark.day("<lambda>")
@pytest.mark.parametrize(
    "compiled", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(COMPILED)]
)
def test_the_module_stays_compiled(compiled: Any) -> None:
    module = compiled(_net())
    before = [(sub, dict(sub.__dict__)) for sub in module.modules()]
    params, apply = _from_module(module)
    torch.testing.assert_close(apply(params, X), _net()(X))
    assert all(sub.__dict__ == attributes for sub, attributes in before)


def test_names_in_files_are_those_of_the_module(tmp_path: pathlib.Path) -> None:
    module = _layers(_net())
    sf.interop.module_to_hf(module, dict(sf.from_module(_net())[0]), tmp_path)
    read = sf.interop.module_from_hf(_whole(_layers(_net())), tmp_path)
    assert read.keys() == dict(_net().named_parameters()).keys()


def test_the_configuration_names_the_class_of_the_module(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, use_cache=False, **sizes))
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    params, apply = _from_module(compiled)
    ids = torch.arange(6).view(1, 6)
    torch.testing.assert_close(apply(params, input_ids=ids).logits, model(input_ids=ids).logits)
    sf.interop.module_to_hf(compiled, params, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_compiled_layers_are_stacked_under_their_names() -> None:
    want, plain = sf.from_module(_net(), layers="layers")
    params, apply = _from_module(_layers(_net()), layers="layers")
    assert params["layers"].keys() == want["layers"].keys() == {"0.weight", "0.bias"}
    torch.testing.assert_close(apply(params, X), plain(want, X))


def test_compiled_layers_of_two_kinds_are_stacked_under_their_names() -> None:
    def net() -> Any:
        made: Any = _net()
        made.layers.insert(0, nn.Linear(3, 3))
        return made

    want, plain = sf.from_module(net(), layers="layers")
    params, apply = _from_module(_layers(net()), layers="layers")
    for key, stack in {"0": {"weight", "bias"}, "1": {"0.weight", "0.bias"}}.items():
        assert params["layers"][key].keys() == want["layers"][key].keys() == stack
    torch.testing.assert_close(apply(params, X), plain(want, X))
