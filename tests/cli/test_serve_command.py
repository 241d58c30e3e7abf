"""Covers `shardfn serve` as processes: a client, signals, ranks that are killed, and settings that are refused."""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from shardfn import core, interop
from shardfn.checkpoint import save
from shardfn.cli import main
from shardfn.cli._serve_job import ServeJob, add_serve_arguments, command_of, parse_serve
from shardfn.cli._serve_rank import _warm_up
from shardfn.inference import Grammar, Sampling
from shardfn.models import gpt

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = gpt.Config.llama_like(vocab_size=256, num_layers=1, d_model=32, num_heads=2, d_ff=None, max_len=512)
SMALL = "--port 0 --budget 4 --running 3 --cache-gib 0.01".split()
LIMIT = float(os.environ.get("SHARDFN_LIMIT", "100"))  # seconds; a machine with other work needs more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory as train_gpt leaves it."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    folder.mkdir()
    row = {"model": interop.hf_config(CONFIG), "per_head": False, "tokenizer": "bytes"}
    (folder / "model.json").write_text(json.dumps(row))
    save(folder / "checkpoints", gpt.init(CONFIG, core.key(0)), 3, at="params")
    (folder / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if messages[0].content == 'no' %}{{ raise_exception('refused') }}{% endif %}"
    )
    return folder


class Program:
    """A server as a process, with its ranks."""

    def __init__(self, *args: object) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        }
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "shardfn", "serve", *map(str, args)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines, self.url = list[str](), ""
        found = threading.Event()
        threading.Thread(target=self._read, args=(found,), daemon=True).start()
        if not found.wait(LIMIT) or not self.url:
            self.process.kill()
            raise AssertionError(f"it is not ready: {self.lines}")

    def _read(self, found: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"ready at (http://\S+)/v1", line):
                self.url = match[1]
                found.set()
        self.process.stderr.close()
        found.set()

    @property
    def ranks(self) -> list[int]:
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(x) for x in pathlib.Path(path).read_text().split()]

    def open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=30)

    def end(self) -> int:
        """The exit status; and no rank is left."""
        ranks = self.ranks if self.process.poll() is None else []
        status = self.process.wait(LIMIT)
        assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks)
        return status


@contextlib.contextmanager
def running(*args: object) -> Iterator[Program]:
    one = Program(*args)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.terminate()
        one.process.wait(LIMIT)


def events(response: Any) -> Iterator[str]:
    for line in response:
        if line.strip():
            yield line.decode().removeprefix("data: ").strip()


LONG = {"model": "tiny", "prompt": "ab", "max_tokens": 500, "ignore_eos": True, "stream": True}


