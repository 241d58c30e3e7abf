"""Attention of models of transformers by a body of `nn.attention`, also where ranks have parts of a sequence.

transformers looks up the attention function in a table, by a name in the model's config. While a module runs for
`from_module`, the configs have the name registered here, and afterwards the old name. So no model is changed.
`from_module` refuses a model with attention outside of the table.

Other values that depend on the positions of a rank's tokens are handled when a model is called: default positions are
the positions of this rank's tokens, and arguments unknown for all tokens, such as padding masks and labels to be
shifted, are refused.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardfn._torch import ConvNd
from shardfn.collectives import axis_size
from shardfn.core import Ambient, named_modules, raise_all
from shardfn.nn import (
    AttentionBackend,
    Blockwise,
    Causal,
    Dense,
    Full,
    Mask,
    PairDropout,
    Segments,
    Window,
    attention,
    rank_positions,
    shard_rows,
    whole_length,
    whole_sequence,
)

from ._call import ModuleCall, ModuleRun, Replacement
from ._draws import Draws

NAME = "shardfn"
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
OVER_TOKENS = ConvNd, nn.RNNBase
# Further arguments of an attention, which bodies do not support.
_UNKNOWN = ("softcap", "position_bias", "sinks", "head_mask")
# Arguments of models of images or sound. The embeddings go to places in the whole rows.
_SEEN = ("pixel_values", "image", "video", "input_features", "input_values", "audio")


@contextlib.contextmanager
def name_functions(configs: Iterable[Any], name: str, field: str = "_attn_implementation_internal") -> Iterator[None]:
    """Lets configs of transformers name this attention, or another function by the function's field."""
    before = [(c, getattr(c, field)) for c in configs]
    try:
        for c, _ in before:
            setattr(c, field, name)
        yield
    finally:
        for c, old in before:
            setattr(c, field, old)


