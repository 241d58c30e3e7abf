"""The engine: requests in, tokens out, over one pure step and one schedule.

The law, for a batch-invariant decoder: however requests are batched, chunked, cached, shared, preempted or sharded, the
logits of each token equal, bit for bit, the logits of one forward of the single sequence.
"""

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from shardfn.core import Axes, Disk, MemoryKind, Mesh, PyTree, explains_keywords

from ._adapters import Adapters, Given, split_adapters
from ._admission import (
    check_features,
    check_name,
    choose_limits,
    make_request,
    split_images,
    split_sampling,
    split_source,
)
from ._beam_search import Beam, BeamSearch, PromptSearch, spell_beam
from ._checks import MEANT
from ._constraints import Constraints
from ._decision_log import DecisionLog
from ._decoder import Decoder
from ._detokenize import detokenizer
from ._drafters import Drafter
from ._embed import Embeddings, check_end, check_pooling
from ._engine_core import Admitted, EngineCore
from ._expert_recorder import ExpertRecorder
from ._hooks import EngineHooks
from ._images import ImageInputs
from ._lanes import LaneCore
from ._limits import Limits
from ._processors import LogitsProcessors
from ._requests import Sampling, ids_of
from ._results import Completion, EngineStats, MemoryPlan, Token, append_token
from ._runner import Runner, make_runner
from ._score import Score, make_score_sampling, read_choices, sum_tokens
from ._state import start
from ._texts import Texts
from ._token_queues import TokenQueues
from ._warm_up import GraphCaptures


