"""The parts of `bench_gpu.py`: each takes a device and returns its figures as a dict of plain values.

On a CPU the sizes are small, and times mean nothing: such a run shows that every part works.
"""

import contextlib
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _gpu_timing import Figures, Step, fresh, group_on, mesh_on, peak, seconds, soft
from _model import ADAMW, Model, Size, loss, params
from _peers import adamw
from torch import Tensor

import shardfn as sf
from shardfn import nn
from shardfn.core import tree_leaves, tree_map
from shardfn.testing import ODD_TRAINABLE, odd_batch, odd_loss, odd_params, on_mesh, one_device

BF16 = torch.bfloat16
# GPT-2 of 124M parameters, and a model whose state is larger than the memory that the part may use.
GPT2 = Size(num_layers=12, d_model=768, num_heads=12, tokens=1024, vocab=50304, batch=8)
LARGE = Size(num_layers=24, d_model=2048, num_heads=16, tokens=1024, vocab=50304, batch=4)
TINY = Size(num_layers=2, d_model=64, num_heads=4, tokens=32, vocab=128, batch=2)
OFFLOAD_BYTES = 8 << 30
# Rows and columns of a block of the sparse layouts.
BLOCK = 128


def machine(device: str) -> Figures:
    """The device, the driver and the packages."""
    smi = "nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm --format=csv,noheader"
    names = ("torch", "triton", "transformers", "optree", "einops", "numpy", "safetensors")
    found = {name: _version(name) for name in names}
    out: Figures = {"python": sys.version.split()[0], "cuda": torch.version.cuda, **found, "cores": os.cpu_count()}
    if device == "cuda":
        out["nvidia-smi"] = subprocess.run(smi.split(), capture_output=True, text=True).stdout.strip()
    return out


def suite(device: str) -> Figures:
    """The tests marked `cuda`; on a CPU these are collected and skipped."""
    del device
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "-m", "cuda", "tests/cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    reasons = [line[:200] for line in lines if re.match(r"E   +\w*(Error|Exception)", line)]
    last = lines[-1] if lines else done.stderr[-500:]
    return {"exit": done.returncode, "last": last, "failed": failed, "reasons": list(dict.fromkeys(reasons))[:40]}


def parity(device: str) -> Figures:
    """Training on one device against the plain loop on a CPU, in float64; captured steps also bit for bit."""
    tx = sf.optim.chain(sf.optim.clip_by_global_norm(0.5), sf.optim.adamw(1e-2))
    double = functools.partial(tree_map, lambda x: x.double() if x.is_floating_point() else x)
    batches = [double(odd_batch(n)) for n in range(3)]
    want = one_device(odd_loss, tx, double(odd_params()), batches, trainable=ODD_TRAINABLE)
    graph = functools.partial(sf.jit, backend="graph")
    losses = {
        "eager": lambda f: f,
        "remat": sf.remat,
        "accumulate": lambda f: sf.accumulate(f, 2),
        "graph": graph,
        "graph, remat": lambda f: graph(sf.remat(f)),
        "inductor": functools.partial(sf.jit, backend="inductor"),
    }
    host = {"params": "host", "grads": "host", "optimizer": "host"}
    zeros = {f"stage {s}": {"stage": s} for s in range(4)} | {"stage 3, host": {"stage": 3, **host}}
    outcome: dict[str, str] = {}
    for (name, wrap), (place, fields) in ((a, b) for a in losses.items() for b in zeros.items()):
        if name == "inductor" and place not in ("stage 0", "stage 3"):
            continue
        zero = sf.Zero.flat(persist_elements=0, bucket_bytes=64, **fields)
        try:
            here = [_to(b, device) for b in batches]
            got = on_mesh(
                wrap(odd_loss), tx, double(odd_params()), here, mesh=mesh_on(device), zero=zero, trainable=ODD_TRAINABLE
            )
            outcome[f"{name}, {place}"] = _difference(got.params, want.params)
        except Exception as error:
            outcome[f"{name}, {place}"] = f"{type(error).__name__}: {str(error)[:200]}"
    worst = max((float(x) for x in outcome.values() if _is_number(x)), default=float("nan"))
    bad = {k: v for k, v in outcome.items() if not _is_number(v) or float(v) > 1e-9}
    return {"cases": len(outcome), "worst difference": worst, "failed": bad}


def step_time(device: str) -> Figures:
    """Seconds and peak bytes of a step of GPT-2 in bfloat16, beside eager torch and FSDP2; in turns."""
    size = GPT2 if device == "cuda" else TINY
    peers: dict[str, Callable[[], Step]] = {
        "torch, autocast": functools.partial(_torch_step, device, size),
        "FSDP2": functools.partial(_fsdp2_step, device, size),
        "FSDP2, compiled": functools.partial(_fsdp2_step, device, size, compiled=True),
    }
    for stage, wrap in ((0, "eager"), (3, "eager"), (0, "graph"), (3, "graph"), (0, "inductor"), (3, "inductor")):
        peers[f"shardfn, stage {stage}, {wrap}"] = functools.partial(_own_step, device, size, stage, wrap)
    return {name: _measured(device, build) for name, build in peers.items()}


