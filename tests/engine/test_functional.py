"""Covers the step under torch.func: populations, per-example gradients, HVP, jvp, hypergradients == unsharded ones."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import optim
from shardfn.collectives import member, stack, unshard
from shardfn.core import tree_leaves, tree_map
from shardfn.optim._checks import check_not_negative
from shardfn.testing import (
    assert_same,
    distributed,
    odd_batch,
    odd_loss,
    odd_params,
    on_mesh,
    one_device,
    shard_rows,
)
from shardfn.testing._parity import Run

# Forward-mode AD loads these on its first use, and torch warns of itself.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

ODD: dict[str, Any] = {"persist_elements": 2, "bucket_bytes": 64, "prefetch_bytes": 150}
STAGES = (0, 1, 2, 3)
RATES = torch.tensor([1e-3, 1e-2, 3e-2]).double()  # numbers in float32, too


def zeros(stage: int) -> sf.Zero:
    return sf.Zero.flat(stage=stage, **ODD)


def rows(batch: Any, mesh: sf.Mesh, spec: sf.P = sf.P("dp")) -> Any:
    return shard_rows(batch, spec, mesh)


def close(got: Any, want: Any) -> None:
    """To the parity harness's tolerance, leaf by leaf."""
    assert_same(Run(got, (), []), Run(want, (), []))


def same_member(state: Any, metrics: list[dict], i: int, want: Run) -> None:
    one = member(state, i)
    measured = [{k: v[i] for k, v in m.items()} for m in metrics]
    assert_same(Run(unshard(one.params), unshard(one.opt_state), measured), want)


def smooth_loss(params: dict, batch: dict) -> torch.Tensor:
    h = torch.tanh(batch["x"] @ params["up"].t() + params["bias"])
    return ((h @ params["down"].t() - batch["y"]) ** 2).mean()


def smooth_params() -> dict:
    g = torch.Generator().manual_seed(3)
    up, bias, down = (torch.randn(s, generator=g) / 2 for s in ((7, 5), (7,), (3, 7)))
    return {"up": up, "bias": bias, "down": down}


def wide(tree: Any) -> Any:
    return tree_map(torch.Tensor.double, tree)


def problem(name: str) -> tuple[Any, Any, Any]:
    """Loss, parameters, batch number n. The odd tree in float64: its sums cancel, which float32 shows."""
    if name == "odd":
        return odd_loss, wide(odd_params()), lambda n: wide(odd_batch(n))
    return smooth_loss, smooth_params(), odd_batch


def make(loss: Any, tx: Any, mesh: sf.Mesh, stage: int, **options: Any) -> Any:
    return sf.sharded_step(loss, tx, mesh=mesh, zero=zeros(stage), **options)


