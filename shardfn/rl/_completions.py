"""Answers as rows of the same width: masks of tokens, and sums over tokens.

Column j of a row is the answer's token j. Where a tool wrote between tokens, column j is the j-th token that the model
drew. A token counts if j is below the row's length, whatever its id, so an end token that is also the padding counts.

B rows, T tokens of an answer, L tokens of prompt and answer, V vocabulary.

Masks of tokens for `grpo(loss_mask_BT=)`, and the entropy's coefficient of the next iteration.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn.collectives import all_gather
from shardfn.core import Axes
from shardfn.engine import WeightedMean
from shardfn.inference import logprobs, widen_floats

from . import _shapes as shapes


def completion_mask(lengths_B: Int[Tensor, " b"], width: int) -> Bool[Tensor, "b t"]:
    """Returns the mask of tokens that count: the tokens before each row's length.

    Args:
        lengths_B: tokens of each answer. 0 is an empty answer.
        width: T.

    Example:
        >>> completion_mask(torch.tensor([2, 0]), 3).tolist()
        [[True, True, False], [False, False, False]]
    """
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


def masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns the values that count, and zeros, so that neither a value nor a gradient of padding is ever used."""
    return torch.where(mask_BT, x_BT, torch.zeros((), dtype=x_BT.dtype, device=x_BT.device))


def token_mean(x_BT: Float[Tensor, "b t"], lengths_B: Int[Tensor, " b"]) -> WeightedMean:
    """Returns the mean over all tokens that count, of all ranks and microbatches.

    Args:
        x_BT: value of each token.
        lengths_B: tokens of each answer.

    Raises:
        ValueError: shapes do not fit, or a length is not from 0 to T.

    Example:
        >>> token_mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([2, 1])).mean()
        tensor(3.)
    """
    shapes.check_shapes("token_mean", x_BT=x_BT, lengths_B=lengths_B)
    shapes.check_lengths("token_mean", x_BT.shape[1], lengths_B=lengths_B)
    return mean_of_tokens(x_BT, lengths_B)


def mean_of_tokens(x_BT: Tensor, lengths_B: Tensor) -> WeightedMean:
    """Returns `token_mean` of tensors that are checked."""
    mask_BT, x_BT = completion_mask(lengths_B, x_BT.shape[1]), widen_floats(x_BT)  # 16 bits have no count of 257
    return WeightedMean(masked(x_BT, mask_BT).sum(), mask_BT.sum().to(x_BT.dtype))


def row_mean(x_B: Float[Tensor, " b"]) -> WeightedMean:
    """Returns the mean over all rows, of all ranks and microbatches.

    Args:
        x_B: value of each row.

    Example:
        >>> row_mean(torch.tensor([1.0, 3.0])).mean()
        tensor(2.)
    """
    x_B = widen_floats(x_B)
    return WeightedMean(x_B.sum(), x_B.new_tensor(len(x_B)))


class CompletionSpans(NamedTuple):
    """Location of the tokens of each answer in rows of prompts and answers, for the `completion_` functions.

    Attributes:
        prompts_B: tokens of each prompt, at least 1.
        lengths_B: tokens of each answer.
        width: T.
        places_BT: positions of the answers' tokens in their rows, as of a `Rollout` in which a tool wrote between
            tokens. None: each answer is right behind its prompt.
    """

    prompts_B: Int[Tensor, " b"]
    lengths_B: Int[Tensor, " b"]
    width: int
    places_BT: Int[Tensor, "b t"] | None = None

    def mask(self, x_BT: Tensor) -> Tensor:
        """Returns `x_BT` with 0 from each answer's end on."""
        return masked(x_BT, completion_mask(self.lengths_B, self.width))


def completion_logprobs(
    logits_BLV: Float[Tensor, "b l v"],
    ids_BL: Int[Tensor, "b l"],
    spans: CompletionSpans,
) -> Float[Tensor, "b t"]:
    """Returns the log probabilities of answers, by a forward of prompts and answers, with a derivative.

    Logits of a batch-invariant model, in float32 or float64, give the bits of `Rollout.logprobs` for the weights that
    drew the answers, so the first ratio is exactly 1. Logits of 16 bits are widened to float32.

    Args:
        logits_BLV: logits of the next token at each position, as from `gpt.apply`. The last position may be left out.
        ids_BL: prompts, each followed by its answer, and padding of any ids.
        spans: location of the answers.

    Returns:
        Log probabilities [B, T]. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, or an answer does not lie in its row.

    Example:
        >>> ids, one = torch.tensor([[5, 3, 0]]), torch.tensor([1])
        >>> completion_logprobs(torch.zeros(1, 3, 8), ids, CompletionSpans(one, one, 2))
        tensor([[-2.0794,  0.0000]])
    """
    given = {"logits_BLV": logits_BLV}
    before_BT = _find_before("completion_logprobs", given, spans, ids_BL)
    return _compute_drawn(_take_rows(logits_BLV, before_BT), ids_BL, before_BT, spans)


