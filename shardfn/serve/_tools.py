"""Tools of a request: definitions for the chat template, the choice among them, and calls in earlier messages."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardfn.inference import Grammar

from ._errors import ApiError
from ._fields import CALL, CALLED, CHOICE, CHOSEN, FUNCTION, TOOL, get_required, read_fields
from ._message_formats import AnswerGrammar, ToolFormat
from ._message_parser import is_object
from ._model import Model

MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = ("auto", "none", "required")
_EMPTY = {"type": "object", "properties": {}}


class Tools(NamedTuple):
    """Tools that an answer may call.

    Attributes:
        form: format of calls.
        listed: definitions, as chat templates read them.
        schemas: schemas of the arguments by the names of tools that may be called.
        strict: whether arguments must have their schemas.
        forced: whether the answer must be calls.
        most: most calls, or None.
    """

    form: ToolFormat
    listed: list[dict[str, Any]]
    schemas: dict[str, Any]
    strict: bool = False
    forced: bool = False
    most: int | None = None

    @property
    def grammar(self) -> AnswerGrammar:
        """Returns the language of answers."""
        return AnswerGrammar(self.form, self.schemas, self.forced, self.most)


def read_tools(given: Mapping[str, Any], model: Model) -> Tools | None:
    """Returns the tools of a body, or None for an answer without calls.

    Raises:
        ApiError: names the field that is wrong, or the model has no format of calls.
    """
    choice, several = given.get("tool_choice", "auto"), given.get("parallel_tool_calls", True)
    tools = given.get("tools", [])
    if not tools:
        if choice not in ("auto", "none"):
            raise ApiError(400, "tool_choice asks for a call, and tools is empty. Give tools.", "tool_choice")
        return None
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools must have at most {MOST_TOOLS} entries, got {len(tools)}.", "tools")
    functions = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    schemas = {x["name"]: x.get("parameters", _EMPTY) for x in functions}
    if len(schemas) < len(functions):
        names = [x["name"] for x in functions]
        twice = next(i for i, name in enumerate(names) if name in names[:i])
        text = f"tools[{twice}].function.name is {names[twice]!r}, which an earlier tool has. Give each tool its own."
        raise ApiError(400, text, f"tools[{twice}].function.name")
    chosen = _read_choice(choice, schemas)
    if chosen == "none":
        return None
    if model.tools is None:
        raise ApiError(
            400,
            f"tools is not served: the chat template of {model.name!r} shows no known format of calls. Start the server"
            " with --tool-call-parser, or leave tools out.",
            *("tools", "unsupported_parameter"),
        )
    named = chosen not in _CHOICES
    return Tools(
        model.tools,
        [{"type": "function", "function": {**x, "parameters": x.get("parameters", _EMPTY)}} for x in functions],
        {chosen: schemas[chosen]} if named else schemas,
        any(x.get("strict", False) for x in functions),
        chosen != "auto",
        None if several and not named else 1,
    )


def check_schemas(tools: Tools, model: Model) -> None:
    """Compiles the schema of each tool separately, so that a wrong schema is named.

    Raises:
        ApiError: names the tool.
    """
    assert model.compiler is not None
    for i, tool in enumerate(tools.listed):
        if (schema := tools.schemas.get(tool["function"]["name"])) is None:
            continue
        try:
            model.compiler.compile(Grammar.json_schema(schema), sorted(model.ends))
        except ValueError as error:
            field = f"tools[{i}].function.parameters"
            raise ApiError(400, f"{field}: {str(error).removeprefix('grammar: ')}", field) from error


def _read_tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ApiError(400, f"{at} must be an object with type and function.", at)
    kind = get_required(tool, "type", at)
    if kind != "function":
        text = f"{at}.type is {kind!r:.60}; only tools of type 'function' are served."
        raise ApiError(400, text, f"{at}.type", "unsupported_parameter")
    given = read_fields(tool, TOOL, at)
    at = f"{at}.function"
    function = read_fields(get_required(given, "function", at.rpartition(".")[0]), FUNCTION, at)
    name = get_required(function, "name", at)
    if not _NAME.fullmatch(name):
        text = f"{at}.name must have from 1 to 64 letters, digits, '_', '.' or '-', got {name[:80]!r}."
        raise ApiError(400, text, f"{at}.name")
    if function.get("strict") and "parameters" not in function:
        text = f"{at}.parameters is missing: a strict function needs the schema of its arguments."
        raise ApiError(400, text, f"{at}.parameters", "missing_parameter")
    return function


def _read_choice(choice: Any, schemas: Mapping[str, Any]) -> str:
    """Returns "auto", "none", "required" or the name of a tool."""
    if isinstance(choice, str):
        if choice not in _CHOICES:
            text = f"tool_choice must be one of {', '.join(map(repr, _CHOICES))}, or an object with a function, got"
            raise ApiError(400, f"{text} {choice[:60]!r}.", "tool_choice")
        return choice
    if not isinstance(choice, dict):
        raise ApiError(400, "tool_choice must be a string, or an object with type and function.", "tool_choice")
    given = read_fields(choice, CHOICE, "tool_choice")
    if (kind := get_required(given, "type", "tool_choice")) != "function":
        text = f"tool_choice.type must be 'function', got {kind[:60]!r}."
        raise ApiError(400, text, "tool_choice.type", "unsupported_parameter")
    at = "tool_choice.function"
    name = get_required(read_fields(get_required(given, "function", "tool_choice"), CHOSEN, at), "name", at)
    if name not in schemas:
        text = f"{at}.name is {name[:60]!r}, and tools has {', '.join(map(repr, schemas))}."
        raise ApiError(400, text[:400], f"{at}.name")
    return name


def read_calls(calls: list[Any], at: str) -> list[dict[str, Any]]:
    """Returns the calls of an assistant's message, with arguments as objects, as chat templates read them.

    Raises:
        ApiError: names the field that is wrong, for example arguments that are not a JSON object.
    """
    made = list[dict[str, Any]]()
    for i, call in enumerate(calls):
        where = f"{at}[{i}]"
        if not isinstance(call, dict):
            raise ApiError(400, f"{where} must be an object with id and function.", where)
        given = read_fields(call, CALL, where)
        if (kind := given.get("type", "function")) != "function":
            text = f"{where}.type must be 'function', got {kind[:60]!r}."
            raise ApiError(400, text, f"{where}.type", "unsupported_parameter")
        inner = read_fields(get_required(given, "function", where), CALLED, f"{where}.function")
        text = inner.get("arguments", "") or "{}"
        if not is_object(text):
            field = f"{where}.function.arguments"
            raise ApiError(400, f"{field} must be the text of a JSON object, got {text[:60]!r}.", field)
        function = {"name": get_required(inner, "name", f"{where}.function"), "arguments": json.loads(text)}
        made.append({"type": "function", "function": function, **({"id": given["id"]} if "id" in given else {})})
    return made
