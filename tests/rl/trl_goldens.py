"""Writes trl_goldens.json: losses and gradients of TRL 1.16 in float64, of its trainers' own functions on a stub.

PYTHON_WITH_TRL tests/rl/trl_goldens.py
"""

import collections
import functools
import inspect
import json
import math
import pathlib
import textwrap
import types
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]  # of another environment
from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.kto_trainer import KTOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.reward_trainer import RewardTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.rloo_trainer import RLOOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.utils import nanstd  # pyright: ignore[reportMissingImports]

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
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"loss_type": "luspo", "level": "sequence"}),
    ({"loss_type": "sapo"}, {"loss_type": "sapo"}),
    ({"gate": ["Sapo", 0.4, 2.0], "beta": 0.1, "use_bias_correction_kl": False}, {"loss_type": "sapo", "beta": 0.1}),
    ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, {"loss_type": "sapo", "level": "sequence"}),
    ({"loss_type": "vespo"}, {"loss_type": "vespo"}),
    ({"gate": ["Vespo", 1.5, 1.0, 0.5, 2.5]}, {"loss_type": "vespo"}),
    ({"loss_type": "vespo", "sampling": True}, {"loss_type": "vespo"}),
    ({"loss_type": "dapo", "sampling": True}, {"loss_type": "dapo"}),
    ({"loss_type": "dapo", "high_entropy": 0.3}, {"loss_type": "dapo"}),
    ({"loss_type": "grpo", "off_policy": 0.1}, {"loss_type": "grpo"}),
    *(({"loss_type": name, "entropy_coef": 0.05}, {"loss_type": name}) for name in ("dapo", "vespo")),
]
# Losses of pairs by the names of TRL: arguments of `rl.dpo`, and of TRL if they differ.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "sigmoid"}, {}),
    ({"loss_type": "sigmoid"}, {"label_smoothing": 0.2}),  # ignored there
    *(({"loss_type": name}, {}) for name in ("hinge", "ipo", "sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard")),
    *(({"loss_type": name}, {}) for name in ("apo_zero", "apo_down", "discopop", "aot", "aot_unpaired")),
    # "exo_pair" has its constants in float32 there, so its test is by definition.
    *(({"loss_type": name, "label_smoothing": 0.2}, {}) for name in ("robust", "aot", "aot_unpaired")),
    ({"loss_type": "discopop", "discopop_tau": 0.7}, {}),
    ({"loss_type": {"sigmoid": 0.8, "bco_pair": 0.2, "apo_zero": 1.5}}, {}),
    *(
        ({"loss_type": name, "f_divergence_type": kind}, {})
        for name in ("sigmoid", "ipo")
        for kind in ("forward_kl", "js_divergence")
    ),
]
CPO: list[dict[str, Any]] = [
    *({"loss_type": name} for name in ("sigmoid", "hinge", "ipo", "simpo")),
    {"loss_type": "sigmoid", "label_smoothing": 0.2},
    {"loss_type": "simpo", "simpo_gamma": 0.7, "label_smoothing": 0.1},
    {"loss_type": "sigmoid", "alpha": 0.3},
    {"loss_type": "simpo", "alpha": -0.2},
]
REWARDS: list[dict[str, Any]] = [{}, {"margin": True}, {"margin": True, "center_rewards_coefficient": 0.02}]
# Rewards of 4 groups of 3 answers, by two functions, and their aggregations.
TABLE = [[math.sin(1.3 * i), 0.01 * math.cos(2.1 * i)] for i in range(12)]
TABLE[4][0] = math.nan
for _row in (1, 7, 10):  # 9 rows stay: Bessel's correction there is a float32, and 9 / 8 is exact
    TABLE[_row] = [math.nan, math.nan]
