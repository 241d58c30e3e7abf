"""The engine: requests in, tokens out, over one pure step and one schedule.

The law, for an exact decoder: however requests are batched, chunked, cached, shared, preempted or sharded, the logits
of each token equal, bit for bit, the logits of one forward of the single sequence.
"""

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from shardfn.core import Disk, MemoryKind, Mesh, PyTree, explains_keywords
from shardfn.kernels import building
from shardfn.waits import waiting

from ._adapters import Adapters, Given, split_adapters
from ._admission import check_name, choose_limits, make_request, split_sampling
from ._cache_stats import CacheStats
from ._compare_states import compare_states
from ._constraints import Constraints
from ._decoder import Decoder
from ._detokenize import detokenizer
from ._drafters import BatchDrafter, Drafter
from ._embed import Embeddings, check_end, check_pooling
from ._events import Add, Cancel, Clock, Drain, Event, Stop, Weights, check_time
from ._expert_recorder import ExpertRecorder
from ._hooks import combine_hooks
from ._limits import Limits
from ._peer_keywords import MEANT
from ._plan import StepPlan
from ._requests import Request, Sampling
from ._results import Completion, Token, append_token
from ._runner import GraphKind, MemoryPlan, Runner, StepResults, list_graph_kinds, make_runner
from ._sampled_tokens import list_new_tokens
from ._schedule import Output, advance
from ._speculation import SpeculationStats
from ._state import State, start
from ._texts import Texts