def completion_positions(
    ids_BL: Int[Tensor, "b l"],
    spans: CompletionSpans,
) -> Int[Tensor, "b t"]:
    """Returns the positions whose logits predict the answers' tokens, for the argument `at` of `gpt.apply`.

    With `at`, the output layer skips the tokens of prompts, and no logits of a prompt are kept for the backward.

    Args:
        ids_BL: ids [B, L], as for `completion_logprobs`.
        spans: location of the answers.

    Returns:
        Positions [B, T]. After the end of an answer, the positions are valid but arbitrary.

    Raises:
        ValueError: shapes do not fit, or an answer does not lie in its row.

    Example:
        >>> spans = CompletionSpans(torch.tensor([2]), torch.tensor([1]), 2)
        >>> completion_positions(torch.tensor([[5, 3, 4, 0]]), spans)
        tensor([[1, 2]])
    """
    return _find_before("completion_positions", {"ids_BL": ids_BL}, spans, ids_BL)


def logprobs_at(
    logits_BTV: Float[Tensor, "b t v"],
    ids_BL: Int[Tensor, "b l"],
    spans: CompletionSpans,
) -> Float[Tensor, "b t"]:
    """Returns `completion_logprobs` of logits at `completion_positions` only, with the same bits.

    Args:
        logits_BTV: logits as from `gpt.apply(..., at=completion_positions(ids_BL, ...))`.
        ids_BL: ids [B, L], as for `completion_logprobs`.
        spans: location of the answers.

    Returns:
        Log probabilities [B, T]. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, or an answer does not lie in its row.

    Example:
        >>> ids, one = torch.tensor([[5, 3, 0]]), torch.tensor([1])
        >>> logprobs_at(torch.zeros(1, 2, 8), ids, CompletionSpans(one, one, 2))
        tensor([[-2.0794,  0.0000]])
    """
    before_BT = _find_before("logprobs_at", {"ids_BL": ids_BL}, spans, ids_BL)
    shapes.check_shapes("logprobs_at", positions_BT=before_BT, logits_BTV=logits_BTV)
    return _compute_drawn(logits_BTV, ids_BL, before_BT, spans)


def completion_values(
    values_BL: Float[Tensor, "b l"],
    spans: CompletionSpans,
) -> Float[Tensor, "b t"]:
    """Returns a critic's values before each token of the answers, for `gae` and `ppo_value`.

    Args:
        values_BL: values of each position of prompts and answers.
        spans: location of the answers.

    Returns:
        Values [B, T]. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, or an answer does not lie in its row.

    Example:
        >>> spans = CompletionSpans(torch.tensor([2]), torch.tensor([1]), 2)
        >>> completion_values(torch.tensor([[1.0, 2.0, 3.0]]), spans)
        tensor([[2., 0.]])
    """
    before_BT = _find_before("completion_values", {"values_BL": values_BL}, spans)
    found_BT = values_BL.gather(1, before_BT)
    return spans.mask(found_BT)


def completion_entropies(
    logits_BLV: Float[Tensor, "b l v"],
    spans: CompletionSpans,
) -> Float[Tensor, "b t"]:
    """Returns the entropies of the distributions that answers are drawn from.

    Args:
        logits_BLV: logits as of `completion_logprobs`.
        spans: location of the answers.

    Returns:
        Entropies [B, T]. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, or an answer does not lie in its row.

    Example:
        >>> one = torch.tensor([1])
        >>> completion_entropies(torch.zeros(1, 3, 8), CompletionSpans(one, one, 2))
        tensor([[2.0794, 0.0000]])
    """
    before_BT = _find_before("completion_entropies", {"logits_BLV": logits_BLV}, spans)
    logs_BTV = _take_rows(logits_BLV, before_BT).log_softmax(-1)
    entropies_BT = -(logs_BTV.exp() * logs_BTV.clamp(min=torch.finfo(logs_BTV.dtype).min)).sum(-1)
    return spans.mask(entropies_BT)


