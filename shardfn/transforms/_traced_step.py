"""The complete training step as a function of flat tensors, and its capture.

What is captured is the engine itself, run on tensors without data and on communicators that write transfers down.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardfn.collectives import TracedChannels, TracedControl, bind_mesh
from shardfn.core import Mesh, PyTree, tree_flatten, tree_leaves, tree_paths, tree_unflatten
from shardfn.nn import looping
from shardfn.optim import GradientTransformation

from ._backward import run_backward
from ._capture import Recorder, capture
from ._comms import Comms
from ._loss import Loss
from ._metrics import measure
from ._plan import Plan
from ._splice import copied_loop
from ._update import update_blocks


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A captured step.

    Its graph takes this rank's blocks of params and optimizer state (donated), a key if the loss takes one, and this
    rank's rows; it returns the new blocks, the new optimizer state and the metrics.

    Attributes:
        gm: the graph.
        plan: the layout.
        opt_treedef: structure of the optimizer state.
        metrics: their names, in order.
        outcome: what the loss returns; the same on all ranks.
    """

    gm: GraphModule
    plan: Plan
    opt_treedef: Any
    metrics: tuple[str, ...]
    outcome: str


@dataclasses.dataclass(frozen=True)
class StepParts:
    """What a step is made of besides state and batch."""

    loss: Loss
    optimizer: GradientTransformation
    has_aux: bool
    skip_nonfinite: bool


def capture_step(
    parts: StepParts,
    plan: Plan,
    blocks: Sequence[Any],
    opt_state: PyTree,
    args: tuple[Any, ...],
    scale: Any = None,
    *,
    even: bool,
) -> StepProgram:
    """Captures one step; nothing is computed and nothing sent.

    Args:
        parts: loss and optimizer.
        plan: the layout.
        blocks: this rank's block of each parameter; of all tensors here only shape, strides, dtype and device count.
        opt_state: tree of this rank's blocks of the optimizer state.
        args: this rank's batch, and a key if the loss takes one.
        scale: what the loss is multiplied by, the last input of the graph; None = nothing, and no input.
        even: whether all ranks hold batches of the same shapes.
    """
    plan, recorder = plan.for_capture(), Recorder()
    comms = Comms(plan.mesh, TracedChannels(plan.mesh), TracedControl(plan.mesh), recorder.mark)
    opt_leaves, opt_treedef = tree_flatten(opt_state)
    arg_leaves, arg_treedef = tree_flatten((args, () if scale is None else scale))
    names: list[str] = []

    def program(*flat: Tensor) -> list[Any]:
        mine, rest = list(flat[: len(blocks)]), flat[len(blocks) :]
        opt = tree_unflatten(opt_treedef, rest[: len(opt_leaves)])
        given, scaled = tree_unflatten(arg_treedef, rest[len(opt_leaves) :])
        by = None if scale is None else scaled
        with bind_mesh(plan.mesh), looping(copied_loop):
            out = run_backward(plan, comms, mine, parts.loss, given, has_aux=parts.has_aux, even=even, loss_scale=by)
            metrics, unscale = measure(plan, out, by)
            names[:] = metrics
            if parts.skip_nonfinite:
                torch.ops.shardfn.stop_unless(metrics["finite"], list(metrics.values()))
            with torch.no_grad():
                grads = out.gradients()
                mine, opt = update_blocks(plan, comms.channels, parts.optimizer, mine, opt, grads, unscale)
        return [*mine, *tree_leaves(opt), *metrics.values()]

    gm = capture(program, [*blocks, *opt_leaves, *arg_leaves], recorder)
    paths = [(leaf.path, "params") for leaf in plan.leaves]
    paths += [(p, "optimizer") for p in tree_paths(opt_state, "opt_state")]
    paths += [(p, "batch") for p in tree_paths(args[0], "batch")] + [("key", "other")] * (len(args) - 1)
    paths += [] if scale is None else [("loss_scale", "other")]
    _annotate(gm, plan.mesh, paths)
    return StepProgram(gm, plan, opt_treedef, tuple(names), plan.outcome or "")


def _annotate(gm: GraphModule, mesh: Mesh, paths: Sequence[tuple[str, str]]) -> None:
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, (leaf, kind) in zip(inputs, paths, strict=True):
        node.meta["leaf"], node.meta["kind"] = leaf, kind
    gm.meta["mesh_shape"] = dict(mesh.shape)
    gm.meta["coords"] = dict(mesh.coords)
    gm.meta["groups"] = mesh.group_names()
    gm.meta["donated"] = {n.name for n in inputs if n.meta["kind"] in ("params", "optimizer")}
