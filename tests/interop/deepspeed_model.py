"""The models, batches and configurations of `test_deepspeed`, for both sides; it needs torch alone."""

from typing import Any

import torch

ROWS, WIDTH, HIDDEN, OUT = 16, 7, 13, 5


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, OUT, generator=g)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUT))


class Net(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 7)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 7))
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.register_buffer("seen", torch.arange(3.0))
        if "tied" in kind:
            self.head.weight = self.emb.weight
        if "frozen" in kind:
            self.mlp[0].weight.requires_grad_(False)
            self.mlp[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.emb(x)))


# Models of the jobs of three ranks, for which `test_deepspeed` writes a file for each rank.
KINDS = ("plain", "tied and frozen", "bf16 in groups", "momentum")
CASES = [f"{kind}, stage {stage}" for kind in KINDS for stage in (1, 2, 3)]


def net_of(case: str) -> Net:
    torch.manual_seed(0)
    return Net(case)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(11, (12,), generator=torch.Generator().manual_seed(step))


def config_of(case: str) -> dict[str, Any]:
    adam = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": int(case[-1]), "stage3_param_persistence_threshold": 20},
    }
    if "plain" in case:
        rates = {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_max_lr": 0.01}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": rates}
    if "groups" in case:
        config["bf16"] = {"enabled": True}
        more = {"sub_group_size": 50, "round_robin_gradients": True, "parameter_alignment": True}
        config["zero_optimization"] |= more
    if "momentum" in case:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
        config["zero_allow_untested_optimizer"] = True
    return config


def groups_of(case: str, net: torch.nn.Module) -> list[dict[str, Any]]:
    """The groups of the optimizer, with names for parameters."""
    leaves = {name: p for name, p in net.named_parameters() if p.requires_grad}
    if "groups" not in case:
        return [{"params": list(leaves)}]
    matrices = [name for name, p in leaves.items() if p.ndim > 1]
    rest = [name for name in leaves if name not in matrices]
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
