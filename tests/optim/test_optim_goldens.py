"""Covers the update rules against values computed by hand in double precision, and against torch.optim."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import optim
from shardfn.optim import GradientTransformation

P0 = [1.0, -2.0, 0.5]
GRADS = [[0.5, -0.25, 0.1], [0.3, 0.2, -0.4], [-0.1, 0.4, 0.05]]
both = pytest.mark.parametrize("in_place", [False, True])


def trajectory(
    tx: GradientTransformation, in_place: bool, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Tensor, Any]]:
    params = [torch.tensor(P0, dtype=dtype)]
    state = tx.init(params)
    for grad in GRADS:
        grads = [torch.tensor(grad, dtype=dtype)]
        if in_place:
            params, state = optim.inplace(tx)(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        yield params[0].clone(), state


def close(got: Tensor, want: list[float], atol: float = 1e-11) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=atol)


@both
def test_adam(in_place: bool) -> None:
    steps = [p for p, _ in trajectory(optim.adam(0.01), in_place)]
    close(steps[0], [0.9900000002, -1.9900000004, 0.490000001])
    close(steps[2], [0.974211056953, -1.994127036912, 0.499119083315])


@both
def test_adamw(in_place: bool) -> None:
    steps = [p for p, _ in trajectory(optim.adamw(0.01, weight_decay=0.1), in_place)]
    close(steps[0], [0.9890000002, -1.9880000004, 0.489500001])
    close(steps[2], [0.971243620854, -1.988153606161, 0.497634977778])


@both
def test_adam_with_an_l2_penalty(in_place: bool) -> None:
    tx = optim.chain(optim.add_decayed_weights(0.1), optim.adam(0.01))
    steps = [p for p, _ in trajectory(tx, in_place)]
    close(steps[0], [0.9900000001667, -1.9900000002222, 0.4900000006667])
    close(steps[2], [0.972818212329, -1.981216500235, 0.495750274294])


@both
def test_lamb(in_place: bool) -> None:
    steps = [p for p, _ in trajectory(optim.lamb(0.01, weight_decay=0.1), in_place)]
    # Nine digits: the norms are float32.
    close(steps[2], [0.987664114, -1.997560215, 0.500381160], atol=1e-9)


@both
def test_lamb_without_bias_correction(in_place: bool) -> None:
    tx = optim.chain(
        optim.scale_by_moment_ratio(),
        optim.add_decayed_weights(0.1),
        optim.scale_by_trust_ratio(),
        optim.scale_by_learning_rate(0.01),
    )
    steps = [p for p, _ in trajectory(tx, in_place)]
    close(steps[2], [0.949932492, -1.995866246, 0.507243709], atol=2e-9)


def test_lamb_trust_ratios() -> None:
    direction = optim.chain(optim.scale_by_moment_ratio(), optim.add_decayed_weights(0.1))
    params = [torch.tensor(P0, dtype=torch.float64)]
    state = direction.init(params)
    after = [p for p, _ in trajectory(optim.lamb(0.01, weight_decay=0.1), in_place=False)]
    for grad, p, want in zip(GRADS, after, [0.403373305, 0.476463454, 0.545792243], strict=True):
        u, state = direction.update([torch.tensor(grad, dtype=torch.float64)], state, params)
        scaled, _ = optim.scale_by_trust_ratio().update(u, optim.EmptyState(), params)
        close(scaled[0] / u[0], [want] * 3, atol=1e-7)
        params = [p]


@pytest.mark.parametrize(
    ("p", "u", "want"),
    [
        ([3.0, 4.0], [6.0, 8.0], 0.5),
        pytest.param([3.0, 4.0], [0.0, 0.0], 1.0, marks=pytest.mark.nightly),
        pytest.param([0.0, 0.0], [3.0, 4.0], 1.0, marks=pytest.mark.nightly),
        ([1e-6, 0.0], [1.0, 0.0], 0.01),
        pytest.param([1.0, 0.0], [1e-6, 0.0], 10.0, marks=pytest.mark.nightly),
        pytest.param([], [], 1.0, marks=pytest.mark.nightly),
    ],
)
def test_trust_ratio_is_clamped_and_1_at_0(p: list[float], u: list[float], want: float) -> None:
    tx = optim.scale_by_trust_ratio(0.01, 10.0)
    scaled, _ = tx.update([torch.tensor(u)], optim.EmptyState(), [torch.tensor(p)])
    torch.testing.assert_close(scaled[0], torch.tensor(u) * want)


@both
def test_lion(in_place: bool) -> None:
    *_, (p, state) = trajectory(optim.lion(0.01, weight_decay=0.1), in_place)
    close(p, [0.987032989, -2.004015988, 0.4885114895])
    close(state[0].mu[0], [0.0068705, 0.00352975, -0.0024799])


@both
def test_lion_leaves_elements_that_never_saw_a_gradient(in_place: bool) -> None:
    tx, params = optim.lion(0.1, weight_decay=0.0), [torch.tensor([1.0, 2.0])]
    grads = [torch.tensor([0.0, -0.0])]
    state = tx.init(params)
    if in_place:
        params, _ = optim.inplace(tx)(grads, state, params)
    else:
        params = optim.apply_updates(params, tx.update(grads, state, params)[0])
    assert torch.equal(params[0], torch.tensor([1.0, 2.0]))


TORCH: dict[str, tuple[GradientTransformation, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (optim.sgd(0.1), functools.partial(torch.optim.SGD, lr=0.1)),
    "sgd decay": (optim.sgd(0.1, weight_decay=0.1), functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
    "momentum": (optim.sgd(0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "nesterov": (
        optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (optim.adam(0.01), functools.partial(torch.optim.Adam, lr=0.01)),
    "adam betas": (
        optim.adam(0.01, b1=0.7, b2=0.9, eps=1e-3),
        functools.partial(torch.optim.Adam, lr=0.01, betas=(0.7, 0.9), eps=1e-3),
    ),
    "adamw": (optim.adamw(0.01), functools.partial(torch.optim.AdamW, lr=0.01)),
    "adamw decay": (
        optim.adamw(0.01, weight_decay=0.3),
        functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    ),
    "rmsprop": (
        optim.rmsprop(0.01, 0.99, eps_in_sqrt=False, momentum=0.9),
        functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
    ),
}


@pytest.mark.day(14)
@both
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("name", TORCH)
def test_equals_torch_over_20_steps(name: str, dtype: torch.dtype, tol: float, in_place: bool) -> None:
    tx, make = TORCH[name]
    torch.manual_seed(0)
    params = [torch.randn(5, 3, dtype=dtype), torch.randn((), dtype=dtype)]
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer, state = make(theirs), tx.init(params)
    for _ in range(20):
        grads = [torch.randn(p.shape, dtype=dtype) for p in params]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        if in_place:
            params, state = optim.inplace(tx)(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=tol, atol=tol)


def test_adamw_decay_default_is_that_of_torch() -> None:
    p = [torch.ones(1)]
    new, _ = optim.inplace(optim.adamw(0.1))([torch.zeros(1)], optim.adamw(0.1).init(p), p)
    assert new[0] == pytest.approx(1 - 0.1 * 0.01)


@both
def test_half_precision_sgd_moves_every_element(in_place: bool) -> None:
    for num in (3, 16, 33, 64, 100):
        params, tx = [torch.ones(num, dtype=torch.bfloat16)], optim.sgd(0.25)
        grads = [torch.full((num,), 2.0, dtype=torch.bfloat16)]
        if in_place:
            params, _ = optim.inplace(tx)(grads, tx.init(params), params)
        else:
            params = optim.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
        assert torch.equal(params[0], torch.full((num,), 0.5, dtype=torch.bfloat16))


@both
@pytest.mark.parametrize("make", [optim.sgd, optim.adam, optim.adamw, optim.lion, optim.lamb])
def test_a_schedule_starts_at_0(make: Callable[..., GradientTransformation], in_place: bool) -> None:
    rates = [0.0, 0.5, 0.25]
    seen: list[float] = []
    schedule = optim.join_schedules([optim.constant_schedule(r) for r in rates], [1, 2])
    by_schedule, by_hand = make(schedule), [make(r) for r in rates]
    params, state = [torch.tensor(P0)], by_schedule.init([torch.tensor(P0)])
    same, hand = [torch.tensor(P0)], by_hand[0].init([torch.tensor(P0)])
    for tx, grad in zip(by_hand, GRADS, strict=True):
        grads = [torch.tensor(grad)]
        if in_place:
            params, state = optim.inplace(by_schedule)([grads[0].clone()], state, params)
        else:
            updates, state = by_schedule.update(grads, state, params)
            params = optim.apply_updates(params, updates)
        updates, hand = tx.update(grads, hand, same)
        same = optim.apply_updates(same, updates)
        seen.append(float((params[0] - same[0]).abs().max()))
    assert max(seen) < 1e-6
    assert state[-1].count == 3


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: optim.sgd(-0.1), "learning_rate=-0.1"),
        pytest.param(lambda: optim.sgd(float("nan")), "learning_rate=nan", marks=pytest.mark.nightly),
        pytest.param(lambda: optim.sgd(0.1, momentum=1.0), "decay=1.0", marks=pytest.mark.nightly),
        (lambda: optim.sgd(0.1, weight_decay=-1.0), "weight_decay=-1.0"),
        pytest.param(lambda: optim.sgd(0.1, nesterov=True), "nesterov=True has no effect", marks=pytest.mark.nightly),
        pytest.param(lambda: optim.adam(-1.0), "learning_rate=-1.0", marks=pytest.mark.nightly),
        (lambda: optim.adam(0.1, b1=1.0), "b1=1.0"),
        pytest.param(lambda: optim.adam(0.1, b2=-0.1), "b2=-0.1", marks=pytest.mark.nightly),
        pytest.param(lambda: optim.adamw(0.1, eps=-1e-8), "eps=-1e-08", marks=pytest.mark.nightly),
        (lambda: optim.adamw(0.1, weight_decay=-0.1), "weight_decay=-0.1"),
        pytest.param(
            lambda: optim.lamb(0.1, min_coeff=2.0, max_coeff=1.0),
            "max_coeff=1.0 is less than min_coeff=2.0",
            marks=pytest.mark.nightly,
        ),
        pytest.param(lambda: optim.lion(0.1, b1=2.0), "b1=2.0", marks=pytest.mark.nightly),
        (lambda: optim.lamb(0.1, eps_root=1e-8), "eps_root=1e-08 has no effect"),
        pytest.param(
            lambda: optim.scale_by_trust_ratio(math.inf, math.inf), "min_coeff=inf", marks=pytest.mark.nightly
        ),
        pytest.param(lambda: optim.adam(0.1, eps_root=-1.0), "eps_root=-1.0", marks=pytest.mark.nightly),
        (lambda: optim.adam(0.1, mu_dtype=torch.int8), "mu_dtype=torch.int8 must be a dtype of floating point"),
        pytest.param(lambda: optim.radam(0.1, threshold=-1.0), "threshold=-1.0", marks=pytest.mark.nightly),
        pytest.param(lambda: optim.rmsprop(0.1, decay=1.0), "decay=1.0", marks=pytest.mark.nightly),
        (lambda: optim.rmsprop(0.1, nesterov=True), "nesterov=True has no effect"),
        pytest.param(
            lambda: optim.lars(0.1, momentum=0.0, nesterov=True),
            "nesterov=True has no effect",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            lambda: optim.lars(0.1, trust_coefficient=-1.0), "trust_coefficient=-1.0", marks=pytest.mark.nightly
        ),
        (lambda: optim.adagrad(0.1, -1.0), "initial_accumulator_value=-1.0"),
        pytest.param(lambda: optim.scale(math.nan), "step_size=nan", marks=pytest.mark.nightly),
        pytest.param(lambda: optim.clip_by_block_rms(0.0), "threshold=0.0", marks=pytest.mark.nightly),
        (lambda: optim.adaptive_grad_clip(0.0), "clipping=0.0"),
        pytest.param(lambda: optim.named_chain(), r"different names, got \[\]", marks=pytest.mark.nightly),
        pytest.param(
            lambda: optim.named_chain(("a", optim.sgd(0.1)), ("a", optim.sgd(0.1))),
            r"\['a', 'a'\]",
            marks=pytest.mark.nightly,
        ),
        (lambda: optim.clip(0.0), "max_delta=0.0"),
        pytest.param(lambda: optim.clip_by_global_norm(-1.0), "max_norm=-1.0", marks=pytest.mark.nightly),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], GradientTransformation], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make()


def test_decay_needs_params() -> None:
    tx = optim.adamw(0.1)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update([torch.ones(1)], tx.init([torch.ones(1)]))


def test_a_state_of_other_names_is_refused() -> None:
    tx, w = optim.named_chain(("clip", optim.clip(1.0)), ("step", optim.sgd(0.1))), [torch.ones(1)]
    for state in ({"clip": optim.EmptyState()}, tx.init(w)["clip"]):
        with pytest.raises(ValueError, match=r"named_chain expected the states \['clip', 'step'\]"):
            tx.update(w, state, w)
    with pytest.raises(TypeError, match="named_chain"):
        optim.named_chain(optim.clip(1.0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="scale_by_schedule"):
        optim.scale_by_schedule(0.1)  # pyright: ignore[reportArgumentType]


def test_a_centered_moment_below_0_by_rounding_is_0() -> None:
    tx, w = optim.rmsprop(0.1, eps=1e-8, centered=True), [torch.zeros(100)]
    state = tx.init(w)
    for _ in range(200):
        updates, state = tx.update([torch.linspace(99.0, 101.0, 100)], state, w)
        assert updates[0].isfinite().all()
