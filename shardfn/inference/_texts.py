"""The texts of all choices in progress, and the stop strings that end them.

A text is a function of its tokens. The schedule knows no text: a stop string that a token completes is an event of the
step that takes the token, so that token numbers, log probabilities and blocks end there, on all ranks.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ._detokenize import Detokenizer, Growing
from ._events import Stop
from ._requests import Sampling
from ._schedule import Output
from ._state import Sequence as Choice
from ._state import State
from ._stops import Cut


@dataclass(slots=True)
class _Text:
    """The text of one choice: certain up to a stop string that may have begun."""

    growing: Growing
    cut: Cut
    due: dict[int, str] = field(default_factory=dict)  # by the position of the token that it comes with

    def rest(self) -> str:
        """The text that was held back; at the end of a choice."""
        text, found = self.cut.add(self.growing.end())
        return text if found else text + self.cut.end()


class Texts:
    """Follows the tokens of an engine's choices.

    Args:
        detokenizer: None gives every token an empty text.
    """

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._texts: dict[tuple[str, int], _Text] = {}

    def stops(self, state: State, drawn: Sequence[int], cancelled: Collection[str], number: int) -> list[Stop]:
        """Takes the tokens that the plan in flight has drawn; the events by which stop strings end their choices."""
        if self._detokenizer is None:
            return []
        found = []
        for choice, place, token in new_tokens(state, drawn, cancelled):
            if self._take(choice, place, token):
                found.append(Stop(number + len(found), choice.name, choice.choice, place))
        return found

    def of(self, output: Output) -> str:
        """The text that comes with an output."""
        key = output.name, output.choice
        one = self._texts.get(key)
        if one is None:
            return ""
        text = one.due.pop(output.position, "") if output.token is not None else ""
        if output.finish is None:
            return text
        del self._texts[key]
        return text if output.token is not None else one.rest()

    def _take(self, choice: Choice, place: int, token: int) -> bool:
        assert self._detokenizer is not None
        how, key = choice.request.sampling, (choice.name, choice.choice)
        one = self._texts.get(key)
        if one is None:
            growing = self._detokenizer.start(choice.request.prompt)
            one = self._texts[key] = _Text(growing, Cut(how.stop, include=how.include_stop))
        hidden = token in how.stop_tokens and not how.include_stop
        text, found = one.cut.add("" if hidden else one.growing.add(token))
        if not found and is_last(choice, place, token, how):
            more, found = one.cut.add(one.growing.end())
            text += more if found else more + one.cut.end()
        one.due[place] = text
        return found


def new_tokens(state: State, drawn: Sequence[int], cancelled: Collection[str]) -> Iterator[tuple[Choice, int, int]]:
    """The tokens that the plan in flight has drawn: their choices, positions and ids; not those that are dropped."""
    at = 0
    for chunk in state.flight:
        choice = state.sequences[chunk.serial]
        for row, p in enumerate(chunk.positions, at):
            if p + 1 >= len(choice.tokens) and drawn[row] >= 0 and choice.name not in cancelled:
                yield choice, p + 1, drawn[row]
        at += len(chunk.positions)


def is_last(choice: Choice, place: int, token: int, how: Sampling) -> bool:
    """Whether a token ends its choice, for another reason than its text."""
    return token in how.stop_tokens or place + 1 - choice.prompt == how.max_tokens
