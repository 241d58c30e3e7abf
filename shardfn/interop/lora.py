"""Low-rank adapters as a transform of a tree: W + scale B A beside every weight W that a pattern names.

The factors lie next to their weight in the tree, `wq_lora_a` and `wq_lora_b` beside `wq`; so a whole tree is merged by
the same function as one block of it, and checkpoints, specs and steps need to know nothing of them.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, https://arxiv.org/abs/2106.09685
Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023, https://arxiv.org/abs/2312.03732
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn.core import Sharding, fold_in, raise_all, uniform

from ._archive import Archive, ArchiveWriter
from ._gathered_leaf import is_writer, whole

_A, _B = "_lora_a", "_lora_b"


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Which weights get adapters, and which.

    Attributes:
        rank: r.
        alpha: the product is scaled by alpha / r.
        targets: patterns; weights in whose path (`blocks.0.wq`, a module's `layers.0.q_proj.weight`) `re.search` finds
            one get adapters.
        rslora: whether the scale is alpha / sqrt(r).

    Raises:
        ValueError: a rank below 1, or no pattern.

    Example:
        >>> Adapters(rank=4, alpha=8.0, targets=["wq"]).scale
        2.0
    """

    rank: int
    alpha: float
    targets: Sequence[str]
    rslora: bool = False

    def __post_init__(self) -> None:
        bad = [f"rank={self.rank} must be at least 1."] if self.rank < 1 else []
        bad += ["targets is empty; name weights, as in targets=['wq', 'wv']."] if not self.targets else []
        bad += ["targets is a string; give a list of patterns."] if isinstance(self.targets, str) else []
        raise_all(ValueError, "Adapters:", bad)

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def init(adapters: Adapters, params: Any, key: Int64[Tensor, "2"]) -> Any:
    """Two factors beside each target: A [..., r, in], uniform in +-1 / sqrt(in), and B [..., out, r], zero.

    So the merged weights are the old ones at first. Leading dims are layers of a stack. Base leaves may be deferred.

    Args:
        adapters: which weights.
        params: a tree of dicts and lists.
        key: factor A of target i is drawn with `fold_in(key, i)`.

    Raises:
        ValueError: a pattern names no leaf, or one that is no matrix; lists all.

    Example:
        >>> from shardfn.core import key
        >>> tree = init(Adapters(2, 4.0, ["w"]), {"w": torch.ones(3, 5)}, key(0))
        >>> {name: tuple(x.shape) for name, x in tree.items()}
        {'w': (3, 5), 'w_lora_a': (2, 5), 'w_lora_b': (3, 2)}
    """
    paths = [path for path, _ in _named(params)]
    unused = [
        f"{t!r} names no leaf of {paths[:4]} ..." for t in adapters.targets if not any(re.search(t, p) for p in paths)
    ]
    small = [f"{p} is {tuple(x.shape)}" for p, x in _named(params) if _is_target(adapters, p) and x.ndim < 2]
    raise_all(ValueError, "lora.init: targets are matrices, [out, in]:", unused + small)
    numbers = {path: i for i, path in enumerate(p for p in paths if _is_target(adapters, p))}

    def pair(path: str, w: Tensor) -> dict[str, Tensor]:
        *lead, rows, columns = w.shape
        bound, drawn_as = 1 / math.sqrt(columns), fold_in(key, numbers[path])
        a = uniform(drawn_as, (*lead, adapters.rank, columns), minval=-bound, maxval=bound, dtype=w.dtype)
        return {_A: a, _B: torch.zeros(*lead, rows, adapters.rank, dtype=w.dtype)}

    return _beside(params, lambda path, w: pair(path, w) if path in numbers else {})


def merged(adapters: Adapters, params: Any) -> Any:
    """The tree without factors, each target W replaced by W + scale B A. Of a tree, or of any dict in it.

    Example:
        >>> one = torch.ones(1, 1)
        >>> merged(Adapters(1, 3.0, ["w"]), {"w": one, "w_lora_a": one, "w_lora_b": one})
        {'w': tensor([[4.]])}
    """
    if isinstance(params, list):
        return [merged(adapters, x) for x in params]
    if not isinstance(params, Mapping):
        return params
    out = {}
    for name, x in params.items():
        if str(name).endswith((_A, _B)):
            continue
        if f"{name}{_A}" in params:
            x = x + adapters.scale * (params[f"{name}{_B}"] @ params[f"{name}{_A}"])
        out[name] = merged(adapters, x)
    return out


