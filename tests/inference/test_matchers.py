"""Covers matchers of llguidance: masks are sound for real vocabularies, fail closed, and depend on nothing else."""

import json
import re
from typing import Any

import numpy as np
import pytest

from shardfn.data import ByteTokenizer
from shardfn.inference import Compiler, DraftTree, Grammar, detokenizer
from shardfn.inference._matchers import Matcher
from tests.inference.stories import TOKENS
from tests.inference.tokenizers import FOLLOWED, trained

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"na\u00efve": {"enum": ["\U0001f600", 1]}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["na\u00efve"],
    "additionalProperties": False,
}


def walk(matcher: Matcher, rng: np.random.Generator, most: int = 60) -> tuple[list[int], str | None]:
    """Tokens drawn evenly among those that are allowed."""
    tokens, end = [], None
    while end is None and len(tokens) < most:
        tokens.append(int(rng.choice(np.flatnonzero(matcher.allowed))))
        end = matcher.take(tokens[-1])
    return tokens, end


@pytest.mark.day("byte level", "llama", "metaspace")
@pytest.mark.parametrize("kind", [*FOLLOWED, "bytes"])
def test_walks_are_texts_of_the_grammar(kind: str) -> None:
    if kind == "metaspace":
        return  # its vocabulary lacks most bytes; below
    one = detokenizer(ByteTokenizer() if kind == "bytes" else trained(kind))
    compiler, rng, complete = Compiler(one, one.size + 3), np.random.default_rng(0), 0
    for _ in range(15):
        tokens, end = walk(compiler.compile(Grammar.json_schema(SCHEMA), ()), rng)
        text = b"".join(one.bytes_of(token) or b"?" for token in tokens).decode()  # pyright: ignore
        assert end != "error"
        if end == "stop":
            found = json.loads(text)
            assert found["na\u00efve"] in ("\U0001f600", 1) and set(found) <= set(SCHEMA["properties"])
            complete += 1
        tokens, end = walk(compiler.compile(Grammar.regex("[a-c]{2,3} sat|on"), ()), rng)
        text = b"".join(one.bytes_of(token) or b"?" for token in tokens).decode()  # pyright: ignore
        assert end == "stop" and re.fullmatch("[a-c]{2,3} sat|on", text)
    assert complete


def drafts(rng: np.random.Generator, allowed: np.ndarray, most: int) -> DraftTree:
    """Chains and trees of tokens that can come at their first place."""
    tokens = rng.choice(np.flatnonzero(allowed), most)
    parents = (
        range(-1, most - 1) if rng.random() < 0.3 else (int(rng.integers(-1, i)) if i else -1 for i in range(most))
    )
    return DraftTree(tuple(map(int, tokens)), tuple(parents))


@pytest.mark.day("regex")
@pytest.mark.parametrize(
    "grammar", [Grammar.json_schema(SCHEMA), Grammar.regex("([ab]{1,3}c)*d?")], ids=["json", "regex"]
)
def test_masks_along_drafts_are_those_of_their_texts(grammar: Grammar) -> None:
    compiler, rng, kept_ones = Compiler(detokenizer(ByteTokenizer()), 260), np.random.default_rng(1), 0
    for _ in range(4):
        one, ahead = compiler.compile(grammar, (259,)), compiler.ahead(grammar, (259,))
        tokens, end = list[int](), None
        while end is None and len(tokens) < 20:
            kept, masks = ahead.cut(tokens, one.allowed, tree := drafts(rng, one.allowed, 6))
            kept_ones += len(kept)
            branches = {tuple(kept.branch(i)) for i in range(len(kept))}
            for i in range(len(tree)):
                fresh = compiler.compile(grammar, (259,))
                ends = [fresh.take(token) for token in tokens]
                for token in tree.branch(i):
                    ends.append("error" if not fresh.allowed[token] or ends[-1:] == ["stop"] else fresh.take(token))
                assert (tuple(tree.branch(i)) in branches) == ("error" not in ends and 259 not in tree.branch(i)[:-1])
                if tuple(tree.branch(i)) in branches and tree.tokens[i] != 259:
                    at = next(j for j in range(len(kept)) if kept.branch(j) == tree.branch(i))
                    assert (masks[at] == (fresh.allowed & (ends[-1] is None))).all()
            tokens.append(int(rng.choice(np.flatnonzero(one.allowed))))
            end = "stop" if tokens[-1] == 259 else one.take(tokens[-1])
    assert kept_ones > 30


def test_stop_tokens_come_only_where_the_text_is_complete() -> None:
    compiler = Compiler(detokenizer(ByteTokenizer()), 260)
    matcher = compiler.compile(Grammar.regex("[0-9\n]{1,3}"), (10, 259))
    assert set(np.flatnonzero(matcher.allowed)) == {*b"0123456789"}
    assert matcher.take(48) is None and set(np.flatnonzero(matcher.allowed)) == {*b"0123456789\n", 259}
    assert matcher.take(259, last=True) is None


