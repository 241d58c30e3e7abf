"""Texts of all choices in progress, and the stop strings that end texts.

A text is a function of tokens. The schedule knows no text. A token that completes a stop string makes an event of the
step that takes the token, so that token numbers, log probabilities and blocks end there, on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._detokenize import DecodeStream, Detokenizer
from ._hooks import EngineHooks
from ._requests import Request
from ._sampled_tokens import Choice, Ends, SampledToken
from ._schedule import Output
from ._stops import StopStringMatcher


@dataclass(slots=True)
class _Text:
    """Text of one choice: certain up to a stop string that may have begun."""

    growing: DecodeStream
    cut: StopStringMatcher
    due: dict[int, str] = field(default_factory=dict)  # by the position of the text's token

    def rest(self) -> str:
        """Returns the text that was held back; at the end of a choice."""
        text, found = self.cut.add(self.growing.end())
        return text if found else text + self.cut.end()


class Texts:
    """EngineHooks of the tokens of an engine's choices.

    Args:
        detokenizer: detokenizer. None gives every token an empty text.
    """

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._texts: dict[Choice, _Text] = {}

    @property
    def hooks(self) -> EngineHooks:
        """Returns the hooks."""
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
        if self._detokenizer is None:
            return {}
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
            growing = self._detokenizer.start(drawn.request.prompt)
            one = self._texts[name, choice] = _Text(growing, StopStringMatcher(how.stop, include=how.include_stop))
        ends = at + 1 - len(drawn.request.prompt) > how.min_tokens
        hidden = drawn.token in how.stop_tokens and not how.include_stop
        text, found = one.cut.add("" if hidden else one.growing.add(drawn.token), ends=ends)
        if not found and (end or drawn.last):
            more, found = one.cut.add(one.growing.end(), ends=ends)
            text += more if found else more + one.cut.end()
        one.due[at] = text
        return found
