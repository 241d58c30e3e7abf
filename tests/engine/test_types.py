"""Covers the types of a captured step along the axes of its mesh: wrong steps are refused, right ones are not."""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import optim
from shardfn.graph import AxisTypeError, storage_of, value_types
from shardfn.testing import distributed

D, HIDDEN, ROWS = 4, 6, 4
SPECS = {"up": sf.P("tp"), "down": sf.P(None, "tp"), "shift": sf.P(), "out": sf.P()}
STAGES = [sf.Zero(stage=0), sf.Zero(stage=2, persist_elements=4), sf.Zero(stage=3, persist_elements=0)]


def _params() -> dict[str, Tensor]:
    shapes = {"up": (HIDDEN, D), "down": (D, HIDDEN), "shift": (D,), "out": (D,)}
    return {k: torch.empty(shape, device="meta") for k, shape in shapes.items()}


def _lowered(loss: Callable[..., Any], zero: sf.Zero, **options: Any) -> Any:
    mesh = sf.make_mesh({"dp": 2, "tp": 2}, device="cpu", abstract=True)
    step = sf.sharded_step(
        sf.jit(loss, backend="graph"), optim.sgd(0.1, momentum=0.9), mesh=mesh, specs=SPECS, zero=zero, **options
    )
    return step.lower(_params(), {k: torch.empty(ROWS, D, device="meta") for k in "xy"})


