"""The program of `test_two_nodes` under torchrun: steps on a mesh over two nodes, against one device.

Prints, from the first rank of each node, the planned bytes and the kernel's count, as one line of JSON.
"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import P, optim
from shardfn.engine import comms_of
from shardfn.models import gpt
from shardfn.testing import assert_parity

INTERFACE = os.environ["GLOO_SOCKET_IFNAME"]
CONFIG = gpt.Config.llama_like(
    vocab_size=512, d_ff=None, num_layers=4, d_model=128, num_heads=4, max_len=64, stacked=True
)
WARM, STEPS, ROWS, TOKENS = 2, 4, 8, 64


def sent() -> int:
    """The bytes that have left this node, by the kernel's count, with frames."""
    lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(x.split()[9]) for x in lines if x.strip().startswith(f"{INTERFACE}:"))


def counted(run) -> tuple[int, sf.collectives.Traffic]:  # pyright: ignore[reportMissingParameterType]
    """The bytes that leave the node while all ranks run `run`, and this rank's traffic."""
    dist.barrier()
    before = sent()
    dist.barrier()
    with sf.count_traffic() as traffic:
        run()
    dist.barrier()
    return sent() - before, traffic


def whole_node(x: float) -> float:
    """The sum over the ranks of this node."""
    all_of_them = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, (os.environ["GROUP_RANK"], x))
    return sum(x for node, x in all_of_them if node == os.environ["GROUP_RANK"])  # pyright: ignore


def frames(mesh: sf.Mesh, axis: str) -> float:
    """Bytes on the link for a byte of payload: of sums of one mebibyte."""
    run = sf.shard_map(lambda x: sf.psum(x, axis), mesh=mesh, in_specs=P(), out_specs=P())

    def all_of_it() -> None:
        for _ in range(8):
            run(torch.ones(2**18))

    link, traffic = counted(all_of_it)
    return link / whole_node(traffic.across(axis, mesh.shape))


def main() -> None:
    """Runs the layout that is named on the command line."""
    torch.set_num_threads(1)
    across, stage = sys.argv[1], int(sys.argv[2])
    hops = across == "node"
    mesh = sf.make_mesh({across: 2, "dp" if hops else "tp": 2}, device="cpu")
    cut = ("node", "dp") if hops else "dp"
    if hops:
        loss, specs = (lambda p, b: gpt.loss(CONFIG, p, b)), P()
        zero = sf.Zero(stage=stage, axis=cut, persist_elements=0, travel=sf.Travel(secondary_axis="dp"))
    elif across == "pp":
        loss, specs, zero = (
            sf.pipeline(*gpt.stages(CONFIG, axis="tp"), num_microbatches=2),
            gpt.specs(CONFIG, tp="tp", pp="pp"),
            None,
        )
    else:
        loss, specs = (lambda p, b: gpt.loss(CONFIG, p, b, axis="tp")), gpt.specs(CONFIG, tp="tp")
        zero = sf.Zero(stage=stage, persist_elements=0)
    g = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(512, (ROWS, TOKENS + 1), generator=g)} for _ in range(2)]
    params = sf.core.tree_map(lambda x: x.double(), gpt.init(CONFIG, sf.key(0)))
    how = {"mesh": mesh, "specs": specs, "batch": P(cut), "zero": zero}
    assert_parity(
        loss, optim.sgd(0.1, momentum=0.9), params, batches, reference=lambda p, b: gpt.loss(CONFIG, p, b), **how
    )

    step = sf.sharded_step(loss, optim.sgd(1e-3), **how)
    state = step.init(sf.core.tree_map(lambda x: x.float(), params))
    share = mesh.axes(cut)
    mine = sf.core.tree_map(lambda x: x.chunk(mesh.axis_size(share))[mesh.axis_index(share)], batches[0])
    for _ in range(WARM):
        state, _ = step(state, mine)

    def steps() -> None:
        nonlocal state
        for _ in range(STEPS):
            state, _ = step(state, mine)

    link, traffic = counted(steps)
    planned = whole_node(traffic.across(across, mesh.shape))
    made = comms_of(mesh).channels._made.items()  # pyright: ignore[reportAttributeAccessIssue]
    shared = {axis for (_, axes), channel in made if channel.shared_bytes for axis in axes}
    sent_out = {axis for (_, axes), channel in made if not channel.shared_bytes for axis in axes}
    found = {
        "memory": sorted(shared),
        "gloo": sorted(sent_out),
        "planned": planned,
        "link": link,
        "frames": frames(mesh, across),
        "node": os.environ["GROUP_RANK"],
    }
    if os.environ["LOCAL_RANK"] == "0":
        print(json.dumps(found | {"by_op": {f"{op} {axes}": n for (op, axes), n in traffic.by_op.items()}}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