@pytest.mark.nightly
def test_a_batch_that_is_interrupted_goes_on(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 300, "ignore_eos": True}
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"seed": i}} for i in range(12)
    ]
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "shardfn", "batch", requests, answers, model, *SMALL[2:], "--at-once", "3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    first = subprocess.Popen([*map(str, command), "--resume"], stderr=subprocess.PIPE, text=True, env=environment)
    begun = time.monotonic()
    while not (answers.exists() and answers.read_text()):
        assert time.monotonic() < begun + LIMIT and first.poll() is None
        time.sleep(0.02)
    first.terminate()
    _, err = first.communicate(timeout=LIMIT)
    num = len(answers.read_text().splitlines())
    assert first.returncode == 1 and 0 < num < 12 and f"{num} requests have an answer" in err
    again = [*map(str, command), "--resume"]
    assert subprocess.run(again, env=environment, timeout=LIMIT, capture_output=True).returncode == 0
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(int(row["custom_id"]) for row in found) == list(range(12))
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in found} == {300}


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_of_processes(model: pathlib.Path, ranks: int) -> None:
    with running(model, *SMALL, "--mesh", f"tp={ranks}", "--chat-template", model / "chat.jinja") as server:
        assert len(server.ranks) == ranks
        given = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        texts = {json.load(server.open("/v1/completions", given))["choices"][0]["text"] for _ in range(2)}
        params = gpt.init(CONFIG, core.key(0))
        import torch

        tokens = gpt.generate(CONFIG, params, torch.tensor([list(b"ab")]), 8, core.key(0), temperature=0.0)
        assert texts == {bytes(tokens[0, 2:].tolist()).decode(errors="replace")}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert json.load(server.open("/v1/chat/completions", chat))["usage"]["prompt_tokens"] == len("user: hi\n")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.open("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "no"}]})
        stream = events(server.open("/v1/completions", LONG | {"max_tokens": 100}))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        *_, done = stream
        assert done == "[DONE]" and server.end() == 0


def job_of(*args: object) -> ServeJob:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parse_serve(parser.parse_args([*map(str, args)]))


@pytest.mark.parametrize(
    "more", [["--drafter", "suffix"], ["--draft-model", "{model}"], ["--speculator", "{model}/made"]]
)
def test_ranks_have_the_drafter_of_the_command(model: pathlib.Path, more: list[str]) -> None:
    (model / "made").mkdir(exist_ok=True)
    (model / "made/config.json").touch()
    job = job_of(model, *SMALL, *(one.format(model=model) for one in more))
    command = command_of(job, 5, "python")
    assert job_of(*command[4:], "--port", 0).model == job.model and job.model.drafts == 15


@pytest.mark.nightly
def test_a_rank_loads_the_draft_model(model: pathlib.Path) -> None:
    engine, ready, *_ = _warm_up(job_of(model, *SMALL, "--draft-model", model))
    assert f"{model}, which guesses: " in ready.about and " parameters, float32, batch-invariant\n" in ready.about
    engine.generate([list(b"ab")], Sampling(max_tokens=9))
    assert engine.stats.speculation.accepted == engine.stats.speculation.drafted > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ("--weights host", "float32, on host"),
        ("--weights int4,disk", "int4, float32, on disk"),
        ("--cache int8", "float32"),
        ("--weights int8 --cache fp8", "int8, float32"),
        ("--weights disk --cache int8,host", "float32, on disk, cache on host"),
    ],
)
def test_draft_models_change_nothing_beside_other_kinds_of_weights_and_caches(
    model: pathlib.Path, more: str, kinds: str
) -> None:
    """The draft model is loaded as the model is; tokens are those without guessing, also under a grammar."""
    samplings = [
        Sampling(max_tokens=12, temperature=0.0),
        Sampling(max_tokens=12, seed=3),
        Sampling(max_tokens=12, seed=4, grammar=Grammar.regex("([a-c]{2}[0-9])*"), temperature=2.0),
    ]
    prompts = [list(b"ab"), list(b"cdab"), list(b"abab")]
    plain, ready, *_ = _warm_up(job_of(model, *SMALL, *more.split()))
    assert f" parameters, {kinds}, batch-invariant\n" in ready.about and "MiB a rank: weights" in ready.about
    want = [plain.generate([prompt], how) for prompt, how in zip(prompts, samplings, strict=True)]
    engine, *_ = _warm_up(job_of(model, *SMALL, *more.split(), "--draft-model", model))
    assert [engine.generate([prompt], how) for prompt, how in zip(prompts, samplings, strict=True)] == want
    assert engine.stats.speculation.accepted > 10
    assert engine.generate(prompts, samplings) == plain.generate(prompts, samplings)


@pytest.mark.nightly
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_killed(model: pathlib.Path, dies: int) -> None:
    with running(model, *SMALL, "--mesh", "tp=2") as server:
        streams = [events(server.open("/v1/completions", LONG)) for _ in range(4)]
        next(streams[0])
        began = time.monotonic()
        os.kill(server.ranks[dies], signal.SIGKILL)
        for stream in streams:
            *_, last = stream
            error = json.loads(last)["error"]
            assert error["code"] == "engine_dead" and error["message"].startswith(
                f"Rank {dies} of the engine has ended"
            )
        assert time.monotonic() - began < 5
        assert server.end() == 1


