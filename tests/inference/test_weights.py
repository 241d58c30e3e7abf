"""Covers weights on the host and on disk: tokens and logits are those of resident weights, bit for bit."""

import dataclasses
import functools
import gc
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.core import tree_leaves, tree_map
from shardfn.inference import Engine, Runner, Sampling, _weights, decoder, hf_decoder, limits_of
from shardfn.models import gpt
from shardfn.testing import distributed
from tests.inference.stories import check, model, run
from tests.inference.test_stories import KINDS, LLAMA, drawn_stories

SIZES: dict[str, Any] = {
    "vocab_size": 77,
    "num_layers": 3,
    "d_model": 96,
    "num_heads": 4,
    "max_len": 32,
    "batch_invariant": True,
}
PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def on_disk(path: pathlib.Path) -> dict[str, Any]:
    return {"weights": "disk", "disk": sf.Disk(str(path))}


def engine_of(made: Any, params: Any, **how: Any) -> Engine:
    return Engine(made, params, limits=limits_of(made, running=2, buckets=(2, 12)), **how)


def completed(engine: Engine) -> list[tuple[list[int], list[float]]]:
    made = engine.generate(PROMPTS, [Sampling(max_tokens=6, seed=3), Sampling(max_tokens=9, temperature=0.0)])
    return [(c.tokens, c.logprobs) for c in made]


@functools.cache
def reference(codes: Any = None, **changes: Any) -> Any:
    config = gpt.Config(**{**SIZES, **changes})
    params, made = gpt.init(config, sf.key(0)), decoder(config, quantization=codes)
    return made, params, completed(engine_of(made, params))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        LLAMA,
        pytest.param({"tie_embeddings": True, "stacked": True}, marks=pytest.mark.nightly),
        LLAMA | {"codes": "int4"},
        pytest.param({"batch_invariant": False}, marks=pytest.mark.nightly),
    ],
    ids=["llama", "stacked", "int4", "not-exact"],
)
@pytest.mark.parametrize("kind", ["disk", "host"])
def test_bits_are_those_of_resident_weights(
    changes: dict[str, Any], kind: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_weights, "TOGETHER", 1 << 16)  # some leaves are larger, and some are packed together
    made, params, want = reference(**changes)
    engine = engine_of(made, params, **(on_disk(tmp_path) if kind == "disk" else {"weights": kind}))
    assert {x.memory_kind for x in tree_leaves(engine.core.weights)} == {"device", kind}  # small ones stay
    assert completed(engine) == want
    engine.update_weights(tree_map(lambda x: x * 2, params))
    heavy = engine_of(made, tree_map(lambda x: x * 2, params))
    assert completed(engine) == completed(heavy) != want
    plan, resident = engine.memory(), heavy.memory()
    assert kind == "host" or plan.weights < resident.weights / (1 if "codes" in changes else 8)
    assert kind == "host" or plan.total < resident.total


@pytest.mark.nightly
def test_stories_of_weights_on_disk(tmp_path: pathlib.Path) -> None:
    _, limits = KINDS["gpt2"]
    one = model(**KINDS["gpt2"][0])
    runner = Runner(one.decoder, limits, **on_disk(tmp_path))
    runner._zero = sf.Zero(params="disk", disk=sf.Disk(str(tmp_path)), persist_elements=0)  # pyright: ignore
    for story in drawn_stories(limits, 8):
        told, engine = run(story, one, runner, limits)
        assert {x.memory_kind for x in tree_leaves(engine.core.weights)} == {"disk"}
        check(story, told, one)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["disk", "device"])
def test_deferred_parameters_are_drawn_a_few_at_a_time(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_weights, "TOGETHER", 1)
    drawn: list[tuple[int, ...]] = []

    def deferred(x: torch.Tensor) -> torch.Tensor:
        def draw(at: Any) -> torch.Tensor:
            drawn.append(tuple(x.shape))
            return x[at]

        return sf.core.Draw(draw, x.shape, x.dtype, x.device)

    made, params, want = reference(**LLAMA)
    engine = engine_of(made, tree_map(deferred, params), **(on_disk(tmp_path) if kind == "disk" else {}))
    assert drawn == [tuple(x.shape) for x in tree_leaves(params)]
    assert completed(engine) == want


@pytest.mark.nightly
def test_deferred_parameters_from_which_one_leaf_is_made() -> None:
    made, params, want = reference(**LLAMA)
    one, two = ({"head": x} for x in (params["head"][:40], params["head"][40:]))
    halves = {"rest": {k: x for k, x in params.items() if k != "head"}, "one": one, "two": two}

    def pack(given: Any) -> Any:
        parts = given["one"]["head"], given["two"]["head"]
        real = [x for x in parts if x.device.type != "meta"]
        head = torch.cat(parts) if len(real) == 2 else torch.empty(params["head"].shape, device="meta")
        return made.pack(given["rest"] | {"head": head})

    joined = dataclasses.replace(made, pack=pack, specs=P())
    deferred = tree_map(lambda x: sf.core.Draw(lambda at: x[at], x.shape, x.dtype, x.device), halves)
    assert completed(engine_of(joined, deferred)) == want