def plain_step(loss: Any, tx: Any) -> Any:
    """One step on one device as a pure function."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        updates, opt_state = tx.update(grad(loss)(params, batch), opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    return step


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb"])
@distributed(world=[1, 2, 4])
def test_vmap_over_learning_rates_trains_a_population(world: int, name: str) -> None:
    mesh = sf.make_mesh({"dp": world})
    loss, params, batch = problem("smooth" if name == "lamb" else "odd")  # LAMB has its norms in float32
    batches = [batch(n) for n in range(2)]

    def tx(lr: Any) -> optim.GradientTransformation:
        inner = {
            "sgd": lambda: optim.sgd(lr * 0.1, momentum=0.9),
            "adamw": lambda: optim.adamw(lr, weight_decay=0.1),
            "lion": lambda: optim.lion(lr * 0.1),
            "lamb": lambda: optim.lamb(lr),
        }[name]()
        return optim.chain(optim.clip_by_global_norm(0.1), inner)

    want = [one_device(loss, tx(lr), params, batches) for lr in RATES.tolist()]
    for stage in STAGES if name == "adamw" else (3,):
        first = make(loss, tx(0.0), mesh, stage).init(params)
        states = vmap(lambda lr, first=first: first)(RATES)
        measured = []
        for batch in batches:
            own = rows(batch, mesh)
            train = lambda lr, state, own=own, stage=stage: make(loss, tx(lr), mesh, stage)(state, own)  # noqa: E731
            states, metrics = vmap(train)(RATES, states)
            measured.append(metrics)
        for i, run in enumerate(want):
            same_member(states, measured, i, run)
        assert not any(x.donated for x in tree_leaves(first.params))


def weighted_loss(params: dict, batch: dict, key: torch.Tensor) -> tuple[sf.WeightedMean, dict]:
    x = sf.nn.dropout(key, batch["x"], 0.5, batch["index"])
    errors = ((x @ params["w"] - batch["y"][:, 0]) ** 2) * batch["mask"]
    worst = sf.WeightedMean(errors.detach().sqrt().sum(), batch["mask"].sum())
    return sf.WeightedMean(errors.sum(), batch["mask"].sum()), {"error": worst}


@pytest.mark.nightly
@distributed(world=[1, 3])
def test_vmap_over_seeds_with_weights_aux_and_accumulation(world: int) -> None:
    mesh = sf.make_mesh({"dp": world})
    params = {"w": torch.randn(5, generator=torch.Generator().manual_seed(5)), "unused": torch.zeros(0, 2)}
    mask = torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0])
    batches = [odd_batch(n) | {"mask": mask, "index": torch.arange(12) + 12 * n} for n in range(2)]
    keys = sf.split(sf.key(1), 3)
    for stage, micro in itertools.product(STAGES, (1, 2)):
        loss = sf.accumulate(weighted_loss, micro)
        options: dict[str, Any] = {"mesh": mesh, "zero": zeros(stage), "has_aux": True}
        want = [on_mesh(loss, optim.adam(1e-2), params, batches, key=key, **options) for key in keys]
        step = sf.sharded_step(loss, optim.adam(1e-2), key=keys[0], **options)
        first = step.init(params)
        states, measured = vmap(lambda key, first=first: first._replace(key=key))(keys), []
        for batch in batches:
            states, metrics = vmap(step, in_dims=(0, None))(states, rows(batch, mesh))
            measured.append(metrics)
        for i, run in enumerate(want):
            same_member(states, measured, i, run)
        value = step.loss(first.params, rows(batches[0], mesh), keys[0])
        torch.testing.assert_close(value, loss(params, batches[0], keys[0])[0].mean(), rtol=1e-6, atol=0)


def tp_loss(params: dict, batch: dict) -> torch.Tensor:
    h = torch.tanh(sf.pvary(batch["x"], "tp") @ params["up"].t() + params["bias"])
    out = sf.psum(h @ params["down"].t(), "tp") + params["shift"]
    return ((out - batch["y"]) ** 2).mean()


@pytest.mark.nightly
@distributed(world=4)
def test_tensor_parallel_leaves_and_other_axes() -> None:
    g = torch.Generator().manual_seed(3)
    params = {
        "up": torch.randn(7, 5, generator=g),
        "bias": torch.randn(7, generator=g),
        "down": torch.randn(3, 7, generator=g),
        "shift": torch.randn(3, generator=g),
    }
    specs = {"up": sf.P("tp"), "bias": sf.P("tp"), "down": sf.P(None, "tp"), "shift": sf.P()}
    batches, tx = [odd_batch(n) for n in range(2)], optim.adamw(1e-2)
    want = one_device(tp_loss, tx, params, batches)
    curvature = jvp(grad(lambda p: tp_loss(p, batches[0])), (params,), (tree_map(torch.cos, params),))[1]
    cases = [
        ({"dp": 2, "tp": 2}, sf.P("dp"), "dp"),
        ({"tp": 2, "dp": 2}, sf.P("dp"), "dp"),
        ({"dp": 2, "sp": 2}, sf.P("sp"), ("dp", "sp")),
        ({"dp": 2, "sp": 2}, sf.P("sp"), "dp"),
        ({"dp": 2, "sp": 2}, sf.P(("dp", "sp")), "sp"),
    ]
    for (shape, cut, axis), stage in itertools.product(cases, (0, 1, 3)):
        mesh = sf.make_mesh(shape)
        options: dict[str, Any] = {"mesh": mesh, "batch": cut, "zero": sf.Zero.flat(stage=stage, axis=axis, **ODD)}
        step = sf.sharded_step(tp_loss, tx, specs=specs if "tp" in shape else sf.P(), **options)
        first = step.init(params)
        states, measured = stack([first, first]), []
        for batch in batches:
            states, metrics = vmap(step, in_dims=(0, None))(states, rows(batch, mesh, cut))
            measured.append(metrics)
        same_member(states, measured, 1, want)
        gradient = lambda p, step=step, mesh=mesh, cut=cut: grad(step.loss)(p, rows(batches[0], mesh, cut))  # noqa: E731
        close(unshard(jvp(gradient, (first.params,), (cosine(first.params, params),))[1]), curvature)


def cosine(like: Any, whole: Any) -> Any:
    """The cosine of a whole tree, kept as `like` is."""
    return tree_map(lambda x, w: sf.shard(torch.cos(w), x.spec, x.mesh), like, whole)


@pytest.mark.nightly
@distributed(world=[1, 2, 4])
def test_per_example_gradients(world: int) -> None:
    mesh, batch = sf.make_mesh({"dp": world}), odd_batch(0)
    one = lambda p, x, y: odd_loss(p, {"x": x[None], "y": y[None]})  # noqa: E731
    want = vmap(grad(one), in_dims=(None, 0, 0))(odd_params(), batch["x"], batch["y"])
    for stage in STAGES:
        loss = lambda p, b: one(p, b["x"], b["y"])  # noqa: E731
        # Replicated rows: every rank has all examples.
        step = make(loss, optim.sgd(0.1), mesh, stage, batch=sf.P())
        params = step.init(odd_params()).params
        got = vmap(grad(step.loss), in_dims=(None, 0))(params, batch)
        close([unshard(member(got, i)) for i in range(12)], [member(want, i) for i in range(12)])
        close(vmap(unshard)(got), want)
        # Own rows: example i is the mean over the ranks' i-th rows.
        step = make(loss, optim.sgd(0.1), mesh, stage)
        got = vmap(grad(step.loss), in_dims=(None, 0))(step.init(odd_params()).params, rows(batch, mesh))
        each = tree_map(lambda x: x.unflatten(0, (world, 12 // world)).mean(0), want)
        close(vmap(unshard)(got), each)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["smooth", "odd"])
@distributed(world=[1, 2, 4])
def test_hessian_vector_products_both_ways_and_jvp(world: int, name: str) -> None:
    mesh, (loss, whole, batch_of) = sf.make_mesh({"dp": world}), problem(name)
    batch, direction = batch_of(0), tree_map(torch.cos, whole)
    value, slope, *_ = jvp(lambda p: loss(p, batch), (whole,), (direction,))
    want = jvp(grad(lambda p: loss(p, batch)), (whole,), (direction,))[1]
    for stage in STAGES:
        step = make(loss, optim.sgd(0.1), mesh, stage)
        params, own = step.init(whole).params, rows(batch, mesh)
        v, f = cosine(params, whole), lambda p, step=step, own=own: step.loss(p, own)
        close(jvp(f, (params,), (v,)), (value, slope))
        close(unshard(jvp(grad(f), (params,), (v,))[1]), want)  # forward over reverse
        close(unshard(vjp(grad(f), params)[1](v)[0]), want)  # reverse over reverse
        many = vmap(lambda v, f=f, params=params: jvp(grad(f), (params,), (v,))[1])(stack([v, v]))
        close(unshard(member(many, 1)), want)


def hyper(clip: float, log_lr: Any, decay: Any = 0.1, b1: Any = 0.9) -> optim.GradientTransformation:
    adamw = optim.adamw(torch.exp(log_lr), b1=b1, weight_decay=decay)
    return optim.chain(optim.clip_by_global_norm(clip), adamw) if clip else adamw


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["smooth", "odd"])
@distributed(world=[1, 2, 4])
def test_hypergradients_through_three_steps(world: int, name: str) -> None:
    mesh, (loss, whole, batch_of) = sf.make_mesh({"dp": world}), problem(name)
    batches, held_out = [batch_of(n) for n in range(3)], batch_of(9)
    # The norm of clipping is kept in float32.
    clip, dtype = (0.0, torch.float64) if name == "odd" else (0.5, torch.float32)
    at: Any = tuple(torch.tensor(x, dtype=dtype) for x in (-3.0, 0.1, 0.9))

    def plain(*h: Any) -> torch.Tensor:
        tx, params = hyper(clip, *h), whole
        opt_state = tx.init(params)
        for batch in batches:
            params, opt_state = plain_step(loss, tx)(params, opt_state, batch)
        return loss(params, held_out)

    # In float32 the derivative with respect to b1 is a difference of large numbers; in float64 all three are compared.
    nums = (0, 1, 2) if name == "odd" else (0, 1)
    want: Any = grad(plain, argnums=nums)(*at)
    for stage in STAGES:
        first = make(loss, hyper(clip, *at), mesh, stage).init(whole)

        def sharded(*h: torch.Tensor, stage: int = stage, first: Any = first) -> torch.Tensor:
            step, state = make(loss, hyper(clip, *h), mesh, stage), first
            for batch in batches:
                state, _ = step(state, rows(batch, mesh))
            return step.loss(state.params, rows(held_out, mesh))

        close(grad(sharded, argnums=nums)(*at), want)
        if stage == 3:
            close(jvp(lambda x, f=sharded: f(x, *at[1:]), at[:1], (torch.ones_like(at[0]),))[1], want[0])
            many = vmap(grad(sharded), in_dims=(0, None, None))(torch.stack([at[0], at[0] - 1]), *at[1:])
            close(many[0], want[0])
        if stage == 3 and name == "odd" and world == 2:
            close(hessian(sharded)(*at), hessian(plain)(*at))


@pytest.mark.nightly
@distributed(world=[1, 3])
def test_hypergradients_of_other_optimizers(world: int) -> None:
    """Lamb's norms and the schedule's rate are float32, so hyperparameters are, and the model is float64."""
    mesh, (loss, whole, batch_of) = sf.make_mesh({"dp": world}), problem("odd")
    makers = {
        "sgd": lambda x: optim.sgd(x[0] * 0.02, momentum=x[1], nesterov=True, weight_decay=x[2]),
        "lion": lambda x: optim.lion(x[0] * 0.1, weight_decay=x[2]),
        "lamb": lambda x: optim.lamb(x[0], weight_decay=x[2]),
        "schedule": lambda x: optim.adam(optim.warmup_constant_schedule(x[2], x[0], 2)),
        "nadam": lambda x: optim.adam(x[0], x[1], eps_root=x[2] * 1e-3, nesterov=True),
        "radam": lambda x: optim.radam(x[0] * 1e-4, x[1], eps=x[2]),
        "rmsprop": lambda x: optim.rmsprop(x[0], x[1], x[2], 0.5, centered=True, momentum=x[1]),
        "adagrad": lambda x: optim.adagrad(x[0], 0.5, x[2]),
        "lars": lambda x: optim.lars(x[0], x[2], trust_coefficient=0.1, momentum=x[1]),
        "clips": lambda x: optim.chain(optim.clip_by_block_rms(0.1), optim.adaptive_grad_clip(0.1), optim.scale(-x[0])),
    }
    at = torch.tensor([0.05, 0.5, 0.1])
    for maker, stage in itertools.product(makers.values(), (0, 1, 3)):

        def plain(x: Any, maker: Any = maker) -> torch.Tensor:
            tx, params = maker(x), whole
            opt_state = tx.init(params)
            for n in range(2):
                params, opt_state = plain_step(loss, tx)(params, opt_state, batch_of(n))
            return loss(params, batch_of(9))

        first = make(loss, maker(at), mesh, stage).init(whole)

        def sharded(x: Any, maker: Any = maker, stage: int = stage, first: Any = first) -> torch.Tensor:
            step, state = make(loss, maker(x), mesh, stage), first
            for n in range(2):
                state, _ = step(state, rows(batch_of(n), mesh))
            return step.loss(state.params, rows(batch_of(9), mesh))

        close(grad(sharded)(at), grad(plain)(at))


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_a_population_sends_the_same_messages_each_k_times_as_large(world: int) -> None:
    mesh, own = sf.make_mesh({"dp": world}), rows(odd_batch(0), sf.make_mesh({"dp": world}))
    for stage in STAGES:
        step = make(odd_loss, optim.adamw(1e-2), mesh, stage)
        first = step.init(odd_params())
        counts = []
        for k in (1, 5):
            with sf.count_traffic() as traffic:
                vmap(step, in_dims=(0, None))(stack([first] * k), own)
            counts.append(traffic.by_op)
        one, many = counts
        assert one.keys() == many.keys()
        for op in one:
            assert many[op][0] == one[op][0]
            assert many[op][1] == pytest.approx(5 * one[op][1], rel=0.02)  # a sum's share is rounded down
        if stage == 3:
            single = sf.sharded_step(
                odd_loss,
                optim.adamw(1e-2),
                mesh=mesh,
                zero=sf.Zero(stage=3, persist_elements=0, travel=sf.Travel(bucket_bytes=1 << 20)),
            )
            with sf.count_traffic() as traffic:
                vmap(single, in_dims=(0, None))(stack([single.init(odd_params())] * 3), own)
            assert traffic.by_op["all_gather", ("dp",)][0] == 1
            assert traffic.by_op["psum_scatter", ("dp",)][0] == 1


def test_unsupported_options_raise() -> None:
    loss = lambda w, x: (w * x).mean()  # noqa: E731
    x = torch.ones(2, 3)
    step = sf.sharded_step(loss, optim.sgd(0.1), skip_nonfinite=True)
    state = step.init(torch.ones(3))
    with pytest.raises(ValueError, match="skip_nonfinite"):
        vmap(step, in_dims=(0, None))(stack([state, state]), x)
    with pytest.raises(ValueError, match="population"):
        step(stack([state, state]), x)
    with pytest.raises(ValueError, match="member"):
        stack([state, state]).params.full_tensor()
    with pytest.raises(ValueError, match="Make the states first"):
        vmap(step.init)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="0-d"):
        check_not_negative("sgd", learning_rate=torch.ones(2))
    kept = sf.sharded_step(lambda w, x: checkpoint(loss, w, x, use_reentrant=False), optim.sgd(0.1))
    for f in (lambda: grad(kept.loss)(state.params, x), lambda: vmap(lambda lr: kept(state, x))(torch.ones(2))):
        with pytest.raises(ValueError, match="saved-tensor hooks"):
            f()
    with pytest.raises(ValueError, match="leaves of the members differ"):
        stack([{"w": torch.ones(2)}, {"w": torch.ones(3)}])


def test_hyperparameters_as_tensors_in_the_ordinary_step() -> None:
    params, x = torch.ones(3), torch.ones(2, 3)
    loss = lambda w, x: ((w * x) ** 2).mean()  # noqa: E731
    t = lambda v: torch.tensor(v, requires_grad=True)  # noqa: E731
    pairs = [
        (optim.adamw(0.1, 0.8, 0.9, 1e-6, 0.2), optim.adamw(t(0.1), t(0.8), t(0.9), t(1e-6), t(0.2))),
        (optim.sgd(0.1, 0.5, True, 0.2), optim.sgd(t(0.1), t(0.5), True, t(0.2))),
        (optim.lion(0.1, 0.8, 0.9), optim.lion(t(0.1), t(0.8), t(0.9))),
    ]
    for number, tensor in pairs:
        runs = [on_mesh(loss, tx, params, [x, x], mesh=None) for tx in (number, tensor)]
        assert_same(runs[1], runs[0])


def test_state_is_a_tree_to_torch() -> None:
    step = sf.sharded_step(lambda w, x: (w * x).mean(), optim.adamw(0.1))
    state = step.init(torch.ones(3))
    leaves = _pytree.tree_leaves(state)
    assert all(isinstance(x, torch.Tensor) for x in leaves)
    assert len(leaves) == len(tree_leaves(state))
    got = jacrev(lambda p: step.loss(p, torch.ones(2, 3)))(state.params)
    torch.testing.assert_close(got.full_tensor(), torch.full((3,), 1 / 3))
    assert hessian(lambda p: step.loss(p, torch.ones(2, 3)).square())(state.params) is not None
