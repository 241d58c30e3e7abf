"""`shardfn kernels`: lists the ops with kernels, checks and measures candidates in a file, and writes tasks."""

import argparse
import functools
import inspect
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfn.core import key, make_mesh
from shardfn.inference import Engine, Sampling, decoder, limits_of
from shardfn.kernels import (
    KERNELS,
    MODULE_OPS,
    ArchitectureCoverage,
    CheckReport,
    ProcessLimits,
    check_file,
    find_architectures,
    find_op,
    list_checks,
    measure_file,
)
from shardfn.models import gpt
from shardfn.optim import adamw
from shardfn.transforms import sharded_step

_CONFIG = gpt.Config.llama_like(
    vocab_size=256, num_layers=2, d_model=128, num_heads=4, d_ff=256, max_len=64, batch_invariant=True
)


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `shardfn kernels`."""
    commands = parser.add_subparsers(dest="action", required=True)
    about = "Lists the ops, with the arguments of a candidate."
    commands.add_parser("list", help=about, description=about)
    for name, about in (
        ("check", "Checks the functions of a file that have names of ops. Exit status 1 if a check fails."),
        ("bench", "Checks them, and measures each op by itself and in steps, against the present implementation."),
    ):
        add = (command := commands.add_parser(name, help=about, description=about)).add_argument
        add("file", type=pathlib.Path, metavar="FILE", help="a Python file")
        add("--op", nargs="+", default=[], metavar="NAME", help="these ops only (default: all of the file)")
        add("--seconds", type=float, default=120.0, help="of the import, and of the run (default %(default)s)")
        add("--memory-gib", type=float, default=4.0, metavar="GIB", help="of the process (default %(default)s)")
        if name == "bench":
            command.add_argument("--rounds", type=int, default=11, metavar="N", help="(default %(default)s)")
            known = f"whole steps: {', '.join(STEPS)}, or MODULE:FUNCTION, which makes a step"
            command.add_argument("--steps", nargs="+", default=[], metavar="STEP", help=known)
    about = "Writes a folder for each op: the definition, inputs, a stub to fill in, and the rules of the checks."
    add = commands.add_parser("tasks", help=about, description=about).add_argument
    add("--out", type=pathlib.Path, required=True, metavar="DIR")
    add("--op", nargs="+", default=[], metavar="NAME", help="these ops only (default: all)")
    add(
        "--architectures",
        nargs="*",
        metavar="TYPE",
        help="writes architectures.md: the ops that these model types of transformers have (without types: all causal"
        " language models, which takes minutes)",
    )


def kernels_command(args: argparse.Namespace) -> int:
    """Runs a command of `shardfn kernels`, and prints the result.

    Returns:
        The exit status: 1 if a check fails.

    Raises:
        ValueError: the file, or a function of the file, cannot be judged.
    """
    if args.action == "list":
        own = (f"{x.name}({', '.join(x.argument_names)})" for x in MODULE_OPS.values())
        print("\n".join([*(kernel.schema for _, kernel in sorted(KERNELS.items())), *own]))
        return 0
    if args.action == "tasks":
        found = [] if args.architectures is None else find_architectures(args.architectures or None)
        print(f"{len(write_tasks(args.out, args.op, found))} tasks in {args.out}")
        return 0
    limits = ProcessLimits(args.seconds, int(args.memory_gib * (1 << 30)))
    reports = check_file(args.file, args.op, limits)
    print("\n".join(map(str, reports)))
    passed = [report.name for report in reports if report.passed]
    if args.action == "bench" and passed:
        steps = [STEPS[name] if name in STEPS else name for name in args.steps]
        print("\n".join(map(str, measure_file(args.file, passed, limits, rounds=args.rounds, steps=steps))))
    return _find_status(reports)


def _find_status(reports: Sequence[CheckReport]) -> int:
    return int(not all(report.passed for report in reports))


# Whole steps.


def training_step() -> Callable[[], Tensor]:
    """Returns a step of AdamW on a small batch-invariant GPT: each call trains, and returns the loss.

    Example:
        >>> step = training_step()
        >>> bool(step() > step())
        True
    """
    step = sharded_step(functools.partial(gpt.loss, _CONFIG), adamw(1e-3), mesh=make_mesh(alone=True))
    kept = [step.init(functools.partial(gpt.init, _CONFIG), key(0))]
    batch = {"tokens": torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0))}

    def run() -> Tensor:
        kept[0], metrics = step(kept[0], batch)
        return metrics["loss"]

    return run


def decode_step() -> Callable[[], Tensor]:
    """Returns a step of an engine of the same GPT: each call returns 8 tokens after each of 4 prompts.

    Example:
        >>> decode_step()().shape
        torch.Size([4, 8])
    """
    made = decoder(_CONFIG)
    limits = limits_of(made, running=4, buckets=(4, 64))
    engine = Engine(made, gpt.init(_CONFIG, key(0)), mesh=make_mesh(alone=True), limits=limits)
    prompts = [[7 * i + j for j in range(9)] for i in range(4)]
    sampling = Sampling(max_tokens=8, temperature=0.0)
    return lambda: torch.tensor([list(x.tokens) for x in engine.generate(prompts, sampling)])


# By the names of `--steps`, as MODULE:FUNCTION, which the process of a candidate imports.
STEPS = {"training": "shardfn.cli:training_step", "decode": "shardfn.cli:decode_step"}


# Tasks.


def write_tasks(
    out: pathlib.Path, names: Sequence[str] = (), architectures: Sequence[ArchitectureCoverage] = ()
) -> list[pathlib.Path]:
    """Writes a folder for each op, and a table of architectures.

    A folder has reference.py with the definition, inputs.py with arguments of all sizes, candidate.py with a function
    to fill in, and task.md with the rules.

    Args:
        out: directory.
        names: ops. Empty: all.
        architectures: result of `find_architectures`. Empty: no table.

    Returns:
        The folders.

    Raises:
        ValueError: there is no such op.
    """
    ops = [find_op(name) for name in names or sorted([*KERNELS, *MODULE_OPS])]
    for op in ops:
        folder, served = out / op.name, [x.model_type for x in architectures if op.name in x.calls]
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _make_files(op, served).items():
            (folder / name).write_text(text, encoding="utf-8")
    if architectures:
        (out / "architectures.md").write_text(_make_table(architectures), encoding="utf-8")
        rows = [x._asdict() for x in architectures]
        (out / "architectures.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return [out / op.name for op in ops]


def _make_files(op: Any, served: Sequence[str]) -> dict[str, str]:
    arguments = ", ".join(op.argument_names)
    checks = "\n".join(f"- {name}" for name in list_checks())
    source = inspect.getsource(inspect.unwrap(op.reference)) if inspect.isfunction(op.reference) else ""
    used = f"\n\n{len(served)} architectures of transformers have this function: {', '.join(served)}." if served else ""
    return {
        "reference.py": f'"""The definition of {op.name}."""\n\nfrom shardfn.kernels import find_op\n\n'
        f"reference = find_op({op.name!r}).reference\n",
        "inputs.py": f'"""Arguments of {op.name} at a size. Equal sizes have equal arguments."""\n\n'
        "import torch\n\nfrom shardfn.kernels import make_arguments\n\n\n"
        f"def inputs(rows, width, dtype=torch.float32):\n    return make_arguments({op.name!r}, rows, width, dtype)\n",
        "candidate.py": f'"""A candidate for {op.name}."""\n\n\ndef {op.name}({arguments}):\n'
        '    raise NotImplementedError("fill in")\n',
        "task.md": f"# {op.name}\n\nWrite a function `{op.name}({arguments})` in candidate.py that gives the results of"
        f" reference.py in less time.{used}\n\nThe definition:\n\n```python\n{source}```\n\n"
        "`shardfn kernels check candidate.py` runs these checks in a separate process, and names the first element that"
        f" differs:\n\n{checks}\n\n`shardfn kernels bench candidate.py --steps {' '.join(STEPS)}` takes turns with the"
        " present implementation: the function by itself, and whole steps that call it. A candidate counts if it passes"
        " all checks and no step is slower.\n",
    }


def _make_table(found: Sequence[ArchitectureCoverage]) -> str:
    names, built = list(MODULE_OPS), [x for x in found if not x.problem]
    full = [x for x in built if not x.unmatched]
    lines = [
        "# Architectures of transformers",
        "",
        f"{len(found)} model types, of which {len(built)} were built and run at a small size. The numbers count the"
        f" calls of a forward that have the numbers of a definition. {sum(bool(x.calls) for x in built)} types have an"
        f" op or more, and in {len(full)} types all modules with the role of an op match.",
        "",
        f"| model type | {' | '.join(names)} | other modules with these roles |",
        "|---|" + "---:|" * len(names) + "---|",
    ]
    for x in built:
        cells = [str(x.calls.get(name, "")) for name in names]
        lines.append(f"| {x.model_type} | {' | '.join(cells)} | {', '.join(x.unmatched)} |")
    total = [str(sum(name in x.calls for x in built)) for name in names]
    lines += [f"| types | {' | '.join(total)} | |", "", "Not built:", ""]
    return "\n".join([*lines, *(f"- {x.model_type}: {x.problem}" for x in found if x.problem)]) + "\n"
