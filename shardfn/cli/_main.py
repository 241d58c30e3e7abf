"""The program `shardfn`: reads arguments, calls the public functions, prints."""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardfn.core import RankError, raise_all
from shardfn.kernels import build_all, cxx_compiler, generation
from shardfn.memory import DamagedError
from shardfn.waits import end_imports

from ._arguments import add_plan_arguments, add_server_arguments, check_recipe_alone, parse_setup
from ._bench import add_bench_arguments, bench
from ._checkpoint import add_checkpoint_arguments, checkpoint_command
from ._env import env_text
from ._eval import add_eval_arguments, eval_command
from ._exact import exact
from ._finetune import finetune
from ._finetune_job import add_finetune_arguments, parse_job
from ._generate import generate
from ._generate_job import add_generate_arguments, parse_generate
from ._kernels import add_kernels_arguments, kernels_command
from ._plan import JobPlan, plan
from ._pretrain import pretrain
from ._pretrain_job import add_pretrain_arguments, parse_pretrain
from ._recipes import recipe, recipe_json, recipe_text, recipes_json, recipes_text
from ._report import (
    advice_text,
    dump,
    longest_json,
    longest_text,
    plan_json,
    plan_text,
    search_json,
    search_text,
    write_chart,
)
from ._search import longest, search
from ._serve import add_batch_arguments, parse_batch, serve_command
from ._serve_command import check_no_server, replay_command, server_command
from ._serve_job import add_serve_arguments, parse_serve
from ._speculate import add_speculate_arguments, parse_speculate, speculate
from ._states import Setup
from ._units import of_limit

_FACTORS = (2, 4, 8, 16, 32, 64)
# Below this part of the best plan a plan is not worth a larger batch. Above, the smallest batch is taken.
_NEAR = 0.9


def advice(made: JobPlan) -> tuple[str, ...]:
    """Returns changes by which a run fits, or is faster by at least a tenth, empty without any."""
    return _suggest_fit(made) if not made.fits else _suggest_speed(made)


def _suggest_fit(made: JobPlan) -> tuple[str, ...]:
    s = made.setup
    tried = [(" and ".join(words), p) for words, setup in _smaller_setups(s) for p in [plan(setup)] if p.fits]
    if tried:
        words, p = tried[0]
        return (f"{_make_sentence(words)}: then it takes {of_limit(p.peak, p.limit)}.",)
    return (
        "No stage, number of microbatches or --remat makes it fit on this mesh: take more ranks (--mesh), a larger"
        " --device, or let shardfn plan --search find how many microbatches and ranks along tp it takes.",
    )


def _smaller_setups(s: Setup) -> Iterator[tuple[list[str], Setup]]:
    """Yields settings that take less memory, the cheapest change first."""
    for stage in range(s.zero.stage, 4):
        for k in dict.fromkeys((s.accumulate, s.batch)):
            for remat in (s.remat,) if s.remat else (False, True):
                words = [f"take --zero {stage}"] if stage != s.zero.stage else []
                words += [f"--accumulate {k}"] if k != s.accumulate else []
                words += ["--remat"] if remat != s.remat else []
                if words:
                    zero = dataclasses.replace(s.zero, stage=stage)
                    yield words, dataclasses.replace(s, zero=zero, accumulate=k, remat=remat)


def _suggest_speed(made: JobPlan) -> tuple[str, ...]:
    s, cost = made.setup, made.cost
    if cost.dominates == "computation" and cost.mfu > 0.5 * s.efficiency:
        return ()
    found = []
    for factor in _FACTORS:
        # Larger microbatches first: transfers of stage 3 are made again for each microbatch.
        for k in (s.accumulate, s.accumulate * factor):
            p = plan(dataclasses.replace(s, batch=s.batch * factor, accumulate=k))
            if p.fits:
                found.append(p)
    best = max((p.cost.mfu for p in found), default=0.0)
    if best < 1.1 * cost.mfu:
        return ()
    p = next(p for p in found if p.cost.mfu >= _NEAR * best)
    words = f"--batch {p.setup.batch}" + (f" --accumulate {p.setup.accumulate}" if p.setup.accumulate > 1 else "")
    why = {
        "waiting for data-parallel transfers": "the transfers of a step take as long for a few tokens as for many",
        "the pipeline": "more microbatches fill the pipeline",
        "the optimizer's memory traffic": "the update takes as long for a few tokens as for many",
    }.get(cost.dominates, "the work that a step does once takes as long for a few tokens as for many")
    return (
        f"Raise --batch: {why}. With {words} MFU is {p.cost.mfu:.1%} instead of {cost.mfu:.1%}, at"
        f" {of_limit(p.peak, p.limit)}; a global batch is {p.setup.tokens:,} tokens then, not {s.tokens:,}.",
    )


