"""Causal models of transformers as functions of the tokens of many sequences at once.

Tokens lie in a single row, [1, T], with positions, as continuous batching needs. Attention, the only part in which
tokens meet, is computed from outside, over a KV cache. transformers looks up the attention function in a table, by a
name in the model's config. While such a function runs, the configs have the name registered here. So no model is
changed.

T tokens, R rows with logits, H query heads, G key heads, K head dim, V vocabulary.
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.core import Ambient, a_kind, did_you_mean, named_modules, named_parameters, raise_all, uncompiled
from shardfn.nn import moe

from ._attention import (
    OVER_TOKENS,
    WINDOWS,
    Windows,
    configs_of,
    mask_of_none,
    models_in,
    name_functions,
    numbers_tokens,
)
from ._batch_invariant import grouped_rows
from ._experts import FIELD, apply_experts, experts_in, leaves_of
from ._from_module import ModuleFunction, from_module

NAME = "shardfn_decoding"
_KINDS = ("full_attention", "sliding_attention")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")
_ARGUMENTS = ("position_ids", "use_cache", "logits_to_keep")
# Further arguments of an attention, which add to scores or change them in another way.
_UNKNOWN = ("position_bias", "head_mask", "sinks")


class ImageReading(NamedTuple):
    """How a model of images and text reads the tokens of images.

    Attributes:
        token: id of the image token.
        grid: whether tokens have rotary positions of time, row and column.
        whole: whether the tokens of an image read one another.
    """

    token: int
    grid: bool = False
    whole: bool = False


# Models whose images are read so, by `model_type`.
_READINGS = {"llava": {}, "qwen2_vl": {"grid": True}, "gemma3": {"whole": True}}


def find_reading(config: Any) -> ImageReading | None:
    """Returns how a model reads images by its config, or None for a model of text, or for other images."""
    if config.get_text_config(decoder=True) is config or config.model_type not in _READINGS:
        return None
    return ImageReading(config.image_token_id, **_READINGS[config.model_type])


def split_parts(module: Any) -> tuple[Any, Any]:
    """Returns the language model with its head, and the rest: towers and projector.

    Args:
        module: model of images and text. The results share their parts with the module, which is not changed.
    """
    text = [module.get_decoder(), module.get_output_embeddings()]
    language = {m for part in text for m in part.modules()}
    return _keep_parts(module, language), _keep_parts(module, {*module.modules()} - language)


def _keep_parts(module: nn.Module, kept: set[nn.Module]) -> nn.Module:
    """Returns a copy of a module with only those submodules, and the modules around them."""
    out = copy.copy(module)
    inner = {name: x for name, x in module._modules.items() if x is not None and kept & {*x.modules()}}
    out.__dict__["_modules"] = {
        name: x if kept >= {*x.modules()} else _keep_parts(x, kept) for name, x in inner.items()
    }
    return out


class AttentionScores(NamedTuple):
    """Scores of a single layer's causal attention.

    Attributes:
        layer: number of the layer.
        scale: factor of q k. None is 1 / sqrt(K).
        window: largest number of positions that a token sees, including the token's position. None is all.
        softcap: bound c of c tanh(score / c). None is no bound.
        sinks_H: score of one more key of each head, with a value of 0.
    """

    layer: int
    scale: float | None
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None


# From scores, q [1, T, H, K], and k and v [1, T, G, K] of all tokens to y [1, T, H, K].
Attend = Callable[[AttentionScores, Tensor, Tensor, Tensor], Tensor]


_LOCAL = moe.Local()


class DecodingFunction:
    """Logits of a causal model of transformers as a function of the parameters. See `decoding`.

    Attributes:
        params: detached parameters by name, or the given parameters.
        context: largest number of tokens of a sequence.
        images: how tokens of images are read, or None.
        experts: names of the parameters that have experts along dim 0.
    """

    def __init__(self, apply: ModuleFunction, params: Mapping[str, Tensor] | None = None) -> None:
        self._apply, self.module = apply, apply.module
        own = {name: p.detach() for name, p in named_parameters(self.module)}
        self.params = own if params is None else {name: params[name] for name in own}
        config: Any = self.module.config
        self.context = int(config.get_text_config(decoder=True).max_position_embeddings)
        self.images = find_reading(config)
        found = [c for model in models_in(self.module) for c in configs_of(model.config)]
        self._configs = list({id(c): c for c in found}.values())
        experts = experts_in(self.module)
        self.experts = [f"{path}.{leaf}" for path, m in experts.items() for leaf in leaves_of(m)]
        self._of_experts = list({id(m.config): m.config for m in experts.values()}.values())
        self._modules_of_experts = [id(m) for m in experts.values()]

    def __call__(
        self,
        params: Mapping[str, Tensor],
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        attend: Attend,
        mode: AbstractContextManager[Any] | None = None,
        exchange: moe.Exchange = _LOCAL,
        images: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the logits of the selected rows, [R, V], and the expert ids of all tokens, [T, m, k].

        m is the number of MoE modules, and k the number of experts that a router chooses for a token.

        The expert ids are None if modules differ in k, or a module has not run.

        Args:
            params: parameters by name.
            tokens_T: ids of the tokens.
            positions_T: position of each token in the sequence, or three positions, [3, T], see `ImageReading.grid`.
            rows_R: indices of the tokens with logits.
            attend: function that computes attention, and knows the tokens of each sequence.
            mode: function mode, open while the model runs.
            exchange: exchange in which tokens meet experts.
            images: True for tokens of images, [T], and their features, [T, D]. Features of text are not read.

        Raises:
            ValueError: a layer needs other attention than `attend` computes. The message lists the reasons.
        """
        served = ServedExperts(exchange)

        def forward() -> Tensor:
            with (
                mode or contextlib.nullcontext(),
                name_functions(self._configs, NAME),
                name_functions(self._of_experts, NAME, FIELD),
                _CALL.bound(attend),
                _EXPERTS_CALL.bound(served),
                WINDOWS.bound(Windows()),
            ):
                out = self.module(
                    **self._make_inputs(tokens_T.long(), images),
                    position_ids=positions_T.long().unsqueeze(-2),
                    logits_to_keep=rows_R.long(),
                    use_cache=False,
                )
            return out.logits[0]

        logits = self._apply.within(forward, params)
        return logits, self._chosen_experts(served.choices)

    def _make_inputs(self, tokens_T: Tensor, images: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        if images is None:
            return {"input_ids": tokens_T[None]}
        (rows_T, features_TD), model = images, self.module
        x_TD = model.get_input_embeddings()(tokens_T.masked_fill(rows_T, 0))  # pyright: ignore
        return {"inputs_embeds": torch.where(rows_T[:, None], features_TD.to(x_TD.dtype), x_TD)[None]}

    def _chosen_experts(self, choices: Mapping[int, Tensor]) -> Tensor | None:
        """Returns the experts of a call, in the order of the modules."""
        found = [choices[one] for one in self._modules_of_experts if one in choices]
        if not found or len(found) < len(self._modules_of_experts) or len({x.shape for x in found}) > 1:
            return None
        return torch.stack(found, 1)


def decoding(module: nn.Module, params: Mapping[str, Tensor] | None = None) -> DecodingFunction:
    """Returns the function of tokens of many sequences computed by a causal model of transformers.

    Args:
        module: unmodified `...ForCausalLM`, in eval mode, or a model of images and text without its towers, see
            `split_parts`. The module is not changed.
        params: parameters by name, in place of the module's, which may then be on "meta". Parameters may be deferred.

    Raises:
        TypeError: the module is not a model of transformers.
        ValueError: tokens meet in other ways than by attention to earlier tokens, or `params` do not fit the module.
            The message lists all reasons.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> f = decoding(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).eval())
        >>> tokens_T = torch.tensor([5, 6, 7])
        >>> logits, experts = f(f.params, tokens_T, torch.arange(3), torch.tensor([2]), lambda scores, q, k, v: q)
        >>> logits.shape, experts
        (torch.Size([1, 8]), None)
    """
    plain = uncompiled(module)
    if plain not in models_in(plain):
        raise TypeError(f"a decoder expected a model of transformers, got {a_kind(plain)}.")
    raise_all(
        ValueError,
        f"{type(plain).__name__} cannot be served:",
        [*_find_problems(plain), *_weight_problems(plain, params)],
    )
    _register_attention()
    _, apply = from_module(plain)
    return DecodingFunction(apply, params)


_CALL = Ambient[Attend]("attention of a decoder's call", by_thread=True)


def served_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the running call's attention for transformers, [B, H, T, K] -> [B, T, H, K].

    Raises:
        ValueError: the layer needs other attention.
        RuntimeError: the module is called outside a function that `decoding` made.
    """
    attend, windows = _CALL.innermost(), WINDOWS.innermost()
    if attend is None or windows is None:
        raise RuntimeError(f"attention {NAME!r} is for modules that run by decoding(module).")
    layer = getattr(module, "layer_idx", None)
    causal, window = windows.read_mask(module, kwargs)
    problems = [f"{n} is not computed" for n in _UNKNOWN if kwargs.get(n) is not None]
    problems += [
        text
        for wrong, text in (
            (layer is None, "it has no layer_idx, by which its keys and values are found"),
            (attention_mask is not None, "it has a mask of its own"),
            (not causal, "its tokens look ahead"),
            (bool(dropout), "it drops pairs. Call eval() of the model"),
            (
                not query.shape[2] == key.shape[2] == value.shape[2],
                f"{query.shape[2]} queries attend to {key.shape[2]} keys of other tokens",
            ),
            (
                not query.shape[3] == key.shape[3] == value.shape[3],
                f"heads have {query.shape[3]} elements of q and {value.shape[3]} of v",
            ),
        )
        if wrong
    ]
    raise_all(ValueError, f"{type(module).__name__} cannot be served:", problems)
    scores = AttentionScores(int(layer), scaling, window, kwargs.get("softcap"), kwargs.get("s_aux"))  # pyright: ignore[reportArgumentType]
    return attend(scores, *(x.transpose(1, 2) for x in (query, key, value))), None


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, served_experts)
    AttentionInterface.register(NAME, served_attention)
    AttentionMaskInterface.register(NAME, mask_of_none)


def _find_problems(module: Any) -> list[str]:
    return [*_find_other_states(module), *_find_other_attention(module), *_find_other_layers(module)]


def _find_other_states(module: Any) -> Iterator[str]:
    """Yields states of a sequence other than keys and values of tokens."""
    config = module.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "its tokens attend to the states of an encoder; served are decoders alone"
    if config.get_text_config(decoder=True) is not config and find_reading(config) is None:
        known = ", ".join(_READINGS)
        yield f"it has more parts than a language model, and is no {known}. Pass that part as a ...ForCausalLM"
    if getattr(type(module), "_is_stateful", False):
        yield "its layers keep a state that is not keys and values of tokens"
    for path, sub in named_modules(module):
        if isinstance(sub, OVER_TOKENS):
            yield f"{path} is a {type(sub).__name__}, which mixes tokens besides attention"


def _find_other_attention(module: Any) -> Iterator[str]:
    config = module.config.get_text_config(decoder=True)
    for model in models_in(module):
        if not type(model)._can_set_attn_implementation():
            yield f"{type(model).__name__} computes its attention without transformers' AttentionInterface"
            break
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_KINDS))
    if others:
        yield f"it has layers of {', '.join(others)}; served are {' and '.join(_KINDS)}"
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        kind = one.get("rope_type", "default") if isinstance(one, dict) else "default"
        if kind in ("dynamic", "longrope"):
            yield f"its rotary positions are of type {kind}, which depend on the longest sequence of a call"


def _find_other_layers(module: Any) -> Iterator[str]:
    config = module.config.get_text_config(decoder=True)
    experts = {n: v for n, v in vars(config).items() if _EXPERTS.fullmatch(n) and isinstance(v, int) and v > 1}
    for name, value in experts.items() if not experts_in(module) else ():
        yield f"its layers have experts ({name}={value}) that are not in transformers' ExpertsInterface"
    for path, m in experts_in(module).items():
        if m._is_expert_parallel:
            yield f"{path} is cut by transformers itself. Load the model without its expert parallelism"
    if missing := [n for n in _ARGUMENTS if n not in _arguments_of(module)]:
        yield f"its forward does not take {', '.join(missing)}{_suggest_head(module)}"
    if numbers_tokens(module):
        yield "it numbers tokens by all ids of a sequence, those of padding apart; served are positions from 0 on"
    if getattr(config, "max_position_embeddings", None) is None:
        yield "its config has no max_position_embeddings, the most tokens of a sequence"
    if module.training:
        yield "it is in training mode. Call eval()"


def _arguments_of(module: Any) -> set[str]:
    """Returns the argument names of a forward, including the names of the model inside."""
    own = inspect.signature(module.forward).parameters.values()
    names = {p.name for p in own}
    inner = module.base_model
    if inner is module or not any(p.kind is p.VAR_KEYWORD for p in own):
        return names
    inside = [inner] if find_reading(module.config) is None else [inner, module.get_decoder()]
    return names.union(*(inspect.signature(m.forward).parameters for m in inside))


def _suggest_head(module: Any) -> str:
    """Returns the remedy for a model without a head, if transformers has the same model with one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    whole: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(module.config), None)
    if whole is None or isinstance(module, whole):
        return ""
    return f"; load it by AutoModelForCausalLM, as a {whole.__name__}"


