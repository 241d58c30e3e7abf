"""`shardfn generate`: completes prompts by `shardfn.inference`, from files of several kinds."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from shardfn.core import Mesh, first_of, is_device, is_first_launched, make_mesh
from shardfn.engine import comms_of
from shardfn.inference import (
    Completion,
    Decoder,
    Engine,
    Limits,
    Sampling,
    check_request,
    limits_of,
)
from shardfn.memory import DamagedError
from shardfn.pretrained import AXIS, ModelText, describe_engine, load_model, make_engine
from shardfn.waits import end_start, waiting

from ._generate_job import GenerateJob

_MOST = 256  # tokens of a completion, unless the job has a number
_STDIN = "-"
# A capture takes as long as about 80 tokens gain by it.
_EAGER_STEPS = 64
_ADAPTER = "adapter"  # the adapter's name in the engine


class Prompt(NamedTuple):
    """Prompt of a run.

    Attributes:
        asked: text of the user.
        ids: ids of its tokens.
        sampling: way to draw the continuation.
    """

    asked: str
    ids: list[int]
    sampling: Sampling


class PreparedRun(NamedTuple):
    """Engine, and prompts known to fit."""

    job: GenerateJob
    engine: Engine
    prompts: list[Prompt]


def generate(job: GenerateJob) -> int:
    """Loads the model, prints the plan to stderr, and the completions to stdout.

    Returns:
        The exit status: 2 if the model or a prompt is refused, 1 if a file is damaged or logits are not finite, 130
        after Ctrl-C.
    """
    try:
        try:
            ready = _prepare_job(job)
        except (ValueError, OSError, ImportError) as error:
            end_start()
            print_error("generate", error)
            return 1 if isinstance(error, DamagedError) else 2
        _run_job(ready)
        return 0
    except FloatingPointError as error:
        print_error("generate", error)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # as a program that the signal ends
    finally:
        end_start()
        if dist.is_initialized():
            dist.destroy_process_group()


def print_error(command: str, error: Exception) -> None:
    """Prints the message of an error to stderr as a single line, on the first rank."""
    if is_first_launched():
        print(f"shardfn {command}: error: {flatten_message(error)}", file=sys.stderr, flush=True)


def flatten_message(error: Exception) -> str:
    """Returns the message of an error as a single line, with the first items of the list."""
    title, *lines = str(error).splitlines() or [type(error).__name__]
    items = [line.strip().removeprefix("- ") for line in lines if line.strip()]
    return " ".join([title, "; ".join(first_of(items, 3))]).strip()


def _prepare_job(job: GenerateJob) -> PreparedRun:
    mesh = make_mesh({AXIS: job.ranks} if job.ranks > 1 else {})
    asked = _read_texts(job, mesh)
    with waiting("reading", job.model):
        served = load_model(job, mesh)
    made, text = served.decoder, served.text
    prompts = _make_prompts(job, made, text, asked)
    limits = _choose_limits(job, made, prompts)
    for i, prompt in enumerate(prompts):
        try:
            check_request(made.make_request(prompt.ids, prompt.sampling), limits)
        except ValueError as error:
            raise ValueError(f"prompt {i + 1} of {len(prompts)}: {error}") from error
    adapters = {} if job.adapter is None else {_ADAPTER: job.adapter}
    once = _is_answered_once(job, prompts, mesh)
    with waiting("packing weights"):
        engine, drafter = make_engine(job, served, limits, mesh, adapters, eager_steps=_EAGER_STEPS * once)
    # A grammar that the vocabulary cannot write is refused before graphs are captured.
    engine.core.admit(made.make_request(prompts[0].ids, prompts[0].sampling))
    engine.warm_up(grammars=job.sampling.grammar is not None, penalties=job.sampling.extended, capture=not once)
    lines = describe_engine(job, served, engine, drafter, captured=not once)  # of all ranks, which may capture together
    if mesh.rank == 0:
        print(lines, file=sys.stderr, flush=True)
    return PreparedRun(job, engine, prompts)


def _is_answered_once(job: GenerateJob, prompts: list[Prompt], mesh: Mesh) -> bool:
    """Returns whether the prompt is read in one step, whose graph would be captured for that step only."""
    plain = is_device(job.memory) and is_device(job.cache_memory) and not job.drafts and job.sampling.grammar is None
    return plain and mesh.size == 1 and len(prompts) == job.sampling.n == 1


def _read_texts(job: GenerateJob, mesh: Mesh) -> list[str]:
    """Returns the texts. The first rank reads texts from stdin."""
    if _STDIN not in job.prompts:
        return list(job.prompts)
    lines = [line for line in sys.stdin.read().splitlines() if line.strip()] if mesh.rank == 0 else []
    if mesh.size > 1:
        lines = list(map(str, _first_result(comms_of(mesh).control.gather(lines))))
    if not lines:
        raise ValueError("PROMPT is -, and stdin has 0 lines with a text. Write one prompt in each line.")
    return [text for prompt in job.prompts for text in (lines if prompt == _STDIN else [prompt])]


def _first_result(gathered: list[object]) -> list[object]:
    first = gathered[0]
    assert isinstance(first, list)
    return first


def _make_prompts(job: GenerateJob, made: Decoder, text: ModelText, asked: Sequence[str]) -> list[Prompt]:
    most = _find_context(job, made)
    stops = tuple(sorted({*text.ends, *(_stop_token(job, text, token) for token in job.stop_tokens)}))
    out = []
    for one in asked:
        ids = _encode_prompt(job, text, one)
        left = max(1, min(_MOST, most - _count_prompt(made, ids)))
        num = left if job.max_tokens is None else job.max_tokens
        out.append(Prompt(one, ids, dataclasses.replace(job.sampling, max_tokens=num, stop_tokens=stops)))
    return out


def _count_prompt(made: Decoder, ids: list[int]) -> int:
    """Returns the tokens of a prompt in the decoder's sequence: of an encoder-decoder model only its first token."""
    return len(made.make_request(ids, Sampling()).prompt)


