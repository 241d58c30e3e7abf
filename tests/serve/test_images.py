"""Covers images in messages over HTTP: tokens of whole forwards, images that are computed once, and wrong images."""

import base64
import concurrent.futures
import functools
import io
import json
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfn import core
from shardfn.data import ByteTokenizer, read_image
from shardfn.inference import (
    EncodedImage,
    Engine,
    ImageEncoder,
    ImageReader,
    ImageRule,
    Runner,
    Sampling,
    decoder,
    limits_of,
)
from shardfn.models import gpt
from tests.data.test_images import make_bomb
from tests.inference.stories import draw_alone, draw_key
from tests.serve.server import NAME, WORDS, Running

Image = pytest.importorskip("PIL.Image")
TOKEN, D = 1, 24
CONFIG = gpt.Config(
    vocab_size=256,
    num_layers=2,
    d_model=D,
    num_heads=4,
    num_kv_heads=2,
    max_len=200,
    norm="rms",
    position="rope",
    bias=False,
    batch_invariant=True,
    images=gpt.Images(TOKEN),
)


@functools.cache
def parts() -> tuple[Any, Any, Any, Runner]:
    made = decoder(CONFIG)
    limits = limits_of(made, running=3, buckets=(1, 8, 24), cache_bytes=1 << 20)
    params = core.tree_map(lambda x: x * 6, gpt.init(CONFIG, core.key(0)))
    return made, params, limits, Runner(made, limits, eager_steps=10_000)


def new_engine() -> Engine:
    made, params, limits, runner = parts()
    return Engine(made, params, limits=limits, runner=runner, tokenizer=ByteTokenizer())


def encode(pixels: Tensor) -> EncodedImage:
    """Two or three features that follow from the pixels, by the image's width."""
    num = 2 + pixels.shape[2] % 2
    draw = torch.Generator().manual_seed(int(pixels.long().sum()))
    return EncodedImage(torch.randn(num, D, generator=draw), chr(TOKEN) * num, (1, num))


ENCODER = ImageEncoder("<image>", ImageRule(TOKEN, "separate"), D, encode)


