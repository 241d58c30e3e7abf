"""Covers parts of answers: pieces joined equal the whole for every cut, and well-formed calls equal a plain reading."""

import json
import pathlib
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardfn.data import ByteTokenizer
from shardfn.inference import Compiler, Grammar, detokenizer
from shardfn.serve._message_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerGrammar,
    find_reasoning_format,
    find_tool_format,
)
from shardfn.serve._message_parser import MessageParser, join_parts
from shardfn.serve._message_parser import MessagePart as Part

NAMES = ("f", "get_weather")
# What models write, whole and broken.
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "\n", "  "),
    *('{"name": "f", "arguments": ', '{"name": "get_weather", "parameters": ', '"name": "f"', "{", "}", "[", "]"),
    *('{"a": 1}', '{"b": "}\\"{"}', '{"c": [1, {"d": null}]}', '"{\\"a\\": 1}"', ",", ";", ":", '"', "\\", "a", "1"),
    *("<tool_", "<th", "é\U0001f642", "hello ", '{"x": 2}', "f", "null"),
]


def parse(pieces: list[str], tools: str | None, reasoning: str | None, **how: Any) -> tuple[list[Part], bool]:
    form, thought = TOOL_FORMATS.get(tools or ""), REASONING_FORMATS.get(reasoning or "")
    parser = MessageParser(form, thought, names=NAMES, **how)
    parts = [part for piece in pieces for part in parser.add(piece)]
    parts += parser.end()
    assert parser.num_calls >= len({x.call for x in parts if x.kind == "call"})
    return join_parts(parts), parser.malformed


@pytest.mark.parametrize("tools", [None, *TOOL_FORMATS])
@settings(max_examples=50, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    reasoning=st.sampled_from([None, "think"]),
    inside=st.booleans(),
    most=st.sampled_from([None, 1]),
    seed=st.integers(0, 1000),
)
def test_pieces_joined_are_the_whole_for_every_cut(
    tools: str | None, fragments: list[str], reasoning: str | None, inside: bool, most: int | None, seed: int
) -> None:
    text, draw = "".join(fragments), random.Random(seed)
    how: dict[str, Any] = {"inside": inside and reasoning is not None, "most": most}
    whole = parse([text], tools, reasoning, **how)
    assert parse([*text], tools, reasoning, **how) == whole
    for num in range(1, 9):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(num))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(pieces, tools, reasoning, **how) == whole
    if tools is None and reasoning is None:
        assert "".join(part.text for part in whole[0]) == text


def read_plainly(text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a well-formed text of Hermes' format."""
    thought = re.match(r"\s*<think>(.*?)</think>", text, re.DOTALL)
    rest = text[thought.end() :] if thought else text
    calls = [json.loads(x) for x in re.findall(r"<tool_call>(.*?)</tool_call>", rest, re.DOTALL)]
    content = rest.partition("<tool_call>")[0]
    content = content.lstrip() if thought else content
    content = content.rstrip() if calls else content
    return thought[1].strip() if thought else "", content, [(x["name"], x["arguments"]) for x in calls]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\}]{ é\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(
    thought=st.none() | st.text("ab <\n", max_size=8),
    content=st.text("ab {<\n", max_size=8).map(str.lstrip),
    calls=st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text("ab", max_size=2), VALUES)), max_size=3),
    indent=st.sampled_from([None, 2]),
)
def test_well_formed_texts_equal_a_plain_reading(
    thought: str | None, content: str, calls: list[tuple[str, Any]], indent: int | None
) -> None:
    spelled = [json.dumps({"name": name, "arguments": arguments}, indent=indent) for name, arguments in calls]
    text = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    text += content + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in spelled)
    parts, malformed = parse([text], "hermes", "think")
    want = read_plainly(text)
    of = {kind: "".join(x.text for x in parts if x.kind == kind) for kind in ("reasoning", "content")}
    found = [(x.text, "".join(y.text for y in parts if y.kind == "arguments" and y.call == x.call)) for x in parts
             if x.kind == "call"]  # fmt: skip
    assert (of["reasoning"], of["content"]) == want[:2] and not malformed
    assert [(name, json.loads(arguments)) for name, arguments in found] == want[2]


CALL = [Part("call", "f"), Part("arguments", '{"a": 1}')]
ONE = '{"name": "f", "arguments": {"a": 1}}'
TWO = [*CALL, Part("call", "get_weather", 1), Part("arguments", "{}", 1)]


