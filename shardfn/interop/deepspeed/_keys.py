"""Keys of DeepSpeed's configuration, 0.19: taken, without a counterpart, or refused.

A `str` is the reason why a key has no counterpart: the key changes no computed value, or is set elsewhere here. A
`Refused` key changes computed values, and is refused unless the value turns the key off.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardfn.core import did_you_mean


class Refused(NamedTuple):
    """Key that changes computed values in a way without a counterpart here.

    Attributes:
        why: alternative here.
        off: values with which the key does nothing.
    """

    why: str
    off: tuple[Any, ...] = (None, False, 0, "none")


TAKEN = "taken"
_TELLS = "logs: `sf.metrics.Logger(sinks=[TensorBoard(), WandB(), CSV()])`, your own prints, a profiler"
_MOVES = "how transfers are cut and when they move is `Zero(travel=, pace=)`; values are the same"
_PINNED = "host memory is always page-locked where there is a device"
_LOADER = "data is the caller's: `sf.data`"
_FILES = "checkpoints are `sf.checkpoint`: one format for every mesh"
_DTYPE = "dtypes are the policy's: `Policy(master=, accum=)`"

_OFFLOAD = {
    "device": TAKEN,
    "nvme_path": TAKEN,
    "buffer_count": _MOVES,
    "buffer_size": _MOVES,
    "max_in_cpu": _MOVES,
    "pin_memory": _PINNED,
}
_ZERO: dict[str, Any] = {
    "stage": TAKEN,
    "offload_param": _OFFLOAD,
    "offload_optimizer": _OFFLOAD
    | {
        "ratio": TAKEN,
        "pipeline_read": "reads and writes of the disk always run beside the update",
        "pipeline_write": "reads and writes of the disk always run beside the update",
        "pipeline": "reads and writes of the disk always run beside the update",
        "fast_init": "states are made where they stay",
        "super_offload": Refused("the optimizer's state on the host is updated there: leave it out"),
        "cpuadam_cores_perc": "threads are torch's: torch.set_num_threads",
    },
    "cpu_offload": TAKEN,
    "cpu_offload_params": TAKEN,
    "cpu_offload_param": TAKEN,
    "cpu_offload_use_pin_memory": _PINNED,
    "stage3_param_persistence_threshold": TAKEN,
    "stage3_prefetch_bucket_size": TAKEN,
    "zero_hpz_partition_size": TAKEN,
    "zero_quantized_weights": TAKEN,
    "zero_quantized_gradients": TAKEN,
    "zero_quantized_nontrainable_weights": Refused("leaves that are not trained travel as the others do: leave it out"),
    "zenflow": Refused("updates that are spread over steps are `sf.optim.delayed`"),
    "mics_shard_size": Refused(
        "shard over an inner axis: `Zero(axis='inner')` on a mesh {'outer': .., 'inner': ..}", (-1, None)
    ),
    "mics_hierarchical_params_gather": Refused("a gather in two hops is `Travel(secondary_axis=)`"),
    "elastic_checkpoint": _FILES,
    "load_from_fp32_weights": "a restore takes masters where there are any",
    "gather_16bit_weights_on_model_save": _FILES,
    "stage3_gather_16bit_weights_on_model_save": "`interop.gpt_to_hf`, `module_to_hf` write whole weights",
    "stage3_gather_fp16_weights_on_model_save": "`interop.gpt_to_hf`, `module_to_hf` write whole weights",
    "ignore_unused_parameters": "a parameter that a loss does not use has a gradient of 0",
    "legacy_stage1": _MOVES,
    "round_robin_gradients": _MOVES,
    "compute_grad_norm": "a norm is computed where something asks for it",
    "memory_efficient_linear": "`sf.remat` decides which tensors a layer keeps for its backward",
    "save_muon_momentum_buffer_in_memory": "there is no Muon yet",
    "leaf_module": "leaves are gathered in the order in which the loss uses them",
    "pipeline_loading_checkpoint": _FILES,
    "override_module_apply": "parameters are made by a function of your own: `step.init`",
    "log_trace_cache_warnings": _TELLS,
    "enable_sanity_checks": "checks are always on",
}
_ZERO |= dict.fromkeys(
    (
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions"
        " allgather_bucket_size overlap_comm sub_group_size stage3_model_persistence_threshold"
        " stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold"
        " stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential parameter_alignment"
    ).split(),
    _MOVES,
)

_FOUND = "experts are found by transformers' own table: `sf.from_module(experts=)`"
_ROUTER = Refused("the module's own router chooses. Set it in the module's config", (None, "auto"))
_EXPERTS: dict[str, Any] = {
    "enabled": TAKEN,
    "autoep_size": TAKEN,
    "expert_tensor_parallel_size": Refused("cut the features of experts by their specs", (None, 0, 1)),
    "load_balance_coeff": Refused("add a balance loss: `sf.nn.moe.balance`", (None, 0)),
    "route_norm": _ROUTER,
    "route_scale": Refused(_ROUTER.why, (None, 1.0)),
    "routed_scaling_factor": _ROUTER,
    "score_apply": _ROUTER,
    "score_func": _ROUTER,
    "top_k": _ROUTER,
    "num_expert_groups": _ROUTER,
    "num_limited_groups": _ROUTER,
    "combine_impl": "sums are in the order of a token's choices",
    "use_grouped_mm": "the kernel is chosen by the device",
    "disable_triton_grouped_mm": "the kernel is chosen by the device",
    "validate_folding_routing": "all ranks check each exchange",
    **dict.fromkeys(
        (
            "preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3"
            " num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern"
        ).split(),
        _FOUND,
    ),
}
KEYS: dict[str, Any] = {
    "train_batch_size": TAKEN,
    "train_micro_batch_size_per_gpu": TAKEN,
    "gradient_accumulation_steps": TAKEN,
    "managed_gradient_accumulation": "a step takes the whole batch",
    "gradient_clipping": TAKEN,
    "optimizer": {"type": TAKEN, "params": TAKEN, "legacy_fusion": "there is one implementation of each rule"},
    "scheduler": {"type": TAKEN, "params": TAKEN},
    "zero_optimization": _ZERO,
    "bf16": {
        "enabled": TAKEN,
        "check_overflow": Refused("pass `sharded_step(skip_nonfinite=True)`, and leave it out"),
        "immediate_grad_update": "gradients are added up in `Policy.accum`",
        "bf16_master_weights_and_grads": Refused("pass a policy of your own: `sf.Policy(master=None)`"),
        "bf16_optimizer_states": Refused("pass a policy of your own: `sf.Policy(master=None)`"),
    },
    "fp16": {
        **dict.fromkeys(
            (
                "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis"
                " min_loss_scale"
            ).split(),
            TAKEN,
        ),
        "auto_cast": "inputs of floats are computed with in the policy's dtype",
        "fp16_master_weights_and_grads": Refused("pass a policy of your own: `sf.Policy(master=None)`"),
    },
    "data_types": {
        "grad_accum_dtype": TAKEN,
        "param_dtype": _DTYPE,
        "buffer_dtype": _DTYPE,
        "keep_in_fp32_modules": "leaves of another dtype are `Policy(exceptions=)`",
    },
    "communication_data_type": TAKEN,
    "seq_parallel_communication_data_type": "messages between ranks of a sequence are in the dtype of the activations",
    "gradient_allreduce_op": Refused(
        "a loss is the mean over the global batch; multiply it by the number of ranks", ("mean",)
    ),
    "prescale_gradients": "the mean is the same but for rounding",
    "gradient_predivide_factor": "the mean is the same but for rounding",
    "sparse_gradients": "gradients are dense",
    "zero_allow_untested_optimizer": "every rule runs under every stage",
    "zero_force_ds_cpu_optimizer": "a state on the host is updated there by the same rule",
    "torch_autocast": Refused("dtypes by leaf are a policy's: use bf16 or fp16", (None, False, {"enabled": False})),
    "amp": Refused("use bf16 or fp16", (None, False, {"enabled": False})),
    "activation_checkpointing": "wrap the loss: `sf.remat(loss)`, `sf.offload(loss)`",
    "tensor_parallel": "`specs=` and an axis of the mesh; `sf.partition(loss, axes='tp')` for an unchanged loss",
    "expert_parallel": _EXPERTS,
    "use_data_before_expert_parallelism": TAKEN,
    "pipeline": "`sf.pipeline`, `sf.pipeline_module`",
    "compile": "`sf.jit(loss)`",
    "checkpoint": _FILES,
    "nebula": _FILES,
    "datastates_ckpt": _FILES,
    "aio": "how files are read and written is `memory`'s matter; where they are, `sf.Disk`",
    "dataloader_drop_last": _LOADER,
    "data_efficiency": Refused("order and length of the data are the caller's", (None, {"enabled": False})),
    "curriculum_learning": Refused("order and length of the data are the caller's", (None, {"enabled": False})),
    "progressive_layer_drop": Refused("dropping layers is the loss's own matter", (None, {"enabled": False})),
    "eigenvalue": Refused("there is no counterpart", (None, {"enabled": False})),
    "compression_training": Refused("quantising and pruning are the loss's own matter", (None, {})),
    "quantize_training": Refused("quantising is the loss's own matter", (None, {"enabled": False})),
    "weight_quantization": Refused("weights of 8 bits travel only: `Travel(gather='int8')`"),
    "sparse_attention": Refused("layouts are the model's: `sf.nn.layouts`"),
    "elasticity": "a job of any number of ranks is `Zero(reduction='canonical')` and torchrun: docs/elastic.md",
    "autotuning": "`shardfn plan --search`",
    "hybrid_engine": "there is no generation engine yet",
    "vocabulary_size": "shapes that no size divides are handled",
    "disable_allgather": _MOVES,
}
KEYS["bfloat16"] = KEYS["bf16"]
KEYS |= dict.fromkeys(
    (
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_python_gc log_level timers"
        " flops_profiler tensorboard wandb csv_monitor comet comms_logger monitor_config"
    ).split(),
    _TELLS,
)


# Sizes of a batch: an "auto" size follows from the other sizes.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class ReadKey(NamedTuple):
    """Outcome of a key.

    Attributes:
        key: key as in the file, with dots.
        value: value in the file.
        outcome: "taken", "another default here", or "no counterpart".
        note: counterpart, or the reason why there is no counterpart.
    """

    key: str
    value: Any
    outcome: str
    note: str


def read_keys(config: Any, known: dict[str, Any] = KEYS, at: str = "") -> tuple[list[ReadKey], list[str]]:
    """Returns the keys without a counterpart, and the problems with unknown or refused keys."""
    rows: list[ReadKey] = []
    problems: list[str] = []
    for key, value in config.items():
        path, kind = f"{at}{key}", known.get(key)
        if kind is None:
            problems.append(f"{path} is not a key of DeepSpeed.{did_you_mean(key, known)}")
        elif value == "auto" and key in BATCH:
            continue  # derived from the other sizes
        elif value == "auto" and _is_needed(kind):
            problems.append(f'{path} is "auto", which transformers\' Trainer fills in. Give a value')
        elif isinstance(kind, dict):
            if not isinstance(value, dict):
                problems.append(f"{path} is {value!r}, and is to be an object")
                continue
            below, wrong = read_keys(value, kind, f"{path}.")
            rows += below
            problems += wrong
        elif isinstance(kind, Refused):
            if value in kind.off:
                rows.append(ReadKey(path, value, "no counterpart", "it is off"))
            else:
                problems.append(f"{path} = {value!r} has no counterpart: {kind.why}")
        elif kind != TAKEN:
            rows.append(ReadKey(path, value, "no counterpart", kind))
    return rows, problems


def _is_needed(kind: Any) -> bool:
    """Returns whether a value is needed that DeepSpeed does not choose."""
    return kind == TAKEN or isinstance(kind, dict) or (isinstance(kind, Refused) and "auto" not in kind.off)


class Reading:
    """Configuration during the reading: the outcomes of the keys, and the problems.

    Args:
        config: contents of the file.

    Attributes:
        config: contents with the newest name of each section.
        rows: outcome of each key.
        problems: problems found so far.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        if "bfloat16" in self.config:
            self.config.setdefault("bf16", self.config["bfloat16"])
        self.rows, self.problems = read_keys(config)

    def find_section(self, name: str) -> dict[str, Any]:
        """Returns a section, empty if missing."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def note_taken(self, key: str, value: Any, note: str) -> None:
        """Records a key with a counterpart here."""
        self.rows.append(ReadKey(key, value, "taken", note))

    def note_default(self, key: str, value: Any, note: str) -> None:
        """Records a key with another default here."""
        self.rows.append(ReadKey(key, value, "another default here", note))

    def read_number(self, section: Mapping[str, Any], key: str, at: str, otherwise: Any, kind: Any = int) -> Any:
        """Returns a number of a section, or `otherwise` with a problem where the value is not a number."""
        value = section.get(key, otherwise)
        if value is None or (isinstance(value, kind) and not isinstance(value, bool) and value >= 0):
            return value
        if value != "auto":  # which is reported already
            self.problems.append(f"{at}{key} = {value!r} is not a number")
        return otherwise
