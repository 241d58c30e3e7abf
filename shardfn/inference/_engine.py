"""The engine: requests in, tokens out, over one pure step and one schedule.

The law, for an exact decoder: however requests are batched, chunked, cached, shared, preempted or sharded, the logits
of each token are bit for bit those of one forward of its sequence alone.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardfn.core import Mesh, PyTree

from ._agree import compare
from ._decoder import Decoder
from ._events import Add, Cancel, Clock, Event, Weights
from ._limits import Limits
from ._requests import Request, Sampling, check_request
from ._runner import MemoryPlan, Runner, limits_of
from ._schedule import Output, advance
from ._state import State, start


class Token(NamedTuple):
    """A token of a request, or its end, or both.

    Attributes:
        name: of the request.
        choice: of the request.
        position: of the token in its sequence; below the prompt's length if it is a scored one.
        token: its id; None for an end without a token.
        logprob: under the softmax of the raw logits; None without a token.
        version: of the weights that computed it.
        finish: "stop", "length", "cancelled", "deadline", "error" or "refused" with the last token of a choice.
    """

    name: str
    choice: int
    position: int
    token: int | None
    logprob: float | None
    version: int
    finish: str | None


class Completion(NamedTuple):
    """One choice of a request.

    Attributes:
        tokens: drawn after the prompt.
        logprobs: of these tokens, under the softmax of the raw logits.
        finish: "stop", "length", "cancelled", "deadline", "error" or "refused".
        versions: of the weights that computed each token.
        prompt_logprobs: of the prompt's tokens but the first; empty unless the request wants them.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str | None
    versions: list[int]
    prompt_logprobs: list[float]


