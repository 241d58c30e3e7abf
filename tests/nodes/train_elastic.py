"""The program of `test_elastic` under torchrun: the loop of docs/elastic.md, with faults on demand.

    train_elastic.py DIRECTORY [--steps N] [--fault WHAT:RANK:STEP] [--gate STEP] [--timeout SECONDS]

It writes to the directory: checkpoints; `losses.jsonl`, a line a step; `told-R-N`, the error of rank N of round R;
`pid-NAME`, for each agent's NAME the process of its rank. At the step of a gate ranks wait for a file `gate-STEP`, or
for a signal.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

import torch

import shardfn as sf
from shardfn import checkpoint, optim
from shardfn.collectives import notice_of

ROWS, WIDTH = 8, 13
PATIENCE = 100.0


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"]).square().mean() + (params["b"] ** 2).mean()


def batch(n: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(n))


def fault(what: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    time.sleep(PATIENCE)


def main(*argv: str) -> int:
    """Trains to the end, or to a signal; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--fault", default="none:-1:-1")
    parser.add_argument("--gate", type=int, nargs="*", default=[])
    parser.add_argument("--timeout", type=float, default=60.0)
    args = parser.parse_args(argv)
    what, victim, at = args.fault.split(":")
    turn = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch.set_num_threads(1)

    mesh = sf.make_mesh({"dp": -1}, device="cpu", timeout=args.timeout)
    (args.directory / f"pid-{os.environ.get('NAME', mesh.rank)}").write_text(str(os.getpid()))
    zero = sf.Zero(stage=3, persist_elements=0, reduction="canonical", reduction_chunks=8)
    rule = optim.chain(optim.clip_by_global_norm(0.3), optim.adamw(1e-2))
    step = sf.sharded_step(loss, rule, mesh=mesh, zero=zero)
    state = step.init({"w": torch.linspace(-1, 1, 7 * WIDTH).view(WIDTH, 7), "b": torch.ones(5)})
    try:
        with (
            checkpoint.Manager(args.directory / "checkpoints", mesh=mesh, save_every=2) as manager,
            checkpoint.Preemption(mesh) as preemption,
        ):
            if manager.steps():
                state = manager.restore(state).tree
            for n in range(int(state.step), args.steps):
                if turn == "0" and (mesh.rank, n) == (int(victim), int(at)):
                    fault(what)
                end = time.monotonic() + PATIENCE
                while n in args.gate and not (args.directory / f"gate-{n}").exists() and time.monotonic() < end:
                    if notice_of(mesh).mine:
                        break
                    time.sleep(0.02)
                state, metrics = step(state, batch(n)[step.rows(ROWS)])
                if mesh.rank == 0:
                    with (args.directory / "losses.jsonl").open("a") as file:
                        row = {"step": n, "loss": float(metrics["loss"]).hex(), "world": mesh.size}
                        file.write(json.dumps(row) + "\n")
                manager.save(state, user={"next_batch": n + 1}, now=preemption.stopping or n + 1 == args.steps)
                if preemption.stopping:
                    break
    except sf.RankError as error:
        (args.directory / f"told-{turn}-{mesh.rank}").write_text(str(error))
        raise
    return preemption.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
