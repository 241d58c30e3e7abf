"""The model of `shardfn finetune`: made without weights, with the loss, first parameters and specs."""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.core import Mesh, P, Policy, PyTree, Sharding, key
from shardfn.data import pad
from shardfn.interop import module_from_hf, without_weights
from shardfn.interop.quantized import can_decode, read_quantization
from shardfn.kernels import GROUP
from shardfn.lora import LoRA
from shardfn.transforms import WeightedMean, accumulate, from_module, mixed_precision, partition, propose_specs

from ._finetune_job import FinetuneJob


class Trained(NamedTuple):
    """Model, made without weights, with the functions and leaves for a step.

    Attributes:
        module: module of the model.
        loss: `loss(params, batch)`.
        params: first parameters, deferred.
        specs: specs of the parameters.
        lora: adapters, or None where all weights are trained.
    """

    module: Any
    loss: Callable[..., Any]
    params: PyTree
    specs: PyTree
    lora: LoRA | None


def load_model(job: FinetuneJob, mesh: Mesh) -> Trained:
    """Makes the model of a job. The weights are read when the step is initialised.

    Raises:
        ValueError: the files do not fit the model, or adapters cannot be made. The message lists all.
    """
    module = _empty_module(job)
    params, (_, apply) = module_from_hf(module, job.model), from_module(module)

    def batch_loss(params: PyTree, batch: PyTree) -> WeightedMean:
        inputs = {"input_ids": batch["tokens"], "labels": batch["labels"], "attention_mask": batch["attention_mask"]}
        out = apply(params, **inputs, use_cache=False, num_items_in_batch=1)  # of a sum, divided by 1
        return WeightedMean(out.loss, batch["weight"].sum())

    cut = mesh.axis_size("tp") > 1
    specs: Any = P()
    if cut:
        rows = -(-job.batch // mesh.axis_size("dp") // job.accumulate)
        specs = propose_specs(batch_loss, dict(module.named_parameters()), mesh, pad(job.length)([[0]] * rows))
    lora = None
    if job.lora:
        targets, transposed = _lora_targets(module)
        codes: Any = job.codes or None
        lora = LoRA.of(
            params, targets, rank=job.lora, alpha=job.lora_alpha or None, fan_in_fan_out=transposed, codes=codes
        )
        if codes:
            specs = _quantized_specs(specs, lora, mesh.axis_size("tp")) if cut else lora.base_specs
        specs = {"base": specs, "lora": P()}  # `partition` finds out how adapters next to cut leaves are used
    whole = batch_loss if lora is None else lora.adapt(batch_loss)
    whole = partition(whole) if cut else whole
    whole = mixed_precision(whole, Policy.bf16()) if job.precision == "bf16" else whole
    whole = accumulate(whole, job.accumulate) if job.accumulate > 1 else whole
    first = params if lora is None else {"base": params, "lora": lora.init(key(job.seed))}
    return Trained(module, whole, first, specs, lora)


def load_part(name: str, source: Any, load: Callable[[Any], Any]) -> Any:
    """Returns what a function of transformers loads.

    Args:
        name: words for the part.
        source: argument of the function.
        load: function of transformers, which may raise anything for unknown files.

    Raises:
        ValueError: the function raised. The message is included.
    """
    try:
        return load(source)
    except Exception as error:
        raise ValueError(f"MODEL: transformers cannot load its {name}: {type(error).__name__}: {error}") from error


def _empty_module(job: FinetuneJob) -> Any:
    import transformers

    config = load_part("config.json", job.model, transformers.AutoConfig.from_pretrained)
    if can_decode(read_quantization(job.model)):  # read as floats, into a module of plain layers
        del config.quantization_config
    with without_weights():
        module: Any = load_part("model", config, transformers.AutoModelForCausalLM.from_config)
    if pathlib.Path(job.model, "generation_config.json").is_file():
        module.generation_config = transformers.GenerationConfig.from_pretrained(job.model)
    module.train(job.remat)  # else dropout is off
    if job.remat:
        # The first name is for transformers 5.24 and later. The second name is gone in 6.
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable()
    return module


def _lora_targets(module: Any) -> tuple[list[str], bool]:
    """Returns patterns of all linear layers but the head, and whether the weights are `[in, out]`."""
    head = module.get_output_embeddings()
    kinds = {path: type(sub).__name__ for path, sub in module.named_modules() if sub is not head}
    paths = [path for path, kind in kinds.items() if kind in ("Linear", "Conv1D")]
    own = {kinds[path] for path in paths}
    if len(own) != 1:
        raise ValueError(
            f"--lora: the layers of a {type(module).__name__} are of the kinds {sorted(own)}, and one of Linear or"
            " Conv1D is needed; write the run with sf.lora.LoRA.of (docs/lora.md)."
        )
    return [f"^{re.escape(path)}\\.weight$" for path in paths], own == {"Conv1D"}


def _quantized_specs(specs: Mapping[str, P], lora: LoRA, num: int) -> dict[str, P | Sharding]:
    """Returns the specs of a base whose weights with an adapter are in codes.

    A cut of the last dim between elements with a shared scale becomes a cut of dim 0.

    Args:
        specs: specs by name.
        lora: adapters with the codes.
        num: ranks along `tp`.
    """

    def quantized_spec(name: str, spec: P) -> P | Sharding:
        if name not in lora.sites:
            return spec
        *first, last = lora.sites[name].shape
        apart = "tp" in spec.dim_axes(len(first)) and last % (num * GROUP)
        return Sharding(P("tp") if apart else spec, codes=lora.codes)

    return {name: quantized_spec(name, spec) for name, spec in specs.items()}
