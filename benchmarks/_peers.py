"""Every peer as one function: `build(rank, world, size) -> step(tokens) -> loss`, an optimizer step a call."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from _model import ADAMW, Model, Size
from torch import Tensor

# The last step in which 1-bit Adam is Adam.
FREEZE_STEP = 2
Step = Callable[[Tensor], Tensor]
Build = Callable[[int, int, Size], Step]


def loop(rank: int, world: int, size: Size) -> Step:
    """The plain loop. With more than one rank it does not communicate: the cost of the same rows without a library."""
    del rank, world
    model = Model(size)
    return _train(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def ddp(rank: int, world: int, size: Size) -> Step:
    """DistributedDataParallel as it comes."""
    del rank, world
    model = torch.nn.parallel.DistributedDataParallel(Model(size))
    return _train(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def ddp_view(rank: int, world: int, size: Size) -> Step:
    """DistributedDataParallel with gradients that are views of its buckets, and a static graph."""
    del rank, world
    wrapped = torch.nn.parallel.DistributedDataParallel(Model(size), gradient_as_bucket_view=True, static_graph=True)
    return _train(wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW))


def zero_redundancy(rank: int, world: int, size: Size) -> Step:
    """ZeroRedundancyOptimizer over DistributedDataParallel: torch's stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    del rank, world
    model = torch.nn.parallel.DistributedDataParallel(Model(size))
    return _train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW))


