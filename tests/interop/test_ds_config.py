"""Covers DeepSpeed's configurations as values of ours: every key is reported, and none is skipped in silence."""

import json
import math
import pathlib
import random
import re
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import interop, optim
from shardfn.interop.deepspeed._keys import BATCH, KEYS, TAKEN
from shardfn.testing import distributed

FULL: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2},
    "bf16": {"enabled": False},
    "communication_data_type": "fp32",
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 7}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 10,
        "zero_quantized_weights": True,
    },
    "activation_checkpointing": {"partition_activations": True},
}


def scales(rule: optim.LossScale) -> list[float]:
    """The scale over steps, some of them with overflows."""
    state, out = rule.init(), []
    for n in range(12):
        state = rule.update(state, torch.tensor(n % 3 == 2))
        out.append(float(state.scale))
    return out


def test_a_whole_configuration() -> None:
    recipe = interop.from_deepspeed_config(FULL, ranks=2)
    zero = recipe.zero
    assert (zero.stage, zero.params, zero.optimizer, zero.persist_elements) == (3, "disk", "host", 10)
    assert (zero.optimizer_fraction, zero.travel.gather, zero.pace.prefetch_bytes) == (0.5, "int8", 2000)
    assert zero.disk == sf.Disk("/nvme")
    assert recipe.policy == sf.Policy(torch.float16, torch.float16, torch.float32)
    assert recipe.loss_scale is not None
    assert scales(recipe.loss_scale) == scales(optim.dynamic_loss_scale(2.0**12, hysteresis=3, min_scale=2))
    assert (recipe.num_microbatches, recipe.rows_per_step) == (4, 32)
    told = {row.key for row in recipe.rows}
    for key, value in FULL.items():
        below = [k for k in told if k == key or k.startswith(f"{key}.")]
        assert below, key
        if isinstance(value, dict) and key not in ("optimizer", "scheduler", "activation_checkpointing"):
            for inner in value:
                assert any(k == f"{key}.{inner}" or k.startswith(f"{key}.{inner}.") for k in told), inner
    text = str(recipe)
    assert text.index("taken:") < text.index("no counterpart:") and "another default" not in text
    unsaid = {k: v for k, v in FULL.items() if k != "gradient_clipping"}
    assert "another default here:\n  gradient_clipping" in str(interop.from_deepspeed_config(unsaid, ranks=2))
    assert "overlap_comm" in text and "sf.remat" in text


def test_a_file_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FULL))
    assert str(interop.from_deepspeed_config(path, ranks=2)) == str(interop.from_deepspeed_config(FULL, ranks=2))


def test_every_typo_of_a_letter_is_found() -> None:
    draw = random.Random(0)
    for key in [k for k in KEYS if len(k) > 4]:
        at = draw.randrange(len(key))
        wrong = key[:at] + key[at + 1 :]
        with pytest.raises(ValueError, match=rf"{wrong} is not a key of DeepSpeed. Did you mean"):
            interop.from_deepspeed_config({wrong: 1})


def test_every_known_key_is_explained_or_refused() -> None:
    values: dict[str, Any] = {"optimizer": {"type": "adamw"}, "scheduler": {"type": "WarmupLR"}}
    for key, kind in KEYS.items():
        if kind == TAKEN:
            continue
        config = {key: values.get(key, {} if isinstance(kind, dict) else True)} | (
            {"optimizer": values["optimizer"]} if key == "scheduler" else {}
        )
        try:
            rows = interop.from_deepspeed_config(config).rows
        except ValueError as problem:
            assert f"{key} = True has no counterpart: " in str(problem)
        else:
            assert isinstance(kind, dict) or key in {row.key for row in rows}


@pytest.mark.parametrize(
    ("rows", "micro", "times"),
    [("auto", 4, 2), (16, "auto", 2), (16, 4, "auto"), (16, "auto", None), ("auto", 8, None)],
)
def test_a_size_of_the_batch_that_is_auto_follows_from_the_others(rows: Any, micro: Any, times: Any) -> None:
    named = zip(BATCH, (rows, micro, times), strict=True)
    recipe = interop.from_deepspeed_config({k: v for k, v in named if v is not None}, ranks=2)
    assert (recipe.rows_per_step, recipe.num_microbatches) == (16, 1 if times is None else 2)


