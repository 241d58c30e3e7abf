"""Covers operations on tensors without data: shapes, dtypes and strides are those of the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn.capture._fakes import Fakes
from shardfn.graph import OPS

ATEN = torch.ops.aten


def turned(*shape: int) -> Tensor:
    """Dense, its dims in reverse order in memory."""
    return torch.rand(*shape[::-1]).permute(*reversed(range(len(shape))))


A, B, MEAN, STD = turned(5, 4), torch.rand(5, 4), torch.rand(5), torch.rand(5)
IMAGE, FLAT = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.rand(2, 3, 4, 5)
CASES: dict[Any, list[tuple[Any, ...]]] = {
    ATEN.copysign.Tensor: [(A, torch.tensor(1.0)), (B, A)],
    ATEN.div.Tensor_mode: [(A, torch.tensor(1.0))],
    ATEN.floor_divide.default: [(A, torch.tensor(1.0))],
    ATEN.hardswish_backward.default: [(A, B), (B, A)],
    ATEN.hardtanh_backward.default: [(A, B, -0.5, 0.5), (B, A, -0.5, 0.5)],
    ATEN.logit_backward.default: [(A, B), (B, A)],
    ATEN.native_dropout_backward.default: [(A, A > 0.5, 2.0), (B, A > 0.5, 2.0)],
    ATEN.softplus_backward.default: [(A, B, 1, 20), (B, A, 1, 20), (B.sum().expand(5, 4), A, 1, 20)],
    ATEN.special_xlog1py.default: [(A, B), (turned(3, 5, 4), B)],
    ATEN.xlogy.Tensor: [(A, B), (turned(3, 5, 4), B)],
    ATEN._log_softmax_backward_data.default: [(A, B, 1, torch.float32), (B, A, 1, torch.float32)],
    ATEN.huber_loss_backward.default: [(B, A, A, 0, 1.0)],
    ATEN.log_sigmoid_forward.default: [(A,), (B,)],
    ATEN.mse_loss_backward.default: [(B, A, A, 0)],
    ATEN.native_layer_norm_backward.default: [
        (A, A, [4], MEAN.view(5, 1), STD.view(5, 1), torch.rand(4), torch.rand(4), [True] * 3)
    ],
    ATEN.normal.Tensor_Tensor: [(A, A)],
    ATEN.pow.Scalar: [(2, A)],
    ATEN.smooth_l1_loss_backward.default: [(B, A, A, 0, 1.0)],
    ATEN.channel_shuffle.default: [(torch.rand(1, 4, 5, 5).contiguous(memory_format=torch.channels_last), 2)],
    ATEN.native_batch_norm.default: [
        (x, *[torch.rand(3)] * 4, True, 0.1, 1e-5) for x in (IMAGE, FLAT, turned(2, 3, 4))
    ],
    ATEN.native_batch_norm_backward.default: [
        (x, x, *[torch.rand(3)] * 5, True, 1e-5, [True] * 3) for x in (IMAGE, FLAT, turned(2, 3, 4))
    ],
    ATEN.replication_pad2d_backward.default: [(torch.rand(2, 3, 6, 7), IMAGE, [1, 1, 1, 1])],
    ATEN.max_unpool2d.default: [(IMAGE[:1], torch.arange(60).view(1, 3, 4, 5).to(IMAGE.device), [8, 10])],
}


KEYWORDS: dict[Any, dict[str, Any]] = {ATEN.div.Tensor_mode: {"rounding_mode": "floor"}}


def _told(f: Callable[..., Any], args: Any) -> Any:
    out = f(*args, **KEYWORDS.get(f, {}))
    outs = out if isinstance(out, list | tuple) else [out]
    return [None if x is None else (x.shape, x.stride(), x.dtype) for x in outs]


def _without_data(args: Any) -> Any:
    mode = Fakes(allow_non_fake_inputs=True)
    with mode:
        return mode, [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x for x in args
        ]


@pytest.mark.parametrize(
    "op", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(CASES)], ids=str
)
def test_strides_are_those_of_the_kernels(op: Any) -> None:
    for args in CASES[op]:
        want = _told(op, args)
        mode, given = _without_data(args)
        with mode:
            assert _told(op, given) == want


def test_every_correction_is_covered() -> None:
    laid_out = {getattr(packet, overload) for packet, op in OPS.items() for overload in op.strides}
    assert laid_out - set(CASES) <= {ATEN.batch_norm_backward.default}


def test_grouped_products_take_the_arguments_of_the_kernels() -> None:
    offs = torch.tensor([2, 5, 7, 8], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.rand(8, 8).to(dtype)
        for args in (
            (x, torch.rand(4, 5, 8).to(dtype).transpose(-2, -1), offs),
            (x, torch.rand(4, 8, 8).to(dtype), offs),
            (x.t(), torch.rand(8, 16).to(dtype), offs),
            (torch.rand(4, 3, 8).to(dtype), torch.rand(4, 8, 8).to(dtype)),
        ):
            mode, given = _without_data(args)
            with mode:
                assert _told(torch._grouped_mm, given) == _told(torch._grouped_mm, args)


def test_a_captured_step_views_gradients_with_other_strides_than_torch_infers() -> None:
    def loss(p: dict, x: Tensor) -> Tensor:
        h = torch.nn.functional.softplus((x @ p["w"]).view(2, 3, 4).transpose(1, 2))
        return (h.transpose(1, 2).reshape(6, 4) * h.reshape(6, 4)).sum()

    runs = []
    for f in (loss, sf.jit(loss, backend="graph")):
        step = sf.sharded_step(f, sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
        state = step(step.init({"w": torch.arange(16.0).view(4, 4) / 16}), torch.ones(6, 4))[0]
        runs.append(state.params["w"].local)
    assert torch.equal(*runs)


@torch.library.custom_op("shardfn_tests::turned", mutates_args=())
def _turned(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format).t()


@_turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, unlike the operation's result


_turned.register_autograd(lambda ctx, grad: grad.clone())


@pytest.mark.nightly
def test_a_view_of_a_tensor_with_other_strides_than_inferred_is_a_copy_unless_it_is_written_to() -> None:
    step = {
        name: sf.sharded_step(sf.jit(loss, backend="graph"), sf.optim.sgd(0.1), mesh=sf.make_mesh({"dp": 1}))
        for name, loss in {
            "read": lambda p, x: (_turned(x @ p).view(-1) * torch.arange(6.0)).sum(),
            "written": lambda p, x: _turned(x @ p).view(-1).mul_(torch.arange(6.0)).sum(),
        }.items()
    }
    state = step["read"].init(torch.ones(2, 3))
    got = step["read"](state, torch.eye(2))[0].params.local
    assert torch.equal(got, 1 - 0.1 * torch.arange(6.0).view(2, 3))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        step["written"](step["written"].init(torch.ones(2, 3)), torch.eye(2))
