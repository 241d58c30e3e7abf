"""The second of three parts: a model of rewards learns from pairs of answers, a right one and a wrong one.

    python examples/rlhf/reward_model.py --out run

It begins with the weights of sft.py. Its value at an answer's last token is the reward. A rule makes the pairs: the
wrong answer is another sum, or the right one without its end. The weights are saved in run/reward.
"""

import sft
import torch
import torch.distributed as dist
from grpo_arithmetic import LENGTH, encode, order
from ppo_arithmetic import VALUES
from ppo_arithmetic import arguments as arguments_of_ppo

import shardfn as sf
from shardfn import rl
from shardfn.models import gpt


def train(args, mesh, params):
    """The weights, of this run or of an earlier one, and the part of pairs that they order."""
    params, where = {**gpt.init(VALUES, sf.key(args.seed + 3)), **params}, f"{args.out}/reward"
    step = sf.sharded_step(
        loss,
        sf.optim.chain(sf.optim.clip_by_global_norm(1.0), sf.optim.adamw(2e-3)),
        mesh=mesh,
        zero=sf.Zero(stage=args.zero, persist_elements=0),
        has_aux=True,
    )
    state = step.init(params)
    if args.out and sf.checkpoint.steps(where):
        state = state._replace(params=sf.checkpoint.restore(where, state.params).tree)
    else:
        for n in range(args.pairs):
            state, metrics = step(state, pairs(args.seed, n, step.rows(64)))
        if args.out:
            sf.checkpoint.save(where, state.params, args.pairs)
    metrics = step.evaluate(state, [pairs(args.seed + 4, n, step.rows(64)) for n in range(4)])
    return sf.unshard(state.params), float(metrics["ordered"])


def loss(params, batch):
    chosen, rejected = (gpt.apply(VALUES, params, ids)[..., 0] for ids, _ in batch)
    (better, lengths), (worse, others) = batch
    ordered = rl.last_values(chosen, lengths) > rl.last_values(rejected, others)
    return rl.pairwise(chosen, rejected, better, worse, lengths, others), {"ordered": rl.row_mean(ordered.float())}


def pairs(seed, n, rows):
    """Rows of a batch: problems with a right answer, and the same with a wrong one."""
    asked = order(seed + 5, n, 64)[rows]
    draws = sf.core.uniform(sf.fold_in(sf.key(seed + 6), n), (64,))[rows].tolist()
    better = [f"{a}+{b}={a + b}." for a, b in asked]
    worse = [wrong(a, b, draw) for (a, b), draw in zip(asked, draws, strict=True)]
    return tuple(as_rows(lines) for lines in (better, worse))


def wrong(a, b, draw):
    if draw < 0.2:
        return f"{a}+{b}={a + b}0"[:LENGTH]  # no end
    others = [c for c in range(19) if c != a + b]
    return f"{a}+{b}={others[int((draw - 0.2) / 0.8 * len(others))]}."


def as_rows(lines):
    ids = torch.tensor([encode(line) + [0] * (LENGTH - len(line)) for line in lines])
    return ids, torch.tensor([len(line) for line in lines])


def arguments(text):
    parser = arguments_of_ppo(text)
    parser.add_argument("--pairs", type=int, default=400, help="steps of the model of rewards (%(default)s)")
    return parser


def main():
    args = arguments(__doc__).parse_args()
    with sf.make_mesh({"dp": -1}) as mesh:
        _, ordered = train(args, mesh, sft.train(args, mesh))
        if mesh.rank == 0:
            print(f"pairs in order: {ordered:.0%}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
