"""LoRA as trees: the leaves that have adapters, their first values and specs, and a loss that uses both.

    {"base": the model's parameters, "lora": {path: {"a": [..., r, in], "b": [..., out, r]}}}

A leaf `[..., out, in]` becomes `w + scale * (b @ a)`, a sum that products do not form: they use the thin factors.
Leading dims stack layers.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn.collectives import pvary
from shardfn.core import (
    P,
    PyTree,
    Sharding,
    broadcast_prefix,
    fold_in,
    tree_entries,
    tree_flatten,
    tree_unflatten,
    uniform,
    zeros,
)
from shardfn.engine import Transform

from ._weight import LowRankWeight


@dataclasses.dataclass(frozen=True)
class Site:
    """A leaf that has an adapter.

    Attributes:
        entries: the keys of its path.
        shape: its global shape.
        spec: how it is cut.
        stacked: whether its layers are gathered one at a time (`Sharding`).
    """

    entries: tuple[Any, ...]
    shape: tuple[int, ...]
    spec: P
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Adapters of some leaves of a model; a value, made by `LoRA.of`.

    Attributes:
        rank: r.
        alpha: the scale is alpha / r, or alpha / sqrt(r) with `rslora`.
        rslora: see `alpha`.
        fan_in_fan_out: whether weights are `[..., in, out]`, as GPT-2's of `transformers`.
        sites: by path, the leaves.
        base_specs: the specs of the model's parameters.

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
        Fine-Tuning with LoRA, 2023, https://arxiv.org/abs/2312.03732
    """

    rank: int
    alpha: float
    rslora: bool
    fan_in_fan_out: bool
    sites: Mapping[str, Site]
    base_specs: PyTree

    @staticmethod
    def of(
        params: PyTree,
        targets: Sequence[str],
        *,
        rank: int = 8,
        alpha: float | None = None,
        rslora: bool = False,
        fan_in_fan_out: bool = False,
        specs: PyTree = P(),
    ) -> "LoRA":
        """Adapters of the leaves whose path fits.

        Args:
            params: the model's parameters, or anything of their shapes.
            targets: regular expressions; a leaf has an adapter if one is found (`re.search`) in its path, keys joined
                by dots.
            rank: r.
            alpha: default r, so that the scale is 1.
            rslora: whether the scale is alpha / sqrt(r), so that it suits large ranks.
            fan_in_fan_out: whether weights are `[..., in, out]`.
            specs: the specs of the model's parameters, or a prefix of their tree.

        Raises:
            ValueError: a target fits no leaf, or one that is not a floating weight of two dims or more, or whose
                smaller side is under r; lists all.
        """
        leaves, entries = tree_flatten(params)[0], tree_entries(params)
        cuts = broadcast_prefix(specs, params, lambda x: isinstance(x, P | Sharding), names=("specs", "params"))
        paths = [".".join(map(str, e)) for e in entries]
        problems = [] if rank >= 1 else [f"rank={rank} is not 1 or more"]
        problems += [
            f"the target {t!r} is found in no path" for t in targets if not any(re.search(t, p) for p in paths)
        ]
        sites = {}
        for path, entry, x, spec in zip(paths, entries, leaves, cuts, strict=True):
            if any(re.search(t, path) for t in targets):
                shape = tuple(x.shape)
                if len(shape) < 2 or not x.dtype.is_floating_point:
                    problems.append(f"{path} {shape} of {x.dtype} is no weight of two dims or more")
                elif rank > min(shape[-2:]):
                    problems.append(f"{path} {shape} has a smaller side than rank={rank}")
                cut = spec if isinstance(spec, Sharding) else Sharding(spec)
                sites[path] = Site(entry, shape, cut.spec, cut.stacked)
        if problems:
            some = f" Paths are such as {', '.join(paths[:3])}." if paths else ""
            raise ValueError("\n  - ".join([f"these adapters cannot be made.{some}", *problems]))
        return LoRA(rank, float(rank if alpha is None else alpha), rslora, fan_in_fan_out, sites, specs)

    @property
    def scale(self) -> float:
        """The factor of `b @ a`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def trainable(self) -> PyTree:
        """For `sharded_step`: adapters alone."""
        return {"base": False, "lora": True}

    @property
    def specs(self) -> PyTree:
        """For `sharded_step`: adapters are cut where their leaves are; their rank never is."""
        return {"base": self.base_specs, "lora": {path: self._cuts(site) for path, site in self.sites.items()}}

    @property
    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """By path, the shapes of a and b."""
        out = {}
        for path, site in self.sites.items():
            *stack, rows, columns = site.shape
            fan_out, fan_in = (columns, rows) if self.fan_in_fan_out else (rows, columns)
            out[path] = {"a": (*stack, self.rank, fan_in), "b": (*stack, fan_out, self.rank)}
        return out

    def init(self, key: Int64[Tensor, "2"], *, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Tensor]]:
        """First values: `a` uniform in +-1 / sqrt(in), `b` zero, so that the model's outputs are unchanged.

        Args:
            key: adapter i, in order, is drawn with `fold_in(key, i)`.
            dtype: of the adapters.
        """
        out = {}
        for i, (path, shapes) in enumerate(self.shapes.items()):
            bound = 1 / math.sqrt(shapes["a"][-1])
            a = uniform(fold_in(key, i), shapes["a"], dtype=dtype, minval=-bound, maxval=bound)
            out[path] = {"a": a, "b": zeros(shapes["b"], dtype=dtype, device=key.device)}
        return out

    def apply(self, params: PyTree, adapters: PyTree) -> PyTree:
        """The parameters as a model takes them: leaves with an adapter are `LowRankWeight`s. For use inside a loss.

        Args:
            params: the model's.
            adapters: as `init` makes them.

        Raises:
            ValueError: they are not those of this value's leaves.
        """
        if adapters.keys() != self.sites.keys():
            raise ValueError(
                f"adapters are of {sorted(adapters)}, and the leaves with one are {sorted(self.sites)}; make both by"
                " one LoRA."
            )
        (leaves, treedef), at = tree_flatten(params), {e: i for i, e in enumerate(tree_entries(params))}
        for path, site in self.sites.items():
            i = at[site.entries]
            leaves[i] = self._weight(leaves[i], adapters[path], site)
        return tree_unflatten(treedef, leaves)

    def adapt(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f(params, ...)` as a function of `{"base": params, "lora": adapters}`.

        Raises:
            ValueError: `f` is jitted, accumulated or another transform's; these go around.
        """
        if isinstance(f, Transform):
            raise ValueError(
                f"adapt({f.transform}(f)): what it adapts is a function of parameters; write {f.transform}(adapt(f))."
            )

        def adapted(tree: PyTree, *rest: Any, **named: Any) -> Any:
            return f(self.apply(tree["base"], tree["lora"]), *rest, **named)

        return adapted

    @torch.no_grad()
    def merge(self, params: PyTree, adapters: PyTree) -> PyTree:
        """The model's parameters with the adapters added, as whole tensors of the leaves' dtypes."""
        merged = self.apply(params, adapters)
        return tree_unflatten(*_merged(merged))

    def _cuts(self, site: Site) -> dict[str, P | Sharding]:
        *stack, out, into = self._axes(site)
        cuts = {"a": P(*stack, None, into), "b": P(*stack, out, None)}
        return {k: Sharding(cut, stacked=True) for k, cut in cuts.items()} if site.stacked else cuts  # pyright: ignore

    def _axes(self, site: Site) -> list[Any]:
        """The axes that cut each dim: stacked dims first, then out and in."""
        axes: list[Any] = [tuple(site.spec.dim_axes(d)) or None for d in range(len(site.shape))]
        return [*axes[:-2], axes[-1], axes[-2]] if self.fan_in_fan_out else axes

    def _weight(self, w: Tensor, adapter: Mapping[str, Tensor], site: Site) -> LowRankWeight:
        *_, out, into = self._axes(site)
        # Where the leaf is cut, ranks use the uncut part of its adapter differently, so it becomes varying.
        a = pvary(adapter["a"], out) if out else adapter["a"]
        b = pvary(adapter["b"], into) if into else adapter["b"]
        # Only if necessary: a cast would gather a lazy leaf here.
        a, b = (x if x.dtype == w.dtype else x.to(w.dtype) for x in (a, b))
        left, right = (a.mT, b.mT) if self.fan_in_fan_out else (b, a)
        return LowRankWeight.of(w, left, right, self.scale)


def _merged(tree: PyTree) -> tuple[Any, list[Any]]:
    leaves, treedef = tree_flatten(tree, is_leaf=lambda x: type(x) is LowRankWeight)
    return treedef, [x.whole() if type(x) is LowRankWeight else x for x in leaves]
