"""PPO over one state: the experience of a rollout, and the losses of an actor, a critic and a text.

B rows, L positions, T tokens of an answer.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from shardfn.core import PyTree
from shardfn.engine import Objective, ShardedStep, WeightedMean
from shardfn.state import TrainState

from ._advantages import gae, kl_rewards
from ._completions import (
    completion_divergences,
    completion_entropies,
    completion_logprobs,
    completion_values,
    token_mean,
)
from ._policy import policy_metrics, ppo_policy, ppo_value
from ._rollout import Rollout, rollout_metrics
from ._shapes import check_numbers

Model = Callable[[PyTree, Tensor], Tensor]
_BRANCHES = "actor", "critic", "reference"


class Experience(NamedTuple):
    """Rollout with the numbers that PPO learns from, cut along rows as any batch.

    Attributes:
        rollout: rollout with the score of each answer as its reward.
        ref_logprobs: log probabilities of the reference.
        values: values of the critic, before each token.
        divergences: KL(actor, reference) at each token, summed over the vocabulary.
        advantages: advantages of `gae`.
        returns: returns of `gae`.
    """

    rollout: Rollout
    ref_logprobs: Float[Tensor, "b t"]
    values: Float[Tensor, "b t"]
    divergences: Float[Tensor, "b t"]
    advantages: Float[Tensor, "b t"]
    returns: Float[Tensor, "b t"]


@dataclass(frozen=True)
class PPO:
    """Losses of one step over a state with the branches "actor", "critic", "reference" and any others.

    The loss of the actor is `ppo_policy`, and of the critic `ppo_value`. The text is a second loss of the actor: the
    gradients of `ppo_policy + ptx_coef * ptx` are added before the optimizer (PPO-ptx). The step learns from them in
    one update, where DeepSpeed-Chat makes two.

    Attributes:
        actor: `actor(params, ids)`: logits [B, L, V] of the branch "actor" or "reference".
        critic: `critic(params, ids)`: values [B, L] of the branch "critic".
        ptx: `ptx(params, batch)`: loss of the branch "actor" on a text, such as `gpt.loss`, or None.
        ptx_coef: weight of `ptx`, above 0 exactly if there is one.
        epsilon: clip of ratios, see `ppo_policy`.
        cliprange: clip of values, see `ppo_value`.
        gamma: factor of the next value, see `gae`.
        lam: factor of the next advantage, see `gae`.
        clip_reward_value: bound of scores, see `kl_rewards`.
        reference: `reference(params, ids)`: logits of the reference, from all branches. None: `actor` of the branch
            "reference".

    Raises:
        ValueError: a number is out of range, or `ptx` and `ptx_coef` are not given together.

    Example:
        >>> from shardfn import core, optim
        >>> from shardfn.transforms import sharded_step
        >>> ppo = PPO(lambda w, ids: w[ids], lambda w, ids: w[ids, 0])
        >>> objectives = ppo.objectives()
        >>> sorted(objectives), objectives["critic"].trainable
        (['actor', 'critic'], {'actor': False, 'critic': True, 'reference': False})

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, 2017, https://arxiv.org/abs/1707.06347
        Ouyang et al., InstructGPT, 2022, https://arxiv.org/abs/2203.02155
        Yao et al., DeepSpeed-Chat, 2023, https://arxiv.org/abs/2308.01320
    """

    actor: Model
    critic: Model
    ptx: Callable[[PyTree, PyTree], Any] | None = None
    ptx_coef: float = 0.0
    epsilon: float = 0.2
    cliprange: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    clip_reward_value: float | None = 5.0
    reference: Model | None = None

    def __post_init__(self) -> None:
        """Checks the numbers, so that a mistake is named before the first step."""
        check_numbers("PPO", "0 or more", ptx_coef=self.ptx_coef)
        check_numbers("PPO", epsilon=self.epsilon, cliprange=self.cliprange)
        check_numbers("PPO", "from 0 to 1", gamma=self.gamma, lam=self.lam)
        if (self.ptx is None) != (self.ptx_coef == 0):
            raise ValueError(
                f"PPO: ptx and ptx_coef must be given together, got ptx={self.ptx} and ptx_coef={self.ptx_coef}. Pass"
                " the loss of a text and a weight above 0, or neither."
            )

    def objectives(
        self, branches: Iterable[str] = _BRANCHES, trainable: Mapping[str, PyTree] | None = None
    ) -> dict[str, Objective]:
        """Returns the losses of a step with `has_aux=True`: "actor", "critic", and with `ptx` also "ptx".

        "actor" and "critic" take an `Experience` as their batch, and "ptx" a batch of the text.

        Args:
            branches: names of all branches of the state.
            trainable: leaves that learn in some branches, in the form of `Objective.trainable`, for example
                `LoRA.trainable`. All leaves of other branches learn.
        """
        learns = dict.fromkeys(branches, True) | dict(trainable or {})

        def train_only(learning: str) -> PyTree:
            return {name: x if name == learning else False for name, x in learns.items()}

        losses = {"actor": Objective(self._actor_loss, train_only("actor"))}
        losses["critic"] = Objective(self._critic_loss, train_only("critic"))
        return losses if self.ptx is None else losses | {"ptx": Objective(self._ptx_loss, train_only("actor"))}

    def experience(self, step: ShardedStep, state: TrainState, rollout: Rollout, *, kl_coef: float = 0.1) -> Experience:
        """Returns the experience of a rollout under the weights that drew the answers. Collective.

        Args:
            step: step of the objectives.
            state: state before the first update by the rollout.
            rollout: rollout with the score of each answer as its reward.
            kl_coef: weight of the divergence from the reference in the rewards of tokens.

        Raises:
            ValueError: `kl_coef` is negative.
        """
        reference, values, divergences = step.apply(self._observe, state, rollout)
        clip = {"kl_coef": kl_coef, "clip_reward_value": self.clip_reward_value}
        rewards = kl_rewards(rollout.logprobs, reference, rollout.rewards, rollout.lengths, **clip)
        advantages, returns = gae(rewards, values, rollout.lengths, gamma=self.gamma, lam=self.lam)
        return Experience(rollout, reference, values, divergences, advantages, returns)

    def _observe(self, params: PyTree, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        ids, spans = rollout.ids, rollout.spans
        logits = self.actor(params["actor"], ids)
        reference = self.actor(params["reference"], ids) if self.reference is None else self.reference(params, ids)
        values = completion_values(self.critic(params["critic"], ids), spans)
        return completion_logprobs(reference, ids, spans), values, completion_divergences(logits, reference, spans)

    def _actor_loss(self, params: PyTree, batch: Experience) -> tuple[WeightedMean, dict[str, Any]]:
        rollout = batch.rollout
        logits = self.actor(params["actor"], rollout.ids)
        logprobs = completion_logprobs(logits, rollout.ids, rollout.spans)
        drawn = rollout.logprobs, rollout.lengths
        metrics = policy_metrics(logprobs, *drawn, epsilon=self.epsilon, ref_logprobs_BT=batch.ref_logprobs)
        metrics |= rollout_metrics(rollout)
        metrics["divergence"] = token_mean(batch.divergences, rollout.lengths)
        with torch.no_grad():
            metrics["entropy"] = token_mean(completion_entropies(logits, rollout.spans), rollout.lengths)
        return ppo_policy(logprobs, drawn[0], batch.advantages, drawn[1], epsilon=self.epsilon), metrics

    def _critic_loss(self, params: PyTree, batch: Experience) -> tuple[WeightedMean, dict[str, Any]]:
        spans, lengths = batch.rollout.spans, batch.rollout.lengths
        values = completion_values(self.critic(params["critic"], batch.rollout.ids), spans)
        metrics = {"value": token_mean(values.detach(), lengths), "return": token_mean(batch.returns, lengths)}
        return ppo_value(values, batch.values, batch.returns, lengths, cliprange=self.cliprange), metrics

    def _ptx_loss(self, params: PyTree, batch: PyTree) -> tuple[Any, dict[str, Any]]:
        assert self.ptx is not None
        loss = self.ptx(params["actor"], batch)
        if isinstance(loss, WeightedMean):
            text = WeightedMean(loss.total.detach(), loss.weight)
            return WeightedMean(self.ptx_coef * loss.total, loss.weight), {"text": text}
        return self.ptx_coef * loss, {"text": loss.detach()}
