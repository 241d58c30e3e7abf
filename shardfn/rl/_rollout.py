"""Rollouts as trees of rows, and checks of the loop of rollouts and updates.

Rollouts: prompts with the answers that a version of the weights drew, as a tree of rows.

B rows, L tokens of prompt and answer, T tokens of an answer.

Checks of a loop of rollouts and updates: the trainer's distribution equals the draws', and tokens agree.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int8, Int16
from torch import Tensor

from shardfn import core
from shardfn.collectives import GlobalTensor
from shardfn.engine import WeightedMean

from ._completions import CompletionSpans, completion_mask, masked, mean_of_tokens, row_mean
from ._shapes import check_lengths, check_numbers, check_shapes

# Failures of a call of a function in Python: an exception, no result in time, an invalid result, the end of its
# process.
FAILURES = ("raised", "late", "invalid", "died")


class Rollout(NamedTuple):
    """Answers of the same width, cut along rows as any batch, and saved as any tree.

    Attributes:
        ids: ids [B, L] of each prompt and behind it of its answer, then zeros, which no loss looks at.
        prompts: tokens of each prompt.
        lengths: number of tokens that the model drew in each answer.
        logprobs: log probability of each token when it was drawn [B, T]. 0 from the end on.
        versions: version of the weights that drew each token [B, T]. -1 from the end on.
        rewards: rewards of each answer, NaN where a reward is missing. An infinite reward, as of a model, is as NaN.
        ended: whether the answer ended by a stop token, and not by its length.
        places: place of each token in `ids` [B, T]. 0 from the end on. Tokens of `sample` follow their prompts. Between
            tokens of `converse` are the tokens of a tool, which no loss learns from.
        expert_ids: experts of each token in `ids` in each of m layers, of an engine with `record_experts=True`, for
            `gpt.apply(chosen=)`: [B, L, m, k], int16. -1 from the last token on, whose successor is not known. [B, L,
            0, 0] otherwise.
        failed: number of the failure in `FAILURES`, from 1 on, for which `score` has no reward, or 0.

    Example:
        >>> empty_rollout(2, 8, 4).logprobs.shape
        torch.Size([2, 4])
    """

    ids: Int[Tensor, "b l"]
    prompts: Int[Tensor, " b"]
    lengths: Int[Tensor, " b"]
    logprobs: Float[Tensor, "b t"]
    versions: Int[Tensor, "b t"]
    rewards: Float[Tensor, " b"]
    ended: Bool[Tensor, " b"]
    places: Int[Tensor, "b t"]
    expert_ids: Int16[Tensor, "b l m k"]
    failed: Int8[Tensor, " b"]

    @property
    def width(self) -> int:
        """Returns T."""
        return self.logprobs.shape[1]

    @property
    def spans(self) -> CompletionSpans:
        """Returns the location of the answers, as in `completion_logprobs(logits, rollout.ids, rollout.spans)`."""
        return CompletionSpans(self.prompts, self.lengths, self.width, self.places)

    def tokens(self, row: int) -> tuple[list[int], list[int]]:
        """Returns the ids of a row's prompt and answer, with a tool's ids in the answer."""
        start, num = int(self.prompts[row]), int(self.lengths[row])
        # An answer without places is right behind its prompt.
        end = max(start + num, int(self.places[row, num - 1]) + 1 if num else 0)
        ids: list[int] = self.ids[row, :end].tolist()
        return ids[:start], ids[start:]


def empty_rollout(
    rows: int,
    length: int,
    width: int,
    *,
    expert_shape: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Rollout:
    """Returns a rollout of empty answers to empty prompts, without rewards: the form to restore a rollout into.

    Args:
        rows: B.
        length: L.
        width: T.
        expert_shape: m and k: `engine.expert_shape`.
        dtype: dtype of log probabilities, `engine.dtype`, and of rewards, which have at least 32 bits.
        device: device of the tensors.

    Example:
        >>> empty_rollout(1, 8, 4).rewards
        tensor([nan])
    """
    num = torch.zeros(rows, dtype=torch.int64, device=device)
    return Rollout(
        ids=torch.zeros(rows, length, dtype=torch.int64, device=device),
        prompts=num,
        lengths=num.clone(),
        logprobs=torch.zeros(rows, width, dtype=dtype, device=device),
        versions=torch.full((rows, width), -1, dtype=torch.int64, device=device),
        rewards=torch.full((rows,), torch.nan, dtype=torch.promote_types(dtype, torch.float32), device=device),
        ended=torch.zeros(rows, dtype=torch.bool, device=device),
        places=torch.zeros(rows, width, dtype=torch.int64, device=device),
        expert_ids=torch.full((rows, length, *expert_shape), -1, dtype=torch.int16, device=device),
        failed=torch.zeros(rows, dtype=torch.int8, device=device),
    )


def as_global(rows: core.PyTree, mesh: core.Mesh, axis: core.Axes) -> core.PyTree:
    """Returns each rank's rows as leaves of all ranks' rows, to be saved. `collectives.local` is the way back.

    Args:
        rows: tree of tensors, such as a `Rollout`, with equally many rows on each rank.
        mesh: mesh of the step.
        axis: axes that cut the rows, or None where all ranks hold the same rows.

    Example:
        >>> from shardfn import core
        >>> as_global(empty_rollout(2, 8, 4), core.make_mesh({"dp": 1}), "dp").ids.shape
        torch.Size([2, 8])
    """
    num = mesh.axis_size(axis)
    return core.tree_map(lambda x: GlobalTensor(x, torch.Size((len(x) * num, *x.shape[1:])), core.P(axis), mesh), rows)


def check_versions(rollout: Rollout, newest: int, *, behind: int = 0) -> None:
    """Refuses answers that weights older than expected have drawn, also in part.

    Args:
        rollout: rollout to be learnt from.
        newest: engine's version, as `update_weights` returns it, and `since` of `sample` added.
        behind: number of versions that an answer may be older.

    Raises:
        ValueError: names the first row, its versions, and the expected versions, or `behind` is negative.

    Example:
        >>> check_versions(empty_rollout(2, 8, 4), 3)
    """
    check_numbers("check_versions", "0 or more", behind=behind)
    mask = completion_mask(rollout.lengths, rollout.width)
    wrong = mask & ((rollout.versions > newest) | (rollout.versions < newest - behind))
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        found = sorted(set(rollout.versions[row][mask[row]].tolist()))
        raise ValueError(
            f"check_versions: the answer of row {row} was drawn by version {', '.join(map(str, found))}, and from"
            f" {newest - behind} to {newest} are expected. Draw it again after update_weights, or pass a larger behind."
        )


def rollout_metrics(rollout: Rollout, advantages_B: Float[Tensor, " b"] | None = None) -> dict[str, WeightedMean]:
    """Returns metrics for a loss's aux: means over the answers of all ranks.

    Args:
        rollout: rollout with rewards.
        advantages_B: advantages of `group_advantages`, for "flat".

    Returns:
        With advantages "flat", the part of answers whose advantage is 0, such as the answers of a group of equal
        rewards: where it is 1 nothing is learnt (`RewardSignal`). "reward", over the answers with a reward, "missing",
        the part without, "raised", "late", "invalid" and "died", the parts without a reward for such a failure,
        "ended", the part that ended by a stop token, and "length".

    Example:
        >>> rollout_metrics(empty_rollout(2, 8, 4))["missing"].mean()
        tensor(1.)
    """
    known, dtype = rollout.rewards.isfinite(), rollout.rewards.dtype
    reward = WeightedMean(torch.where(known, rollout.rewards, 0.0).sum(), known.sum().to(dtype))
    rows = {"missing": ~known, "ended": rollout.ended, "length": rollout.lengths}
    rows |= {kind: rollout.failed == number for number, kind in enumerate(FAILURES, 1)}
    rows |= {} if advantages_B is None else {"flat": advantages_B == 0}
    return {"reward": reward} | {name: row_mean(x.to(dtype)) for name, x in rows.items()}


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
            f"check_first_ratios: training must have the log probabilities of the draws, within {tolerance}. Row {row}"
            f" has {found!r} at token {token} in training, but {drawn!r} when it was drawn, by version"
            f" {int(rollout.versions[row, token])}. {int(wrong_BT.sum())} of {int(mask_BT.sum())} tokens differ. Turn"
            " dropout off in the actor (module.eval() before from_module, or no key), call update_weights before"
            " sample, and pass the temperature of the draws. A model that is not batch-invariant needs a tolerance."
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

    Returns: "mismatch", the mean over tokens of the absolute difference, "mismatch_most", the mean over answers of
        their largest difference, and "mismatched", the part of tokens that have other bits.

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
    means = {name: mean_of_tokens(x_BT, lengths_B) for name, x_BT in (("mismatch", far_BT), ("mismatched", other_BT))}
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
            f"check_tokenizers: both models must have the same tokens, but {len(wrong)} ids differ. For example id {i}"
            f" is {ours.get(i)!r} of {len(ours)} tokens for the actor, and {theirs.get(i)!r} of {len(theirs)} for the"
            " other model. Decode answers with the actor's tokenizer, and encode the text with the other one."
        )


def _get_vocabulary(tokenizer: Any) -> Mapping[str, int]:
    return tokenizer if isinstance(tokenizer, Mapping) else tokenizer.get_vocab()
