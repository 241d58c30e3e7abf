"""The last of three parts: PPO, with rewards by a model. Four models are branches of one state.

    python examples/rlhf/ppo.py --out run
    torchrun --nproc-per-node 2 examples/rlhf/ppo.py --out run --zero 3

The loop is that of ppo_arithmetic.py; a model in the state has the place of its rule. The rule by which pairs were made
is used to evaluate, and never to learn. The critic begins as a copy of the model of rewards.
"""

import functools

import reward_model
import sft
import torch
import torch.distributed as dist
from ppo_arithmetic import VALUES, train

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt


def by_model(step, state, rollout):
    return rollout._replace(rewards=step.apply(scores, state, rollout))


def scores(params, rollout):
    values = gpt.apply(VALUES, params["reward"], rollout.ids)[..., 0]
    return rl.last_values(values, rollout.prompts + rollout.lengths)


def main():
    args = reward_model.arguments(__doc__)
    with sf.make_mesh({"dp": -1}) as mesh:
        say = functools.partial(print, flush=True) if mesh.rank == 0 else lambda *_: None
        actor = sft.train(args, mesh)
        reward, ordered = reward_model.train(args, mesh, actor)
        say(f"pairs in order: {ordered:.0%}")
        models = {"actor": actor, "critic": sf.tree_map(torch.clone, reward), "reward": reward}
        train(args, mesh, models, by_model, say)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
