"""Covers encoder-decoder models over HTTP: a prompt is the source, and tokens are those of the model alone."""

import concurrent.futures
import functools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.core import tree_map
from shardfn.data import ByteTokenizer
from shardfn.inference import BeamSearch, Engine, Request, Sampling, SpeechReader, limits_of, seq2seq_decoder
from shardfn.models import seq2seq
from shardfn.serve._app import TRANSCRIPTIONS
from tests.data.test_audio import draw_sound, write_wav
from tests.serve.server import NAME, WORDS, Running, metric

SIZES: dict[str, Any] = {"vocab_size": 256, "d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 20, "max_len": 64}
CONFIG = seq2seq.Config.t5_like(**SIZES, d_head=5, buckets=6, max_distance=5, start=3)
SOURCE = 40  # most tokens of a prompt


@functools.cache
def draw_params() -> Any:
    made = seq2seq.init(CONFIG, sf.key(0))
    return tree_map(lambda x: x * 6 if x.ndim > 1 and x.std() < 0.1 else x, made)


def new_engine() -> Engine:
    decoder = seq2seq_decoder(CONFIG)
    limits = limits_of(decoder, block=4, buckets=(3, 12), running=3, context=20, source=SOURCE)
    return Engine(decoder, draw_params(), limits=limits, eager_steps=10**6, tokenizer=ByteTokenizer())


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start(engine=new_engine, adapters=())


def ask(server: Running, prompt: Any, **more: Any) -> Any:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return server.send("/v1/completions", body | more)


def test_completions_are_those_of_the_model(server: Running) -> None:
    """Prompts beside one another, longer than the decoder's context, twice."""
    prompts = ["a", "summarize: " + "b" * 20, "c d e f", "a" * SOURCE, "xyz"] * 2
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.data
        source = torch.tensor([list(prompt.encode())])
        want = seq2seq.generate(CONFIG, draw_params(), source, 6, sf.key(0), 0.0)[0].tolist()
        choice = answer.json["choices"][0]
        assert choice["text"] == bytes(want).decode(errors="replace")
        inputs = seq2seq.shift_right(CONFIG, torch.tensor([want]))
        rows = seq2seq.apply(CONFIG, draw_params(), source, inputs)[0].log_softmax(-1)[range(6), want]
        found = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-5)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 6, "total_tokens": len(prompt) + 6}
        assert answer.json["usage"] == usage
    server.wait_idle()
    assert metric(server, "vllm:prompt_tokens_total") == sum(map(len, prompts))


def test_chats_have_the_whole_context(server: Running) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
    answer = server.send("/v1/chat/completions", chat)
    assert answer.status == 200, answer.data
    assert answer.json["usage"]["completion_tokens"] == 19  # all but the first token
    assert ask(server, [[5, 6], [7]], n=2, stream=True).status == 200


def test_mistakes(server: Running) -> None:
    for prompt, more, param, text in (
        ([97] * (SOURCE + 1), {}, "prompt", f"must have from 1 to {SOURCE} tokens, got {SOURCE + 1}"),
        ("", {}, "prompt", f"must have from 1 to {SOURCE} tokens, got 0"),
        ("a", {"echo": True}, "echo", "is an encoder-decoder model, whose prompt is no part of its text"),
        ("a", {"max_tokens": 20}, "prompt", "together in the context of 20 tokens"),
    ):
        answer = ask(server, prompt, **more)
        assert (answer.status, answer.error["param"]) == (400, param), answer.data
        assert text in answer.error["message"]
    assert ask(server, "a").status == 200


def test_choices_and_beams_are_those_of_the_engine(server: Running) -> None:
    given = {"model": NAME, "text_1": ["the sea", "a"], "choices": [["bc", "d"], ["e"]]}
    answer = server.send("/v1/score", given)
    want = new_engine().score([list(b"the sea"), list(b"a")], [[list(b"bc"), list(b"d")], [list(b"e")]])
    assert answer.status == 200, answer.data
    found = [(row["score"], tuple(row["logprobs"])) for row in answer.json["data"]]
    assert found == [(x.logprob, x.logprobs) for several in want for x in several]
    answer = server.send(
        "/v1/completions", {"model": NAME, "prompt": "the sea", "use_beam_search": True, "n": 3, "max_tokens": 6}
    )
    [beams] = new_engine().beam_search([list(b"the sea")], BeamSearch(3, 6, stop_tokens=(0,)))
    assert [x["text"] for x in answer.json["choices"]] == [x.text for x in beams]
    [[greedy]] = new_engine().beam_search([list(b"the sea")], BeamSearch(1, 6))
    source = torch.tensor([list(b"the sea")])
    assert list(greedy.tokens) == seq2seq.generate(CONFIG, draw_params(), source, 6, sf.key(0), 0.0)[0].tolist()


_HALF: dict[str, Any] = {"position": "learned", "norm": "layer"}
HEARS = seq2seq.Config(
    seq2seq.replace_half(CONFIG.decoder, causal=False, max_len=15, **_HALF),
    seq2seq.replace_half(CONFIG.decoder, max_len=20, **_HALF),
    start=3,
    features=8,
)
SPEECH = SpeechReader((30, 8), lambda language: (3, 5 if language is None else ord(language[0])), (65, 66))


