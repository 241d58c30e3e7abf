"""A tiny Mixtral for `bench_experts.py`, by peer: `build(directory) -> step(tokens) -> loss`, of the same weights.

E experts, k choices of a token, D model, F ffn of an expert. Balance losses are left out everywhere.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "max_position_embeddings": 256,
}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[Tensor], Tensor]


def save_model(directory: str) -> int:
    """Writes the model; returns its number of parameters."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, tie_word_embeddings=False))  # pyright: ignore[reportArgumentType]
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def tokens_of(turn: int, rank: int, rows: int, length: int) -> Tensor:
    """The rows of a rank in one turn, the same for all peers."""
    made = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=made)


def shardfn(directory: str, *, stage: int, jit: bool = False) -> Step:
    """`models.moe.mixtral_like` with its experts on the ranks of "ep"."""
    import shardfn as sf
    from shardfn.models import gpt, moe
    from shardfn.nn import moe as layers

    shape = {"vocab_size": 512, "num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4, "num_kv_heads": 2}
    config = moe.mixtral_like(
        **shape,
        max_len=256,
        rope_base=1e6,
        norm_eps=1e-5,
        experts=moe.Experts(num=8, balance=0.0, exchange=layers.AllToAll("ep")),
    )
    loss: Any = functools.partial(gpt.loss, config)
    b1, b2 = ADAMW["betas"]
    take = sf.sharded_step(
        sf.jit(loss, backend="graph") if jit else loss,
        sf.optim.adamw(ADAMW["lr"], b1=b1, b2=b2, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"]),
        mesh=sf.make_mesh({"ep": -1}, device="cpu"),
        specs=gpt.specs(config),
        batch=sf.P("ep"),
        zero=sf.Zero(stage=stage, axis="ep"),
    )
    state = take.init(_params_of(directory))

    def step(tokens: Tensor) -> Tensor:
        nonlocal state
        state, metrics = take(state, {"tokens": tokens})
        return metrics["loss"]

    return step


def _params_of(directory: str) -> dict[str, Any]:
    """The weights as `models.gpt` has them."""
    w = _loaded(directory).state_dict()
    names = {"norm1_w": "input_layernorm.weight", "norm2_w": "post_attention_layernorm.weight"}
    names |= {f"w{n}": f"self_attn.{n}_proj.weight" for n in "qkvo"}
    names |= {"router": "mlp.gate.weight", "e_down": "mlp.experts.down_proj", "e_gate_up": "mlp.experts.gate_up_proj"}
    blocks = []
    for i in range(SIZES["num_hidden_layers"]):
        block = {name: w[f"model.layers.{i}.{theirs}"] for name, theirs in names.items()}
        blocks.append(block | {"e_gate_up": block["e_gate_up"].unflatten(1, (2, -1))})
    ends = {"embed": "model.embed_tokens.weight", "norm_w": "model.norm.weight", "head": "lm_head.weight"}
    return {"blocks": blocks} | {name: w[theirs] for name, theirs in ends.items()}


def transformers(directory: str) -> Step:
    """Its own expert parallelism by exchanges of tokens, with FSDP2 for the dense leaves."""
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig  # pyright: ignore[reportMissingImports]

    how = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all")
    model: Any = MixtralForCausalLM.from_pretrained(directory, distributed_config=how, dtype=torch.float32)
    model.train()
    # Leaves of experts lie on another mesh than dense ones, and one fused update takes leaves of one mesh.
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    dense = [p for name, p in model.named_parameters() if name not in experts]
    groups = [{"params": list(experts.values())}, {"params": dense}]
    optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class _Expert(nn.Module):
    """An expert of Mixtral as a module of its own, as DeepSpeed takes it."""

    def __init__(self) -> None:
        super().__init__()
        D, F = SIZES["hidden_size"], SIZES["intermediate_size"]
        self.gate_up, self.down = nn.Linear(D, 2 * F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class _Mixture(nn.Module):
    """DeepSpeed's native layer with the weights of one of Mixtral's, in that one's place."""

    def __init__(self, theirs: Any, rank: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE  # pyright: ignore[reportMissingImports]

        sizes: dict[str, Any] = {"num_experts": SIZES["num_local_experts"], "ep_size": 2, "k": 2}
        self.moe = MoE(SIZES["hidden_size"], _Expert(), **sizes, drop_tokens=False, top2_2nd_expert_sampling=False)
        inner = self.moe.deepspeed_moe
        inner.gate.wg.weight.data.copy_(theirs.gate.weight)
        own = inner.experts.deepspeed_experts
        for i, expert in enumerate(own):
            expert.gate_up.weight.data.copy_(theirs.experts.gate_up_proj[rank * len(own) + i])
            expert.down.weight.data.copy_(theirs.experts.down_proj[rank * len(own) + i])

    def forward(self, x: Tensor) -> Tensor:
        """The layer, without its balance loss."""
        return self.moe(x)[0]


def deepspeed(directory: str) -> Step:
    """Its native layer under ZeRO-1, the highest stage of the native layer with its 2; no token is dropped."""
    rank = _started_deepspeed()
    from deepspeed.moe import utils  # pyright: ignore[reportMissingImports]

    model = _loaded(directory)
    for layer in model.model.layers:
        layer.mlp = _Mixture(layer.mlp, rank)
    groups = utils.split_params_into_different_moe_groups_for_optimizer(
        [{"params": list(model.parameters()), "name": "parameters"}]
    )
    return _by_deepspeed(
        model, groups, {"stage": 1, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000}
    )


def autoep(directory: str) -> Step:
    """DeepSpeed's AutoEP, which puts layers of its own in place of Mixtral's, under ZeRO-3."""
    _started_deepspeed()
    model = _loaded(directory).train()
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "disable_triton_grouped_mm": True}
    return _by_deepspeed(
        model,
        list(model.parameters()),
        {"stage": 3, "stage3_param_persistence_threshold": 0},
        expert_parallel=experts,
    )


def _started_deepspeed() -> int:
    """This rank, with DeepSpeed on gloo."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    import deepspeed as ds  # pyright: ignore[reportMissingImports]

    ds.init_distributed("gloo", auto_mpi_discovery=False)
    return rank


def _by_deepspeed(model: Any, params: list[Any], zero: dict[str, Any], **more: Any) -> Step:
    import deepspeed as ds  # pyright: ignore[reportMissingImports]

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more,
    }
    optimizer = torch.optim.AdamW(params, fused=True, **ADAMW)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor) -> Tensor:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _loaded(directory: str) -> Any:
    from transformers import MixtralForCausalLM

    return MixtralForCausalLM.from_pretrained(directory, dtype=torch.float32)


PEERS: dict[str, Callable[[str], Step]] = {
    "shardfn 3": functools.partial(shardfn, stage=3),
    "shardfn 3 jit": functools.partial(shardfn, stage=3, jit=True),
    "shardfn 1": functools.partial(shardfn, stage=1),
    "shardfn 1 jit": functools.partial(shardfn, stage=1, jit=True),
    "transformers": transformers,
    "deepspeed": deepspeed,
    "deepspeed autoep": autoep,
}
