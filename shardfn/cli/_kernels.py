"""`shardfn kernels`: lists the ops with kernels, and checks and measures candidates in a file."""

import argparse
import pathlib
from collections.abc import Sequence

from shardfn.kernels import KERNELS, CheckReport, ProcessLimits, check_file, measure_file


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `shardfn kernels`."""
    commands = parser.add_subparsers(dest="action", required=True)
    about = "Lists the ops, with the arguments of a candidate."
    commands.add_parser("list", help=about, description=about)
    for name, about in (
        ("check", "Checks the functions of a file that have names of ops. Exit status 1 if a check fails."),
        ("bench", "Checks them, and measures each op by itself, against the present implementation."),
    ):
        add = (command := commands.add_parser(name, help=about, description=about)).add_argument
        add("file", type=pathlib.Path, metavar="FILE", help="a Python file")
        add("--op", nargs="+", default=[], metavar="NAME", help="these ops only (default: all of the file)")
        add("--seconds", type=float, default=120.0, help="of the import, and of the run (default %(default)s)")
        add("--memory-gib", type=float, default=4.0, metavar="GIB", help="of the process (default %(default)s)")
        if name == "bench":
            command.add_argument("--rounds", type=int, default=11, metavar="N", help="(default %(default)s)")


def kernels_command(args: argparse.Namespace) -> int:
    """Runs a command of `shardfn kernels`, and prints the result.

    Returns:
        The exit status: 1 if a check fails.

    Raises:
        ValueError: the file, or a function of the file, cannot be judged.
    """
    if args.action == "list":
        print("\n".join(kernel.schema for _, kernel in sorted(KERNELS.items())))
        return 0
    limits = ProcessLimits(args.seconds, int(args.memory_gib * (1 << 30)))
    reports = check_file(args.file, args.op, limits)
    print("\n".join(map(str, reports)))
    passed = [report.name for report in reports if report.passed]
    if args.action == "bench" and passed:
        print("\n".join(map(str, measure_file(args.file, passed, limits, rounds=args.rounds))))
    return _find_status(reports)


def _find_status(reports: Sequence[CheckReport]) -> int:
    return int(not all(report.passed for report in reports))
