"""EleutherAI's lm-evaluation-harness over an engine: tasks by name, scores that no batch size, thread or rank changes.

Contexts of several choices are computed once, by the prefix cache.

References:
    EleutherAI, lm-evaluation-harness, https://github.com/EleutherAI/lm-evaluation-harness
"""

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.core import did_you_mean
from shardfn.inference import Sampling

from ._llm import LLM

EVAL_RUNNING = 128  # `Limits.running` of evaluations, whose steps want the logits of many scored tokens
_BATCH = 64  # prompts that enter the engine together
_TOKENS = 256  # default of the harness for generations
_MOST_STOPS = 16


def evaluate_tasks(
    llm: LLM,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = _BATCH,
    chat: bool = False,
) -> dict[str, Any]:
    """Returns the harness's results of tasks. All ranks of the model's mesh make the same call.

    Args:
        llm: model.
        tasks: names of tasks, or of groups.
        include_path: directory with further tasks, in YAML.
        num_fewshot: number of examples before each question. None is the task's.
        limit: most documents of a task. None is all.
        batch_size: number of prompts that enter the engine together. Results do not depend on it.
        chat: whether prompts pass through the chat template.

    Raises:
        ImportError: lm-eval is missing.
        ValueError: tasks are unknown. The message lists all of them.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("lm-eval is missing: pip install 'shardfn[eval]'")
    evaluator: Any = importlib.import_module("lm_eval.evaluator")
    make_manager: Any = importlib.import_module("lm_eval.tasks").TaskManager
    # The harness reads thousands of files to list its own tasks.
    manager = make_manager(include_path=include_path, include_defaults=include_path is None)
    if not set(tasks) <= set(manager.all_tasks):
        manager = make_manager(include_path=include_path)
    known = list(manager.all_tasks)
    if unknown := [name for name in tasks if name not in known]:
        listed = "; ".join(f"{name!r} is not known.{did_you_mean(name, known)}" for name in unknown)
        raise ValueError(f"tasks: {listed} Pass tasks of lm-eval, or include_path=, a directory with further tasks.")
    found = evaluator.simple_evaluate(
        make_harness_model(llm, batch_size=batch_size),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    return found


def make_harness_model(llm: LLM, *, batch_size: int = _BATCH) -> Any:
    """Returns a model as the harness calls it, an instance of `lm_eval.api.model.LM`.

    Args:
        llm: model.
        batch_size: number of prompts that enter the engine together.

    Raises:
        ImportError: lm-eval is missing.
        ValueError: the batch size is below 1.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("lm-eval is missing: pip install 'shardfn[eval]'")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    base: Any = importlib.import_module("lm_eval.api.model").TemplateLM
    windows: Any = importlib.import_module("lm_eval.utils")

    class EngineModel(base):
        """Model of the harness over an engine."""

        max_length = llm.engine.limits.context
        tokenizer_name = "shardfn"

        @property
        def eot_token_id(self) -> int:
            return _find_token(llm, "eos_token_id", min(llm.text.ends, default=0))

        @property
        def prefix_token_id(self) -> int:
            return _find_token(llm, "bos_token_id", self.eot_token_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return llm.text.plain(string) if add_special_tokens is False else llm.text.encode(string)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            pairs = [_cut_left(context, choice, self.max_length + 1) for _, context, choice in requests]
            made = [(0.0, False)] * len(pairs)
            groups = dict[tuple[int, ...], list[int]]()  # numbers of requests by their contexts
            for i, (context, _) in enumerate(pairs):
                groups.setdefault(context, []).append(i)
            contexts = list(groups)
            for at in range(0, len(contexts), batch_size):
                some = contexts[at : at + batch_size]
                scores = llm.engine.score(some, [[pairs[i][1] for i in groups[x]] for x in some])
                for context, several in zip(some, scores, strict=True):
                    for i, score in zip(groups[context], several, strict=True):
                        made[i] = score.logprob, score.is_greedy
            return made

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            several = [self._list_windows(request.args[0]) for request in requests]
            found = iter(self._loglikelihood_tokens([x for one in several for x in one]))
            return [math.fsum(next(found)[0] for _ in one) for one in several]

        def _list_windows(self, text: str) -> list[tuple[None, list[int], list[int]]]:
            made = windows.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            return [(None, *windows.make_disjoint_window(window)) for window in made]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            made = list[str]()
            for at in range(0, len(requests), batch_size):
                some = [request.args for request in requests[at : at + batch_size]]
                hows = [self._make_sampling(given) for _, given in some]
                prompts = [
                    self.tok_encode(text)[-(llm.engine.limits.context - how.max_tokens) :]
                    for (text, _), how in zip(some, hows, strict=True)
                ]
                made += [one.text for one in llm.engine.generate(prompts, hows)]
            return made

        def _make_sampling(self, given: Mapping[str, Any]) -> Sampling:
            until = given.get("until", [])
            until = [until] if isinstance(until, str) else list(until)
            if len(until) > _MOST_STOPS:
                raise ValueError(f"until must have at most {_MOST_STOPS} strings, got {len(until)}.")
            draws = given.get("do_sample", given.get("temperature", 0.0) > 0.0)
            more = {name: given[name] for name in ("top_p", "top_k", "min_p") if name in given and draws}
            names = ("max_gen_toks", "max_new_tokens", "max_tokens")
            most = next((given[name] for name in names if name in given), _TOKENS)
            if not 1 <= most < llm.engine.limits.context:
                text = f"max_gen_toks must be from 1 to {llm.engine.limits.context - 1}, below the context, got {most}."
                raise ValueError(text)
            ends = tuple(sorted(llm.text.ends))
            heat = given.get("temperature", 1.0) if draws else 0.0
            return Sampling(
                max_tokens=most, temperature=heat, stop=tuple(filter(None, until)), stop_tokens=ends, **more
            )

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if llm.text.chat is None:
                raise ValueError("the tokenizer has no chat template. Leave --chat out.")
            how = {} if add_generation_prompt else {"continue_final_message": True}
            return llm.text.chat(chat_history, **how)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return llm.text.template if chat_template else None

    return EngineModel()


def _find_token(llm: LLM, name: str, default: int) -> int:
    found = getattr(llm.text.tokenizer, name, None)
    return default if found is None else found


def _cut_left(context: Sequence[int], choice: Sequence[int], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a context and its choice with at most `most` tokens, of which the choice has its all.

    Example:
        >>> _cut_left([1, 2, 3], [4, 5], 4)
        ((2, 3), (4, 5))
    """
    kept = max(1, most - len(choice))
    return tuple(context[-kept:]), tuple(choice)
