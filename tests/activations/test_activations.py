"""Covers where activations wait: `offload`, `remat` with a policy, names, budgets, disk, and their compositions."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import policies
from shardfn.testing import assert_same, distributed, odd_batch, odd_loss, odd_params, on_mesh

ROWS, WIDTH, LAYERS = 64, 128, 6
EACH = ROWS * WIDTH * 4
WINDOW = EACH
ALL = policies.offload_larger_than(0)
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _weights() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(LAYERS)]


def _layer(w: Tensor, x: Tensor) -> Tensor:
    return sf.checkpoint_name(torch.tanh(sf.checkpoint_name(x @ w, "dot")), "act")


def _loss(ws: list[Tensor], x: Tensor, wrap: Wrap = lambda f: f) -> Tensor:
    for w in ws:
        x = wrap(_layer)(w, x)
    return (x * x).mean()


def _gradients(f: Callable[..., Tensor], x: Tensor | None = None) -> tuple[list[Tensor], sf.memory.Ledger]:
    ws = [w.requires_grad_() for w in _weights()]
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) if x is None else x
    with sf.memory.ledger() as book:
        out = f(ws, x)
        grads = list(torch.autograd.grad(out, ws))
        del out
    return grads, book


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


GRADIENTS = LAYERS * WIDTH * WIDTH * 4
# Working memory of an operation in the backward: its incoming and outgoing cotangents, and one accumulated sum.
AT_WORK = 4 * EACH


@pytest.mark.parametrize(
    "limit", [0, pytest.param(2 * EACH, marks=pytest.mark.nightly), pytest.param(4 * EACH, marks=pytest.mark.nightly)]
)
def test_the_device_holds_the_budget_and_two_windows(limit: int) -> None:
    want, plain = _gradients(_loss)
    got, book = _gradients(sf.offload(_loss, policies.budget(limit), window=WINDOW))
    assert _same(got, want)
    assert plain.peak("device") >= LAYERS * EACH
    # At the end of the forward, before there are gradients; in the backward, one gradient comes as each value goes.
    assert book.peak("device") <= max(limit + 2 * WINDOW + AT_WORK + GRADIENTS // LAYERS, GRADIENTS + AT_WORK)
    assert book.moved("device", "host") == LAYERS * EACH - limit
    assert book.moved("host", "device") <= LAYERS * EACH - limit
    assert book.peak("host") == LAYERS * EACH - limit
    assert (book.live("device"), book.live("host")) == (GRADIENTS, 0)


def test_names_decide() -> None:
    want, _ = _gradients(_loss)
    for f, moved in (
        (sf.offload(_loss, policies.offload_only_these_names("act")), LAYERS),
        (sf.offload(_loss, policies.offload_only_these_names("dot")), 0),  # tanh saves its result only
        (sf.offload(_loss, policies.offload_anything_except_these_names("act")), 0),
        (sf.remat(_loss, policies.offload_dot_with_no_batch_dims()), LAYERS),
        (
            sf.remat(
                _loss,
                policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=["act"], names_which_can_be_offloaded=["dot"]
                ),
            ),
            LAYERS,
        ),
    ):
        got, book = _gradients(f)
        assert _same(got, want)
        assert book.moved("device", "host") == moved * EACH


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def test_remat_runs_dropped_operations_again() -> None:
    want, _ = _gradients(_loss)
    for policy, dots, tanhs in (
        (policies.nothing_saveable, LAYERS, LAYERS),
        (policies.dots_saveable, 0, LAYERS),
        (policies.save_only_these_names("act"), LAYERS, 0),
        (policies.save_anything_except_these_names("dot"), LAYERS, 0),
        (policies.everything_saveable, 0, 0),
        (policies.budget(5 * EACH + 64, then="recompute"), LAYERS - 2, LAYERS - 2),
    ):
        with _Count() as count:
            got, _ = _gradients(sf.remat(_loss, policy))
        assert _same(got, want)
        ran = [sum(name.startswith(f"aten.{op}.") for name in count.ran) for op in ("mm", "tanh")]
        # Two products a layer are the backward's, less the one towards x; recomputation stops at the last needed value.
        assert ran == [LAYERS + 2 * LAYERS - 1 + dots, LAYERS + tanhs], policy


def test_a_value_moves_once_however_often_and_in_any_part_it_is_saved() -> None:
    def twice(ws: list[Tensor], x: Tensor) -> Tensor:
        h = x @ ws[0]
        return (h.exp().detach() * h * h.sin() + h.t().cos().t()).sum()

    def parts(ws: list[Tensor], x: Tensor) -> Tensor:
        q, k = (x @ ws[0]).chunk(2, -1)
        return (q * k).sum()

    def corner(ws: list[Tensor], x: Tensor) -> Tensor:
        part = (x @ ws[0])[:, : WIDTH // 8]
        return (part * part).sum()

    def strided(ws: list[Tensor], x: Tensor) -> Tensor:
        every = (x @ ws[0])[::2, 1::2]
        return (every * every.expand(2, *every.shape)).sum()

    def dtypes(ws: list[Tensor], x: Tensor) -> Tensor:
        h = x @ ws[0]
        z = torch.view_as_complex(h.view(ROWS, -1, 2))
        return (h * h).sum() + torch.view_as_real(z * z).sum()

    for f, moved in ((twice, 4), (parts, 1), (corner, 0), (strided, 1), (dtypes, 1)):
        want, _ = _gradients(lambda ws, x, f=f: f(ws, x) + 0 * sum(w.sum() for w in ws))
        got, book = _gradients(lambda ws, x, f=f: sf.offload(f, ALL)(ws, x) + 0 * sum(w.sum() for w in ws))
        assert _same(got, want)
        assert book.moved("device", "host") == moved * EACH, f


def test_values_that_the_caller_holds_and_small_values_stay() -> None:
    w, x = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)
    with sf.memory.ledger() as book:
        loss = sf.offload(lambda w, x: (w[:32] @ x).sum() + (w[0] * w[0]).sum(), ALL)(w, x)
        loss.backward()
    assert book.moved("device", "host") == 0


def test_values_modified_in_place_are_an_error_or_computed_again() -> None:
    x = torch.ones(64, 64, requires_grad=True)

    def spoilt(x: Tensor) -> Tensor:
        h = x.exp()
        out = h.sum()
        h.add_(1)
        return out

    def harmless(x: Tensor) -> Tensor:
        h = (x * 2).exp().detach()
        y = x * h
        h = h + 1
        z = x * 3
        z.add_(1)
        return (y * z).sum()

    for policy in (ALL, policies.everything_saveable, policies.budget(1 << 20)):
        out = sf.offload(spoilt, policy)(x)
        with pytest.raises(RuntimeError, match="modified in place"):
            torch.autograd.grad(out, x)
        (got,) = torch.autograd.grad(sf.offload(harmless, policy)(x), x)
        assert torch.equal(got, torch.autograd.grad(harmless(x), x)[0])

    def rewritten(x: Tensor) -> Tensor:
        h = x.sin()
        y = h * x
        h = h.mul_(2.0) if not h.requires_grad else h
        g = x.detach().cos()
        g.add_(1)
        return (y * g).exp().sum()

    for policy in (policies.everything_saveable, lambda saved: "host"):
        (got,) = torch.autograd.grad(sf.remat(rewritten, policy)(x), x)
        assert torch.equal(got, torch.autograd.grad(rewritten(x), x)[0])


def test_the_backward_may_run_twice_and_be_differentiated() -> None:
    x = torch.linspace(-1, 1, 4096, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return x.sin().exp().sum()

    (want,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad(want.sum(), x)
    for g in (sf.offload(f, ALL), sf.remat(f, policies.everything_saveable), sf.remat(f, lambda saved: "host")):
        out = g(x)
        assert all(torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], want) for _ in range(2))
    (got,) = torch.autograd.grad(sf.offload(f, ALL)(x), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], second)


def test_random_numbers_are_those_of_the_forward() -> None:
    def f(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = torch.nn.functional.dropout(torch.tanh(x @ w), 0.3)
        return (x * x).mean()

    def seeded(f: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        return _gradients(f)[0]

    want = seeded(f)
    for policy in (policies.everything_saveable, policies.dots_saveable):
        assert _same(seeded(sf.remat(f, policy)), want)
    assert _same(seeded(sf.offload(f, ALL)), want)


def test_disk_holds_values_until_they_are_used(tmp_path: pathlib.Path) -> None:
    want, _ = _gradients(_loss)
    to_disk = policies.offload_larger_than(0, "disk")
    for f in (
        sf.offload(_loss, to_disk, directory=tmp_path, window=0),
        sf.offload(_loss, policies.budget(EACH, then="disk"), directory=tmp_path, window=EACH),
        sf.remat(_loss, policies.offload_dot_with_no_batch_dims("disk"), directory=tmp_path, window=EACH),
    ):
        got, book = _gradients(f)
        assert _same(got, want)
        assert LAYERS - 1 <= book.moved("host", "disk") / EACH <= LAYERS
        assert book.live("disk") == 0
    with pytest.raises(ValueError, match=r"there is no directory\. Pass directory="):
        sf.offload(_loss, to_disk)([w.requires_grad_() for w in _weights()], torch.ones(ROWS, WIDTH))


def test_orders_that_make_no_sense_name_the_right_one() -> None:
    off = functools.partial(sf.offload, policy=ALL)
    for make, said in (
        (lambda: off(sf.accumulate(_loss, 2)), r"Use accumulate\(offload\(f, policy\), n\)"),
        (lambda: off(sf.jit(_loss)), r"Use jit\(offload\(f, policy\)\)"),
        (lambda: off(sf.mixed_precision(_loss, sf.Policy.bf16())), r"Use mixed_precision\(offload"),
        (lambda: off(off(_loss)), "Drop one"),
        (lambda: sf.remat(off(_loss)), r"Use remat\(f, policy=policy\), or offload\(remat\(f\)"),
        (lambda: _gradients(sf.remat(lambda ws, x: off(_loss)(ws, x))), r"offload inside remat has no effect"),
        (lambda: _gradients(sf.offload(_loss, policies.nothing_saveable)), r"use\s*remat\(f, policy=policy\)|Use"),
        (lambda: _gradients(sf.offload(_loss, cast(Any, lambda saved: "gpu"))), "got 'gpu'"),
        (lambda: policies.budget(-1), "must not be negative"),
        (lambda: sf.offload(_loss, ALL, window=-1), "must not be negative"),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    with pytest.raises(sf.CaptureError, match="a captured step uses only one disk"):
        to_disk = sf.offload(_loss, policies.offload_larger_than(0, "disk"), directory="x", window=0)
        sf.jit(sf.value_and_grad(to_disk))(_weights(), torch.ones(ROWS, WIDTH))


def test_a_name_that_comes_too_late_is_an_error() -> None:
    def late(ws: list[Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(x @ ws[0])
        y = (h * h).exp()
        y = y * y
        return (sf.checkpoint_name(h, "act") * y).sum()

    for f in (
        sf.offload(late, policies.offload_only_these_names("act")),
        sf.remat(late, policies.save_only_these_names("act")),
    ):
        with pytest.raises(ValueError, match="Name a value where the value is made"):
            f([w.requires_grad_() for w in _weights()], torch.ones(ROWS, WIDTH))
    with pytest.raises(TypeError):
        sf.checkpoint_name(3, "x")  # pyright: ignore[reportArgumentType]


def test_torch_func_takes_the_function_unchanged() -> None:
    ws, x = _weights(), torch.ones(ROWS, WIDTH)
    want = torch.func.grad(_loss)(ws, x)
    for f in (sf.offload(_loss, ALL), sf.remat(_loss, policies.dots_saveable)):
        assert _same(torch.func.grad(f)(ws, x), want)
        batched = torch.func.vmap(torch.func.grad(f), in_dims=(None, 0))(ws, torch.ones(2, 3, WIDTH))
        assert batched[0].shape == (2, WIDTH, WIDTH)


def _forms() -> dict[str, Callable[..., Any]]:
    off = functools.partial(sf.offload, policy=ALL, window=WINDOW)
    dots = functools.partial(sf.remat, policy=policies.offload_dot_with_no_batch_dims())
    return {
        "offload": off(_loss),
        "offload blocks": functools.partial(_loss, wrap=off),
        "offload of remat": off(functools.partial(_loss, wrap=sf.remat)),
        "remat": sf.remat(_loss, policies.budget(EACH)),
        "remat blocks": functools.partial(_loss, wrap=dots),
        "both": off(functools.partial(_loss, wrap=dots)),
    }


def _run(loss: Callable[..., Any], mesh: sf.Mesh, **options: Any) -> tuple[Any, sf.memory.Ledger]:
    x = torch.linspace(-1, 1, mesh.size * ROWS * WIDTH).view(-1, WIDTH)
    with sf.memory.ledger() as book:
        return on_mesh(loss, sf.optim.adamw(1e-2), _weights(), [x, x], mesh=mesh, **options), book


@pytest.mark.nightly
@distributed(world=[pytest.param(1, marks=pytest.mark.nightly), 2])
def test_steps_have_the_bits_and_the_traffic_of_their_activations(world: int, tmp_path: pathlib.Path) -> None:
    mesh = sf.make_mesh({"dp": world})
    down: dict[str, set[int]] = {}
    for stage in (0, 3):
        zero = sf.Zero(stage, persist_elements=0)
        want, _ = _run(_loss, mesh, zero=zero)
        for name, form in _forms().items():
            got, book = _run(form, mesh, zero=zero)
            assert_same(got, want, exact=True)
            down.setdefault(name, set()).add(book.moved("device", "host"))
    # Whole leaves, which stage 3 has and stage 0 has not, never leave; so the traffic is that of activations alone.
    assert down["offload"] == {2 * LAYERS * EACH}
    assert all(len(traffic) == 1 and min(traffic) > 0 for traffic in down.values()), down
    kept = sf.Zero(3, persist_elements=0, optimizer="disk", disk=sf.Disk(str(tmp_path)))
    to_disk = policies.offload_larger_than(0, "disk")
    got, book = _run(sf.offload(_loss, to_disk), mesh, zero=kept)  # in the step's own directory
    assert_same(got, want, exact=True)
    assert book.moved("host", "disk") > 2 * LAYERS * EACH


@pytest.mark.nightly
@distributed(world=[1, 2])
def test_in_captured_steps_the_moves_are_ops(world: int, tmp_path: pathlib.Path) -> None:
    mesh, zero = sf.make_mesh({"dp": world}), sf.Zero(3, persist_elements=0)
    want, _ = _run(_loss, mesh, zero=zero)
    for name in ("offload", "remat blocks", "both"):
        form = _forms()[name]
        got, book = _run(sf.jit(form, backend="graph"), mesh, zero=zero)
        assert_same(got, want, exact=True)
        assert book.moved("host", "device") > 0, name
    # Two steps; a window stays.
    off = sf.jit(_forms()["offload"], backend="graph", prefetch=EACH)
    assert _run(off, mesh, zero=zero)[1].moved("device", "host") == 2 * (LAYERS - 1) * EACH
    peaks = []
    for policy in (policies.dots_saveable, policies.offload_dot_with_no_batch_dims()):
        blocks = functools.partial(_loss, wrap=functools.partial(sf.remat, policy=policy, window=0))
        for f in (blocks, sf.offload(blocks, ALL, window=0)):
            step = sf.sharded_step(sf.jit(f, prefetch=EACH), sf.optim.sgd(0.1), mesh=mesh, zero=zero)
            peaks.append(step.lower(_weights(), torch.ones(8 * ROWS, WIDTH)).memory_analysis().peak)
    # With many rows activations dominate: here inputs of blocks and products, then one of the two, then neither.
    most = (LAYERS - 3) * 8 * EACH
    assert peaks[0] - max(peaks[1:3]) >= most and min(peaks[1:3]) - peaks[3] >= most, [p / EACH for p in peaks]
    kept = sf.Zero(3, persist_elements=0, optimizer="disk", disk=sf.Disk(str(tmp_path)))
    to_disk = sf.jit(sf.offload(_loss, policies.offload_larger_than(0, "disk"), window=0), backend="graph")
    got, book = _run(to_disk, mesh, zero=kept)
    assert_same(got, want, exact=True)
    assert book.moved("host", "disk") > 2 * LAYERS * EACH


@pytest.mark.nightly
@distributed(world=2)
def test_they_compose_with_other_transforms_of_a_loss() -> None:
    mesh, zero = sf.make_mesh({"dp": 2}), sf.Zero(3, persist_elements=0)
    off, bf16 = functools.partial(sf.offload, policy=ALL), sf.Policy.bf16()
    for outer in (
        lambda f: sf.accumulate(f, 2),
        lambda f: sf.accumulate(sf.mixed_precision(f, bf16), 2),
        lambda f: sf.mixed_precision(sf.accumulate(f, 2), bf16),
    ):
        want, _ = _run(outer(_loss), mesh, zero=zero)
        for inner in (off, functools.partial(sf.remat, policy=policies.offload_dot_with_no_batch_dims())):
            got, book = _run(outer(inner(_loss)), mesh, zero=zero)
            assert_same(got, want, exact=True)
            assert book.moved("device", "host") > 0

    def with_aux(ws: list[Tensor], x: Tensor) -> Any:
        out = _loss(ws, x)
        return out, {"twice": out.detach() * 2}

    assert_same(_run(off(with_aux), mesh, has_aux=True)[0], _run(with_aux, mesh, has_aux=True)[0], exact=True)
    odd = (sf.optim.adamw(1e-2), odd_params(), [odd_batch(0)])
    for f in (off(odd_loss), sf.remat(odd_loss, policies.everything_saveable)):
        want = on_mesh(odd_loss, *odd, mesh=mesh, zero=sf.Zero(3))
        assert_same(on_mesh(f, *odd, mesh=mesh, zero=sf.Zero(3)), want, exact=True)


@pytest.mark.nightly
@distributed(world=2)
def test_collectives_of_the_loss_run_again_on_all_ranks_alike() -> None:
    """Blocks of 7 over 2 ranks: a policy by size keeps the one and not the other."""
    mesh = sf.make_mesh({"tp": 2})

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(sf.pvary(x, "tp") @ params["up"].t())
        return torch.tanh(sf.psum(h @ params["down"].t(), "tp")).square().mean()

    draw = torch.Generator().manual_seed(3)
    params = {"up": torch.randn(7, 5, generator=draw), "down": torch.randn(3, 7, generator=draw)}
    run = functools.partial(
        on_mesh, optimizer=sf.optim.adamw(1e-2), params=params, batches=[torch.ones(4, 5)], mesh=mesh, batch=sf.P(),
        specs={"up": sf.P("tp"), "down": sf.P(None, "tp")},
    )  # fmt: skip
    want = run(loss)
    for policy in (policies.everything_saveable, lambda saved: "keep" if saved.nbytes >= 4 * 4 * 4 else "recompute"):
        assert_same(run(sf.remat(loss, policy)), want, exact=True)
    assert_same(run(sf.offload(loss, ALL)), want, exact=True)


def test_modules_offload_like_functions() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 8))
    params, apply = sf.from_module(module)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return apply(params, x).square().mean()

    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    step = functools.partial(sf.sharded_step, optimizer=sf.optim.sgd(0.1), zero=sf.Zero(3, persist_elements=0))
    mesh = sf.make_mesh({"dp": 1})
    for f in (sf.offload(loss, ALL), sf.remat(loss, policies.dots_saveable)):
        pair = [step(g, mesh=mesh) for g in (f, loss)]
        got, want = (s(s.init(params), x)[0].params for s in pair)
        assert all(torch.equal(got[k].full_tensor(), want[k].full_tensor()) for k in params)