def completion_divergences(
    logits_BLV: Float[Tensor, "b l v"],
    reference_BLV: Float[Tensor, "b l v"],
    spans: CompletionSpans,
) -> Float[Tensor, "b t"]:
    """Returns KL(pi, ref) at each token: the sum over the vocabulary, which `kl` estimates by the drawn token.

    A single improbable token makes k3 as large as ref / pi, and with k3 its mean over a rollout. The sum over the
    vocabulary has the same mean over draws and no such tail, so take the sum to watch or to bound a divergence.

    Args:
        logits_BLV: logits of the policy, as of `completion_logprobs`.
        reference_BLV: logits of the reference.
        spans: location of the answers.

    Returns:
        Divergences [B, T]. 0 from each answer's end on.

    Raises:
        ValueError: shapes do not fit, or an answer does not lie in its row.

    Example:
        >>> one, even = torch.tensor([1]), torch.zeros(1, 3, 2)
        >>> completion_divergences(even + torch.tensor([0.0, 1.0]), even, CompletionSpans(one, one, 2))
        tensor([[0.1109, 0.0000]])

    References:
        Amini et al., Better Estimation of the KL Divergence Between Language Models, 2025,
        https://arxiv.org/abs/2504.10637
    """
    shapes.check_shapes("completion_divergences", logits_BLV=logits_BLV, reference_BLV=reference_BLV)
    before_BT = _find_before("completion_divergences", {"logits_BLV": logits_BLV}, spans)
    p_BTV, q_BTV = (_take_rows(x_BLV, before_BT).log_softmax(-1) for x_BLV in (logits_BLV, reference_BLV))
    logs_BTV = torch.where(p_BTV.isneginf(), 0.0, p_BTV - q_BTV)  # a token that is excluded counts 0
    return spans.mask((p_BTV.exp() * logs_BTV).sum(-1))


def _find_before(
    function: str, given: Mapping[str, Tensor], spans: CompletionSpans, ids_BL: Tensor | None = None
) -> Tensor:
    """Returns the position before each token of the answers, after the checks of `function`.

    Padding has any position.
    """
    prompts_B, lengths_B, width, places_BT = spans
    shapes.check_shapes(function, **given, prompts_B=prompts_B, lengths_B=lengths_B, places_BT=places_BT)
    shapes.check_shapes(function, prompts_B=prompts_B, ids_BL=ids_BL)  # whose L is that of `given`, or one more
    [x] = given.values()
    length, num_ids = x.shape[1], None if ids_BL is None else ids_BL.shape[1]
    shapes.check_places(function, prompts_B, lengths_B, width, length, num_ids, places_BT)
    if places_BT is None:
        places_BT = prompts_B[:, None] + torch.arange(width, device=prompts_B.device)
    return (places_BT - 1).clamp(0, length - 1)


def _take_rows(logits_BLV: Tensor, places_BT: Tensor) -> Tensor:
    return widen_floats(logits_BLV).gather(1, places_BT[..., None].expand(-1, -1, logits_BLV.shape[-1]))


def _compute_drawn(rows_BTV: Tensor, ids_BL: Tensor, before_BT: Tensor, spans: CompletionSpans) -> Tensor:
    """Returns the log probability of the token behind each position, by the logits there."""
    tokens_BT = spans.mask(ids_BL.gather(1, (before_BT + 1).clamp(max=ids_BL.shape[1] - 1)))
    return spans.mask(logprobs(rows_BTV, tokens_BT))


def high_entropy_mask(
    entropies_BT: Float[Tensor, "b t"], lengths_B: Int[Tensor, " b"], quantile: float, *, axis: Axes = None
) -> Bool[Tensor, "b t"]:
    """Returns the mask of the tokens with the highest entropies: TRL's `top_entropy_quantile`.

    Args:
        entropies_BT: entropies of the policy as from `completion_entropies`.
        lengths_B: tokens of each answer.
        quantile: part of the tokens of all rows that the mask has, for example 0.2. Tokens at the threshold count.
        axis: mesh axes that cut the rows. All ranks have equal numbers of rows and T.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or the quantile not above 0 and at most 1.

    Example:
        >>> high_entropy_mask(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([3]), 0.5).tolist()
        [[False, True, True]]

    References: Wang et al., Beyond the 80/20 Rule, 2025, https://arxiv.org/abs/2506.01939
    """
    shapes.check_shapes("high_entropy_mask", entropies_BT=entropies_BT, lengths_B=lengths_B)
    shapes.check_lengths("high_entropy_mask", entropies_BT.shape[1], lengths_B=lengths_B)
    shapes.check_numbers("high_entropy_mask", "from 0 to 1", quantile=quantile)
    shapes.check_numbers("high_entropy_mask", quantile=quantile)
    mask_BT = completion_mask(lengths_B, entropies_BT.shape[1])
    own = torch.where(mask_BT, entropies_BT.detach(), torch.inf)
    whole = (own if axis is None else all_gather(own, axis)).flatten().sort().values
    at = (1 - quantile) * (whole.isfinite().sum() - 1).clamp(min=0).double()
    low, high = whole[at.floor().long()], whole[at.ceil().long()]
    threshold = torch.where(high.isfinite(), torch.lerp(low, high, (at - at.floor()).to(low.dtype)), torch.inf)
    return mask_BT & (entropies_BT.detach() >= threshold)