@pytest.mark.parametrize(
    ("own", "most"),
    [
        ({}, 20),
        ({"x-guidance": {"lenient": True}}, 20),
        ({"x-guidance": {"whitespace_flexible": False}}, 0),
        ({"x-guidance": {"whitespace_pattern": " {1,3}"}}, 3),
    ],
    ids=["default", "another option", "none", "its own"],
)
def test_white_space_between_parts_of_json_is_bounded(own: dict[str, Any], most: int) -> None:
    compiler = Compiler(detokenizer(ByteTokenizer()), 256)
    grammar = Grammar.json_schema(SCHEMA | {"required": ["b"]} | own)
    for begin in ("{", '{"b"', '{"b":', '{"b":[', '{"b":[true', '{"b":[true,', '{"b":[true]'):
        matcher = compiler.compile(grammar, ())
        for token in begin.encode():
            assert matcher.take(token) is None
        num = 0
        while matcher.allowed[ord(" ")]:
            assert matcher.take(ord(" ")) is None
            num += 1
        assert num == most and matcher.allowed.any()
    pretty = json.dumps({"b": [True, False]}, indent=4)
    matcher = compiler.compile(grammar, ())
    assert most < 20 or [matcher.take(token) for token in pretty.encode()][-1] == "stop"


def test_a_token_outside_the_grammar_closes_the_matcher() -> None:
    matcher = Compiler(detokenizer(ByteTokenizer()), 256).compile(Grammar.regex("ab"), ())
    assert matcher.take(ord("x")) == "error" and not matcher.allowed.any() and "forced bytes" in matcher.problem
    assert matcher.take(ord("a")) == "error" and not matcher.allowed.any()


def test_a_text_that_the_vocabulary_lacks_is_never_begun_wrongly() -> None:
    compiler = Compiler(detokenizer(TOKENS), 13)
    with pytest.raises(ValueError, match="no token of the vocabulary may begin a text"):
        compiler.compile(Grammar.regex("x"), ())
    matcher = compiler.compile(Grammar.regex("ax"), ())
    assert list(np.flatnonzero(matcher.allowed)) == [0]
    assert matcher.take(0) is None and not matcher.allowed.any()


# Exhausts the limit of a step after a few tokens.
HARD = Grammar.lark("start: X\nX: /(a|b)*a(a|b){14}/ & /(a|b)*b(a|b){13}/ & ~/(.*abba.*)/")


def test_a_matcher_that_exhausts_its_limit_spoils_no_other() -> None:
    compiler = Compiler(detokenizer(TOKENS), 13)
    ends = []
    for seed in (0, 0, 1):
        matcher = compiler.compile(HARD, ())
        rng, tokens = np.random.default_rng(seed), []
        while matcher.allowed.any():
            tokens.append(int(rng.choice(np.flatnonzero(matcher.allowed))))
            matcher.take(tokens[-1])
        ends.append(tokens)
        assert "too many expressions" in matcher.problem
    assert ends[0] == ends[1] and len(ends[0]) > 1


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.regex("[0-9"), "unclosed character class"),
        (Grammar.regex(""), "no token of the vocabulary may begin a text"),
        (Grammar.regex("(" * 20000 + "a" + ")" * 20000), "invalid regex"),
        (Grammar.json_schema("3"), "schema must be an object or boolean"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable schema"),
        (Grammar.json_schema({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}), "NoExtension"),
        (Grammar.json_schema('{"$ref": "http://x.y/z"}'), "does not fetch resources"),
        (Grammar.json_schema('{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
        (Grammar.json_schema({"not": {}}), 'Unimplemented keys: \\["not"\\]'),
        (Grammar.lark("start: x"), 'unknown name: "x"'),
        (Grammar.lark("start: " + "(" * 20000), "too deeply nested"),
    ],
)
def test_refused_grammars_are_one_line(grammar: Grammar, words: str) -> None:
    with pytest.raises(ValueError, match=words) as found:
        Compiler(detokenizer(ByteTokenizer()), 256).compile(grammar, ())
    assert str(found.value).startswith("grammar: ") and "\n" not in str(found.value) and len(str(found.value)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"v{i:05d}" for i in range(5000)]},
        {"type": "string", "minLength": 1000, "maxLength": 1000000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 100000, "maxItems": 1000000},
        {"type": "integer", "minimum": 1, "maximum": 10**300},
        {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} if i else {} for i in range(30)}}
        | {"$ref": "#/$defs/d29"},
    ],
)
def test_large_schemas_are_compiled(schema: Any) -> None:
    matcher = Compiler(detokenizer(ByteTokenizer()), 256).compile(Grammar.json_schema(schema), ())
    tokens, end = walk(matcher, np.random.default_rng(0), 20)
    assert tokens and end != "error"


def test_a_vocabulary_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="grammar needs a vocabulary of byte level"):
        Compiler(detokenizer(trained("words")), 300)
