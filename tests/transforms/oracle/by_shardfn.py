"""Programs under `shardfn.shard_map`, on real ranks, in float64; and how their results compare with JAX's."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.testing import distributed

from .named import named
from .programs import Program, Results

TOLERANCE = 1e-10


def _sum(a: Tensor, dim: int | None = None) -> Tensor:
    return a.sum() if dim is None else a.sum(dim)


# The library of a body.
LIBRARY = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("tanh", "atan", "sqrt", "exp", "mean", "where")},
    **{name: getattr(sf, name) for name in ("psum", "pmean", "pmax", "ppermute", "pvary", "remat")},
    sum=_sum,
    concat=torch.cat,
    literal=lambda a: torch.tensor(a, dtype=torch.float64),
    transpose=lambda a: a.permute(tuple(reversed(range(a.ndim)))),
    softmax=lambda a: a.softmax(-1),
    detach=lambda a: a.detach(),
    axis_index=lambda axis: torch.tensor(sf.axis_index(axis), dtype=torch.float64),
    number=sf.axis_index,
    literal_number=torch.tensor,
    all_gather=lambda a, axis, dim: sf.all_gather(a, axis, dim=dim),
    all_gather_invariant=lambda a, axis, dim: sf.all_gather_invariant(a, axis, dim=dim),
    psum_scatter=lambda a, axis, dim: sf.psum_scatter(a, axis, dim=dim),
    all_to_all=lambda a, axis, dim, to: sf.all_to_all(a, axis, split_dim=dim, concat_dim=to),
    size=sf.axis_size,
)


def function(program: Program, mesh: sf.Mesh) -> Callable[..., tuple[Tensor, ...]]:
    """The program as a function of whole tensors."""

    def whole(*args: Tensor) -> tuple[Tensor, ...]:
        given, closed = args[: len(program.shapes)], args[len(program.shapes) :]
        mapped = sf.shard_map(
            lambda *blocks: program.body(LIBRARY, *blocks, *closed),
            mesh=mesh,
            in_specs=tuple(P(*spec) for spec in program.in_specs),
            out_specs=tuple(P(*spec) for spec in program.out_specs),
        )
        return mapped(*given)

    return whole


def quantities(program: Program, mesh: sf.Mesh) -> dict[str, Callable[..., Any]]:
    """The compared quantities, each as a function of the arguments; "func grad" is the gradient by `torch.func`."""
    f = function(program, mesh)

    def weighted(*args: Tensor) -> Tensor:
        out = f(*args)
        weights = map(torch.from_numpy, program.draw("weights", [tuple(y.shape) for y in out]))
        return sum((y * w).sum() for y, w in zip(out, weights, strict=True))  # type: ignore[return-value]

    def grad(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.clone().requires_grad_() for a in args]
        total = weighted(*leaves)
        if not total.requires_grad:
            return tuple(torch.zeros_like(a) for a in args)
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    def rows(*args: Tensor) -> tuple[Tensor, ...]:
        others = map(torch.from_numpy, program.draw("other arguments"))
        return torch.func.vmap(f)(*(torch.stack([a, b]) for a, b in zip(args, others, strict=True)))

    training = (
        {} if program.parameters() is None else {"step": step(program, mesh), "jit step": step(program, mesh, True)}
    )
    tangents = tuple(map(torch.from_numpy, program.draw("tangents")))
    return {
        "value": f,
        "grad": grad,
        "func grad": torch.func.grad(weighted, argnums=tuple(range(len(program.draw("arguments"))))),
        "jvp": lambda *args: torch.func.jvp(f, args, tangents)[1],
        "vmap": rows,
        **training,
    }


def step(program: Program, mesh: sf.Mesh, jit: bool = False) -> Callable[..., Any]:
    """The loss and its gradients as a training step of the program finds them."""
    parameters = program.parameters() or []

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        values = params | batch
        return program.loss(LIBRARY, *(values[str(i)] for i in range(len(values))))

    def take(*args: Tensor) -> tuple[Tensor, ...]:
        params = {str(i): args[i] for i in parameters}
        n, index = mesh.axis_size("x"), mesh.axis_index("x")
        batch = {str(i): a.chunk(n)[index] for i, a in enumerate(args) if i not in parameters}
        specs = {str(i): P(*(program.in_specs[i] if i < len(program.in_specs) else ())) for i in parameters}
        made = sf.jit(loss, backend="graph") if jit else loss
        training = sf.sharded_step(made, sf.optim.sgd(1.0), mesh=mesh, specs=specs, batch=P("x"))
        before = [x.clone() for x in params.values()]
        state, metrics = training(training.init(params), batch)
        after = sf.unshard(state.params).values()
        return metrics["loss"][None], *(a - b for a, b in zip(before, after, strict=True))

    return take


def results(program: Program, mesh: sf.Mesh, jit: bool) -> dict[str, "np.ndarray | str"]:
    """The numbers of each quantity; or the error, in words."""
    args, found = tuple(map(torch.from_numpy, program.draw("arguments"))), dict[str, np.ndarray | str]()
    for name, quantity in quantities(program, mesh).items():
        if name.startswith("jit") and not jit:
            continue
        try:
            found[name] = np.concatenate([y.detach().numpy().ravel() for y in quantity(*args)])
        except Exception as error:
            kind = "refused" if isinstance(error, ValueError | TypeError | NotImplementedError) else "FAILED"
            found[name] = f"{kind}: {type(error).__name__}: {error}"
    return found


@distributed(world=[1, 2, 3, 4], timeout=300)
def on_ranks(names: list[str], jit: bool) -> Results:
    """This rank's results of programs over one mesh."""
    programs = [named(name) for name in names]
    mesh = sf.make_mesh(programs[0].mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch.jit", DeprecationWarning)  # torch's own, of some jvps
        return {program.name: results(program, mesh, jit) for program in programs}


def verdicts(names: list[str], jax: Results, world: int, jit: bool = True) -> dict[str, dict[str, str]]:
    """For each program and quantity: "equal", "refused by both", or the difference, in words.

    Without `jit` no step is captured, which takes long.
    """
    ranks = on_ranks(names, jit, world=world)
    return {
        name: {q: _verdict(jax[name][q.split()[-1]], [rank[name][q] for rank in ranks]) for q in ranks[0][name]}
        for name in names
    }


def good(verdict: str) -> bool:
    """Whether a verdict is one of agreement."""
    return verdict in ("equal", "refused by both")


def _verdict(want: "np.ndarray | str", ranks: "list[np.ndarray | str]") -> str:
    refused = [r for r in ranks if isinstance(r, str)]
    if refused and isinstance(want, str):
        return "refused by both" if all(r.startswith("refused") for r in ranks if isinstance(r, str)) else refused[0]
    if refused:
        return f"only shardfn, on {len(refused)} of {len(ranks)} ranks: {refused[0]}"
    if isinstance(want, str):
        return f"only JAX refused: {want}"
    numbers = [r for r in ranks if not isinstance(r, str)]
    if any(r.shape != want.shape for r in numbers):
        return f"WRONG: {len(numbers[0])} numbers for {len(want)}"
    size = max(1.0, float(np.abs(want).max(initial=0)))
    worst = [float(np.abs(r - want).max(initial=0)) / size for r in numbers]
    if max(worst) <= TOLERANCE:
        return "equal"
    rank = int(np.argmax(worst))
    got, worst_at = numbers[rank], np.argmax(np.abs(numbers[rank] - want))
    return f"WRONG by {worst[rank]:.1e} (rank {rank}): {got[worst_at]:.6g} for {want[worst_at]:.6g} at {worst_at}"
