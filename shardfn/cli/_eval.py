"""`shardfn eval`: tasks of EleutherAI's lm-evaluation-harness by the engine."""

import argparse
import json
import pathlib
from typing import Any

import torch.distributed as dist

from shardfn import core, waits
from shardfn.pretrained import AXIS, DTYPES, EVAL_RUNNING, LLM, evaluate_tasks

from ._generate import print_error


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `shardfn eval`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory of Hugging Face, a GGUF file, or a run of examples/train_gpt.py")
    add("--tasks", required=True, metavar="NAME,NAME", help="tasks of lm-eval, or of --include-path")
    add("--include-path", metavar="DIR", help="a directory with further tasks, in YAML")
    add("--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)")
    add("--limit", type=int, metavar="N", help="the most documents of a task (default: all)")
    add("--batch-size", type=int, default=64, metavar="N", help="prompts at a time; changes no number (default 64)")
    add("--chat", action="store_true", help="prompts pass through the chat template")
    add("--context", type=int, metavar="N", help="the most tokens of a sequence (default: the model's)")
    add("--cache-gib", type=float, default=1.0, metavar="GIB", help="the most memory of the cache (default 1)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and cache (default %(default)s)")
    add("--weights", choices=("int8", "int4"), help="codes of the weights of linear layers")
    add("--output", metavar="FILE", help="a file for all results, as JSON")


def eval_command(args: argparse.Namespace) -> int:
    """Evaluates a model, and prints a line for each metric of each task. Under torchrun, ranks are along tp.

    Returns:
        The exit status: 2 if the model, a task or a setting is refused.
    """
    ranks = core.num_launched()
    try:
        mesh = core.make_mesh({AXIS: ranks} if ranks > 1 else {})
        with waits.waiting("reading", args.model):
            llm = LLM(
                *(args.model,),
                **{"mesh": mesh, "dtype": args.dtype, "quantization": args.weights, "context": args.context},
                **{"cache_gib": args.cache_gib, "running": EVAL_RUNNING},
            )
        waits.end_start()
        found = evaluate_tasks(
            llm,
            [name.strip() for name in args.tasks.split(",") if name.strip()],
            **{name: getattr(args, name) for name in ("include_path", "num_fewshot", "limit", "batch_size", "chat")},
        )
        if mesh.rank == 0:
            _report_results(found, args.output)
        return 0
    except (ValueError, OSError, ImportError) as error:
        waits.end_start()
        print_error("eval", error)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _report_results(found: dict[str, Any], output: str | None) -> None:
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            if isinstance(value, int | float) and "stderr" not in name and name not in ("alias", "sample_len"):
                print(f"{task}\t{name.partition(',')[0]}\t{value!r}")
    if output is not None:
        pathlib.Path(output).write_text(json.dumps(found["results"], indent=1, default=str), encoding="utf-8")
