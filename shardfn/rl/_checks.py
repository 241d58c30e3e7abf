"""Checks of a loop of rollouts and updates: the trainer's distribution equals the draws', and tokens agree."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from shardfn.engine import WeightedMean

from ._completions import completion_mask, counted_mean, masked, row_mean
from ._rollout import Rollout
from ._shapes import check_lengths, check_numbers, check_shapes


def check_first_ratios(logprobs_BT: Float[Tensor, "b t"], rollout: Rollout, *, tolerance: float = 0.0) -> None:
    """Refuses a rollout whose log probabilities differ from the trainer's before the first update.

    For a batch-invariant model both are equal to the last bit. They differ if dropout is active in the actor, if other
    weights drew the answers, or if the loss uses another temperature. Call the check where the loop can wait for the
    values.

    Args:
        logprobs_BT: log probabilities of the actor, as by `step.apply`.
        rollout: rollout of the same weights.
        tolerance: largest difference. For a model that is not batch-invariant about 1e-4 in float32.

    Raises:
        ValueError: names the first row and token that differ, with both values, or the tolerance is negative.

    Example:
        >>> from shardfn.rl import empty_rollout
        >>> rollout = empty_rollout(1, 8, 2)
        >>> check_first_ratios(rollout.logprobs, rollout)
    """
    check_numbers("check_first_ratios", "0 or more", tolerance=tolerance)
    mask_BT = completion_mask(rollout.lengths, rollout.width)
    # A NaN is not within any tolerance.
    wrong_BT = mask_BT & ~((logprobs_BT - rollout.logprobs).abs() <= tolerance)
    if bool(wrong_BT.any()):
        row, token = wrong_BT.nonzero()[0].tolist()
        found, drawn = float(logprobs_BT[row, token]), float(rollout.logprobs[row, token])
        raise ValueError(
            f"check_first_ratios: row {row} has at token {token} log probability {found!r} in training, and"
            f" {drawn!r} when it was drawn, by version {int(rollout.versions[row, token])};"
            f" {int(wrong_BT.sum())} of {int(mask_BT.sum())} tokens differ by more than {tolerance}. Turn dropout off"
            " in the actor (module.eval() before from_module, or no key), call update_weights before sample, and pass"
            " the temperature of the draws. A model that is not batch-invariant needs a tolerance."
        )


def mismatch_metrics(
    logprobs_BT: Float[Tensor, "b t"], drawn_BT: Float[Tensor, "b t"], lengths_B: Int[Tensor, " b"]
) -> dict[str, WeightedMean]:
    """Returns metrics for a loss's aux.

    Distances of the trainer's log probabilities from the draws', without gradients.

    The metrics measure the mismatch of training and engine where both have the same weights: in a first epoch. In later
    epochs the metrics also have the updates. With a batch-invariant model all are 0 in a first epoch.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        drawn_BT: `Rollout.logprobs`.
        lengths_B: tokens of each answer.

    Returns:
        "mismatch", the mean over tokens of the absolute difference, "mismatch_most", the mean over answers of their
        largest difference, and "mismatched", the part of tokens that have other bits.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T.

    Example:
        >>> import torch
        >>> found = mismatch_metrics(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.5]]), torch.tensor([2]))
        >>> {name: x.mean().item() for name, x in found.items()}
        {'mismatch': 0.25, 'mismatched': 0.5, 'mismatch_most': 0.5}
    """
    check_shapes("mismatch_metrics", logprobs_BT=logprobs_BT, drawn_BT=drawn_BT, lengths_B=lengths_B)
    check_lengths("mismatch_metrics", logprobs_BT.shape[1], lengths_B=lengths_B)
    far_BT = masked((logprobs_BT.detach() - drawn_BT).abs(), completion_mask(lengths_B, logprobs_BT.shape[1]))
    other_BT = (far_BT != 0).to(far_BT.dtype)
    means = {name: counted_mean(x_BT, lengths_B) for name, x_BT in (("mismatch", far_BT), ("mismatched", other_BT))}
    return means | {"mismatch_most": row_mean(far_BT.amax(1))}


def check_tokenizers(actor: Any, other: Any) -> None:
    """Refuses two models whose ids mean different tokens, such as an actor and a model of rewards from elsewhere.

    Args:
        actor: tokenizer with `get_vocab`, such as a tokenizer of transformers, or its mapping from tokens to ids.
        other: tokenizer or mapping of the model that reads the actor's ids.

    Raises:
        ValueError: names the smallest id that differs, with both tokens.

    Example:
        >>> check_tokenizers({"a": 0, "b": 1}, {"a": 0, "b": 1})
    """
    ours, theirs = ({i: token for token, i in _get_vocabulary(x).items()} for x in (actor, other))
    wrong = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if wrong:
        i = wrong[0]
        raise ValueError(
            f"check_tokenizers: id {i} is {ours.get(i)!r} for the actor, which has {len(ours)} tokens, and"
            f" {theirs.get(i)!r} for the other model, which has {len(theirs)}; {len(wrong)} ids differ. Decode answers"
            " with the actor's tokenizer, and encode the text with the other one."
        )


def _get_vocabulary(tokenizer: Any) -> Mapping[str, int]:
    return tokenizer if isinstance(tokenizer, Mapping) else tokenizer.get_vocab()
