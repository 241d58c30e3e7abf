"""Keywords of TRL, verl and DeepSpeed-Chat for losses and advantages, and their counterparts here."""

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
