"""Learning from rewards: losses of policies, critics and models of rewards, and rollouts by the engine of inference.

Losses are pure functions of log probabilities and lengths. Each loss is a `WeightedMean`, so any number of ranks and
microbatches has the gradient of the whole batch.
"""

from ._completions import completion_mask as completion_mask, token_mean as token_mean, row_mean as row_mean
from ._completions import CompletionSpans as CompletionSpans
from ._completions import completion_logprobs as completion_logprobs, completion_entropies as completion_entropies
from ._completions import completion_positions as completion_positions, logprobs_at as logprobs_at
from ._completions import completion_values as completion_values, completion_divergences as completion_divergences
from ._policy import kl as kl, follow_divergence as follow_divergence
from ._advantages import kl_rewards as kl_rewards, last_values as last_values, pairwise as pairwise
from ._advantages import bradley_terry as bradley_terry, process_reward as process_reward
from ._advantages import decoupled_advantages as decoupled_advantages, gae as gae
from ._advantages import group_advantages as group_advantages, whiten as whiten
from ._policy import ppo_policy as ppo_policy, ppo_value as ppo_value, grpo as grpo, rloo as rloo
from ._policy import Sapo as Sapo, Vespo as Vespo, policy_metrics as policy_metrics
from ._ppo import PPO as PPO, Experience as Experience
from ._completions import high_entropy_mask as high_entropy_mask, off_policy_mask as off_policy_mask
from ._completions import adapt_entropy_coef as adapt_entropy_coef
from ._preferences import cpo as cpo, dpo as dpo, kto as kto, orpo as orpo
from ._rollout import Rollout as Rollout, as_global as as_global, check_versions as check_versions
from ._rollout import FAILURES as FAILURES, empty_rollout as empty_rollout, rollout_metrics as rollout_metrics
from ._advantages import RewardSignal as RewardSignal
from ._scores import Scores as Scores, score as score
from ._sample import sample as sample
from ._converse import Conversations as Conversations, call_metrics as call_metrics, converse as converse
from ._sample import with_temperature as with_temperature
from ._rollout import check_first_ratios as check_first_ratios, check_tokenizers as check_tokenizers
from ._rollout import mismatch_metrics as mismatch_metrics
