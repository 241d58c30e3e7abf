"""Covers shardfn/interop/_trained.py: trained parameters, out of a state, unrounded."""

import functools
import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import sparse
from shardfn.models import gpt, recurrent
from shardfn.testing import distributed


def _module() -> nn.Module:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[3].weight = nn.Parameter(torch.eye(3))
    return module


def _trained(mesh: sf.Mesh, module: nn.Module, policy: sf.Policy | None, **settings: Any) -> Any:
    """The state after three steps whose updates are too small for 16 bits."""
    params, apply = sf.from_module(module)

    def loss(p: Any, x: Any) -> Any:
        return apply(p, x).float().square().mean()

    wrapped = loss if policy is None else sf.mixed_precision(loss, policy)
    step = sf.sharded_step(wrapped, sf.optim.adam(1e-4), mesh=mesh, zero=sf.Zero(stage=3), **settings)
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 5))
    return state


@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_masters_come_out_not_their_roundings(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    module = _module()
    state = _trained(
        mesh,
        module,
        sf.Policy.bf16(),
        trainable={"3.weight": False} | dict.fromkeys(("0.weight", "0.bias", "2.weight"), True),
    )
    wide = sf.unshard(sf.master_params(state))
    rounded = sf.unshard(state.params)
    for name in ("0.weight", "0.bias", "2.weight"):
        assert wide[name].dtype == torch.float32 and torch.equal(wide[name].bfloat16(), rounded[name])
        assert not torch.equal(wide[name], rounded[name].float())
    sf.to_module(state, module)
    assert all(torch.equal(p, wide[n].float()) for n, p in module.named_parameters())
    sf.export(state, module, tmp_path)
    torch.distributed.barrier() if world > 1 else None
    read: dict[str, Any] = sf.interop.module_from_hf(_module(), tmp_path)
    assert all(torch.equal(x.full(), wide[n]) for n, x in read.items())
    other = _module()
    before = {n: p.clone() for n, p in other.named_parameters()}
    sf.to_module(state, other, rank0_only=True)
    assert all(torch.equal(p, before[n] if mesh.rank else wide[n].float()) for n, p in other.named_parameters())


@pytest.mark.nightly
def test_parameters_that_are_wide_are_their_own_masters() -> None:
    state = _trained(sf.make_mesh({"dp": 1}, device="cpu"), _module(), None)
    masters = sf.master_params(state)
    assert all(masters[name] is x for name, x in state.params.items())


def test_a_module_without_weights_gets_them_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("seen", torch.zeros(()))

    params, _ = sf.from_module(Tied())
    step = sf.sharded_step(lambda p, s, x: (p["a.weight"].sum() * x.sum(), s), sf.optim.sgd(0.1), has_state=True)
    state = step.init(params, model_state={"seen": torch.tensor(7.0)})
    with sf.interop.without_weights():
        module = Tied()
    sf.to_module(state, module)
    assert module.a.weight is module.b.weight and torch.equal(module.a.weight, params["a.weight"])
    assert isinstance(module.seen, torch.Tensor) and module.seen == 7


def test_leaves_that_do_not_fit_are_listed() -> None:
    state = _trained(sf.make_mesh({"dp": 1}, device="cpu"), nn.Sequential(nn.Linear(5, 7)), None)
    with pytest.raises(ValueError, match=r"0\.weight is \(7, 5\), but \(2, 5\) in the module") as error:
        sf.to_module(state, nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 2)))
    assert "1.weight is missing" in str(error.value) and "0.bias is (7,), but (2,)" in str(error.value)
    step = sf.sharded_step(lambda w, x: (w * x).sum(), sf.optim.sgd(0.1))
    with pytest.raises(ValueError, match="must be a dict of names"):
        sf.export(step.init(torch.ones(1)), nn.Linear(1, 1), "nowhere")


@distributed(world=[2])
def test_the_files_have_the_statistics_of_the_state(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": -1}, device="cpu")
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    module[0].register_buffer("once", torch.ones(2), persistent=False)
    params, stats, apply = sf.from_module(module, has_state=True)

    def loss(p: Any, s: Any, x: Any) -> Any:
        out, s = apply(p, s, x)
        return out.square().mean(), s

    step = sf.sharded_step(loss, sf.optim.sgd(0.1), mesh=mesh, has_state=True)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    state, _ = step(step.init(params, model_state=stats), x[step.rows(6)])
    for name, given in (("real", module), ("meta", nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).to("meta"))):
        sf.export(state, given, tmp_path / name)
        torch.distributed.barrier()
        archive = sf.interop.Archive(tmp_path / name)
        assert set(archive) == params.keys() | stats.keys()
        for buffer, want in sf.unshard(state.model_state).items():
            read = archive.box(buffer, [(0, n) for n in want.shape])
            assert torch.equal(read, want) and not torch.equal(read, stats[buffer])


