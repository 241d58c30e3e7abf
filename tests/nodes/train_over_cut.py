"""The program of `test_cut_link` under torchrun: steps, until the link between the nodes is gone.

    train_over_cut.py DIRECTORY TIMEOUT

It writes to the directory: `at-RANK`, the number of steps made; `told-RANK`, its error and how long the step took that
raised it, as JSON.
"""

import json
import pathlib
import sys
import time

import torch

import shardfn as sf
from shardfn import optim

STEPS = 100_000


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"]).square().mean()


def main() -> None:
    directory, timeout = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    mesh = sf.make_mesh({"dp": -1}, device="cpu", timeout=timeout)
    step = sf.sharded_step(loss, optim.sgd(0.1), mesh=mesh, zero=sf.Zero(stage=3, persist_elements=0))
    state = step.init({"w": torch.ones(64, 64)})
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(mesh.rank))
    for n in range(STEPS):
        start = time.monotonic()
        try:
            state, _ = step(state, x)
        except BaseException as error:
            found = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
            (directory / f"told-{mesh.rank}").write_text(json.dumps(found))
            raise
        (directory / f"at-{mesh.rank}").write_text(str(n + 1))


if __name__ == "__main__":
    main()
