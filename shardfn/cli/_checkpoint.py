"""`shardfn checkpoint`: shows, verifies and compares checkpoints, and exports and imports weights."""

import argparse

from shardfn.checkpoint import diff, inspect, verify
from shardfn.interop import export_checkpoint, import_weights

_DTYPES = ("float32", "bfloat16", "float16")


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the commands of `shardfn checkpoint`."""
    commands = parser.add_subparsers(dest="what", required=True)
    for name, about in (
        ("inspect", "Lists the contents of a checkpoint: a line a leaf."),
        ("verify", "Reads a checkpoint from end to end. Exit status 1 if a byte differs from the one written."),
        ("diff", "Lists the leaves in which two checkpoints differ, however they were cut. Exit status 1 if they do."),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("path", help="a run's directory, or step_000100 in one")
        command.add_argument("--step", type=int, help="which of a run's checkpoints (default: the newest)")
        if name == "diff":
            command.add_argument("other", help="the other one")
            command.add_argument("--other-step", type=int, help="which of the other run's checkpoints")
    about = "Writes the parameters of a checkpoint, master copies where there are some, as safetensors files."
    command = commands.add_parser("export", help=about, description=about)
    command.add_argument("path", help="a run's directory, or step_000100 in one")
    command.add_argument("out", help="the directory for model.safetensors")
    command.add_argument("--step", type=int, help="which of a run's checkpoints (default: the newest)")
    command.add_argument(
        "--dtype", choices=_DTYPES, help="the dtype to round to (default: the one in which they are kept)"
    )
    about = "Makes a checkpoint of parameters from safetensors files."
    command = commands.add_parser("import", help=about, description=about)
    command.add_argument("weights", help="a directory with model.safetensors, or with its index")
    command.add_argument("path", help="a run's directory")
    command.add_argument("--step", type=int, default=0, help="the checkpoint's number (default: 0)")


def checkpoint_command(args: argparse.Namespace) -> int:
    """Runs one of the commands.

    Returns:
        The exit status.

    Raises:
        OSError: the checkpoint is missing or damaged.
        ValueError: the checkpoint was written by a newer version, or holds no parameters.
        ImportError: the checkpoint has a URL, and the package for the protocol is missing.
    """
    if args.what == "export":
        names = export_checkpoint(args.path, args.out, args.step, dtype=args.dtype)
        print(f"{len(names)} parameters written to {args.out}")
        return 0
    if args.what == "import":
        names = import_weights(args.weights, args.path, args.step)
        print(f"{len(names)} parameters saved in {args.path}; restore them with restore(..., at='params')")
        return 0
    if args.what == "inspect":
        print(inspect(args.path, args.step))
        return 0
    if args.what == "verify":
        found = verify(args.path, args.step)
        print(f"step {found.step}: {found.files} files, {found.bytes:,} bytes, unchanged")
        return 0
    found = diff(args.path, args.other, steps=(args.step, args.other_step))
    for x in found:
        print(f"{x.path}: {x.what}" + ("" if x.largest is None else f", by {x.largest:g} at most"))
    if not found:
        print("no leaf differs")
    return 1 if found else 0
