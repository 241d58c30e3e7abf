"""`from_deepspeed_config`: a DeepSpeed configuration as the equivalent values of this library."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardfn import core, optim, transforms
from shardfn.nn import moe

from ._keys import BATCH, Reading, ReadKey
from ._rules import read_optimizer, read_schedule

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}
_EXPERT = "enabled", "autoep_size"
_FP16 = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}


@dataclasses.dataclass(frozen=True)
class DeepSpeedRecipe:
    """Contents of a configuration. `str` of the recipe is a table of the keys and the outcomes.

    Attributes:
        optimizer: optimizer with the schedule, after the clipping. None if the configuration has no optimizer.
        zero: ZeRO rule, with the stage and the memories.
        policy: precision. None is the precision of the parameters.
        loss_scale: loss scale, with fp16.
        num_microbatches: number of microbatches of a step (gradient accumulation).
        rows_per_step: number of rows of the global batch. None if the file has no number.
        learning_rate: learning rate of the optimizer, a number or a schedule.
        exchange: exchange of tokens and experts, for `from_module(experts=)`. None without expert parallelism.
        mesh: axes of the mesh in order, for `make_mesh`, with expert parallelism, else empty.
        rows: outcome of each key.
    """

    optimizer: optim.GradientTransformation | None
    zero: core.Zero
    policy: core.Policy | None
    loss_scale: optim.LossScale | None
    num_microbatches: int
    rows_per_step: int | None
    learning_rate: Any
    exchange: moe.Exchange | None
    mesh: dict[str, int]
    rows: tuple[ReadKey, ...]

    def of(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss in the file's precision, over the microbatches, for `sharded_step`."""
        if self.policy is not None:
            loss = transforms.mixed_precision(loss, self.policy, self.loss_scale)
        return loss if self.num_microbatches == 1 else transforms.accumulate(loss, self.num_microbatches)

    def __str__(self) -> str:
        lines = []
        for outcome in ("taken", "another default here", "no counterpart"):
            mine = [r for r in self.rows if r.outcome == outcome]
            lines += [f"{outcome}:", *(f"  {r.key} = {json.dumps(r.value)}: {r.note}" for r in mine)] if mine else []
        return "\n".join(lines)


def from_deepspeed_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    ranks: int = 1,
    axis: str | tuple[str, ...] = "dp",
    secondary_axis: str | None = None,
    expert_axis: str = "ep",
    gradient_clipping: float = 1.0,
) -> DeepSpeedRecipe:
    """Reads a DeepSpeed configuration, with an outcome for every key: see `str` of the result.

    Args:
        config: JSON file, or the contents of the file.
        ranks: number of ranks that cut the batch, to check the batch sizes.
        axis: mesh axes over which ZeRO cuts.
        secondary_axis: axis among these inside a node, for `zero_hpz_partition_size`.
        expert_axis: axis among these that cuts the experts, for `expert_parallel`.
        gradient_clipping: norm if the file has no value. DeepSpeed 0.19.8 then clips to 1.0. Older versions did not
            clip, as with 0.

    Raises:
        ValueError: a key is unknown, would change results and has no counterpart, or has a value out of place. Lists
            every such key.

    Example:
        >>> recipe = from_deepspeed_config(
        ...     {
        ...         "train_batch_size": 8,
        ...         "gradient_accumulation_steps": 2,
        ...         "bf16": {"enabled": True},
        ...         "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        ...         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        ...     },
        ...     ranks=4,
        ... )
        >>> recipe.zero.stage, recipe.zero.optimizer, recipe.policy.compute, recipe.num_microbatches
        (3, 'host', torch.bfloat16, 2)
    """
    had = config if isinstance(config, Mapping) else json.loads(pathlib.Path(config).read_text())
    reading = Reading(had)
    steps = _read_batch(reading, ranks)
    policy, scale = _read_precision(reading)
    zero = _read_zero(reading, axis, secondary_axis, torch.float32 if policy is None else policy.compute)
    rule, rate = _read_optimizer(reading, axis, gradient_clipping)
    exchange, mesh = _read_experts(reading, ranks, axis, expert_axis)
    core.raise_all(ValueError, "this DeepSpeed configuration cannot be taken unchanged:", reading.problems)
    return DeepSpeedRecipe(rule, zero, policy, scale, *steps, rate, exchange, mesh, tuple(reading.rows))


