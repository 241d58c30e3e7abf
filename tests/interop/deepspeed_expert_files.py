"""Jobs with experts that stop and resume, for `test_deepspeed_experts`: run by torchrun, under a Python with DeepSpeed.

    deepspeed_expert_files.py begin DIRECTORY
    deepspeed_expert_files.py go_on DIRECTORY

For each of `deepspeed_expert_model.CASES` with this number of ranks, in a directory of its own. `begin` makes two
steps, saves a checkpoint "theirs", and makes two more, with `want.pt` for their losses and parameters. `go_on` begins
with the checkpoint "ours" and makes the same two, with `got.pt` for them and for differences from "theirs"; then it
loads the module alone from "weights", with `module.pt` for the parameters.
"""

import pathlib
import sys
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE  # pyright: ignore[reportMissingImports]
from deepspeed_expert_model import CASES, Case, Net, config_of, everywhere, filled, groups_of, tokens
from deepspeed_partitions import compared, losses_of


def layer(width: int, expert: torch.nn.Module, number: int, ep_size: int, residual: bool) -> torch.nn.Module:
    return MoE(width, expert, number, ep_size=ep_size, k=1, use_rts=False, drop_tokens=False, use_residual=residual)


def expert_rank(case: Case) -> int:
    first = dist.get_rank() // (case.ranks // case.ep_size)
    return first if "data first" in case.kind else dist.get_rank() % case.ep_size


def engine_of(case: Case) -> tuple[Any, Net]:
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    net = filled(case, Net(case, layer), expert_rank(case))
    leaves = dict(net.named_parameters())
    own = [x | {"params": [leaves[name] for name in x["params"]]} for x in groups_of(case, net)]
    return deepspeed.initialize(model=net, model_parameters=own, config=config_of(case))[0], net


def trained(engine: Any, net: Net, steps: range, case: Case) -> dict[str, Any]:
    losses = losses_of(engine, steps, tokens)
    rates = [float(x["lr"]) for x in engine.optimizer.param_groups]
    return {"losses": losses, "params": params_of(net, case), "rates": rates, "steps": engine.global_steps}


def params_of(net: Net, case: Case) -> dict[str, torch.Tensor]:
    """All experts' ranks' parameters, by the names of one rank."""
    own = {everywhere(case, name, expert_rank(case)): p.detach().float().clone() for name, p in net.named_parameters()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {name: x for each in found for name, x in each.items()}


def kept(x: dict[str, Any], path: pathlib.Path) -> None:
    if dist.get_rank() == 0:
        torch.save(x, path)


def begin(place: pathlib.Path, case: Case) -> None:
    engine, net = engine_of(case)
    trained(engine, net, range(2), case)
    engine.save_checkpoint(str(place), tag="theirs")
    kept(trained(engine, net, range(2, 4), case), place / "want.pt")
    engine.destroy()


def go_on(place: pathlib.Path, case: Case) -> None:
    engine, net = engine_of(case)
    engine.load_checkpoint(str(place), tag="ours")
    got = trained(engine, net, range(2, 4), case)
    kept(got | {"differing": compared(place) if dist.get_rank() == 0 else []}, place / "got.pt")
    engine.destroy()
    if (place / "weights").is_dir():
        engine, net = engine_of(case)
        engine.load_checkpoint(str(place), tag="weights", load_module_only=True)
        kept(params_of(net, case), place / "module.pt")
        engine.destroy()


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for case in CASES:
        if case.ranks == dist.get_world_size():
            place = pathlib.Path(sys.argv[2]) / case.name
            place.mkdir(parents=True, exist_ok=True)
            {"begin": begin, "go_on": go_on}[sys.argv[1]](place, case)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
