"""Compares tokens sent to their experts ("ep") with experts gathered a layer ahead (AsyncEP), by the cost model.

Steps of 2 and of 3 layers are captured over an abstract mesh of 4 ranks, so that the third layer has the bytes and time
of the program, with and without experts. AsyncEP takes the larger of a layer's time and the gather of its experts. "ep"
takes a layer's time and two exchanges of 2 k S D b (P - 1) / P^2 bytes a rank, for equally busy experts:

    S* = B (P - 1) / P  F / (W f)     B bytes of a layer's experts, F and W rates of a device and its link,
                                      f operations of a token in a layer

    python benchmarks/bench_async_experts.py --devices h200 a100-80
"""

import argparse
from collections.abc import Sequence

from shardfn.cli._arguments import device_cluster
from shardfn.core import deferred, key, make_mesh
from shardfn.inference import Runner, decoder, limits_of
from shardfn.models import gpt
from shardfn.models.moe import Experts
from shardfn.nn import moe

RANKS, D, F, E, K = 4, 4096, 14336, 8, 2
BUCKETS = (512, 2048, 4096)
Cost = tuple[float, float, float]  # seconds, bytes sent and operations of a layer


def lower_steps(layers: int, devices: Sequence[str], *, with_experts: bool) -> dict[tuple[str, str, int], Cost]:
    """Returns the cost of steps on each device, in each layout and bucket."""
    experts = Experts(num=E, top_k=K, exchange=moe.AllReduce("tp", in_order=True)) if with_experts else None
    config = gpt.Config(
        **{"vocab_size": 8192, "num_layers": layers, "d_model": D, "num_heads": 32, "num_kv_heads": 8, "d_ff": F},
        **{"max_len": 8192, "norm": "rms", "mlp": "swiglu", "bias": False, "position": "rope"},
        experts=experts,
        batch_invariant=True,
    )
    with deferred():
        params = gpt.init(config, key(0))
    mesh, one, found = make_mesh({"tp": RANKS}, device="cpu", abstract=True), decoder(config, tp="tp"), {}
    for layout in ("sp",):
        limits = limits_of(one, running=8, buckets=BUCKETS, layouts=((layout, 1),))
        runner = Runner(one, limits, mesh=mesh)
        for bucket in BUCKETS:
            lowered = runner.lower_step(params, bucket)
            cost = lowered.cost_analysis()
            for device in devices:
                seconds = lowered.estimate(device_cluster(device, {"tp": RANKS})).seconds
                found[device, layout, bucket] = seconds, cost.sent, cost.flops
    return found


def find_layer(devices: Sequence[str], *, with_experts: bool = True) -> dict[tuple[str, str, int], Cost]:
    """Returns the cost of a further layer."""
    two, three = (lower_steps(n, devices, with_experts=with_experts) for n in (2, 3))
    return {at: tuple(b - a for a, b in zip(two[at], three[at], strict=True)) for at in two}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["h200", "a100-80"])
    args = parser.parse_args()
    layer = find_layer(args.devices)
    dense = find_layer(args.devices[:1], with_experts=False)
    held = 3 * E * D * F * 4  # bytes of a layer's experts in float32
    print(f"{E} experts, {K} a token, D={D}, F={F}, float32, {RANKS} ranks; rows of all ranks together\n")
    for device in args.devices:
        cluster = device_cluster(device, {"tp": RANKS})
        gather = cluster.inside.seconds(held * (RANKS - 1) / RANKS, RANKS - 1)
        print(f"{device}: a layer's experts take {1e3 * gather:.2f} ms to gather\n")
        print("| rows | ep ms | AsyncEP ms | ep / AsyncEP | MB of tokens for experts, ep | AsyncEP, counted |")
        print("|---|---|---|---|---|---|")
        sent, gathered = list[float](), list[float]()
        for b in BUCKETS:
            (u, y, _), base = layer[device, "sp", b], dense[args.devices[0], "sp", b][1]
            moved = 2 * K * b * D * 4 * (RANKS - 1) / RANKS**2
            sent.append(u + 2 * cluster.inside.seconds(moved / 2, RANKS - 1))
            gathered.append(max(u, gather))
            print(
                f"| {b} | {1e3 * sent[-1]:.2f} | {1e3 * gathered[-1]:.2f} | {sent[-1] / gathered[-1]:.2f} |"
                f" {moved / 1e6:.2f} | {(y - base) / 1e6:.2f} |"
            )
        # Times of a layer grow by a number for each row, so that both are ratios.
        rows = BUCKETS[-1]
        saturated, crossing = gather * rows / layer[device, "sp", rows][0], gather * rows / sent[-1]
        print(f"\nS* {saturated:.0f} rows; crossing {crossing:.0f} rows, {crossing / saturated - 1:+.1%} of S*\n")


if __name__ == "__main__":
    main()