def _read_batch(reading: Reading, ranks: int) -> tuple[int, int | None]:
    """Returns the microbatches of a step, and the rows of the global batch."""
    rows, micro, times = (reading.read_number(reading.config, n, "", None) for n in BATCH)
    given = {n: reading.config[n] for n in BATCH if n in reading.config}
    reading.problems += _undetermined_sizes(given, ranks)
    if any(x == 0 for x in (rows, micro, times)):
        reading.problems.append(f"{given}: none of them may be 0")
        return 1, None
    if times is None:
        times = 1
        if rows is not None and micro is not None and rows % (micro * ranks) == 0:
            times = rows // (micro * ranks)
    if rows is None and micro is not None:
        rows = micro * times * ranks
    fits = rows is None or (rows % (times * ranks) == 0 and micro in (None, rows // (times * ranks)))
    if not fits:
        reading.problems.append(f"{given}: a batch is rows of a microbatch x microbatches x {ranks} ranks")
    for name, value in given.items():
        reading.note_taken(name, value, f"{times} microbatches of a step over {ranks} ranks: `accumulate`")
    return times, rows


def _read_precision(reading: Reading) -> tuple[core.Policy | None, optim.LossScale | None]:
    """Returns the policy, and with fp16 the loss scale."""
    half, brain = reading.find_section("fp16"), reading.find_section("bf16")
    for name, section in (("fp16", half), ("bf16", brain)):
        if "enabled" in section:
            reading.note_taken(f"{name}.enabled", section["enabled"], "`mixed_precision`")
    if half.get("enabled") and brain.get("enabled"):
        reading.problems.append("fp16.enabled and bf16.enabled: only one of them can be true")
    compute = torch.float16 if half.get("enabled") else torch.bfloat16 if brain.get("enabled") else None
    dtypes = {}
    for key, section, field in (
        ("communication_data_type", reading.config, "reduce"),
        ("grad_accum_dtype", reading.find_section("data_types"), "accum"),
    ):
        name = section.get(key)
        if name is not None and name not in _DTYPES:
            reading.problems.append(f"{key} = {name!r} is not one of {', '.join(_DTYPES)}")
        elif name is not None:
            dtypes[field] = _DTYPES[name]
            reading.note_taken(key, name, f"`Policy({field}={_DTYPES[name]})`")
    if compute is None:
        return (core.Policy(**dtypes, master=None) if dtypes else None), None
    if "reduce" not in dtypes:
        reading.note_default(
            "communication_data_type", None, f"gradients travel in {compute}, and are added up in fp32"
        )
    policy = core.Policy(param=compute, compute=compute, reduce=dtypes.pop("reduce", compute), **dtypes)
    return policy, _read_loss_scale(reading, half) if compute is torch.float16 else None


def _read_loss_scale(reading: Reading, half: Mapping[str, Any]) -> optim.LossScale | None:
    known = {
        k: reading.read_number(half, k, "fp16.", v, (int, float)) for k, v in _FP16.items() if not isinstance(v, bool)
    }
    for key in _FP16:
        if key in half:
            reading.note_taken(f"fp16.{key}", half[key], "`optim.static_loss_scale` or `dynamic_loss_scale`")
    if not reading.find_section("zero_optimization").get("stage"):
        note = "it is kept to at every stage; DeepSpeed does not read it at stage 0"
        reading.note_default("fp16.hysteresis", known["hysteresis"], note)
    if known["loss_scale"]:
        return optim.static_loss_scale(known["loss_scale"])
    return optim.dynamic_loss_scale(
        2.0 ** known["initial_scale_power"],
        window=known["loss_scale_window"],
        hysteresis=known["hysteresis"],
        consecutive=bool(half.get("consecutive_hysteresis", False)),
        min_scale=known["min_loss_scale"],
    )


def _read_experts(
    reading: Reading, ranks: int, axis: str | tuple[str, ...], expert_axis: str
) -> tuple[moe.Exchange | None, dict[str, int]]:
    """Returns the exchange of tokens and experts, and the axes of the mesh."""
    had, first = reading.find_section("expert_parallel"), "use_data_before_expert_parallelism"
    size = reading.read_number(had, "autoep_size", "expert_parallel.", 1)
    data_outside = not reading.config.get(first)
    if first in reading.config:
        order = "next to each other" if data_outside else "apart by the number of copies"
        reading.note_taken(
            first, reading.config[first], f"ranks that share experts are {order}: the order of the mesh's axes"
        )
    if not had.get("enabled"):
        reading.rows += [ReadKey(f"expert_parallel.{k}", x, "taken", "off") for k, x in had.items() if k in _EXPERT]
        return None, {}
    axes = (axis,) if isinstance(axis, str) else axis
    others = [a for a in axes if a != expert_axis]
    if len(others) != 1 or expert_axis not in axes:
        reading.problems.append(
            f"expert_parallel.autoep_size = {size}: give experts an axis of their own beside that of the data, as"
            f" in axis=('dp', {expert_axis!r})"
        )
    if size < 1 or ranks % size:
        reading.problems.append(f"expert_parallel.autoep_size = {size} does not divide {ranks} ranks. Pass ranks=")
    if reading.problems:
        return None, {}
    sizes = {others[0]: ranks // size, expert_axis: size}
    mesh = sizes if data_outside else dict(reversed(sizes.items()))
    note = f"`nn.moe.AllToAll({expert_axis!r})` on `make_mesh({mesh})`"
    reading.rows += [ReadKey(f"expert_parallel.{k}", had[k], "taken", note) for k in _EXPERT if k in had]
    return moe.AllToAll(expert_axis), mesh


def _read_optimizer(
    reading: Reading, axis: str | tuple[str, ...], default_clip: float
) -> tuple[optim.GradientTransformation | None, Any]:
    """Returns the optimizer after the clipping, and the rate."""
    clip = reading.read_number(reading.config, "gradient_clipping", "", default_clip, (int, float))
    if "gradient_clipping" in reading.config:
        reading.note_taken("gradient_clipping", clip, f"`optim.clip_by_global_norm({clip})`" if clip else "off")
    else:
        reading.note_default(
            "gradient_clipping", None, f"clipped to {clip}: pass gradient_clipping=" if clip else "off"
        )
    had, planned = reading.find_section("optimizer"), reading.find_section("scheduler")
    if "type" not in had:
        if planned:
            reading.problems.append("scheduler is there without an optimizer: its rates belong to one")
        return None, None
    made, lr, wrong = read_optimizer(str(had["type"]), had.get("params") or {}, axis)
    reading.problems += wrong
    rate: Any = lr
    if "type" in planned:
        schedule, wrong = read_schedule(str(planned["type"]), planned.get("params") or {}, lr)
        reading.problems += wrong
        rate = schedule
        reading.note_taken("scheduler", planned, "a schedule: the rate of the optimizer")
    reading.note_taken("optimizer", had, "`sf.optim`")
    if made is None or rate is None:
        return None, rate
    return (optim.chain(optim.clip_by_global_norm(clip), made(rate)) if clip else made(rate)), rate


def _undetermined_sizes(given: Mapping[str, Any], ranks: int) -> list[str]:
    """Returns the sizes of a batch that are "auto" and do not follow from other sizes."""
    auto = [name for name in BATCH if given.get(name) == "auto"]
    rows, micro, _ = (name in given and name not in auto for name in BATCH)
    # Microbatches that are not mentioned are 1.
    known = {
        BATCH[0]: micro and BATCH[2] not in auto,
        BATCH[1]: rows and BATCH[2] not in auto,
        BATCH[2]: rows and micro,
    }
    return [
        f'{name} is "auto", and does not follow from the other two. Give a value'
        f" ({BATCH[0]} = {BATCH[1]} x {BATCH[2]} x {ranks} ranks)"
        for name in auto
        if not known[name]
    ]


_HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}


def _read_zero(reading: Reading, axis: str | tuple[str, ...], secondary: str | None, compute: torch.dtype) -> core.Zero:
    """Returns the stage, and the memories of parameters and optimizer state."""
    had = reading.find_section("zero_optimization")
    stage = reading.read_number(had, "stage", "zero_optimization.", 0)
    if stage > 3:
        reading.problems.append(f"zero_optimization.stage = {stage}: there are stages 0 to 3")
        stage = 0
    homes, directories = {}, set()
    for name, field, old in (
        ("offload_param", "params", "cpu_offload_param"),
        ("offload_optimizer", "optimizer", "cpu_offload"),
    ):
        section = had.get(name) if isinstance(had.get(name), dict) else {}
        aliases = (old, "cpu_offload_params") if field == "params" else (old,)
        device = (section or {}).get("device", "cpu" if any(had.get(x) for x in aliases) else "none")
        if device not in _HOMES:
            reading.problems.append(f"zero_optimization.{name}.device = {device!r} is not one of {', '.join(_HOMES)}")
            continue
        homes[field] = _HOMES[device]
        directories |= {str((section or {}).get("nvme_path"))} if device == "nvme" else set()
        if name in had or any(x in had for x in aliases):
            reading.note_taken(
                f"zero_optimization.{name}", had.get(name, device), f"`Zero({field}={_HOMES[device]!r})`"
            )
    if not core.is_device(homes.get("params", "device")) and stage < 3:
        reading.problems.append(f"zero_optimization.offload_param wants stage 3, not {stage}: DeepSpeed passes it over")
    if directories and (len(directories) > 1 or "None" in directories):
        reading.problems.append("nvme_path is missing, or differs between parameters and optimizer state")
    disk = core.Disk(min(directories)) if directories else None
    more = _read_transfers(reading, had, stage, secondary, compute)
    try:
        return core.Zero(stage, axis, **homes, **more, disk=disk)
    except (TypeError, ValueError) as problem:
        reading.problems.append(f"zero_optimization: {problem}")
        return core.Zero()


def _read_transfers(
    reading: Reading, had: Mapping[str, Any], stage: int, secondary: str | None, compute: torch.dtype
) -> dict[str, Any]:
    """Returns the options of transfers, such as thresholds, sizes, codes and prefetch."""
    at, out, travel = "zero_optimization.", {}, {}
    if "stage" in had:
        reading.note_taken(f"{at}stage", stage, f"`Zero(stage={stage})`")
    persist = reading.read_number(had, "stage3_param_persistence_threshold", at, None)
    if persist is not None:
        reading.note_taken(f"{at}stage3_param_persistence_threshold", persist, f"`Zero(persist_elements={persist})`")
        out["persist_elements"] = persist
    elif stage == 3:
        note = f"leaves of up to {core.Zero.persist_elements:,} elements are kept whole: DeepSpeed 100,000"
        reading.note_default(f"{at}stage3_param_persistence_threshold", None, note)
    ahead = reading.read_number(had, "stage3_prefetch_bucket_size", at, None)
    if ahead is not None:
        out["pace"] = core.Pace(prefetch_bytes=int(ahead) * compute.itemsize)
        note = f"`Pace(prefetch_bytes={out['pace'].prefetch_bytes})`"
        reading.note_taken(f"{at}stage3_prefetch_bucket_size", ahead, note)
    for key, field, code in (
        ("zero_quantized_weights", "gather", "int8"),
        ("zero_quantized_gradients", "reduce", "int4"),
    ):
        if key in had:
            travel |= {field: code} if had[key] else {}
            reading.note_taken(f"{at}{key}", had[key], f"`Travel({field}={code!r})`" if had[key] else "off")
    hpz = reading.read_number(had, "zero_hpz_partition_size", at, 1)
    if hpz > 1 and secondary is None:
        reading.problems.append(
            f"{at}zero_hpz_partition_size = {hpz}: give nodes an axis of their own, as in make_mesh({{'node': -1,"
            f" 'dp': {hpz}}}), and pass axis=('node', 'dp'), secondary_axis='dp'"
        )
    elif hpz > 1:
        travel["secondary_axis"] = secondary
        reading.note_taken(
            f"{at}zero_hpz_partition_size", hpz, f"`Travel(secondary_axis={secondary!r})`, of {hpz} ranks"
        )
    ratio = (
        (had.get("offload_optimizer") or {}).get("ratio") if isinstance(had.get("offload_optimizer"), dict) else None
    )
    if ratio is not None:
        out["optimizer_fraction"] = ratio
        reading.note_taken(f"{at}offload_optimizer.ratio", ratio, f"`Zero(optimizer_fraction={ratio})`")
    return out | ({"travel": core.Travel(**travel)} if travel else {})