@pytest.mark.parametrize(
    ("tools", "text", "want", "malformed"),
    [
        ("mistral", f'[TOOL_CALLS][{ONE}, {{"name": "get_weather", "arguments": {{}}}}]', TWO, 0),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather{}', TWO, 0),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', CALL, 0),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}', TWO, 0),
        ("llama3_json", '{"name": "Ann", "age": 1}', [Part("content", '{"name": "Ann", "age": 1}')], 0),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', CALL, 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', CALL, 0),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [CALL[0], Part("arguments", "{}")], 0),
        ("hermes", f"<tool_call>{ONE[:-2]},}}}}</tool_call>", [CALL[0], Part("arguments", '{"a": 1,}')], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a"', [CALL[0], Part("arguments", '{"a"')], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [CALL[0], Part("arguments", "[1]")], 1),
        ("hermes", "a <tool_call>b</tool_call>", [Part("content", "a <tool_call>b</tool_call>")], 1),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_formats(tools: str, text: str, want: list[Part], malformed: bool) -> None:
    assert parse([text], tools, None) == (want, malformed)


HARMONY = json.loads((pathlib.Path(__file__).parent / "harmony_goldens.json").read_text())


def test_harmony_is_read_as_by_openai_harmony() -> None:
    """The goldens are texts of 1 to 4 messages, some of them cut, and the messages that openai-harmony 0.0.8 reads."""
    for text, messages in HARMONY:
        want, calls = {"reasoning": "", "content": ""}, list[tuple[str, str]]()
        for channel, recipient, body in messages:
            if recipient is not None:
                calls.append((recipient.removeprefix("functions."), body or "{}"))
            else:
                want["reasoning" if channel == "analysis" else "content"] += body
        for pieces in ([text], [*text], [text[:9], text[9:]]):
            parts, _ = parse(pieces, "harmony", "harmony")
            for kind, body in want.items():
                assert "".join(x.text for x in parts if x.kind == kind) == body, text
            named = [x for x in parts if x.kind == "call"]
            texts = ["".join(y.text for y in parts if y.kind == "arguments" and y.call == x.call) for x in named]
            assert [(x.text, y) for x, y in zip(named, texts, strict=True)] == calls, text


@pytest.mark.parametrize(
    ("text", "want", "malformed"),
    [
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', CALL, 0),
        ('<|channel|>commentary to=functions.f<|message|>{"a"<|call|>', [CALL[0], Part("arguments", '{"a"')], 1),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", [Part("reasoning", "a")], 0),
        ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", [Part("reasoning", "{}")], 0),
        ("hello", [Part("content", "hello")], 0),
    ],
)
def test_harmony_in_other_forms(text: str, want: list[Part], malformed: bool) -> None:
    assert parse([text], "harmony", "harmony") == (want, malformed)


def test_formats_are_found_by_templates() -> None:
    hermes = "{%- if tools %}<tools></tools> within <tool_call></tool_call> XML tags{% endif %}"
    assert find_tool_format("auto", hermes) == TOOL_FORMATS["hermes"]
    assert find_tool_format("auto", "{% if tools %}[TOOL_CALLS] {% endif %}") == TOOL_FORMATS["mistral"]
    llama = '{{ tools }}Respond in the format {"name": function name, "parameters": dictionary}'
    assert find_tool_format("auto", llama) == TOOL_FORMATS["llama3_json"]
    assert find_tool_format("auto", "<tool_call>") is None and find_tool_format("none", hermes) is None
    assert find_reasoning_format("auto", "content.split('</think>')") == REASONING_FORMATS["think"]
    assert find_reasoning_format("auto", hermes) is None
    oss = "{{ tools }}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    assert find_tool_format("auto", oss) == TOOL_FORMATS["harmony"]
    assert find_reasoning_format("auto", oss) == REASONING_FORMATS["harmony"]


def test_a_grammar_of_harmony_has_calls_and_answers_that_parse() -> None:
    pytest.importorskip("llguidance")
    one = detokenizer(ByteTokenizer())
    compiler = Compiler(one, one.size)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form, thought = TOOL_FORMATS["harmony"], REASONING_FORMATS["harmony"]
    think = "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
    final = "<|channel|>final<|message|>Hi"
    for forced, answer, text, fits in (
        (True, None, think + call, True),
        (True, None, think + think + call, True),
        (True, None, think + final, False),
        (False, None, call, True),
        (False, None, think + final, True),
        (False, schema, think + final.replace("Hi", '{"a":1}'), True),
        (False, schema, think + final, False),
    ):
        language = AnswerGrammar(form, {"f": schema}, forced=forced, answer=answer, reasoning=thought)
        matcher, allowed = compiler.compile(Grammar.lark(language.write()), ()), True
        for token in text.encode():
            allowed = allowed and bool(matcher.allowed[token])
            if not allowed:
                break
            matcher.take(token)
        assert allowed == fits, text
