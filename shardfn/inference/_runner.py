"""The pure step over sharded weights and a donated KV cache: one captured graph for each bucket of tokens."""

import collections
import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shardfn import kernels
from shardfn.collectives import GlobalTensor
from shardfn.core import (
    Axes,
    Disk,
    Draw,
    MemoryKind,
    Mesh,
    PyTree,
    explains_keywords,
    is_device,
    make_mesh,
    raise_all,
    tree_leaves,
)
from shardfn.engine import BoundCall, Donated, Sharded, reshard, sharded
from shardfn.graph import MemoryAnalysis
from shardfn.transforms import jit

from ._cache import CacheLayout, check_memory
from ._checks import MEANT_BY_LIMITS, check_cache, check_decoder, check_same_model, list_misfits
from ._decoder import Decoder, SourceEncoder
from ._draw_rows import LogitsEdit, Top, draw_tokens, edit_logits, find_top, read_tops
from ._image_rows import ImageRows, ImageRule
from ._layouts import Layout
from ._limits import DEFAULT_LAYOUT, Limits
from ._low_rank import LowRank
from ._plan import StepPlan, make_padding
from ._results import MemoryPlan
from ._tensors import FillTensors, StepBuffers, StepTensors, fill_tensors, make_image_padding, make_tensors
from ._weights import (
    WeightSource,
    abstract_weights,
    count_bytes,
    drop_copies,
    find_packed_shapes,
    make_zero,
    pack_leafwise,
)

Cache = list[GlobalTensor]
Weights = dict[str, PyTree]  # served forms by layout


@explains_keywords(**MEANT_BY_LIMITS)
def limits_of(decoder: Decoder, *, context: int | None = None, cache_bytes: int = 1 << 30, **sizes: Any) -> Limits:
    """Returns the sizes of an engine for a model.

    Args:
        decoder: model.
        context: most tokens of a sequence. Default: the model's.
        cache_bytes: most bytes of the KV cache, on all ranks together. Fewer if all sequences that run need less.
        **sizes: other fields of `Limits`.

    Raises:
        ValueError: a size is out of range, or the cache has no room for a single sequence.

    Example:
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64)
        >>> limits_of(decoder(config), running=2).blocks
        9
    """
    context = decoder.context if context is None else context
    if "blocks" in sizes:
        raise ValueError("limits_of: blocks follow from cache_bytes. Pass that, or make Limits(...) of your own.")
    sizes = {"source": 0 if decoder.sources is None else decoder.sources.longest} | sizes
    one = Limits(vocab=decoder.vocab, context=context, blocks=2, **sizes)
    raise_all(ValueError, "limits_of:", list_misfits(decoder, one))
    sources = decoder.cache.num_source_bytes(one)
    each = (decoder.cache.num_bytes(one) - sources) // 2
    held, least = (cache_bytes - sources) // each, 1 + one.width
    if held < least:
        raise ValueError(
            f"cache_bytes={cache_bytes} holds {max(held - 1, 0) * one.block} tokens, fewer than context={context}."
            f" Give {least * each + sources} bytes or more, or take a shorter context."
        )
    blocks = min(held, one.running * one.width + 1)
    return Limits(vocab=decoder.vocab, context=context, blocks=blocks, **sizes)


class StepResults(NamedTuple):
    """Results of a plan's rows.

    Attributes:
        tokens: drawn tokens, and for scored rows the most probable tokens. -1 where logits were not finite.
        logprobs: log probabilities of drawn and of scored tokens.
        cache: cache in place of the given cache.
        hidden: hidden states, float32. None if they are not wanted.
        top: most probable tokens that each row wants, empty where no row wants any.
        experts: experts of the plan's tokens. None if they are not wanted.
        states: hidden states after each wanted layer, concatenated. None if they are not wanted.
    """

    tokens: list[int]
    logprobs: list[float]
    cache: Cache
    hidden: Float[Tensor, "rows d"] | None
    top: list[Top]
    experts: Int[Tensor, "tokens m k"] | None
    states: Float[Tensor, "rows n"] | None


