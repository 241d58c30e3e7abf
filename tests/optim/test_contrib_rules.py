"""Covers AdEMAMix, ADOPT, Prodigy, SAM, Sophia, GaLore and states of low precision in sharded steps; and refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.core import tree_leaves, tree_map
from shardfn.testing import assert_same, distributed, on_mesh, one_device

KEY = sf.key(3)
RULES: dict[str, Any] = {
    "ademamix": lambda: optim.ademamix(0.05, b3=0.99, weight_decay=0.1),
    "adopt": lambda: optim.adopt(0.05, weight_decay=0.1),
    "prodigy": lambda: optim.prodigy(estim_lr0=1e-2, weight_decay=0.1),
    "sam": lambda: optim.sam(optim.adamw(0.05), 0.1),
    "sam clip": lambda: optim.sam(optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.5)), 0.1),
    "sophia": lambda: optim.sophia(0.05, update_interval=2, num_samples=4),
    "galore": lambda: optim.galore(0.05, 2, update_proj_gap=2),
}
# Codes are not continuous: a last bit of a gradient may be a whole code. So gradients are exact in their tests.
LOW: dict[str, Any] = {
    "8 bits": lambda: optim.quantize_states(optim.adamw(0.05), block_size=4, min_size=8),
    "8 bits linear": lambda: optim.quantize_states(optim.lion(0.05), code="linear", block_size=4, min_size=1),
    "8 bits clip": lambda: optim.quantize_states(
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05)), block_size=3, min_size=1
    ),
    "8 bits masters": lambda: optim.master_weights(optim.quantize_states(optim.adamw(0.05), block_size=12, min_size=1)),
    "rounded": lambda: optim.round_states(optim.adamw(0.05), KEY),
}
# Rules that step every element separately, which may have their state on the host or on disk in parts.
ELEMENTWISE = ("ademamix", "adopt", "sam", "sam clip", "sophia")


def params() -> Any:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 6), "v": (7, 5), "stack": (3, 5, 5), "b": (6,), "s": ()}
    return {k: torch.randn(s, generator=draw) for k, s in shapes.items()}


def loss(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ p["v"])
    for w in p["stack"].unbind(0):
        h = torch.tanh(h @ w)
    return (h @ p["w"] + p["b"] - p["s"]).square().mean()


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 7, generator=draw) for _ in range(4)]


def check(name: str, mesh: Any, f: Any = loss, **zero: Any) -> None:
    # Singular vectors divide the rounding of a gradient by the gaps between singular values.
    dtype = torch.float64 if "galore" in name else torch.float32
    tree, rows = tree_map(lambda x: x.to(dtype), (params(), batches()))
    got = on_mesh(f, RULES[name](), tree, rows, mesh=mesh, zero=sf.Zero.flat(persist_elements=0, **zero))
    assert_same(got, one_device(loss, RULES[name](), tree, rows))


@pytest.mark.day("sam clip")
@pytest.mark.parametrize("name", RULES)
@distributed(world=2)
def test_sharded_equals_one_device(name: str) -> None:
    check(name, sf.make_mesh({"dp": 2}), stage=3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULES)
@distributed(world=[1, 3], timeout=200)
def test_sharded_equals_one_device_at_every_stage(world: int, name: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    for stage in range(4):
        check(name, mesh, stage=stage)
    check(name, mesh, sf.jit(loss, backend="graph"), stage=3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ELEMENTWISE)
@distributed(world=2, timeout=200)
def test_states_are_on_the_host_or_on_disk(name: str, tmp_path: Any) -> None:
    mesh = sf.make_mesh({"dp": 2})
    check(name, mesh, stage=2, optimizer="host")
    check(name, mesh, stage=3, optimizer="disk", params="disk", directory=str(tmp_path))


def linear(p: Any, x: Tensor) -> Tensor:
    """Gradients are sums of small integers over powers of two, and do not depend on the parameters."""
    rows = x @ torch.ones(7, 5)
    whole = (p["v"] * x.sum(0)[:, None]).sum() + (p["w"] * rows.sum(0)[:, None]).sum()
    return (whole + (p["stack"] * rows.sum(0)).sum() + p["b"].sum() * x.sum() + p["s"] * x.sum()) / len(x)


def integers() -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(-9, 10, (8, 7), generator=draw).float() for _ in range(4)]


def check_low(name: str, mesh: Any, f: Any = linear, **options: Any) -> None:
    """Compares a run with the step of this process alone: the in-place forms of both have the same bits."""
    step = sf.sharded_step(linear, LOW[name](), mesh=sf.make_mesh(alone=True))
    state = step.init(params())
    for x in integers():
        state, _ = step(state, x)
    got = on_mesh(f, LOW[name](), params(), integers(), mesh=mesh, **options)
    want = got._replace(params=sf.unshard(state.params), opt_state=sf.unshard(state.opt_state))
    assert_same(got, want, exact=True)


@pytest.mark.day("2-8 bits")
@pytest.mark.parametrize("name", LOW)
@distributed(world=[2, 4], timeout=200)
def test_low_precision_has_the_bits_of_one_device_at_every_stage(world: int, name: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    for stage in range(4):
        check_low(name, mesh, zero=sf.Zero.flat(persist_elements=0, stage=stage))
    if "clip" not in name:  # a captured norm is added in another order
        graph = on_mesh(sf.jit(linear, backend="graph"), LOW[name](), params(), integers(), mesh=mesh, zero=sf.Zero(3))
        assert_same(graph, on_mesh(linear, LOW[name](), params(), integers(), mesh=mesh, zero=sf.Zero(3)), exact=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOW)
@distributed(world=3, timeout=200)
def test_low_precision_of_blocks_that_nothing_divides(name: str) -> None:
    mesh = sf.make_mesh({"tp": 3})
    specs = {"w": sf.P("tp"), "v": sf.P(None, "tp"), "stack": sf.P(None, "tp"), "b": sf.P("tp"), "s": sf.P()}
    dims = {"w": (0, 5), "v": (1, 5), "stack": (1, 5), "b": (0, 6)}

    def cut(p: Any, x: Tensor) -> Tensor:
        whole = {k: sf.all_gather_invariant(p[k], "tp", dim=d, size=n) for k, (d, n) in dims.items()}
        return linear({**p, **whole}, x)

    check_low(name, mesh, cut, specs=specs)


def test_the_two_calls_of_sam_and_the_gradients_of_sophia_are_steps() -> None:
    x = batches()[0]
    step = sf.sharded_step(loss, optim.sam(optim.sgd(0.1), 0.2))
    state = step.init(params())
    grads = torch.func.grad(loss)(params(), x)
    norm = torch.stack([g.square().sum() for g in tree_leaves(grads)]).sum().sqrt()
    near = tree_map(lambda p, g: p + 0.2 * g / norm, params(), grads)
    want = tree_map(lambda p, g: p - 0.1 * g, params(), torch.func.grad(loss)(near, x))
    state, _ = step(state, x)
    assert optim.is_perturbed(state.opt_state)
    state, _ = step(state, x)
    assert not optim.is_perturbed(state.opt_state)
    both, _ = sf.switch_step(step)(step.init(params()), x)
    for name, p in want.items():
        torch.testing.assert_close(state.params[name].full_tensor(), p, rtol=1e-5, atol=1e-6)
        assert torch.equal(both.params[name].full_tensor(), state.params[name].full_tensor())
    tx = optim.sophia(0.1)
    step, sampled = sf.sharded_step(loss, tx), sf.sharded_step(lambda p, x: 2 * loss(p, x), tx)
    state, _ = step(step.init(params()), x)
    assert optim.is_hessian_step(state.opt_state)
    before = {k: p.full_tensor().clone() for k, p in state.params.items()}
    estimate = tree_map(lambda g: 0.01 * (2 * g).square(), torch.func.grad(loss)(before, x))
    state, _ = sampled(state, x)
    for name, p in before.items():
        assert torch.equal(state.params[name].full_tensor(), p)
        torch.testing.assert_close(state.opt_state.nu[name].full_tensor(), estimate[name], rtol=1e-5, atol=1e-7)
    switch = sf.switch_step(step, sampled)
    one, two = step.init(params()), switch.init(params())
    for i in range(3):
        one = (sampled(one, x) if i == 1 else (one, {}))[0]
        one, (two, _) = step(one, x)[0], switch(two, x)
        assert all(torch.equal(one.params[k].full_tensor(), two.params[k].full_tensor()) for k in one.params)
    with pytest.raises(ValueError, match="got 1 steps"):
        sf.switch_step(step)(step(step.init(params()), x)[0], x)


def test_galore_is_the_paper_s_algorithm() -> None:
    draw, rank, gap, scale = np.random.default_rng(0), 2, 3, 0.25
    for shape in ((7, 5), (4, 6)):
        p = torch.zeros(shape, dtype=torch.float64)
        tx = optim.scale_by_galore(rank, gap, scale, 0.8, 0.9, 1e-3)
        state, wide = tx.init([p]), shape[0] < shape[1]
        m = v = np.zeros((shape[0], rank) if wide else (rank, shape[1]))
        basis = np.zeros((max(shape), rank))
        for t in range(1, 8):
            g = draw.normal(size=shape)
            if t % gap == 1:
                u, _, vt = np.linalg.svd(g, full_matrices=False)
                basis = vt[:rank].T if wide else u[:, :rank]
                basis = basis * np.sign(basis[np.abs(basis).argmax(0), range(rank)])
            r = g @ basis if wide else basis.T @ g
            m, v = 0.8 * m + 0.2 * r, 0.9 * v + 0.1 * r * r
            n = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            (got,), state = tx.update([torch.from_numpy(g)], state, [p])
            np.testing.assert_allclose(got, scale * (n @ basis.T if wide else basis @ n), rtol=1e-9, atol=1e-12)


def test_states_have_a_quarter_of_the_bytes() -> None:
    plain, whole = optim.adamw(1e-3), {"w": torch.zeros(512, 1024), "norm": torch.zeros(1024)}
    sizes = [
        sum(x.nbytes for x in tree_leaves(tx.init(whole)))
        for tx in (plain, optim.quantize_states(plain), optim.round_states(plain, KEY))
    ]
    assert sizes[1] / sizes[0] < 0.26 and sizes[2] / sizes[0] < 0.501
    narrow = {"w": torch.zeros(512, 64), "heads": torch.zeros(16, 16, 64), "odd": torch.zeros(300, 129)}
    held, full = (sum(x.nbytes for x in tree_leaves(tx.init(narrow))) for tx in (optim.quantize_states(plain), plain))
    assert held / full < 0.26


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_reference(signed: bool) -> None:
    """The map of bitsandbytes' `create_dynamic_map(signed)`, and each value by its neighbours in turn."""
    values = optim.dynamic_map(signed=signed)
    data = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        data += [*means, *(-means if signed else ())]
    assert len(data) == 256
    np.testing.assert_allclose(values, sorted(data), rtol=1e-6)
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).abs() * (1 if not signed else 1.0)
    x = x if not signed else x - 1
    name = "trace" if signed else "sum_of_squares"
    kind = optim.TraceState if signed else optim.ScaleByRssState
    rule = optim.trace(0.5) if signed else optim.scale_by_rss()
    fixed = rule._replace(
        init=lambda params: kind(tree_map(torch.zeros_like, params)),
        update=lambda updates, state, params=None, *, specs=None: (updates, kind(updates)),
    )
    tx = optim.quantize_states(fixed, min_size=1)
    state, steps, kept, scales = tx.init([x]), 64, torch.zeros(3, 300), torch.zeros(3, 2)
    want = x if signed else x.sqrt()  # averages of squares are kept as roots
    for _ in range(steps):
        _, state = tx.update([x], state, [x])
        [codes], [scales] = getattr(state.inner, name), state.scales
        for row in range(3):
            for k, part in enumerate(want[row].split(256)):
                top = part.abs().max()
                assert scales[row, k] == top
                high = torch.searchsorted(values, part / top).clamp(max=255)
                at = codes[row, 256 * k : 256 * k + len(part)].long()
                assert bool(((at == high) | (at == (high - 1).clamp(min=0))).all())
                kept[row, 256 * k : 256 * k + len(part)] += values[at] * top / steps
    wide = torch.cat([scales[:, :1].expand(3, 256), scales[:, 1:].expand(3, 44)], 1)
    ratios = (want / wide).clamp(min=float(values[0]))  # the signed map begins above -1
    high = torch.searchsorted(values, ratios).clamp(1, 255)
    assert bool(((kept / wide - ratios).abs() <= 0.06 * (values[high] - values[high - 1])).all())


