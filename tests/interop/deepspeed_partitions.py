"""Jobs of DeepSpeed's that stop and resume, for `test_deepspeed`: run by torchrun, under a Python with DeepSpeed.

    deepspeed_partitions.py begin DIRECTORY
    deepspeed_partitions.py go_on DIRECTORY

For each of `deepspeed_model.CASES` in a directory of its own. `begin` makes three steps, saves a checkpoint "theirs",
and makes two more, with `want.pt` for their losses and the parameters. `go_on` begins with the checkpoint "ours" and
makes the same two, with `got.pt` for them, for the result of zero_to_fp32, and for differences from "theirs".
"""

import contextlib
import io
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import (  # pyright: ignore[reportMissingImports]
    get_fp32_state_dict_from_zero_checkpoint,
)
from deepspeed_model import CASES, config_of, groups_of, net_of, tokens


def engine_of(case: str) -> tuple[Any, torch.nn.Module]:
    net = net_of(case)
    leaves = dict(net.named_parameters())
    groups = [x | {"params": [leaves[name] for name in x["params"]]} for x in groups_of(case, net)]
    return deepspeed.initialize(model=net, model_parameters=groups, config=config_of(case))[0], net


def losses_of(engine: Any, steps: range, tokens: Callable[[int], torch.Tensor]) -> list[float]:
    """The mean losses of all ranks, in steps that train."""
    losses = []
    for step in steps:
        x = tokens(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = torch.nn.functional.cross_entropy(engine(x).float(), (x + 1) % 11)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def trained(engine: Any, net: torch.nn.Module, steps: range) -> dict[str, Any]:
    losses = losses_of(engine, steps, tokens)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        params = {name: p.detach().float().clone() for name, p in net.named_parameters()}
    rates = [float(x["lr"]) for x in engine.optimizer.param_groups]
    return {"losses": losses, "params": params, "rates": rates, "steps": engine.global_steps}


def differing(one: Any, other: Any, at: str) -> list[str]:
    """The differences of two values of a checkpoint; tensors bit for bit, except at stage 3 their padding."""
    if type(one) is not type(other):
        return [f"{at}: {type(one)}, {type(other)}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype is other.dtype and (one.shape == other.shape if "stage 3" in at else torch.equal(one, other))
        return [] if same else [f"{at}: {one.dtype}{tuple(one.shape)}, {other.dtype}{tuple(other.shape)}"]
    if isinstance(one, dict):
        ordered = isinstance(one, OrderedDict)
        if list(one) != list(other) if ordered else one.keys() != other.keys():
            return [f"{at}: {list(one)}, {list(other)}"]
        return [line for key in one for line in differing(one[key], other[key], f"{at}[{key!r}]")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} entries, {len(other)}"]
        return [x for i, pair in enumerate(zip(one, other, strict=True)) for x in differing(*pair, f"{at}[{i}]")]
    if type(one).__module__.startswith("deepspeed") and hasattr(one, "cur_scale"):
        return differing(vars(one), vars(other), at)
    return [] if one == other else [f"{at}: {one!r}, {other!r}"]


def compared(place: pathlib.Path) -> list[str]:
    """The differences of our files from DeepSpeed's."""
    lines = []
    names = [sorted(p.name for p in (place / tag).iterdir()) for tag in ("theirs", "ours")]
    for name in names[0] if names[0] == names[1] else []:
        one, other = (torch.load(place / tag / name, weights_only=False) for tag in ("theirs", "ours"))
        for x in (one, other):
            x.pop("ds_config", None)  # DeepSpeed's own has defaults filled in
        lines += differing(one, other, f"{place.name}, {name}")
    return lines if names[0] == names[1] else [f"{names[0]}, {names[1]}"]


def begin(place: pathlib.Path, case: str) -> None:
    engine, net = engine_of(case)
    trained(engine, net, range(3))
    engine.save_checkpoint(str(place), tag="theirs")
    want = trained(engine, net, range(3, 5))
    if dist.get_rank() == 0:
        torch.save(want, place / "want.pt")
    engine.destroy()


def go_on(place: pathlib.Path, case: str) -> None:
    engine, net = engine_of(case)
    engine.load_checkpoint(str(place), tag="ours")
    got = trained(engine, net, range(3, 5))
    if dist.get_rank() == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            whole = get_fp32_state_dict_from_zero_checkpoint(str(place), "ours")
        got["whole"] = {name: x.detach().clone() for name, x in whole.items()}
        got["differing"] = compared(place)
        torch.save(got, place / "got.pt")
    dist.barrier()
    engine.destroy()


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for case in CASES:
        place = pathlib.Path(sys.argv[2]) / case
        place.mkdir(parents=True, exist_ok=True)
        {"begin": begin, "go_on": go_on}[sys.argv[1]](place, case)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
