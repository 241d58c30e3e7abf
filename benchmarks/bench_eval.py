"""Processor time of three tasks of lm-evaluation-harness: by the engine, and by the harness's back end of transformers.

    python benchmarks/bench_eval.py --out benchmarks/results/eval_xeon_202611.md

The model is a Llama with random weights in float32, and the tasks are of the documentation's words: questions with
four choices, whole texts, and completions of 24 tokens. Both run in turns in one process with one thread. Numbers of
both are compared: the report has the largest difference. Needs `pip install "shardfn[eval,hf]" accelerate`.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import publish, table

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from shardfn.pretrained import LLM, evaluate_tasks  # noqa: E402
from shardfn.pretrained._harness import EVAL_RUNNING  # noqa: E402
from tests.pretrained.harness_tasks import TASKS, write_model, write_tasks  # noqa: E402


def by_engine(folder: pathlib.Path, batch: int) -> Callable[[str], Any]:
    llm = LLM(str(folder), running=EVAL_RUNNING)
    llm.engine.warm_up()
    return lambda task: evaluate_tasks(llm, [task], include_path=str(folder), batch_size=batch)


def by_transformers(folder: pathlib.Path, batch: int) -> Callable[[str], Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=batch)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lambda task: simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)


def leaves(value: Any) -> list[Any]:
    return [x for one in value for x in leaves(one)] if isinstance(value, list | tuple) else [value]


def list_answers(found: dict[str, Any], task: str) -> list[Any]:
    rows = sorted(found["samples"][task], key=lambda row: row["doc_id"])
    return leaves([row["resps"] for row in rows])


def differ(found: list[Any], want: list[Any]) -> str:
    """The largest relative difference of numbers, or the number of unequal texts."""
    if isinstance(found[0], str):
        return f"{sum(x != y for x, y in zip(found, want, strict=True))} of {len(found)} texts"
    x, y = (torch.tensor(rows, dtype=torch.float64) for rows in (found, want))
    return f"{float(((x - y).abs() / y.abs().clamp(min=1)).max()):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=32, help="documents of a task")
    parser.add_argument("--words", type=int, default=40, help="words of a question")
    parser.add_argument("--dims", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="of the back end of transformers")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--out", default="", help="the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = " ".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))).split()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        sizes = {"hidden_size": args.dims, "intermediate_size": 3 * args.dims, "num_hidden_layers": args.layers}
        sizes |= {"num_attention_heads": args.dims // 64, "max_position_embeddings": 1024, "initializer_range": 0.04}
        write_model(folder, [" ".join(words)], vocab=4096, **sizes)
        write_tasks(folder, words, args.docs, args.words)
        both = {"engine": by_engine(folder, 64), "transformers": by_transformers(folder, args.batch)}
        rows, total = [], dict.fromkeys(both, 0.0)
        for task in args.tasks:
            best, answers = dict.fromkeys(both, float("inf")), dict[str, list[Any]]()
            for _ in range(args.repeats):
                for who, run in both.items():
                    begin = time.process_time()
                    answers[who] = list_answers(run(task), task)
                    best[who] = min(best[who], time.process_time() - begin)
            for who in both:
                total[who] += best[who]
            a, b = best.values()
            rows.append([task, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}", differ(*answers.values())])
        a, b = total.values()
        rows.append(["all", f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}", ""])
        about = (
            f"{args.layers} layers, {args.dims} dims, {args.docs} documents of a task, questions of up to {args.words}"
            f" words. Seconds of the processor, the least of {args.repeats} runs."
        )
        head = ["task", "engine", f"transformers, batch {args.batch}", "ratio", "largest difference"]
        publish("Evaluation", f"{about}\n\n{table(head, rows)}", out=args.out)


if __name__ == "__main__":
    main()
