"""Experts of a trained state: left out by use, put next to another state's experts, or made of a dense model.

Pure functions of a tree: of parameters, of tensors or `GlobalTensor`s, or of a whole `TrainState` with moments and the
biases of routers. Leaves with experts are gathered one after another. `step.adopt` takes the result into a step of the
new config, on any mesh and at any ZeRO stage.

E experts, L layers with experts, D model, F ffn.

Kim et al., Scalable and Efficient MoE Training for Multitask Multilingual Models, 2021,
https://arxiv.org/abs/2109.10465 (Z-code)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from shardfn.collectives import GlobalTensor, psum, shard
from shardfn.core import Axes, P, PyTree, fold_in, normal, raise_all, tree_map
from shardfn.optim import MasterState
from shardfn.state import TrainState

from ._experts import Experts
from ._gpt_config import Config
from ._gpt_leaves import Params

_BIASES = {"bias", "counts"}
# Leaves of a dense MLP, and the leaves of experts that begin as copies.
_COPIES = {"w_up": "e_up", "b_up": "e_b_up", "w_down": "e_down", "b_down": "e_b_down"}


def count_choices(routes_BTmk: Int64[Tensor, "b t m k"], num_experts: Sequence[int], axes: Axes = None) -> list[Tensor]:
    """Returns how many choices each expert of each layer got, summed over the ranks of `axes`: a list of int64 [E].

    Args:
        routes_BTmk: experts of tokens, as from `gpt.choices`. -1 is a choice without an expert.
        num_experts: E of each of the m layers, `config.num_experts`.
        axes: axes of the batch.

    Example:
        >>> [x.tolist() for x in count_choices(torch.tensor([[[[0, 1], [2, 0]]]]), [2, 3])]
        [[1, 1], [1, 0, 1]]
    """
    routes = routes_BTmk.movedim(2, 0).flatten(1)
    found = [torch.bincount(x[x >= 0], minlength=num) for x, num in zip(routes, num_experts, strict=True)]
    return psum(found, axes)


def most_used(counts: Sequence[Tensor], num: int | Sequence[int]) -> list[list[int]]:
    """Returns the numbers of the most used experts of each layer, ascending, for `prune_experts`.

    Of experts that are used equally often, those with lower numbers come first.

    Args:
        counts: choices of each expert by layer, such as sums of `count_choices` over an evaluation.
        num: how many experts stay in a layer, or in each layer.

    Example:
        >>> most_used([torch.tensor([5, 0, 7, 2])], 2)
        [[0, 2]]
    """
    nums = [num] * len(counts) if isinstance(num, int) else num
    order = [torch.argsort(x, descending=True, stable=True).tolist() for x in counts]
    return [sorted(x[:n]) for x, n in zip(order, nums, strict=True)]


def prune_experts(config: Config, state: PyTree, kept: Sequence[Sequence[int]]) -> tuple[Config, Any]:
    """Returns a model with some of the experts of each layer, with their moments, rows of the router and biases.

    Logits keep their bits where no token chooses an expert that is left out, and the weights of a token's choices do
    not depend on other experts: renormalised weights, or `softmax="after"`.

    Args:
        config: shape, with experts.
        state: parameters as from `gpt.init`, or the state of a step over them.
        kept: numbers of the experts that stay, ascending, for each layer with experts, such as `most_used(counts, 8)`.

    Returns:
        The config, a pyramid where layers keep different numbers, and the tree. Leaves without experts are those of
        `state`.

    Raises:
        ValueError: lists the layers in which fewer experts stay than a token chooses, or with unknown or repeated
            numbers. Or a moment has another shape than its parameter, or layers are stacked and keep different numbers.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models import gpt, moe
        >>> config = moe.mixtral_like(vocab_size=64, num_layers=1, d_model=32, num_heads=8, d_ff=16)
        >>> small, params = prune_experts(config, gpt.init(config, core.key(0)), [[0, 2, 5]])
        >>> small.num_experts, params["blocks"][0]["router"].shape
        ([3], torch.Size([3, 32]))
    """
    experts = _get_experts("prune_experts", config)
    _check_kept(config, experts, kept)
    nums = tuple(len(x) for x in kept)
    num = nums[0] if isinstance(experts.num, int) and len(set(nums)) == 1 else nums
    made = dataclasses.replace(config, experts=dataclasses.replace(experts, num=num))

    def take(x: Tensor, layer: int) -> Tensor:
        return x.index_select(0, torch.tensor(kept[layer], device=x.device))

    def take_leaf(name: str, layers: Sequence[int], x: Any) -> Any:
        return x if not _is_of_experts(name) else _remake(functools.partial(_map_layers, config, take, layers), x)

    def take_biases(biases: Mapping[str, Any]) -> Any:
        return _map_biases(made, lambda i, x: take(x, i), biases)

    return made, _map_branches(config, take_leaf, take_biases, state)


def aggregate_experts(config: Config, state: PyTree, other_config: Config, other: PyTree) -> tuple[Config, Any]:
    """Returns a model with the experts of two models side by side, for further training.

    Experts, rows of the routers and biases are joined, with their moments. Other leaves and their moments are averaged.
    The step, keys and counters are those of `state`. Z-code joins checkpoints so, whose experts learnt other things.

    Args:
        config: shape of the first model, with experts.
        state: parameters as from `gpt.init`, or the state of a step over them.
        other_config: shape of the second model: equal but for the numbers of experts.
        other: as `state`, of the second model.

    Returns:
        The config, with the sums of the numbers of experts, and the tree. `top_k` is the first config's.

    Raises:
        ValueError: lists the fields of the two configs that differ, or a moment has another shape than its parameter.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models import gpt, moe
        >>> config = moe.mixtral_like(vocab_size=64, num_layers=1, d_model=32, num_heads=8, d_ff=16)
        >>> params = gpt.init(config, core.key(0))
        >>> large, _ = aggregate_experts(config, params, config, params)
        >>> large.num_experts
        [16]
    """
    experts, others = (_get_experts("aggregate_experts", c) for c in (config, other_config))
    _check_same(config, other_config)
    nums = tuple(a + b for a, b in zip(config.num_experts, other_config.num_experts, strict=True))
    alike = isinstance(experts.num, int) and isinstance(others.num, int)
    made = dataclasses.replace(config, experts=dataclasses.replace(experts, num=nums[0] if alike else nums))

    def join_leaf(name: str, layers: Sequence[int], x: Any, y: Any) -> Any:
        if _is_of_experts(name):
            return _remake(lambda a, b: torch.cat((a, b), int(config.stacked)), x, y)
        return _remake(lambda a, b: (a + b) / 2 if a.is_floating_point() else a, x, y)

    def join_biases(*biases: Mapping[str, Any]) -> Any:
        return _map_biases(made, lambda i, x, y: torch.cat((x, y)), *biases)

    return made, _map_branches(config, join_leaf, join_biases, state, other)


def upcycle_experts(
    config: Config, state: PyTree, experts: Experts, key: Int64[Tensor, "2"], *, noise: float = 0.0
) -> tuple[Config, Any]:
    """Returns a model with experts that begin as copies of a dense model's MLPs.

    Where the weights of a choice add up to 1, and without noise, logits are those of the dense model. Moments of the
    copies are copies. Routers begin as from `gpt.init`, with moments of 0.

    Args:
        config: shape, without experts, not stacked.
        state: parameters as from `gpt.init`, or the state of a step over them.
        experts: rule of the layers with experts, of the dense model's F.
        key: key of the routers and the noise.
        noise: standard deviation of what is added to each copy, so that experts of equal routing differ.

    Returns:
        The config, and the tree. With `bias_rate` a `TrainState` has the model state of `models.moe.init_state`.

    Raises:
        ValueError: the config has experts or stacked layers, or experts another F, or the noise is below 0.

    Example:
        >>> import shardfn.core as core
        >>> from shardfn.models import gpt, moe
        >>> config = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> experts = Experts(num=4, every=2)
        >>> sparse, params = upcycle_experts(config, gpt.init(config, core.key(0)), experts, core.key(1))
        >>> sparse.num_experts, params["blocks"][1]["e_up"].shape
        ([4], torch.Size([4, 128, 32]))

    References:
        Komatsuzaki et al., Sparse Upcycling, 2022, https://arxiv.org/abs/2212.05055
    """
    _check_dense(config, experts, noise)
    made = dataclasses.replace(config, experts=experts)

    def upcycle_params(params: Any, *, moments: bool) -> Any:
        blocks = list(params["blocks"])
        for n, i in enumerate(made.expert_layers):
            blocks[i] = _upcycle_block(made, blocks[i], experts.num_of(n), fold_in(key, n), noise, moments=moments)
        return {**params, "blocks": blocks}

    def upcycle_node(x: Any) -> Any:
        if isinstance(x, MasterState):
            return MasterState(
                upcycle_params(x.master, moments=False), tree_map(upcycle_node, x.inner, is_leaf=is_node)
            )
        return upcycle_params(x, moments=True) if _is_params(x) else x

    def is_node(x: Any) -> bool:
        return isinstance(x, MasterState) or _is_params(x)

    if not isinstance(state, TrainState):
        return made, upcycle_params(state, moments=False)
    params = upcycle_params(state.params, moments=False)
    out = state._replace(params=params, opt_state=tree_map(upcycle_node, state.opt_state, is_leaf=is_node))
    if experts.bias_rate == 0:
        return made, out
    mesh = next(x for _, x in _named(params)).mesh
    return made, out._replace(model_state=tree_map(lambda x: shard(x, P(), mesh), make_biases(made)))


def _upcycle_block(config: Config, p: Params, num: int, key: Tensor, noise: float, *, moments: bool) -> dict[str, Any]:
    assert config.experts is not None
    (front, *_) = (*config.experts.exchange.spec, None)

    def copy(number: int, *leaves: Any) -> Any:
        def stack_copies(*found: Tensor) -> Tensor:
            x = found[0] if len(found) == 1 else torch.stack(found)
            out = x.expand(num, *x.shape)
            drawn = 0.0 if moments or noise == 0 else noise * normal(fold_in(key, number), out.shape).to(x)
            return out + drawn

        return _remake(stack_copies, *leaves, front=front)

    def make(number: int, shape: tuple[int, ...], stddev: float, like: Any) -> Any:
        def draw(x: Tensor) -> Tensor:
            drawn = torch.zeros(shape) if moments or stddev == 0 else normal(fold_in(key, number), shape, stddev=stddev)
            return drawn.to(x)

        return _remake(draw, like, front=())

    D, stays = config.d_model, config.experts.shared or config.experts.residual
    out = {name: x for name, x in p.items() if stays or name not in (*_COPIES, "w_gate")}
    names = {name: new for name, new in _COPIES.items() if name in p}
    if config.mlp == "swiglu":
        del names["w_up"]
        out["e_gate_up"] = copy(0, p["w_gate"], p["w_up"])
    out |= {new: copy(1 + i, p[name]) for i, (name, new) in enumerate(names.items())}
    out["router"] = make(8, (num, D), 0.02, p["norm2_w"])
    if config.experts.residual:
        out |= {"mix": make(9, (2, D), 0.02, p["norm2_w"]), "mix_b": make(10, (2,), 0.0, p["norm2_w"])}
    return out


def make_biases(config: Config) -> dict[str, Any]:
    """Returns biases of all experts and counts of their choices, zeros. `models.moe.init_state` documents them."""
    assert config.experts is not None
    nums = config.num_experts
    if isinstance(config.experts.num, int):
        shape = (len(nums), config.experts.num)
        return {"bias": torch.zeros(shape), "counts": torch.zeros(shape, dtype=torch.int64)}
    return {
        "bias": [torch.zeros(n) for n in nums],
        "counts": [torch.zeros(n, dtype=torch.int64) for n in nums],
    }


# Branches of a state: trees of a model's leaves, and the biases of its routers.

LeafMap = Callable[..., Any]


def _map_branches(config: Config, of_leaf: LeafMap, of_biases: LeafMap, *states: PyTree) -> Any:
    """Returns the tree of `of_leaf(name, layers, *leaves)` for leaves of layers, and of `of_biases` for biases.

    `layers` are the numbers of a leaf's layers among the layers with experts. Leaves outside of layers have the name
    "". Moments are leaves of trees like the parameters, and have their shapes or are counters.
    """
    shapes = _shapes(next(x for x in _branches(states[0]) if _is_params(x)))
    number = {layer: i for i, layer in enumerate(config.expert_layers)}

    def map_params(*trees: Any) -> Any:
        problems: list[str] = []
        given: list[dict[tuple[Any, ...], Any]] = [dict(_named(x)) for x in trees]

        def map_leaf(path: tuple[Any, ...], name: str, layers: list[int]) -> Any:
            leaves = [x[path] for x in given]
            if leaves[0] is None or (leaves[0].ndim == 0 and shapes[path]):
                return leaves[0]
            if _is_of_experts(name) and tuple(leaves[0].shape) != shapes[path]:
                problems.append(f"{name} of shape {tuple(leaves[0].shape)}, of a parameter of shape {shapes[path]}")
                return leaves[0]
            return of_leaf(name, layers, *leaves)

        out = {k: map_leaf((k,), "", []) for k in trees[0] if k != "blocks"}
        blocks = trees[0]["blocks"]
        if config.stacked:
            every = list(range(len(config.expert_layers)))
            out["blocks"] = {n: map_leaf(("blocks", n), n.rpartition(".")[2], every) for n in blocks}
        else:
            out["blocks"] = [
                {n: map_leaf(("blocks", i, n), n, [number[i]] if i in number else []) for n in p}
                for i, p in enumerate(blocks)
            ]
        raise_all(
            ValueError,
            "the optimizer keeps states of other shapes than the parameters, which have no experts to choose. Take"
            " only state.params, and step.init:",
            problems,
        )
        return out

    def map_node(*nodes: Any) -> Any:
        return map_params(*nodes) if _is_params(nodes[0]) else of_biases(*nodes) if _is_biases(nodes[0]) else nodes[0]

    return tree_map(map_node, *states, is_leaf=_is_branch)


def _branches(state: PyTree) -> list[Any]:
    found: list[Any] = []
    tree_map(lambda x: found.append(x), state, is_leaf=_is_branch)
    return found


def _named(params: Any) -> list[tuple[tuple[Any, ...], Any]]:
    blocks = params["blocks"]
    out = [((k,), x) for k, x in params.items() if k != "blocks"]
    if isinstance(blocks, Mapping):
        return out + [(("blocks", n), x) for n, x in blocks.items()]
    return out + [(("blocks", i, n), x) for i, p in enumerate(blocks) for n, x in p.items()]


def _shapes(params: Any) -> dict[tuple[Any, ...], tuple[int, ...]]:
    return {path: tuple(x.shape) for path, x in _named(params)}


def _map_biases(made: Config, f: Callable[..., Tensor], *biases: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the biases and counts of `made`, with `f(layer, *rows)` of each layer."""
    assert made.experts is not None

    def take_row(x: Any, i: int) -> Any:
        return x[i] if isinstance(x, list) else _remake(lambda y: y[i], x, front=())

    out: dict[str, Any] = {}
    for name in biases[0]:
        given = [x[name] for x in biases]
        rows = [
            _remake(functools.partial(f, i), *(take_row(x, i) for x in given), front=())
            for i in range(len(made.num_experts))
        ]
        out[name] = rows if isinstance(made.experts.num, tuple) else _remake(lambda *r: torch.stack(r), *rows)
    return out