def test_an_auto_that_does_not_follow_is_named() -> None:
    config = {BATCH[1]: "auto", BATCH[2]: "auto", "gradient_clipping": "auto"}
    moves = {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    with pytest.raises(ValueError) as problem:
        interop.from_deepspeed_config(config | {"train_batch_size": 16, "zero_optimization": moves}, ranks=2)
    told = str(problem.value)
    for key in (BATCH[1], BATCH[2], "gradient_clipping", "zero_optimization.stage3_prefetch_bucket_size"):
        assert f'  - {key} is "auto"' in told, told
    assert "reduce_bucket_size" not in told  # it changes no value


def test_all_mistakes_are_listed_at_once() -> None:
    config = {
        "train_batch_size": 33,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "communication_data_type": "auto",
        "gradient_clipp1ng": 1.0,
        "gradient_allreduce_op": "sum",
        "amp": {"enabled": True},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "fast", "beta": 0.9, "amsgrad": True, "max_grad_norm": 1.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 3, "warmup_num_steps": 0}},
        "zero_optimization": {
            "stage": 2,
            "overlap_com": True,
            "zenflow": {"topk_ratio": 0.1},
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme"},
            "zero_hpz_partition_size": 8,
        },
    }
    with pytest.raises(ValueError) as problem:
        interop.from_deepspeed_config(config, ranks=2)
    text = str(problem.value)
    for said in (
        "a batch is rows of a microbatch x microbatches x 2 ranks",
        'communication_data_type is "auto"',
        "Did you mean 'gradient_clipping'?",
        "gradient_allreduce_op = 'sum' has no counterpart",
        "amp = {'enabled': True} has no counterpart",
        "only one of them can be true",
        "lr = 'fast' is not a number",
        "params.beta is not an argument of AdamW. Did you mean 'betas'?",
        "amsgrad = True has no counterpart",
        "Clip by gradient_clipping",
        "params.warmup_steps is not an argument of WarmupDecayLR. Did you mean",
        "total_num_steps is missing",
        "warmup_num_steps = 0 is not a number of steps",
        "Did you mean 'overlap_comm'?",
        "zenflow = {'topk_ratio': 0.1} has no counterpart",
        "offload_param wants stage 3, not 2",
        "nvme_path is missing",
        "zero_hpz_partition_size = 8: give nodes an axis of their own",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    ("rows", "micro", "times", "want"),
    [
        (32, 16, 1, (1, 32)),
        pytest.param(32, 8, 2, (2, 32), marks=pytest.mark.nightly),
        pytest.param(33, 17, 2, None, marks=pytest.mark.nightly),
        (32, 18, 1, None),
        pytest.param(32, 16, None, (1, 32), marks=pytest.mark.nightly),
        pytest.param(32, 8, None, (2, 32), marks=pytest.mark.nightly),
        (32, None, 2, (2, 32)),
        pytest.param(None, 8, 2, (2, 32), marks=pytest.mark.nightly),
        pytest.param(None, 8, None, (1, 16), marks=pytest.mark.nightly),
        (32, None, None, (1, 32)),
        pytest.param(None, None, 2, (2, None), marks=pytest.mark.nightly),
        pytest.param(32, 0, 2, None, marks=pytest.mark.nightly),
    ],
)
def test_batch_sizes_on_two_ranks(rows: Any, micro: Any, times: Any, want: Any) -> None:
    given = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": times,
    }
    given = {k: v for k, v in given.items() if v is not None}
    if want is None:
        with pytest.raises(ValueError, match="train_"):
            interop.from_deepspeed_config(given, ranks=2)
        return
    recipe = interop.from_deepspeed_config(given, ranks=2)
    assert (recipe.num_microbatches, recipe.rows_per_step) == want


