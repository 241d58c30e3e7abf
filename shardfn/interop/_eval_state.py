"""`eval_state`: the state with the parameters that an averaging optimizer evaluates."""

from typing import Any

import torch

from shardfn import core
from shardfn.collectives import GlobalTensor
from shardfn.memory import DiskTensor
from shardfn.optim import AverageParamsState, LookaheadState, MasterState, ScheduleFreeState, schedule_free_eval_params
from shardfn.state import TrainState, check_alive, check_passed
from shardfn.transforms import reshard

from ._trained import master_params

_KINDS = (AverageParamsState, LookaheadState, ScheduleFreeState)


@torch.no_grad()
def eval_state(state: TrainState) -> TrainState:
    """Returns the state to evaluate, export or save, with the parameters averaged by the optimizer.

    For example the average of `optim.average_params`, the slow parameters of `optim.lookahead`, or the average x of
    `optim.schedule_free`. Leaves without an average are the state's. Parameters have the layout, memory and dtype of
    the state's parameters. With master copies, `export` and `to_module` write the averages unrounded. The result has no
    other optimizer state, and cannot be trained. Collective.

    Args:
        state: state that a step returned.

    Returns:
        A state for `step.evaluate`, `step.apply`, `export`, `to_module` and `checkpoint.save`. The result may share
        leaves with `state`: use the result before the next step consumes `state`.

    Raises:
        ValueError: the optimizer averages no parameters.
        DonatedError: the state was consumed by a step.

    Example:
        >>> import torch
        >>> import shardfn as sf
        >>> optimizer = sf.optim.average_params(sf.optim.sgd(1.0), decay=0.5)
        >>> step = sf.sharded_step(lambda w, x: (w * x).sum(), optimizer)
        >>> state, _ = step(step.init(torch.zeros(1)), torch.ones(1))
        >>> state.params.full_tensor(), step.evaluate(eval_state(state), [torch.ones(1)])
        (tensor([-1.]), {'loss': -0.5})
    """
    check_passed(state, call="sf.eval_state(state)")
    check_alive(state)
    nodes = core.tree_leaves(state.opt_state, is_leaf=lambda x: isinstance(x, _KINDS))
    trained = _leaves_by_path(master_params(state))
    found: dict[Any, GlobalTensor] = {}
    for node in nodes:
        if isinstance(node, _KINDS):
            found |= _evaluated_params(node, trained)
    if not found:
        raise ValueError(
            "eval_state needs an optimizer that averages parameters, such as optim.average_params(optim.adamw(1e-3))."
            " Without averages, evaluate the state itself."
        )
    leaves, treedef = core.tree_flatten(state.params)
    own = [found.get(path) for path in core.tree_entries(state.params)]
    to = [x.placement for x in leaves]
    pool = next((x.held.pool for x in leaves if isinstance(x.held, DiskTensor)), None)
    params = reshard([p if x is None else x for p, x in zip(leaves, own, strict=True)], to, pool=pool)
    wide = [x if x is not None and x.dtype != p.dtype else None for p, x in zip(leaves, own, strict=True)]
    masters = MasterState(core.tree_unflatten(treedef, wide), ()) if any(x is not None for x in wide) else ()
    return state._replace(params=core.tree_unflatten(treedef, params), opt_state=masters)


def _leaves_by_path(tree: core.PyTree) -> dict[Any, Any]:
    return dict(zip(core.tree_entries(tree), core.tree_leaves(tree), strict=True))


def _evaluated_params(node: Any, trained: dict[Any, GlobalTensor]) -> dict[Any, GlobalTensor]:
    """Returns the parameters to evaluate by path, from the state of an averaging rule."""
    if isinstance(node, AverageParamsState):
        return _leaves_by_path(node.average)
    if isinstance(node, LookaheadState):
        return _leaves_by_path(node.slow)
    out = {}
    for path, z in _leaves_by_path(node.z).items():
        here, there = (reshard(x, z.spec) for x in (trained[path], z))
        own = node._replace(b1=node.b1.local, z=there.local)
        out[path] = GlobalTensor(schedule_free_eval_params(own, here.local), here.shape, here.spec, here.mesh)
    return out
