"""Axes along which values vary (`_axis_types.py`): casts, refusals, writes, function modes, and losses of steps."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import shardfn as sf
from shardfn import P
from shardfn.collectives import (
    AxisTypeError,
    AxisTypeMode,
    bind_mesh,
    current_axis_types,
    no_axis_types,
    track_axis_types,
)
from shardfn.testing import distributed

X = torch.arange(1.0, 5.0, dtype=torch.float64)


def _on(world: int) -> sf.Mesh:
    return sf.make_mesh({"dp": world}, device="cpu")


def _value_and_grad(f: Any, args: list[Tensor], in_specs: Any, out_specs: Any, world: int) -> tuple[Tensor, Any]:
    args = [x.clone().requires_grad_() for x in args]
    out = sf.shard_map(f, mesh=_on(world), in_specs=in_specs, out_specs=out_specs)(*args)
    return out.detach(), torch.autograd.grad(out.sum(), args)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


def _in_place(w: Tensor, x: Tensor) -> Tensor:
    h = sf.psum(x, "dp") * w  # the same on all ranks until the write
    h.mul_(x)
    return h


def _through_a_view(w: Tensor, x: Tensor) -> Tensor:
    out = x.new_zeros(2, 2)
    out[0] = w
    out[1].copy_(x * w)
    return out.sum(0)


# Functions of a whole `w` of 2 elements and a block `x` of 2 rows, written without a cast.
WITHOUT_CASTS: dict[str, Any] = {
    "product": lambda w, x: w * x,
    "list of operands": lambda w, x: torch.stack([w, x]).prod(0),
    "keyword": lambda w, x: torch.add(input=w.sin(), other=x, alpha=2),
    "autograd.Function": lambda w, x: _Times.apply(w, x),
    "in place": _in_place,
    "in place through a view": _through_a_view,
    "augmented": lambda w, x: (w * 1).__iadd__(x) * w,
    "index of a rank": lambda w, x: w[sf.axis_index("dp") % 2] * x,
    "number of a rank": lambda w, x: w.sin() * (1 + 2 * sf.axis_index("dp")) + x,
    "closed over": lambda w, x: (lambda y: y * w)(x),
}


@pytest.mark.day("closed over-2")
@distributed(world=[2])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(WITHOUT_CASTS)]
)
def test_an_invariant_operand_is_cast_where_it_meets_a_varying_one(world: int, name: str) -> None:
    f, w = WITHOUT_CASTS[name], torch.tensor([0.3, 0.7], dtype=torch.float64)
    out, grads = _value_and_grad(f, [w, X], (P(), P("dp")), P("dp"), world)

    def slow(w: Tensor, x: Tensor) -> Tensor:
        """Both ranks' blocks on one device."""
        blocks = x.chunk(2)
        if name == "in place":
            return torch.cat([sum(blocks) * w * b for b in blocks])  # pyright: ignore[reportCallIssue, reportArgumentType]
        if name == "index of a rank":
            return torch.cat([w[i] * b for i, b in enumerate(blocks)])
        if name == "number of a rank":
            return torch.cat([w.sin() * (1 + 2 * i) + b for i, b in enumerate(blocks)])
        return torch.cat([f(w, b) for b in blocks])

    whole = [w.clone().requires_grad_(), X.clone().requires_grad_()]
    want = slow(*whole)
    torch.testing.assert_close(out, want.detach(), rtol=1e-12, atol=1e-12)
    for got, expected in zip(grads, torch.autograd.grad(want.sum(), whole), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@distributed(world=[2])
def test_a_tensor_closed_over_is_the_same_on_all_ranks(world: int) -> None:
    w = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    f = sf.shard_map(lambda x: sf.psum((x * w).sin().sum(), "dp"), mesh=_on(world), in_specs=P("dp"), out_specs=P())
    (got,) = torch.autograd.grad(f(X), w)
    (want,) = torch.autograd.grad((X.view(2, 2) * w).sin().sum(), w)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@distributed(world=[2])
def test_one_value_that_is_used_often_is_followed_through_containers(world: int) -> None:
    def f(w: Tensor, x: Tensor) -> dict[str, Tensor]:
        low, high = torch.aminmax(w)
        return {"a": torch.cat([low[None], x]), "b": torch.einsum("i,i->", w, w) + high}

    specs = {"a": P("dp"), "b": P()}
    out = sf.shard_map(f, mesh=_on(world), in_specs=(P(), P("dp")), out_specs=specs)(X[:2], X)
    assert out["a"].tolist() == [1.0, 1.0, 2.0, 1.0, 3.0, 4.0]
    assert float(out["b"]) == 7.0


REFUSED: dict[str, Any] = {
    "a block": (lambda x: torch.tanh(x), "result of shape (2,) varies along 'dp'"),
    "gathered": (lambda x: sf.all_gather(x, "dp"), "use sf.all_gather_invariant"),
    "permuted": (lambda x: sf.ppermute(x, "dp", [(0, 1), (1, 0)]), "varies along 'dp'"),
    "by the index": (lambda x: sf.psum(x, "dp") * sf.axis_index("dp"), "varies along 'dp'"),
    "twice declared": (lambda x: sf.pvary(sf.pvary(sf.psum(x, "dp"), "dp"), "dp"), "that varies there already"),
    "declared varying": (lambda x: sf.pvary(x, "dp"), "Leave out this pvary"),
}


@pytest.mark.day("twice declared-2", "declared varying-2")
@distributed(world=[2])
@pytest.mark.parametrize("name", REFUSED)
def test_a_result_that_differs_where_its_spec_promises_one_is_refused(world: int, name: str) -> None:
    f, words = REFUSED[name]
    with pytest.raises(AxisTypeError) as error:
        sf.shard_map(f, mesh=_on(world), in_specs=P("dp"), out_specs=P())(X)
    assert words in str(error.value)
    assert "test_axis_types.py:" in str(error.value) or name == "declared varying"


def test_numbers_made_of_an_index_remember_its_axes() -> None:
    mesh = sf.make_mesh({"dp": 2, "tp": 3}, abstract=True)
    with bind_mesh(mesh), AxisTypeMode(mesh, ("dp", "tp")) as mode:
        i, j = sf.axis_index("dp"), sf.axis_index("tp")
        integers = [i + 1, 1 + i, i - 2, 2 - i, i * 3, 3 * i, (i + 6) // 2, 7 // (i + 1), i % 2, 5 % (i + 1), -i]
        integers += [
            2**i,
            i << 1,
            1 | i,
            3 ^ i,
            abs(i),
            ~i,
            True * i,
            round(1.6 * i),
            *divmod(7, i + 2),
            pow(i + 3, 2, 2),
        ]
        integers += [math.floor(0.5 * i), math.ceil(i / 2), math.trunc(1.5 * i), sum([1, i]), np.int64(3) * i]
        assert [int(x) for x in integers] == [
            1, 1, -2, 2, 0, 0, 3, 7, 0, 0, 0, 1, 0, 1, 3, 0, -1, 0, 0, 3, 1, 1, 0, 0, 0, 1, 0,
        ]  # fmt: skip
        truths = [i == 0, i > 0, ~(i < 1), (i >= 0) & (i != 1), 3 > i, 0.5 < i, 0 == i, True & (i < 1), 1.0 >= i]
        assert [int(x) for x in truths] == [1, 0, 0, 1, 1, 0, 1, 1, 1]
        floats = [i * 0.5, (i + 1) / 2, 1 / (1 + i), 0.5 * (i * 1.0) - 1, 0.5 * i, 0.5 - i, 2.0 / (i + 1), 0.5**i]
        floats += [3.5 % (i + 1), 3.5 // (i + 1), np.float64(0.5) * i, np.float32(0.5) + i]
        assert [x.item() for x in floats] == [0.0, 0.5, 1.0, -1.0, 0.0, 0.5, 2.0, 1.0, 0.5, 3.0, 0.0, 0.5]
        for x in (*integers, *truths, *floats):
            assert mode.axes_of(torch.ones(2) * x) == ("dp",)
            assert mode.axes_of(torch.tensor([0, x])) == ("dp",)
            assert mode.axes_of(torch.full_like(torch.ones(2), x)) == ("dp",)
            assert mode.axes_of(x + torch.ones(2, dtype=torch.int64)) == ("dp",)
        assert mode.axes_of(torch.full((2,), i + j)) == ("dp", "tp")
        assert mode.axes_of(torch.full_like(input=torch.ones(2) * i, fill_value=3)) == ()
        assert torch.tensor(i == 0).dtype == torch.bool
        assert mode.axes_of(sf.fold_in(sf.key(0), i)) == ("dp",)
    assert type(sf.axis_index("dp")) is int


CHOSEN_BY_AN_INDEX: dict[str, Any] = {
    "max": lambda i: max(0, i - 1),
    "min": lambda i: min(i, 1),
    "if": lambda i: 1 if i == 0 else 2,
    "not": lambda i: not i,
    "and": lambda i: i and 2,
    "a float": lambda i: max(i * 0.5, 0.25),
    "in": lambda i: i in (0, 2),
    "on the right": lambda i: min(0.5, 0.5 * i),
}
CONVERTED_FROM_AN_INDEX: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an element of a list": (lambda i: [1.0, 2.0][i], r"an index.*torch.tensor\(xs\)\[i\]"),
    "a slice of a list": (lambda i: [1.0, 2.0][i:][0], "an index"),
    "a range": (lambda i: len(range(i)), "a length or a range"),
    "a repetition": (lambda i: len([0] * i), "a length"),
    "a float": (float, "the float of a number"),
    "a function of math": (math.sin, r"a result of math.*torch.tensor\(i\).sin\(\)"),
    "a complex number": (complex, "the float of a number"),
}


@pytest.mark.day("max-2", "in-2")
@distributed(world=[2])
@pytest.mark.parametrize("name", CHOSEN_BY_AN_INDEX)
def test_a_number_that_is_chosen_by_an_index_is_refused_on_all_ranks(world: int, name: str) -> None:
    """It would count as the same on all ranks, and on those where the other number wins it would not."""
    f = sf.shard_map(
        lambda x: sf.psum(x * CHOSEN_BY_AN_INDEX[name](sf.axis_index("dp")), "dp"),
        mesh=_on(world),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(AxisTypeError, match=r"truth of a number.*along 'dp'.*\(i - 1\) \* \(i > 0\).*int\(i\)"):
        f(X)


@pytest.mark.parametrize("name", CONVERTED_FROM_AN_INDEX)
def test_a_conversion_that_would_lose_the_axes_of_a_number_is_refused(name: str) -> None:
    convert, words = CONVERTED_FROM_AN_INDEX[name]
    mesh = sf.make_mesh({"dp": 2}, abstract=True)
    with bind_mesh(mesh), AxisTypeMode(mesh, ("dp",)):
        with pytest.raises(AxisTypeError, match=rf"{words}.*int\(i\)"):
            convert(sf.axis_index("dp"))
        assert sf.axis_index("tp") == 0  # of one rank: an `int`


def test_functions_of_torch_take_numbers_made_of_an_index() -> None:
    """A number that they return remembers the axes, too; and they take one where values are not followed any more."""
    mesh, x = sf.make_mesh({"dp": 2}, abstract=True), torch.arange(4.0).view(2, 2)
    with bind_mesh(mesh), AxisTypeMode(mesh, ("dp",)) as mode:
        i = sf.axis_index("dp")
        taken: dict[str, Any] = {
            "x[i]": x[i], "x[:, i]": x[:, i], "x[i:]": x[i:], "narrow": x.narrow(0, i, 1), "select": x.select(0, i),
            "roll": torch.roll(x, i), "pad": torch.nn.functional.pad(x, (i, 0)), "full": torch.full((2,), 0.5 * i),
            "arange": torch.arange(i + 2), "zeros": torch.zeros((i + 1, 2)), "linspace": torch.linspace(0, i, 3),
            "where": torch.where(x > 0, 0.5 * i, x), "clamp": x.clamp(min=0.5 * i), "alpha": torch.add(x, x, alpha=i),
            "power": (0.5 * i) ** x, "as_tensor": torch.as_tensor(i), "new_tensor": x.new_tensor([0, i]),
        }  # fmt: skip
        assert {name for name, y in taken.items() if mode.axes_of(y) != ("dp",)} == set()
        larger: Any = torch.sym_max(i, 3)
        assert larger.axes == ("dp",)
        assert mode.axes_of(torch.zeros_like(x * i)) == ()
    torch.testing.assert_close(x * (1 + i), x)
    assert x[i].tolist() == [0.0, 1.0]


@distributed(world=[3])
def test_a_mask_made_of_an_index_varies(world: int) -> None:
    def f(w: Tensor) -> Tensor:
        i = sf.axis_index("dp")
        first = torch.where(torch.tensor(i == 0), w.sin(), w)
        return sf.psum(first * ((i - 1) * (0.5 < i)) + w * (i != 1), "dp")

    w = X.clone().requires_grad_()
    out = sf.shard_map(f, mesh=_on(world), in_specs=P(), out_specs=P())(w)
    torch.testing.assert_close(out, 3 * w, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(grad, torch.full_like(X, 3.0), rtol=1e-12, atol=1e-12)


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_that_waits_begins_below_those_of_the_function_and_ends() -> None:
    mesh = sf.make_mesh({"dp": 2}, abstract=True)
    mode, counting = AxisTypeMode(mesh, ("dp",), ("dp",)), _Counting()
    apply = torch.autograd.Function.apply
    with bind_mesh(mesh), track_axis_types(mode, at_once=False):
        assert current_axis_types(begin=False) is None
        with counting:
            torch.ones(2).add(1)
            assert current_axis_types() is mode
            assert _get_current_function_mode_stack() == [mode, counting]
            seen = counting.seen
            torch.ones(2).add(1)
            assert counting.seen > seen
        with no_axis_types():
            assert current_axis_types() is None
        assert _get_current_function_mode_stack() == [mode]
    assert _get_current_function_mode_stack() == []
    assert torch.autograd.Function.apply == apply


# Losses of a step, of this rank's rows, and the same on one device.
def _own(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def _mixed(p: Any, x: Tensor) -> Tensor:
    y = _own(p, x)
    return y.mean() + (sf.pmean(y.mean(0), "dp") ** 2).sum().sin()


def _shared(p: Any, x: Tensor) -> Tensor:
    return (sf.pmean(_own(p, x).mean(0), "dp") ** 2).sum().sin()


def _contrastive(p: Any, x: Tensor) -> Tensor:
    y = _own(p, x)
    first, every = sf.axis_index("dp") * len(x), sf.all_gather_invariant(y, "dp")
    return torch.nn.functional.cross_entropy(y @ every.T, torch.arange(first, first + len(x)))


def _averaged(p: Any, x: Tensor) -> Tensor:
    return sf.pmean(_own(p, x).square().mean(), "dp")


@pytest.mark.day("False-_averaged-2")
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize(
    "loss",
    [
        _mixed,
        pytest.param(_shared, marks=pytest.mark.nightly),
        pytest.param(_contrastive, marks=pytest.mark.nightly),
        _averaged,
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_loss_with_collectives_has_the_gradient_of_one_device(world: int, loss: Any, jitted: bool) -> None:
    torch.manual_seed(0)
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    for stage in (0, 3):
        step = sf.sharded_step(
            sf.jit(loss) if jitted else loss,
            sf.optim.sgd(1.0),
            mesh=_on(world),
            zero=sf.Zero(stage=stage, persist_elements=0),
        )
        rank = 0 if world == 1 else torch.distributed.get_rank()
        state, metrics = step(step.init({"w": w.clone()}), x.chunk(world)[rank])
        whole = w.clone().requires_grad_()
        want = loss({"w": whole}, x)
        (grad,) = torch.autograd.grad(want, whole)
        assert math.isclose(float(metrics["loss"]), float(want.detach()), rel_tol=1e-12)
        torch.testing.assert_close(state.params["w"].full_tensor(), w - grad, rtol=1e-11, atol=1e-11)


@distributed(world=[2])
def test_a_loss_without_collectives_is_not_followed(world: int) -> None:
    seen = []

    def loss(p: Any, x: Tensor) -> Tensor:
        seen.append(_get_current_function_mode_stack())
        return (x @ p["w"]).mean()

    step = sf.sharded_step(loss, sf.optim.sgd(1.0), mesh=_on(world))
    step(step.init({"w": torch.ones(3)}), torch.ones(2, 3))
    assert seen == [[]]


@distributed(world=[2])
def test_tensor_parallelism_without_pvary_equals_one_device(world: int) -> None:
    torch.manual_seed(0)
    params = {k: torch.randn(6, 4, dtype=torch.float64) for k in ("up", "down", "emb")}
    x = torch.randn(3, 4, dtype=torch.float64)

    def loss(p: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ p["emb"].T @ p["emb"])  # whole on all ranks
        return (sf.psum(torch.tanh(h @ p["up"].T) @ p["down"], "tp") + h).square().mean()

    mesh = sf.make_mesh({"tp": world}, device="cpu")
    specs = {"up": P("tp"), "down": P("tp"), "emb": P()}
    step = sf.sharded_step(loss, sf.optim.sgd(1.0), mesh=mesh, specs=specs, batch=P())
    state, _ = step(step.init(params), x)
    whole = {k: v.clone().requires_grad_() for k, v in params.items()}
    grads = torch.autograd.grad(loss(whole, x), [*whole.values()])
    for (k, v), g in zip(params.items(), grads, strict=True):
        torch.testing.assert_close(state.params[k].full_tensor(), v - g, rtol=1e-11, atol=1e-11)


_OF_ONE_AXIS: dict[str, Any] = {
    "of a parameter": lambda p, x: sf.psum(_own(p, x).square().mean(), ("dp", "tp")),
    "of the batch": lambda p, x: _own(p, x).square().sum() / sf.psum((x > 0).sum(), ("dp", "tp")),
    "a mean": lambda p, x: sf.pmean(_own(p, x).square().mean(), ("tp", "dp")),
}


@pytest.mark.nightly
@distributed(world=4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(_OF_ONE_AXIS)]
)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_psum_over_axes_is_refused_in_a_step_if_some_hold_the_same_value(name: str, jitted: bool) -> None:
    """As in `shard_map`, and in JAX: it would be counted once a rank there."""
    mesh, loss = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu"), _OF_ONE_AXIS[name]
    for block in (False, True):  # values are followed from the first collective on, or from the beginning
        specs = {"w": P(), **({"b": P("tp")} if block else {})}
        params = {"w": torch.ones(3, 4), **({"b": torch.ones(2)} if block else {})}
        made = sf.jit(loss, backend="graph") if jitted else loss
        step = sf.sharded_step(made, sf.optim.sgd(1.0), mesh=mesh, specs=specs, batch=P("dp"))
        with pytest.raises(AxisTypeError, match=r"psum over .*the same along 'tp'.*Leave 'tp' out of the psum"):
            step(step.init(params), torch.ones(2, 3))


@distributed(world=[2])
def test_a_loss_that_varies_where_ranks_have_the_same_rows_is_refused(world: int) -> None:
    mesh = sf.make_mesh({"tp": world}, device="cpu")
    step = sf.sharded_step(
        lambda p, x: (x @ p["w"].T).square().mean(), sf.optim.sgd(1.0), mesh=mesh, specs={"w": P("tp")}, batch=P()
    )
    with pytest.raises(AxisTypeError, match=r"the loss varies along 'tp'.*test_axis_types.py.*sf.psum\(x, 'tp'\)"):
        step(step.init({"w": torch.ones(4, 3)}), torch.ones(2, 3))


@pytest.mark.nightly
@distributed(world=2)
def test_a_collective_in_a_compiled_part_of_a_loss_is_refused(world: int) -> None:
    compiled = torch.compile(lambda y: sf.pmean(y, "dp").square().sum(), backend="eager")
    step = sf.sharded_step(lambda w, x: compiled(x * w), sf.optim.sgd(1.0), mesh=_on(world))
    with warnings.catch_warnings(), pytest.raises(TypeError, match=r"wrap the loss in sf\.jit"):
        warnings.simplefilter("ignore")  # of dynamo, about calls that it does not trace
        step(step.init(torch.ones(2)), torch.ones(2))
