"""The first of three parts: a small GPT learns a little of addition from right answers (supervised fine-tuning).

    python examples/rlhf/sft.py --out run

Only tokens of answers count in the loss. The weights are saved in run/sft, where reward_model.py and ppo.py find them.
"""

import torch.distributed as dist
from grpo_arithmetic import CONFIG, imitate, options

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt


def train(args, mesh):
    """The weights, of this run or of an earlier one."""
    params, where = gpt.init(CONFIG, sf.key(args.seed)), f"{args.out}/sft"
    if args.out and sf.checkpoint.steps(where):
        return sf.collectives.local(sf.checkpoint.restore(where, rl.as_global(params, mesh, None)).tree)
    params = imitate(params, args, mesh=mesh, zero=sf.Zero(stage=args.zero, persist_elements=0))
    if args.out:
        sf.checkpoint.save(where, rl.as_global(params, mesh, None), args.imitate)
    return params


def main():
    with sf.make_mesh({"dp": -1}) as mesh:
        train(options(__doc__).parse_args(), mesh)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
