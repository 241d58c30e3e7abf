"""A rank of `shardfn serve`, as the front starts the rank: `python -m shardfn.cli._serve_rank SOCKET MODEL OPTIONS`."""

import argparse
import functools
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from shardfn.core import RankError, make_mesh
from shardfn.inference import Classifier, DecisionLog, Engine, limits_of
from shardfn.lora import load_peft
from shardfn.memory import DamagedError
from shardfn.pretrained import AXIS, describe_engine, load_model, make_engine
from shardfn.serve import Ready, run_worker
from shardfn.waits import end_imports, end_start, waiting

from ._generate import flatten_message, print_error
from ._serve_job import ServeJob, add_serve_arguments, parse_serve


def main(argv: Sequence[str]) -> int:
    """Loads the model, and computes until the front ends the process.

    Returns:
        The exit status: 2 if the model is refused, 1 if a file is damaged, or if the front or another rank has ended.
    """
    end_imports()
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=int)
    add_serve_arguments(parser)
    args = parser.parse_args(argv)
    end = socket.socket(fileno=args.socket)
    try:
        job = parse_serve(args)
        engine, ready, classifier, load = _warm_up(job)
        run_worker(engine, end, ready, classifier, load)
        return 0
    except (ValueError, OSError, ImportError) as error:
        print_error("serve", error)
        return 1 if isinstance(error, DamagedError) else 2
    except (EOFError, RankError) as error:
        if isinstance(error, RankError):
            print(f"shardfn serve: error: {flatten_message(error)}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _warm_up(job: ServeJob) -> tuple[Engine, Ready, Classifier | None, Callable[[str], Any]]:
    """Returns an engine with the first captured graphs, the classification head, and the reader of adapters.

    `run_worker` captures the other graphs once the front asks.
    """
    ranks, model = job.model.ranks, job.model
    mesh = make_mesh({AXIS: ranks} if ranks > 1 else {})
    with waiting("reading", model.model):
        served = load_model(model, mesh)
    sources = served.decoder.sources
    given = {
        "images": served.decoder.images is not None,
        "sounds": sources is not None and sources.features is not None,
    }
    if job.decisions is not None and (found := [name for name, has in given.items() if has]):
        text = f"a log of decisions has no {found[0]}, got a model of {found[0]}"
        raise ValueError(f"--decisions {job.decisions}: {text}, {model.model}; leave it out")
    limits = limits_of(
        served.decoder,
        context=_find_context(job, served.decoder.context),
        cache_bytes=int(model.cache_gib * 2**30),
        running=job.running,
        buckets=job.buckets,
        cache_dtype=model.cache or model.dtype,
        drafts=model.drafts,
    )
    with waiting("packing weights"):
        decisions = DecisionLog(job.decisions) if job.decisions is not None and mesh.rank == 0 else None
        engine, drafter = make_engine(model, served, limits, mesh, job.adapters, decisions=decisions)
    grammars = find_spec("llguidance") is not None and getattr(engine.detokenizer, "bytes_of", None) is not None
    embeds = served.decoder.embeds
    engine.warm_up(penalties=True, grammars=grammars, embeddings=embeds, adapters=bool(job.adapters), later=True)
    width = _embedding_width(engine, model.model) if embeds else 0
    lines = describe_engine(model, served, engine, drafter)
    end_start()
    more: Any = {"graphs_left": engine.graphs.num_left}
    if served.decoder.sources is not None:
        more |= {"start": served.decoder.sources.start}
    else:
        more |= {"embed_size": served.decoder.embed_size}
    if served.classifier is not None:
        more |= {"classes": served.classifier.classes, "generates": False}
    ready = Ready(limits, served.text.ends, served.text.size, grammars, lines, width, **more)
    return engine, ready, served.classifier, functools.partial(load_peft, params=served.params)


def _embedding_width(engine: Engine, path: str) -> int:
    """Returns the width of embeddings."""
    try:
        return engine.embed([[0]]).shape[1]
    except FloatingPointError as error:
        raise ValueError(f"{path}: its weights have values that are not finite: {error}") from error


def _find_context(job: ServeJob, most: int) -> int:
    given = job.model.context
    if given is not None and given > most:
        raise ValueError(f"--context {given}: the longest sequence of {job.model.model} has {most} tokens.")
    return most if given is None else given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
