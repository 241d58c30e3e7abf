"""A ring's attention on a CPU, forward and backward: beside torch's experimental context parallelism, and its overlap.

torch's `context_parallel` has no ring for the attention of CPUs; its error is in the report. Its ring is a
template, though, which takes any kernel: here it gets torch's own for CPUs. Both have the same tokens of a causal
sequence in the balanced order, and the same results, which is checked. `nn.Ring` runs with the ranks of a link of
`--rate`, too, whole, with its messages left out (each rank takes its own message for the one received), and with its
messages alone. The hidden part of the shorter of these two is

    (compute + messages - whole) / min(compute, messages)

All take turns within a round, in the same processes, and ratios are formed within a round. The link needs root and
iproute2, see `slow_link.py`; without them that part is left out, with the reason.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _pairs import Group
from _report import publish, table
from slow_link import Link, describe, why_unavailable

OURS, KINDS = "nn.Ring", ("all_gather", "all_to_all")
COMPUTE, MESSAGES = "without messages", "messages alone"
Shape = tuple[int, int, int]  # tokens, heads, size of a head
Times = dict[str, list[float]]


def own_tensors(rank: int, world: int, shape: Shape) -> list[torch.Tensor]:
    """q, k, v and a cotangent of this rank's tokens: [1, T / world, H, K], in the order of zigzag."""
    T, H, K = shape
    g = torch.Generator().manual_seed(0)
    parts = torch.arange(T).view(2 * world, -1)
    mine = torch.cat([parts[rank], parts[2 * world - 1 - rank]])
    return [torch.randn(1, T, H, K, generator=g)[:, mine].contiguous() for _ in range(4)]


def ours(rank: int, world: int, shape: Shape) -> Callable[[], list[torch.Tensor]]:
    """y, dq, dk and dv by `nn.Ring`."""
    import shardfn as sf
    from shardfn import nn
    from shardfn.collectives import bind_mesh

    mesh, (*qkv, w) = sf.make_mesh({"sp": world}, device="cpu"), own_tensors(rank, world, shape)
    leaves = [x.requires_grad_() for x in qkv]
    body = nn.Ring("sp", shape[0], zigzag=True)

    def run() -> list[torch.Tensor]:
        with bind_mesh(mesh):
            y = nn.attention(*leaves, mask=nn.Causal(), impl=body)
            return [y.detach(), *torch.autograd.grad(y, leaves, w)]

    return run


def torchs(rank: int, world: int, shape: Shape, kind: str) -> Callable[[], list[torch.Tensor]]:
    """The same by torch's templates of a ring around its kernel for CPUs."""
    import torch.distributed as dist

    cp: Any = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    q, k, v, w = (x.transpose(1, 2).contiguous() for x in own_tensors(rank, world, shape))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    group = dist.group.WORLD

    def back(*, query: Any, key: Any, value: Any, grad_out: Any, out: Any, logsumexp: Any, is_causal: bool) -> Any:
        return backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def run() -> list[torch.Tensor]:
        cp._cp_options.rotate_method = cp._RotateMethod[kind.upper()]
        y, lse, *_ = cp._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        grads = cp._templated_ring_attention_backward(group, 2, back, w, "grad_out", q, k, v, y, lse, is_causal=True)
        return [x.transpose(1, 2) for x in (y, *grads[:3])]

    return run


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Within it a ring sends nothing, or computes nothing."""
    from shardfn.nn import _ring

    usual = _ring._start_send, _ring.attend_over, _ring.gradients_over
    if what == COMPUTE:
        _ring._start_send = lambda x, *_: lambda: x
    if what == MESSAGES:
        _ring.attend_over = lambda qkv, *_: (
            torch.zeros_like(qkv[0]),
            qkv[0].new_zeros(qkv[0].shape[:3]).transpose(1, 2),
        )
        _ring.gradients_over = lambda dy, qkv, *_: tuple(map(torch.zeros_like, qkv))
    try:
        yield
    finally:
        _ring._start_send, _ring.attend_over, _ring.gradients_over = usual


def serve(rank: int, world: int, shape: Shape) -> Callable[[str], tuple[float, float]]:
    """A rank's seconds of the clock and of its processor for each request; all results are compared once."""
    import torch.distributed as dist

    runs = {OURS: ours(rank, world, shape)} | {kind: torchs(rank, world, shape, kind) for kind in KINDS}
    want = runs[OURS]()
    for kind in KINDS:
        for name, a, b in zip(("y", "dq", "dk", "dv"), runs[kind](), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name} of torch's: {m}")

    def answer(asked: str) -> tuple[float, float]:
        run = runs.get(asked, runs[OURS])
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        with left_out(asked):
            run()
        return time.perf_counter() - start, time.process_time() - busy

    return answer