def test_rounding_is_unbiased_and_keyed() -> None:
    x = torch.full((4, 5000), 1 + 2.0**-10)
    fixed = optim.trace(0.5)._replace(
        update=lambda updates, state, params=None, *, specs=None: (updates, optim.TraceState(updates))
    )
    tx = optim.round_states(fixed, KEY)
    _, one = tx.update([x], tx.init([x]), [x])
    _, two = tx.update([x], one, [x])
    first, second = (s.inner.trace[0].float() for s in (one, two))
    assert set(first.unique().tolist()) == {1.0, 1 + 2.0**-7}
    # One in eight is rounded up: 2,500 of 20,000, with a standard deviation of 47.
    assert abs(int((first > 1).sum()) - 2500) < 250 and not torch.equal(first, second)
    assert torch.equal(first, tx.update([x], tx.init([x]), [x])[1].inner.trace[0].float())
    assert not torch.equal(first, optim.round_states(fixed, sf.key(4)).update([x], tx.init([x]), [x])[1].inner.trace[0])
    odd = torch.tensor([torch.inf, torch.nan])
    assert tx.update([odd], tx.init([odd]), [odd])[1].inner.trace[0][0] == torch.inf


def test_mistakes_are_named() -> None:
    for make, why in (
        (lambda: optim.sam(optim.sgd(0.1), 0.0), r"sam: rho=0.0 must be a finite number > 0"),
        (lambda: optim.sam(optim.onebit_adam(0.1, freeze_step=1)), "sam cannot wrap a rule that averages gradients"),
        (
            lambda: optim.quantize_states(optim.adamw(0.1), code="nf4"),
            "code must be 'dynamic' or 'linear', got 'nf4'",
        ),
        (lambda: optim.quantize_states(optim.adamw(0.1), block_size=0), "block_size=0 must be an int >= 1"),
        (lambda: optim.quantize_states(optim.sgd(0.1)).init([torch.ones(3)]), "none of the averages"),
        (lambda: optim.scale_by_galore().init({"a": torch.ones(3), "m": torch.ones(3, 3)}), r"params\['a'\]"),
        (lambda: optim.sophia(0.1, gamma=0.0), "gamma=0.0 must be a finite number > 0"),
        (lambda: optim.prodigy(estim_lr0=-1.0), "estim_lr0=-1.0 must be"),
        (lambda: optim.adopt(0.1, eps=0.0), "eps=0.0 must be a finite number > 0"),
        (lambda: optim.ademamix(0.1, b3=1.0), r"b3=1.0 must be a number in \[0, 1\)"),
        (lambda: optim.is_perturbed(optim.sgd(0.1).init([torch.ones(1)])), "expected a SamState"),
    ):
        with pytest.raises(ValueError, match=why):
            make()
