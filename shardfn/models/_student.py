"""Students of a deep model: the same model without some of its layers, with the teacher's weights.

L layers with experts, E experts.
"""

import dataclasses
from collections.abc import Sequence

import torch

from shardfn.core import raise_all

from ._gpt_config import Config
from ._gpt_leaves import Params, stack_blocks, unstack_blocks


def student(
    config: Config, params: Params, *, keep: Sequence[int] | None = None, every: int = 8
) -> tuple[Config, Params]:
    """Returns a model of some layers of a model, and the weights of these layers: a student that begins as its teacher.

    With `distill.staged_step` it learns from the whole model: a Mixture-of-Students, if the model has experts.

    Args:
        config: the teacher.
        params: parameters of the teacher, as from `gpt.init`.
        keep: numbers of the layers that the student has, in order. None: all but each `every`-th.
        every: distance of the layers that are left out, such as 8 for 21 layers of 24.

    Returns:
        The student's config and parameters. Leaves are the teacher's own, which `step.init` copies. Layers of a student
        that have experts at other distances are in `Experts(layers=)`, and lie unstacked.

    Raises:
        ValueError: no layers, unknown or repeated layers, or another order than the teacher's. Or all are kept, or a
            number of layers that does not fit.

    Example:
        >>> from shardfn.core import key
        >>> from shardfn.models import gpt, moe
        >>> teacher = moe.gpt_moe(vocab_size=64, num_layers=8, d_model=32, num_heads=4)
        >>> config, params = student(teacher, gpt.init(teacher, key(0)))
        >>> config.num_layers, config.expert_layers, len(params["blocks"])
        (7, [1, 3, 5], 7)

    References:
        Rajbhandari et al., DeepSpeed-MoE, 2022, https://arxiv.org/abs/2201.05596, section 4.2
    """
    if keep is None:
        keep = [i for i in range(config.num_layers) if (i + 1) % every] if every > 0 else []
    _check_kept(config, keep, every)
    layers = unstack_blocks(config, params)["blocks"]
    made = _make_config(config, keep)
    out = {**params, "blocks": [layers[i] for i in keep]}
    return made, stack_blocks(made, out, torch.stack) if made.stacked else out


def _make_config(config: Config, keep: Sequence[int]) -> Config:
    if config.experts is None:
        return dataclasses.replace(config, num_layers=len(keep))
    at = {layer: i for i, layer in enumerate(config.expert_layers)}
    kept = [i for i in keep if i in at]
    layers = tuple(i for i, layer in enumerate(keep) if layer in at)
    if not layers:
        return dataclasses.replace(config, num_layers=len(keep), experts=None)
    num = config.experts.num
    num = num if isinstance(num, int) else tuple(num[at[i]] for i in kept)
    experts = dataclasses.replace(config.experts, num=num, layers=None)
    alike = layers == tuple(i for i in range(len(keep)) if experts.in_layer(i))
    if config.experts.layers is None and alike and len(keep) % config.layers_a_block == 0:
        return dataclasses.replace(config, num_layers=len(keep), experts=experts)
    named = dataclasses.replace(experts, layers=layers, every=1, first=0)
    return dataclasses.replace(config, num_layers=len(keep), experts=named, stacked=False)


def _check_kept(config: Config, keep: Sequence[int], every: int) -> None:
    num, problems = config.num_layers, []
    if every < 2:
        problems.append(f"every must be 2 or more, got {every}. For example 8 leaves out each 8th layer")
    elif not keep:
        problems.append(f"a student must have layers, got {keep} of {num}")
    if unknown := [i for i in keep if not 0 <= i < num]:
        problems.append(f"layers {unknown} must be from 0 to {num - 1}, got {list(keep)}")
    elif list(keep) != sorted(set(keep)):
        problems.append(f"keep must be ascending, as the teacher has its layers, got {list(keep)}")
    elif len(keep) == num:
        problems.append(f"all {num} layers are kept. Pass keep=, or a smaller every={every}")
    raise_all(ValueError, "moe.student:", problems)
