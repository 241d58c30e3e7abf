"""Parts of a text that a model writes: reasoning, the answer, and calls of tools, each as soon as possible.

A parser is a coroutine that takes a character at a time. So the parts of a text, joined, are the same for every way
to cut the text into pieces.
"""

import itertools
import json
import re
from collections import deque
from collections.abc import Collection, Generator
from typing import Literal, NamedTuple

from ._message_formats import ReasoningFormat, ToolFormat

PartKind = Literal["reasoning", "content", "call", "arguments"]
_ARGUMENTS = ("arguments", "parameters")  # keys of arguments, for example "parameters" in Llama 3
_KEYS = ("name", *_ARGUMENTS, "type", "id")
_Read = Generator[None, str, None]
# Of harmony: the markers of a message's header and of its end, and a channel and a recipient in the header.
_MESSAGE, _ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = ("<|channel|>", "<|start|>", "to=")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


class MessagePart(NamedTuple):
    """Piece of a message.

    Attributes:
        kind: "reasoning", "content", "call" for the name of a tool, or "arguments" for a part of its arguments.
        text: text.
        call: number of the call.
    """

    kind: PartKind
    text: str
    call: int = 0


class MessageParser:
    """Parser of an answer.

    Args:
        tools: form of calls, or None for a text without calls.
        reasoning: form of reasoning, or None for a text without reasoning.
        inside: whether the prompt ends with the marker of reasoning.
        names: names of the tools. In a format without a marker no further name makes a call.
        most: most calls. Further calls are left out.

    Attributes:
        num_calls: number of calls so far.
        malformed: whether a call was not as its format has it, for example with arguments that are not a JSON object.

    Example:
        >>> from shardfn.serve._message_formats import TOOL_FORMATS
        >>> parser = MessageParser(TOOL_FORMATS["hermes"])
        >>> parts = parser.add('Let me see. <tool_call>{"name": "find", "arguments": {"a"')
        >>> [(part.kind, part.text) for part in parts]
        [('content', 'Let me see.'), ('call', 'find'), ('arguments', '{"a"')]
        >>> parser.add(": 1}}</tool_call>")
        [MessagePart(kind='arguments', text=': 1}', call=0)]
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        inside: bool = False,
        names: Collection[str] = (),
        most: int | None = None,
    ) -> None:
        self._tools, self._reasoning, self._inside, self._names, self._most = tools, reasoning, inside, names, most
        self._again = deque[str]()  # characters that are read once more
        self._kind: PartKind = "reasoning" if inside else "content"
        self._held = ""  # text that may begin a marker or a call
        self._spaces = ""  # white space before it
        self._is_open = False  # whether a call has begun and has not ended
        self._parts = list[MessagePart]()
        self._arguments, self._in_header = "", False  # of an open call of harmony, and before a message's body
        self._has_channels = any(form is not None and form.channels for form in (tools, reasoning))
        self.num_calls, self.malformed = 0, False
        self._reader = self._read_message()
        next(self._reader)

    @property
    def is_reasoning(self) -> bool:
        """Returns whether the text is within reasoning."""
        return self._kind == "reasoning"

    def add(self, text: str) -> list[MessagePart]:
        """Returns the parts that are certain with further text."""
        for character in text:
            self._reader.send(character)
        return self._take_parts()

    def end(self) -> list[MessagePart]:
        """Returns the parts that were held back, at the end of the text."""
        self._reader.close()
        if self._has_channels:
            self._end_message()
        elif self._is_open:
            self.malformed, self._spaces, self._held = True, "", ""
        self._flush()
        return self._take_parts()

    def _take_parts(self) -> list[MessagePart]:
        """Returns the parts since the last call, with neighbours of the same kind joined."""
        joined = join_parts(self._parts)
        self._parts = []
        return joined if self._most is None else [x for x in joined if x.call < self._most]

    def _emit(self, kind: PartKind, text: str) -> None:
        if text:
            self._parts.append(
                MessagePart(kind, text, max(0, self.num_calls - 1) if kind in ("call", "arguments") else 0)
            )

    def _flush(self) -> None:
        """Gives the text that was held back."""
        self._emit(self._kind, self._spaces + self._held)
        self._spaces = self._held = ""

    # Coroutines: `yield` waits for the next character.

    def _read_message(self) -> _Read:
        while self._has_channels:
            yield from self._read_channel()
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        tools = self._tools
        while tools is not None and tools.begin:
            yield from self._read_until(tools.begin)
            yield from self._read_marked(tools)
            yield from self._skip_spaces()
        if tools is not None:
            yield from self._read_unmarked(tools)
        while True:
            self._emit("content", (yield from self._take()))

    def _read_channel(self) -> _Read:
        """Reads a message of harmony: a header, and a body up to a marker of its end."""
        self._in_header = True
        while not self._held.endswith(_MESSAGE):
            self._held += yield from self._take()
        self._in_header = False
        channel, to = _CHANNEL.search(self._held), _RECIPIENT.search(self._held)
        self._held, recipient = "", to.group(1) if to else ""
        called = self._tools is not None and recipient.startswith("functions.")
        if called:
            self._begin_call(recipient.removeprefix("functions."))
        thinks = (channel is not None and channel.group(1) == "analysis") or (recipient and not called)
        self._kind = "reasoning" if thinks else "content"
        while self._held not in _ENDS:
            self._held += yield from self._take()
            while self._held and not any(end.startswith(self._held) for end in _ENDS):
                self._give_body(self._held[0])
                self._held = self._held[1:]
        self._held = ""
        self._end_message()
        self._kind = "content"

    def _give_body(self, text: str) -> None:
        if self._is_open:
            self._arguments += text
        self._emit("arguments" if self._is_open else self._kind, text)

    def _end_message(self) -> None:
        """Ends a message of harmony, also at the end of the text, where a part of a header is left out."""
        head = self._held.lstrip()
        if not self._in_header or not (head.startswith(_BEGINS) or any(x.startswith(head) for x in _BEGINS)):
            self._give_body(self._held)
        self._held = ""
        if self._is_open:
            arguments, self._arguments = self._arguments, ""
            self._end_call(arguments)

    def _read_reasoning(self, form: ReasoningFormat) -> _Read:
        if self._inside or (yield from self._match(form.begin)):
            self._kind = "reasoning"
            yield from self._skip_spaces()
            yield from self._read_until(form.end)
            self._kind, self._spaces, self._held = "content", "", ""
            yield from self._skip_spaces()

    def _read_marked(self, form: ToolFormat) -> _Read:
        """Reads the calls after a marker."""
        first = yield from self._hold_next()
        if form.is_list and first == "[":
            while (yield from self._read_call(form)):
                if (yield from self._hold_next()) != ",":
                    self._held = ""
                    return
        elif form.is_list and first != "{":
            yield from self._read_named(first)
        else:
            self._put_back_held(first)
            if (yield from self._read_call(form)):
                yield from self._match(form.end)

    def _read_unmarked(self, form: ToolFormat) -> _Read:
        """Reads calls where the whole answer has the form of calls. The text is content otherwise."""
        yield from self._match(form.skipped)
        while (yield from self._read_call(form)):
            if (yield from self._hold_next()) != ";":
                break
        self._flush()

    def _read_call(self, form: ToolFormat) -> Generator[None, str, bool]:
        """Reads the JSON object of a call, and returns whether it is one. Otherwise its text is content."""
        name, arguments = "", ""
        if (yield from self._hold_next()) != "{":
            return self._fail(form)
        while True:
            if (yield from self._hold_next()) != '"':
                return self._fail(form)
            key = _decode_string((yield from self._read_string()))
            if key not in _KEYS or (yield from self._hold_next()) != ":":
                return self._fail(form)
            first = yield from self._hold_next()
            if key == "name":
                name = _decode_string((yield from self._read_string())) if first == '"' else ""
                if name == "" or (not form.begin and name not in self._names):
                    return self._fail(form)
                self._begin_call(name)
                self._emit("arguments", arguments)
            elif key not in _ARGUMENTS:
                yield from self._read_value(first, emits=False)
            elif first == '"':  # JSON within a string
                arguments = _decode_string((yield from self._read_string()))
                self._emit("arguments", arguments if name else "")
            else:
                arguments = yield from self._read_value(first, emits=bool(name))
            end = yield from self._hold_next()
            if end == "}" and name:
                self._end_call(arguments)
                return True
            if end != ",":
                return self._fail(form)

    def _read_named(self, first: str) -> _Read:
        """Reads a call that is a name and arguments, with or without [ARGS] between them."""
        name = first
        while (character := (yield from self._hold())) not in "{[":
            name += character
        if character == "[":
            while character != "]":
                character = yield from self._hold()
            character = yield from self._hold_next()
        self._begin_call(name.strip())
        self._end_call((yield from self._read_value(character, emits=True)))

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._is_open = True
        self._spaces = self._held = ""
        self._emit("call", name)

    def _end_call(self, arguments: str) -> None:
        self.malformed |= not is_object(arguments or "{}")
        self._emit("arguments", "" if arguments else "{}")
        self._is_open, self._held = False, ""

    def _fail(self, form: ToolFormat) -> bool:
        """Returns False, for a text that is not a call. After a marker such a text is malformed."""
        self.malformed |= bool(form.begin) or self._is_open
        if self._is_open:
            self._is_open, self._held = False, ""
        self._flush()
        return False

    def _read_value(self, first: str, *, emits: bool) -> Generator[None, str, str]:
        """Reads a JSON value after its first character, and returns its text."""
        text, depth = first, 0
        while True:
            if emits:
                self._emit("arguments", first)
            if first == '"':
                text += yield from self._read_string(emits=emits)
            depth += (first in "{[") - (first in "}]")
            if depth == 0 and first in '}]"':
                return text
            first = yield from self._hold()
            if depth == 0 and (first in ",}]" or first.isspace()):
                self._put_back_held(first)
                return text
            text += first

    def _read_string(self, *, emits: bool = False) -> Generator[None, str, str]:
        """Reads the rest of a JSON string after its first quote, and returns its text, the last quote included."""
        text, escaped = "", False
        while True:
            character = yield from self._hold()
            if emits:
                self._emit("arguments", character)
            text += character
            if character == '"' and not escaped:
                return text
            escaped = character == "\\" and not escaped

    def _read_until(self, marker: str) -> _Read:
        """Gives text up to a marker. The marker and the white space before it are held back."""
        while self._held != marker:
            character = yield from self._take()
            if not self._held and character.isspace():
                self._spaces += character
                continue
            self._held += character
            while self._held and not marker.startswith(self._held):
                given, rest = self._spaces + self._held[0], self._held[1:]
                self._spaces, self._held = (rest, "") if rest.isspace() else ("", rest)
                self._emit(self._kind, given)

    def _match(self, marker: str) -> Generator[None, str, bool]:
        """Returns whether a marker follows, after white space. Otherwise the text is read once more."""
        found = ""
        while found != marker:
            character = yield from self._take()
            if not found and character.isspace():
                self._spaces += character
                continue
            self._held = found = found + character
            if not marker.startswith(found):
                again, self._spaces, self._held = self._spaces + found, "", ""
                self._put_back(again)
                return False
        self._spaces = self._held = ""
        return True

    def _skip_spaces(self) -> _Read:
        while (character := (yield from self._take())).isspace():
            pass
        self._put_back(character)

    def _hold_next(self) -> Generator[None, str, str]:
        """Returns the next character that is not white space."""
        while (character := (yield from self._hold())).isspace():
            pass
        return character

    def _hold(self) -> Generator[None, str, str]:
        """Returns the next character, and keeps it in the text that is held back, unless a call has begun."""
        character = yield from self._take()
        if not self._is_open:
            self._held += character
        return character

    def _take(self) -> Generator[None, str, str]:
        """Returns the next character."""
        if self._again:
            return self._again.popleft()
        return (yield)

    def _put_back(self, text: str) -> None:
        self._again.extendleft(reversed(text))

    def _put_back_held(self, character: str) -> None:
        self._held = self._held[:-1]
        self._put_back(character)


def join_parts(parts: list[MessagePart]) -> list[MessagePart]:
    """Returns parts with neighbours of the same kind joined.

    Example:
        >>> join_parts([MessagePart("content", "a"), MessagePart("content", "b"), MessagePart("call", "f")])
        [MessagePart(kind='content', text='ab', call=0), MessagePart(kind='call', text='f', call=0)]
    """
    joined = list[MessagePart]()
    groups = itertools.groupby(enumerate(parts), lambda pair: (pair[1][::2], pair[0] * (pair[1].kind == "call")))
    for _, group in groups:
        several = [part for _, part in group]
        joined.append(several[0]._replace(text="".join(part.text for part in several)))
    return joined


def _decode_string(text: str) -> str:
    """Returns a JSON string from its text after the first quote."""
    try:
        return json.loads(f'"{text}', strict=False)
    except ValueError:
        return text[:-1]


def is_object(text: str) -> bool:
    """Returns whether a text is a JSON object.

    Example:
        >>> is_object('{"a": 1}'), is_object('{"a": }'), is_object("[1]")
        (True, False, False)
    """
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(text: str) -> None:
    raise ValueError(text)
