"""Covers grammars as values, and the checks of their size before they are compiled."""

from typing import Any

import pytest

from shardfn.inference import Grammar, Limits, Request, Sampling, check_request
from shardfn.inference._grammar import check_grammar

LIMITS = Limits(vocab=9, context=64, blocks=9)
WRONG = Sampling(grammar="a+")  # pyright: ignore[reportArgumentType]


def test_values_are_equal_and_shown() -> None:
    one = Grammar.json_schema({"b": 1, "a": [True, None]})
    assert one == Grammar("json_schema", '{"b": 1, "a": [true, null]}') == Grammar.json_schema(one.text)
    assert "grammar=Grammar(kind='regex', text='a+')" in repr(Sampling(grammar=Grammar.regex("a+")))
    check_request(Request((1,), Sampling(grammar=one)), LIMITS)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Grammar("xml", "<a/>"), "grammar.kind must be one of json_schema, regex, lark.*got 'xml'"),
        (lambda: Grammar.regex("é" * 40000), "grammar.text must have at most 65536 bytes, got 80000"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "the schema is not JSON: .*set"),
        (lambda: Grammar.json_schema({"a": float("nan")}), "the schema is not JSON: Out of range"),
        (lambda: check_grammar(Grammar.json_schema("{")), "the schema is not JSON"),
        (lambda: check_grammar(Grammar.json_schema("[" * 60000)), "the schema is not JSON: .*recursion"),
        (lambda: check_grammar(Grammar.json_schema({"a": [{"multipleOf": 1e-300}]})), "at most 5000 are compiled"),
        (lambda: check_grammar(Grammar.json_schema({"multipleOf": 1e300})), "at most 5000 are compiled"),
        (lambda: check_grammar(Grammar.lark('start: %json {"multipleOf": 10007}')), "multiples of 10007 need 10007"),
        (lambda: check_grammar(Grammar.lark("start: %json 1.2.")), None),
        (
            lambda: check_grammar(Grammar.json_schema({"allOf": [{"multipleOf": 97}, {"multipleOf": 0.89}]})),
            "multiples of 0.89, 97 need 863300 states",
        ),
        (lambda: check_grammar(Grammar.json_schema({"allOf": [{"multipleOf": 97}, {"multipleOf": 0.01}]})), "9700"),
        (lambda: check_request(Request((1,), WRONG), LIMITS), "grammar is 'a\\+'. Make one by Grammar"),
    ],
)
def test_refused_grammars(made: Any, words: str | None) -> None:
    if words is None:
        return made()
    with pytest.raises(ValueError, match=words):
        made()


def test_small_multiples_pass() -> None:
    schema = {"properties": {"multipleOf": {"multipleOf": 0.25}, "b": {"multipleOf": 12}}}
    check_grammar(Grammar.json_schema(schema))
    with pytest.raises(TypeError, match=r"grammar.text must be a str.*got a int"):
        Grammar.regex(3)  # pyright: ignore[reportArgumentType]
