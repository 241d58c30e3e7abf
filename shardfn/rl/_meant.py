"""Keywords of TRL, verl and DeepSpeed-Chat for losses and advantages, and their counterparts here."""

_CLIP = "clip={value!r}, or clip=(below, above) where these differ"
# Arguments of the losses of policies.
MEANT = {
    "epsilon": _CLIP,
    "epsilon_low": _CLIP,
    "epsilon_high": _CLIP,
    "cliprange": _CLIP,
    "clip_range": _CLIP,
    "clip_ratio": _CLIP,
    "cliprange_value": "clip={value!r}",
    "delta": "most={value!r}",
    "clip_ratio_c": "most={value!r}",
    "kl_coef": "beta={value!r}",
    "kl_loss_coef": "beta={value!r}",
    "loss_type": "normalise=, ratio= and objective=; the docstring of grpo has a table of losses",
    "loss_agg_mode": "normalise=; the docstring of grpo has a table of losses",
    "importance_sampling_level": "ratio={value!r}",
    "use_bias_correction_kl": "corrected={value!r}",
    "max_completion_length": 'normalise="constant", constant={value!r}',
    "kl_estimator": "estimator={value!r}",
    "ref_logprobs": "reference_BT=",
    "vllm_importance_sampling_clip_max": "truncate={value!r}, with behaviour_BT=",
    "num_iterations": "nothing: a loop calls the step as often for each rollout",
    "temperature": "logits / temperature in answer_logprobs, and an engine of rl.tempered(decoder, {value!r})",
}
# Arguments of the losses of preferences.
PREFERENCES = {
    "loss_type": "the function of that loss: rl.dpo, rl.robust_dpo, rl.hinge, rl.ipo, rl.kto or rl.orpo",
    "label_smoothing": "rl.robust_dpo(..., smoothing={value!r}), TRL's robust; rl.dpo(smoothing=) is another loss",
    "desirable_weight": "weights=({value!r}, 1.0): of wanted answers, and of the others",
    "undesirable_weight": "weights=(1.0, {value!r}): of wanted answers, and of the others",
    "reference_free": "zeros for the log probabilities of the reference",
    "tau": "beta={value!r}",
}
# Arguments of advantages and rewards.
ADVANTAGES = {
    "num_generations": "size={value!r}",
    "group_size": "size={value!r}",
    "scale_rewards": "deviation={value!r}",
    "norm_adv_by_std_in_grpo": "deviation={value!r}",
    "gamma": "discount={value!r}",
    "lam": "decay={value!r}",
    "lambd": "decay={value!r}",
    "gae_lambda": "decay={value!r}",
    "kl_coef": "beta={value!r}",
    "kl_ctl": "beta={value!r}",
    "clip_reward_value": "clip={value!r}",
    "timeout": "seconds={value!r}",
    "num_workers": "workers={value!r}",
    "num_processes": "workers={value!r}",
}