def test_a_step_reads_each_weight_once_and_at_most_a_layer_ahead(tmp_path: pathlib.Path) -> None:
    made, params, _ = reference(**LLAMA)
    engine = engine_of(made, params, **on_disk(tmp_path))
    engine.warm_up()
    engine.add(PROMPTS[0], Sampling(max_tokens=1))
    with sf.memory.ledger() as book:
        engine.step()
    away = [x.held for x in tree_leaves(engine.core.weights) if x.memory_kind == "disk"]
    assert book.moved("disk", "host") == sum(x.nbytes for x in away) and book.transfers("disk", "host") == len(away)
    assert book.moved("host", "device") == 0  # a CPU computes where the disk was read to
    layer = sum(x.nbytes for x in away) / made.cache.layers
    assert engine.memory().step < 2 * layer


@pytest.mark.nightly
def test_parameters_that_are_on_disk_themselves(tmp_path: pathlib.Path) -> None:
    made, params, want = reference(**LLAMA)
    zero = sf.Zero(params="disk", disk=sf.Disk(str(tmp_path / "params")), persist_elements=0)
    kept = sf.sharded(lambda p: p, zero=zero).init(params)
    assert completed(engine_of(made, kept, **on_disk(tmp_path / "weights"))) == want


@pytest.mark.nightly
def test_a_model_of_transformers(tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=77, max_position_embeddings=32, tie_word_embeddings=True, **sizes)
    made, params = hf_decoder(transformers.LlamaForCausalLM(config).eval())
    assert completed(engine_of(made, params, **on_disk(tmp_path))) == completed(engine_of(made, params))


@pytest.mark.nightly
@distributed(world=[2, 3])
def test_ranks_read_their_own_weights(world: int, tmp_path: pathlib.Path) -> None:
    config = gpt.Config(
        **{**SIZES, **LLAMA, "num_heads": 6, "num_kv_heads": 6, "d_ff": 192, "chunks": 6 if world == 3 else 8}
    )
    made, params = decoder(config, tp="tp"), gpt.init(config, sf.key(0))
    mesh = sf.make_mesh({"tp": world})
    engine = engine_of(made, params, mesh=mesh, **on_disk(tmp_path))
    want = engine_of(made, params, mesh=mesh)
    assert completed(engine) == completed(want)
    for a, b in zip(tree_leaves(engine.core.weights), tree_leaves(want.core.weights), strict=True):
        assert (a.shape, a.spec) == (b.shape, b.spec) and torch.equal(a.local, b.local)


def test_mistakes(tmp_path: pathlib.Path) -> None:
    config = gpt.Config(**SIZES)
    made, params = decoder(config), gpt.init(config, sf.key(0))
    for wrong, words in (
        ({"weights": "tape"}, "weights must be 'device', 'host' or 'disk', got 'tape'"),
        ({"weights": "disk"}, r"weights='disk' has no directory. Give one: disk=sf.Disk"),
        ({"disk": sf.Disk(str(tmp_path))}, "has no effect with weights='device'"),
        (
            {"runner": Runner(made, limits_of(made, running=2, buckets=(2, 12))), "weights": "host"},
            "weights='host' is the runner's to choose",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            engine_of(made, params, **wrong)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_model_of_three_times_the_memory_generates(tmp_path: pathlib.Path) -> None:
    def ran(kind: str, limit: int) -> subprocess.CompletedProcess[str]:
        program = pathlib.Path(__file__).with_name("limited.py")
        command = [sys.executable, str(program), str(tmp_path / f"{kind}{limit}"), kind, str(limit)]
        # The stacks of threads, and the memory that malloc keeps, are private memory, too.
        env = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            ["sh", "-c", 'ulimit -s 1024; exec "$@"', "-", *command], env=env, capture_output=True, text=True
        )

    limit = 118 << 20
    streamed, refused, free = ran("disk", limit), ran("device", limit), ran("device", 0)
    assert free.returncode == 0, free.stderr
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout == free.stdout
    assert refused.returncode != 0 and "allocate" in refused.stderr, refused.stderr


@pytest.mark.nightly
def test_an_engine_that_is_closed_frees_its_directory_at_once(tmp_path: pathlib.Path) -> None:
    made, params, want = reference(**LLAMA)
    gc.disable()  # the directory of an open engine is refused to the next one
    try:
        first, second = (_completed_and_closed(engine_of(made, params, **on_disk(tmp_path)), want) for _ in range(2))
    finally:
        gc.enable()
    for engine in (first, second):
        with pytest.raises(RuntimeError, match=r"this engine is closed. Make another one"):
            engine.step()


def _completed_and_closed(engine: Engine, want: Any) -> Engine:
    assert completed(engine) == want
    engine.close()
    return engine
