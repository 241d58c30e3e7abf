"""Refuses or warns of plans with which a step would do something else than its caller means, at its first call.

trains nothing      no leaf is trained, or the batch has no rows or no values
sends nothing       an axis of the batch cuts a leaf in blocks, and the loss exchanges nothing along that axis, so that
each rank would apply its own block to its own rows alone: experts that no other rank reaches
narrow              an optimizer updates parameters of 16 bits without wider copies
"""

import warnings
from typing import Any

from torch import Tensor

from shardfn.core import PyTree, named_leaves, raise_all, tree_leaves, tree_paths
from shardfn.optim import MasterState

from ._plan import Plan

_SHOWN_LEAVES = 6


def check_trains(plan: Plan, trainable: PyTree) -> None:
    """Refuses parameters without a trained leaf, unless the caller passes `trainable=False`.

    Raises:
        ValueError: lists leaves, and the remedy.
    """
    if trainable is False or any(leaf.trainable for leaf in plan.leaves):
        return
    if not plan.leaves:
        raise ValueError(
            "the parameters have no leaves, so there is nothing to train. Pass the tree of tensors that the loss takes"
            " as its first argument. Of a module, params, apply = sf.from_module(module)."
        )
    whole = [leaf for leaf in plan.leaves if leaf.dtypes.param.is_floating_point]
    shown = ", ".join(leaf.path for leaf in (whole or plan.leaves)[:_SHOWN_LEAVES])
    if not whole:
        raise ValueError(
            f"no parameter is of floating point, so there is nothing to train: {shown} is"
            f" {plan.leaves[0].dtypes.param}. Pass weights as float tensors: x.float()."
        )
    if trainable is None:
        raise ValueError(
            "every parameter of floating point has requires_grad=False, so there is nothing to train. There are"
            f" {shown}. Unfreeze some before from_module, module.requires_grad_(True), or include them in"
            " sharded_step(trainable=), a tree of bools like params. A step that is to train none of them takes"
            " trainable=False."
        )
    raise ValueError(
        f"trainable is True of no parameter of floating point, so there is nothing to train. There are {shown}. Write"
        " True for those that are to be trained, as in trainable={name: 'lora' in name for name in params}. A step"
        " that is to train none of them takes trainable=False."
    )


def check_has_rows(batch: PyTree, *, even: bool) -> None:
    """Refuses a batch without rows on all ranks; called by all, after they have agreed on its shapes.

    A rank without rows beside others with some is allowed if the loss is a `WeightedMean`.

    Args:
        batch: this rank's rows.
        even: whether all ranks have batches of the same shapes.

    Raises:
        ValueError: lists the leaves.
    """
    leaves: list[Tensor] = tree_leaves(batch)
    if not even or any(x.numel() for x in leaves):
        return
    raise_all(
        ValueError,
        "the batch is empty on every rank, and the mean of no rows is not a number. Skip it, or end the epoch there; a"
        " loader's last batch may have fewer rows than ranks (drop_last=True). Its leaves are:",
        [f"{path} of shape {tuple(x.shape)}" for path, x in zip(tree_paths(batch, "batch"), leaves, strict=True)],
    )


def check_has_values(batch: PyTree, device: Any) -> None:
    """Refuses a batch of tensors without data, which can be lowered and not run.

    Args:
        batch: this rank's rows.
        device: where this rank computes.

    Raises:
        ValueError: lists the leaves.
    """
    raise_all(
        ValueError,
        "the batch is on the device 'meta', where tensors have no values; step.lower takes it, a step does not. Make it"
        f" on {device}, where this rank computes:",
        [f"{path} of shape {tuple(x.shape)}" for path, x in named_leaves(batch, "batch") if x.is_meta],
    )


_SHOWN_NARROW = 3


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
    shown = ", ".join(leaf.path for leaf in narrow[:_SHOWN_NARROW])
    more = f" and {len(narrow) - _SHOWN_NARROW} more" if len(narrow) > _SHOWN_NARROW else ""
    warnings.warn(
        f"{shown}{more}: trained in {narrow[0].dtypes.master} without a policy, so the optimizer's state has that dtype"
        " too, and small updates are rounded away. Use sf.mixed_precision(loss, sf.Policy.bf16()), which keeps float32"
        " master copies, or pass init wider weights: module.float() before from_module, module_from_hf(dtype="
        "torch.float32). Policy.bf16(master=None) trains in 16 bits without this warning.",
        UserWarning,
        stacklevel=5,
    )