def cuda_graphs(device: str) -> Figures:
    """A captured step replayed as one CUDA graph; elsewhere the captured step."""
    size = GPT2 if device == "cuda" else TINY
    out: Figures = {}
    for wrap in ("graph", "inductor"):
        step = _own_step(device, size, 0, wrap)
        out[wrap] = seconds(device, step)
        if device == "cuda":
            out[f"{wrap}, replayed"] = soft(lambda step=step: seconds(device, _replayed(step)))
    return out


def offload(device: str) -> Figures:
    """A model whose training state is larger than the memory that the process may take."""
    size = LARGE if device == "cuda" else TINY
    numel = sum(x.numel() for x in tree_leaves(params(TINY))) if device == "cpu" else 0
    out: Figures = {}
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(OFFLOAD_BYTES / total)
    host = {"params": "host", "grads": "host", "optimizer": "host"}
    start = time.perf_counter()
    step = _own_step(device, size, 3, "remat", **host)
    out["seconds to the first state"] = time.perf_counter() - start
    out |= {"step": seconds(device, step, rounds=4), "peak": peak(device), "bytes allowed": OFFLOAD_BYTES}
    out["elements"] = numel or step.numel  # pyright: ignore[reportFunctionMemberAccess]
    out["bytes of the state"] = 16 * out["elements"]
    return out


def attention(device: str) -> Figures:
    """Forward and backward of block-sparse attention beside torch's flex_attention and dense attention."""
    out: Figures = {}
    lengths = (4096, 16384) if device == "cuda" else (1024,)
    for length in lengths:
        qkv = [torch.randn(1, length, 16, 64, device=device, dtype=BF16).requires_grad_() for _ in range(3)]
        layout = nn.layouts.local_window(length, block=BLOCK, num_window_blocks=7, attention="bidirectional")
        cases = {
            "shardfn, block-sparse": functools.partial(nn.attention, *qkv, mask=layout, impl=nn.BlockSparse()),
            "torch, dense": functools.partial(_dense, *qkv),
            "torch, flex_attention": soft(functools.partial(_flex, device, *qkv)),
        }
        for name, case in cases.items():
            run = functools.partial(_with_backward, case, qkv)
            out[f"{length} tokens, {name}"] = case if isinstance(case, str) else soft(lambda r=run: seconds(device, r))
    return out


def _own_step(device: str, size: Size, stage: int, wrap: str, **memories: str) -> Step:
    wraps = {"remat": sf.remat}
    mixed = sf.mixed_precision(wraps.get(wrap, lambda f: f)(loss(size)), sf.Policy(compute=BF16))
    f = sf.jit(mixed, backend=wrap) if wrap in ("graph", "inductor") else mixed
    take = sf.sharded_step(
        f, adamw(), mesh=mesh_on(device), batch=sf.P("dp"), zero=sf.Zero.flat(stage=stage, **memories)
    )
    state = take.init(lambda: params(size))
    tokens = _tokens(device, size)

    def step() -> Tensor:
        nonlocal state
        state, metrics = take(state, {"tokens": tokens})
        return metrics["loss"]

    step.numel = sum(x.shape.numel() for x in tree_leaves(state.params))  # pyright: ignore[reportFunctionMemberAccess]
    return step


def _torch_step(device: str, size: Size) -> Step:
    model = Model(size).to(device)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), _tokens(device, size)

    def step() -> Tensor:
        with torch.autocast(device, BF16):
            value = model(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _fsdp2_step(device: str, size: Size, *, compiled: bool = False) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    group_on(device)
    model, mesh = Model(size).to(device), init_device_mesh(device, (1,))
    # Inputs of a block hold values that FSDP2 cannot rebuild; they are of the right dtype already.
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.layers:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), _tokens(device, size)

    def step() -> Tensor:
        value = model(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _replayed(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _flex(device: str, q: Tensor, k: Tensor, v: Tensor) -> Step:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i // BLOCK - j // BLOCK).abs() <= 3

    mask = create_block_mask(window, None, None, q.shape[1], q.shape[1], device=device)
    compiled = torch.compile(flex_attention) if device == "cuda" else flex_attention
    return lambda: compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask)


def _with_backward(run: Step, inputs: list[Tensor]) -> None:
    torch.autograd.grad(run().sum(), inputs)


def _measured(device: str, build: Callable[[], Step]) -> Any:
    def measure() -> Figures:
        return {"seconds": seconds(device, build()), "peak": peak(device)}

    with fresh(device):
        return soft(measure)


def _tokens(device: str, size: Size) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(size.vocab, (size.batch, size.tokens + 1), generator=draw).to(device)


def _to(tree: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def _difference(got: Any, want: Any) -> str:
    pairs = zip(tree_leaves(got), tree_leaves(want), strict=True)
    return str(max(float((a.cpu().double() - b.double()).abs().max()) for a, b in pairs if a.numel()))


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
