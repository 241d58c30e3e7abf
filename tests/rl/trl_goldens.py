"""Writes trl_goldens.json: losses and gradients of TRL 1.16 in float64, of its trainers' own functions on a stub.

PYTHON_WITH_TRL tests/rl/trl_goldens.py
"""

import collections
import json
import math
import pathlib
import types
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]  # of another environment
from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.kto_trainer import KTOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.rloo_trainer import RLOOTrainer  # pyright: ignore[reportMissingImports]

OUT = pathlib.Path(__file__).with_suffix(".json")
# Cases of TRL, by the arguments of `rl.grpo`.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"loss_type": "grpo"}),
    ({"loss_type": "dapo"}, {"loss_type": "dapo"}),
    ({"loss_type": "dr_grpo", "max_completion_length": 4}, {"loss_type": "dr_grpo"}),
    (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
        {"loss_type": "grpo", "beta": 0.1, "unbiased": False},
    ),
    (
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.04},
        {"loss_type": "bnpo", "high": 0.28, "beta": 0.04},
    ),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"loss_type": "grpo", "level": "sequence"}),
    ({"loss_type": "dapo", "delta": 1.25}, {"loss_type": "dapo", "delta": 1.25}),
    ({"loss_type": "cispo", "epsilon": 1.0, "epsilon_high": 0.3}, {"loss_type": "cispo", "high": 1.3}),
]
# Losses of pairs: the function of `shardfn.rl` with its arguments, and the arguments of TRL.
PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dpo", {"beta": 0.3}, {"loss_type": "sigmoid", "beta": 0.3}),
    ("dpo", {"beta": 0.3}, {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.2}),
    ("hinge", {"beta": 0.3}, {"loss_type": "hinge", "beta": 0.3}),
    ("ipo", {"beta": 0.3}, {"loss_type": "ipo", "beta": 0.3}),
    ("robust_dpo", {"beta": 0.3, "label_smoothing": 0.2}, {"loss_type": "robust", "beta": 0.3, "label_smoothing": 0.2}),
]


def batches() -> dict[str, dict[str, Any]]:
    small = {
        "logprobs": [[-1, -2, -0.5], [-0.3, -0.9, -1]],
        "old": [[-1.3, -1.6, -0.5], [-0.3, -1.2, -1]],
        "reference": [[-1.2, -1.5, -0.7], [-0.3, -0.4, -1]],
        "advantages": [1, -0.5],
        "lengths": [3, 2],
    }

    def wave(a: float, b: float) -> list[list[float]]:
        return [[-1.5 + math.sin(a * i + b * j) * 1.2 for j in range(7)] for i in range(5)]

    large = {"logprobs": wave(1.7, 0.9), "old": wave(1.72, 0.93), "reference": wave(1.6, 0.8)}
    return {"small": small, "large": large | {"advantages": [1.3, -0.4, 0, -2, 0.7], "lengths": [7, 1, 4, 5, 2]}}


ACCELERATOR = types.SimpleNamespace(
    num_processes=1,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    sync_gradients=True,
    device="cpu",
)


def stub(
    loss_type: str,
    beta: float = 0.0,
    high: float = 0.2,
    level: str = "token",
    delta: float | None = None,
    unbiased: bool = True,
) -> Any:
    how = {"delta": delta, "use_bias_correction_kl": unbiased, "steps_per_generation": 1}
    return types.SimpleNamespace(
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=high,
        importance_sampling_level=level,
        args=types.SimpleNamespace(**how),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=4,
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
    )


