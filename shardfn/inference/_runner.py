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
    P,
    PyTree,
    is_device,
    make_mesh,
    tree_leaves,
)
from shardfn.engine import BoundCall, Donated, Lowered, Sharded, reshard, sharded
from shardfn.graph import MemoryAnalysis
from shardfn.transforms import jit

from ._cache import LaneAxis, check_memory
from ._checks import check_cache, check_decoder, check_same_model
from ._decoder import Decoder
from ._draw_rows import LogitsEdit, Top, draw_tokens, edit_logits, read_tops
from ._image_rows import ImageRows
from ._lane_tensors import (
    LanePlan,
    list_moves,
    make_carry,
    make_lane_tensors,
    split_part,
    stack_steps,
    widen_plans,
)
from ._layouts import Layout
from ._limits import DEFAULT_LAYOUT, Limits
from ._low_rank import LowRank
from ._plan import StepPlan, make_padding
from ._pure_step import fill_source, run_part, run_step
from ._results import MemoryPlan
from ._tensors import StepBuffers, StepTensors, fill_tensors, make_image_padding, make_tensors
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
        # Layouts with equal `pack` share one copy of the weights: the name of the first such layout.
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
        self.num_lanes = 1 if decoder.cache.lanes is None else mesh.axis_size(decoder.cache.lanes.axis)
        if self.num_lanes > 1 and (self._host_cache or self._by_leaf):
            raise ValueError(
                f"engine: weights and cache of a decoder over {decoder.cache.lanes} must be on the device, and weights"
                " without weights_axis. Leave out weights=, cache= and weights_axis=."
            )
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
        run, more = functools.partial(run_step, self._decoder, self._layouts[layout], further), list[P]()
        if self.num_lanes > 1:
            run = functools.partial(run_part, self.lanes, self.num_lanes, run)
            more = [P(self.lanes.axis)] if self.lanes.stages else []
        made = self._steps[layout, further, captured] = sharded(
            jit(run, backend=backend, **schedule) if captured else run,
            mesh=self.mesh,
            specs=self._layouts[layout].packed,
            zero=self._zero,
            in_specs=(self._decoder.cache.kept(self._cache), None, *more),
            out_specs=(None, None, Donated(1), None, *more, *[None] * len(further)),
            donate=1,
        )
        return made

    @property
    def lanes(self) -> LaneAxis:
        """Returns the lanes of the decoder, which has several."""
        assert self._decoder.cache.lanes is not None
        return self._decoder.cache.lanes

    @functools.cached_property
    def _fill_call(self) -> Sharded:
        """Returns the pure step that encodes a source into the donated cache. It runs op by op, for any length."""
        assert self._decoder.sources is not None
        return sharded(
            functools.partial(fill_source, self._decoder.cache, self._decoder.sources),
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
        more: Sequence[GlobalTensor] = (),
    ) -> BoundCall:
        """Returns the graph of a bucket, captured at the first call. The first call is collective."""
        if step is None:
            plan = make_padding(bucket, self.limits, extended=extended)
            allowed = np.ones((len(plan.rows), self.limits.vocab), bool) if grammars else None
            how: dict[str, Any] = {"host_cache": self._host_cache, "images": self._pad_images(bucket)}
            step = make_tensors(plan, self.limits, self.mesh.device, allowed, low, **how)
            step, more = self._stack_padding(step)
        layout = layout or self.limits.layout_of(bucket, adapters=step.low is not None)
        further = list_further(hidden=hidden, routed=routed, edited=edited, states=states)
        key = _find_graph_key(layout, bucket, step, further)
        if key not in self._bound:
            # Engines compare their states before each step, so calls need no check of their own.
            with self._threads():
                call = self._step_of(layout, further).bind(weights[layout], cache, step, *more, check_every=0)
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
            >>> from shardfn.inference import decoder, limits_of
            >>> from shardfn.models import gpt
            >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4, max_len=64)
            >>> one = decoder(config, tp="tp")
            >>> mesh = make_mesh({"tp": 4}, device="cpu", abstract=True)
            >>> with deferred():
            ...     params = gpt.init(config, key(0))
            >>> Runner(one, limits_of(one, running=2), mesh=mesh).plan_memory(params).weights
            39104
        """
        lowered, weights, cache = self._lower(params, self.limits.budget, "", "plan_memory")
        return self._add_step(lowered.memory_analysis(), weights, cache)

    def lower_step(self, params: PyTree, bucket: int, layout: str = "") -> Lowered:
        """Returns the step of a bucket as a captured program, from shapes only. The mesh may be abstract.

        Args:
            params: parameters as of `plan_memory`.
            bucket: number of rows.
            layout: layout of the step. Default: by the limits.

        Raises:
            ValueError: weights or cache are not on the device.
        """
        return self._lower(params, bucket, layout, "lower_step")[0]

    def _lower(self, params: PyTree, bucket: int, layout: str, who: str) -> tuple[Lowered, Weights, Cache]:
        if self._by_leaf or self._host_cache:
            raise ValueError(f"{who}: weights and cache must be on the device. Make a Runner without weights=, cache=.")
        sources = {x: WeightSource(y, params, self._pack[x].specs(params), self.mesh) for x, y in self._layouts.items()}
        made = {x: abstract_weights(sources[x]) for x in dict.fromkeys(self._source.values())}
        weights: Weights = {x: made[source] for x, source in self._source.items()}
        cache = self._decoder.cache.make_abstract(self.limits, self.mesh)
        layout, padding = layout or self.limits.layout_of(bucket), make_padding(bucket, self.limits)
        step = make_tensors(padding, self.limits, self.mesh.device, images=self._pad_images(bucket))
        step, more = self._stack_padding(step)
        with self._threads():
            return self._step_of(layout).lower(weights[layout], cache, step, *more), weights, cache

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

    def run_lanes(
        self,
        weights: Sequence[Weights],
        cache: Cache,
        plans: Sequence[LanePlan],
        columns: Sequence[dict[str, Any]],
        carry: GlobalTensor | None,
    ) -> "TurnResults":
        """Returns the results of the plans of all parts of the ranks, which run at the same time.

        Args:
            weights: weights of each part's plan.
            cache: caches of all lanes.
            plans: plan of each part.
            columns: arguments of `run` for each plan. Some may be missing.
            carry: states that the last turn has handed to the next part, of stages.
        """
        lanes, part = self.lanes, self.mesh.coords[self.lanes.axis]
        if moves := list_moves(plans[part], self.limits, lanes):
            cache = list(self._decoder.cache.move(cache, moves))
        edits, hidden = [x.get("edits", ()) for x in columns], any(x.get("hidden") for x in columns)
        wide = widen_plans(plans, self.limits)
        steps = make_lane_tensors(plans, wide, self.limits, self.mesh.device, lanes)
        kind: dict[str, Any] = {"hidden": hidden, "routed": False, "edited": any(edits)}
        further, step, layout = list_further(**kind), stack_steps(steps), wide[0].layout
        own = weights[part]
        more = self._make_more(wide[0].bucket, carry)
        key = _find_graph_key(layout, wide[0].bucket, step, further)
        if key in self._bound or self._eager_calls[key] >= self._eager_steps:
            call: Any = self.bind(wide[0].bucket, own, cache, step, layout=layout, more=more, **kind)
        else:
            self._eager_calls[key] += 1
            call = self._step_of(layout, further, captured=False)
        with self._threads():
            tokens, logprobs, cache, top, *rest = call(own[layout], cache, step, *more)
        carry = rest.pop(0) if lanes.stages else None
        found = list[StepResults | None]()
        for i, (one, plan) in enumerate(zip(plans, wide, strict=True)):
            if one.plan is None or (lanes.stages and i < self.num_lanes - 1):
                found.append(None)
                continue
            ids, probs, tops, extra = tokens[i], logprobs[i], split_part(top, i), dict(zip(further, rest, strict=True))
            if edits[i]:
                with self._threads(), torch.no_grad():
                    logits = extra["logits"][i]
                    ids, probs = draw_tokens(logits, steps[i], edit_logits(logits, edits[i]))
            last = extra["hidden"][i][: plan.num_rows].float() if hidden else None
            ids, probs = ids[: plan.num_rows].tolist(), probs[: plan.num_rows].tolist()
            found.append(StepResults(ids, probs, cache, last, read_tops(plan, tops), None, None))
        return TurnResults(found, cache, carry)

    def _stack_padding(self, step: StepTensors) -> tuple[StepTensors, list[GlobalTensor]]:
        """Returns a step of padding for all parts of the ranks, and the further arguments of such a step."""
        if self.num_lanes == 1:
            return step, []
        return stack_steps([step] * self.num_lanes), self._make_more(len(step.tokens))

    def _make_more(self, bucket: int, carry: GlobalTensor | None = None) -> list[GlobalTensor]:
        """Returns the further arguments of a step of lanes: the states between stages."""
        if not self.lanes.stages:
            return []
        kind = torch.float64 if self.limits.cache_dtype == "float64" else torch.float32
        return [make_carry(carry, bucket, self._decoder.hidden_size, kind, self.lanes, self.mesh)]

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


class TurnResults(NamedTuple):
    """Results of a turn of several lanes.

    Attributes:
        results: results of each part's plan. With stages only the last part has results.
        cache: caches in place of the given caches.
        carry: states for the next part, of stages.
    """

    results: Sequence[StepResults | None]
    cache: Cache
    carry: GlobalTensor | None


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