class Engine:
    """Generator of tokens for many requests at once (continuous batching). All ranks of the mesh make the same calls.

    Args:
        decoder: model.
        params: parameters: whole tensors, equal on all ranks, or `GlobalTensor`s of any layout on the mesh.
        mesh: mesh from `make_mesh`. None is a single device.
        limits: sizes. Default: `limits_of(decoder)`.
        runner: graphs of an engine of the same decoder and mesh, to be shared. The runner's limits may have more
            blocks.
        tokenizer: tokenizer, as `detokenizer` takes it, equal on all ranks. With a tokenizer, tokens have their text,
            and requests may have stop strings and grammars.
        drafter: drafter for speculative decoding, equal on all ranks: several tokens a step, and the same tokens as
            without a drafter. The engine takes a copy.
        adapters: adapters by name, `(lora, values)` as of `adapters.add`.
        weights: memory of weights between their uses, "device", "host" or "disk". A step reads the weights of a layer
            while the layer before computes, so that a model may be larger than the device's memory. Bits are the same.
        weights_axis: mesh axis along which weights are cut between their uses, see `Runner`.
        disk: directory for "disk", used by no other engine. Each rank makes a subdirectory.
        cache: memory of the KV cache, "device" or "host". A step brings the blocks of its sequences in a layer while
            the layer before computes, so that the cache may be larger than the device's memory. Bits are the same.
        logits_processors: functions by the names that requests give, `f(output, logits) -> logits` or
            `f(prompt, output, logits) -> logits`: of the drawn tokens, lists of ids, and of the raw logits of the next
            token, [V]. They are pure, and equal on all ranks.
        record_experts: whether to record the experts that each token has chosen, for `Completion.expert_ids`.
        eager_steps: number of first steps of each graph that run op by op, as of a `Runner`. For a program that answers
            a single request.
        decisions: log of the engine's decisions, on the first rank.

    Attributes:
        limits: sizes.
        runner: graphs.
        mesh: mesh.
        dtype: dtype of log probabilities: float64 where parameters and cache are float64, else float32.
        detokenizer: detokenizer of the tokenizer, or None.
        expert_shape: layers whose experts are recorded, and a token's choices in each, or zeros.
        adapters: adapters, with `add(name, given)`, `remove(name)` and `names`.
        core: schedule, weights and cache, with `tick(milliseconds)` for deadlines, `drain()`, `requests` in progress,
            by name, and `running`, the names of requests that hold blocks.
        embeddings: embeddings of requests in progress.
        logits_processors: processors, with their `names`.
        graphs: captures of graphs. `graphs.capture_next()` captures a graph that `warm_up(later=True)` has left.

    Raises:
        TypeError: `tokenizer` is an object of another kind, or a logits processor is not such a function.
        ValueError: the limits do not fit the model, or the mesh does not divide its heads, or the parameters or an
            adapter do not fit the model, or there is a drafter and `limits.drafts` is 0, or the drafter has another
            vocabulary, or `record_experts` of a decoder without experts, or weights or cache cannot be there.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
        >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
        >>> [completion] = engine.generate([[5, 6, 7]], Sampling(max_tokens=4, temperature=0.0))
        >>> len(completion.tokens), completion.finish_reason
        (4, 'length')
    """

    @explains_keywords(**MEANT)
    def __init__(
        self,
        decoder: Decoder,
        params: PyTree,
        *,
        mesh: Mesh | None = None,
        limits: Limits | None = None,
        runner: Runner | None = None,
        tokenizer: Any = None,
        drafter: Drafter | None = None,
        adapters: Mapping[str, Given] = MappingProxyType({}),
        logits_processors: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
        weights: MemoryKind = "device",
        weights_axis: Axes = None,
        disk: Disk | None = None,
        cache: MemoryKind = "device",
        record_experts: bool = False,
        eager_steps: int = 0,
        decisions: DecisionLog | None = None,
    ) -> None:
        self.limits = limits = choose_limits(decoder, limits, drafter)
        self._sources = decoder.sources
        self._takes_features = decoder.sources is not None and decoder.sources.features is not None
        recorders = [ExpertRecorder(limits, decoder)] if record_experts else []
        self._images = ImageInputs(limits, decoder)
        self.expert_shape = decoder.expert_shape if record_experts else (0, 0)
        self.dtype = torch.float64 if limits.cache_dtype == "float64" else torch.float32
        kept: Any = {"weights": weights, "weights_axis": weights_axis, "disk": disk, "cache": cache}
        self.runner = make_runner(runner, decoder, limits, mesh, **kept, eager_steps=eager_steps)
        self._owned = runner is None
        self.mesh = self.runner.mesh
        self.detokenizer = None if tokenizer is None else detokenizer(tokenizer)
        self.adapters = Adapters(decoder, self.mesh.device, self.dtype, lambda: self.core.requests)
        self.logits_processors = LogitsProcessors(logits_processors)
        self.embeddings, self._constraints = Embeddings(decoder.embeds), Constraints(self.detokenizer, limits.vocab)
        self._texts = Texts(self.detokenizer, lambda: detokenizer(tokenizer, special=True))
        extras = self._constraints, self._texts, self.embeddings, self.adapters, self.logits_processors
        hooks = [x.hooks for x in (*extras, self._images, *recorders)]
        hooks.append(EngineHooks(admit=functools.partial(check_features, decoder.sources)))
        digest = self.detokenizer.digest if self.detokenizer else b""
        state, *states = [start(limits, digest, drafter) for _ in range(self.runner.num_lanes)]
        how: Any = {"hooks": hooks, "permit": self._constraints.cut, "decisions": decisions}
        cores: Any = (
            LaneCore(self.runner, params, [state, *states], **how)
            if states
            else EngineCore(self.runner, params, state, **how)
        )
        self.core: EngineCore = cores  # a LaneCore has the same interface
        self._queues = TokenQueues(self.core.step, self.cancel, self.core.__contains__)
        ops = ["row_linear", "ragged_attention", "draw", "row_norm", "pointwise"]  # slow builds first
        ops += ["grouped_product", "gather_rows"] if any(decoder.expert_shape) else []
        self.graphs = GraphCaptures(self.core, self.runner, state.drafter, ops, record_experts)
        self._names = itertools.count()
        for name, given in adapters.items():
            self.adapters.add(name, given)

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return self.core.idle and self._queues.empty

    @property
    def stats(self) -> EngineStats:
        """Returns counts of sequences and blocks, of padding, of drafts, and of the cache's use."""
        return self.core.stats

    @property
    def version(self) -> int:
        """Returns the version of the newest weights: 0, or the result of the last `update_weights`."""
        return self.core.version

    def memory(self) -> MemoryPlan:
        """Returns the bytes for this rank, as planned from the graph of the largest bucket, without penalties.

        Raises:
            RuntimeError: the engine is closed.
        """
        return self.runner.memory(self.core.weights, self.core.cache)

    def warm_up(
        self,
        *,
        penalties: bool = False,
        grammars: bool = False,
        embeddings: bool = False,
        adapters: bool = False,
        later: bool = False,
        capture: bool = True,
    ) -> None:
        """Captures the graphs of all buckets, and builds the C++ of the kernels, so that no later step does.

        Where ranks of a single machine start together, one rank builds a file, and the other ranks wait.

        Args:
            penalties: whether to capture also graphs of steps in which a request has penalties, biases, or wants the
                most probable tokens. Otherwise the first such step is slow.
            grammars: whether to capture also graphs of steps in which a request has a grammar.
            embeddings: whether to capture also graphs of steps that embed, next to requests without penalties and
                grammars.
            adapters: whether to capture also all of these graphs with the present adapters.
            later: whether to capture now only the plain graphs of the smallest and the largest bucket. Each call of
                `graphs.capture_next` then captures a further graph, and a step captures a missing graph.
            capture: whether to capture graphs. False only builds the C++.

        Raises:
            RuntimeError: the engine is closed.
        """
        if grammars:
            self._constraints.prepare()
        self.graphs.warm_up(
            penalties=penalties,
            grammars=grammars,
            hidden=embeddings and self.embeddings.possible,
            adapters=self.adapters.of_padding if adapters else lambda bucket: None,
            later=later,
            capture=capture,
        )

    def add(
        self,
        prompt: Sequence[int] | Tensor,
        sampling: Sampling | None = None,
        *,
        name: str | None = None,
        pooling: str | None = None,
        **more: Any,
    ) -> str:
        """Puts a request in line.

        Args:
            prompt: token ids, or embeddings, float [P, D].
            sampling: rule of drawing tokens. Default: `Sampling()`.
            name: name of the request. Default: a name of the engine's choice.
            pooling: pooling of `embed`, for a request that has an embedding in place of tokens. `embedding` returns the
                embedding once `step` has returned the end.
            **more: `priority`, `deadline` or `salt`, as of a `Request`, or `adapter`, the name of an adapter, or
                `image_features`, float [N, D], a row for each image token of the prompt, for a model with images, and
                `image_grids`, rows and columns of each image, where the model wants them. For an encoder-decoder model
                the prompt is the encoder's, and with `source`, token ids, the decoder's. For a model of features, such
                as Whisper, the encoder's are float [F, M].

        Returns:
            The name.

        Raises:
            TypeError: a prompt is not a sequence of integers, or another argument is of a wrong type.
            ValueError: a value is out of range, the request can never fit, or another request of this name is in
                progress or has an embedding that was not taken, or the grammar is refused.
            ImportError: the request has a grammar, and llguidance is missing.

        Example:
            >>> from shardfn import core
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
            >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
            >>> name = engine.add([5, 6, 7], pooling="last")
            >>> while not engine.idle:
            ...     ended = engine.step()
            >>> engine.embedding(name).shape
            torch.Size([32])
        """
        if pooling is not None and sampling is not None:
            raise ValueError("add: an embedding draws no tokens. Pass sampling or pooling.")
        sampling = sampling if pooling is None else self.embeddings.sampling(pooling)
        return self._begin(self._admit(prompt, sampling, **more), name, pooling)

    def cancel(self, name: str) -> None:
        """Ends a request as "cancelled". The name of an ended request is passed over.

        The next step ends the request, after the token that the last step has drawn. The request may also end by that
        token.
        """
        check_name(name)
        self.core.cancel(name)

    def update_weights(self, params: PyTree, *, recompute: bool = True) -> int:
        """Changes the weights. No block of the cache that older weights computed is used again.

        Args:
            params: parameters of the layout of the engine's.
            recompute: whether requests in progress continue at once under the new weights, with their KV cache
                recomputed and their tokens kept. False ends requests that have begun under the old weights first.

        Returns:
            The version of the new weights. Each token names the version that computed it.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: the parameters are of another model. The message lists the leaves.
        """
        return self.core.update_weights(params, recompute=recompute)

    def step(self) -> list[Token]:
        """Takes what has happened since the last step, runs the next step, and returns the tokens of the last step.

        Tokens of requests of `stream` and `generate` are returned only by those calls. All other tokens are returned
        only here, also the last tokens of a stream that was closed.

        Raises:
            RankError: ranks hold different states. The message names the first field that differs.
            RuntimeError: the engine is closed, or an earlier step failed. The cache is lost then: make another engine.
        """
        self._queues.advance()
        return self._queues.take_others()

    def stream(
        self, prompt: Sequence[int] | Tensor, sampling: Sampling | None = None, **more: Any
    ) -> Generator[Token, None, None]:
        """Adds a request and yields its tokens. The engine steps for all requests in between.

        Several streams may be read in turns. Closing the iterator cancels the request: on all ranks, as every call. The
        next `step` returns the tokens that were not read.

        Raises:
            ValueError: as `add`.
        """
        name = self._queues.await_request(self.add(prompt, sampling, **more))
        return self._queues.stream(name, (sampling or Sampling()).n)

    def generate(
        self,
        prompts: Iterable[Sequence[int] | Tensor],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        image_features: Sequence[Tensor | None] | None = None,
        image_grids: Sequence[Sequence[tuple[int, int]] | None] | None = None,
        sources: Sequence[Sequence[int] | Tensor] | None = None,
    ) -> list[Any]:
        """Completes prompts. Requests in progress continue in the same steps.

        Args:
            prompts: token ids of each prompt, or its embeddings, float [P, D], as the model's table has them.
            sampling: one `Sampling` for all prompts, or a sequence with a `Sampling` for each.
            adapter: name of one adapter for all prompts, or a sequence with a name for each, where None is the model
                without an adapter.
            image_features: for each prompt the features of its image tokens, as of `add`, or None.
            image_grids: for each prompt the rows and columns of its images, as of `add`, or None.
            sources: for each prompt its `source`, as of `add`, for prompts of a decoder with an encoder.

        Returns:
            For each prompt a `Completion`, or for a request of n > 1 choices a list of n.

        Raises:
            TypeError: as `add`.
            ValueError: a request is out of range, or can never fit. No request was begun then.
        """
        prompts = list(prompts)
        hows, adapters = split_sampling(sampling, len(prompts)), split_adapters(adapter, len(prompts))
        pictures = split_images(len(prompts), image_features=image_features, image_grids=image_grids, source=sources)
        each = zip(prompts, hows, adapters, pictures, strict=True)
        requests = [self._admit(prompt, how, adapter=x, **own) for prompt, how, x, own in each]
        return [found[0] if len(found) == 1 else found for found in self._complete(requests)]

    def beam_search(
        self, prompts: Iterable[Sequence[int]], rule: BeamSearch | None = None, *, adapter: str | None = None
    ) -> list[list[Beam]]:
        """Returns the best continuations of prompts by a search in beams, as transformers' `generate(num_beams=)`.

        Each step is a request of one token for each beam. Its prefix is in the cache, except for the last block.

        Args:
            prompts: token ids of each prompt.
            rule: rule of the search. Default: `BeamSearch()`.
            adapter: name of an adapter, or None.

        Returns:
            For each prompt `num_beams` continuations, the best first.

        Raises:
            TypeError: as `add`.
            ValueError: a value is out of range, or a prompt and `max_tokens` together are longer than the context.
            FloatingPointError: logits are not finite.

        Example:
            >>> from shardfn import core
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
            >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
            >>> [beams] = engine.beam_search([[5, 6, 7]], BeamSearch(num_beams=3, max_tokens=4))
            >>> len(beams), len(beams[0].tokens), beams[0].score >= beams[1].score
            (3, 4, True)
        """
        rule, given = BeamSearch() if rule is None else rule, [ids_of(prompt) for prompt in prompts]
        for prompt in given:
            before, source = (prompt, ()) if self._sources is None else ((self._sources.start,), prompt)
            rule.check(before, self.limits, source)
        searches, how = [PromptSearch(rule) for _ in given], rule.make_sampling()
        while rows := [(i, tokens) for i, one in enumerate(searches) for tokens in one.running]:
            requests = [self._admit_after(given[i], tokens, how, adapter) for i, tokens in rows]
            found = iter(self._complete(requests))
            for search in searches:
                if num := len(search.running):
                    search.take([_read_top(next(found)[0]) for _ in range(num)])
        return [
            [spell_beam(beam, self.detokenizer, x) for beam in y.beams] for x, y in zip(given, searches, strict=True)
        ]

    def _admit_after(
        self, prompt: tuple[int, ...], tokens: tuple[int, ...], how: Sampling, adapter: str | None
    ) -> Admitted:
        """Returns a request whose decoder reads tokens after a prompt."""
        if self._sources is None:
            return self._admit((*prompt, *tokens), how, adapter=adapter)
        return self._admit((self._sources.start, *tokens), how, adapter=adapter, source=prompt)

    def _count_before(self, prompt: Sequence[int]) -> int:
        """Returns the number of tokens before the first token after a prompt, in the decoder's sequence."""
        return len(prompt) if self._sources is None else 1

    def _complete(self, requests: Sequence[Admitted]) -> list[list[Completion]]:
        """Returns the choices of each request."""
        names = [self._queues.await_request(self._begin(request)) for request in requests]
        try:
            return [self._make_completions(name, request) for name, request in zip(names, requests, strict=True)]
        finally:
            self._queues.forget(names)

    def score(
        self,
        prompts: Iterable[Sequence[int]],
        choices: Iterable[Iterable[Sequence[int]]],
        *,
        adapter: str | None = None,
    ) -> list[list[Score]]:
        """Returns the log probabilities of given continuations. No token is drawn.

        The first continuation of each prompt fills the prefix cache for the rest.

        Args:
            prompts: token ids of each prompt.
            choices: for each prompt, the token ids of its continuations.
            adapter: name of an adapter, or None.

        Returns:
            For each prompt, a `Score` of each continuation.

        Raises:
            TypeError: ids are not integers.
            ValueError: a prompt or a continuation is empty, or both together are longer than the context.
            FloatingPointError: logits are not finite.

        Example:
            >>> from shardfn import core
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
            >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
            >>> [[one, other]] = engine.score([[5, 6, 7]], [[[8], [9, 10]]])
            >>> len(one.logprobs), len(other.logprobs), one == engine.score([[5, 6, 7]], [[[8]]])[0][0]
            (1, 2, True)
        """
        given = read_choices(prompts, choices)
        starts = [self._count_before(one.prompt) for one in given]
        admitted = [
            [self._admit_after(one.prompt, x, make_score_sampling(start), adapter) for x in one.choices]
            for one, start in zip(given, starts, strict=True)
        ]
        made = [list[Score]() for _ in given]
        for rows in (slice(0, 1), slice(1, None)):
            names = [[self._queues.await_request(self._begin(x)) for x in several[rows]] for several in admitted]
            try:
                for found, start, several in zip(made, starts, names, strict=True):
                    found += [sum_tokens(self._queues.stream(name, 1), start) for name in several]
            finally:
                self._queues.forget([name for several in names for name in several])
        return made

    def embed(
        self,
        prompts: Iterable[Sequence[int] | Tensor],
        pooling: str = "last",
        *,
        normalize: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Float32[Tensor, "n d"]:
        """Returns embeddings of prompts: the hidden states that the head multiplies, pooled.

        Requests in progress continue in the same steps. The bits of an embedding do not depend on the other prompts, if
        the decoder is batch-invariant. A mean wants a row for each token, so that a step takes at most `Limits.running`
        tokens of a mean.

        Args:
            prompts: token ids of each prompt, fewer than the context, or its embeddings.
            pooling: "last", the state of the last token, or "mean", of all tokens: a sum in the order of positions.
            normalize: whether embeddings have the length 1. Zeros stay zeros.
            adapter: see `generate`.

        Returns:
            Embeddings on the CPU.

        Raises:
            TypeError: as `add`.
            ValueError: as `add`, or pooling is unknown, or the decoder has no hidden states.
            FloatingPointError: hidden states are not finite.

        Example:
            >>> from shardfn import core
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
            >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
            >>> engine.embed([[5, 6, 7], [8]], "mean", normalize=True).shape
            torch.Size([2, 32])
        """
        check_pooling(pooling, normalize)
        prompts = list(prompts)
        if not prompts:
            raise ValueError("embed: 0 prompts. Pass one at least.")
        each, how = split_adapters(adapter, len(prompts)), self.embeddings.sampling(pooling)
        requests = [self._admit(prompt, how, adapter=name) for prompt, name in zip(prompts, each, strict=True)]
        names = [self._queues.await_request(self._begin(request, None, pooling)) for request in requests]
        try:
            return torch.stack([self._take_embedding(i, name, normalize) for i, name in enumerate(names)])
        finally:
            for name in names:
                self.embeddings.forget(name)
            self._queues.forget(names)

    def embedding(self, name: str, *, normalize: bool = False) -> Float32[Tensor, " d"]:
        """Returns, once, the embedding of a request of `add(pooling=)` that has ended as "length".

        Raises:
            ValueError: there is no such request, or the request is in progress, or has ended otherwise.
        """
        check_pooling("last", normalize)
        if name not in self.embeddings or self._is_known(name):
            how = "is in progress" if name in self.embeddings else "has no embedding"
            raise ValueError(f"the request {name!r:.80} {how}. Call add with pooling=, and step until it ends.")
        return self.embeddings.result(name, normalize)

    def close(self) -> None:
        """Ends the engine: drops its weights and cache, and frees the directory on disk unless the runner was given.

        Calls that step or need weights are refused from now on. A given `Runner` has a separate `close`.

        Example:
            >>> from shardfn import core
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
            >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
            >>> engine.close()
            >>> engine.generate([[5, 6, 7]])
            Traceback (most recent call last):
            RuntimeError: this engine is closed. Make another one.
        """
        self.core.close()
        if self._owned:
            self.runner.close()

    def _admit(self, prompt: Sequence[int] | Tensor, sampling: Sampling | None, **more: Any) -> Admitted:
        """Returns a request that passes all checks."""
        encode = None if self.detokenizer is None else self.detokenizer.encode
        if isinstance(prompt, Tensor) and prompt.is_floating_point() and not self._takes_features:
            prompt, images = self._images.embed(prompt)
        else:
            prompt, more = split_source(prompt, self._sources, more)  # type: ignore[arg-type]
            images = self._images.make(prompt, more.pop("image_features", None), more.pop("image_grids", None))
        return self.core.admit(make_request(prompt, sampling, self.limits, self.adapters, encode, more, images))

    def _begin(self, admitted: Admitted, name: str | None = None, pooling: str | None = None) -> str:
        if name is None:
            names = (f"request-{i}" for i in self._names)
            name = next(name for name in names if not self._is_known(name) and name not in self.embeddings)
        check_name(name)
        if name in self._queues:
            raise ValueError(f"a request named {name!r} is in progress. Give the new one another name.")
        if name in self.embeddings:
            raise ValueError(
                f"the embedding of a request named {name!r} was not taken. Call embedding({name!r}) first, or give the"
                " new request another name."
            )
        self.core.begin(name, admitted)
        if pooling is not None:
            self.embeddings.begin([name], pooling)
        return name

    def _is_known(self, name: str) -> bool:
        return name in self.core or name in self._queues

    def _take_embedding(self, number: int, name: str, normalize: bool) -> Tensor:
        last = list(self._queues.stream(name, 1))[-1]
        check_end(number, last.finish_reason)
        return self.embeddings.result(name, normalize)

    def _make_completions(self, name: str, admitted: Admitted) -> list[Completion]:
        request = admitted.request
        made = [Completion([], [], None, [], [], []) for _ in range(request.sampling.n)]
        for token in self._queues.stream(name, len(made)):
            append_token(made, token, len(request.prompt))
        return made


def _read_top(made: Completion) -> tuple[tuple[int, float], ...]:
    """Returns the most probable tokens of a completion of one token."""
    if not made.top_logprobs:
        raise FloatingPointError(
            f"beam_search: a beam must have finite logits, got the end {made.finish_reason!r}. Look at the weights."
        )
    return made.top_logprobs[0]