@pytest.mark.parametrize(
    ("kind", "params", "want"),
    [
        (
            "WarmupLR",
            {"warmup_max_lr": 1.0, "warmup_num_steps": 4},
            [0.0, 0.0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1.0, 1.0],
        ),
        pytest.param(
            "WarmupDecayLR",
            {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_type": "linear", "warmup_max_lr": 1.0},
            [0.0, 0.0, 0.5, 1.0, 0.5, 0.0],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "WarmupCosineLR",
            {"total_num_steps": 4, "warmup_num_steps": 2, "cos_min_ratio": 0.5, "warmup_type": "linear"},
            [0.0, 0.0, 0.25, 0.375, 0.25, 0.25],
            marks=pytest.mark.nightly,
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
            [1.0, 1.0, 2.0, 2.0, 3.0, 3.0],
        ),
    ],
)
def test_rates_by_hand(kind: str, params: dict[str, Any], want: list[float]) -> None:
    scheduler = {"type": kind, "params": params}
    recipe = interop.from_deepspeed_config(
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": scheduler}
    )
    assert [float(recipe.learning_rate(n)) for n in range(6)] == pytest.approx(want)
    assert [float(recipe.learning_rate(torch.tensor(n))) for n in range(6)] == pytest.approx(want)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind",
    [
        "Adam",
        "AdamW",
        "Lamb",
        "Lion",
        "SGD",
        "OneBitAdam",
        "OneBitLamb",
        "ZeroOneAdam",
    ],
)
@distributed(world=2)
def test_a_step_of_every_optimizer(kind: str) -> None:
    torch.manual_seed(0)
    mesh = sf.make_mesh({"dp": 2}, device="cpu")
    more = {"freeze_step": 2} if kind.startswith("OneBit") else {"var_freeze_step": 2} if kind == "ZeroOneAdam" else {}
    config = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0 if more else 0.1,
        "optimizer": {"type": kind, "params": {"lr": 1e-2, **more}},
        "zero_optimization": {"stage": 0 if kind == "ZeroOneAdam" else 1},
    }
    recipe = interop.from_deepspeed_config(config, ranks=2)
    assert recipe.optimizer is not None
    step = sf.sharded_step(
        recipe.of(lambda p, x: (x @ p["w"]).square().mean()), recipe.optimizer, mesh=mesh, zero=recipe.zero
    )
    state = step.init({"w": torch.ones(8, 3)})
    losses = []
    for _ in range(4):
        state, metrics = step(state, torch.linspace(-1, 1, 32).view(4, 8))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


EXPERTS: dict[str, Any] = {
    "expert_parallel": {"enabled": True, "autoep_size": 4, "preset_model": "mixtral", "top_k": "auto"},
    "zero_optimization": {"stage": 1},
}


@pytest.mark.parametrize("data_first, want", [(None, ["dp", "ep"]), (False, ["dp", "ep"]), (True, ["ep", "dp"])])
def test_experts_are_an_exchange_and_axes_of_the_mesh(data_first: Any, want: list[str]) -> None:
    config = EXPERTS | ({} if data_first is None else {"use_data_before_expert_parallelism": data_first})
    recipe = interop.from_deepspeed_config(config, ranks=8, axis=("dp", "ep"))
    assert recipe.exchange == sf.nn.moe.AllToAll("ep")
    assert list(recipe.mesh) == want and recipe.mesh == {"dp": 2, "ep": 4}
    taken = {r.key for r in recipe.rows if r.outcome == "taken"}
    assert {"expert_parallel.enabled", "expert_parallel.autoep_size"} <= taken
    without = interop.from_deepspeed_config({"expert_parallel": {"enabled": False, "autoep_size": 4}})
    assert without.exchange is None and without.mesh == {} and "autoep_size" in str(without)


def test_experts_that_have_no_counterpart_are_named() -> None:
    config: dict[str, Any] = {**EXPERTS}
    config["expert_parallel"] = {
        **EXPERTS["expert_parallel"],
        "autoep_size": 3,
        "score_func": "sigmoid",
        "expert_tensor_parallel_size": 2,
        "load_balance_coeff": 0.1,
        "autoep_sise": 2,
    }
    with pytest.raises(ValueError) as error:
        interop.from_deepspeed_config(config, ranks=8)
    for said in (
        r"score_func = 'sigmoid' has no counterpart: the module's own router",
        "expert_tensor_parallel_size = 2",
        "load_balance_coeff = 0.1",
        "autoep_sise is not a key",
        r"autoep_size = 3: give experts an axis of their own .* axis=\('dp', 'ep'\)",
        "autoep_size = 3 does not divide 8 ranks",
    ):
        assert re.search(said, str(error.value)), said