def _make_sentence(words: str) -> str:
    return "Take" + words.removeprefix("take") if words.startswith("take") else f"Take {words}"


def build_command() -> int:
    """Builds all C++ for this processor, and prints a line for each file.

    Returns:
        The exit status: 1 if a file could not be built.
    """
    processor = f"x86-64-v{form}" if (form := generation()) else "this processor"
    print(f"C++ kernels for {processor}, by {cxx_compiler() or 'no compiler'}:", flush=True)
    failed = 0
    for name, state, path in build_all():
        failed += path is None
        print(f"  {name:<24}{state}" + ("" if path is None else f"  {path}"), flush=True)
    if failed:
        print(f"{failed} files could not be built. Kernels run in plain torch, slowly, or raise if the compiler fails.")
    return int(failed > 0)


_BEST = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of shardfn, and returns the exit status.

    Args:
        argv: arguments of the program. Default: the arguments of the process.

    Returns:
        The exit status: 0, or 1 if the run (with `--search`: every run) does not fit, if a checkpoint is damaged, if
        two differ, or if the loss of a run is not finite; 2 for arguments that make no sense, or that a model refuses.

    Example:
        >>> main(["plan", "--model", "gpt3", "--json"])
        2
    """
    end_imports()
    parser = argparse.ArgumentParser(prog="shardfn", description="Large-model training as pure functions.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "Estimates a run: memory by kind, traffic, time. Exit status 1 if it does not fit."
    planning = commands.add_parser("plan", help=about, description=about)
    add_plan_arguments(planning)
    add_server_arguments(planning)
    about = "Fine-tunes a causal model of transformers on JSON lines; under torchrun on several ranks."
    add_finetune_arguments(commands.add_parser("finetune", help=about, description=about))
    about = "Trains a GPT on text by a TOML file; under torchrun on several ranks."
    add_pretrain_arguments(commands.add_parser("pretrain", help=about, description=about))
    about = "Completes prompts by a model of Hugging Face, a GGUF file, or a run of examples/train_gpt.py."
    add_generate_arguments(commands.add_parser("generate", help=about, description=about))
    about = "Evaluates a model by tasks of lm-evaluation-harness. Numbers do not depend on batches, threads or ranks."
    add_eval_arguments(commands.add_parser("eval", help=about, description=about))
    about = "Trains a speculator, which guesses tokens for such a model, on a text."
    add_speculate_arguments(commands.add_parser("speculate", help=about, description=about))
    about = "Serves such a model by OpenAI's HTTP interface, on one machine."
    add_serve_arguments(commands.add_parser("serve", help=about, description=about))
    about = "Answers a file of requests in the format of OpenAI's batches, by such a model."
    add_batch_arguments(commands.add_parser("batch", help=about, description=about))
    about = "Measures a running server."
    add_bench_arguments(commands.add_parser("bench", help=about, description=about))
    about = "Looks at checkpoints: their contents, whether they are intact, how two differ."
    add_checkpoint_arguments(commands.add_parser("checkpoint", help=about, description=about))
    about = "Lists the optional programs that this machine has, and the features that do not work without the others."
    commands.add_parser("env", help=about, description=about)
    about = "Builds the C++ of all kernels for this processor, which other commands do when they first need a kernel."
    commands.add_parser("build", help=about, description=about)
    about = "Lists the ops with kernels, and checks and measures candidates in a file."
    add_kernels_arguments(commands.add_parser("kernels", help=about, description=about))
    args = parser.parse_args(argv)
    if args.command == "build":
        return build_command()
    if args.command == "env":
        print(env_text())
        return 0
    try:
        if args.command == "bench":
            return bench(args)
        if args.command == "kernels":
            return kernels_command(args)
        job = _check_command(args)
        if job is None:
            return checkpoint_command(args) if args.command == "checkpoint" else _plan_command(args)
    except (ValueError, OSError, ImportError) as e:  # ImportError for a URL whose package is missing
        print(f"shardfn {args.command}: error: {e}", file=sys.stderr)
        return 1 if isinstance(e, DamagedError) else 2
    try:
        return job()
    except FloatingPointError as e:
        print(f"shardfn {args.command}: error: {e}", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError, RankError) as e:
        if not _is_for_users(e):
            raise
        print(f"shardfn {args.command}: error: {e}", file=sys.stderr)
        return 1 if isinstance(e, DamagedError) else 2


def _is_for_users(error: Exception) -> bool:
    """Returns whether an error comes from this package, with the mistake and the remedy in the message.

    Errors of other packages are shown with the traceback.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    return Path(traceback.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def _check_command(args: argparse.Namespace) -> Callable[[], int] | None:
    """Returns a command that loads a model, after a check of the arguments, or None for other commands."""
    if args.command == "finetune":
        return functools.partial(finetune, parse_job(args))
    if args.command == "pretrain":
        return functools.partial(pretrain, parse_pretrain(args), plan_only=args.plan)
    if args.command == "eval":
        return functools.partial(eval_command, args)
    if args.command == "generate":
        return functools.partial(generate, parse_generate(args))
    if args.command == "speculate":
        return functools.partial(speculate, parse_speculate(args))
    if args.command == "serve":
        return functools.partial(serve_command, parse_serve(args))
    if args.command == "batch":
        return parse_batch(args)
    return None


def _plan_command(args: argparse.Namespace) -> int:
    if args.replay is not None:
        return replay_command(args)
    if args.serve:
        return server_command(args)
    check_no_server(args)
    if args.recipes:
        check_recipe_alone(args, "--recipes")
        _write_output(dump(recipes_json()) if args.json else recipes_text(), args.out)
        return 0
    if args.longest:
        return _longest_command(args)
    text, plans = _plan_recipe(args) if args.recipe else _search_plans(args) if args.search else _plan_job(args)
    if args.png and plans:
        write_chart(plans, args.png)
    _write_output(text, args.out)
    return 0 if plans and plans[0].fits else 1


def _longest_command(args: argparse.Namespace) -> int:
    beside = [f"--{name}" for name in ("search", "exact", "recipe", "png") if getattr(args, name)]
    raise_all(ValueError, "plan --longest is an answer of its own; leave out:", beside)
    setup = parse_setup(args)
    found = longest(setup)
    _write_output(dump(longest_json(found)) if args.json else longest_text(setup, found), args.out)
    return 0 if found[-1].tokens else 1


def _plan_job(args: argparse.Namespace) -> tuple[str, list[JobPlan]]:
    setup = parse_setup(args)
    made = plan(setup)
    captured = exact(setup) if args.exact else None
    hints = advice(made)
    if args.json:
        return dump(plan_json(made, captured) | {"advice": list(hints)}), [made]
    return plan_text(made, captured) + advice_text(hints), [made]


def _plan_recipe(args: argparse.Namespace) -> tuple[str, list[JobPlan]]:
    check_recipe_alone(args, f"--recipe {args.recipe}")
    made = recipe(args.recipe).plan()
    return dump(recipe_json(args.recipe)) if args.json else recipe_text(args.recipe), [made]


def _search_plans(args: argparse.Namespace) -> tuple[str, list[JobPlan]]:
    setup = parse_setup(args)
    found = search(setup)
    best = list(found.best[:_BEST])
    captured = exact(best[0].setup) if args.exact and best else None
    if args.json:
        return dump(search_json(found, _BEST) | ({"plan": plan_json(best[0], captured)} if best else {})), best
    return "\n".join([search_text(found, _BEST), *([plan_text(best[0], captured)] if best else [])]), best


def _write_output(text: str, path: str | None) -> None:
    print(text, end="")
    if path:
        Path(path).write_text(text, encoding="utf-8")