def merging(adapters: Adapters) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """From `f(params, ...)` to the same with merged parameters: of a loss, or as `wrap=` of a model's blocks.

    Around each block, weights of one block are merged at a time; around a loss, those of all.

    Example:
        >>> f = merging(Adapters(1, 1.0, ["w"]))(lambda p, x: p["w"] * x)
        >>> f({"w": torch.ones(1, 1)}, 2.0)
        tensor([[2.]])
    """

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def wrapped(params: Any, *args: Any, **kwargs: Any) -> Any:
            return inner(merged(adapters, params), *args, **kwargs)

        return wrapped

    return wrap


def trainable(params: Any) -> Any:
    """The tree of bools for `sharded_step(trainable=)`: factors learn, nothing else does.

    Example:
        >>> trainable({"w": 0, "w_lora_a": 1, "w_lora_b": 2})
        {'w': False, 'w_lora_a': True, 'w_lora_b': True}
    """
    if isinstance(params, list):
        return [trainable(x) for x in params]
    return {k: trainable(x) if isinstance(x, Mapping | list) else str(k).endswith((_A, _B)) for k, x in params.items()}


def specs(adapters: Adapters, params: Any, specs: Any) -> Any:
    """The compute layout of the tree with factors: they are whole, and stacked where their weight is.

    Args:
        adapters: which weights.
        params: the tree without factors.
        specs: its layout, leaf by leaf.

    Raises:
        ValueError: a target is cut by its spec: adapters of tensor-parallel weights are not there yet; lists all.

    Example:
        >>> specs(Adapters(1, 1.0, ["w"]), {"w": torch.ones(2, 2)}, {"w": P()})
        {'w': P(), 'w_lora_a': P(), 'w_lora_b': P()}
    """
    found = dict(_named(specs))
    plain = {path: s.spec if isinstance(s, Sharding) else s for path, s in found.items()}
    cut = [
        f"{p} has spec {s!r}"
        for p, s in plain.items()
        if _is_target(adapters, p) and any(s.dim_axes(d) for d in range(len(s)))
    ]
    raise_all(ValueError, "lora.specs: adapters are for weights that are whole in the loss:", cut)
    del params
    return _beside(specs, lambda path, s: {_A: s, _B: s} if _is_target(adapters, path) else {})


def save_peft(directory: str | os.PathLike[str], adapters: Adapters, params: Mapping[str, Any]) -> None:
    """Writes adapters of a module (`from_module`) as peft's `adapter_config.json` and `adapter_model.safetensors`.

    Factors are gathered one after another; the first rank writes. Collective over their mesh.

    Args:
        directory: where to; made if missing.
        adapters: what they were made with.
        params: by the module's names, with factors.

    Raises:
        ValueError: a target is not called `....weight`; lists all.

    Example:
        >>> import tempfile
        >>> one, directory = torch.ones(1, 1), tempfile.mkdtemp()
        >>> a = Adapters(1, 3.0, ["w"])
        >>> save_peft(directory, a, {"q.weight": one, "q.weight_lora_a": one, "q.weight_lora_b": one})
        >>> sorted(Archive(directory, "adapter_model"))
        ['base_model.model.q.lora_A.weight', 'base_model.model.q.lora_B.weight']
    """
    names = {n: _peft_name(n) for n in params if n.endswith((_A, _B))}
    raise_all(
        ValueError, "save_peft: peft adapts modules' weights:", [f"{n} is none" for n, to in names.items() if not to]
    )
    entries = {to: (params[n].dtype, tuple(params[n].shape)) for n, to in names.items()}
    if not is_writer([params[n] for n in names]):
        for n in names:
            whole(params[n])
        return
    with ArchiveWriter(directory, entries, "adapter_model", file_bytes=1 << 62) as out:
        for n, to in names.items():
            out.put(to, whole(params[n]))
    modules = sorted({n.removesuffix(_A).removesuffix(".weight") for n in names if n.endswith(_A)})
    told = {"peft_type": "LORA", "r": adapters.rank, "lora_alpha": adapters.alpha, "use_rslora": adapters.rslora}
    told |= {"target_modules": modules, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False}
    (pathlib.Path(directory) / "adapter_config.json").write_text(json.dumps(told, indent=2) + "\n")


