"""Checks of an engine's arguments: decoder and limits, weights, and keywords of vLLM and SGLang."""

from typing import Any

import torch

from shardfn.core import Axes, Mesh, P, PyTree, explains_keywords, raise_all, tree_leaves, tree_paths

from ._cache import DTYPES
from ._decoder import Decoder
from ._limits import Limits

# Keywords of vLLM and SGLang, and their counterparts here.
MEANT_BY_LIMITS = {
    "age": "starvation_steps={value!r}",
    "max_num_seqs": "running={value!r}",
    "max_running_requests": "running={value!r}",
    "max_model_len": "context={value!r}",
    "context_length": "context={value!r}",
    "block_size": "block={value!r}",
    "page_size": "block={value!r}",
    "kv_cache_dtype": "cache_dtype={value!r}",
    "max_num_batched_tokens": "buckets=({value!r},), the numbers of rows of a step",
    "chunked_prefill_size": "buckets=({value!r},), the numbers of rows of a step",
    "gpu_memory_utilization": "cache_bytes=, the bytes of the cache",
    "mem_fraction_static": "cache_bytes=, the bytes of the cache",
    "kv_cache_memory_bytes": "cache_bytes={value!r}",
}
MEANT = {name: f"limits=limits_of(decoder, {text.partition(',')[0]})" for name, text in MEANT_BY_LIMITS.items()} | {
    "max_num_batched_tokens": "limits=limits_of(decoder, buckets=({value!r},))",
    "chunked_prefill_size": "limits=limits_of(decoder, buckets=({value!r},))",
    "model": "Engine(*hf_decoder(model)) for a model of transformers",
    "tensor_parallel_size": "mesh=make_mesh({{'tp': {value!r}}}), with decoder(config, tp='tp'), one process a rank",
    "tp_size": "mesh=make_mesh({{'tp': {value!r}}}), with decoder(config, tp='tp'), one process a rank",
    "dtype": "the parameters in that dtype: the engine computes in theirs",
    "enable_lora": "adapters=, by name",
    "lora_modules": "adapters=, by name",
    "speculative_config": "drafter=",
    "swap_space": "cache='host'",
    "cpu_offload_gb": "weights='host'",
    "enable_prefix_caching": "nothing: requests always share blocks of equal content",
    "enable_chunked_prefill": "nothing: long prompts are always computed in chunks",
    "enable_return_routed_experts": "record_experts={value!r}",
    "routes": "record_experts={value!r}",
    "seed": "Sampling(seed={value!r}): each request has its own",
}


@explains_keywords(**MEANT_BY_LIMITS)
def limits_of(decoder: Decoder, *, context: int | None = None, cache_bytes: int = 1 << 30, **sizes: Any) -> Limits:
    """Returns the sizes of an engine for a model.

    Args:
        decoder: model.
        context: most tokens of a sequence. Default: the model's.
        cache_bytes: most bytes of the KV cache, on all ranks together. Fewer if all sequences that run need less.
        **sizes: other fields of `Limits`.

    Raises:
        ValueError: a size is out of range, or the cache has no room for a single sequence.

    Example:
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64)
        >>> limits_of(decoder(config), running=2).blocks
        9
    """
    context = decoder.context if context is None else context
    if "blocks" in sizes:
        raise ValueError("limits_of: blocks follow from cache_bytes. Pass that, or make Limits(...) of your own.")
    sizes = {"source": 0 if decoder.sources is None else decoder.sources.longest} | sizes
    one = Limits(vocab=decoder.vocab, context=context, blocks=2, **sizes)
    raise_all(ValueError, "limits_of:", list_misfits(decoder, one))
    sources = decoder.cache.num_source_bytes(one)
    each = (decoder.cache.num_bytes(one) - sources) // 2
    held, least = (cache_bytes - sources) // each, 1 + one.width
    if held < least:
        raise ValueError(
            f"cache_bytes={cache_bytes} holds {max(held - 1, 0) * one.block} tokens, fewer than context={context}."
            f" Give {least * each + sources} bytes or more, or take a shorter context."
        )
    blocks = min(held, one.running * one.width + 1)
    return Limits(vocab=decoder.vocab, context=context, blocks=blocks, **sizes)


def check_decoder(decoder: Decoder, limits: Limits, mesh: Mesh, weights_axis: Axes = None) -> None:
    """Refuses limits or a mesh that do not fit a decoder. The message lists all problems."""
    ranks, heads = mesh.axis_size(decoder.cache.axis), decoder.cache.heads
    problems = list_misfits(decoder, limits)
    if heads % ranks:
        problems.append(f"{ranks} ranks of {decoder.cache.axis!r} do not divide the {heads} key heads of the model")
    problems += decoder.list_misfits(mesh)
    kept = {*P(weights_axis).axes}
    if kept - mesh.shape.keys():
        problems.append(f"weights_axis={weights_axis!r} must be an axis of the mesh, which has {[*mesh.shape]}")
    used = decoder.axes | kept
    if mesh.size > 1 and not used:
        problems.append(
            f"the mesh {dict(mesh.shape)} has {mesh.size} ranks, and this decoder's specs cut it over no axis; give it"
            " an axis if it takes one (tp=), or run it on one rank"
        )
    elif idle := [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]:
        problems.append(
            f"the mesh {dict(mesh.shape)} has axes {idle} that no layout of the decoder uses: {sorted(used)}"
        )
    raise_all(ValueError, "engine:", problems)


def list_misfits(decoder: Decoder, limits: Limits) -> list[str]:
    """Returns the limits that do not fit a decoder, as lines of a message."""
    problems = []
    if limits.vocab != decoder.vocab:
        problems.append(f"limits.vocab is {limits.vocab}, and the model has {decoder.vocab} tokens")
    if limits.context > decoder.context:
        problems.append(f"limits.context is {limits.context}, and the model's longest sequence has {decoder.context}")
    longest = 0 if decoder.sources is None else decoder.sources.longest
    if limits.source > longest or (longest and not limits.source):
        problems.append(f"limits.source is {limits.source}, and the longest source of the model has {longest} tokens")
    if limits.cache_dtype not in DTYPES:
        problems.append(f"limits.cache_dtype is {limits.cache_dtype!r}; it must be one of {', '.join(DTYPES)}")
    return problems


def check_cache(decoder: Decoder, limits: Limits, leaves: list[Any]) -> None:
    """Refuses a cache whose dtype does not fit the parameters."""
    wide = torch.float64 in [x.dtype for x in leaves]
    if decoder.batch_invariant and wide != (limits.cache_dtype == "float64"):
        own = "float64" if wide else "not float64"
        raise ValueError(
            f"engine: limits.cache_dtype must be 'float64' for parameters in float64, and only then, got"
            f" {limits.cache_dtype!r} for {own}. Otherwise logits would differ from a single forward. Pass"
            " limits_of(decoder, cache_dtype=...)."
        )


def check_same_model(old: PyTree, new: PyTree) -> None:
    """Refuses new weights of another model. The message lists all leaves."""
    before, after = (dict(zip(tree_paths(x, "params"), tree_leaves(x), strict=True)) for x in (old, new))
    problems = [f"{path} is missing" for path in before if path not in after]
    problems += [f"{path} is unknown to the model" for path in after if path not in before]
    for path, x in before.items():
        y = after.get(path)
        if y is not None and (x.shape, x.dtype) != (y.shape, y.dtype):
            problems.append(f"{path} is {tuple(y.shape)} of {y.dtype}, and was {tuple(x.shape)} of {x.dtype}")
    raise_all(ValueError, "update_weights: these are the weights of another model:", problems)