class Engine:
    """Generator of tokens for many requests at once (continuous batching). All ranks of the mesh make the same calls.

    Args:
        decoder: model.
        params: parameters: whole tensors, equal on all ranks, or `GlobalTensor`s of any layout on the mesh.
        mesh: mesh from `make_mesh`. None is one device.
        limits: sizes. Default: `limits_of(decoder)`.
        runner: graphs of an engine of the same decoder and mesh, to be shared. The runner's limits may have more
            blocks.
        tokenizer: tokenizer, as `detokenizer` takes it, equal on all ranks. With a tokenizer, tokens have their text,
            and requests may have stop strings and grammars.
        drafter: drafter for speculative decoding, equal on all ranks: several tokens a step, and the same tokens as
            without a drafter. The engine takes a copy.
        adapters: adapters by name, `(lora, values)` as of `add_adapter`.
        weights: memory of weights between their uses, "device", "host" or "disk". A step reads the weights of a layer
            while the layer before computes, so that a model may be larger than the device's memory. Bits are the same.
        disk: directory for "disk", used by no other engine. Each rank makes a subdirectory.
        cache: memory of the KV cache, "device" or "host". A step brings the blocks of its sequences in a layer while
            the layer before computes, so that the cache may be larger than the device's memory. Bits are the same.
        record_experts: whether to record the experts that each token has chosen, for `Completion.expert_ids`.

    Raises:
        TypeError: `tokenizer` is an object of another kind.
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
        weights: MemoryKind = "device",
        disk: Disk | None = None,
        cache: MemoryKind = "device",
        record_experts: bool = False,
    ) -> None:
        self.limits = limits = choose_limits(decoder, limits, drafter)
        self._recorder = ExpertRecorder(limits, decoder) if record_experts else None
        self._chooses = any(decoder.expert_shape)
        self.runner = make_runner(runner, decoder, self.limits, mesh, weights, disk, cache)
        self.mesh = self.runner.mesh
        self._weights: dict[int, PyTree] = {0: self.runner.pack_weights(params)}
        self._cache = self.runner.empty_cache()
        self.detokenizer = None if tokenizer is None else detokenizer(tokenizer)
        self._texts, self._constraints = Texts(self.detokenizer), Constraints(self.detokenizer, self.limits.vocab)
        self._state: State = start(self.limits, self.detokenizer.digest if self.detokenizer else b"", drafter)
        self._events: list[Event] = []
        self._adding: dict[str, None] = {}  # names, in order
        self._results: StepResults | None = None  # of the plan in flight
        self._names = itertools.count()
        # Tokens that no call has returned yet: of requests of `stream` and `generate`, and of all other requests.
        self._awaited: dict[str, list[Token]] = {}
        self._others: list[Token] = []
        self._newest = self._rows = self._run_rows = 0
        self._failed: BaseException | None = None
        self._owned, self._closed = runner is None, False
        self._uncaptured = deque[GraphKind]()  # graphs that `warm_up` has left
        self._embeddings = Embeddings(decoder.embeds)
        self._adapters = Adapters(decoder, self.mesh.device)
        extras = self._constraints, self._texts, self._embeddings, self._adapters
        routing = () if self._recorder is None else (self._recorder,)
        self._hooks = combine_hooks([x.hooks for x in (*extras, *routing)])
        for name, given in adapters.items():
            self.add_adapter(name, given)

    @property
    def idle(self) -> bool:
        """Returns whether no request is in progress."""
        return self._state.idle and not self._events and not self._others

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of log probabilities: float64 where parameters and cache are float64, else float32."""
        return torch.float64 if self.limits.cache_dtype == "float64" else torch.float32

    @property
    def weights(self) -> PyTree:
        """Returns the newest weights, in their served form.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._check_open()
        return self._weights[self._newest]

    @property
    def names(self) -> list[str]:
        """Returns the requests in progress, in order of arrival."""
        return [*self._state.names, *self._adding]

    @property
    def running(self) -> list[str]:
        """Returns the requests that hold blocks, first in order first."""
        return list(dict.fromkeys(sequence.name for sequence in self._state.running))

    @property
    def padding(self) -> float:
        """Returns the part of all rows so far that was padding."""
        return 1 - self._rows / self._run_rows if self._run_rows else 0.0

    @property
    def adapters(self) -> list[str]:
        """Returns the names of adapters that requests may have."""
        return self._adapters.names

    @property
    def expert_shape(self) -> tuple[int, int]:
        """Returns the layers whose experts are recorded, and a token's choices in each, or zeros."""
        return (0, 0) if self._recorder is None else self._recorder.shape

    def counts(self) -> dict[str, int]:
        """Returns numbers of running and waiting requests, and of free, held and cached blocks."""
        return self._state.counts()

    @property
    def speculation(self) -> SpeculationStats:
        """Returns counts of steps of a sequence with drafts, of drafts, and of accepted drafts."""
        return self._state.speculation

    @property
    def cache_stats(self) -> CacheStats:
        """Returns counts of prefix caching, such as tokens found in the cache, and of preemptions."""
        return self._state.cache_stats

    def memory(self) -> MemoryPlan:
        """Returns the bytes for this rank, as planned from the graph of the largest bucket, without penalties.

        Raises:
            RuntimeError: the engine is closed.
        """
        return self.runner.memory(self.weights, self._cache)

    def warm_up(
        self,
        *,
        penalties: bool = False,
        grammars: bool = False,
        embeddings: bool = False,
        adapters: bool = False,
        later: bool = False,
    ) -> None:
        """Captures the graphs of all buckets, and builds the C++ of the kernels, so that no later step does.

        Where ranks of one machine start together, one rank builds a file, and the other ranks wait.

        Args:
            penalties: whether to capture also graphs of steps in which a request has penalties, biases, or wants the
                most probable tokens. Otherwise the first such step is slow.
            grammars: whether to capture also graphs of steps in which a request has a grammar.
            embeddings: whether to capture also graphs of steps that embed, next to requests without penalties and
                grammars.
            adapters: whether to capture also all of these graphs with the present adapters.
            later: whether to capture now only the plain graphs of the smallest and the largest bucket. Each call of
                `capture_next` then captures a further graph, and a step captures a missing graph.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._check_open()
        if grammars:
            self._constraints.prepare()
        with building(self.mesh.device, self._list_kernels(penalties, adapters)):
            if isinstance(self._state.drafter, BatchDrafter):
                self._state.drafter.warm_up(extended=penalties)
            kinds = {"extended": penalties, "grammars": grammars, "hidden": embeddings and self._embeddings.possible}
            each = list[list[GraphKind]]()
            for bucket in self.limits.buckets:
                low = self._adapters.of_padding(bucket) if adapters else None
                each.append(list_graph_kinds(bucket, low=low, routed=self._recorder is not None, **kinds))
            first = [each[0][0], each[-1][0]] if later else []
            # Plain graphs of all buckets come before graphs of rarer steps.
            rest = [kind for same in itertools.zip_longest(*each) for kind in same if kind is not None]
            self._uncaptured = deque([*first, *rest])
            num = len(first) if later else len(rest)
            with waiting("capturing graphs", total=num) as wait:
                for _ in range(num):
                    self.capture_next()
                    wait.update()

    def capture_next(self) -> bool:
        """Captures a graph that `warm_up(later=True)` has left, if there is such a graph. Collective.

        Returns:
            Whether a graph was captured.

        Raises:
            RuntimeError: the engine is closed.
        """
        if not self._uncaptured:
            return False
        self.runner.bind_kind(self._uncaptured.popleft(), self.weights, self._cache)
        return True

    def _list_kernels(self, penalties: bool, adapters: bool) -> list[str]:
        """Returns the ops of all steps, by their folders. Ops whose C++ takes long to build come first."""
        always = ["row_linear", "ragged_attention", "draw", "row_norm", "pointwise"]
        chosen = ["grouped_product", "gather_rows"] if self._chooses else []
        return always + chosen + ["grouped_product"] * adapters + ["penalise"] * penalties

    def add(
        self, prompt: Sequence[int], sampling: Sampling | None = None, *, name: str | None = None, **more: Any
    ) -> str:
        """Puts a request in line.

        Args:
            prompt: token ids.
            sampling: rule of drawing tokens. Default: `Sampling()`.
            name: name of the request. Default: a name of the engine's choice.
            **more: `priority`, `deadline` or `salt`, as of a `Request`, or `adapter`, the name of an adapter.

        Returns:
            The name.

        Raises:
            TypeError: a prompt is no sequence of integers, or another argument is of a wrong type.
            ValueError: a value is out of range, the request can never fit, or another request of this name is in
                progress or has an embedding that was not taken, or the grammar is refused.
            ImportError: the request has a grammar, and llguidance is missing.
        """
        return self._enter_request(self._make_request(prompt, sampling, **more), name)

    def _enter_request(self, made: tuple[Request, Any], name: str | None = None) -> str:
        request, admitted = made
        if name is None:
            names = (f"request-{i}" for i in self._names)
            name = next(name for name in names if not self._is_known(name) and name not in self._embeddings)
        check_name(name)
        if self._is_known(name):
            raise ValueError(f"a request named {name!r} is in progress. Give the new one another name.")
        if name in self._embeddings:
            raise ValueError(
                f"the embedding of a request named {name!r} was not taken. Call embedding({name!r}) first, or give the"
                " new request another name."
            )
        self._events.append(Add(self._next_number, name, request))
        self._adding[name] = None
        self._hooks.begin(name, admitted)
        return name

    def check(self, prompt: Sequence[int], sampling: Sampling | None = None, **more: Any) -> None:
        """Refuses what `add` would refuse, and adds nothing.

        Raises:
            TypeError: as `add`.
            ValueError: as `add`.
            ImportError: as `add`.
        """
        self._make_request(prompt, sampling, **more)

    def cancel(self, name: str) -> None:
        """Ends a request as "cancelled". The name of an ended request is passed over.

        The next step ends the request, after the token that the last step has drawn. The request may also end by that
        token.
        """
        check_name(name)
        self._events.append(Cancel(self._next_number, name))

    def tick(self, time: int) -> None:
        """Sets the clock's reading for deadlines, in milliseconds, equal on all ranks."""
        check_time(time)
        self._events.append(Clock(self._next_number, time))

    def drain(self) -> None:
        """Ends requests that are added from here on as "refused". Requests in progress go on."""
        self._events.append(Drain(self._next_number))

    def update_weights(self, params: PyTree, *, recompute: bool = True) -> int:
        """Changes the weights. No block of the cache that older weights computed is used again.

        Args:
            params: parameters of the layout of the engine's.
            recompute: whether requests in progress go on at once under the new weights, with their KV cache recomputed
                and their tokens kept. False ends requests that have begun under the old weights first.

        Returns:
            The version of the new weights. Each token names the version that computed it.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: the parameters are of another model. The message lists the leaves.
        """
        packed = self.runner.pack_weights(params, like=self.weights)
        if recompute:  # the next step changes to the version at once, and versions that have waited never run
            self._weights = {v: w for v, w in self._weights.items() if v == self._state.version}
        self._newest += 1
        self._weights[self._newest] = packed
        self._events.append(Weights(self._next_number, self._newest, recompute))
        return self._newest

    def step(self) -> list[Token]:
        """Takes what has happened since the last step, runs the next step, and returns the tokens of the last step.

        Tokens of requests of `stream` and `generate` are returned only by those calls. All other tokens are returned
        only here, also the last tokens of a stream that was closed.

        Raises:
            RankError: ranks hold different states. The message names the first field that differs.
            RuntimeError: the engine is closed, or an earlier step failed. The cache is lost then: make another engine.
        """
        self._advance_step()
        found, self._others = self._others, []
        return found

    def stream(
        self, prompt: Sequence[int], sampling: Sampling | None = None, **more: Any
    ) -> Generator[Token, None, None]:
        """Adds a request and yields its tokens. The engine steps for all requests in between.

        Several streams may be read in turns. Closing the iterator cancels the request: on all ranks, as every call. The
        next `step` returns the tokens that were not read.

        Raises:
            ValueError: as `add`.
        """
        name = self._await_request(self.add(prompt, sampling, **more))
        return self._stream_tokens(name, (sampling or Sampling()).n)

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Any]:
        """Completes prompts. Requests in progress go on in the same steps.

        Args:
            prompts: token ids of each prompt.
            sampling: one `Sampling` for all prompts, or a sequence with a `Sampling` for each.
            adapter: name of one adapter for all prompts, or a sequence with a name for each, where None is the model
                without an adapter.

        Returns:
            For each prompt a `Completion`, or for a request of n > 1 choices a list of n.

        Raises:
            TypeError: as `add`.
            ValueError: a request is out of range, or can never fit. No request was begun then.
        """
        prompts = list(prompts)
        hows, adapters = split_sampling(sampling, len(prompts)), split_adapters(adapter, len(prompts))
        each = zip(prompts, hows, adapters, strict=True)
        requests = [self._make_request(prompt, how, adapter=name) for prompt, how, name in each]
        names = [self._await_request(self._enter_request(request)) for request in requests]
        try:
            made = [self._make_completions(name, request) for name, (request, _) in zip(names, requests, strict=True)]
        except BaseException:
            for name in names:
                self._forget_request(name)
            raise
        return [found[0] if len(found) == 1 else found for found in made]

    def embed(
        self,
        prompts: Iterable[Sequence[int]],
        pooling: str = "last",
        *,
        normalize: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Float32[Tensor, "n d"]:
        """Returns embeddings of prompts: the hidden states that the head multiplies, pooled.

        Requests in progress go on in the same steps. The bits of an embedding do not depend on the other prompts, if
        the decoder is exact. A mean wants a row for each token, so that a step takes at most `Limits.running` tokens of
        a mean.

        Args:
            prompts: token ids of each prompt, fewer than the context.
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
        each, how = split_adapters(adapter, len(prompts)), self._embeddings.sampling(pooling)
        requests = [self._make_request(prompt, how, adapter=name) for prompt, name in zip(prompts, each, strict=True)]
        names = [self._await_request(self._enter_request(request)) for request in requests]
        self._embeddings.begin(names, pooling)
        try:
            return torch.stack([self._take_embedding(i, name, normalize) for i, name in enumerate(names)])
        finally:
            for name in names:
                self._embeddings.forget(name)
                self._forget_request(name)

    def add_embedding(
        self, prompt: Sequence[int], pooling: str = "last", *, name: str | None = None, **more: Any
    ) -> str:
        """Puts a prompt in line for an embedding. `embedding` returns the result once `step` has returned the end.

        Args:
            prompt: token ids, fewer than the context.
            pooling: see `embed`.
            name: see `add`.
            **more: see `add`.

        Returns:
            The name.

        Raises:
            TypeError: as `add`.
            ValueError: as `embed`.

        Example:
            >>> from shardfn import core
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=1, d_model=32, num_heads=4, max_len=32)
            >>> engine = Engine(decoder(config), gpt.init(config, core.key(0)))
            >>> name = engine.add_embedding([5, 6, 7])
            >>> while not engine.idle:
            ...     ended = engine.step()
            >>> engine.embedding(name).shape
            torch.Size([32])
        """
        name = self._enter_request(self._make_request(prompt, self._embeddings.sampling(pooling), **more), name)
        self._embeddings.begin([name], pooling)
        return name

    def embedding(self, name: str, *, normalize: bool = False) -> Float32[Tensor, " d"]:
        """Returns, once, the embedding of a request of `add_embedding` that has ended as "length".

        Raises:
            ValueError: there is no such request, or the request is in progress, or has ended otherwise.
        """
        check_pooling("last", normalize)
        if name not in self._embeddings or self._is_known(name):
            how = "is in progress" if name in self._embeddings else "has no embedding"
            raise ValueError(f"the request {name!r:.80} {how}. Call add_embedding, and step until it ends.")
        return self._embeddings.result(name, normalize)

    def add_adapter(self, name: str, given: Given) -> None:
        """Lets requests have an adapter. The next step with an adapter captures graphs again.

        Args:
            name: name for requests.
            given: pair `(lora, values)`: a `LoRA` and its values, whole, as `lora.load_peft(directory, params)`
                returns.

        Raises:
            TypeError: an argument is of another kind.
            ValueError: the name is taken, the decoder is not exact, the engine is in float64, or the adapter does not
                fit the model.
        """
        if self.dtype == torch.float64:
            raise ValueError(
                f"adapter {name!r}: adapters are added in float32, and this engine is in float64. Merge it into the"
                " parameters by LoRA.merge, or take float32."
            )
        self._adapters.add(name, given)

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter.

        Raises:
            ValueError: the name is unknown, or a request in progress has the adapter.
        """
        digest = self._adapters.named(name).digest
        running = [(one.name, one.request) for one in self._state.sequences.values()]
        coming = [(event.name, event.request) for event in self._events if isinstance(event, Add)]
        users = sorted({user for user, request in running + coming if request.adapter == digest})
        if users:
            raise ValueError(f"adapter {name!r} is of requests in progress, {users}. Cancel them, or wait.")
        self._adapters.remove(name)

    def close(self) -> None:
        """Ends the engine: drops its weights and cache, and frees the directory on disk unless the runner was given.

        Calls that step or need weights are refused from here on. A given `Runner` has a separate `close`.

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
        self._closed = True
        self._weights, self._cache, self._results = {}, [], None
        if self._owned:
            self.runner.close()

    # Requests whose tokens a call waits for.

    def _await_request(self, name: str) -> str:
        self._awaited[name] = []
        return name

    def _forget_request(self, name: str) -> None:
        """Ends a request whose tokens no call waits for any more."""
        if self._awaited.pop(name, None) is not None and self._is_known(name):
            self.cancel(name)

    def _stream_tokens(self, name: str, left: int) -> Generator[Token, None, None]:
        """Yields the tokens of a request up to the last of its choices to end."""
        tokens = self._begun_stream(name, left)
        next(tokens)  # the `finally` of a generator that has not begun never runs
        return tokens

    def _begun_stream(self, name: str, left: int) -> Generator[Any, None, None]:
        """Yields None once, then the tokens. Ends the request however the iterator ends."""
        try:
            yield None
            while left:
                while not self._awaited[name]:
                    self._advance_step()
                due, self._awaited[name] = self._awaited[name], []
                for token in due:
                    left -= token.finish_reason is not None
                    yield token
        finally:
            self._forget_request(name)

    def _take_embedding(self, number: int, name: str, normalize: bool) -> Tensor:
        last = list(self._stream_tokens(name, 1))[-1]
        check_end(number, last.finish_reason)
        return self._embeddings.result(name, normalize)

    def _make_completions(self, name: str, request: Request) -> list[Completion]:
        made = [Completion([], [], None, [], [], []) for _ in range(request.sampling.n)]
        for token in self._stream_tokens(name, len(made)):
            append_token(made, token, len(request.prompt))
        return made

    # One step.

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed. Make another one.")

    def _advance_step(self) -> None:
        self._check_open()
        if self._failed is not None:
            raise RuntimeError("a step of this engine failed before. Make another engine.") from self._failed
        try:
            found = self._run_step()
        except BaseException as error:
            self._failed = error
            raise
        for token in found:
            self._awaited.get(token.name, self._others).append(token)

    def _run_step(self) -> list[Token]:
        drawn = self._drawn_tokens
        events, self._events, self._adding = [*self._events, *self._find_stops(drawn)], [], {}
        self._hooks.before(self._state)
        self._state, plan, outputs = advance(self._state, events, drawn, self._constraints.cut)
        self._hooks.moved(self._state.moves if plan is None else plan.moves)
        found = [self._make_token(output) for output in outputs]
        self._hooks.take(outputs)
        self._results = None
        reachable = self._state.version, self._state.pending
        self._weights = {v: w for v, w in self._weights.items() if v in reachable}
        compare_states(self._state, self.mesh)
        if plan is not None:
            self._launch_plan(plan)
        return found

    def _launch_plan(self, plan: StepPlan) -> None:
        self._rows, self._run_rows = self._rows + plan.num_tokens, self._run_rows + plan.bucket
        columns = self._hooks.columns(self._state, plan)
        self._results = self.runner.run(self._weights[plan.version], self._cache, plan, **columns)
        self._cache = self._results.cache
        self._hooks.ran(plan, self._results)

    @property
    def _drawn_tokens(self) -> list[int]:
        """Returns the tokens of the plan in flight."""
        return [] if self._results is None else self._results.tokens

    def _find_stops(self, drawn: Sequence[int]) -> list[Stop]:
        """Returns the events by which texts end with the tokens of the last plan."""
        ends = self._hooks.ends(list(list_new_tokens(self._state, drawn)), {})
        return [Stop(self._next_number + i, *place, finish) for i, (place, finish) in enumerate(ends.items())]

    def _make_request(self, prompt: Sequence[int], sampling: Sampling | None, **more: Any) -> tuple[Request, Any]:
        """Returns a request that passes admission, with the follower's value for its beginning."""
        request = make_request(prompt, sampling, self.limits, self._adapters, more)
        return request, self._hooks.admit(request)

    def _is_known(self, name: str) -> bool:
        return name in self._state.names or name in self._adding or name in self._awaited

    @property
    def _next_number(self) -> int:
        return self._state.number + len(self._events)

    def _make_token(self, out: Output) -> Token:
        logprob, top = None, ()
        if out.row is not None:
            assert self._results is not None
            logprob, tops = self._results.logprobs[out.row], self._results.top
            top = tops[out.row] if tops else ()
        more = {"top": top, **self._hooks.fields(out)}
        return Token(out.name, out.choice, out.position, out.token, logprob, out.version, out.finish_reason, **more)