def _line(loss: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(loss)
    return f"test_types.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def _hidden(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(sf.pvary(x, "tp") @ p["up"].t())


def _right(p: Any, b: Any) -> Tensor:
    h = _hidden(p, b["x"] + p["shift"])
    return ((sf.psum(h @ p["down"].t(), "tp") + p["out"] - b["y"]) ** 2).mean()


def _no_psum(p: Any, b: Any) -> Tensor:
    h = _hidden(p, b["x"] + p["shift"])
    return ((h @ p["down"].t() + p["out"] - b["y"]) ** 2).mean()  # here


def _no_pvary(p: Any, b: Any) -> Tensor:
    h = torch.tanh((b["x"] + p["shift"]) @ p["up"].t())
    return ((sf.psum(h @ p["down"].t(), "tp") + p["out"] - b["y"]) ** 2).mean()


def _two_psums(p: Any, b: Any) -> Tensor:
    h = _hidden(p, b["x"] + p["shift"])
    error = ((sf.psum(h @ p["down"].t(), "tp") + p["out"] - b["y"]) ** 2).mean()
    return sf.pmean(error, "tp")


def _two_pvarys(p: Any, b: Any) -> Tensor:
    h = sf.pvary(_hidden(p, b["x"] + p["shift"]), "tp")  # here
    return ((sf.psum(h @ p["down"].t(), "tp") + p["out"] - b["y"]) ** 2).mean()


def _pvary_alone(p: Any, b: Any) -> Tensor:
    x = b["x"] + sf.pvary(p["shift"], "tp")
    return ((x + p["out"] - b["y"]) ** 2).mean()  # here


def _gather_that_varies(p: Any, b: Any) -> Tensor:
    w = sf.all_gather(p["up"], "tp", size=HIDDEN)
    return ((b["x"] + p["shift"]) @ w.t()).square().mean()  # here


def _psum_of_the_batch(p: Any, b: Any) -> Tensor:
    return sf.pmean(_right(p, b), "dp")


def _aux_of_one_rank(p: Any, b: Any) -> Any:
    return _right(p, b), {"size": _hidden(p, b["x"]).norm()}  # here


def _unused(p: Any, b: Any) -> Tensor:
    return _right(p, b) + 0 * p["up"].sum()  # here


def _unpacked(p: Any, b: Any) -> Tensor:
    weights = torch.cat([p["up"][:1], p["out"][None, :]])[1]  # packed with a value that varies, and taken out again
    return ((b["x"] * weights - b["y"]) ** 2).mean()  # here


WRONG = {
    _no_psum: "the loss varies along 'tp'.*sf.psum",
    _two_pvarys: "pvary over 'tp' of a value.*varies there already.*Leave out this pvary",
    _pvary_alone: "the loss varies along 'tp'.*no sf.pvary",
    _gather_that_varies: "the loss varies along 'tp'.*sf.all_gather_invariant",
    _aux_of_one_rank: r"aux\['size'\] varies along 'tp'.*sf.psum",
    _unused: "the loss varies along 'tp'",
    _unpacked: "the loss varies along 'tp'",
}
# Losses whose casts are inserted.
RIGHT = [_right, _no_pvary, _two_psums, _psum_of_the_batch]


@pytest.mark.day("unpacked")
@pytest.mark.parametrize(
    "loss",
    [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(WRONG)],
    ids=lambda f: f.__name__.strip("_"),
)
def test_errors_name_op_line_axis_and_remedy(loss: Callable[..., Any]) -> None:
    for zero in STAGES[::3]:
        with pytest.raises(AxisTypeError, match=f"(?s){WRONG[loss]}") as caught:
            _lowered(loss, zero, has_aux=loss is _aux_of_one_rank)
        assert _line(loss, "# here") in str(caught.value)


def _many_ways(p: Any, b: Any) -> Any:
    """Right, and with operations that a careless rule would refuse."""
    x = b["x"] + p["shift"]
    h = _hidden(p, x)
    shift = sf.pmax(h.detach().amax(), "tp")
    ranks = sf.psum(torch.tensor(1.0), "tp")
    seen = sf.all_gather_invariant(p["up"].detach(), "tp", size=HIDDEN).mean()
    y = sf.psum(h @ p["down"].t(), "tp") * p["out"] / ranks + seen / (1 + shift**2)
    loss = ((y - b["y"]) ** 2).mean() + sf.psum(0 * p["up"].sum(), "tp") + 1e-3 * p["out"].square().sum()
    share = sf.pmean((h > 0).float().mean(), "tp")
    return loss, {"share": share, "n": 1.0, "size": sf.psum(h.square().sum(), "tp")}


@pytest.mark.nightly
def test_correct_losses_are_not_refused() -> None:
    for zero in STAGES[1:]:
        _lowered(_many_ways, zero, has_aux=True)


@pytest.mark.day("psum_of_the_batch")
@pytest.mark.parametrize(
    "loss",
    [pytest.param(x, marks=pytest.mark.nightly if i % 3 else ()) for i, x in enumerate(RIGHT)],
    ids=lambda f: f.__name__.strip("_"),
)
def test_casts_are_inserted_where_a_loss_lacks_them(loss: Callable[..., Any]) -> None:
    gm = _lowered(loss, STAGES[0]).gm
    into = {n.args[1] for n in gm.graph.nodes if n.target is torch.ops.shardfn.pvary.default}
    assert "tp" in into and ("dp" in into) == (loss is _psum_of_the_batch)


@pytest.mark.nightly
def test_a_psum_over_the_batch_that_counts_as_varying_is_right() -> None:
    def normalised(p: Any, b: Any) -> Tensor:  # a batch norm over all ranks
        mean = sf.pvary(sf.pmean(b["x"].mean(0) + p["shift"], "dp"), "dp")
        return ((b["x"] - mean) * p["out"]).square().mean()

    _lowered(normalised, STAGES[-1])


@pytest.mark.nightly
def test_types_go_through_a_step() -> None:
    gm = _lowered(_right, STAGES[0]).gm
    types = value_types(gm)
    inputs = {n.meta["leaf"]: types[n] for n in gm.graph.nodes if n.op == "placeholder"}
    assert inputs["params['up']"] == {"dp": "invariant", "tp": "varying"}
    assert inputs["batch['x']"] == {"dp": "varying", "tp": "invariant"}
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    told = dict(zip((path for path, _ in gm.meta["results"]), (types[n] for n in output.args[0]), strict=True))
    assert told["new metrics['loss']"] == told["new metrics['grad_norm']"] == {"dp": "invariant", "tp": "invariant"}


@pytest.mark.nightly
def test_pvary_is_an_op_of_its_own_that_makes_no_memory() -> None:
    gm = _lowered(_right, STAGES[0]).gm
    pvarys = [n for n in gm.graph.nodes if n.target is torch.ops.shardfn.pvary.default]
    assert [n.args[1] for n in pvarys] == ["tp", "tp"]  # the program's own, and the transpose of the psum
    assert all(storage_of(n.meta["val"]) == storage_of(n.args[0].meta["val"]) for n in pvarys)


# Random losses, right by construction, and with one collective too few, too many, or another in its stead.


class Sites:
    """The collectives of a program; one may be changed; along no axis they are the identity."""

    def __init__(self, axis: str | None, change: int | None = None) -> None:
        self.axis, self.change, self.count = axis, change, 0

    def _at(self, usual: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.count += 1
        return (other if self.count - 1 == self.change else usual)(x)

    def psum(self, x: Tensor) -> Tensor:
        once = functools.partial(sf.psum, axis=self.axis)
        return self._at(lambda x: self._at(once, lambda x: x, x), lambda x: once(once(x)), x)

    def pvary(self, x: Tensor) -> Tensor:
        once = functools.partial(sf.pvary, axis=self.axis)
        return self._at(lambda x: self._at(once, lambda x: x, x), lambda x: once(once(x)), x)

    def gather(self, x: Tensor, size: int) -> Tensor:
        return self._at(
            lambda x: sf.all_gather(x, self.axis, size=size),
            lambda x: sf.all_gather_invariant(x, self.axis, size=size),
            x,
        )

    def join(self, x: Tensor, size: int) -> Tensor:
        return self._at(
            lambda x: sf.all_gather_invariant(x, self.axis, size=size),
            lambda x: sf.all_gather(x, self.axis, size=size),
            x,
        )


def _dense(c: Sites, p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(c.pvary(x) @ p["up"].t() + p["bias"])
    return x + c.psum(h @ p["down"].t())


def _gained(c: Sites, p: Any, x: Tensor) -> Tensor:
    return torch.sin(x * p["gain"]) + x


def _varied_gain(c: Sites, p: Any, x: Tensor) -> Tensor:
    return x + c.psum((c.pvary(x * p["gain"]) @ p["up"].t()) ** 2 @ p["down"].t())


def _whole_weight(c: Sites, p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ c.join(p["up"], HIDDEN).t()).mean(1, keepdim=True)


def _rows(c: Sites, p: Any, x: Tensor) -> Tensor:
    own = torch.tanh(sf.collectives.take_own_block(x, c.axis) * c.pvary(p["gain"]))
    return x + c.join(own, ROWS)


def _rows_and_columns(c: Sites, p: Any, x: Tensor) -> Tensor:
    whole = c.gather(sf.collectives.take_own_block(x, c.axis), ROWS)
    part = torch.tanh(whole @ p["up"].t()) @ p["down"].t()
    return x + c.join(sf.psum_scatter(part, c.axis), ROWS)


def _shifted(c: Sites, p: Any, x: Tensor) -> Tensor:
    scores = c.pvary(x) @ p["up"].t()
    shift = sf.pmax(scores.detach().amax(1), c.axis)
    total = c.psum(torch.exp(scores - c.pvary(shift)[:, None]).sum(1))
    return x + (torch.log(total) + shift)[:, None] / 9


def _stopped(c: Sites, p: Any, x: Tensor) -> Tensor:
    w = sf.all_gather_invariant(p["up"].detach(), c.axis, size=HIDDEN)
    return x + 0.1 * torch.tanh(x @ w.t()).mean(1, keepdim=True) * p["gain"]


def _repeated(c: Sites, p: Any, x: Tensor) -> Tensor:
    return sf.remat(functools.partial(_dense, c))(p, x)


LAYERS = [_dense, _gained, _varied_gain, _whole_weight, _rows, _rows_and_columns, _shifted, _stopped, _repeated]
LEAVES = {"up": (HIDDEN, D), "down": (D, HIDDEN), "bias": (HIDDEN,), "gain": (D,)}
CUTS = {"up": sf.P("tp"), "down": sf.P(None, "tp"), "bias": sf.P("tp"), "gain": sf.P()}


def _random_layers(seed: int) -> list[Any]:
    return random.Random(seed).choices(LAYERS, k=3)


def _random_loss(layers: list[Any], c: Sites, p: Any, b: Any) -> Tensor:
    c.count, x = 0, b["x"]
    for layer, leaves in zip(layers, p, strict=True):
        x = layer(c, leaves, x)
    return ((x - b["y"]) ** 2).mean()


def _equal(layers: list[Any], c: Sites, mesh: Any, params: Any, batch: Any, want: Any) -> bool:
    """Whether an eager step gives the result of one device, on all ranks."""
    loss = functools.partial(_random_loss, layers, c)
    step = sf.sharded_step(
        loss, optim.sgd(1.0), mesh=mesh, specs=[CUTS] * len(layers), batch=sf.P(), zero=sf.Zero(stage=0)
    )
    try:
        state, _ = step(step.init(params), batch)
    except (sf.RankError, AxisTypeError):  # their losses differ
        return False
    new = [x.full_tensor() for x in sf.core.tree_leaves(state.params)]
    same = all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(new, want, strict=True))
    with sf.collectives.bind_mesh(mesh):
        return not sf.pmax(torch.tensor(float(not same)), "tp")


def _refused(layers: list[Any], c: Sites, mesh: Any, params: Any, batch: Any) -> bool:
    loss = sf.jit(functools.partial(_random_loss, layers, c), backend="graph")
    step = sf.sharded_step(
        loss, optim.sgd(1.0), mesh=mesh, specs=[CUTS] * len(layers), batch=sf.P(), zero=sf.Zero(stage=0)
    )
    try:
        step.lower(params, batch)
    except AxisTypeError:
        return True
    return False


def _random_case(seed: int, mesh: Any, changes: int) -> tuple[int, int]:
    """How many of some changes to a random loss make it wrong, and how many are refused."""
    g, layers = torch.Generator().manual_seed(seed), _random_layers(seed)
    params = [{k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in LEAVES.items()} for _ in layers]
    batch = {k: torch.randn(ROWS, D, generator=g, dtype=torch.float64) for k in "xy"}
    leaves = [{k: x.clone().requires_grad_() for k, x in p.items()} for p in params]
    alone = Sites(None)
    flat = sf.core.tree_leaves(leaves)
    grads = torch.autograd.grad(_random_loss(layers, alone, leaves, batch), flat, materialize_grads=True)
    want = [x.detach() - g for x, g in zip(flat, grads, strict=True)]
    right = Sites("tp")
    assert _equal(layers, right, mesh, params, batch, want), (seed, layers)
    assert not _refused(layers, right, mesh, params, batch), (seed, layers)
    wrong = refused = 0
    for change in random.Random(seed).sample(range(alone.count), k=min(changes, alone.count)):
        changed = Sites("tp", change)
        ok, no = (f(layers, changed, mesh, params, batch, *w) for f, w in ((_equal, (want,)), (_refused, ())))
        assert not (ok and no), (seed, change, [f.__name__ for f in layers])
        wrong, refused = wrong + (not ok), refused + no
    return wrong, refused


@distributed(world=2, timeout=400)
def _random_cases(seeds: list[int], changes: int) -> tuple[int, int]:
    mesh = sf.make_mesh({"tp": 2}, device="cpu")
    rows = [_random_case(seed, mesh, changes) for seed in seeds]
    return sum(wrong for wrong, _ in rows), sum(refused for _, refused in rows)


@pytest.mark.nightly
def test_random_losses_are_refused_only_where_they_are_wrong() -> None:
    _random_cases([0], 1)


@pytest.mark.nightly
def test_many_random_losses_are_refused_only_where_they_are_wrong() -> None:
    (wrong, refused), *_ = _random_cases(list(range(1, 13)), 3)
    assert 0 < refused <= wrong