def _is_params(x: Any) -> bool:
    return isinstance(x, Mapping) and {"blocks", "embed"} <= x.keys()


def _is_biases(x: Any) -> bool:
    return isinstance(x, Mapping) and x.keys() == _BIASES


def _is_branch(x: Any) -> bool:
    return _is_params(x) or _is_biases(x)


def _is_of_experts(name: str) -> bool:
    return name in ("router", "router_b") or name.startswith("e_")


def _map_layers(config: Config, f: Callable[[Tensor, int], Tensor], layers: Sequence[int], x: Tensor) -> Tensor:
    """Returns `f(leaf, layer)`, of a stack of layers the stack."""
    return torch.stack([f(row, i) for row, i in zip(x, layers, strict=True)]) if config.stacked else f(x, layers[0])


def _remake(f: Callable[..., Tensor], *leaves: Any, front: Axes = None) -> Any:
    """Returns `f` of whole tensors, placed as the first leaf, or with `front` cut along these axes of the mesh."""
    first = leaves[0]
    if not isinstance(first, GlobalTensor):
        return f(*leaves)
    made = f(*(x.full_tensor() if isinstance(x, GlobalTensor) else x for x in leaves))
    axes = () if front is None else first.mesh.axes(P(front).axes)
    spec = first.spec if front is None else P(axes) if axes else P()
    return shard(made, spec, first.mesh)


