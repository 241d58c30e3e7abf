"""Saves checkpoints with experts by DeepSpeed, for `test_ds_experts`: run by torchrun, under a Python with DeepSpeed.

    deepspeed_experts.py DIRECTORY

For each of `CASES` a checkpoint "here" in a directory of its own, of a model with two native layers of experts after
two steps on four ranks; and beside it `want.pt` with the whole parameters, and the states of the optimizer as
DeepSpeed has them in its memory, by the names of the module on one rank.
"""

import copy
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE  # pyright: ignore[reportMissingImports]
from deepspeed.moe.utils import (  # pyright: ignore[reportMissingImports]
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)

EP, WIDTH = 2, 6
ALIKE = (4, 4)
# By name: the stage, whether weights are bfloat16, whether ranks of data come first, the numbers of experts of the two
# layers, and whether a layer has a dense MLP, too, as in PR-MoE.
CASES = {
    "stage 0": (0, False, False, ALIKE, False),
    "stage 1": (1, False, False, ALIKE, False),
    "stage 2, bf16": (2, True, False, ALIKE, False),
    "stage 2, data first": (2, False, True, ALIKE, False),
    "PR-MoE, stage 0": (0, False, False, (2, 6), True),
    "PR-MoE, stage 2": (2, False, False, (2, 6), True),
}


class Net(torch.nn.Module):
    def __init__(self, experts: tuple[int, ...], residual: bool) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, WIDTH)
        ffn = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.GELU(), torch.nn.Linear(5, WIDTH))
        how: dict[str, Any] = {"ep_size": EP, "k": 1, "use_rts": False, "use_residual": residual}
        self.moes = torch.nn.ModuleList(MoE(WIDTH, copy.deepcopy(ffn), n, **how) for n in experts)
        self.head = torch.nn.Linear(WIDTH, 11)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.emb(x)
        for layer in self.moes:
            h = h + layer(h)[0]
        return self.head(h)


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for case, how in CASES.items():
        saved(pathlib.Path(sys.argv[1]) / case, *how)
    dist.destroy_process_group()


def saved(
    place: pathlib.Path, stage: int, narrow: bool, data_first: bool, experts: tuple[int, ...], residual: bool
) -> None:
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    rank, world = dist.get_rank(), dist.get_world_size()
    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    torch.manual_seed(0)
    net = Net(experts, residual)
    config = {
        "train_batch_size": 4 * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": narrow},
        "use_data_before_expert_parallelism": data_first,
    }
    own = [{"params": list(net.parameters()), "name": "all"}]
    split = split_params_into_different_moe_groups_for_optimizer(own)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=split, config=config)
    made = torch.Generator().manual_seed(rank)
    for _ in range(2):
        x = torch.randint(11, (4,), generator=made)
        engine.backward(torch.nn.functional.cross_entropy(engine(x).float(), (x + 1) % 11))
        engine.step()
    engine.save_checkpoint(str(place), tag="here")
    found: list[Any] = [None] * world
    dist.all_gather_object(found, list(states_of(engine, net, stage)))
    if rank == 0:
        want: dict[str, dict[str, torch.Tensor]] = {}
        for name, kind, shape, start, piece in (x for each in found for x in each):
            whole = want.setdefault(name, {}).setdefault(kind, torch.full(shape, torch.nan))
            whole.view(-1)[start : start + piece.numel()] = piece
        torch.save(want, place / "want.pt")
    dist.barrier()
    engine.destroy()


def states_of(engine: Any, net: torch.nn.Module, stage: int) -> Iterator[tuple[Any, ...]]:
    """This rank's pieces, where DeepSpeed's own addresses have them: name, kind, shape, start, values."""
    zero = engine.optimizer
    for name, p in net.named_parameters():
        own = of_one_rank(net, name, p), tuple(p.shape)
        if not stage:
            state = zero.state[p]
            pieces = {"fp32": p, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            start = 0
        else:
            mapping: Any = getattr(p, "_hp_mapping")  # noqa: B009
            if mapping is None:  # no element of it is on this rank
                continue
            [i] = [k for k, group in enumerate(zero.bit16_groups) if any(x is p for x in group)]
            state = zero.optimizer.state[zero.single_partition_of_fp32_groups[i]]
            at, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
            pieces = {k: state[k].narrow(0, at.start, at.numel) for k in ("exp_avg", "exp_avg_sq")}
            pieces["fp32"] = mapping.hp_fragment
        for kind, x in pieces.items():
            yield own[0], kind, own[1], start, x.detach().float().flatten().clone()


def of_one_rank(net: torch.nn.Module, name: str, p: torch.Tensor) -> str:
    """The name of a parameter where one rank has all experts."""
    if not is_moe_param(p):
        return name
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    of, number, rest = re.fullmatch(r"(.*deepspeed_experts)\.(\d+)(.*)", name).groups()  # pyright: ignore
    first = groups._get_expert_parallel_rank(f"ep_size_{EP}") * len(net.get_submodule(of))  # pyright: ignore
    return f"{of}.{first + int(number)}{rest}"


if __name__ == "__main__":
    main()
