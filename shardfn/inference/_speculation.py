"""Number of a sequence's next drafts. It follows from the drafts that were accepted before."""

from typing import NamedTuple

_FIRST, _LONGEST_PAUSE = 4, 5


class DraftLength(NamedTuple):
    """Number of a sequence's next drafts, by the drafts that were accepted before.

    Attributes:
        width: most drafts of the next step. The width doubles when all drafts that could be accepted are, for example
            from 4 to 8. Otherwise it becomes the number of accepted drafts plus one, and in proportion for drafts that
            branch.
        strikes: number of last steps with only rejected drafts.
        resume: number of tokens from which the sequence has drafts again. Each strike doubles the pause.

    Example:
        >>> DraftLength().after(4, 4, num_tokens=20)
        DraftLength(width=8, strikes=0, resume=0)
        >>> DraftLength().after(4, 0, num_tokens=20).after(1, 0, num_tokens=22)
        DraftLength(width=1, strikes=2, resume=26)
        >>> DraftLength().after(12, 2, num_tokens=20, height=4)
        DraftLength(width=9, strikes=0, resume=0)
    """

    width: int = _FIRST
    strikes: int = 0
    resume: int = 0

    def after(self, drafted: int, accepted: int, *, num_tokens: int, height: int = 0) -> "DraftLength":
        """Returns the number after a step.

        Args:
            drafted: number of drafts.
            accepted: number of accepted drafts.
            num_tokens: number of tokens that the sequence has then.
            height: most drafts of a tree that could be accepted. 0 is all.
        """
        if accepted:
            height = height or drafted
            part = -(-drafted * (accepted + 1) // height)
            return DraftLength(max(self.width, 2 * drafted) if accepted == height else part, 0, 0)
        strikes = min(self.strikes + 1, _LONGEST_PAUSE)
        return DraftLength(1, strikes, num_tokens + (1 << strikes))
