"""Warns of parameters of 16 bits that an optimizer updates without wider copies."""

import warnings

from shardfn.core import PyTree, tree_leaves
from shardfn.optim import MasterState

from ._plan import Plan

_SHOWN = 3


def warn_of_narrow_updates(plan: Plan, opt_state: PyTree, *, has_policy: bool) -> None:
    """Warns where trained leaves have 16 bits, no policy decides their precision and the optimizer keeps no copies.

    Args:
        plan: plan of the parameters.
        opt_state: the first state of the optimizer.
        has_policy: whether the loss is one of `mixed_precision`.
    """
    narrow = [leaf for leaf in plan.leaves if leaf.trainable and leaf.dtypes.master.itemsize < 4]
    copies = tree_leaves(opt_state, is_leaf=lambda x: isinstance(x, MasterState))
    if has_policy or not narrow or any(isinstance(x, MasterState) for x in copies):
        return
    shown = ", ".join(leaf.path for leaf in narrow[:_SHOWN])
    more = f" and {len(narrow) - _SHOWN} more" if len(narrow) > _SHOWN else ""
    warnings.warn(
        f"{shown}{more}: trained in {narrow[0].dtypes.master} without a policy, so the optimizer's state has that dtype"
        " too, and small updates are rounded away. Use sf.mixed_precision(loss, sf.Policy.bf16()), which keeps float32"
        " master copies, or pass init wider weights: module.float() before from_module, module_from_hf(dtype="
        "torch.float32). Policy.bf16(master=None) trains in 16 bits without this warning.",
        UserWarning,
        stacklevel=5,
    )