# Checks.


def _get_experts(who: str, config: Config) -> Experts:
    if config.experts is None:
        raise ValueError(f"{who}: the model must have experts, got experts=None. upcycle_experts makes some.")
    return config.experts


def _check_kept(config: Config, experts: Experts, kept: Sequence[Sequence[int]]) -> None:
    nums, problems = config.num_experts, []
    if len(kept) != len(nums):
        problems.append(f"kept must have the experts of {len(nums)} layers, got {len(kept)} lists")
    for layer, (num, own) in enumerate(zip(nums, kept, strict=False)):
        if len(own) < experts.top_k:
            problems.append(f"layer {layer} must keep top_k={experts.top_k} experts or more, got {list(own)}")
        elif list(own) != sorted(set(own)) or own[0] < 0 or own[-1] >= num:
            problems.append(f"layer {layer} must keep ascending numbers from 0 to {num - 1}, got {list(own)}")
    if config.stacked and len({len(x) for x in kept}) > 1:
        problems.append(f"stacked layers must keep equally many experts, got {[len(x) for x in kept]}")
    raise_all(ValueError, "prune_experts:", problems)


def _check_same(config: Config, other: Config) -> None:
    problems = []
    for title, mine, yours in (("", config, other), ("experts.", config.experts, other.experts)):
        for field in dataclasses.fields(mine):  # pyright: ignore[reportArgumentType]
            a, b = getattr(mine, field.name), getattr(yours, field.name)
            if field.name not in ("experts", "num") and _identity(a) != _identity(b):
                problems.append(f"{title}{field.name} must be equal, got {a!r} and {b!r}")
    raise_all(ValueError, "aggregate_experts: the configs differ:", problems)


def _identity(x: Any) -> Any:
    return (x.func, x.args, x.keywords) if isinstance(x, functools.partial) else x


def _check_dense(config: Config, experts: Experts, noise: float) -> None:
    problems = []
    if config.experts is not None:
        problems.append(f"the model must be dense, got {config.experts}. aggregate_experts adds experts to experts")
    if config.stacked:
        problems.append("layers must be unstacked, got stacked=True. Use stacked=False")
    if experts.d_ff not in (None, config.ff_dim):
        problems.append(f"experts must have the model's F, {config.ff_dim}, got d_ff={experts.d_ff}. Leave it out")
    asked = {"gate": experts.gate, "biases": experts.biases, "shared_d_ff": experts.shared_d_ff}
    problems += [f"experts must have the model's MLP, got {n}={x}. Leave it out" for n, x in asked.items() if x]
    if not 0 <= noise < float("inf"):
        problems.append(f"noise must be 0 or more and finite, got {noise}")
    raise_all(ValueError, "upcycle_experts:", problems)