class Runner:
    """Graphs of a decoder, a graph for each bucket. A runner holds neither weights nor cache.

    Args:
        decoder: model.
        limits: sizes.
        mesh: mesh from `make_mesh`. None is a single device.
        weights: memory of weights between their uses, "device", "host" or "disk". A step reads the weights of a layer
            while the layer before computes. Bits are the same.
        weights_axis: mesh axis, or axes, along which weights are cut between their uses (ZeRO-Inference). Of 2 ranks,
            for example, each holds a half of every weight of more than 1,024 elements. A step gathers the weights of a
            layer while the layer before computes, and sends no tokens. Bits are the same.
        disk: directory for "disk".
        cache: memory of keys and values, "device" or "host". A step brings the blocks of its sequences in a layer while
            the layer before computes, and returns the rows of its tokens. Bits are the same.
        eager_steps: number of first steps of each graph that run op by op. A capture takes seconds, which pays only for
            many steps. Bits are the same.

    Raises:
        ValueError: the limits do not fit the model, or the mesh does not divide its heads, or there is no such memory,
            or no directory.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        *,
        mesh: Mesh | None = None,
        weights: MemoryKind = "device",
        weights_axis: Axes = None,
        disk: Disk | None = None,
        cache: MemoryKind = "device",
        eager_steps: int = 0,
    ) -> None:
        mesh = make_mesh({}, alone=True) if mesh is None else mesh
        check_decoder(decoder, limits, mesh, weights_axis)
        self._decoder, self.limits, self.mesh = decoder, limits, mesh
        self._zero = make_zero(weights, disk, weights_axis)
        self._cache: MemoryKind = check_memory(cache)
        self._by_leaf = not is_device(weights) or weights_axis is not None
        self._host_cache = not is_device(cache)
        # The work of a batch-invariant decoder is in kernels.
        self._threads = kernels.threads_for_kernels if decoder.batch_invariant else contextlib.nullcontext
        self._layouts = find_layouts(decoder, limits)
        # Layouts that pack alike share one copy of the weights: the name of the first such layout.
        packs = {x.pack: name for name, x in reversed(self._layouts.items())}
        self._source = {name: packs[x.pack] for name, x in self._layouts.items()}
        if self._by_leaf and len(packs) > 1:
            kept = f"weights={weights!r}" if weights_axis is None else f"weights_axis={weights_axis!r}"
            raise ValueError(
                f"engine: weights with {kept} are served in layouts of one copy, got {[*self._layouts]}. Pass one of"
                " them, or a decoder with sp=."
            )
        self._pack = {
            name: sharded(x.pack, mesh=mesh, specs=x.specs, out_specs=x.packed) for name, x in self._layouts.items()
        }
        # With a budget of 0 bytes the next layer's cache is brought, and nothing else.
        self._prefetch = 0 if self._host_cache else None
        # By layout, further results, and whether the step is captured.
        self._steps: dict[tuple[str, _Further, bool], Sharded] = {}
        self._bound: dict[Any, BoundCall] = {}
        if decoder.sources is not None and self._host_cache:
            raise ValueError("engine: cache='host' knows no sources of an encoder-decoder model. Take cache='device'.")
        self._eager_steps, self._eager_calls = eager_steps, collections.Counter[Any]()

    def _step_of(self, layout: str, further: "_Further" = (), *, captured: bool = True) -> Sharded:
        """Returns the pure step over weights in a layout, with some further results of the decoder."""
        if (layout, further, captured) in self._steps:
            return self._steps[layout, further, captured]
        ahead = self._prefetch
        schedule: dict[str, Any] = {} if ahead is None else {"prefetch": ahead, "passes": (drop_copies,)}
        # Its bits are torch's on every back end, and what lies between its kernels is not worth a compiler's time.
        backend = "graph" if self._decoder.batch_invariant else None
        run = functools.partial(_run_step, self._decoder, self._layouts[layout], further)
        made = self._steps[layout, further, captured] = sharded(
            jit(run, backend=backend, **schedule) if captured else run,
            mesh=self.mesh,
            specs=self._layouts[layout].packed,
            zero=self._zero,
            in_specs=(self._decoder.cache.kept(self._cache), None),
            out_specs=(None, None, Donated(1), None, *[None] * len(further)),
            donate=1,
        )
        return made

    @functools.cached_property
    def _fill_call(self) -> Sharded:
        """Returns the pure step that encodes a source into the donated cache. It runs op by op, for any length."""
        assert self._decoder.sources is not None
        return sharded(
            functools.partial(_fill_source, self._decoder.cache, self._decoder.sources),
            mesh=self.mesh,
            specs=self._layouts[DEFAULT_LAYOUT].packed,
            zero=self._zero,
            in_specs=(self._decoder.cache.kept(self._cache), None),
            out_specs=(Donated(1),),
            donate=1,
        )

    def check(self, decoder: Decoder, limits: Limits, mesh: Mesh | None) -> None:
        """Refuses a model, limits or a mesh that the graphs do not fit.

        Raises:
            ValueError: the decoder or the mesh is different, or limits differ in more than `starvation_steps`, or in
                fewer blocks.
        """
        if decoder is not self._decoder or (mesh is not None and mesh is not self.mesh):
            other = "decoder" if decoder is not self._decoder else "mesh"
            raise ValueError(f"engine: the runner is of another {other}. Pass the one that it was made with.")
        if limits.blocks > self.limits.blocks or replace(limits, blocks=2, starvation_steps=0) != replace(
            self.limits, blocks=2, starvation_steps=0
        ):
            raise ValueError(f"engine: limits are {limits}, and its runner's are {self.limits}. Make another runner.")

    def pack_weights(self, params: PyTree, *, like: Weights | None = None) -> Weights:
        """Returns the served form of parameters in each layout.

        Raises:
            ValueError: only the cache or only the parameters of a batch-invariant decoder are in float64, or the
                parameters have other leaves than `like`, the served form of earlier parameters.
        """
        check_cache(self._decoder, self.limits, tree_leaves(params))
        made = {
            x: self._pack_layout(x, params, None if like is None else like[x])
            for x in dict.fromkeys(self._source.values())
        }
        return {x: made[source] for x, source in self._source.items()}

    def _pack_layout(self, layout: str, params: PyTree, like: PyTree | None) -> PyTree:
        leaves, pack = tree_leaves(params), self._pack[layout]
        if self._by_leaf or any(isinstance(x, Draw) for x in leaves):
            return self._pack_leafwise(layout, params, like)
        if all(isinstance(x, GlobalTensor) for x in leaves):
            held = reshard(params, pack.specs(params), mesh=self.mesh)
        else:
            held = pack.init(params)
        out = pack(held)
        if like is not None:
            check_same_model(like, out)
        return out

    def _pack_leafwise(self, layout: str, params: PyTree, like: PyTree | None) -> PyTree:
        source = WeightSource(self._layouts[layout], params, self._pack[layout].specs(params), self.mesh)
        shapes = find_packed_shapes(source)
        if like is not None:
            check_same_model(like, shapes.tree)
        elif self._by_leaf and not self._bound:
            self._prefetch = shapes.ahead(self._decoder.depth)
            self._steps.clear()
        step = self._step_of(layout)
        kept = step.specs(shapes.tree)
        return pack_leafwise(source, shapes, kept, step.pool, together=not self._by_leaf)

    def make_buffers(self) -> StepBuffers:
        """Returns memory for the tensors of steps, for a single engine."""
        return StepBuffers(self.limits, self.mesh.device)

    def empty_cache(self) -> Cache:
        """Returns a cache without content."""
        return self._decoder.cache.init(self.limits, self.mesh, self._cache)

    def bind(
        self,
        bucket: int,
        weights: Weights,
        cache: Cache,
        step: StepTensors | None = None,
        *,
        extended: bool = False,
        grammars: bool = False,
        hidden: bool = False,
        low: LowRank | None = None,
        routed: bool = False,
        edited: bool = False,
        states: tuple[int, ...] = (),
        layout: str = "",
    ) -> BoundCall:
        """Returns the graph of a bucket, captured at the first call. The first call is collective."""
        if step is None:
            plan = make_padding(bucket, self.limits, extended=extended)
            allowed = np.ones((len(plan.rows), self.limits.vocab), bool) if grammars else None
            how: dict[str, Any] = {"host_cache": self._host_cache, "images": self._pad_images(bucket)}
            step = make_tensors(plan, self.limits, self.mesh.device, allowed, low, **how)
        layout = layout or self.limits.layout_of(bucket, adapters=step.low is not None)
        further = list_further(hidden=hidden, routed=routed, edited=edited, states=states)
        key = _find_graph_key(layout, bucket, step, further)
        if key not in self._bound:
            # Engines compare their states before each step, so calls need no check of their own.
            with self._threads():
                call = self._step_of(layout, further).bind(weights[layout], cache, step, check_every=0)
                self._bound[key] = call
        return self._bound[key]

    def memory(self, weights: Weights, cache: Cache) -> MemoryPlan:
        """Returns the bytes that this rank needs. Captures the graph of the largest bucket."""
        return self._add_step(self.bind(self.limits.budget, weights, cache).memory_analysis(), weights, cache)

    def plan_memory(self, params: PyTree) -> MemoryPlan:
        """Returns the bytes that a rank needs, as `memory` does, from shapes only. The mesh may be abstract.

        Args:
            params: parameters as tensors on "meta", or as deferred draws. Only shapes and dtypes count.

        Raises:
            ValueError: weights or cache are not on the device.

        Example:
            >>> from shardfn.core import deferred, key
            >>> from shardfn.inference import decoder
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64)
            >>> one = decoder(config, tp="tp")
            >>> mesh = make_mesh({"tp": 4}, device="cpu", abstract=True)
            >>> with deferred():
            ...     params = gpt.init(config, key(0))
            >>> Runner(one, limits_of(one, running=2), mesh=mesh).plan_memory(params).weights
            39104
        """
        if self._by_leaf or self._host_cache:
            raise ValueError(
                "plan_memory: weights and cache must be on the device. Make a Runner without weights=, cache=."
            )
        sources = {x: WeightSource(y, params, self._pack[x].specs(params), self.mesh) for x, y in self._layouts.items()}
        made = {x: abstract_weights(sources[x]) for x in dict.fromkeys(self._source.values())}
        weights: Weights = {x: made[source] for x, source in self._source.items()}
        cache = self._decoder.cache.make_abstract(self.limits, self.mesh)
        layout, padding = self.limits.layout_of(self.limits.budget), make_padding(self.limits.budget, self.limits)
        step = make_tensors(padding, self.limits, self.mesh.device, images=self._pad_images(self.limits.budget))
        with self._threads():
            lowered = self._step_of(layout).lower(weights[layout], cache, step)
        return self._add_step(lowered.memory_analysis(), weights, cache)

    def _add_step(self, graph: MemoryAnalysis, weights: Weights, cache: Cache) -> MemoryPlan:
        """Returns the bytes of weights and cache, and of all else in a graph of the largest bucket."""
        held, cached, *_ = self.held_memory(weights, cache)
        own = count_bytes(weights[self.limits.layout_of(self.limits.budget)], "device", "host")
        device, host = graph.by_memory.get("device", 0), graph.by_memory.get("host", 0)
        return MemoryPlan(held, cached, max(device + host - own - cached, 0), host)

    def held_memory(self, weights: Weights, cache: Cache) -> MemoryPlan:
        """Returns the bytes between steps, without a capture."""
        copies = [weights[x] for x in dict.fromkeys(self._source.values())]
        held, cached = count_bytes(copies, "device", "host"), count_bytes(cache, "device", "host")
        return MemoryPlan(held, cached, 0, count_bytes((copies, cache), "host"))

    def run(
        self,
        weights: Weights,
        cache: Cache,
        plan: StepPlan,
        allowed: Bool[np.ndarray, "rows vocab"] | None = None,
        *,
        low: LowRank | None = None,
        hidden: bool = False,
        routed: bool = False,
        edits: Sequence[LogitsEdit] = (),
        states: tuple[int, ...] = (),
        images: ImageRows | None = None,
        buffers: StepBuffers | None = None,
    ) -> StepResults:
        """Returns the results of the plan's rows.

        Args:
            weights: weights in their served form.
            cache: cache of the engine.
            plan: plan of the step.
            allowed: tokens that each row may draw. None is all.
            low: adapters of the plan's tokens.
            hidden: whether the hidden states of the rows are wanted.
            routed: whether the experts of the plan's tokens are wanted, and hidden states.
            edits: changes of the logits of rows by processors. The step then draws all rows outside of its graph, with
                the same bits.
            states: layers that the hidden states of the rows are wanted after.
            images: image tokens of the plan. None is no image.
            buffers: memory of the step's tensors from `make_buffers`, for steps that repeat. None is new memory.
        """
        if plan.moves:
            cache = list(self._decoder.cache.move(cache, plan.moves))
        for fill in plan.fills:
            (cache,) = self._fill_call(weights[DEFAULT_LAYOUT], cache, fill_tensors(fill, self.mesh.device))
        images = self._pad_images(plan.bucket) if images is None else images
        how: dict[str, Any] = {"host_cache": self._host_cache, "buffers": buffers, "images": images}
        step = make_tensors(plan, self.limits, self.mesh.device, allowed, low, **how)
        kind: dict[str, Any] = {"hidden": hidden, "routed": routed, "edited": bool(edits), "states": states}
        further = list_further(**kind)
        key = _find_graph_key(plan.layout, plan.bucket, step, further)
        if key in self._bound or self._eager_calls[key] >= self._eager_steps:
            call: Any = self.bind(plan.bucket, weights, cache, step, layout=plan.layout, **kind)
        else:
            self._eager_calls[key] += 1
            call = self._step_of(plan.layout, further, captured=False)
        with self._threads():
            tokens, logprobs, cache, top, *more = call(weights[plan.layout], cache, step)
            found = dict(zip(further, more, strict=True))
            if edits:
                with torch.no_grad():
                    tokens, logprobs = draw_tokens(found["logits"], step, edit_logits(found["logits"], edits))
        last = found["hidden"][: plan.num_rows].float() if "hidden" in found else None
        after = torch.cat([found[x][: plan.num_rows].float() for x in states], -1) if states else None
        experts = found["experts"][: plan.num_tokens] if routed else None
        tokens, logprobs = tokens[: plan.num_rows].tolist(), logprobs[: plan.num_rows].tolist()
        return StepResults(tokens, logprobs, cache, last, read_tops(plan, top), experts, after)

    def _pad_images(self, bucket: int) -> ImageRows | None:
        """Returns the tensors of a step without an image, or None for a model without images."""
        rule, width = self._decoder.images, self._decoder.hidden_size
        return None if rule is None else make_image_padding(bucket, self.limits, rule, width)

    def close(self) -> None:
        """Drops the graphs, and releases the directory on disk. Weights in the directory cannot be used any more."""
        self._bound.clear()
        for one in (*self._pack.values(), *self._steps.values()):
            one.close()


_Further = tuple[str | int, ...]


def list_further(*, hidden: bool, routed: bool, edited: bool, states: tuple[int, ...] = ()) -> _Further:
    """Returns the results of a decoder that a step has in addition to tokens: names, and layers for hidden states."""
    names = {"hidden": hidden or routed, "experts": routed, "logits": edited}
    return *(name for name, wanted in names.items() if wanted), *states


def _find_graph_key(layout: str, bucket: int, step: StepTensors, further: _Further) -> Any:
    sites = None if step.low is None else tuple((name, f.a.shape) for name, f in step.low.sites.items())
    kinds = step.penalties is not None, step.allowed is not None, step.images is not None
    return layout, bucket, *kinds, sites, further


def _run_step(
    decoder: Decoder, layout: Layout, further: _Further, weights: PyTree, cache: list[Tensor], step: StepTensors
) -> tuple[Tensor, Tensor, list[Tensor], Any, *tuple[Tensor | None, ...]]:
    """Runs the pure step: `(weights, cache, step) -> (tokens, log probabilities, cache, top, *further results)`.

    `top` has the most probable tokens and their log probabilities in an extended step, and is empty otherwise.
    """
    bodies = decoder.cache.make_bodies(cache, step, **_find_kinds(decoder.images, step))
    images: dict[str, Any] = {} if step.images is None else {"images": (step.images.rows, step.images.features)}
    shifts = None if step.images is None else step.images.shifts
    positions = step.positions if shifts is None else step.positions + shifts
    found = layout.outputs(weights, step.tokens, positions, step.rows, bodies, step.low, **images)
    drawn = draw_tokens(found.logits, step)
    results = {"hidden": lambda: found.hidden, "experts": found.experts, "logits": lambda: found.logits}
    more = (found.state_after(x) if isinstance(x, int) else results[x]() for x in further)
    return *drawn, cache, find_top(found.logits, step), *more


def find_layouts(decoder: Decoder, limits: Limits) -> dict[str, Layout]:
    """Returns the layouts that limits name.

    Raises:
        ValueError: the decoder does not offer a layout.
    """
    names = dict.fromkeys(name for name, _ in limits.layouts)
    missing = [name for name in names if name not in decoder.layouts]
    if missing:
        raise ValueError(
            f"engine: limits.layouts has {missing}, but this decoder offers {[*decoder.layouts]}. Use these layouts, or"
            " a decoder that offers more."
        )
    return {name: decoder.layouts[name] for name in names}


def make_runner(
    runner: Runner | None,
    decoder: Decoder,
    limits: Limits,
    mesh: Mesh | None,
    **kept: Any,
) -> Runner:
    """Returns the runner of an engine: the given runner if it fits, or a new runner.

    Raises:
        ValueError: the runner has another model, limits or mesh, or arguments of a runner are given, too.
    """
    if runner is None:
        return Runner(decoder, limits, mesh=mesh, **kept)
    given = [(k, v) for k, v in kept.items() if v not in ("device", None) and k != "eager_steps"]
    if given:
        shown, names = ", ".join(f"{k}={v!r}" for k, v in given), ", ".join(f"{k}=" for k, _ in given)
        raise ValueError(f"engine: {shown} is the runner's to choose: Runner(..., {names}).")
    runner.check(decoder, limits, mesh)
    return runner


def _fill_source(
    form: CacheLayout, sources: SourceEncoder, weights: PyTree, cache: list[Tensor], fill: FillTensors
) -> tuple[list[Tensor]]:
    """Writes the keys and values of a source into the layers of cross attention."""
    found = sources.encode(weights, fill.tokens)
    for layer, (k, v) in zip(cache[form.layers :], found, strict=True):
        kind = torch.float64 if layer.dtype == torch.float64 else torch.float32
        kernels.write_cache(k.to(kind), v.to(kind), layer, fill.slots)
    return (cache,)


def _find_kinds(rule: ImageRule | None, step: StepTensors) -> dict[str, Any]:
    """Returns the arguments of bodies that read images by a separate softmax, or images as a whole."""
    if rule is None or step.images is None or rule.rule == "causal":
        return {}
    return {"images": step.images.words, "rule": rule.rule}
