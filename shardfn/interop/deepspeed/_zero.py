"""Section `zero_optimization` of a DeepSpeed configuration: stage, memories and transfers."""

from collections.abc import Mapping
from typing import Any

import torch

from shardfn import core

from ._keys import Reading

_HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}


def read_zero(reading: Reading, axis: str | tuple[str, ...], secondary: str | None, compute: torch.dtype) -> core.Zero:
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