def off_policy_mask(
    logprobs_BT: Float[Tensor, "b t"],
    sampling_logprobs_BT: Float[Tensor, "b t"],
    advantages_B: Float[Tensor, " b"],
    lengths_B: Int[Tensor, " b"],
    *,
    threshold: float,
) -> Bool[Tensor, "b t"]:
    """Returns the mask without the answers that are worse than the baseline and improbable by now.

    An answer of negative advantage is left out if the mean of log pi_sampling - log pi over its tokens is above the
    threshold: TRL's `off_policy_mask_threshold`.

    Args:
        logprobs_BT: log probabilities of the policy that learns.
        sampling_logprobs_BT: log probabilities of the policy that drew the answers. NaN counts 0.
        advantages_B: advantages as from `group_advantages`.
        lengths_B: tokens of each answer.
        threshold: largest mean, above 0, for example 0.5.

    Raises:
        ValueError: shapes do not fit, a length is not from 0 to T, or the threshold is not above 0.

    Example:
        >>> new, drawn = torch.full((2, 1), -3.0), torch.full((2, 1), -1.0)
        >>> off_policy_mask(new, drawn, torch.tensor([1.0, -1.0]), torch.tensor([1, 1]), threshold=0.5).tolist()
        [[True], [False]]

    References: DeepSeek-AI, DeepSeek-V3.2, 2025, section 3.1, https://arxiv.org/abs/2512.02556
    """
    given = {"sampling_logprobs_BT": sampling_logprobs_BT, "advantages_B": advantages_B, "lengths_B": lengths_B}
    shapes.check_shapes("off_policy_mask", logprobs_BT=logprobs_BT, **given)
    shapes.check_lengths("off_policy_mask", logprobs_BT.shape[1], lengths_B=lengths_B)
    shapes.check_numbers("off_policy_mask", threshold=threshold)
    mask_BT = completion_mask(lengths_B, logprobs_BT.shape[1])
    drift_BT = masked((sampling_logprobs_BT - logprobs_BT).detach(), mask_BT).nan_to_num(nan=0.0)
    near_B = drift_BT.sum(1) / lengths_B.clamp(min=1) <= threshold
    return mask_BT & ((advantages_B >= 0) | near_B)[:, None]


def adapt_entropy_coef(
    coef: float, entropy: float, target: float, *, delta: float = 0.005, least: float = 0.0, most: float = 1.0
) -> float:
    """Returns the weight of the entropies in the next iteration: more by `delta` if the entropy is low, else less.

    The weight is a part of the state of a run: save it with the checkpoint. TRL's `use_adaptive_entropy`.

    Args:
        coef: `entropy_coef` of this iteration.
        entropy: mean entropy of this iteration, the same on all ranks.
        target: entropy above which the weight decreases.
        delta: change of the weight.
        least: smallest weight.
        most: largest weight.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> adapt_entropy_coef(0.01, 0.2, 0.5), adapt_entropy_coef(0.01, 0.9, 0.5)
        (0.015, 0.005)

    References: He et al., Skywork Open Reasoner 1, 2025, https://arxiv.org/abs/2505.22312
    """
    shapes.check_numbers("adapt_entropy_coef", "0 or more", coef=coef, entropy=entropy, target=target, least=least)
    shapes.check_numbers("adapt_entropy_coef", delta=delta, most=most)
    if least > most:
        raise ValueError(f"adapt_entropy_coef: least must be at most {most}, the largest weight, got {least}.")
    return min(coef + delta, most) if entropy <= target else max(coef - delta, least)