@pytest.mark.nightly
def test_an_idle_rank_that_is_killed(model: pathlib.Path) -> None:
    with running(model, *SMALL, "--mesh", "tp=2") as server:
        os.kill(server.ranks[1], signal.SIGKILL)
        assert server.end() == 1
        assert any("rank 1 of the engine has ended, by signal 9" in line for line in server.lines)


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[int]:
    """A descriptor that can be read once a process has opened a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init()
    assert watch >= 0 and libc.inotify_add_watch(watch, os.fsencode(path), 0x20) >= 0  # IN_OPEN
    try:
        yield watch
    finally:
        os.close(watch)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["start", "weights", "graphs"])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_killed_while_it_loads(model: pathlib.Path, dies: int, moment: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "shardfn", "serve", str(model), *SMALL, "--mesh", "tp=2"]
    [weights] = model.glob("checkpoints/*/*.safetensors")
    with (
        opened(weights) as watch,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process,
    ):
        try:
            end, ranks = time.monotonic() + LIMIT, list[int]()
            while len(ranks) < 2:
                assert time.monotonic() < end and process.poll() is None
                path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
                ranks = [int(x) for x in path.read_text().split()]
            if moment != "start":
                assert select.select([watch], [], [], LIMIT)[0]
            if moment == "graphs":
                time.sleep(0.5)  # packing and the first two captures take more than a second
            began = time.monotonic()
            os.kill(ranks[dies], signal.SIGKILL)
            _, err = process.communicate(timeout=LIMIT)
            assert time.monotonic() - began < LIMIT / 20  # 5 s, or more on a machine with other work
        finally:
            process.kill()
        assert process.returncode == 1 and "ready at" not in err
        assert f"shardfn serve: error: rank {dies} of the engine has ended, by signal 9" in err
        assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.nightly
def test_ranks_end_with_their_front(model: pathlib.Path) -> None:
    with running(model, *SMALL) as server:
        [rank] = server.ranks
        server.process.kill()
        server.process.wait(LIMIT)
        end = time.monotonic() + 20
        while pathlib.Path(f"/proc/{rank}").exists():
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.nightly
def test_a_model_that_a_rank_refuses(model: pathlib.Path) -> None:
    command = [sys.executable, "-m", "shardfn", "serve", str(model), *SMALL, "--context", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 2
    assert "error: --context 1000: the longest sequence of" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--mesh dp=2", "--mesh dp=2: write tp=N"),
        ("--context 1", "--context must be at least 2, a token of the prompt and a drawn token, got 1"),
        ("--running 4 --budget 4", "--running must be from 1 to 3, fewer than --budget, got 4"),
        ("--adapter a", "--adapter a: write NAME=DIR"),
        ("--adapter =a", "--adapter =a: write NAME=DIR"),
        ("--adapter a=nowhere", "--adapter nowhere has no adapter_config.json"),
        ("--adapter a=x --adapter a=y", "--adapter a=x: the name 'a' is given twice"),
        ("--adapter a={model}", "--adapter is for a directory of Hugging Face, and MODEL is"),
        ("--name a --adapter a=nowhere", "--adapter nowhere has no"),
        ("--cache-gib 0", "--cache-gib must be above 0, got 0.0"),
        ("--weights int4,tape", "--weights int4,tape: write int8 or int4, and disk or host"),
        ("--weights int8 --dtype bfloat16", "--weights int8 needs --dtype float32"),
        (
            "--draft-model {model} --drafter ngram",
            "--draft-model and --drafter ngram are 2 drafters; leave all but one of them out",
        ),
        ("--api-key-file nowhere", "--api-key-file nowhere: there is no such file"),
        ("--host 0.0.0.0", "needs a file of keys, got host 0.0.0.0 without keys"),
        ("--port 99999", "port must be from 0 to 65535, got 99999"),
        ("--chat-template {model}/model.json --max-body-mib 0", "max_body must be above 0, got 0"),
    ],
)
def test_refused_settings(model: pathlib.Path, args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(model), *args.format(model=model).split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("shardfn serve: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    ["", "--weights int4,disk --fit {model}/model.json --disk {model} --cache int8", "--weights host --cache fp8"],
)
def test_ranks_load_the_model_as_their_front_was_asked_to(model: pathlib.Path, args: str) -> None:
    def job(words: list[str]) -> ServeJob:
        parser = argparse.ArgumentParser()
        add_serve_arguments(parser)
        return parse_serve(parser.parse_args(words))

    asked = job([str(model), *args.format(model=model).split()])
    command = command_of(asked, 7, "python")
    assert command[:4] == ["python", "-m", "shardfn.cli._serve_rank", "7"]
    assert job([*command[4:]]).model == asked.model
    assert bool(args) == ((asked.model.memory, asked.model.cache) != ("device", None))


def test_a_port_in_use(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        assert main(["serve", str(model), "--port", str(one.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_under_torchrun(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["serve", str(model)]) == 2
    assert "must be started without torchrun: it starts the ranks itself" in capsys.readouterr().err


def test_without_its_packages(
    model: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else there(name))
    assert main(["serve", str(model)]) == 2
    assert "it needs uvicorn, which is missing: pip install 'shardfn[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{{ 9 ** 9 ** 9 }}"])
def test_a_file_that_is_no_template(
    model: pathlib.Path, tmp_path: pathlib.Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jinja").write_text(source)
    assert main(["serve", str(model), "--chat-template", str(tmp_path / "bad.jinja")]) == 2
    assert "error: --chat-template: " in capsys.readouterr().err


def test_templates_run_in_a_sandbox() -> None:
    from shardfn.pretrained._text import compile_chat_template

    made = compile_chat_template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="the chat template refuses these messages: access to attribute"):
        made([{"role": "user", "content": "a"}])


def test_a_template_of_a_model_with_a_power_refuses_the_messages() -> None:
    from shardfn.pretrained._text import wrap_transformers_tokenizer
    from tests.cli.test_generate import WORDS, tokenizer_of

    theirs = tokenizer_of(WORDS)
    theirs.chat_template = "**{{ messages[0].content }}**\n{{ 9 ** 9 ** 9 }}"
    chat = wrap_transformers_tokenizer(theirs).chat
    assert chat is not None
    with pytest.raises(ValueError, match=r"refuses these messages: the chat template has \*\* in line 2"):
        chat([{"role": "user", "content": "a"}])


ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.day(4)
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{% for i in range(messages[0].content | int) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ messages[3].content.x }}", "list object has no element 3"),
        (ENDLESS, "it takes more than 1 s of a processor"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(source: str, words: str) -> None:
    from shardfn.pretrained._text import compile_chat_template, wrap_transformers_tokenizer
    from tests.cli.test_generate import WORDS, tokenizer_of

    theirs = tokenizer_of(WORDS)
    theirs.chat_template = source
    for chat in (compile_chat_template(source), wrap_transformers_tokenizer(theirs).chat):
        assert chat is not None
        with pytest.raises(ValueError, match=f"the chat template refuses these messages: .*{words}"):
            chat([{"role": "user", "content": "1000000"}])


def hugging_face(folder: pathlib.Path) -> Any:
    """Writes a small model with its tokenizer."""
    transformers = pytest.importorskip("transformers")
    from tests.cli.test_generate import WORDS, tokenizer_of

    tokenizer_of(WORDS).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": 3 + len(WORDS), "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(bos_token_id=1, eos_token_id=2, initializer_range=0.5, **sizes)
    module = transformers.LlamaForCausalLM(config).eval()
    module.save_pretrained(folder)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_peft(tmp_path: pathlib.Path, ranks: int) -> None:
    import torch

    import shardfn as sf
    from shardfn.lora import LoRA, save_peft

    module = hugging_face(tmp_path / "model")
    params, _ = sf.from_module(module)
    lora = LoRA.of(params, [r"q_proj\.weight", r"up_proj\.weight"], rank=2)
    drawn = torch.Generator().manual_seed(0)
    values = {p: {k: torch.randn(x, generator=drawn) for k, x in own.items()} for p, own in lora.shapes.items()}
    save_peft(tmp_path / "adapter", lora, values)
    given = {"prompt": [1, 3, 4], "max_tokens": 4, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    adapter = f"tuned={tmp_path / 'adapter'}"
    (tmp_path / "admins").write_text("admin\n")
    more = "--adapter", adapter, "--adapter-root", tmp_path, "--admin-key-file", tmp_path / "admins"
    with running(tmp_path / "model", *SMALL, "--mesh", f"tp={ranks}", *more) as server:
        models = json.load(server.open("/v1/models"))["data"]
        assert [(row["id"], row.get("parent")) for row in models] == [("model", None), ("tuned", "model")]
        plain, tuned = (
            json.load(server.open("/v1/completions", given | {"model": name}))["choices"][0]["logprobs"]
            for name in ("model", "tuned")
        )
        vectors = [
            json.load(server.open("/v1/embeddings", {"model": name, "input": [1, 3, 4]}))["data"][0]["embedding"]
            for name in ("model", "tuned")
        ]
        assert len(vectors[0]) == 16 and vectors[0] != vectors[1]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.open("/v1/completions", given | {"model": "other"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.open("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "adapter"})
        body = json.dumps({"lora_name": "other", "lora_path": "adapter"}).encode()
        head = {"Content-Type": "application/json", "Authorization": "Bearer admin"}
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/load_lora_adapter", body, head), timeout=30)
        answer = json.load(server.open("/v1/completions", given | {"model": "other"}))
        assert answer["choices"][0]["logprobs"] == tuned
    assert plain != tuned
    with torch.no_grad():
        for found, merged in ((plain, params), (tuned, lora.merge(params, values))):
            for path, x in merged.items():
                module.get_parameter(path).copy_(x)
            logprobs = module(torch.tensor([[1, 3, 4]])).logits[0, -1].log_softmax(-1)
            want = logprobs.sort(descending=True).values[:2].tolist()
            assert list(found["top_logprobs"][0].values()) == pytest.approx(want, abs=1e-3)


@pytest.mark.nightly
def test_a_model_of_hugging_face(tmp_path: pathlib.Path) -> None:
    from tests.cli.test_generate import WORDS

    hugging_face(tmp_path)
    with running(tmp_path, *SMALL, "--name", "it") as server:
        chat = {"model": "it", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4, "logprobs": True}
        made = json.load(server.open("/v1/chat/completions", chat))
        assert made["usage"]["prompt_tokens"] == 4  # <s>, the role, two words
        tokens = [row["token"] for row in made["choices"][0]["logprobs"]["content"]]
        assert set(tokens) <= {"<unk>", "<s>", "</s>", *WORDS}
        assert set(made["choices"][0]["message"]["content"].split()) <= set(WORDS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "3", "--mesh", "tp=2"], "--replicas 3 of 2 ranks must have at most 4 ranks"),
        (["--replicas", "0"], "--replicas must be at least 1, got 0"),
        (["--replicas", "2", "--restarts", "-1"], "--restarts must be at least 0, got -1"),
        (["--oversubscribe"], "--oversubscribe has no effect without --replicas"),
        (["--replicas", "3", "--mesh", "tp=2", "--oversubscribe"], ""),
        (["--replicas", "2", "--mesh", "tp=2"], ""),
    ],
)
def test_more_replicas_than_places(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.setattr("shardfn.cli._serve_job.num_places", lambda: 4)
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    args = parser.parse_args([str(model), *options])
    if words:
        with pytest.raises(ValueError, match=words):
            parse_serve(args)
    else:
        job = parse_serve(args)
        assert job.server["replicas"] == args.replicas and job.server["restarts"] == 3
