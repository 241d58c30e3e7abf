"""LoRA as trees: adapters of leaves, losses with adapters, and checkpoints of only adapters.

Checkpoints of only adapters: a state without the frozen model, which can be read from the model's files.

LoRA as trees: the leaves that have adapters, their first values and specs, and a loss that uses both.

    {"base": the model's parameters, "lora": {path: {"a": [..., r, in], "b": [..., out, r]}}}

A leaf `[..., out, in]` becomes `w + scale * (b @ a)`. Products use the thin factors, and do not compute the sum. For
example, with r = 8 a leaf [4096, 4096] gets factors [8, 4096] and [4096, 8]. Leading dims stack layers. With DoRA an
adapter also has "m" `[..., out]`, the norms of the sum's rows. A leaf that is trained whole has {"full": its copy}.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn import core
from shardfn.collectives import psum, pvary
from shardfn.engine import Transform
from shardfn.nn import dropout
from shardfn.state import TrainState, encode

from ._weight import LowRankWeight, Site, of_pattern, unused


def without_base(state: TrainState) -> TrainState:
    """Returns the part of a state to save: adapters, and the optimizer's state of the adapters.

    Args:
        state: state of a step over `{"base": ..., "lora": ...}`, with the model frozen.

    Raises:
        ValueError: the parameters are another tree.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import shardfn as sf
        >>> params = {"w": torch.ones(4, 3)}
        >>> lora = sf.lora.LoRA.of(params, ["w"], rank=2)
        >>> loss = lora.adapt(lambda p, x: (x @ p["w"].t()).square().mean())
        >>> step = sf.sharded_step(loss, sf.optim.adamw(1e-3), trainable=lora.trainable)
        >>> state, _ = step(step.init({"base": params, "lora": lora.init(sf.key(0))}), torch.ones(2, 3))
        >>> directory = tempfile.mkdtemp()
        >>> _ = sf.checkpoint.save(directory, without_base(state), step=1)
        >>> fresh = step.init({"base": params, "lora": lora.init(sf.key(0))})
        >>> kept = sf.checkpoint.restore(directory, without_base(fresh)).tree
        >>> state = with_base(kept, fresh.params["base"])
        >>> int(state.step), sorted(state.params)
        (1, ['base', 'lora'])
    """
    if not isinstance(state.params, dict) or state.params.keys() != {"base", "lora"}:
        raise ValueError("without_base(state): its parameters are not {'base': ..., 'lora': ...}, as LoRA.adapt takes.")
    return state._replace(params={"lora": state.params["lora"]})


def with_base(state: TrainState, base: core.PyTree) -> TrainState:
    """Returns a state to train on, from a restored part and the model's leaves of a fresh state.

    Args:
        state: restored part of a state.
        base: `params["base"]` of the state that `step.init` made from the model's files.
    """
    return state._replace(params={"base": base, **state.params})


# Keywords of peft, and the names here.
_MEANT = {
    "codes": "quantization={value!r}",
    "load_in_4bit": 'quantization="int4"',
    "load_in_8bit": 'quantization="int8"',
    "r": "rank={value!r}",
    "lora_rank": "rank={value!r}",
    "lora_alpha": "alpha={value!r}",
    "lora_dropout": "dropout={value!r}",
    "target_modules": "targets={value!r}, regular expressions for paths of leaves",
    "use_rslora": "rslora={value!r}",
    "use_dora": "dora={value!r}",
    "layers_to_transform": "the numbers of layers in targets, as in r'layers\\.(0|1)\\..*q_proj'",
    "bias": "modules_to_save=, regular expressions for the biases that are trained",
    "task_type": "nothing: an adapter does not depend on the task",
}


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Adapters of some leaves of a model. An immutable value, made by `LoRA.of`.

    Attributes:
        rank: r, unless a pattern names another rank.
        alpha: numerator of the scale: alpha / r, or alpha / sqrt(r) with `rslora`.
        rslora: see `alpha`.
        fan_in_fan_out: whether weights are `[..., in, out]`, such as the weights of GPT-2 in `transformers`.
        sites: leaves by path.
        base_specs: the specs of the model's parameters.
        dora: whether the norms of the sum's rows are trained (DoRA).
        dropout: the probability with which an input of an adapter is dropped.
        quantization: quantization of the weights with an adapter, such as "int8". None: not quantized.

    Example:
        >>> import shardfn as sf
        >>> params = {"wq": torch.ones(4, 3), "wk": torch.ones(4, 3)}
        >>> lora = LoRA.of(params, ["wq"], rank=2)
        >>> adapters = lora.init(sf.key(0))
        >>> {path: tuple(ab["a"].shape) for path, ab in adapters.items()}
        {'wq': (2, 3)}
        >>> def loss(p, x):
        ...     return (x @ p["wq"].t() - x @ p["wk"].t()).square().mean()
        >>> step = sf.sharded_step(lora.adapt(loss), sf.optim.adamw(1e-3), trainable=lora.trainable)
        >>> state = step.init({"base": params, "lora": adapters})
        >>> state, metrics = step(state, torch.ones(2, 3))
        >>> float(metrics["loss"])
        0.0

    References:
        Hu et al., LoRA, 2021, https://arxiv.org/abs/2106.09685. Kalajdzievski, A Rank Stabilization Scaling Factor for
        Fine-Tuning with LoRA, 2023, https://arxiv.org/abs/2312.03732. Liu et al., DoRA, 2024,
        https://arxiv.org/abs/2402.09353. Dettmers et al., QLoRA, 2023, https://arxiv.org/abs/2305.14314
    """

    rank: int
    alpha: float
    rslora: bool
    fan_in_fan_out: bool
    sites: Mapping[str, Site]
    base_specs: core.PyTree
    dora: bool = False
    dropout: float = 0.0
    quantization: core.Quantization | None = None

    @staticmethod
    @core.explains_keywords(**_MEANT)
    def of(
        params: core.PyTree,
        targets: Sequence[str],
        *,
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        fan_in_fan_out: bool = False,
        specs: core.PyTree = core.P(),
        rank_pattern: Mapping[str, int] = MappingProxyType({}),
        alpha_pattern: Mapping[str, float] = MappingProxyType({}),
        modules_to_save: Sequence[str] = (),
        dora: bool = False,
        dropout: float = 0.0,
        quantization: core.Quantization | None = None,
    ) -> "LoRA":
        """Returns adapters for the leaves with a matching path.

        Args:
            params: the model's parameters, or anything of their shapes.
            targets: regular expressions, such as "attn" or "q_proj". A leaf has an adapter if an expression is found
                (`re.search`) in the path, with keys joined by dots.
            rank: r.
            alpha: default r, so that the scale is 1.
            rslora: whether the scale is alpha / sqrt(r), so that it suits large ranks.
            fan_in_fan_out: whether weights are `[..., in, out]`.
            specs: the specs of the model's parameters, or a prefix of their tree.
            rank_pattern: ranks of single leaves, by regular expressions for the end of a module's path, as in `peft`.
                The first matching pattern counts.
            alpha_pattern: alphas of single leaves, in the form of `rank_pattern`.
            modules_to_save: regular expressions found in the paths of leaves that are trained whole: a copy of each is
                among the adapters.
            dora: whether each row of the sum `w + scale * (b @ a)` is scaled to a norm that is trained (DoRA). Products
                then compute the sum, as large as the weight.
            dropout: probability in [0, 1). Not possible with stacked layers or with `dora`.
            quantization: "int8" or "int4" quantizes the weights with an adapter, to 34 or 20 bytes for 32 elements.
                `step.init` quantizes, and a step decodes each weight at each use.

        Raises:
            ValueError: a target matches no leaf, or a leaf that is not a floating weight of two dims or more, or a leaf
                with a side below r. Or a pattern matches no target, or options exclude each other. The message lists
                all problems.
        """
        cuts = core.broadcast_prefix(
            specs, params, lambda x: isinstance(x, core.P | core.Sharding), names=("specs", "params")
        )
        paths = [".".join(map(str, e)) for e in core.tree_entries(params)]
        default = float(rank if alpha is None else alpha)
        problems = [] if rank >= 1 else [f"rank={rank} is not 1 or more"]
        problems += [
            f"the target {t!r} is found in no path"
            for t in (*targets, *modules_to_save)
            if not any(re.search(t, p) for p in paths)
        ]
        sites = {}
        for path, entry, x, spec in zip(
            paths, core.tree_entries(params), core.tree_flatten(params)[0], cuts, strict=True
        ):
            low, full = (any(re.search(t, path) for t in found) for found in (targets, modules_to_save))
            if not low and not full:
                continue
            cut = spec if isinstance(spec, core.Sharding) else core.Sharding(spec)
            own = of_pattern(rank_pattern, path, rank), float(of_pattern(alpha_pattern, path, default))
            sites[path] = Site(entry, tuple(x.shape), cut.spec, cut.stacked, *((0, 0.0) if full else own), full)
            problems += [f"{path} is a target, and in modules_to_save; leave it out of one"] if low and full else []
            problems += [] if full else _find_unsuited(path, x, own[0])
        thin = [path for path, site in sites.items() if not site.full]
        for name, patterns in (("rank_pattern", rank_pattern), ("alpha_pattern", alpha_pattern)):
            problems += [f"{name}[{p!r}] fits no target" for p in unused(patterns, thin)]
        if dropout and (dora or any(len(sites[path].shape) > 2 for path in thin)):
            other = "dora=True" if dora else "stacked layers (from_module without layers= gives single ones)"
            problems.append(f"dropout={dropout} is not there with {other}; leave one out")
        if not 0 <= dropout < 1:
            problems.append(f"dropout={dropout} is not in [0, 1)")
        if quantization is not None:
            coded = [
                dataclasses.replace(
                    cut if isinstance(cut, core.Sharding) else core.Sharding(cut), quantization=quantization
                )
                if p in thin
                else cut
                for p, cut in zip(paths, cuts, strict=True)
            ]
            specs = core.tree_unflatten(core.tree_flatten(params)[1], coded)
        if problems:
            some = f" Paths are such as {', '.join(paths[:3])}." if paths else ""
            raise ValueError("\n  - ".join([f"these adapters cannot be made.{some}", *problems]))
        return LoRA(rank, default, rslora, fan_in_fan_out, sites, specs, dora, dropout, quantization)

    def __repr__(self) -> str:
        kinds = dict[tuple[str, tuple[int, ...], int, float, bool], int]()
        for path, site in self.sites.items():
            kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", path), site.shape, site.rank, site.alpha, site.full
            kinds[kind] = kinds.get(kind, 0) + 1
        num = sum(math.prod(shape) for shapes in self.shapes.values() for shape in shapes.values())
        plain = {"rslora": False, "fan_in_fan_out": False, "dora": False, "dropout": 0.0, "quantization": None}
        more = [f"{name}={getattr(self, name)!r}" for name, usual in plain.items() if getattr(self, name) != usual]
        lines = [f"{', '.join([f'rank={self.rank}', f'alpha={self.alpha:g}', *more])}: {num:,} trained parameters"]
        for (path, shape, rank, alpha, full), count in kinds.items():
            own = "trained whole" if full else f"rank {rank}, alpha {alpha:g}"
            lines.append(f"  {count} x {path} {shape}: {own}")
        return "\n".join([f"LoRA({lines[0]}", *lines[1:]]) + ")"

    @property
    def scale(self) -> float:
        """Returns the factor of `b @ a`, unless a pattern names another rank or alpha."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def scale_of(self, path: str) -> float:
        """Returns the factor of `b @ a` for a leaf."""
        site = self.sites[path]
        return site.alpha / (math.sqrt(site.rank) if self.rslora else site.rank)

    @property
    def trainable(self) -> core.PyTree:
        """Returns the mask for `sharded_step`: only adapters are trained."""
        return {"base": False, "lora": True}

    @property
    def specs(self) -> core.PyTree:
        """Returns the specs for `sharded_step`: adapters are cut like the leaves, except along the rank."""
        return {"base": self.base_specs, "lora": {path: self._cut_site(site) for path, site in self.sites.items()}}

    @property
    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Returns by path the shapes of a and b (and m with `dora`), or the shape of a whole copy."""
        out: dict[str, dict[str, tuple[int, ...]]] = {}
        for path, site in self.sites.items():
            if site.full:
                out[path] = {"full": site.shape}
                continue
            *stack, rows, columns = site.shape
            fan_out, fan_in = (columns, rows) if self.fan_in_fan_out else (rows, columns)
            out[path] = {"a": (*stack, site.rank, fan_in), "b": (*stack, fan_out, site.rank)}
            out[path] |= {"m": (*stack, fan_out)} if self.dora else {}
        return out

    def init(
        self, key: Int64[Tensor, "2"], *, dtype: torch.dtype = torch.float32, params: core.PyTree = None
    ) -> dict[str, dict[str, Tensor]]:
        """Draws first values: `a` uniform in +-1 / sqrt(in), `b` zero, so that the model's outputs are unchanged.

        Args:
            key: key of the draws. Adapter i, in order, uses `fold_in(key, i)`.
            dtype: dtype of the adapters.
            params: the model's parameters, the same on all ranks. Needed for `dora`, where `m` are the norms of rows,
                and for leaves that are trained whole.

        Raises:
            ValueError: `params` are needed and missing.
        """
        if params is None and (self.dora or any(site.full for site in self.sites.values())):
            raise ValueError("lora.init(key): dora and modules_to_save start from the model's values. Pass params=.")
        at = {} if params is None else dict(zip(core.tree_entries(params), core.tree_flatten(params)[0], strict=True))
        out: dict[str, dict[str, Tensor]] = {}
        for i, (path, shapes) in enumerate(self.shapes.items()):
            if self.sites[path].full:
                out[path] = {"full": _initial_value(at[self.sites[path].entries]).to(dtype).clone()}
                continue
            bound = 1 / math.sqrt(shapes["a"][-1])
            a = core.uniform(core.fold_in(key, i), shapes["a"], dtype=dtype, minval=-bound, maxval=bound)
            out[path] = {"a": a, "b": core.zeros(shapes["b"], dtype=dtype, device=key.device)}
            if self.dora:
                w = _initial_value(at[self.sites[path].entries]).to(dtype)
                w = core.load(encode(w, core.Placement(dtype=w.dtype, quantization=self.quantization)))
                out[path]["m"] = torch.linalg.vector_norm(w, dim=-2 if self.fan_in_fan_out else -1)
        return out

    def apply(
        self, params: core.PyTree, adapters: core.PyTree, key: Tensor | None = None, index_B: Tensor | None = None
    ) -> core.PyTree:
        """Returns parameters for a model, with `LowRankWeight`s at leaves with an adapter. For use inside a loss.

        Args:
            params: parameters of the model.
            adapters: adapters from `init`.
            key: key of this step, for dropout. None: no dropout.
            index_B: the global number of each row, for dropout.

        Raises:
            ValueError: the adapters belong to other leaves.
        """
        self._check_adapters(adapters)
        (leaves, treedef), at = core.tree_flatten(params), {e: i for i, e in enumerate(core.tree_entries(params))}
        _warn_of_trained([path for path, site in self.sites.items() if leaves[at[site.entries]].requires_grad])
        for number, (path, site) in enumerate(self.sites.items()):
            i = at[site.entries]
            w, own = leaves[i], adapters[path]
            if site.full:
                leaves[i] = own["full"] if own["full"].dtype == w.dtype else own["full"].to(w.dtype)
                continue
            leaves[i] = self._low_rank_weight(w, own, path)
            if self.dropout and key is not None:
                leaves[i].drop = _make_dropout(self.dropout, core.fold_in(key, number), index_B)
        return core.tree_unflatten(treedef, leaves)

    def adapt(self, f: Callable[..., Any], index: Callable[[Any], Tensor] | None = None) -> Callable[..., Any]:
        """Turns `f(params, ...)` into a function of `{"base": params, "lora": adapters}`.

        A step of this function trains only the adapters, unless `sharded_step(trainable=)` names other leaves. With
        dropout the result is a function of `(tree, batch, key, ...)`, for `sharded_step(key=)`. `f` does not get the
        key. Masks depend only on the key and on the number of each row, so masks are equal on any number of ranks.
        `step.evaluate` drops nothing. Elsewhere use `dataclasses.replace(lora, dropout=0.0).adapt(f)`.

        Args:
            f: `f(params, batch, ...)`.
            index: function from a batch to the global numbers of the rows. Default: `batch["index"]`.

        Raises:
            ValueError: `f` is a result of `jit`, `accumulate` or another transform. Apply these after `adapt`.
        """
        if isinstance(f, Transform):
            raise ValueError(
                f"adapt({f.transform}(f)): it adapts a function of parameters. Write {f.transform}(adapt(f))."
            )

        def adapted_loss(tree: core.PyTree, *rest: Any, **named: Any) -> Any:
            return f(self.apply(tree["base"], tree["lora"]), *rest, **named)

        def dropout_loss(tree: core.PyTree, batch: core.PyTree, key: Tensor, *rest: Any, **named: Any) -> Any:
            return f(self.apply(tree["base"], tree["lora"], key, _example_numbers(batch, index)), batch, *rest, **named)

        loss: Any = dropout_loss if self.dropout else adapted_loss
        loss.trains = self.trainable
        return loss

    def merge(self, params: core.PyTree, adapters: core.PyTree) -> core.PyTree:
        """Returns the model's parameters with the adapters added, as whole tensors of the leaves' dtypes.

        Sums are computed in float32 at least, and rounded once to the dtype of the leaf.

        Raises:
            ValueError: the adapters belong to other leaves.
        """
        self._check_adapters(adapters)
        (leaves, treedef), at = core.tree_flatten(params), {e: i for i, e in enumerate(core.tree_entries(params))}
        for path, site in self.sites.items():
            i = at[site.entries]
            leaves[i] = self.merge_leaf(path, leaves[i], adapters[path])
        return core.tree_unflatten(treedef, leaves)

    @torch.no_grad()
    def merge_leaf(self, path: str, leaf: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        """Returns one leaf with the adapter added, as `merge` does for all leaves.

        Args:
            path: path of the leaf, a key of `sites`.
            leaf: the model's value, whole.
            adapter: the leaf's entry of the adapters, whole.
        """
        if self.sites[path].full:
            return adapter["full"].to(leaf.dtype)
        wide = leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
        return self._low_rank_weight(wide, adapter, path).whole().to(leaf.dtype)

    def _check_adapters(self, adapters: core.PyTree) -> None:
        if adapters.keys() != self.sites.keys():
            raise ValueError(
                f"adapters must be of {sorted(self.sites)}, got {sorted(adapters)}. Make LoRA and adapters by the same"
                " LoRA.of."
            )

    def _cut_site(self, site: Site) -> dict[str, core.P | core.Sharding]:
        *stack, out, into = self._dim_axes(site) if len(site.shape) > 1 else (None, None)
        cuts: dict[str, core.P] = {"a": core.P(*stack, None, into), "b": core.P(*stack, out, None)}
        cuts = {"full": site.spec} if site.full else cuts | ({"m": core.P(*stack, out)} if self.dora else {})
        return {name: core.Sharding(cut, stacked=True) if site.stacked else cut for name, cut in cuts.items()}

    def _dim_axes(self, site: Site) -> list[Any]:
        """Returns the axes that cut each dim: stacked dims first, then out and in."""
        axes: list[Any] = [tuple(site.spec.dim_axes(d)) or None for d in range(len(site.shape))]
        return [*axes[:-2], axes[-1], axes[-2]] if self.fan_in_fan_out else axes

    def _low_rank_weight(self, w: Tensor, adapter: Mapping[str, Tensor], path: str) -> LowRankWeight:
        *_, out, into = self._dim_axes(self.sites[path])
        # Where the leaf is cut, ranks use the uncut part of the adapter differently, so the part becomes varying.
        a = pvary(adapter["a"], out) if out else adapter["a"]
        b = pvary(adapter["b"], into) if into else adapter["b"]
        # Only if necessary: a cast would gather a lazy leaf here.
        a, b = (x if x.dtype == w.dtype else x.to(w.dtype) for x in (a, b))
        left, right = (a.mT, b.mT) if self.fan_in_fan_out else (b, a)
        scale = self.scale_of(path)
        if not self.dora:
            return LowRankWeight.of(w, left, right, scale)
        m = pvary(adapter["m"], into) if into else adapter["m"]
        factor = m.to(w.dtype) / self._row_norms(w, left, right, scale, into)
        if self.fan_in_fan_out:
            return LowRankWeight.of(w * factor.unsqueeze(-2), left, right * factor.unsqueeze(-2), scale)
        return LowRankWeight.of(w * factor.unsqueeze(-1), left * factor.unsqueeze(-1), right, scale)

    @torch.no_grad()
    def _row_norms(self, w: Tensor, left: Tensor, right: Tensor, scale: float, into: Any) -> Tensor:
        """Returns the norms of the sum's rows as constants, as in DoRA's paper (section 4.3) and `peft`."""
        whole = w + scale * (left @ right)
        wide = whole if whole.dtype.itemsize >= 4 else whole.float()
        squares = wide.square().sum(-2 if self.fan_in_fan_out else -1)
        return (psum(squares, into) if into else squares).sqrt().to(w.dtype)


def _find_unsuited(path: str, x: Any, rank: int) -> list[str]:
    shape = tuple(x.shape)
    if len(shape) < 2 or not x.dtype.is_floating_point:
        return [f"{path} {shape} of {x.dtype} is not a weight of two dims or more"]
    return [f"{path} {shape} has a smaller side than rank={rank}"] if rank > min(shape[-2:]) else []


def _initial_value(x: Any) -> Tensor:
    return x.full() if isinstance(x, core.Draw) else x.detach()


def _example_numbers(batch: core.PyTree, index: Callable[[Any], Tensor] | None) -> Tensor:
    if index is not None:
        return index(batch)
    if isinstance(batch, Mapping) and "index" in batch:
        return batch["index"]
    raise ValueError(
        "adapt(f) with dropout needs the global number of each row: batch['index'], as sf.data.Batches has it, or"
        " adapt(f, index=lambda batch: ...)."
    )


def _make_dropout(rate: float, key: Tensor, index_B: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Returns the dropout of an adapter's input.

    Rows may be merged with later dims, for example [B, T, n] as [B T, n].
    """
    if index_B is None:
        raise ValueError("lora.apply(key=) needs index_B, the global number of each row.")

    def drop_rows(x: Tensor) -> Tensor:
        rows = index_B.shape[0]
        if x.shape[0] % max(rows, 1):
            raise ValueError(
                f"dropout: an adapter's input is {tuple(x.shape)}, but the {rows} rows of the batch must be in its"
                " dim 0. Leave that leaf out of the targets, or dropout out."
            )
        return dropout(key, x.reshape(rows, x.numel() // max(rows, 1)), rate, index_B).reshape(x.shape)

    return drop_rows


def _warn_of_trained(paths: Sequence[str]) -> None:
    if paths and torch.is_grad_enabled():
        warnings.warn(
            f"LoRA trains only adapters, but {len(paths)} weights that have one get a gradient, too, such as"
            f" {paths[0]}: the base would be trained, and has an optimizer state. Pass trainable=lora.trainable to"
            " sharded_step, or a loss of lora.adapt without trainable=.",
            stacklevel=3,
        )
