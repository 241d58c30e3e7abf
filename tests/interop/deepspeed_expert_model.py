"""Models with experts, batches and configurations of `test_deepspeed_experts`, for both sides; it needs torch alone.

Layers of experts are given: DeepSpeed's own there, and modules with the same names, and all experts, here.
"""

import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

EXPERTS, WIDTH, ROWS = 4, 6, 16


class Case(NamedTuple):
    """A job: its number of ranks, those with different experts, the stage, and the kind of model and optimizer."""

    ranks: int
    ep_size: int
    stage: int
    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks, ep {self.ep_size}, stage {self.stage}, {self.kind}"


CASES = [
    Case(2, 1, 1),
    Case(2, 2, 0, "momentum"),
    Case(2, 2, 2, "trained here"),
    Case(2, 2, 1, "residual"),
    Case(4, 2, 0, "trained here"),
    Case(4, 2, 1, "bf16 in groups"),
    Case(4, 2, 2, "data first, frozen"),
    Case(4, 4, 2, "data first, scheduler"),
]
# From the width, the expert, the number of experts and of their ranks, and whether there is a residual layer.
MakeLayer = Callable[[int, nn.Module, int, int, bool], nn.Module]


class Net(nn.Module):
    def __init__(self, case: Case, layer: MakeLayer) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, WIDTH)
        ffn = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(approximate="tanh"), nn.Linear(5, WIDTH))
        numbers = (EXPERTS, 2 * EXPERTS)
        self.moes = nn.ModuleList(layer(WIDTH, ffn, n, case.ep_size, "residual" in case.kind) for n in numbers)
        self.head = nn.Linear(WIDTH, 11)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        for moe in self.moes:
            h = h + moe(h)[0]
        return self.head(h)


def filled(case: Case, net: Net, expert_rank: int) -> Net:
    """The module with values, each of them by the tensor's name on one rank with all experts."""
    for name, p in net.named_parameters():
        made = torch.Generator().manual_seed(zlib.crc32(everywhere(case, name, expert_rank).encode()))
        p.data = 0.5 * torch.randn(p.shape, generator=made)
        if "frozen" in case.kind and name in ("emb.weight", "head.bias"):
            p.requires_grad_(False)
    return net


def everywhere(case: Case, name: str, expert_rank: int) -> str:
    """The name on one rank with all experts."""
    number = EXPERTS * (2 if name.startswith("moes.1") else 1) // case.ep_size * expert_rank
    return re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: f"{m[1]}{number + int(m[2])}", name)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(11, (ROWS,), generator=torch.Generator().manual_seed(step))


def config_of(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0 if "here" in case.kind else 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage},
    }
    if "scheduler" in case.kind:
        rates = {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_max_lr": 0.01}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": rates}
    if "data first" in case.kind:
        config["use_data_before_expert_parallelism"] = True
    if "groups" in case.kind:
        config["bf16"] = {"enabled": True}
        config["zero_optimization"] |= {"round_robin_gradients": True, "parameter_alignment": True}
    if "momentum" in case.kind:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
        config["zero_allow_untested_optimizer"] = True
    return config


def groups_of(case: Case, net: nn.Module) -> list[dict[str, Any]]:
    """The groups of the optimizer before DeepSpeed splits them, with names for parameters."""
    leaves = {name: p for name, p in net.named_parameters() if p.requires_grad}
    if "groups" not in case.kind:
        return [{"params": list(leaves), "name": "all"}]
    matrices = [name for name, p in leaves.items() if p.ndim > 1]
    rest = [name for name in leaves if name not in matrices]
    more = {"weight_decay": 0.0, "lr": 3e-3}
    return [{"params": matrices, "name": "matrices"}, {"params": rest, "name": "rest"} | more]
