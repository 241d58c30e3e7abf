"""Covers every optimizer of the room: abstract init, kept layouts, purity, in place == pure, odd leaves, descent."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import optim
from shardfn.core import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten
from shardfn.optim import GradientTransformation

SCHEDULE = optim.warmup_cosine_decay_schedule(0.001, 0.02, 3, 30)
MASK = {"w": True, "blocks": True, "scale": False, "none": False, "empty": True}
OPTIMIZERS: dict[str, Callable[[], GradientTransformation]] = {
    "sgd": lambda: optim.sgd(0.02),
    "sgd decay": lambda: optim.sgd(0.02, weight_decay=0.1),
    "sgd momentum": lambda: optim.sgd(0.02, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda: optim.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(0.02),
    "adam schedule": lambda: optim.adam(SCHEDULE, b1=0.8, b2=0.95),
    "adamw": lambda: optim.adamw(0.02),
    "adamw mask": lambda: optim.adamw(SCHEDULE, weight_decay=0.1, mask=MASK),
    "adamw callable mask": lambda: optim.adamw(
        0.02, weight_decay=0.1, mask=lambda p: tree_map(lambda x: x.ndim > 1, p)
    ),
    "lamb": lambda: optim.lamb(0.02),
    "lamb decay": lambda: optim.lamb(SCHEDULE, weight_decay=0.1, mask=MASK),
    "lion": lambda: optim.lion(0.02),
    "lion mask": lambda: optim.lion(SCHEDULE, weight_decay=0.1, mask=MASK),
    "clip, adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.02)),
    "clip, freeze": lambda: optim.chain(optim.clip(0.1), optim.sgd(0.1), optim.freeze(MASK)),
    "masked": lambda: optim.chain(optim.masked(optim.scale_by_adam(), MASK), optim.scale_by_learning_rate(0.02)),
    "masked last": lambda: optim.masked(optim.adamw(0.02), MASK),
    "multi": lambda: optim.multi_transform(
        {"fast": optim.adamw(0.02), "slow": optim.lamb(SCHEDULE), "off": optim.set_to_zero()},
        {"w": "fast", "blocks": ["slow", "fast"], "scale": "off", "none": "off", "empty": "slow"},
    ),
    "masters": lambda: optim.master_weights(optim.adamw(SCHEDULE)),
    "adam mu": lambda: optim.adam(SCHEDULE, eps_root=1e-6, mu_dtype=torch.bfloat16, nesterov=True),
    "nadamw mask": lambda: optim.nadamw(0.02, weight_decay=0.1, mask=MASK),
    "radam": lambda: optim.radam(0.02, b2=0.9),
    "rmsprop": lambda: optim.rmsprop(SCHEDULE, eps=1e-3, centered=True, momentum=0.5, bias_correction=True),
    "adagrad": lambda: optim.adagrad(0.2),
    "lamb moments, mask": lambda: optim.lamb(0.02, mask=MASK, max_coeff=math.inf, bias_correction="moments"),
    "lars mask": lambda: optim.lars(SCHEDULE, 0.1, MASK, 0.5),
    "clips, named": lambda: optim.named_chain(
        ("rms", optim.clip_by_block_rms(0.5)), ("units", optim.adaptive_grad_clip(0.5)), ("step", optim.sgd(0.1))
    ),
    "scales": lambda: optim.chain(optim.scale_by_rms(), optim.scale_by_schedule(SCHEDULE), optim.scale(-1.0)),
    "muon": lambda: optim.muon(0.02, optim.adamw(0.02)),
    "adafactor": lambda: optim.adafactor(0.05, 3, momentum=0.9),
    "if finite": lambda: optim.apply_if_finite(optim.adamw(0.02), 2),
    "average": lambda: optim.average_params(optim.adamw(0.02), 0.9),
    "average debiased": lambda: optim.average_params(optim.adamw(0.02), 0.9, debias=True),
    "lookahead": lambda: optim.lookahead(optim.adamw(0.02), 2, 0.5),
    "schedule free": lambda: optim.schedule_free(optim.adamw(0.02, b1=0.0), 0.02),
    "per leaf": lambda: optim.per_leaf(optim.adamw(SCHEDULE)),
    "ademamix mask": lambda: optim.ademamix(0.02, alpha=2.0, weight_decay=0.1, mask=MASK),
    "adopt mask": lambda: optim.adopt(SCHEDULE, weight_decay=0.1, mask=MASK),
    "prodigy mask": lambda: optim.prodigy(estim_lr0=1e-2, weight_decay=0.1, mask=MASK),
    "sam mask": lambda: optim.sam(optim.adamw(0.02, mask=MASK), 0.1),
    "sam clip": lambda: optim.sam(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.2)), 0.1),
    "sophia mask": lambda: optim.sophia(SCHEDULE, mask=MASK, update_interval=2),
    "galore": lambda: optim.galore(0.02, 2, update_proj_gap=3),
    "nonnegative": lambda: optim.chain(optim.adamw(0.02), optim.keep_params_nonnegative()),
    "by hand": lambda: optim.chain(
        optim.scale_by_adam(), optim.add_decayed_weights(0.1), optim.scale_by_learning_rate(SCHEDULE)
    ),
}
# Rules without an in-place form of their own.
PURE = [
    "clip, freeze",
    "masked",
    "by hand",
    "adam mu",
    "nadamw mask",
    "radam",
    "rmsprop",
    "adagrad",
    "lamb moments, mask",
]
PURE += [
    "lars mask",
    "scales",
    "ademamix mask",
    "adopt mask",
    "prodigy mask",
    "sam mask",
    "sam clip",
    "sophia mask",
    "galore",
]
BY_DAY = [*OPTIMIZERS][::3]


def all_but(*names: str) -> pytest.MarkDecorator:
    kept = [n for n in OPTIMIZERS if n not in names]
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in BY_DAY else pytest.mark.nightly) for n in kept]
    )


every = all_but()


def make_params(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return {
        "w": torch.randn(5, 7, dtype=dtype),
        "blocks": [torch.randn(3, 4, 2, dtype=dtype), torch.randn(9, dtype=dtype)],
        "scale": torch.randn((), dtype=dtype),
        "none": None,
        "empty": torch.zeros(0, 3, dtype=dtype),
    }


def make_grads(params: Any, step: int) -> Any:
    g = torch.Generator().manual_seed(step)
    return tree_map(lambda p: torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype), params)


def leaves_of(tree: Any) -> list[Tensor]:
    return tree_leaves(tree)


def clone(tree: Any) -> Any:
    return tree_map(torch.clone, tree)


def assert_close(got: Any, want: Any, rtol: float, atol: float) -> None:
    assert tree_structure(got) == tree_structure(want)
    for a, b in zip(leaves_of(got), leaves_of(want), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def run(tx: GradientTransformation, params: Any, steps: int, *, in_place: bool) -> tuple[Any, Any]:
    params = clone(params)
    state = tx.init(params)
    for step in range(steps):
        grads = make_grads(params, step)
        if in_place:
            params, state = optim.inplace(tx)(grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
    return params, state


@every
def test_init_is_abstract(name: str) -> None:
    params = make_params()
    meta = OPTIMIZERS[name]().init(tree_map(lambda p: p.to("meta"), params))
    real = OPTIMIZERS[name]().init(params)
    assert tree_structure(meta) == tree_structure(real)
    for a, b in zip(leaves_of(meta), leaves_of(real), strict=True):
        assert a.device.type == "meta" and (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.day(12)
@every
@pytest.mark.parametrize("in_place", [False, True])
def test_step_is_abstract(name: str, in_place: bool) -> None:
    params = tree_map(lambda p: p.to("meta"), make_params())
    tx = OPTIMIZERS[name]()
    grads = clone(params)
    new, _ = (
        optim.inplace(tx)(grads, tx.init(params), params) if in_place else tx.update(grads, tx.init(params), params)
    )
    assert tree_structure(new) == tree_structure(params)


@pytest.mark.day(32)
@every
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layouts_are_kept(name: str, in_place: bool, dtype: torch.dtype) -> None:
    tx, params = OPTIMIZERS[name](), make_params(dtype)
    new_params, new_state = run(tx, params, 2, in_place=in_place)
    pairs: list[tuple[Any, Any]] = [(new_params, params), (new_state, tx.init(params))]
    for new, old in pairs:
        assert tree_structure(new) == tree_structure(old)
        assert [(x.shape, x.dtype) for x in leaves_of(new)] == [(x.shape, x.dtype) for x in leaves_of(old)]


@all_but("if finite", "lookahead", "sam mask", "sam clip", "sophia mask")
def test_counters_are_int32_and_count(name: str) -> None:
    tx = OPTIMIZERS[name]()
    for in_place in (False, True):
        _, state = run(tx, make_params(), 3, in_place=in_place)
        counts = [x for x in leaves_of(state) if not x.is_floating_point()]
        assert all(c.dtype == torch.int32 and c.shape == () and c == 3 for c in counts)


@every
def test_update_is_pure(name: str) -> None:
    tx, params = OPTIMIZERS[name](), make_params()
    _, state = run(tx, params, 2, in_place=False)
    grads = make_grads(params, 7)
    before = clone((grads, state, params))
    tx.update(grads, state, params)
    for a, b in zip(leaves_of((grads, state, params)), leaves_of(before), strict=True):
        assert torch.equal(a, b)


@pytest.mark.day(5)
@every
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_apply_equals_update(name: str, dtype: torch.dtype, tol: float) -> None:
    tx, params = OPTIMIZERS[name](), make_params(dtype)
    pure, in_place = (run(tx, params, 20, in_place=flag) for flag in (False, True))
    # Norms and schedules are float32 for leaves of any dtype, and so is the learning rate in them.
    tol = max(tol, 1e-6) if any(word in name for word in ("lamb", "multi", "clip", "lars")) else tol
    assert_close(in_place[0], pure[0], rtol=tol, atol=tol)
    assert_close(in_place[1], pure[1], rtol=tol, atol=tol)


@pytest.mark.day(8)
@every
def test_apply_equals_update_in_half_precision(name: str) -> None:
    tx, params = OPTIMIZERS[name](), make_params(torch.bfloat16)
    pure, in_place = (run(tx, params, 3, in_place=flag) for flag in (False, True))
    assert_close(in_place[0], pure[0], rtol=2**-6, atol=2**-7)


@all_but(*PURE, "muon", "adafactor", "lookahead", "schedule free", "nonnegative")
def test_apply_reuses_every_buffer(name: str) -> None:
    tx, params = OPTIMIZERS[name](), make_params()
    state = tx.init(params)
    where = [x.data_ptr() for x in leaves_of((params, state))]
    params, state = optim.inplace(tx)(make_grads(params, 0), state, params)
    moved = [i for i, x in enumerate(leaves_of((params, state))) if x.data_ptr() != where[i]]
    assert moved == []


@pytest.mark.day(6)
@all_but("masked last", "clip, freeze")
def test_descends_a_quadratic(name: str) -> None:
    tx = OPTIMIZERS[name]()
    params = tree_map(lambda p: torch.ones_like(p) * 2, make_params())
    state = tx.init(params)
    loss = lambda p: sum(float(x.square().sum()) for x in leaves_of(p))  # noqa: E731
    first = loss(params)
    for _ in range(25):
        params, state = optim.inplace(tx)(clone(params), state, params)
    assert loss(params) < 0.98 * first


@every
def test_odd_leaves_step_as_plain_ones(name: str) -> None:
    # Transposed and strided parameters, an expanded gradient, gradients of another dtype.
    tx = OPTIMIZERS[name]()
    plain = make_params()
    odd = clone(plain)
    odd["w"] = plain["w"].t().contiguous().t()
    odd["blocks"][0] = torch.zeros(3, 4, 4)[..., ::2].copy_(plain["blocks"][0])
    grads = make_grads(plain, 0)
    grads["blocks"][1] = torch.full((9,), 0.3)
    grads["w"] = grads["w"].bfloat16().float()
    strange = clone(grads)
    strange["blocks"][0] = grads["blocks"][0].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    strange["blocks"][1] = torch.tensor(0.3).expand(9)
    strange["w"] = grads["w"].double()
    apply = optim.inplace(tx)
    new, _ = apply(clone(grads), tx.init(plain), plain)
    got, _ = apply(strange, tx.init(odd), odd)
    assert_close(got, new, rtol=1e-5, atol=1e-6)
    assert got["w"] is odd["w"] and not got["w"].is_contiguous()


@pytest.mark.day(8)
@every
def test_dtypes_may_be_mixed(name: str) -> None:
    tx, params = OPTIMIZERS[name](), make_params()
    mixed = {**params, "w": params["w"].double(), "blocks": [params["blocks"][0], params["blocks"][1].bfloat16()]}
    pure, in_place = (run(tx, mixed, 3, in_place=flag) for flag in (False, True))
    assert_close(in_place[0], pure[0], rtol=2**-6, atol=2**-7)
    assert [x.dtype for x in leaves_of(in_place[0])] == [x.dtype for x in leaves_of(mixed)]


@every
def test_parameters_that_require_grad_stay_leaves(name: str) -> None:
    tx, params = OPTIMIZERS[name](), tree_map(lambda p: p.requires_grad_(), make_params())
    new, state = optim.inplace(tx)(make_grads(params, 0), tx.init(params), params)
    assert all(p.is_leaf and p.requires_grad for p in leaves_of(new))
    assert not any(x.requires_grad for x in leaves_of(state))


@all_but(*(n for n in OPTIMIZERS if "mask" in n and "callable" not in n), "multi", "clip, freeze", "lamb decay")
def test_trees_without_leaves(name: str) -> None:
    tx = OPTIMIZERS[name]()
    for params in ({"a": None}, [], ()):
        assert optim.inplace(tx)(params, tx.init(params), params)[0] == params
        assert tx.update(params, tx.init(params), params)[0] == params


@all_but("clip, freeze", "multi", "masked", "if finite")
def test_a_nan_gradient_is_seen(name: str) -> None:
    tx, params = OPTIMIZERS[name](), make_params()
    grads = make_grads(params, 0)
    grads["w"][0, 0] = math.nan
    new, _ = optim.inplace(tx)(grads, tx.init(params), params)
    assert new["w"][0, 0].isnan()


@pytest.mark.parametrize(
    "tx",
    [
        optim.adamw(0.1),
        pytest.param(optim.sgd(0.1, momentum=0.9), marks=pytest.mark.nightly),
        pytest.param(optim.lion(0.1), marks=pytest.mark.nightly),
        optim.lamb(0.1),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_trees_that_differ_are_refused(tx: GradientTransformation, in_place: bool) -> None:
    params, state = {"wq": torch.ones(3), "b": torch.ones(2)}, tx.init({"wq": torch.ones(3), "b": torch.ones(2)})
    step = tx.apply if in_place else tx.update
    assert step is not None
    with pytest.raises(ValueError, match=r"\['wq'\] has no leaf in .*Did you mean \"\['wk'\]\""):
        step({"wk": torch.ones(3), "b": torch.ones(2)}, state, params)
    with pytest.raises(ValueError, match=r"\['b'\] has no leaf in"):
        step({"wq": torch.ones(3), "b": None}, state, params)
    with pytest.raises(ValueError, match=r"init\(params\)"):
        step(params, (optim.EmptyState(),), params)
    with pytest.raises(ValueError, match=r"init\(params\)"):
        step(params, (optim.EmptyState(),) * len(state), params)
    with pytest.raises(ValueError, match=r"has no leaf in"):
        step(params, tx.init({"wq": torch.ones(3)}), params)
    with pytest.raises(ValueError, match=r"\['wq'\] has shape \(4,\).*\(3,\)"):
        step(params, tx.init({"wq": torch.ones(4), "b": torch.ones(2)}), params)


def test_a_leaf_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"params\['ids'\] is torch.int64"):
        optim.adamw(0.1).init({"w": torch.ones(2), "ids": torch.arange(3)})


def test_an_update_can_be_differentiated() -> None:
    tx, w = optim.adamw(0.1), torch.ones(3)
    g = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    updates, _ = tx.update([g], tx.init([w]), [w])
    updates[0].sum().backward()
    assert g.grad is not None and g.grad.isfinite().all()


def test_a_step_traces_into_one_graph() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(SCHEDULE, mask=MASK))
    params = make_params()
    state, grads = tx.init(params), make_grads(params, 0)
    everything: Any = (grads, state, params)
    leaves, treedef = tree_flatten(everything)

    def step(*xs: Tensor) -> list[Tensor]:
        return leaves_of(optim.inplace(tx)(*tree_unflatten(treedef, xs)))

    graph = make_fx(step, tracing_mode="fake")(*[x.clone() for x in leaves])
    assert any("_fused_adamw_" in str(node.target) for node in graph.graph.nodes)
    for a, b in zip(graph(*[x.clone() for x in leaves]), step(*leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "adamw mask",
        pytest.param("sgd nesterov", marks=pytest.mark.nightly),
        pytest.param("adam", marks=pytest.mark.nightly),
    ],
)
def test_gradients_of_half_precision_are_cast_to_the_bit(name: str) -> None:
    tx = OPTIMIZERS[name]()
    params = make_params()
    params["blocks"] = [torch.randn(300_001), torch.randn(9)]
    half = tree_map(torch.Tensor.bfloat16, make_grads(params, 0))
    want = optim.inplace(tx)(tree_map(torch.Tensor.float, half), tx.init(params), clone(params))
    got = optim.inplace(tx)(half, tx.init(params), clone(params))
    assert_close(got, want, rtol=0, atol=0)
