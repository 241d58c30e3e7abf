"""Grammars that a request's text must have: values, compiled before a request is admitted."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import lcm
from typing import Any

KINDS = ("json_schema", "regex", "lark")
MOST_BYTES = 1 << 16
# A compiled `multipleOf` has a state for each remainder.
MOST_REMAINDERS = 5000
# Default rules of JSON texts: a bound on white space between the parts, so that a weak model does not draw white space
# until `max_tokens`, and `anyOf` for `oneOf`, since no context-free grammar excludes a second match.
_JSON_RULES = {"whitespace_pattern": r"[ \t\n\r]{1,20}", "coerce_one_of": True}


@dataclass(frozen=True)
class Grammar:
    """Language that a whole text must be in. Made by `Grammar.json_schema`, `Grammar.regex` or `Grammar.lark`.

    Args:
        kind: "json_schema", "regex" or "lark".
        text: schema, regular expression or grammar.

    Raises:
        TypeError: the text is not a string.
        ValueError: the kind is unknown, or the text has more than 65,536 bytes.

    Example:
        >>> Grammar.regex("[0-9]{3}")
        Grammar(kind='regex', text='[0-9]{3}')
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar.kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if not isinstance(self.text, str):
            raise TypeError(f"grammar.text must be a str, got a {type(self.text).__name__}.")
        if (size := len(self.text.encode("utf-8", "replace"))) > MOST_BYTES:
            raise ValueError(f"grammar.text must have at most {MOST_BYTES} bytes, got {size}.")

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> "Grammar":
        """Returns the grammar of JSON texts that have a schema, with properties in the order of the schema.

        Between two parts of a text there are at most 20 characters of white space, and `oneOf` permits each text that
        `anyOf` permits. The schema may have another rule, for example `"x-guidance": {"whitespace_flexible": False}`
        for a text without white space.

        Raises:
            ValueError: the schema is not JSON.

        Example:
            >>> Grammar.json_schema({"type": "integer"}).text
            '{"type": "integer"}'
        """
        text = schema if isinstance(schema, str) else _dump_schema(schema)
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Returns the grammar of texts that match a regular expression as a whole, in the syntax of Rust's `regex`.

        Example:
            >>> Grammar.regex("yes|no").kind
            'regex'
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Returns the grammar of texts of a context-free language, in llguidance's variant of Lark's syntax.

        Texts begin with the rule `start`.

        Example:
            >>> Grammar.lark('start: "a" start "b" | "ab"').kind
            'lark'
        """
        return cls("lark", text)


def list_json_rules(schema: Any) -> dict[str, Any]:
    """Returns the rules of texts that have a schema, except those that the schema's `x-guidance` sets.

    Example:
        >>> list_json_rules({"x-guidance": {"whitespace_flexible": False}})
        {'coerce_one_of': True}
    """
    if not isinstance(schema, Mapping):  # the compiler takes rules only next to an object
        return {}
    own = schema.get("x-guidance")
    own = {str(name).partition("_")[0] for name in own} if isinstance(own, Mapping) else set()
    return {name: value for name, value in _JSON_RULES.items() if name.partition("_")[0] not in own}


def spell_schema(schema: Any) -> str:
    """Returns the text of a schema after `%json` in a Lark grammar, with the rules of `Grammar.json_schema`.

    Raises:
        ValueError: the schema is not JSON.

    Example:
        >>> spell_schema({"type": "integer", "x-guidance": {"whitespace_flexible": False}})
        '{"type": "integer", "x-guidance": {"coerce_one_of": true, "whitespace_flexible": false}}'
    """
    if not isinstance(schema, Mapping):
        return _dump_schema({} if schema is True else schema)
    own = schema.get("x-guidance")
    if own is not None and not isinstance(own, Mapping):
        return _dump_schema(schema)
    return _dump_schema({**schema, "x-guidance": {**list_json_rules(schema), **(own or {})}})


def check_grammar(grammar: Grammar) -> None:
    """Refuses a schema that is not JSON, or whose compilation would take long, such as a large `multipleOf`.

    Raises:
        ValueError: the schema is refused.

    Example:
        >>> check_grammar(Grammar.json_schema({"type": "integer", "multipleOf": 99991}))
        Traceback (most recent call last):
        ValueError: grammar: multiples of 99991 need 99991 states, and at most 5000 are compiled.
    """
    multiples = [Decimal(x) for schema in _list_schemas(grammar) for x in _list_multiples(schema)]
    if not multiples:
        return
    least = min(_get_exponent(x) for x in multiples)
    states = lcm(*(abs(int(x.scaleb(-least))) for x in multiples)) if least > -64 and max(multiples) < 10**9 else 10**9
    if states > MOST_REMAINDERS:
        listed = ", ".join(str(x) for x in multiples[:3])
        raise ValueError(
            f"grammar: multiples of {listed} need {states} states, and at most {MOST_REMAINDERS} are compiled."
        )


def _dump_schema(schema: Any) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"grammar: the schema is not JSON: {error}") from error


def _list_schemas(grammar: Grammar) -> Iterator[Any]:
    """Yields the schemas of a grammar. Schemas within a Lark grammar follow %json."""
    text, decoder = grammar.text, json.JSONDecoder(parse_int=Decimal, parse_float=Decimal)
    try:
        if grammar.kind == "json_schema":
            yield decoder.decode(text)
        elif grammar.kind == "lark":
            for part in text.split("%json")[1:]:
                yield decoder.raw_decode(part.lstrip())[0]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"grammar: the schema is not JSON: {error}") from error


def _list_multiples(schema: Any) -> Iterator[Decimal]:
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
            if isinstance(one.get("multipleOf"), Decimal):
                yield one["multipleOf"]
        elif isinstance(one, list):
            left += one


def _get_exponent(x: Decimal) -> int:
    found = x.normalize().as_tuple().exponent
    return min(0, found) if isinstance(found, int) else 0