def make_url(seed: int) -> str:
    draw = random.Random(seed)
    colour = tuple(draw.randrange(256) for _ in range(3))
    file = io.BytesIO()
    Image.new("RGB", (draw.randint(2, 5), 3), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def show(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def draw_chat(seed: int) -> dict[str, Any]:
    """A chat of one to three rounds, with images before, between and after texts."""
    draw, messages = random.Random(seed), []
    for _ in range(draw.randint(1, 3)):
        content = [show(make_url(draw.randrange(6))) if draw.random() < 0.5 else say("ab?") for _ in range(3)]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    sampling = {"temperature": draw.choice([0.0, 1.5]), "seed": draw.randrange(100), "max_tokens": draw.randint(1, 8)}
    return {"model": NAME, "messages": messages[:-1], "logprobs": True, "ignore_eos": True, **sampling}


def read_prompt(chat: dict[str, Any]) -> tuple[list[int], Tensor]:
    """The prompt of a chat and its features, by another way than the server's."""
    text, features = "", [torch.zeros(0, D)]
    for message in chat["messages"]:
        text += message["role"] + ": "
        content = message["content"]
        for part in [say(content)] if isinstance(content, str) else content:
            if part["type"] == "text":
                text += part["text"]
            else:
                seen = encode(read_image(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
                features.append(seen.features)
                text += chr(TOKEN) * len(seen.features)
        text += "\n"
    return list((text + "assistant: ").encode()), torch.cat(features)


def check_answer(chat: dict[str, Any], answer: dict[str, Any]) -> None:
    """Each token and its log probability have the bits of one forward over the whole sequence."""
    prompt, features = read_prompt(chat)
    listed = answer["choices"][0]["logprobs"]["content"]
    tokens = [one["bytes"][0] for one in listed]
    assert len(tokens) == chat["max_tokens"] and answer["usage"]["prompt_tokens"] == len(prompt)
    with torch.no_grad():
        whole = torch.tensor([prompt + tokens])
        logits = gpt.apply(CONFIG, parts()[1], whole, image_features=features)[0]
    how = Sampling(temperature=chat["temperature"])
    for i, one in enumerate(listed):
        row, place = logits[len(prompt) + i - 1], len(prompt) + i
        drawn, _ = draw_alone(row, how, draw_key(chat["seed"], 0), place, -1)
        _, logprob = draw_alone(row, how, draw_key(chat["seed"], 0), place, drawn)
        assert (tokens[i], one["logprob"]) == (drawn, logprob)


def read_images(**how: Any) -> dict[str, Any]:
    """The settings of a server of the model, whose images have these limits."""
    text = WORDS._replace(images=ImageReader(ENCODER, **how))
    return {"text": text, "engine": new_engine, "adapters": ()}


def test_a_story_over_http(start: Callable[..., Running]) -> None:
    """Chats beside one another, in chunks of a prompt, have the tokens of whole forwards."""
    server, chats = start(**read_images()), [draw_chat(seed) for seed in range(12)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda chat: server.send("/v1/chat/completions", chat), chats))
    for chat, answer in zip(chats, answers, strict=True):
        assert answer.status == 200, answer.data
        check_answer(chat, answer.json)
    assert server.front.app.model is not None and server.front.app.model.text.images is not None
    assert server.front.app.model.text.images.num_encoded <= 6
    server.wait_idle()


def test_a_later_round_finds_the_blocks_of_its_images(start: Callable[..., Running]) -> None:
    server = start(**read_images())
    messages: list[Any] = [{"role": "user", "content": [say("a" * 40), show(make_url(1))]}]
    chat = {"model": NAME, "messages": messages, "max_tokens": 1, "temperature": 0, "seed": 0, "logprobs": True}
    check_answer(chat, server.send("/v1/chat/completions", chat).json)
    before = server.engine.stats.cache.hits
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": [show(make_url(2)), say("?")]}]
    check_answer(chat, server.send("/v1/chat/completions", chat).json)
    assert server.engine.stats.cache.hits - before >= 48
    other = json.loads(json.dumps(chat).replace(make_url(1), make_url(3)))
    check_answer(other, server.send("/v1/chat/completions", other).json)
    ids = server.send("/tokenize", {"model": NAME, "messages": messages}).json
    assert ids["tokens"] == read_prompt(chat)[0]


def test_files_below_a_directory(start: Callable[..., Running], tmp_path: pathlib.Path) -> None:
    root, secret = tmp_path / "images", tmp_path / "secret.png"
    (root / "in").mkdir(parents=True)
    Image.new("RGB", (2, 2), "red").save(secret)
    Image.new("RGB", (2, 2), "red").save(root / "in" / "a b.png")
    (root / "link.png").symlink_to(secret)
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    server = start(**read_images(root=root))

    def ask(url: str) -> Any:
        content = [show(url), say("?")]
        chat = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return server.send("/v1/chat/completions", chat)

    assert ask((root / "in" / "a b.png").as_uri()).status == 200
    assert ask(f"file://localhost{root}/in/a%20b.png").status == 200
    for url in (
        secret.as_uri(),
        f"file://{root}/../secret.png",
        f"file://{root}/in/../../secret.png",
        f"file://{root}/in/%2e%2e/%2e%2e/secret.png",
        f"file://{root}2/a.png",
        f"file://{root}/link.png",
        f"file://{root}/out/secret.png",
        f"file://{root}/pipe",
        f"file://{root}/in",
        f"file://{root}/none.png",
        f"file://{root}/a%00.png",
        f"file://example.com{root}/in/a b.png",
        "file:secret.png",
        "file://",
    ):
        answer = ask(url)
        assert answer.status == 400, url
        assert answer.error["param"] == "messages[0].content[0].image_url.url"
        assert answer.error["code"] == "invalid_image"
        assert "must be a file below the directory of images" in answer.error["message"], url


def make_animation(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue", "green")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://example.com/a.png", "No address of a network is opened"),
        ("http://127.0.0.1/a.png", "must be data:image/png;base64,... or file:///..., got 'http://127.0.0.1/a.png'"),
        ("ftp://a", "must be data:image/png;base64"),
        ("", "must be data:image/png;base64"),
        ("data:text/html;base64,aGVsbG8=", "must be data:image/png;base64"),
        ("data:image/png;base64,???", "must be base64"),
        (data_url(b"hello"), "must be an image in one of BMP, GIF, JPEG, PNG, WEBP, got 5 bytes"),
        (data_url(b""), "got 0 bytes"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "must be an image in one of"),
        (data_url(make_bomb(60_000, 60_000)), "at most 10,000 pixels, got"),
        (data_url(make_bomb(101, 100)), "at most 10,000 pixels, got 101 x 100 = 10,100"),
        (data_url(make_animation("GIF"), "gif"), "must have 1 frame, got 3 frames"),
        (data_url(make_animation("PNG")), "must have 1 frame, got 3 frames"),
        (data_url(make_animation("WEBP"), "webp"), "must have 1 frame, got 3 frames"),
        ("data:image/png;base64," + "A" * 40_000, "must have at most 20,000 bytes, got 30,000"),
        ("file:///etc/passwd", "needs a directory of images, but none was given"),
    ],
)
def test_images_that_are_refused(shared: Running, url: str, text: str) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": [say("a"), show(url)]}], "max_tokens": 1}
    answer = shared.send("/v1/chat/completions", chat)
    assert answer.status == 400, answer.data
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == "messages[0].content[1].image_url.url"
    assert answer.error["code"] == "invalid_image"
    assert text in answer.error["message"]
    fine = draw_chat(3)
    check_answer(fine, shared.send("/v1/chat/completions", fine).json)


@pytest.fixture(scope="module")
def shared() -> Any:
    made = Running(**read_images(max_pixels=10_000, max_bytes=20_000))
    yield made
    made.wait_idle()
    assert made.close() == 0


@pytest.mark.parametrize(
    ("content", "param", "text"),
    [
        ([say("<image>")], "messages", "once for each image, got 1 of them and 0 images"),
        ([say("<image>"), show(make_url(1))], "messages", "got 2 of them and 1 images"),
        ([say(chr(TOKEN))], "messages", "got 1 image tokens and 0 features"),
        ("a<image>", "messages", "got 1 of them and 0 images"),
        ([{"type": "image_url"}], "messages[0].content[0].image_url", "is missing"),
        ([{"type": "image_url", "image_url": {}}], "messages[0].content[0].image_url.url", "is missing"),
        ([{"type": "image_url", "image_url": "x"}], "messages[0].content[0].image_url", "must be an object"),
        ([{"type": "image_url", "image_url": {"url": 1}}], "messages[0].content[0].image_url.url", "must be a string"),
        ([{"type": "input_audio"}], "messages[0].content[0].type", "only parts of type 'text' and 'image_url'"),
        (
            [show(make_url(1))] * 120,
            "messages[0].content[100].image_url.url",
            "at most 200 tokens, the context, got 202",
        ),
    ],
)
def test_messages_that_are_refused(shared: Running, content: Any, param: str, text: str) -> None:
    answer = shared.send(
        "/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    )
    assert answer.status == 400, answer.data
    assert (answer.error["param"], text in answer.error["message"]) == (param, True), answer.error


def test_image_tokens_of_other_routes(shared: Running) -> None:
    """A token of an image without its image is refused wherever a client can write one."""
    for path, body in (
        ("/v1/completions", {"prompt": [5, TOKEN], "max_tokens": 1}),
        ("/v1/completions", {"prompt": chr(TOKEN), "max_tokens": 1}),
        ("/v1/embeddings", {"input": [TOKEN]}),
    ):
        answer = shared.send(path, {"model": NAME, **body})
        assert answer.status == 400, answer.data
        assert "got 1 image tokens and 0 features" in answer.error["message"]
    assert shared.send("/v1/completions", {"model": NAME, "prompt": "ab", "max_tokens": 1}).status == 200


def make_block(url: str) -> dict[str, Any]:
    """An image as Anthropic has it: base64 with its type, or the address of a file."""
    if url.startswith("file:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def make_item(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def test_other_interfaces_have_the_answers_of_chats(start: Callable[..., Running], tmp_path: pathlib.Path) -> None:
    """Images between texts, in two rounds, and in the result of a tool."""
    Image.new("RGB", (5, 3), "blue").save(tmp_path / "blue.png")
    urls = [make_url(1), (tmp_path / "blue.png").as_uri(), make_url(4)]
    server = start(**read_images(root=tmp_path))

    def make_rounds(image: Callable[[str], Any], text: Callable[[str], Any], result: list[dict[str, Any]]) -> Any:
        first = [text("a"), image(urls[0]), text("b"), image(urls[1])]
        return [{"role": "user", "content": first}, {"role": "assistant", "content": "yes"}, *result]

    how = {"model": NAME, "temperature": 0, "ignore_eos": True}
    shown = [{"role": "tool", "tool_call_id": "t", "content": [show(urls[2]), say("?")]}]
    chat = {**how, "messages": make_rounds(show, say, shown), "max_tokens": 5}
    # The template has no calls, so the call that the result answers is left out.
    found = server.send("/v1/chat/completions", chat).json
    wanted = (found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens"])

    def write(text: str) -> dict[str, Any]:
        return {"type": "input_text", "text": text}

    output = [{"type": "function_call_output", "call_id": "t", "output": [make_item(urls[2]), write("?")]}]
    body: Any = {**how, "input": make_rounds(make_item, write, output), "max_output_tokens": 5}
    made = server.send("/v1/responses", body).json
    assert (made["output"][0]["content"][0]["text"], made["usage"]["input_tokens"]) == wanted
    result = {"type": "tool_result", "tool_use_id": "t", "content": [make_block(urls[2]), say("?")]}
    rounds = make_rounds(make_block, say, [{"role": "user", "content": [result]}])
    rounds[0]["content"][1]["cache_control"] = {"type": "ephemeral"}
    message: Any = {**how, "messages": rounds, "max_tokens": 5}
    made = server.send("/v1/messages", message).json
    assert (made["content"][0]["text"], made["usage"]["input_tokens"]) == wanted
    counted = server.send("/v1/messages/count_tokens", {"model": NAME, "messages": rounds}).json
    assert counted == {"input_tokens": wanted[1]}


def test_images_by_openais_client(shared: Running) -> None:
    openai, items = pytest.importorskip("openai"), [make_item(make_url(1)), {"type": "input_text", "text": "a"}]
    with openai.OpenAI(base_url=shared.url, api_key="none", max_retries=0) as client:
        made = client.responses.create(model=NAME, input=[{"role": "user", "content": items}], max_output_tokens=2)
    assert made.usage.input_tokens == len("user: " + "a\nassistant: ") + count_features(make_url(1))


def test_images_by_anthropics_client(shared: Running) -> None:
    anthropic, blocks = pytest.importorskip("anthropic"), [make_block(make_url(1)), say("a")]
    with anthropic.Anthropic(base_url=shared.url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        made = client.messages.create(model=NAME, messages=[{"role": "user", "content": blocks}], max_tokens=2)
    assert made.usage.input_tokens == len("user: " + "a\nassistant: ") + count_features(make_url(1))


def count_features(url: str) -> int:
    return len(encode(read_image(base64.b64decode(url.partition(",")[2]))).features)


ITEM, BLOCK = "input[1].content[1].image_url", "messages[0].content[1].source"
IMAGES_OF_OTHERS: list[tuple[str, Any, str, str]] = [
    ("responses", make_item("https://example.com/a.png"), ITEM, "No address of a network is opened"),
    ("responses", make_item(data_url(b"hello")), ITEM, "must be an image in one of"),
    ("responses", make_item(data_url(make_bomb(60_000, 60_000))), ITEM, "at most 10,000 pixels, got"),
    ("responses", make_item("file:///etc/passwd"), ITEM, "needs a directory of images"),
    ("responses", {"type": "input_image", "image_url": {"url": "x"}}, ITEM, "must be a string, got an object"),
    ("responses", {"type": "input_image"}, ITEM, "is missing"),
    ("responses", {"type": "input_image", "file_id": "f"}, "input[1].content[1].file_id", "is not known"),
    ("responses", show("x"), "input[1].content[1].type", "only parts of text and of type 'input_image' are served"),
    ("responses", {"type": "input_text", "text": "<image>"}, "input", "input: a prompt must have the text '<image>'"),
    ("messages", make_block(data_url(b"hello")), f"{BLOCK}.data", "must be an image in one of"),
    ("messages", make_block(data_url(make_bomb(101, 100))), f"{BLOCK}.data", "got 101 x 100 = 10,100"),
    ("messages", make_block("data:image/png;base64,???"), f"{BLOCK}.data", "must be base64"),
    ("messages", make_block("data:text/html;base64,aGk="), f"{BLOCK}.media_type", "got 'text/html'"),
    ("messages", {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}, f"{BLOCK}.url", "No address"),
    ("messages", {"type": "image", "source": {"type": "file", "file_id": "f"}}, f"{BLOCK}.type", "got 'file'"),
    ("messages", {"type": "image", "source": {"type": "base64", "data": "a"}}, f"{BLOCK}.media_type", "is missing"),
    ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, BLOCK, "data is missing"),
    ("messages", {"type": "image", "source": "x"}, BLOCK, "must be an object"),
    ("messages", {"type": "image"}, BLOCK, "is missing"),
    ("messages", say("<image>"), "messages", "got 1 of them and 0 images"),
]


@pytest.mark.parametrize(("route", "part", "place", "text"), IMAGES_OF_OTHERS)
def test_images_of_other_interfaces_that_are_refused(
    shared: Running, route: str, part: Any, place: str, text: str
) -> None:
    """The place is that of the client's body, also where a chat has other numbers of messages."""
    body: dict[str, Any] = {"system": "be", "max_tokens": 1}
    body |= {"messages": [{"role": "user", "content": [say("a"), part]}]}
    if route == "responses":
        words = {"type": "input_text", "text": "a"}
        items = [{"type": "reasoning", "content": []}, {"role": "user", "content": [words, part]}]
        body = {"instructions": "be", "max_output_tokens": 1, "input": items}
    answer = shared.send(f"/v1/{route}", {"model": NAME, **body})
    assert answer.status == 400, answer.data
    error = answer.json["error"]
    assert text in error["message"] and error["message"].startswith(place), error
    assert route == "messages" or error["param"] == place


def test_a_model_of_text_names_its_parts(start: Callable[..., Running]) -> None:
    content = [show(make_url(1))]
    chat = {"model": NAME, "messages": [{"role": "user", "content": content}]}
    server = start()
    error = server.send("/v1/chat/completions", chat).error
    assert "only parts of type 'text' are served" in error["message"]
    items = [{"role": "user", "content": [make_item(make_url(1))]}]
    error = server.send("/v1/responses", {"model": NAME, "input": items}).error
    assert "only parts of text are served" in error["message"]
    rounds = [{"role": "user", "content": [make_block(make_url(1))]}]
    error = server.send("/v1/messages", {"model": NAME, "messages": rounds, "max_tokens": 1}).json["error"]
    assert "must be one of 'text', 'tool_result', got 'image'" in error["message"]
