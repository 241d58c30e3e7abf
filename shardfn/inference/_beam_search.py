"""Beam search over requests of one token: the beams of a prompt share the blocks of their common prefix in the cache.

Candidates, scores and the end of a search are those of transformers' `generate(num_beams=)`.

References:
    transformers, `GenerationMixin._beam_search`, https://github.com/huggingface/transformers
    Wu et al., Google's neural machine translation system, section 7, 2016, https://arxiv.org/abs/1609.08144
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ._detokenize import Detokenizer
from ._limits import Limits
from ._requests import MOST_TOP, Request, Sampling, check_request

_MOST_PENALTY = 10
Top = Sequence[tuple[int, float]]  # most probable tokens, and their log probabilities


class Beam(NamedTuple):
    """A continuation that a search has found.

    Attributes:
        tokens: tokens after the prompt, with the stop token.
        score: log probability divided by the number of tokens to the power of `length_penalty`.
        logprob: sum of the log probabilities of the tokens.
        finish_reason: "stop" after a stop token, or "length".
        text: text of the tokens, empty in an engine without a tokenizer.
    """

    tokens: tuple[int, ...]
    score: float
    logprob: float
    finish_reason: Literal["stop", "length"]
    text: str = ""


def spell_beam(beam: Beam, detokenizer: Detokenizer | None, prompt: Sequence[int]) -> Beam:
    """Returns a beam with its text, up to a stop token.

    Args:
        beam: beam.
        detokenizer: detokenizer, or None for an empty text.
        prompt: tokens before the beam.
    """
    if detokenizer is None:
        return beam
    stream, shown = detokenizer.start(prompt), beam.tokens[: -1 if beam.finish_reason == "stop" else None]
    return beam._replace(text="".join([*map(stream.add, shown), stream.end()]))


@dataclass(frozen=True)
class BeamSearch:
    """Rule of a beam search, with the names of transformers.

    Args:
        num_beams: number of beams, which is also the number of continuations of each prompt.
        max_tokens: most tokens of a continuation.
        length_penalty: power of the number of tokens by which scores are divided. Above 0 it favours long texts.
        early_stopping: whether a search ends as soon as it has `num_beams` continuations. False also ends it where the
            best beam is not likely to improve on them, and "never" only where it cannot.
        stop_tokens: tokens that end a continuation.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> BeamSearch(num_beams=3, stop_tokens=(2,)).num_candidates
        6
    """

    num_beams: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}.")
        if not abs(self.length_penalty) <= _MOST_PENALTY:
            raise ValueError(
                f"length_penalty must be from {-_MOST_PENALTY} to {_MOST_PENALTY}, got {self.length_penalty}."
            )
        if self.num_candidates > MOST_TOP:
            raise ValueError(
                f"num_beams must be at most {MOST_TOP // self._factor} for {len(self.stop_tokens)} stop tokens, since a"
                f" step has {MOST_TOP} candidates, got {self.num_beams}. Search fewer beams."
            )

    @property
    def _factor(self) -> int:
        return max(2, 1 + len(self.stop_tokens))

    @property
    def num_candidates(self) -> int:
        """Returns the number of candidates of a step, enough for `num_beams` that continue if all others end."""
        return self._factor * self.num_beams

    def make_sampling(self) -> Sampling:
        """Returns the sampling of the request of each beam."""
        return Sampling(max_tokens=1, temperature=0.0, top_logprobs=self.num_candidates)

    def check(self, prompt: Sequence[int], limits: Limits, source: Sequence[int] = ()) -> None:
        """Refuses a prompt whose longest continuation does not fit.

        Args:
            prompt: tokens of the decoder before the continuation.
            limits: limits of the engine.
            source: tokens that the encoder of an encoder-decoder model reads.

        Raises:
            ValueError: names the field.
        """
        check_request(Request(tuple(prompt), Sampling(max_tokens=self.max_tokens), source=tuple(source)), limits)


class _Candidate(NamedTuple):
    logprob: float
    tokens: tuple[int, ...]


class PromptSearch:
    """Search of a single prompt, a pure function of the most probable tokens of its beams.

    Args:
        rule: rule of the search.

    Attributes:
        running: tokens after the prompt of each beam that continues, the most probable first. Empty after the end.

    Example:
        >>> search = PromptSearch(BeamSearch(num_beams=2, max_tokens=2, stop_tokens=(9,)))
        >>> search.take([[(5, -0.1), (9, -3.0), (6, -4.0)]])
        >>> search.running
        [(5,), (6,)]
        >>> search.take([[(7, -0.2), (9, -2.0)], [(7, -0.1), (8, -5.0)]])
        >>> search.running, [beam.tokens for beam in search.beams]
        ([], [(5, 7), (5, 9)])
    """

    def __init__(self, rule: BeamSearch) -> None:
        self._rule = rule
        self._beams = [_Candidate(0.0, ())]
        self._found: list[Beam] = []

    @property
    def running(self) -> list[tuple[int, ...]]:
        """Returns the tokens of each beam that continues."""
        return [beam.tokens for beam in self._beams]

    @property
    def beams(self) -> list[Beam]:
        """Returns the continuations, the best first."""
        return list(self._found)

    def take(self, tops: Sequence[Top]) -> None:
        """Takes the most probable next tokens of each of `running`."""
        rule, length = self._rule, len(self._beams[0].tokens) + 1
        made = [
            _Candidate(beam.logprob + logprob, (*beam.tokens, token))
            for beam, top in zip(self._beams, tops, strict=True)
            for token, logprob in top
        ]
        made = sorted(made, key=lambda one: -one.logprob)[: rule.num_candidates]
        is_last = length == rule.max_tokens
        for one in made[: rule.num_beams]:  # a worse candidate that ends is dropped
            if (stops := one.tokens[-1] in rule.stop_tokens) or is_last:
                score = one.logprob / length**rule.length_penalty
                self._found.append(Beam(one.tokens, score, one.logprob, "stop" if stops else "length"))
        self._found = sorted(self._found, key=lambda beam: -beam.score)[: rule.num_beams]
        going = [one for one in made if one.tokens[-1] not in rule.stop_tokens][: rule.num_beams]
        self._beams = [] if is_last or self._is_over(going, length) else going

    def _is_over(self, going: Sequence[_Candidate], length: int) -> bool:
        """Returns whether no beam is expected to find a better continuation."""
        rule = self._rule
        if not going:
            return True
        if len(self._found) < rule.num_beams:
            return False
        if rule.early_stopping is True:
            return True
        longest = rule.max_tokens if rule.early_stopping == "never" and rule.length_penalty > 0 else length
        return going[0].logprob / longest**rule.length_penalty <= self._found[-1].score
