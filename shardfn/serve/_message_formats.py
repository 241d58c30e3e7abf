"""Formats of reasoning and of calls of tools in a model's text: a table for parsers and for grammars of calls.

The chat template shows the format to the model, and so to the server.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn.inference import spell_schema

_NO_FORMAT = ("auto", "none")


class ToolFormat(NamedTuple):
    """Format of calls of tools in a text: each call is a JSON object with a name and arguments.

    Attributes:
        name: name of the format.
        begin: marker before a call, or empty where the whole answer has the form of calls.
        end: marker after a call, or empty.
        between: text between two calls.
        is_list: whether the calls after a marker are a JSON list.
        key: key of the arguments.
        hint: text of chat templates that show the format.
        skipped: text that may precede the first call.
        channels: whether reasoning, answer and calls are messages of channels, as in gpt-oss (harmony).
    """

    name: str
    begin: str = ""
    end: str = ""
    between: str = ""
    is_list: bool = False
    key: str = "arguments"
    hint: str = ""
    skipped: str = ""
    channels: bool = False


class ReasoningFormat(NamedTuple):
    """Format of the reasoning before an answer.

    Attributes:
        name: name of the format.
        begin: marker before the reasoning. A chat template may end with the marker.
        end: marker after the reasoning.
        channels: see `ToolFormat`.
    """

    name: str
    begin: str
    end: str
    channels: bool = False


TOOL_FORMATS = {
    one.name: one
    for one in (
        ToolFormat("harmony", "<|channel|>", "<|call|>", hint="<|channel|>", channels=True),
        ToolFormat("hermes", "<tool_call>", "</tool_call>", "\n", hint="<tool_call>"),
        ToolFormat("mistral", "[TOOL_CALLS]", between=", ", is_list=True, hint="[TOOL_CALLS]"),
        ToolFormat("llama3_json", between="; ", key="parameters", hint='"parameters":', skipped="<|python_tag|>"),
    )
}
REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("harmony", "<|channel|>", "<|end|>", channels=True),
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}
TOOL_PARSERS, REASONING_PARSERS = (*_NO_FORMAT, *TOOL_FORMATS), (*_NO_FORMAT, *REASONING_FORMATS)


def find_tool_format(parser: str, template: str) -> ToolFormat | None:
    """Returns the format of calls.

    Args:
        parser: name of a format, "none", or "auto" for the format that the template shows.
        template: source of the chat template.

    Example:
        >>> find_tool_format("auto", "{% for t in tools %}...<tool_call>{% endfor %}").name
        'hermes'
    """
    if parser == "auto":
        shown = (one for one in TOOL_FORMATS.values() if one.hint in template)
        return next(shown, None) if "tools" in template else None
    return TOOL_FORMATS.get(parser)


def find_reasoning_format(parser: str, template: str) -> ReasoningFormat | None:
    """Returns the format of reasoning. See `find_tool_format`.

    Example:
        >>> find_reasoning_format("auto", "...{{ '<think>' }}").name
        'think'
    """
    if parser == "auto":
        return next((one for one in REASONING_FORMATS.values() if one.begin in template or one.end in template), None)
    return REASONING_FORMATS.get(parser)


class AnswerGrammar(NamedTuple):
    """Language of answers that may have calls of tools, reasoning, or a schema.

    Attributes:
        tools: format of calls, or None for answers without calls.
        schemas: schemas of the arguments by the names of tools.
        forced: whether an answer must be calls.
        most: most calls, or None.
        answer: schema of an answer without calls, or None for any text.
        reasoning: format of reasoning, or None.
        inside: whether the prompt ends with the marker of reasoning.
    """

    tools: ToolFormat | None = None
    schemas: Mapping[str, Any] = {}
    forced: bool = False
    most: int | None = None
    answer: Any = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False

    def write(self, id_of: Callable[[str], int | None] = lambda marker: None) -> str:
        """Returns the grammar in Lark's syntax.

        Args:
            id_of: function from a marker to its id, if the marker is a special token without bytes, or to None.

        Example:
            >>> made = AnswerGrammar(TOOL_FORMATS["llama3_json"], {"f": {"type": "object"}}, forced=True, most=1)
            >>> print(made.write().splitlines()[0])
            start: object
        """
        rules = _Rules(id_of)
        if any(form is not None and form.channels for form in (self.tools, self.reasoning)):
            return "\n".join([f"start: {self._write_channels(rules)}", *rules.lines])
        body = self._write_body(rules)
        if self.reasoning is not None:
            thought = rules.write_head("thought", self.reasoning.end)
            first = "" if self.inside else rules.spell(self.reasoning.begin) + " "
            body = f"{first}{thought} SPACES ({body})" if self.inside else f"({first}{thought} SPACES)? ({body})"
            rules.lines.append("SPACES: /[ \\n]{0,4}/")
        return "\n".join([f"start: {body}", *rules.lines])

    def _write_body(self, rules: "_Rules") -> str:
        if self.answer is not None:
            rules.lines.append(f"answer: %json {spell_schema(self.answer)}")
        if self.tools is None:
            return "answer"
        calls = self._write_calls(self.tools, rules)
        if self.forced:
            return calls
        if self.answer is not None:
            return f"({calls}) | answer"
        if not self.tools.begin:
            rules.lines.append(r"PLAIN: /([^{<\s](.|\n)*)?/")
            return f"({calls}) | PLAIN"
        head = rules.write_head("head", self.tools.begin)
        after = self._write_one(rules)
        rules.lines.append(r"TEXT: /(.|\n)*/")
        return f"({head} {after}) | TEXT" if self.most == 1 else f"({head} {after})* TEXT"

    def _write_channels(self, rules: "_Rules") -> str:
        """Returns messages of analysis, and then a call or the final message. The prompt ends with the role."""
        channel, message, start = (rules.spell(f"<|{x}|>") for x in ("channel", "message", "start"))
        thought = rules.write_head("thought", "<|end|>")
        rules.lines.append(f'analysis: {channel} "analysis" {message} {thought} {start} "assistant"')
        ways, schemas = list[str](), self.schemas if self.tools is not None else {}
        for i, (name, schema) in enumerate(schemas.items()):
            to = json.dumps(f"commentary to=functions.{name} ")
            rules.lines.append(f'call{i}: {channel} {to} {rules.spell("<|constrain|>")} "json" {message} arguments{i}')
            rules.lines.append(f"arguments{i}: %json {spell_schema(schema)}")
            ways.append(f"call{i}")
        if not self.forced:
            text = "TEXT" if self.answer is None else f"%json {spell_schema(self.answer)}"
            rules.lines += [f"body: {text}", f'final: {channel} "final" {message} body']
            rules.lines += [r"TEXT: /(.|\n)*/"] if self.answer is None else []
            ways.append("final")
        return f"analysis* ({' | '.join(ways)})"

    def _write_calls(self, form: ToolFormat, rules: "_Rules") -> str:
        named = [
            json.dumps(f'{{"name": {json.dumps(name)}, "{form.key}": ') + f' arguments{i} "}}"'
            for i, name in enumerate(self.schemas)
        ]
        rules.lines.append("object: " + " | ".join(named))
        rules.lines += [f"arguments{i}: %json {spell_schema(x)}" for i, x in enumerate(self.schemas.values())]
        begin = rules.spell(form.begin) + " " if form.begin else ""
        one = self._write_one(rules)
        if form.is_list or self.most == 1:
            return begin + one
        again = f"({json.dumps(form.between)} {begin}{one})*"
        return f"{begin}{one} {again}"

    def _write_one(self, rules: "_Rules") -> str:
        """Returns the calls after a marker."""
        form = self.tools
        assert form is not None
        if form.is_list:
            more = "" if self.most == 1 else f" ({json.dumps(form.between)} object)*"
            return f'"[" object{more} "]"'
        return rf'"\n" object "\n" {rules.spell(form.end)}' if form.end else "object"


class _Rules:
    """Rules of a grammar in Lark's syntax.

    Args:
        id_of: see `AnswerGrammar.write`.
    """

    def __init__(self, id_of: Callable[[str], int | None]) -> None:
        self._id_of, self.lines = id_of, list[str]()

    def spell(self, marker: str) -> str:
        """Returns the rule of a marker."""
        token = self._id_of(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def write_head(self, name: str, marker: str) -> str:
        """Adds the rule of any text up to a marker, and returns the rule's name."""
        if self._id_of(marker) is None:
            escaped = re.escape(marker).replace("/", r"\/")
            self.lines.append(rf"{name}[lazy]: /(.|\n)*{escaped}/")
        else:
            self.lines += [f"{name}: {name.upper()} {self.spell(marker)}", rf"{name.upper()}: /(.|\n)*/"]
        return name