def load_peft(directory: str | os.PathLike[str], params: Mapping[str, Any]) -> tuple[Adapters, dict[str, Any]]:
    """Adapters of peft beside a module's parameters.

    Args:
        directory: has `adapter_config.json` and `adapter_model.safetensors`.
        params: by the module's names, as `from_module` or `module_from_hf` gives them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is no plain LoRA, or does not fit the parameters; lists all.

    Example:
        >>> import tempfile
        >>> one, directory = torch.ones(1, 1), tempfile.mkdtemp()
        >>> save_peft(directory, Adapters(1, 3.0, ["q"]), {"q.weight_lora_a": one, "q.weight_lora_b": one})
        >>> adapters, tree = load_peft(directory, {"q.weight": one})
        >>> adapters.alpha, sorted(tree)
        (3.0, ['q.weight', 'q.weight_lora_a', 'q.weight_lora_b'])
    """
    told: dict[str, Any] = json.loads((pathlib.Path(directory) / "adapter_config.json").read_text())
    plain = {"peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,)}
    plain |= {
        name: (None, {}, [], 0, 0.0) for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "lora_dropout")
    }
    problems = [
        f"{n}={told[n]!r} has no counterpart here" for n, may in plain.items() if n in told and told[n] not in may
    ]
    archive, out = Archive(directory, "adapter_model"), dict(params)
    for name in archive:
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        weight = f"{found[1]}.weight" if found else ""
        if found is None or weight not in params:
            problems.append(f"{name} belongs to no weight of the module")
            continue
        dim = 1 if found[2] == "A" else 0
        if archive[name].shape[dim] != params[weight].shape[dim]:
            problems.append(f"{name} is {archive[name].shape}, but {weight} is {tuple(params[weight].shape)}")
        out[weight + (_A if found[2] == "A" else _B)] = archive.box(name, [(0, n) for n in archive[name].shape])
    raise_all(ValueError, f"{directory} has adapters that do not fit:", problems)
    targets = [f"^{re.escape(n.removesuffix(_A))}$" for n in out if n.endswith(_A)]
    return Adapters(told["r"], told["lora_alpha"], targets, bool(told.get("use_rslora"))), out


def _peft_name(name: str) -> str:
    for end, letter in ((_A, "A"), (_B, "B")):
        if name.endswith(f".weight{end}"):
            return f"base_model.model.{name.removesuffix(f'.weight{end}')}.lora_{letter}.weight"
    return ""


def _is_target(adapters: Adapters, path: str) -> bool:
    return any(re.search(t, path) for t in adapters.targets)


def _named(tree: Any, at: str = "") -> list[tuple[str, Any]]:
    """Leaves by path, entries joined by dots, as modules name theirs."""
    if isinstance(tree, Mapping | list):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return [row for k, x in items for row in _named(x, f"{at}.{k}" if at else str(k))]
    return [(at, tree)]


def _beside(tree: Any, make: Callable[[str, Any], dict[str, Any]], at: str = "") -> Any:
    """The tree with what `make(path, leaf)` gives beside leaves of dicts, their names followed by its."""
    if isinstance(tree, list):
        return [_beside(x, make, f"{at}.{i}" if at else str(i)) for i, x in enumerate(tree)]
    out = {}
    for k, x in tree.items():
        path = f"{at}.{k}" if at else str(k)
        if isinstance(x, Mapping | list):
            out[k] = _beside(x, make, path)
        else:
            out |= {k: x} | {f"{k}{end}": y for end, y in make(path, x).items()}
    return out
