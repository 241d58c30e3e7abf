# pyright: reportMissingImports=false
"""Programs under `jax.shard_map`, in float64: values, gradients, jvps and vmaps, or why JAX refuses them.

JAX_PYTHON -m tests.transforms.oracle.by_jax OUT.npz 2:psum_psum 2:17 3:17
"""

import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax.parallel import all_gather_invariant

from .named import named
from .programs import Program, Results, save

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_traceback_filtering", "off")
REFUSALS = (
    r"replication which can't be statically inferred|Unsupported pcast|Differentiation rule for 'pmax'"
    r"|can only accept axis_name which corresponds to one of varying"
)


# The library of a body.
LIBRARY = SimpleNamespace(
    **{name: getattr(jnp, name) for name in ("tanh", "sqrt", "exp", "sum", "mean", "transpose", "where")},
    **{name: getattr(lax, name) for name in ("psum", "pmean", "pmax", "ppermute")},
    atan=jnp.arctan,
    concat=jnp.concatenate,
    literal=jnp.array,
    softmax=jax.nn.softmax,
    detach=lax.stop_gradient,
    remat=jax.checkpoint,
    axis_index=lambda axis: lax.axis_index(axis).astype(float),
    number=lambda axis: lax.axis_index(axis).astype(int),
    literal_number=jnp.array,
    pvary=lambda a, axis: lax.pcast(a, axis, to="varying"),
    all_gather=lambda a, axis, dim: lax.all_gather(a, axis, axis=dim, tiled=True),
    all_gather_invariant=lambda a, axis, dim: all_gather_invariant(a, axis, axis=dim, tiled=True),
    psum_scatter=lambda a, axis, dim: lax.psum_scatter(a, axis, scatter_dimension=dim, tiled=True),
    all_to_all=lambda a, axis, dim, to: lax.all_to_all(a, axis, dim, to, tiled=True),
    size=lax.axis_size,
)


def function(program: Program) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of whole arrays."""
    return mapped(program, lambda *values: program.body(LIBRARY, *values), program.out_specs)


def mapped(program: Program, body: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """A body under `shard_map`, as a function of whole arrays."""
    shape, names = tuple(program.mesh.values()), tuple(program.mesh)
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names), devices=_devices(shape))

    def specs(of: Any) -> Any:
        return tuple(jax.P(*spec) for spec in of)

    def whole(*args: Any) -> Any:
        given, closed = args[: len(program.shapes)], args[len(program.shapes) :]
        return jax.shard_map(
            lambda *blocks: body(*blocks, *closed),
            mesh=mesh,
            in_specs=specs(program.in_specs),
            out_specs=specs(out_specs),
        )(*given)

    return whole


def _devices(shape: tuple[int, ...]) -> Any:
    return jax.devices()[: int(np.prod(shape))]


def quantities(program: Program) -> dict[str, Callable[..., Any]]:
    """The compared quantities, each as a function of the arguments."""
    f = function(program)

    def weighted(*args: Any) -> Any:
        out = f(*args)
        weights = program.draw("weights", [y.shape for y in out])
        return sum(jnp.sum(y * w) for y, w in zip(out, weights, strict=True))

    def rows(*args: Any) -> Any:
        return jax.vmap(f)(*(jnp.stack([a, b]) for a, b in zip(args, program.draw("other arguments"), strict=True)))

    def mean_loss(*args: Any) -> Any:
        return mapped(program, lambda *values: (lax.pmean(program.loss(LIBRARY, *values), "x"),), ((),))(*args)[0]

    parameters = program.parameters()
    step = {} if parameters is None else {"step": jax.value_and_grad(mean_loss, argnums=tuple(parameters))}
    return {
        "value": f,
        "grad": jax.grad(weighted, argnums=tuple(range(len(program.draw("arguments"))))),
        "jvp": lambda *args: jax.jvp(f, args, tuple(map(jnp.asarray, program.draw("tangents"))))[1],
        "vmap": rows,
        **step,
    }


def results(program: Program) -> dict[str, "np.ndarray | str"]:
    """The numbers of each quantity, or why it is refused."""
    args, found = [jnp.asarray(a) for a in program.draw("arguments")], dict[str, np.ndarray | str]()
    for name, quantity in quantities(program).items():
        try:
            found[name] = np.concatenate([np.ravel(y) for y in jax.tree.leaves(jax.jit(quantity)(*args))])
        except (ValueError, NotImplementedError) as error:
            found[name] = _refusal(error)
            if not found[name]:
                error.add_note(f"{program.name}\n    {program.text}")
                raise
    return found


def _refusal(error: Exception) -> str:
    """Why JAX refuses a program; nothing where the program itself is broken."""
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if "_inout_vma_error" in frames:  # the message of a result that varies; to make it may fail under a transform
        return "a result varies along an axis that its spec leaves out"
    found = re.search(REFUSALS, str(error))
    return found[0] if found else ""


if __name__ == "__main__":
    everything: Results = {program.name: results(program) for program in map(named, sys.argv[2:])}
    save(everything, pathlib.Path(sys.argv[1]))
