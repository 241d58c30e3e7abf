"""Keywords of vLLM and SGLang for an engine, and their counterparts here."""

MEANT_BY_LIMITS = {
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
    "enable_return_routed_experts": "routes={value!r}",
    "seed": "Sampling(seed={value!r}): each request has its own",
}