def test_a_buffer_without_a_value_cannot_be_written(tmp_path: pathlib.Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    params, _ = sf.from_module(module.eval())
    state = sf.sharded_step(lambda p, x: p["0.weight"].sum() * x.sum(), sf.optim.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match=r"1\.running_mean is a buffer on meta"):
        sf.export(state, module.to("meta"), tmp_path)


# Programs for other runtimes.

_SIZES = ((2, 9), (3, 17), (2, 5))


def _gpt_program() -> Any:
    config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64)
    step = sf.sharded_step(functools.partial(gpt.loss, config), sf.optim.adamw(1e-2))
    state = step.init(functools.partial(gpt.init, config), sf.key(0))
    state, _ = step(state, {"tokens": torch.randint(0, 64, (2, 9))})
    return state, functools.partial(gpt.apply, config)


def _recurrent_program(kind: Any) -> Any:
    """A model with units removed."""
    config = recurrent.Config(vocab_size=64, d_model=16, hidden=(24, 20), kind=kind)
    groups, params = recurrent.units(config), recurrent.init(config, sf.key(0))
    alive = {name: torch.arange(0, family.size, 2) for name, family in groups.families.items()}
    smaller = recurrent.without_units(config, alive)
    return sparse.compact(groups, params, alive), functools.partial(recurrent.apply, smaller)


def _export(*args: Any, **how: Any) -> None:
    with sys.modules["shape_checks"].unchecked():  # sizes are symbols
        sf.interop.export_program(*args, **how)


def _program(name: str) -> Any:
    return _gpt_program() if name == "gpt" else _recurrent_program(name)


def _check_program(run: Any, params: Any, apply: Any) -> None:
    params = sf.unshard(params.params) if isinstance(params, sf.TrainState) else params
    for size in _SIZES:
        tokens = torch.randint(0, 64, size)
        with torch.no_grad():
            wanted = apply(params, tokens)
        wanted = getattr(wanted, "logits", wanted)
        torch.testing.assert_close(run(tokens), wanted, rtol=1e-5, atol=1e-5)


def _run_onnx(path: pathlib.Path) -> Any:
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    return lambda tokens: torch.from_numpy(session.run(None, {"input_0": tokens.numpy()})[0])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt", "lstm", "gru", "highway"])
def test_a_program_of_onnx_has_the_logits(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("onnxscript")
    params, apply = _program(name)
    path = tmp_path / "model.onnx"
    _export(params, apply, (torch.randint(0, 64, (2, 8)),), path)
    _check_program(_run_onnx(path), params, apply)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt"])
def test_a_package_of_aotinductor_has_the_logits(name: str, tmp_path: pathlib.Path) -> None:
    params, apply = _program(name)
    path = tmp_path / "model.pt2"
    _export(params, apply, (torch.randint(0, 64, (2, 8)),), path, format="aoti")
    _check_program(torch._inductor.aoti_load_package(str(path)), params, apply)


@pytest.mark.nightly
def test_a_trained_module_of_transformers_as_onnx(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("onnxscript")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    module = transformers.LlamaForCausalLM(config).eval()
    params, apply = sf.from_module(module)
    step = sf.sharded_step(lambda p, x: apply(p, input_ids=x, labels=x).loss, sf.optim.sgd(0.1))
    tokens = torch.randint(0, 64, (2, 8))
    state, _ = step(step.init(params), tokens)
    with sys.modules["shape_checks"].unchecked():
        sf.export(state, module, tmp_path / "model.onnx", format="onnx", inputs=(tokens,))
    _check_program(_run_onnx(tmp_path / "model.onnx"), state, lambda p, x: apply(p, input_ids=x))


def test_mistakes_in_programs_are_named(tmp_path: pathlib.Path) -> None:
    params, inputs = {"w": torch.ones(3, 2)}, (torch.ones(2, 3),)

    def apply(p: Any, x: Any) -> Any:
        return x @ p["w"]

    wrong: list[tuple[str, Any, str]] = [
        ("a.onnx", {"format": "gguf"}, r"format must be 'onnx' or 'aoti', got 'gguf'"),
        ("a.onnx", {"format": "aoti"}, r"of format 'aoti' must end in '.pt2', got 'a.onnx'"),
    ]
    for path, how, said in wrong:
        with pytest.raises(ValueError, match=said):
            sf.interop.export_program(params, apply, inputs, tmp_path / path, **how)
    with pytest.raises(ValueError, match=r"inputs\[0\] of shape \(1, 3\) must have 2 or more along dim 0 \(batch\)"):
        sf.interop.export_program(params, apply, (torch.ones(1, 3),), tmp_path / "a.pt2", format="aoti")
    module = _module()
    state = _trained(sf.make_mesh(alone=True), module, None)
    with pytest.raises(ValueError, match=r"inputs must be given for the formats onnx and aoti only, got format='onnx'"):
        sf.export(state, module, tmp_path / "a.onnx", format="onnx")
    with pytest.raises(ValueError, match=r"only, got format='safetensors' and inputs"):
        sf.export(state, module, tmp_path, inputs=inputs)


@pytest.mark.nightly
def test_a_size_that_the_function_fixes_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="must run for any batch and length as given in dynamic, got"):
        sf.interop.export_program(
            {"w": torch.ones(3, 2)}, lambda p, x: x @ p["w"], (torch.ones(2, 3),), tmp_path / "a.pt2", format="aoti"
        )