def _encode_prompt(job: GenerateJob, text: ModelText, asked: str) -> list[int]:
    if not job.chat:
        return text.encode(asked)
    if text.chat is None:
        raise ValueError(
            f"--chat needs a tokenizer with a chat template, got the tokenizer of {job.model}. Leave --chat out."
        )
    system = [] if job.system is None else [{"role": "system", "content": job.system}]
    return text.plain(text.chat([*system, {"role": "user", "content": asked}]))


def _stop_token(job: GenerateJob, text: ModelText, token: str) -> int:
    found = int(token) if token.isdecimal() else text.token(token)
    if found is None:
        raise ValueError(
            f"--stop-token {token!r} is not one of the {text.size} tokens of {job.model}. Give one, or its id."
        )
    return found


def _find_context(job: GenerateJob, made: Decoder) -> int:
    if job.context is not None and job.context > made.context:
        raise ValueError(f"--context {job.context}: the longest sequence of {job.model} has {made.context} tokens.")
    return made.context if job.context is None else job.context


def _choose_limits(job: GenerateJob, made: Decoder, prompts: list[Prompt]) -> Limits:
    """Returns the sizes for these prompts.

    No longer sequence, no larger step, and few graphs, as a capture takes seconds.
    """
    longest = max(_count_prompt(made, p.ids) + p.sampling.max_tokens for p in prompts)
    running = min(Limits.running, len(prompts) * job.sampling.n)
    drafts = job.drafts
    rows = min(Limits.buckets[-1], max(running + 1, drafts + 1, sum(len(p.ids) for p in prompts)))
    budget = next(size for size in Limits.buckets if size >= rows)
    decodes = [size for size in (1, 4, 16, 32) if size < min(max(4 * running, 2 * drafts), budget)]
    return limits_of(
        made,
        context=max(2, min(_find_context(job, made), longest)),
        cache_bytes=int(job.cache_gib * 2**30),
        running=running,
        buckets=tuple(sorted({*decodes, budget})),
        cache_dtype=job.cache or job.dtype,
        drafts=drafts,
    )


def _run_job(ready: PreparedRun) -> None:
    start = time.monotonic()
    one = len(ready.prompts) == 1 and ready.job.sampling.n == 1 and not ready.job.json
    drawn = _stream_completion(ready) if one else _print_completions(ready)
    seconds = time.monotonic() - start
    if ready.engine.mesh.rank == 0:
        rate = f"{drawn} tokens in {seconds:.1f} s, {drawn / seconds:.1f} a second"
        if guesses := ready.engine.stats.speculation.drafted:
            rate += f"; {ready.engine.stats.speculation.accepted} of {guesses} drafts accepted"
        print(rate, file=sys.stderr, flush=True)


def _adapter_name(job: GenerateJob) -> str | None:
    return None if job.adapter is None else _ADAPTER


def _stream_completion(ready: PreparedRun) -> int:
    """Streams the single completion to stdout, and returns the number of tokens."""
    [prompt] = ready.prompts
    writes, drawn = ready.engine.mesh.rank == 0, 0
    for token in ready.engine.stream(prompt.ids, prompt.sampling, adapter=_adapter_name(ready.job)):
        end_start()
        if token.finish_reason == "error":
            raise FloatingPointError(f"prompt 1: {_error_reason(ready)} after {drawn} tokens")
        drawn += token.token is not None
        if writes:
            print(token.text, end="", flush=sys.stdout.isatty())
            if sys.stdout.isatty():
                os.environ["TQDM_DISABLE"] = "1"  # a bar of a capture would overwrite the text's line
    if writes:
        print(flush=True)
    return drawn


def _print_completions(ready: PreparedRun) -> int:
    """Prints all completions in the order of the prompts, and returns the number of tokens."""
    prompts = ready.prompts
    how = [p.sampling for p in prompts]
    made = ready.engine.generate([p.ids for p in prompts], how, adapter=_adapter_name(ready.job))
    end_start()
    each = [[found] if isinstance(found, Completion) else found for found in made]
    broken = [i + 1 for i, choices in enumerate(each) if any(choice.finish_reason == "error" for choice in choices)]
    if ready.engine.mesh.rank == 0:
        for i, (prompt, choices) in enumerate(zip(prompts, each, strict=True)):
            for k, choice in enumerate(choices):
                title = f"--- prompt {i + 1} of {len(prompts)}, choice {k + 1} of {len(choices)} ---\n"
                print(_format_line(prompt, k, choice) if ready.job.json else title + choice.text)
    if broken:
        raise FloatingPointError(f"prompts {broken}: {_error_reason(ready)}")
    return sum(len(choice.tokens) for choices in each for choice in choices)


def _error_reason(ready: PreparedRun) -> str:
    """Returns the reason of an "error"."""
    grammar = ready.job.sampling.grammar
    return "logits are not finite" + ("" if grammar is None else ", or no token can continue in the grammar")


def _format_line(prompt: Prompt, k: int, choice: Completion) -> str:
    row = {"prompt": prompt.asked, "choice": k, "text": choice.text, "tokens": choice.tokens}
    return json.dumps(row | {"logprobs": choice.logprobs, "finish": choice.finish_reason})