class Engine:
    """Generates tokens for many requests at once. All ranks of the mesh make the same calls.

    Args:
        decoder: the model.
        params: its parameters: whole tensors, equal on all ranks; or `GlobalTensor`s of any layout on the mesh.
        mesh: from `make_mesh`; None is one device.
        limits: the sizes; default `limits_of(decoder)`.
        runner: the graphs of an engine of the same decoder and mesh, to be shared; its limits may have more blocks.

    Raises:
        ValueError: the limits do not fit the model, or the mesh does not divide its heads; or the parameters are not
            those of the model.

    Example:
        >>> from shardfn import core
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
        >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
        >>> [completion] = engine.generate([[5, 6, 7]], Sampling(max_tokens=4, temperature=0.0))
        >>> len(completion.tokens), completion.finish
        (4, 'length')
    """

    def __init__(
        self,
        decoder: Decoder,
        params: PyTree,
        *,
        mesh: Mesh | None = None,
        limits: Limits | None = None,
        runner: Runner | None = None,
    ) -> None:
        self.limits = limits_of(decoder) if limits is None else limits
        self.runner = Runner(decoder, self.limits, mesh=mesh) if runner is None else runner
        self.runner.check_limits(self.limits)
        self.mesh = self.runner.mesh
        self._weights: dict[int, PyTree] = {0: self.runner.packed(params)}
        self._cache = self.runner.empty_cache()
        self._state: State = start(self.limits)
        self._events: list[Event] = []
        self._adding: dict[str, None] = {}  # names, in order
        self._drawn: list[int] = []
        self._logprobs: list[float] = []
        self._names = itertools.count()
        self._newest = self._rows = self._run_rows = 0
        self._failed: BaseException | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self._state.idle and not self._events

    @property
    def weights(self) -> PyTree:
        """The newest weights, in their served form."""
        return self._weights[self._newest]

    @property
    def names(self) -> list[str]:
        """The requests in progress, in order of arrival."""
        return [*self._state.names, *self._adding]

    @property
    def padding(self) -> float:
        """The part of all rows so far that was padding."""
        return 1 - self._rows / self._run_rows if self._run_rows else 0.0

    def counts(self) -> dict[str, int]:
        """Numbers of running and waiting requests, and of free, held and cached blocks."""
        return self._state.counts()

    def memory(self) -> MemoryPlan:
        """The bytes that this rank needs, as planned from the graph of the largest bucket."""
        return self.runner.memory(self.weights, self._cache)

    def warm_up(self) -> None:
        """Captures the graphs of all buckets, so that no later step does."""
        for bucket in self.limits.buckets:
            self.runner.bind(bucket, self.weights, self._cache)

    def add(
        self, prompt: Sequence[int], sampling: Sampling | None = None, *, name: str | None = None, **more: Any
    ) -> str:
        """Puts a request in line.

        Args:
            prompt: token ids.
            sampling: how its tokens are drawn; default `Sampling()`.
            name: of the request; default one of the engine's.
            **more: fields of `Request`, such as `priority`.

        Returns:
            The name.

        Raises:
            ValueError: a value is out of range, the request can never fit, or another of this name is in progress.
        """
        request = Request(tuple(prompt), sampling or Sampling(), **more)
        check_request(request, self.limits)
        if name is None:
            name = f"request-{next(self._names)}"
        if name in self._state.names or name in self._adding:
            raise ValueError(f"a request named {name!r} is in progress; give the new one another name.")
        self._events.append(Add(self._next, name, request))
        self._adding[name] = None
        return name

    def cancel(self, name: str) -> None:
        """Ends a request as "cancelled"; the name of one that has ended is passed over."""
        self._events.append(Cancel(self._next, name))

    def tick(self, time: int) -> None:
        """Gives the clock's reading, in milliseconds, against which deadlines are held; equal on all ranks."""
        self._events.append(Clock(self._next, time))

    def update_weights(self, params: PyTree, *, recompute: bool = True) -> int:
        """Changes the weights. No block of the cache that older ones computed is used again.

        Args:
            params: as those of the engine, of the same layout.
            recompute: True lets requests in progress go on at once under the new weights, with their cache computed
                anew; their tokens remain. False ends those that have begun under the old weights first.

        Returns:
            The version of the new weights; each token names the version that computed it.

        Raises:
            ValueError: the parameters are of another model; lists the leaves.
        """
        packed = self.runner.packed(params, like=self.weights)
        self._newest += 1
        self._weights[self._newest] = packed
        self._events.append(Weights(self._next, self._newest, recompute))
        return self._newest

    def step(self) -> list[Token]:
        """Takes what has happened since the last step, and runs the next one; returns the tokens of the last one.

        Raises:
            RankError: ranks hold different states; names the first field that differs.
            RuntimeError: an earlier step failed. The cache is lost then: make another engine.
        """
        if self._failed is not None:
            raise RuntimeError("a step of this engine failed before; make another engine.") from self._failed
        try:
            return self._advance()
        except BaseException as error:
            self._failed = error
            raise

    def _advance(self) -> list[Token]:
        events, self._events, self._adding = self._events, [], {}
        self._state, plan, outputs = advance(self._state, events, self._drawn)
        found = [self._token(output) for output in outputs]
        self._drawn, self._logprobs = [], []
        for version in [v for v in self._weights if v < self._state.version]:
            del self._weights[version]
        compare(self._state, self.mesh)
        if plan is not None:
            self._rows, self._run_rows = self._rows + plan.num_tokens, self._run_rows + plan.bucket
            weights = self._weights[plan.version]
            self._drawn, self._logprobs, self._cache = self.runner.run(weights, self._cache, plan)
        return found

    def stream(self, prompt: Sequence[int], sampling: Sampling | None = None, **more: Any) -> Iterator[Token]:
        """Adds a request and yields its tokens; the engine steps meanwhile, for all requests.

        Tokens of other requests are dropped: drive `step` by hand to serve several streams. Closing the iterator
        cancels the request.
        """
        name = self.add(prompt, sampling, **more)
        left = (sampling or Sampling()).n
        try:
            while left:
                for token in self.step():
                    if token.name == name:
                        left -= token.finish is not None
                        yield token
        finally:
            if left:
                self.cancel(name)

    def generate(
        self, prompts: Iterable[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Any]:
        """Completes prompts.

        Args:
            prompts: token ids of each.
            sampling: one for all, or one for each.

        Returns:
            For each prompt a `Completion`; for requests of n > 1 choices a list of n.

        Raises:
            ValueError: a request is out of range, or can never fit; none was begun then.
        """
        prompts = [tuple(prompt) for prompt in prompts]
        each = (
            [sampling or Sampling()] * len(prompts)
            if sampling is None or isinstance(sampling, Sampling)
            else list(sampling)
        )
        if len(each) != len(prompts):
            raise ValueError(
                f"generate: {len(prompts)} prompts and {len(each)} samplings; give one for all, or one each."
            )
        for prompt, how in zip(prompts, each, strict=True):
            check_request(Request(prompt, how), self.limits)
        names = [self.add(prompt, how) for prompt, how in zip(prompts, each, strict=True)]
        made = {
            name: [Completion([], [], None, [], []) for _ in range(how.n)]
            for name, how in zip(names, each, strict=True)
        }
        lengths = dict(zip(names, map(len, prompts), strict=True))
        left = sum(how.n for how in each)
        while left:
            for token in self.step():
                if token.name in made:
                    left -= _append(made[token.name], token, lengths[token.name])
        return [made[name][0] if how.n == 1 else made[name] for name, how in zip(names, each, strict=True)]

    @property
    def _next(self) -> int:
        return self._state.number + len(self._events)

    def _token(self, out: Output) -> Token:
        logprob = None if out.row is None else self._logprobs[out.row]
        return Token(out.name, out.choice, out.position, out.token, logprob, out.version, out.finish)


def _append(made: list[Completion], token: Token, prompt: int) -> bool:
    """Adds a token to its choice; returns whether the choice ends."""
    one = made[token.choice]
    if token.token is not None and token.logprob is not None:
        if token.position < prompt:
            one.prompt_logprobs.append(token.logprob)
        else:
            one.tokens.append(token.token)
            one.logprobs.append(token.logprob)
            one.versions.append(token.version)
    if token.finish is not None:
        made[token.choice] = one._replace(finish=token.finish)
    return token.finish is not None
