"""Checks of the arguments of losses: shapes, and keywords of other libraries.

Checks of the tensors of a loss: broadcasting would take other shapes, too, and give another number.

Keywords of TRL, verl and DeepSpeed-Chat for losses and advantages, and their counterparts here.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from shardfn._torch import FakeTensor, check_tensor_all, is_batched
from shardfn.core import raise_all


def check_shapes(who: str, **named: Tensor | None) -> None:
    """Refuses tensors whose shapes do not fit their names: `x_BT` is [B, T], of the same B and T everywhere.

    Raises:
        ValueError: lists each such tensor with its shape and the shape of its name.

    Example:
        >>> check_shapes("dpo", chosen_B=torch.ones(2), rejected_B=torch.ones(2))
    """
    sizes, wrong = dict[str, int](), list[str]()
    for name, x in named.items():
        if x is None:
            continue
        dims = name.rpartition("_")[2]
        wanted = tuple(sizes.get(dim, size) for dim, size in zip(dims, x.shape, strict=False))
        if x.ndim != len(dims) or tuple(x.shape) != wanted:
            needs = ", ".join(f"{dim} = {sizes[dim]}" if dim in sizes else dim for dim in dims)
            wrong.append(f"{name} has shape {tuple(x.shape)}; it must be [{needs}]")
        else:
            sizes |= zip(dims, x.shape, strict=True)
    raise_all(ValueError, f"{who}: shapes do not fit:", wrong)


def check_lengths(who: str, width: int, **named: Tensor) -> None:
    """Refuses lengths that are not from 0 to T. Tokens beyond would be left out of sums, but not of their means.

    Args:
        who: function, for the error.
        width: T of the function's tensors.
        **named: lengths by the names of the arguments.

    Raises:
        ValueError: names the argument, the first such length and T. In a captured step, where a message is a constant,
            the argument and T.

    Example:
        >>> check_lengths("grpo", 4, lengths_B=torch.tensor([4, 0]))
    """
    for name, lengths_B in named.items():
        outside_B = (lengths_B < 0) | (lengths_B > width)
        remedy = f"lengths are from 0 to T: pass tensors of more tokens, or cut the answers to {width}."
        if isinstance(outside_B, FakeTensor):
            text = f"{who}: a length in {name} is not from 0 to T = {width} of the other tensors; {remedy}"
            check_tensor_all(~outside_B, lambda text=text: text)
        elif not is_batched(outside_B) and outside_B.any():  # vmap has no branch on a value
            row = int(outside_B.nonzero()[0])
            raise ValueError(
                f"{who}: {name}[{row}] is {int(lengths_B[row])}, and the other tensors have T = {width} tokens;"
                f" {remedy}"
            )


def check_numbers(
    who: str, wanted: Literal["above 0", "0 or more", "from 0 to 1"] = "above 0", /, **named: float
) -> None:
    """Refuses numbers that are not finite, or out of range.

    Args:
        who: function, for the error.
        wanted: range.
        **named: numbers by the names of the arguments.

    Raises:
        ValueError: names the argument, its value and the range.

    Example:
        >>> check_numbers("dpo", beta=0.1)
    """
    for name, value in named.items():
        inside = {"above 0": 0 < value, "0 or more": 0 <= value, "from 0 to 1": 0 <= value <= 1}[wanted]
        if not (inside and value < math.inf):
            finite = "" if wanted == "from 0 to 1" else " and finite"
            raise ValueError(f"{who}: {name} must be {wanted}{finite}, got {value}.")


def check_negative(who: str, **named: Tensor) -> None:
    """Refuses mean log probabilities that are not below 0, such as the mean of an answer without tokens.

    Args:
        who: function, for the error.
        **named: means by the names of the arguments.

    Raises:
        ValueError: names the argument, and the first row with its value. In a captured step, where a message is a
            constant, the argument.
    """
    for name, x_B in named.items():
        wrong_B = ~(x_B < 0) & ~x_B.isnan()
        remedy = "odds need mean log probabilities below 0; leave out pairs in which an answer is empty."
        if isinstance(wrong_B, FakeTensor):
            text = f"{who}: a number in {name} is not below 0; {remedy}"
            check_tensor_all(~wrong_B, lambda text=text: text)
        elif not is_batched(wrong_B) and wrong_B.any():  # vmap has no branch on a value
            row = int(wrong_B.nonzero()[0])
            raise ValueError(f"{who}: {name}[{row}] is {float(x_B[row])}; {remedy}")


def check_places(
    who: str,
    prompts_B: Tensor,
    lengths_B: Tensor,
    width: int,
    positions: int,
    ids: int | None = None,
    places_BT: Tensor | None = None,
) -> None:
    """Refuses answers that do not lie in their rows, whose tokens would be taken from other places.

    Args:
        who: function, for the error.
        prompts_B: tokens of each prompt.
        lengths_B: tokens of each answer.
        width: T.
        positions: L of the logits or values, which may leave the last position out.
        ids: L of the tokens, or None without tokens.
        places_BT: places of the answers' tokens in their rows, or None where each answer is right behind its prompt.

    Raises:
        ValueError: names the limits.
    """
    most = positions + 1 if ids is None else min(positions + 1, ids)
    if places_BT is None:
        outside_B = (lengths_B > 0) & ((prompts_B < 1) | (prompts_B + lengths_B > most))
        where = f"prompts at least 1, and both together at most {most}"
    else:
        outside_BT = (places_BT < 1) | (places_BT >= most)
        outside_B = (outside_BT & (torch.arange(width, device=lengths_B.device) < lengths_B[:, None])).any(1)
        where = f"and places from 1 to {most - 1}"
    outside_B = outside_B | (lengths_B < 0) | (lengths_B > width)
    text = (
        f"{who}: an answer does not lie in its row: lengths must be from 0 to width = {width}, {where}, by the shapes"
        " of the rows. Pass longer rows, or cut the answer."
    )
    if isinstance(outside_B, FakeTensor):
        check_tensor_all(~outside_B, lambda: text)
    elif not is_batched(outside_B) and outside_B.any():  # vmap has no branch on a value
        raise ValueError(text)


def has_values(x: Tensor) -> bool:
    """Returns whether a branch may depend on the values of `x`: not in a captured step, nor under vmap."""
    return not isinstance(x, FakeTensor) and not is_batched(x)


_CLIP = "epsilon={value!r}, and epsilon_high= if the distance above 1 differs"
_CLIP_MAX = "importance_sampling_clip_max={value!r}, with sampling_logprobs_BT="
# Arguments of the losses of policies.
MEANT = {
    "epsilon_low": _CLIP,
    "cliprange": _CLIP,
    "clip_range": _CLIP,
    "clip_ratio": _CLIP,
    "clip": _CLIP,
    "cliprange_value": "cliprange={value!r}",
    "most": "delta={value!r}",
    "clip_ratio_c": "delta={value!r}",
    "kl_coef": "beta={value!r}",
    "kl_loss_coef": "beta={value!r}",
    "normalise": "loss_type=. The docstring of grpo has a table of losses",
    "objective": 'loss_type="cispo" for the objective "weight"',
    "loss_agg_mode": "loss_type=. The docstring of grpo has a table of losses",
    "ratio": "importance_sampling_level={value!r}",
    "corrected": "use_bias_correction_kl={value!r}",
    "constant": "max_completion_length={value!r}",
    "kl_estimator": "estimator={value!r}",
    "ref_logprobs": "ref_logprobs_BT=",
    "reference_BT": "ref_logprobs_BT=",
    "old_BT": "old_logprobs_BT=",
    "behaviour_BT": "sampling_logprobs_BT=",
    "vllm_importance_sampling_clip_max": _CLIP_MAX,
    "truncate": _CLIP_MAX,
    "num_iterations": "nothing: a loop calls the step as often for each rollout",
    "temperature": "logits / temperature in completion_logprobs, and rl.with_temperature(decoder, {value!r})",
}
# Arguments of the losses of preferences.
PREFERENCES = {
    "loss_weights": "loss_type={{'sigmoid': 0.8, 'bco_pair': 0.2}}, a weight for each name",
    "ld_alpha": "log probabilities whose tokens beyond the shorter answer are weighted",
    "cpo_alpha": "the cross entropy of the chosen answers as a second loss of the step",
    "smoothing": "label_smoothing={value!r}",
    "weights": "desirable_weight= and undesirable_weight=",
    "wanted_B": "desirable_B=",
    "divergence": "kl=",
    "chosen_reference_B": "ref_chosen_B=",
    "rejected_reference_B": "ref_rejected_B=",
    "reference_free": "zeros for the log probabilities of the reference",
    "tau": "beta={value!r}",
}
# Arguments of advantages and rewards.
ADVANTAGES = {
    "size": "num_generations={value!r}",
    "group_size": "num_generations={value!r}",
    "deviation": 'scale_rewards="group" for True, scale_rewards="none" for False',
    "norm_adv_by_std_in_grpo": 'scale_rewards="group" for True, scale_rewards="none" for False',
    "discount": "gamma={value!r}",
    "decay": "lam={value!r}",
    "lambd": "lam={value!r}",
    "gae_lambda": "lam={value!r}",
    "beta": "kl_coef={value!r}",
    "kl_ctl": "kl_coef={value!r}",
    "clip": "clip_reward_value={value!r}",
    "timeout": "seconds={value!r}",
    "num_workers": "workers={value!r}",
    "num_processes": "workers={value!r}",
}