def hearing_engine() -> Engine:
    made = seq2seq_decoder(HEARS)
    params = tree_map(lambda x: x * 6 if x.ndim > 1 else x, seq2seq.init(HEARS, sf.key(0)))
    limits = limits_of(made, block=4, buckets=(3, 12), running=3)
    return Engine(made, params, limits=limits, eager_steps=10**6, tokenizer=ByteTokenizer())


def make_form(fields: dict[str, Any], mark: str = "a b") -> tuple[bytes, dict[str, str]]:
    body = b""
    for name, value in fields.items():
        more = '; filename="s.wav"\r\nContent-Type: audio/wav' if name == "file" else ""
        body += f'--{mark}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        body += (value if isinstance(value, bytes) else str(value).encode()) + b"\r\n"
    return body + f"--{mark}--\r\n".encode(), {"Content-Type": f'multipart/form-data; boundary="{mark}"'}


def send_form(server: Running, headers: Any = None, body: bytes = b"", **fields: Any) -> Any:
    made, kind = make_form({"model": NAME, **fields})
    return server.send(TRANSCRIPTIONS, body or made, headers=kind | (headers or {}))


@pytest.mark.nightly
def test_transcripts_are_those_of_the_engine(start: Callable[..., Running]) -> None:
    server = start(engine=hearing_engine, adapters=(), text=WORDS._replace(speech=SPEECH))
    sounds, engine = [write_wav(draw_sound(3000 + 500 * i, i)) for i in range(3)], hearing_engine()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda sound: send_form(server, file=sound, language="de"), sounds * 2))
    how = Sampling(max_tokens=18, temperature=0.0, stop_tokens=(0,), min_tokens=1, bad_words=((65,), (66,)))
    for sound, answer in zip(sounds * 2, answers, strict=True):
        assert answer.status == 200, answer.data
        features, seconds = SPEECH.read(sound)
        found = engine.generate([(3, ord("d"))], how, sources=[features.values])[0]
        assert answer.json["text"] == found.text.strip()
        assert answer.json["usage"] == {"type": "duration", "seconds": round(seconds, 2)}
    plain = send_form(server, file=sounds[0], language="de", response_format="text", max_completion_tokens=18)
    assert plain.data.decode() == answers[0].json["text"] + "\n"
    drawn = [send_form(server, file=sounds[0], temperature=1.2, seed=4).json["text"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    check_mistakes(server, sounds[0])
    for path, fields in (
        ("/v1/completions", {"prompt": "the sea"}),
        ("/score", {"text_1": "the sea", "choices": ["a"]}),
    ):
        answer = server.send(path, {"model": NAME, **fields})
        assert (answer.status, answer.error["param"]) == (400, "model"), answer.data
        assert "reads sounds, and no texts" in answer.error["message"]
    server.wait_idle()


def test_token_ids_are_no_source_of_a_model_of_features() -> None:
    engine = hearing_engine()
    with pytest.raises(ValueError, match=r"source must be features, float \[30, 8\], got 2 token ids"):
        engine.core.admit(Request((3,), Sampling(max_tokens=2), source=(1, 2)))


def check_mistakes(server: Running, sound: bytes) -> None:
    for fields, param, text in (
        ({}, "file", "file is missing"),
        ({"file": b"ID3 no sound"}, "file", "must be a WAV file, got 12 bytes"),
        ({"file": write_wav(draw_sound(9000))}, "file", "from 0 to 0.3 s, got 0.56 s"),
        ({"file": sound, "response_format": "srt"}, "response_format", "must be 'json' or 'text', got 'srt'"),
        ({"file": sound, "temperature": "warm"}, "temperature", "temperature must be a number"),
        ({"file": sound, "temperature": "1e300"}, "temperature", "temperature must be a number from 0 to 100"),
        ({"file": sound, "max_completion_tokens": 19}, "max_completion_tokens", "context of 20 tokens"),
        ({"file": sound, "timestamps": "word"}, "timestamps", "timestamps"),
    ):
        answer = send_form(server, **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.data
        assert text in answer.error["message"], answer.data
    assert send_form(server, model="other", file=sound).status == 404
    assert send_form(server, {"Origin": "https://example.org"}, file=sound).status == 403
    assert send_form(server, {"Content-Type": "application/json"}, file=sound).status == 415
    assert send_form(server, {"Content-Type": "multipart/form-data"}, file=sound).status == 400
    draw, (body, _) = random.Random(0), make_form({"model": NAME, "file": sound[:80]})
    for _ in range(60):
        made = bytearray(body)
        for _ in range(draw.randint(1, 6)):
            made[draw.randrange(len(made))] = draw.randrange(256)
        answer = send_form(server, body=bytes(made[: draw.randrange(1, len(made))]))
        assert answer.status in (400, 404), answer.data
        json.loads(answer.data)


def test_other_models_take_no_sounds(server: Running) -> None:
    answer = send_form(server, file=write_wav(draw_sound(3000)))
    assert (answer.status, answer.error["param"]) == (400, "model"), answer.data
    assert "reads no sounds" in answer.error["message"]
