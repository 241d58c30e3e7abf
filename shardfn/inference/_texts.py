"""Texts of all choices in progress, and the stop strings that end texts.

A text is a function of tokens. The schedule knows no text. A token that completes a stop string makes an event of the
step that takes the token, so that token numbers, log probabilities and blocks end there, on all ranks.

A text ends with the first complete stop string, however the text is cut into pieces. Of several stop strings that end
at one character, the longest is cut off. Text that may begin a stop string is held back, for example "EN" where "END"
is a stop string.

References:
    Knuth, Morris, Pratt: Fast Pattern Matching in Strings, 1977, https://doi.org/10.1137/0206024
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ._detokenize import DecodeStream, Detokenizer
from ._hooks import Choice, Ends, EngineHooks, SampledToken
from ._requests import Request
from ._schedule import Output


class StopStringMatcher:
    """Text up to its first stop string.

    Args:
        stops: strings that are not empty.
        include: whether the text has the stop string at its end.

    Example:
        >>> cut = StopStringMatcher(["END"])
        >>> cut.add("to the E"), cut.add("NE"), cut.add("ND and on")
        (('to the ', False), ('EN', False), ('', True))
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._tables = [(stop, _compute_borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._include, self._held = include, ""

    def add(self, text: str, *, ends: bool = True) -> tuple[str, bool]:
        """Returns the text that is certain, and whether the text ends here by a stop string.

        Args:
            text: further text.
            ends: whether a stop string that is complete in this text ends the text. Otherwise it is plain text.
        """
        if not self._tables:
            return text, False
        for i, character in enumerate(text, 1):
            if (found := self._match_character(character)) and ends:
                whole, self._held = self._held + text[:i], ""
                return whole if self._include else whole[:-found], True
        whole = self._held + text
        given = len(whole) - max(self._matched)
        self._held = whole[given:]
        return whole[:given], False

    def end(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _match_character(self, character: str) -> int:
        """Moves on by a character, and returns the length of the longest stop string that ends there, or 0."""
        longest = 0
        for i, (stop, borders) in enumerate(self._tables):
            k = self._matched[i]
            while k and stop[k] != character:
                k = borders[k - 1]
            k += stop[k] == character
            if k == len(stop):
                longest, k = max(longest, k), borders[k - 1]
            self._matched[i] = k
        return longest


@dataclass(slots=True)
class _ChoiceText:
    """Text of a single choice: certain up to a stop string that may have begun."""

    growing: DecodeStream
    cut: StopStringMatcher
    due: dict[int, str] = field(default_factory=dict)  # by the position of the text's token

    def rest(self) -> str:
        """Returns the text that was held back; at the end of a choice."""
        text, found = self.cut.add(self.growing.end())
        return text if found else text + self.cut.end()


class Texts:
    """Hooks of an engine for the texts of choices.

    Args:
        detokenizer: detokenizer. None gives every token an empty text.
        make_spelling: function that makes a detokenizer with texts of special tokens, for requests that ask for them.
            None takes `detokenizer`.
    """

    def __init__(self, detokenizer: Detokenizer | None, make_spelling: Callable[[], Detokenizer] | None = None) -> None:
        self._detokenizer = detokenizer
        self._make_spelling = None if make_spelling is None else functools.cache(make_spelling)
        self._texts: dict[Choice, _ChoiceText] = {}

    @property
    def hooks(self) -> EngineHooks:
        """Returns the engine hooks that decode texts."""
        if self._detokenizer is None:
            return EngineHooks(admit=self.admit)
        return EngineHooks(admit=self.admit, ends=self.take, fields=lambda output: {"text": self.of(output)})

    def admit(self, request: Request) -> None:
        """Refuses stop strings where there are no texts.

        Raises:
            ValueError: the engine has no tokenizer.
        """
        if request.sampling.stop and self._detokenizer is None:
            raise ValueError(
                f"stop is {request.sampling.stop!r}, and the engine has no tokenizer: Engine(tokenizer=...)."
            )

    def take(self, drawn: Sequence[SampledToken], ends: Ends) -> Ends:
        """Takes tokens and the `ends` by grammars, and returns the ends by stop strings."""
        found: Ends = {}
        ended = set[Choice]()  # choices, by these tokens
        for one in drawn:
            choice, end = one.place[:2], ends.get(one.place)
            if choice in ended:
                continue
            if stopped := self._take_token(one, end):
                found[one.place] = "stop"
            if stopped or end:
                ended.add(choice)
        return found

    def of(self, output: Output) -> str:
        """Returns the text that comes with an output."""
        key = output.name, output.choice
        one = self._texts.get(key)
        if one is None:
            return ""
        text = one.due.pop(output.position, "") if output.token is not None else ""
        if output.finish_reason is None:
            return text
        del self._texts[key]
        return text if output.token is not None else one.rest()

    def _take_token(self, drawn: SampledToken, end: str | None) -> bool:
        assert self._detokenizer is not None
        if end == "error":
            return False  # the token is dropped
        how, (name, choice, at) = drawn.request.sampling, drawn.place
        one = self._texts.get((name, choice))
        if one is None:
            spell = None if how.skip_special_tokens else self._make_spelling
            growing = (self._detokenizer if spell is None else spell()).start(drawn.request.spelled)
            one = self._texts[name, choice] = _ChoiceText(
                growing, StopStringMatcher(how.stop, include=how.include_stop)
            )
        ends = at + 1 - len(drawn.request.prompt) > how.min_tokens
        hidden = drawn.token in how.stop_tokens and not how.include_stop
        text, found = one.cut.add("" if hidden else one.growing.add(drawn.token), ends=ends)
        if not found and (end or drawn.last):
            more, found = one.cut.add(one.growing.end(), ends=ends)
            text += more if found else more + one.cut.end()
        one.due[at] = text
        return found


@functools.lru_cache(maxsize=1024)
def _compute_borders(stop: str) -> tuple[int, ...]:
    """Returns, for each beginning of a string, the length of the longest shorter beginning at its end."""
    borders, k = [0], 0
    for character in stop[1:]:
        while k and stop[k] != character:
            k = borders[k - 1]
        k += stop[k] == character
        borders.append(k)
    return tuple(borders)