def _weight_problems(module: nn.Module, params: Mapping[str, Tensor] | None) -> Iterator[str]:
    shapes = {name: tuple(p.shape) for name, p in named_parameters(module)}
    if params is None:
        if any(p.device.type == "meta" for p in module.parameters()):
            yield "its parameters are on meta. Load its weights first, or pass them: params=module_from_hf(model, ...)"
        return
    for name, shape in shapes.items():
        if name not in params:
            yield f"params has no {name}.{did_you_mean(name, params)}"
        elif tuple(params[name].shape) != shape:
            yield f"params[{name!r}] is {tuple(params[name].shape)}, and the model's is {shape}"
    for name in params:
        if name not in shapes:
            yield f"params[{name!r}] is not a parameter of the model.{did_you_mean(name, shapes)}"


@dataclass(frozen=True)
class ServedExperts:
    """Exchange of a call's tokens with experts, and the choices.

    Attributes:
        exchange: exchange of `nn.moe`.
        choices: choices [T, k] of each module of experts that has run, by identity.
    """

    exchange: moe.Exchange
    choices: dict[int, Tensor] = field(default_factory=dict)


_EXPERTS_CALL = Ambient[ServedExperts]("experts of a decoder's call", by_thread=True)


def served_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes experts for transformers, [S, D], [S, k], [S, k] -> [S, D].

    Raises:
        RuntimeError: the module is called outside a function that `decoding` made.
    """
    call = _EXPERTS_CALL.innermost()
    if call is None:
        raise RuntimeError("experts 'shardfn_decoding' are for modules that run by decoding(module).")
    call.choices[id(module)] = top_k_index
    choices = top_k_index, top_k_weights
    return apply_experts(module, hidden_states, *choices, exchange=call.exchange, product=grouped_rows)