AGGREGATIONS = [
    {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "batch"},
    {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group"},
    {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"},
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
    pad_across_processes=lambda x, dim, pad_index: x,
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
    ours: dict[str, Any] | None = None,
) -> Any:
    ours = ours or {}
    kind, *numbers = ours.get("gate", [""])
    how: dict[str, Any] = {"delta": delta, "steps_per_generation": 1}
    how["use_bias_correction_kl"] = ours.get("use_bias_correction_kl", unbiased)
    names = {"": [], "Sapo": ["pos", "neg"], "Vespo": ["k_pos", "lambda_pos", "k_neg", "lambda_neg"]}[kind]
    how |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0}
    how |= {"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    prefix = {"": "", "Sapo": "sapo_temperature_", "Vespo": "vespo_"}[kind]
    how |= {prefix + name: number for name, number in zip(names, numbers, strict=True)}
    return types.SimpleNamespace(
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=high,
        importance_sampling_level=level,
        args=types.SimpleNamespace(**how),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        top_entropy_quantile=ours.get("high_entropy", 1.0),
        off_policy_mask_threshold=ours.get("off_policy"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        use_vllm="sampling" in ours,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled="entropy_coef" in ours,
        entropy_coef=ours.get("entropy_coef", 0.0),
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=4,
        model=types.SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
    )


def entropies_of(x: dict[str, torch.Tensor]) -> torch.Tensor:
    """Numbers in the place of entropies: squares of the log probabilities of the reference."""
    return x["reference"] ** 2


def run(trainer: Any, one: Any, batch: dict[str, Any]) -> dict[str, Any]:
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    logprobs, lengths = x["logprobs"].requires_grad_(), x["lengths"].long()
    mask = (torch.arange(logprobs.shape[1]) < lengths[:, None]).long()
    entropies = entropies_of(x).requires_grad_()
    one._get_per_token_logps_and_entropies = lambda *args, **rest: (logprobs, entropies, None)
    one.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, one)
    ratios = (x["old"] - x["reference"]).exp().clamp(max=2.0)
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
    if getattr(one, "use_vllm", False):
        inputs["importance_sampling_ratio"] = torch.where(mask.bool(), ratios, 1.0)
    loss = trainer._compute_loss(one, one.model, inputs)
    grad, of_entropies = torch.autograd.grad(loss, [logprobs, entropies], allow_unused=True)
    more = {} if of_entropies is None else {"gradient_of_entropies": of_entropies.tolist()}
    return {"loss": loss.item(), "gradient": grad.tolist(), **more}


def of_pairs(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss of DPOTrainer: tokens of the better answers are "logprobs", and those of the others "old"."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    policy, lengths = [x["logprobs"].requires_grad_(), x["old"].requires_grad_()], x["lengths"].long()
    counts = torch.cat((lengths, lengths.flip(0)))
    mask = torch.arange(policy[0].shape[1]) < counts[:, None]
    reference = torch.cat((x["reference"], x["reference"].flip(0)))
    kinds = how["loss_type"] if isinstance(how["loss_type"], dict) else {how["loss_type"]: 1.0}
    one = stub_of_preferences(how, loss_types=[*kinds], loss_weights=[*kinds.values()])
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
    """Returns the loss of KTOTrainer, where answers with a positive advantage are wanted."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    policy, lengths = x["logprobs"].requires_grad_(), x["lengths"].long()
    mask = torch.arange(policy.shape[1]) < lengths[:, None]
    one = stub_of_preferences(how, calculate_KL=how["loss_type"] == "kto")
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


def of_cpo(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss of CPOTrainer, of means over tokens for "simpo"."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    policy, lengths = [x["logprobs"].requires_grad_(), x["old"].requires_grad_()], x["lengths"].long()
    counts = [lengths, lengths.flip(0)]
    sums = [(p * (torch.arange(p.shape[1]) < n[:, None])).sum(1) for p, n in zip(policy, counts, strict=True)]
    given = [s / n for s, n in zip(sums, counts, strict=True)] if how["loss_type"] == "simpo" else sums
    one = types.SimpleNamespace(
        **{"beta": 0.3, "label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0} | how, accelerator=ACCELERATOR
    )
    loss = CPOTrainer.cpo_loss(one, *given)[0].mean()
    return {"loss": loss.item(), "gradients": [grad.tolist() for grad in torch.autograd.grad(loss, policy)]}


def of_rewards(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss of RewardTrainer, where rewards are the first columns of "logprobs" and "old"."""
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in batch.items()}
    rewards = torch.cat((x["logprobs"][:, 0], x["old"][:, 0])).requires_grad_()
    args = types.SimpleNamespace(center_rewards_coefficient=how.get("center_rewards_coefficient"))
    one = types.SimpleNamespace(
        args=args,
        model=types.SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": collections.defaultdict(list)},
    )
    inputs = {"attention_mask": torch.ones(1), **({"margin": x["advantages"].abs()} if "margin" in how else {})}
    model = lambda **rest: types.SimpleNamespace(logits=rewards[:, None])  # noqa: E731
    loss = RewardTrainer.compute_loss(one, model, inputs)
    (grad,) = torch.autograd.grad(loss, rewards)
    return {"loss": loss.item(), "gradient": grad.tolist()}


def of_table(how: dict[str, Any]) -> list[float]:
    """Returns the advantages of GRPOTrainer, by the lines of its source that compute them, and weights 1 and 2."""
    text = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = text.index("        # A completion for which every reward function returned None")
    end = text.index("        # Slice to keep only the local part of the data")
    one = types.SimpleNamespace(**how, reward_weights=torch.tensor([1.0, 2.0]), reward_funcs=[None, None])
    names: dict[str, Any] = {"self": one, "torch": torch, "nanstd": nanstd, "device": "cpu", "num_generations": 3}
    names["rewards_per_func"] = torch.tensor(TABLE, dtype=torch.float64)
    exec(textwrap.dedent(text[start:end]), names)
    return names["advantages"].tolist()


def model_of(logprobs: torch.Tensor, mask: torch.Tensor) -> Any:
    """Returns a model whose labels have these log probabilities."""
    zeros = torch.zeros_like(logprobs)
    outputs = types.SimpleNamespace(
        log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
    )
    return lambda **rest: outputs


def stub_of_preferences(how: dict[str, Any], **more: Any) -> Any:
    return types.SimpleNamespace(
        **{"label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5} | how | more,
        accelerator=ACCELERATOR,
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        args=types.SimpleNamespace(discopop_tau=how.get("discopop_tau", 0.05)),
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": collections.defaultdict(list)},
    )


def _write_cases(value: Any) -> str:
    """Returns JSON with a line for each case."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"


def main() -> None:
    out: dict[str, Any] = {"versions": {"trl": trl.__version__, "torch": torch.__version__}, "batches": batches()}
    out["grpo"] = [
        {"batch": name, "arguments": ours, **run(GRPOTrainer, stub(**theirs, ours=ours), batch)}
        for ours, theirs in CASES
        for name, batch in batches().items()
        if name == "small" or "high_entropy" not in ours  # in "large" values repeat, and the threshold is a value
    ]
    out["rloo"] = [
        {"batch": name, "arguments": {}, **run(RLOOTrainer, stub("none"), batch)} for name, batch in batches().items()
    ]
    out["pairs"] = [
        {"batch": batch, "arguments": ours | {"beta": 0.3}, **of_pairs(batches()[batch], {"beta": 0.3} | ours | theirs)}
        for ours, theirs in PAIRS
        for batch in batches()
    ]
    out["cpo"] = [
        {"batch": name, "arguments": how, **of_cpo(batch, how)} for how in CPO for name, batch in batches().items()
    ]
    out["rewards"] = [
        {"batch": name, "arguments": how, **of_rewards(batch, how)}
        for how in REWARDS
        for name, batch in batches().items()
    ]
    table = [[None if math.isnan(v) else v for v in row] for row in TABLE]
    out["advantages"] = {"table": table, "cases": [{**how, "advantages": of_table(how)} for how in AGGREGATIONS]}
    weights = {"desirable_weight": 0.7, "undesirable_weight": 1.3}
    out["kto"] = [
        {"batch": name, "loss_type": kind, **of_answers(batch, {"loss_type": kind, "beta": 0.3, **weights})}
        for kind in ("kto", "apo_zero_unpaired")
        for name, batch in batches().items()
    ]
    lines = [f"{json.dumps(key)}: {_write_cases(value)}" for key, value in out.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