class AttentionRoute(Replacement):
    """AttentionBackend that computes the attention of a single module.

    Args:
        module: module with models of transformers inside.
        body: the body of `nn.attention`.

    Raises:
        ValueError: there is no such model, or the attention of a model cannot be routed. The message lists all with
            reasons.
    """

    order = 60

    def __init__(self, module: nn.Module, body: AttentionBackend) -> None:
        self.body, towers = body, _find_towers(module)
        self._models = [m for m in models_in(module) if m not in towers]
        apart = {id(c) for m in towers for c in configs_of(m.config)}
        found = [c for m in self._models for c in configs_of(m.config) if id(c) not in apart]
        self.configs = {id(c): c for c in found}.values()
        raise_all(
            ValueError,
            f"from_module(attention={body}) of this {type(module).__name__}:",
            _find_problems(module, self._models, towers, body),
        )
        _register_attention()

    def of_call(self, call: ModuleCall) -> Replacement:
        """Returns the routing of a call, including parts that run again in the backward."""
        return RoutedCall(self, call.draws)

    @contextlib.contextmanager
    def hook_models(self, hook: Any) -> Iterator[None]:
        """Shows the arguments of the models' calls to `hook`."""
        handles = [m.register_forward_pre_hook(hook, with_kwargs=True, prepend=True) for m in self._models]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class RoutedCall(Replacement):
    """Call of a module. The documents given to the first model hold for the whole call."""

    order = AttentionRoute.order

    def __init__(self, route: AttentionRoute, draws: Draws) -> None:
        self._route, self.body, self._draws = route, route.body, draws
        # The positions of all tokens in the call, and the positions of the models' calls after the first. A later model
        # with other positions begins again.
        self._whole_BT: Tensor | None = None
        self._filled: Tensor | None = None
        self.windows = Windows()
        self.num_calls = 0
        self.attends = True

    @contextlib.contextmanager
    def running(self, run: ModuleRun) -> Iterator[None]:
        """Computes attention by the body while open.

        Raises:
            ValueError: a whole forward has not called attention.
        """
        with name_functions(self._route.configs, NAME), self._route.hook_models(self._call_model):
            with _CALL.bound(self), WINDOWS.bound(self.windows):
                yield
        if not run.again and self.attends and not self.num_calls:
            raise ValueError(
                f"from_module(attention={self.body}): the forward has not called the attention of transformers, and"
                " may have attended only to this rank's tokens. Use a model whose attention uses AttentionInterface."
            )

    def mask(self, q_BTHK: Tensor, *, causal: bool, window: int | None, chunk: int | None) -> Mask:
        """Returns the mask of all tokens' pairs."""
        mask = Window(window - 1) if window is not None else Causal() if causal else Full()
        if chunk is not None:  # by positions, which begin again with each document
            at_BT = self._whole_BT
            if at_BT is None:
                B, T = q_BTHK.shape[:2]
                at_BT = torch.arange(whole_length(self.body, T), device=q_BTHK.device).expand(B, -1)
            mask = mask & Segments(at_BT // chunk)
        return mask if self._whole_BT is None else mask & Segments(_number_documents(self._whole_BT))

    def dropped(self, rate: float) -> Mask:
        """Returns the dropout of a single layer's attention.

        Raises:
            ValueError: there is no key.
        """
        key, index_B = self._draws.take("dropout of attention", rate)
        return PairDropout(key, rate, index_B)

    def _call_model(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = list(inspect.signature(model.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        counts = numbers_tokens(model) and given.get("position_ids") is None
        problems = _problems_of_call(given, cut=_is_cut(self.body))
        if counts and _is_cut(self.body):
            problems.append("it numbers tokens by all ids of a sequence, those of padding apart; give position_ids")
        raise_all(ValueError, f"{type(model).__name__} with attention={self.body}:", problems)
        tokens = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
        if tokens is None:
            return None
        if _is_cut(self.body):
            rows, length = shard_rows(self.body, tokens.shape[1]), whole_length(self.body, tokens.shape[1])
            _refuse_no_tokens(model, self.body, rows, length)
            self._draws.cut_tokens(rows, length)
        more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
        if "position_ids" in names and not counts:
            more["position_ids"] = self._fill_positions(given.get("position_ids"), tokens)
        return args[:1], {**dict(list(zip(names, args, strict=False))[1:]), **kwargs, **more}

    def _fill_positions(self, position_ids: Tensor | None, tokens: Tensor) -> Tensor:
        if position_ids is None:
            self._filled = rank_positions(self.body, tokens.shape[1], tokens.device)[None]
            return self._filled
        if position_ids is not self._filled:
            self._whole_BT = whole_sequence(position_ids.expand(tokens.shape[0], -1), self.body)
            self._filled = position_ids
        return position_ids


_CALL = Ambient[RoutedCall]("attention of a module's call", by_thread=True)


def none_attends() -> None:
    """Marks the running call: all layers with attention are on other ranks."""
    call = _CALL.innermost()
    if call is not None:
        call.attends = False


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for transformers, [B, H, T, K] -> [B, T, H, K].

    `nn.attention` by the running module's body.

    Raises:
        ValueError: an argument needs attention that a body does not support.
        RuntimeError: no module of `from_module(attention=)` runs.
    """
    call = _CALL.innermost()
    if call is None:
        raise RuntimeError(f"attention {NAME!r} is for modules that run by from_module(attention=).")
    causal, window = call.windows.read_mask(module, kwargs)
    raise_all(
        ValueError,
        f"{type(module).__name__} with attention={call.body}:",
        [
            *(["a mask is not known for all tokens. Leave attention_mask out"] if attention_mask is not None else []),
            *([f"{n} is not computed by a body" for n in _UNKNOWN if kwargs.get(n) is not None]),
            *(["a window that looks ahead is not computed"] if window is not None and not causal else []),
            *_problems_of_positions(module, call.body, query.shape[2]),
            *(
                [f"{query.shape[2]} queries attend to {key.shape[2]} keys; only a sequence to itself is cut"]
                if query.shape[2] != key.shape[2]
                else []
            ),
        ],
    )
    call.num_calls += 1
    q_BTHK, k_BSGK, v_BSGK = (x.transpose(1, 2) for x in (query, key, value))
    mask = call.mask(q_BTHK, causal=causal, window=window, chunk=_chunk_size(module))
    mask = mask & call.dropped(dropout) if dropout else mask
    sinks_H = kwargs.get("s_aux")
    return attention(q_BTHK, k_BSGK, v_BSGK, mask=mask, scale=scaling, sinks_H=sinks_H, impl=call.body), None


def _chunk_size(module: Any) -> int | None:
    """Returns the tokens of a chunk, for a layer with attention inside of chunks, as in Llama 4."""
    return module.config.attention_chunk_size if kind_of(module) == "chunked_attention" else None


def numbers_tokens(module: nn.Module) -> bool:
    """Returns whether a model numbers tokens by id.

    For example, RoBERTa counts from above the id of padding, and leaves out padding.
    """
    return any(hasattr(m, "create_position_ids_from_input_ids") for m in module.modules())


def _problems_of_positions(module: Any, body: AttentionBackend, num_tokens: int) -> list[str]:
    """Lists positions that each rank would count from 0, as where Llama 4 scales queries of some layers."""
    scales = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    if not (scales and _is_cut(body)) or whole_length(body, num_tokens) < module.floor_scale:
        return []
    return [
        f"attn_temperature_tuning scales queries from position {module.floor_scale} - 1 on, by the number of a token on"
        " its rank. Use shorter rows, or turn it off in the config"
    ]


def mask_of_none(
    *, use_vmap: bool = False, mask_function: Any = None, local_size: int | None = None, **kwargs: Any
) -> None:
    """Replaces the mask that transformers would make of this rank's tokens, and notes the window."""
    del kwargs
    if use_vmap or _adds_pairs(mask_function):
        raise ValueError("from_module(attention=): the model uses a custom mask, which is not supported.")
    if (windows := WINDOWS.innermost()) is not None:
        windows.made.add(local_size)


def _adds_pairs(mask_function: Any) -> bool:
    """Returns whether a mask of transformers adds pairs, such as the tokens of one image."""
    if isinstance(mask_function, tuple):
        return any(map(_adds_pairs, mask_function))
    inside = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    return getattr(mask_function, "__qualname__", "").startswith("or_masks.") or any(map(_adds_pairs, inside))


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, routed_attention)
    AttentionMaskInterface.register(NAME, mask_of_none)


def models_in(module: nn.Module) -> list[Any]:
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return []
    return [m for m in module.modules() if isinstance(m, PreTrainedModel)]


def _find_towers(module: nn.Module) -> list[Any]:
    """Returns the models of images or sound next to the language model, which keep their attention."""
    out: list[Any] = []
    for model in models_in(module):
        if model.config.get_text_config(decoder=True) is not model.config:
            text = model.get_decoder()
            own = set(text.modules())
            out += [m for m in models_in(model) if m not in own and text not in set(m.modules())]
    return list(dict.fromkeys(out))


def configs_of(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from configs_of(inner)


def _find_problems(module: nn.Module, models: list[Any], towers: list[Any], body: AttentionBackend) -> list[str]:
    if not models:
        return ["there is no model of transformers in it, whose attention could be routed. Call nn.attention in it"]
    out = []
    for model in models:
        name, config = type(model).__name__, model.config
        if not type(model)._can_set_attn_implementation():
            out.append(f"{name} computes its attention without transformers' AttentionInterface; it cannot be routed")
        others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_KINDS))
        if others:
            out.append(f"{name} has layers of {', '.join(others)}; known are {' and '.join(_KINDS)}")
        rope = getattr(config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
        if kind in ("dynamic", "longrope") and not isinstance(body, Dense | Blockwise):
            out.append(f"{name} has rotary positions of type {kind}, which depend on the longest position of a rank")
    if not isinstance(body, Dense | Blockwise):
        if not any("position_ids" in inspect.signature(m.forward).parameters for m in models):
            out.append("no model in it takes position_ids, so it numbers each rank's tokens from 0")
        apart = {m for tower in towers for m in tower.modules()}
        out += [
            f"{path} is a {type(m).__name__}, which mixes tokens besides attention"
            for path, m in named_modules(module)
            if isinstance(m, OVER_TOKENS) and m not in apart
        ]
    return list(dict.fromkeys(out))


def _problems_of_call(given: dict[str, Any], *, cut: bool) -> list[str]:
    out = []
    if given.get("attention_mask") is not None:
        out.append(
            "attention_mask is not routed. Pad rows on the right with labels of -100, or pack documents and give"
            " position_ids that start again"
        )
    if given.get("past_key_values") is not None:
        out.append("past_key_values are not cut; leave them out")
    if getattr(given.get("position_ids"), "ndim", 2) > 2:
        out.append("position_ids of several axes are not routed. Give those of text, [B, T]")
    seen = [n for n, x in given.items() if n.startswith(_SEEN) and x is not None]
    if cut and seen:
        out.append(
            f"{', '.join(seen)} would be put in places of this rank's tokens; embed whole rows before they are cut, and"
            " give inputs_embeds"
        )
    if cut and given.get("labels") is not None and given.get("shift_labels") is None:
        out.append(
            "labels would be shifted on each rank for itself, and the mean would be this rank's; shift them before"
            " rows are cut: interop.causal_lm_batch and interop.causal_lm_loss"
        )
    return out


def _is_cut(body: AttentionBackend) -> bool:
    return not isinstance(body, Dense | Blockwise) and axis_size(body.axes) > 1


def _refuse_no_tokens(model: Any, body: AttentionBackend, rows: Sequence[Any], length: int) -> None:
    if not rows:
        num = axis_size(body.axes)
        raise ValueError(
            f"{type(model).__name__} with attention={body}: of {length} tokens over {num} ranks this rank has no token,"
            f" and models of transformers do not run without tokens. Pad rows to a multiple of {num} tokens, with"
            " labels of -100, or take fewer ranks along the sequence."
        )


def _number_documents(whole_BT: Tensor) -> Tensor:
    """Returns each token's document in the whole rows: a new document begins where positions do not rise by 1."""
    steps_BT = torch.diff(whole_BT, prepend=whole_BT[:, :1] - 1, dim=-1)
    return (steps_BT != 1).cumsum(-1)


class Windows:
    """Windows of the masks that a call of a model has made. None is a mask without a window.

    Example:
        >>> windows = Windows()
        >>> windows.made.add(5)
        >>> windows.of(object(), None)
        5
    """

    def __init__(self) -> None:
        self.made: set[int | None] = set()

    def read_mask(self, module: Any, kwargs: Mapping[str, Any]) -> tuple[bool, int | None]:
        """Returns whether a layer is causal, and its window, from the arguments of a call by transformers."""
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return causal, self.of(module, kwargs.get("sliding_window"))

    def of(self, module: Any, given: int | None) -> int | None:
        """Returns the window of a layer: the given window, or the window of the mask.

        Args:
            module: the attention of the layer.
            given: window in the arguments, or None.

        Raises:
            ValueError: masks have several windows.
        """
        kind = kind_of(module)
        if given is not None or kind == "chunked_attention" or (None in self.made and kind != "sliding_attention"):
            return given
        found = sorted(w for w in self.made if w is not None)
        if len(found) > 1:
            raise ValueError(
                f"all masks of a model must have one window where a layer has no window, as {type(module).__name__}"
                f" here. Got windows of {found}."
            )
        return found[0] if found else None


def kind_of(module: Any) -> str | None:
    """Returns the kind of a layer, as its model's config names it."""
    kinds, at = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[at] if kinds and at is not None else None


WINDOWS = Ambient[Windows]("windows of a module's call", by_thread=True)