def run(trainer: Any, one: Any, batch: dict[str, Any]) -> dict[str, Any]:
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    logprobs, lengths = x["logprobs"].requires_grad_(), x["lengths"].long()
    mask = (torch.arange(logprobs.shape[1]) < lengths[:, None]).long()
    one._get_per_token_logps_and_entropies = lambda *args, **rest: (logprobs, torch.zeros_like(logprobs), None)
    inputs = {
        "prompt_ids": torch.zeros(len(lengths), 2, dtype=torch.long),
        "prompt_mask": torch.ones(len(lengths), 2, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": x["advantages"],
        "old_per_token_logps": x["old"],
        "old_logps": (x["old"] * mask).sum(1),
        "ref_per_token_logps": x["reference"],
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(one, one.model, inputs)
    (grad,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.item(), "gradient": grad.tolist()}


def of_pairs(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """The loss of DPOTrainer, where the tokens of the better answers are "logprobs" and those of the others "old"."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    policy, lengths = [x["logprobs"].requires_grad_(), x["old"].requires_grad_()], x["lengths"].long()
    counts = torch.cat((lengths, lengths.flip(0)))
    mask = torch.arange(policy[0].shape[1]) < counts[:, None]
    reference = torch.cat((x["reference"], x["reference"].flip(0)))
    one = stub_of_preferences(how, loss_types=[how["loss_type"]], loss_weights=[1.0])
    loss = DPOTrainer._compute_loss(
        one,
        model_of(torch.cat(policy), mask),
        {
            "input_ids": torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long),
            "attention_mask": torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long),
            "completion_mask": torch.nn.functional.pad(mask.long(), (1, 0)),
            "ref_chosen_logps": (reference * mask).sum(1)[: len(lengths)],
            "ref_rejected_logps": (reference * mask).sum(1)[len(lengths) :],
        },
        False,
    )
    grads = torch.autograd.grad(loss, policy)
    return {"loss": loss.item(), "gradients": [grad.tolist() for grad in grads]}


def of_answers(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """The loss of KTOTrainer, where answers with a positive advantage are wanted."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    policy, lengths = x["logprobs"].requires_grad_(), x["lengths"].long()
    mask = torch.arange(policy.shape[1]) < lengths[:, None]
    one = stub_of_preferences(how, calculate_KL=True)
    one._compute_kl_logps = lambda model, batch: (x["old"] * mask).sum(1)
    ids = torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long)
    loss = KTOTrainer._compute_loss(
        one,
        model_of(policy, mask),
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "completion_mask": torch.nn.functional.pad(mask.long(), (1, 0)),
            "label": x["advantages"] > 0,
            "ref_logps": (x["reference"] * mask).sum(1),
            "ref_KL_logps": (x["reference"] * mask).sum(1) - 0.5,
        },
        False,
    )
    (grad,) = torch.autograd.grad(loss, policy)
    return {"loss": loss.item(), "gradient": grad.tolist()}


def model_of(logprobs: torch.Tensor, mask: torch.Tensor) -> Any:
    """A model whose labels have these log probabilities."""
    zeros = torch.zeros_like(logprobs)
    outputs = types.SimpleNamespace(
        log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
    )
    return lambda **rest: outputs


def stub_of_preferences(how: dict[str, Any], **more: Any) -> Any:
    return types.SimpleNamespace(
        **{"label_smoothing": 0.0} | how | more,
        accelerator=ACCELERATOR,
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": collections.defaultdict(list)},
    )


def main() -> None:
    out: dict[str, Any] = {"versions": {"trl": trl.__version__, "torch": torch.__version__}, "batches": batches()}
    out["grpo"] = [
        {"batch": name, "arguments": ours, **run(GRPOTrainer, stub(**theirs), batch)}
        for ours, theirs in CASES
        for name, batch in batches().items()
    ]
    out["rloo"] = [
        {"batch": name, "arguments": {}, **run(RLOOTrainer, stub("none"), batch)} for name, batch in batches().items()
    ]
    out["pairs"] = [
        {"batch": batch, "loss_of": name, "arguments": ours, "trl": theirs, **of_pairs(batches()[batch], theirs)}
        for name, ours, theirs in PAIRS
        for batch in batches()
    ]
    weights = {"desirable_weight": 0.7, "undesirable_weight": 1.3}
    out["kto"] = [
        {"batch": name, **of_answers(batch, {"loss_type": "kto", "beta": 0.3, **weights})}
        for name, batch in batches().items()
    ]
    OUT.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
