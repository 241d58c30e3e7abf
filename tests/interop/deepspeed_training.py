"""Trains by DeepSpeed, for `test_deepspeed`: run by torchrun, under a Python that has DeepSpeed.

    deepspeed_training.py CONFIG.json OUT.pt STEPS SAVED [CHECKPOINTS]

Writes the parameters after the steps, and the loss and the rate of each; saves a checkpoint "here" in SAVED. Both sides
have their model and batches from `deepspeed_model`. With CHECKPOINTS it resumes from the universal checkpoint there.
"""

import json
import sys

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from deepspeed_model import model, rows


def main() -> None:
    config, out, steps, place = json.load(open(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = model()
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    times = engine.gradient_accumulation_steps()
    losses, rates = [], []
    if sys.argv[5:]:
        engine.load_checkpoint(sys.argv[5])
    for step in range(engine.global_steps, steps):
        x, y = (t.chunk(world)[rank].chunk(times) for t in rows(step))
        total = torch.zeros(())
        rates.append(engine.optimizer.param_groups[0]["lr"])
        for n in range(times):
            loss = torch.nn.functional.mse_loss(engine(x[n]), y[n])
            engine.backward(loss)
            engine.step()
            total += loss.detach() / times
        dist.all_reduce(total)
        losses.append(float(total) / world)
    engine.save_checkpoint(place, tag="here")
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        params = {name: p.detach().float().clone() for name, p in net.named_parameters()}
    if rank == 0:
        torch.save({"params": params, "losses": losses, "rates": [float(r) for r in rates]}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
