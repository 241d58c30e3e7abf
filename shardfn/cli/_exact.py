"""Exact figures of a plan: the step is captured for ranks that do not exist, and the graph gives memory and traffic."""

import dataclasses
import functools
from collections.abc import Mapping

import torch

from shardfn import core, optim
from shardfn.models import gpt
from shardfn.transforms import accumulate, mixed_precision, remat, sharded_step

from ._states import Setup

# The graph's kinds, in the words of a plan. Other kinds keep their names.
_KINDS = {"gathered": "gathered window"}


@dataclasses.dataclass(frozen=True)
class Exact:
    """Figures of a single rank from the captured step.

    Attributes:
        memory: bytes alive at the peak, by kind.
        peak: sum of `memory`.
        traffic: tuples (axes, collective, bytes sent per step).
        flops: number of floating-point operations of the rank.
        seconds: time of the step on the cluster, summed over ops at the device's full rates.
        mfu: operations / seconds / the device's rate.
        notes: assumptions that the reader must know.
    """

    memory: Mapping[str, int]
    peak: int
    traffic: tuple[tuple[str, str, int], ...]
    flops: int
    seconds: float
    mfu: float
    notes: tuple[str, ...]


def exact(setup: Setup) -> Exact:
    """Captures the step of a run and analyses the graph, in seconds, or a minute for the largest model.

    Raises:
        ValueError: the mesh has an axis "tp" or "pp", or experts lie on ranks, which the capture here does not support.

    Example:
        >>> from shardfn.cli import parse_model
        >>> from shardfn.core import Zero
        >>> from shardfn.graph import cluster
        >>> tiny = parse_model("gpt:num_layers=1,d_model=16,num_heads=2,vocab_size=32,max_len=8")
        >>> run = Setup("tiny", tiny, {"dp": 4}, cluster("cpu"), Zero(3, persist_elements=0), "fp32-adam", seq=8)
        >>> exact(run).memory["params"] < 4 * gpt.num_params(tiny)
        True
    """
    for axis in ("tp", "pp"):
        if setup.axis(axis) > 1:
            raise ValueError(
                f"--exact needs {axis}=1, as it captures the step only along dp, got {setup.axis(axis)}. Without"
                f" --exact, formulas include {axis}."
            )
    if setup.lora:
        raise ValueError(
            f"--exact captures the training of all weights, got --lora {setup.lora}. Leave one of them out."
        )
    if setup.ep > 1:
        raise ValueError(
            f"--exact needs --ep 1, as it captures the step with all experts on every rank, got --ep {setup.ep}."
        )
    lowered = _make_step(setup).lower(*_make_inputs(setup))
    memory, cost, time = lowered.memory_analysis(), lowered.cost_analysis(), lowered.estimate(setup.cluster)
    kinds = {_KINDS.get(kind, kind): nbytes for kind, nbytes in memory.by_kind.items() if nbytes}
    traffic = tuple((axes, op, sent) for (op, axes), (_, sent) in cost.transfers.items())
    return Exact(kinds, memory.peak, traffic, cost.flops, time.seconds, time.mfu, _list_notes(setup))


def _make_step(setup: Setup):
    loss = functools.partial(gpt.loss, _remove_biases(setup.config), **({"wrap": remat} if setup.remat else {}))
    if setup.accumulate > 1:
        loss = accumulate(loss, setup.accumulate)
    if _is_narrow(setup):
        dtype = getattr(torch, setup.bytes_of.dtype)
        # Gradients are divided by a loss scale in the dtype in which they are added up, which is then float32.
        scale, accum = (optim.dynamic_loss_scale(), torch.float32) if dtype == torch.float16 else (None, dtype)
        loss = mixed_precision(loss, core.Policy(dtype, dtype, reduce=dtype, accum=accum), scale)
    mesh = core.make_mesh(setup.mesh, device="cpu", abstract=True)
    return sharded_step(loss, optim.adamw(1e-4), mesh=mesh, batch=core.P("dp"), zero=setup.zero)


def _remove_biases(config: gpt.Config) -> gpt.Config:
    """Returns the config without biases of the routers, which lie in no parameter."""
    if config.experts is None:
        return config
    return dataclasses.replace(config, experts=dataclasses.replace(config.experts, bias_rate=0.0))


def _make_inputs(setup: Setup) -> tuple[object, dict[str, torch.Tensor]]:
    """Returns the parameters and the batch, as tensors without data."""
    with core.deferred():
        draws = gpt.init(setup.config, core.key(0))
    params = core.tree_map(lambda draw: torch.empty(draw.shape, dtype=torch.float32, device="meta"), draws)
    tokens = torch.empty((setup.batch, setup.seq + 1), dtype=torch.int64, device="meta")
    return params, {"tokens": tokens}


def _list_notes(setup: Setup) -> tuple[str, ...]:
    notes = ["Captured: dropout is off, and times are at the device's full rates, without --efficiency."]
    if setup.config.experts is not None and setup.config.experts.bias_rate > 0:
        notes.append("Captured: experts are chosen without biases, which are a number for each expert of a layer.")
    if _is_narrow(setup):
        notes.append(
            f"Captured: `optim.adamw` under a policy that keeps parameters in {setup.bytes_of.dtype}, and"
            " float32 master copies, mu and nu in the optimizer's state."
        )
    return tuple(notes)


def _is_narrow(setup: Setup) -> bool:
    """Returns whether parameters are narrower than the optimizer's copies."""
    return setup.bytes_of.dtype != "float32"
