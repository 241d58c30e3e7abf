"""Stop strings in a text that comes in pieces: the result does not depend on the cuts between pieces.

The text ends with the first complete stop string. Of several stop strings that end at one character, the longest is cut
off. Text that may begin a stop string is held back, for example "EN" where "END" is a stop string.

References:
    Knuth, Morris, Pratt: Fast Pattern Matching in Strings, 1977, https://doi.org/10.1137/0206024
"""

import functools
from collections.abc import Sequence


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