def serve_public(rank: int, world: int, shape: Shape) -> Callable[[None], str]:
    """The result or error of `context_parallel` on a CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v, _ = (x.transpose(1, 2).contiguous() for x in own_tensors(rank, world, shape))
    mesh = init_device_mesh("cpu", (world,))

    def answer(asked: None) -> str:
        del asked
        try:
            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return "it ran"

    return answer


def measure(group: Group, names: list[str], rounds: int) -> tuple[Times, Times]:
    """The seconds of the slowest rank, and those of the processors, by round and case."""
    wall, busy = Times(), Times()
    for n in range(rounds + 1):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            found = group.ask(name)
            if n:
                wall.setdefault(name, []).append(max(x for x, _ in found))
                busy.setdefault(name, []).append(sum(x for _, x in found) / len(found))
    return wall, busy


def report(wall: Times, busy: Times, peers: list[str]) -> str:
    """Medians, and our seconds over each peer's."""
    rows = []
    for name in wall:
        ratios = [a / b for a, b in zip(wall[OURS], wall[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        told = f"{middle:.2f} ({low:.2f} to {high:.2f})" if name in peers else ""
        label = f"torch's ring, {name}" if name in KINDS else name
        rows.append([label, f"{statistics.median(wall[name]):.3f}", f"{statistics.median(busy[name]):.3f}", told])
    return table(["", "seconds", "CPU s a rank", "nn.Ring over it"], rows)


def hidden(wall: Times) -> str:
    """The part of the messages that is hidden behind compute, or of compute behind messages."""
    rounds = zip(wall[OURS], wall[COMPUTE], wall[MESSAGES], strict=True)
    found = [(b + c - a) / min(b, c) for a, b, c in rounds]
    low, middle, high = statistics.quantiles(found, n=4)
    return f"Of the shorter of compute and messages {middle:.0%} is hidden ({low:.0%} to {high:.0%})."


def main() -> None:
    """Measures and reports."""
    args = _arguments()
    shape = args.tokens, args.heads, args.dim
    parts = [
        f"{args.tokens} tokens, causal, {args.heads} heads of {args.dim}, float32, {args.ranks} ranks of one thread,"
        f" {args.rounds} rounds; forward and backward; medians and quartiles",
    ]
    public = Group(serve_public, args.ranks, ((512, 2, 16),)).ready()
    parts.append(f"`context_parallel` on a CPU: {public.ask(None)[0]}")
    public.close()
    group = Group(serve, args.ranks, (shape,)).ready()
    parts += ["On one host", report(*measure(group, [OURS, *KINDS], args.rounds), list(KINDS))]
    group.close()
    parts.append(_on_a_link(args, shape))
    publish("A ring's attention", "\n\n".join(parts), out=args.out)


def _on_a_link(args: argparse.Namespace, shape: Shape) -> str:
    if reason := why_unavailable():
        return f"No link: {reason}"
    with Link(args.ranks, args.rate) as link:
        told = describe(link.check())
        group = Group(serve, args.ranks, (shape,), link=link).ready()
        wall, busy = measure(group, [OURS, COMPUTE, MESSAGES, *KINDS], args.rounds)
        group.close()
    return "\n\n".join([told, report(wall, busy, list(KINDS)), hidden(wall)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="", help="Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
