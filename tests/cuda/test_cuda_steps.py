"""Covers steps on one GPU: equal to one CPU; across stages and placements the bits of one another. Never run so far."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.core import tree_leaves, tree_map
from shardfn.models import gpt
from shardfn.testing import ODD_TRAINABLE, RTOL, Run, assert_same, odd_batch, odd_loss, odd_params, on_mesh, one_device

BF16 = torch.bfloat16
graph = functools.partial(sf.jit, backend="graph")
TX = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
HOST: dict[str, Any] = {"params": "host", "grads": "host", "optimizer": "host"}


def _double(tree: Any) -> Any:
    return tree_map(lambda x: x.double() if x.is_floating_point() else x, tree)


def _to(tree: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def _batches(device: str) -> list[Any]:
    return [_to(_double(odd_batch(n)), device) for n in range(3)]


def _run(loss: Callable[..., Any] = odd_loss, zero: sf.Zero | None = None, **options: Any) -> Run:
    """Three steps on the GPU; returns their results on the CPU."""
    mesh = sf.make_mesh({"dp": 1})
    assert mesh.device.type == "cuda"
    run = on_mesh(
        loss, TX, _double(odd_params()), _batches("cuda"), mesh=mesh, zero=zero, trainable=ODD_TRAINABLE, **options
    )
    return Run(*_to(tuple(run), "cpu"))


def _zero(stage: int, **fields: Any) -> sf.Zero:
    return sf.Zero.flat(stage=stage, persist_elements=0, bucket_bytes=64, **fields)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_equal_one_cpu(stage: int) -> None:
    want = one_device(odd_loss, TX, _double(odd_params()), _batches("cpu"), trainable=ODD_TRAINABLE)
    assert_same(_run(zero=_zero(stage)), want)


def test_stages_and_transforms_have_the_bits_of_none() -> None:
    want = _run()
    for stage in (1, 2, 3):
        assert_same(_run(zero=_zero(stage)), want, exact=True)
        assert_same(_run(sf.remat(odd_loss), zero=_zero(stage)), want, exact=True)


@pytest.mark.parametrize("kinds", [{"params": "host"}, {"optimizer": "host"}, HOST], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_pinned_placements_have_the_bits_of_none(stage: int, kinds: dict[str, Any]) -> None:
    # Leaves arrive on a stream of their own, gradients leave on another: missing waits in hooks show here.
    assert_same(_run(zero=_zero(stage, **kinds)), _run(zero=_zero(stage)), exact=True)


def test_disk_has_the_bits_of_none(tmp_path: Any) -> None:
    kinds: dict[str, Any] = {"params": "disk", "optimizer": "disk", "directory": str(tmp_path)}
    assert_same(_run(zero=_zero(3, **kinds)), _run(zero=_zero(3)), exact=True)


@pytest.mark.parametrize("fields", [{}, {"params": "host"}, HOST], ids=str)
def test_captured_steps_have_the_bits_of_eager_ones(fields: dict[str, Any]) -> None:
    zero = _zero(3, **fields)
    assert_same(_run(graph(odd_loss), zero=zero), _run(zero=zero), exact=True)


def test_compiled_steps_equal_eager_ones() -> None:
    pytest.importorskip("triton")
    zero = _zero(3)
    assert_same(_run(sf.jit(odd_loss, backend="inductor"), zero=zero), _run(zero=zero))


def _gpt() -> tuple[Callable[..., Any], Any, list[Any]]:
    config = gpt.Config(vocab_size=61, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48, max_len=16)
    g = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(61, (4, 9), generator=g)} for _ in range(2)]
    return functools.partial(gpt.loss, config), gpt.init(config, sf.key(0)), batches


@pytest.mark.parametrize("loss_of", [lambda f: f, graph], ids=["eager", "graph"])
def test_bfloat16_equals_one_device_under_the_same_policy(loss_of: Callable[..., Any]) -> None:
    loss, params, batches = _gpt()
    mixed = sf.mixed_precision(loss, sf.Policy.bf16())
    want = one_device(mixed, TX, _to(params, "cuda"), _to(batches, "cuda"))
    got = on_mesh(loss_of(mixed), TX, params, _to(batches, "cuda"), mesh=sf.make_mesh({"dp": 1}), zero=_zero(3))
    assert_same(got, want, computed=BF16)


def test_a_model_draws_the_same_parameters_as_on_a_cpu() -> None:
    _, params, _ = _gpt()
    state = sf.sharded_step(lambda p, b: p, TX, mesh=sf.make_mesh({"dp": 1})).init(lambda: _gpt()[1])
    for a, b in zip(*(tree_leaves(t) for t in (sf.unshard(state.params), params)), strict=True):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu(), b, rtol=RTOL[torch.float32], atol=1e-7)


def test_a_failed_step_leaves_the_next_one_right() -> None:
    step = sf.sharded_step(odd_loss, TX, mesh=sf.make_mesh({"dp": 1}), zero=_zero(3, **HOST), trainable=ODD_TRAINABLE)
    state = step.init(_double(odd_params()))
    bad = _to(_double(odd_batch(0)), "cuda")
    with pytest.raises(RuntimeError):
        step(state, {**bad, "x": bad["x"][:, :4]})
    again = step.init(_double(odd_params()))
    for batch in _batches("cuda"):
        again, _ = step(again, batch)
    want = _run(zero=_zero(3, **HOST))
    torch.testing.assert_close(_to(sf.unshard(again.params), "cpu"), want.params, rtol=0, atol=0)
