"""Saves checkpoints by DeepSpeed, for `test_deepspeed`: run by torchrun, under a Python that has DeepSpeed.

    deepspeed_saving.py STAGE KIND DIRECTORY

Saves a checkpoint "here" of a model that is tied, partly frozen, in groups, in bf16, under SGD with or without
momentum, or whose gradients go round and flat groups are small; and beside it, as `want.pt`, the result of DeepSpeed's
own zero_to_fp32.
"""

import sys

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import (  # pyright: ignore[reportMissingImports]
    get_fp32_state_dict_from_zero_checkpoint,
)
from deepspeed_model import Net


def main() -> None:
    stage, kind, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = Net(kind)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "bf16": {"enabled": kind == "bf16"},
    }
    if kind == "small":
        config["zero_optimization"] |= {"sub_group_size": 50, "round_robin_gradients": True}
    if kind in ("sgd", "momentum"):
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9 if kind == "momentum" else 0.0}}
        config["zero_allow_untested_optimizer"] = True
    leaves = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in leaves if (p.ndim > 1) == many]} for many in (True, False)]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups if kind == "groups" else leaves, config=config)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randint(11, (4,), generator=g)
        engine.backward(torch.nn.functional.cross_entropy(engine(x).float(), (x + 1) % 11))
        engine.step()
    engine.save_checkpoint(place, tag="here")
    dist.barrier()
    if dist.get_rank() == 0:
        whole = get_fp32_state_dict_from_zero_checkpoint(place, "here")
        torch.save({name: x.detach().clone() for name, x in whole.items()}, f"{place}/want.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
