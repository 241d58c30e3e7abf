"""Arguments of `shardfn plan`: the described run, and the machine of the estimate."""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from shardfn import core, graph
from shardfn.inference import Limits
from shardfn.schedules import SCHEDULES

from ._models import PRESETS, parse_model
from ._states import PRECISIONS, Setup

_NAMES = {"v100": "v100-32", "h200": "h200", "h100": "h100", "b200": "b200", "4090": "rtx4090", "a6000": "a6000"}


def device_cluster(name: str, shape: Mapping[str, int]) -> graph.Cluster:
    """Returns the cluster of a device by name. Processes on a CPU share the memory of this machine.

    Args:
        name: name of the device, as `DEVICES` lists it.
        shape: sizes of the mesh's axes.

    Raises:
        ValueError: the device is not known.
    """
    known = graph.cluster(name)
    return (
        _limit_memory(known, graph.machine_memory() // _local_ranks(known, shape))
        if known.device.name == "cpu"
        else known
    )


def local_cluster(shape: Mapping[str, int]) -> graph.Cluster:
    """Returns the cluster of the local device, with the memory. An unknown GPU computes as an A100.

    Args:
        shape: sizes of the mesh's axes.
    """
    if not torch.cuda.is_available():
        return device_cluster("cpu", shape)
    about = torch.cuda.get_device_properties(0)
    name = next((device for part, device in _NAMES.items() if part in about.name.lower()), "a100-80")
    return _limit_memory(graph.cluster(name), about.total_memory)


def _local_ranks(known: graph.Cluster, shape: Mapping[str, int]) -> int:
    """Returns the number of ranks on a single machine."""
    return max(1, min(math.prod(shape.values()), known.per_node))


def _limit_memory(known: graph.Cluster, memory: int) -> graph.Cluster:
    return dataclasses.replace(known, device=dataclasses.replace(known.device, memory=memory))


_AXES = ("dp", "tp", "pp")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn plan`."""
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--model",
        default="gpt2",
        help=f"{', '.join(PRESETS)}; or gpt:field=value,...; or preset:field=..; or a config.json of"
        " transformers (default gpt2)",
    )
    # Also without the option's name, as in `shardfn plan config.json`; suppressed, so the option's value stays.
    run.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model MODEL")
    run.add_argument(
        "--mesh", default="dp=1", help="dp=64, or pp=4,dp=8,tp=8: axis sizes, major to minor (default dp=1)"
    )
    run.add_argument(
        "--device",
        default="a100-80",
        help=f"{', '.join(graph.DEVICES)} (default %(default)s); ranks on a cpu share the memory of this machine",
    )
    run.add_argument("--zero", type=int, default=3, help="stage 0, 1, 2 or 3 (default 3)")
    run.add_argument("--precision", default="bf16-adam", help=f"{', '.join(PRECISIONS)} (default %(default)s)")
    run.add_argument("--batch", type=int, default=1, help="sequences a rank and step (default 1)")
    run.add_argument("--seq", type=int, help="tokens a sequence (default: the model's longest, at most 2048)")
    run.add_argument(
        "--accumulate", type=int, default=1, help="microbatches a step (default 1), also those of the pipeline"
    )
    run.add_argument("--remat", action="store_true", help="compute each block again in the backward")
    run.add_argument("--schedule", default="1f1b", help=f"of a mesh with pp: {', '.join(SCHEDULES)} (default 1f1b)")
    run.add_argument("--ep", type=int, default=1, help="of the ranks along dp, those on which experts lie (default 1)")
    run.add_argument("--efficiency", type=float, default=0.6, help="fraction of the peak rate in use (default 0.6)")
    run.add_argument("--bucket-bytes", type=int, default=core.Travel().bucket_bytes, help="Travel(bucket_bytes=)")
    run.add_argument("--prefetch-bytes", type=int, default=core.Pace().prefetch_bytes, help="Pace(prefetch_bytes=)")
    run.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters alone (default 0: all weights)"
    )
    run.add_argument("--quantization", choices=tuple(core.GROUP_BYTES), help="of the matrices with adapters")
    for kind, default in (("params", ""), ("grads", ""), ("optimizer", ""), ("activations", ", with --remat")):
        kinds = core.TENSOR_KINDS if kind == "activations" else get_args(core.MemoryKind)
        run.add_argument(f"--{kind}", default="device", choices=kinds, help=f"their memory{default} (default device)")
    run.add_argument("--recipe", help="a published run in place of all of these: mt-nlg-530b, bloom-176b, ...")
    run.add_argument("--recipes", action="store_true", help="all published runs, with the claims of their authors")
    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "--search", action="store_true", help="find the fastest stage, accumulation, remat (and tp) that fits"
    )
    out.add_argument(
        "--longest", action="store_true", help="find the longest sequence that fits if all ranks cut one, and how"
    )
    out.add_argument("--exact", action="store_true", help="capture the step too, and read memory and traffic off it")
    out.add_argument("--json", action="store_true", help="JSON instead of tables")
    out.add_argument("--out", help="write the report to this file too")
    out.add_argument("--png", help="write a picture to this file (needs matplotlib)")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the plan of a server."""
    group = parser.add_argument_group("a server, in place of a run")
    add = group.add_argument
    add("--serve", action="store_true", help="plan a server: the fewest replicas, or with --search the layout, too")
    add("--trace", metavar="FILE", help="requests: JSON lines of seconds, prompt, answer; Mooncake's; a log")
    add("--slo", action="append", default=[], metavar="p95_itl=50ms", help="of ttft, itl or e2e; may be repeated")
    add(
        "--dtype", choices=("float32", "bfloat16"), help="of weights and cache (default: bfloat16, or float32 on a cpu)"
    )
    add("--context", type=int, metavar="N", help="the most tokens of a sequence (default: the model's)")
    add("--running", type=int, default=Limits.running, metavar="N", help="sequences at a time (default %(default)s)")
    add("--budget", type=int, default=Limits.buckets[-1], metavar="N", help="rows of a step (default %(default)s)")
    add("--cache-gib", type=float, metavar="GIB", help="of a replica's cache (default: what its devices have left)")
    add("--calibrate", metavar="LOG", help="times as in a log of shardfn serve --decisions, not of the device's rates")
    add("--most-replicas", type=int, default=64, metavar="N", help="that are tried (default %(default)s)")
    add("--svg", metavar="FILE", help="write a picture of the latencies to this file")
    add("--replay", metavar="LOG", help="make the decisions of a log again, and compare them")


def check_recipe_alone(args: argparse.Namespace, what: str) -> None:
    """Refuses options that set up a run next to `--recipe` or `--recipes`, which have settings.

    Args:
        args: arguments of the command.
        what: option and its value, for the message.

    Raises:
        ValueError: lists such options.
    """
    given = list_given(args, outside=("command", "recipe", "recipes", "json", "out", "png"))
    core.raise_all(ValueError, f"{what} is a whole run; leave out, or plan without a recipe:", given)


def list_given(args: argparse.Namespace, *, outside: Sequence[str] = (), only: Sequence[str] = ()) -> list[str]:
    """Returns the options with other values than their defaults.

    Args:
        args: arguments of the command.
        outside: names that are left out.
        only: names that count. Default: all.
    """
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    add_server_arguments(parser)
    given = [(name, value) for name, value in vars(args).items() if name not in outside and (not only or name in only)]
    changed = [(name, value) for name, value in given if value != parser.get_default(name)]
    return [f"--{name.replace('_', '-')} {value}" for name, value in changed]


def parse_setup(args: argparse.Namespace) -> Setup:
    """Returns the run that the arguments describe.

    Raises:
        ValueError: names the wrong argument and the nearest known word.
    """
    config, shape = parse_model(args.model), parse_mesh(args.mesh)
    travel, pace = core.Travel(bucket_bytes=args.bucket_bytes), core.Pace(prefetch_bytes=args.prefetch_bytes)
    return Setup(
        args.model,
        config,
        shape,
        device_cluster(args.device, shape),
        _parse_zero(args, travel, pace),
        args.precision,
        batch=args.batch,
        seq=min(config.max_len, 2048) if args.seq is None else args.seq,
        accumulate=args.accumulate,
        remat=args.remat,
        efficiency=args.efficiency,
        schedule=args.schedule,
        ep=args.ep,
        activations=args.activations,
        lora=args.lora,
        quantization=args.quantization,
    )


def _parse_zero(args: argparse.Namespace, travel: core.Travel, pace: core.Pace) -> core.Zero:
    kinds = {name: getattr(args, name) for name in ("params", "grads", "optimizer")}
    disk = core.Disk(".") if any(map(core.is_disk, kinds.values())) else None
    return core.Zero(stage=args.zero, travel=travel, pace=pace, disk=disk, **kinds)


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the axis sizes in a text such as `dp=8,tp=2`, in the order given.

    Raises:
        ValueError: lists every entry that is not an axis of a plan or has no positive size.

    Example:
        >>> parse_mesh("dp=8,tp=2")
        {'dp': 8, 'tp': 2}
    """
    shape: dict[str, int] = {}
    problems = []
    for item in filter(None, (i.strip() for i in text.split(","))):
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in _AXES:
            problems.append(_unknown_axis(name))
        elif not size.isdecimal() or int(size) < 1:
            problems.append(f"axis {name!r} has size {size!r}; write {name}=8, for example.")
        elif name in shape:
            problems.append(f"axis {name!r} is given twice.")
        else:
            shape[name] = int(size)
    core.raise_all(ValueError, f"--mesh {text}:", problems)
    return shape or {"dp": 1}


def _unknown_axis(name: str) -> str:
    if name in core.HOUSE_AXES:
        return f"a plan does not know axis {name!r} yet; it knows {', '.join(_AXES)}. Leave {name!r} out."
    return f"axis {name!r} is not known.{core.did_you_mean(name, _AXES)} Known: {', '.join(_AXES)}."