def fsdp2(rank: int, world: int, size: Size, *, reshard: bool = True) -> Step:
    """`fully_shard` on every block and on the root: torch's stage 3, or its stage 2 when `reshard` is False."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    del rank
    model, mesh = Model(size), init_device_mesh("cpu", (world,))
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _train(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def fsdp2_compile(rank: int, world: int, size: Size, *, whole: bool = False) -> Step:
    """`fsdp2` with torch.compile: of every block before it is sharded, or of the whole sharded model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    del rank
    model, mesh = Model(size), init_device_mesh("cpu", (world,))
    for block in model.layers:
        if not whole:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if whole:
        model.compile()
    return _train(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def shardfn(rank: int, world: int, size: Size, *, stage: int, jit: str = "", tx: str = "adamw", **fields: Any) -> Step:
    """`sharded_step` at one stage. `jit` is a back end of `sf.jit`, or empty for eager steps; `tx` is an optimizer of
    `OPTIMIZERS`; `fields` are those of `Zero`, or with "jit_" before them options of `sf.jit`; `microbatches` is for
    `accumulate`; `nodes` makes a mesh of ("node", "gpu"), for `secondary_axis=gpu`; `jit_cluster=calibrate` measures
    the link first. The step has an attribute `cache_info`.
    """
    del rank
    from _model import loss, params

    import shardfn as sf

    options = {name.removeprefix("jit_"): fields.pop(name) for name in list(fields) if name.startswith("jit_")}
    num, nodes = fields.pop("microbatches", 1), fields.pop("nodes", 0)
    mesh = sf.make_mesh({"node": nodes, "gpu": world // nodes} if nodes else {"dp": world})
    axes = tuple(mesh.shape)
    if options.get("cluster") == "calibrate":
        options["cluster"] = sf.graph.calibrate(mesh)
    f = sf.accumulate(loss(size), num) if num > 1 else loss(size)
    f = sf.jit(f, backend=jit, **options) if jit else f
    fields |= {"axis": axes} if nodes else {}
    zero = getattr(sf.Zero, "flat", sf.Zero)(stage=stage, **fields)  # of a commit before `flat`, Zero takes all fields
    take = sf.sharded_step(f, OPTIMIZERS[tx](), mesh=mesh, batch=sf.P(axes), zero=zero)
    state = take.init(params(size))

    def step(tokens: Tensor) -> Tensor:
        nonlocal state
        state, metrics = take(state, {"tokens": tokens})
        return metrics["loss"]

    step.cache_info = take.cache_info  # pyright: ignore[reportFunctionMemberAccess]
    return step


def shardfn_3d(
    rank: int, world: int, size: Size, *, pp: int = 1, tp: int = 1, stage: int = 1, microbatches: int = 4
) -> Step:
    """`models.gpt` along ("dp", "pp", "tp"), tp innermost: a pipeline of tensor-parallel stages under ZeRO along dp."""
    del rank
    from _model import params

    import shardfn as sf
    from shardfn.models import gpt

    config = dataclasses.replace(size.config, stacked=True)
    mesh = sf.make_mesh({"dp": world // (pp * tp), "pp": pp, "tp": tp})
    loss: Any = functools.partial(gpt.loss, config, axis="tp")
    if pp > 1:
        loss = sf.pipeline(*gpt.stages(config, axis="tp"), num_microbatches=microbatches)
    zero = sf.Zero(stage=stage, pace=sf.Pace(accumulate="once") if pp > 1 else sf.Pace())
    specs = gpt.specs(config, tp="tp", pp="pp" if pp > 1 else None)
    take = sf.sharded_step(loss, adamw(), mesh=mesh, specs=specs, batch=sf.P("dp"), zero=zero)
    state = take.init(params(dataclasses.replace(size, stacked=True)))
    dp, own = mesh.shape["dp"], mesh.coords["dp"]

    def step(tokens: Tensor) -> Tensor:
        nonlocal state
        state, metrics = take(state, {"tokens": tokens.chunk(dp)[own].contiguous()})
        return metrics["loss"]

    return step


def torch_tp(rank: int, world: int, size: Size) -> Step:
    """Torch's `parallelize_module` of the same GPT, on the whole batch; see `bench_tensor_parallel.py`."""
    from _torch_tp import torch_tp_step

    del rank
    return torch_tp_step(world, size, ADAMW)


def shardfn_tp(rank: int, world: int, size: Size, *, sequence: int = 0, jit: str = "") -> Step:
    """`models.gpt` along "tp", on the whole batch; with `sequence` tokens are cut between blocks."""
    del rank
    from shardfn.models import gpt

    return _along_tp(functools.partial(gpt.loss, size.config, axis="tp", sequence=bool(sequence)), world, size, jit)


def shardfn_partition(rank: int, world: int, size: Size, *, sequence: int = 0, jit: str = "") -> Step:
    """`sf.partition` of the loss for one device, with the specs of `shardfn_tp`, on the whole batch."""
    del rank
    from _model import loss

    import shardfn as sf

    return _along_tp(sf.partition(loss(size), axes="tp", sequence=bool(sequence)), world, size, jit)


def _along_tp(loss: Callable[..., Any], world: int, size: Size, jit: str) -> Step:
    from _model import params

    import shardfn as sf
    from shardfn.models import gpt

    specs, mesh = gpt.specs(size.config, tp="tp"), sf.make_mesh({"tp": world})
    f = sf.jit(loss, backend=jit) if jit else loss
    take = sf.sharded_step(f, adamw(), mesh=mesh, specs=specs, batch=sf.P())
    state = take.init(params(size))

    def step(tokens: Tensor) -> Tensor:
        nonlocal state
        state, metrics = take(state, {"tokens": tokens})
        return metrics["loss"]

    return step


def _make_rule(name: str, **more: Any) -> Any:
    """Returns an optimizer of shardfn with the numbers of `ADAMW`."""
    import shardfn as sf

    b1, b2 = ADAMW["betas"]
    how = {"b1": b1, "b2": b2, "eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
    return getattr(sf.optim, name)(ADAMW["lr"], **how, **more)


def adamw() -> Any:
    """The optimizer of every shardfn peer."""
    return _make_rule("adamw")


def onebit_adam() -> Any:
    """1-bit Adam with the same numbers, compressed from the third step on."""
    return _make_rule("onebit_adam", freeze_step=FREEZE_STEP, axis="dp")


def lamb() -> Any:
    """LAMB with the same numbers."""
    return _make_rule("lamb")


def onebit_lamb() -> Any:
    """1-bit LAMB with the same numbers, compressed from the third step on."""
    return _make_rule("onebit_lamb", freeze_step=FREEZE_STEP, axis="dp")


OPTIMIZERS = {"adamw": adamw, "onebit_adam": onebit_adam, "lamb": lamb, "onebit_lamb": onebit_lamb}


def deepspeed(rank: int, world: int, size: Size, *, stage: int) -> Step:
    """DeepSpeed's engine around the same module and torch's AdamW."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    import deepspeed as ds  # pyright: ignore[reportMissingImports]

    model = Model(size)
    config = {
        "train_batch_size": size.batch,
        "train_micro_batch_size_per_gpu": size.batch // world,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 5_000_000,  # its default reserves 2 GB, more than this whole model
            "allgather_bucket_size": 5_000_000,
            "stage3_prefetch_bucket_size": 500_000,
            "stage3_max_live_parameters": 5_000_000,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor) -> Tensor:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


PEERS: dict[str, Build] = {
    "loop": loop,
    "ddp": ddp,
    "ddp_view": ddp_view,
    "zero_redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "fsdp2_no_reshard": functools.partial(fsdp2, reshard=False),
    "fsdp2_compile": fsdp2_compile,
    "fsdp2_compile_whole": functools.partial(fsdp2_compile, whole=True),
    "shardfn_3d": shardfn_3d,
    "torch_tp": torch_tp,
    "shardfn_tp": shardfn_tp,
    "shardfn_partition": shardfn_partition,
    **{f"shardfn{s}": functools.partial(shardfn, stage=s) for s in range(4)},
    **{f"deepspeed{s}": functools.partial(deepspeed, stage=s) for s in range(4)},
}


def build(name: str) -> Build:
    """The peer of that name. Fields may follow a shardfn peer: those of `Zero.flat`, as in
    `shardfn3:prefetch_bytes=0:bucket_bytes=0`, a back end, as in `shardfn3:jit=graph`, and options of `sf.jit`,
    as in `shardfn3:jit=graph:jit_prefetch=none`; `channel=memory` sets the channel between ranks of one host.

    Raises:
        ValueError: there is no such peer.
    """
    base, *fields = name.split(":")
    if base not in PEERS:
        raise ValueError(f"no peer {base!r}; there are {', '.join(PEERS)}.")
    pairs = dict(field.split("=") for field in fields)
    if channel := pairs.pop("channel", ""):
        os.environ["SHARDFN_CHANNEL"] = channel  # each peer has processes of its own
    return functools.partial(PEERS[base], **{key: _value(value) for key, value in pairs.items()})


def _value(text: str) -> int | str | None:
    return None if text == "none" else int(text) if text.isdigit() else text


def _train(model: torch.nn.Module, optimizer: Any) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
