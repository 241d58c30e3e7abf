"""Shapes of speculators, and of the model that a speculator guesses for.

Each kind of speculator is a shape with the same properties, so that all kinds share `init`, `specs`, `loss`, files and
the drafter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from shardfn.core import did_you_mean, raise_all
from shardfn.inference import Decoder

RecurrentKind = Literal["mlp", "lstm", "owl"]
Kind = Literal["mlp", "lstm", "owl", "eagle3", "mtp"]
KINDS: tuple[str, ...] = get_args(Kind)
_SIZES = ("vocab_size", "d_model", "num_layers", "d_inner", "num_drafts")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent speculator.

    Attributes:
        kind: cell of the recurrence, "mlp" or "lstm", or "owl": an LSTM that reads the state of a [SPEC] token.
        vocab_size: V, the tokens of the model.
        d_model: D, the width of the model's hidden states.
        num_layers: layers of the model.
        d_inner: E, the width of the speculator.
        num_drafts: n, the number of tokens that are guessed after a token.
        draft_vocab: number of tokens that can be guessed, the leaf "draft_tokens" in ascending order. None is all. A
            proposal multiplies a head of only these tokens.

    Raises:
        ValueError: lists every field that is out of range.

    Example:
        >>> RecurrentConfig("mlp", vocab_size=64, d_model=32, num_layers=2, d_inner=16).num_gates
        1
    """

    kind: RecurrentKind
    vocab_size: int
    d_model: int
    num_layers: int
    d_inner: int
    num_drafts: int = 3
    draft_vocab: int | None = None

    products: ClassVar[tuple[str, ...]] = ("first", "later", "head")
    hidden_window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        problems = _list_bad_sizes(self, _SIZES)
        kinds = get_args(RecurrentKind)
        if self.kind not in kinds:
            hint = did_you_mean(str(self.kind), kinds)
            problems.insert(0, f"kind must be one of {', '.join(kinds)}, got {self.kind!r:.40}.{hint}")
        problems += [] if problems else _list_bad_vocabularies(self)
        raise_all(ValueError, "speculators.RecurrentConfig:", problems)

    @property
    def num_gates(self) -> int:
        """Returns the projections of a cell: three gates and a candidate, or only the next state."""
        return 1 if self.kind == "mlp" else 4

    @property
    def layers(self) -> tuple[int, ...]:
        """Returns the number of the model's layers: the state that the head multiplies."""
        return (self.num_layers,)

    @property
    def num_outputs(self) -> int:
        """Returns the number of tokens that can be guessed: the outputs of the head."""
        return self.draft_vocab or self.vocab_size

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Returns the weight of each guessed token in the loss."""
        return (1.0,) * self.num_drafts

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters by name."""
        V, D, E, rows = self.vocab_size, self.d_model, self.d_inner, self.num_gates * self.d_inner
        norms = ("norm_w", "norm_b", *(("cell_norm_w", "cell_norm_b") if self.kind != "mlp" else ()))
        weights = {"embed": (V, E), "first": (rows, D), "later": (rows, E), **_list_head_shapes(self)}
        return weights | dict.fromkeys(norms, (E,)) | ({"spec": (D,)} if self.kind == "owl" else {})


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE-3 speculator: a decoder layer over states of several layers of the model.

    Attributes:
        vocab_size: V, the tokens of the model.
        d_model: D, the width of the model's hidden states.
        num_layers: layers of the model.
        d_inner: E, the width of the speculator.
        layers: layers of the model whose states are fused, ascending, for example (2, 8, 13) of 16: low, middle, high.
        num_heads: H, the heads of attention. K must be even.
        num_drafts: n, the number of tokens that are guessed after a token.
        window: W, the most states that the layer sees: those of the last tokens.
        kind: "eagle3".
        num_kv_heads: G, the heads of keys and values, which divide H. None is H.
        d_head: K, the width of a head. None is E / H.
        d_ff: features of the SwiGLU. None is 8 E / 3, up to a multiple of 64.
        rope_base: base of rotary positions.
        norm_eps: number added to the mean square by norms.
        draft_vocab: number of tokens that can be guessed, the leaf "draft_tokens" in ascending order. None is all.

    Raises:
        ValueError: lists every field that is out of range or at odds with another field.

    Example:
        >>> config = EagleConfig(64, d_model=32, num_layers=6, d_inner=16, layers=(2, 3, 6), num_heads=2)
        >>> config.shapes["fuse"], config.shapes["wq"]
        ((16, 96), (16, 32))
    """

    vocab_size: int
    d_model: int
    num_layers: int
    d_inner: int
    layers: tuple[int, ...]
    num_heads: int = 1
    num_drafts: int = 4
    window: int = 8
    kind: Literal["eagle3"] = "eagle3"
    num_kv_heads: int | None = None
    d_head: int | None = None
    d_ff: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    draft_vocab: int | None = None

    products: ClassVar[tuple[str, ...]] = ("fuse", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "head")

    def __post_init__(self) -> None:
        problems = _list_bad_sizes(self, (*_SIZES, "num_heads", "window"))
        if self.kind != "eagle3":
            problems.insert(0, f"kind must be 'eagle3', got {self.kind!r:.40}")
        layers = self.layers
        problems += [] if problems else _list_bad_heads(self)
        if type(layers) is not tuple or not layers or list(layers) != sorted({*layers}):
            problems.append(f"layers must be a tuple of ascending numbers, got {layers!r:.60}")
        elif not problems and not 0 <= layers[0] <= layers[-1] <= self.num_layers:
            problems.append(f"layers must be from 0 to num_layers={self.num_layers}, got {layers}")
        raise_all(ValueError, "speculators.EagleConfig:", problems)

    @property
    def hidden_window(self) -> int:
        """Returns the most states that a proposal takes."""
        return self.window

    @property
    def head_dim(self) -> int:
        """Returns the width of a head of attention."""
        return self.d_head or self.d_inner // self.num_heads

    @property
    def num_outputs(self) -> int:
        """Returns the number of tokens that can be guessed: the outputs of the head."""
        return self.draft_vocab or self.vocab_size

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Returns the weight of each guessed token in the loss: later guesses count less, as they are reached less."""
        return tuple(0.8**i for i in range(self.num_drafts))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters by name."""
        V, E = self.vocab_size, self.d_inner
        weights = {"embed": (V, E), "fuse": (E, len(self.layers) * self.d_model), **_list_layer_shapes(self, 2 * E)}
        weights |= _list_head_shapes(self)
        return weights | dict.fromkeys(("embed_norm_w", "state_norm_w", "norm_w", "last_norm_w"), (E,))


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """Shape of multi-token-prediction modules, as in DeepSeek-V3: a decoder layer for each guessed token.

    Attributes:
        vocab_size: V, the tokens of the model.
        d_model: D, the width of the model's hidden states.
        num_layers: layers of the model.
        d_inner: E, the width of the modules. E is D, so that modules can share embedding and head with the model.
        num_heads: H, the heads of attention. K must be even.
        num_drafts: n, the number of modules.
        window: W, the most positions that a module attends to.
        kind: "mtp".
        num_kv_heads: G, the heads of keys and values, which divide H. None is H.
        d_head: K, the width of a head. None is E / H.
        d_ff: features of the SwiGLU. None is 8 E / 3, up to a multiple of 64.
        rope_base: base of rotary positions.
        norm_eps: number added to the mean square by norms.

    Raises:
        ValueError: lists every field that is out of range or at odds with another field.

    Example:
        >>> config = MTPConfig(64, d_model=32, num_layers=6, d_inner=32, num_heads=2, num_drafts=3, window=4)
        >>> config.shapes["0.project"], config.hidden_window
        ((32, 64), 10)
    """

    vocab_size: int
    d_model: int
    num_layers: int
    d_inner: int
    num_heads: int = 1
    num_drafts: int = 4
    window: int = 8
    kind: Literal["mtp"] = "mtp"
    num_kv_heads: int | None = None
    d_head: int | None = None
    d_ff: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = _list_bad_sizes(self, (*_SIZES, "num_heads", "window"))
        if self.kind != "mtp":
            problems.insert(0, f"kind must be 'mtp', got {self.kind!r:.40}")
        problems += [] if problems else _list_bad_heads(self)
        if self.d_inner != self.d_model:
            problems.append(f"d_inner must be d_model={self.d_model}, as for the model's head, got {self.d_inner}")
        raise_all(ValueError, "speculators.MTPConfig:", problems)

    @property
    def products(self) -> tuple[str, ...]:
        """Returns the names of the weights of linear layers."""
        return (*(name for name in self.shapes if "norm" not in name and name != "embed"),)

    @property
    def layers(self) -> tuple[int, ...]:
        """Returns the number of the model's layers: the state that the head multiplies."""
        return (self.num_layers,)

    @property
    def hidden_window(self) -> int:
        """Returns the most states that a proposal takes: W for the last module, and W - 1 for each module before."""
        return self.num_drafts * (self.window - 1) + 1

    @property
    def head_dim(self) -> int:
        """Returns the width of a head of attention."""
        return self.d_head or self.d_inner // self.num_heads

    @property
    def num_outputs(self) -> int:
        """Returns the number of tokens that can be guessed: the outputs of the head."""
        return self.vocab_size

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Returns the weight of each guessed token in the loss."""
        return (1.0,) * self.num_drafts

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters by name, for example "1.wq" of the module of the second draft."""
        V, E = self.vocab_size, self.d_inner
        module = {"project": (E, 2 * E)} | _list_layer_shapes(self, E)
        module |= dict.fromkeys(("embed_norm_w", "state_norm_w", "first_norm_w", "norm_w", "last_norm_w"), (E,))
        modules = {f"{i}.{name}": shape for i in range(self.num_drafts) for name, shape in module.items()}
        return {"embed": (V, E), "head": (V, E)} | modules


SpeculatorConfig = RecurrentConfig | EagleConfig | MTPConfig


def config_of(
    decoder: Decoder,
    kind: Kind,
    *,
    d_inner: int | None = None,
    num_drafts: int = 3,
    window: int = EagleConfig.window,
    draft_vocab: int | None = None,
) -> Any:
    """Returns the shape of a speculator for a model: a `RecurrentConfig`, an `EagleConfig` or an `MTPConfig`.

    EAGLE-3 takes the states after layer 2, after half of the layers, and near the last layer.

    Args:
        decoder: decoder of the model.
        kind: "mlp", "lstm", "owl", "eagle3" or "mtp".
        d_inner: width of the speculator. Default: the model's width.
        num_drafts: number of tokens that are guessed after a token.
        window: see `EagleConfig` and `MTPConfig`.
        draft_vocab: see `RecurrentConfig` and `EagleConfig`. None is all tokens.

    Raises:
        ValueError: the decoder does not give the hidden states that the head multiplies, or a size is out of range, or
            there is no such kind, or "owl" is of another model than a `models.gpt`, or "mtp" has a `draft_vocab`.

    Example:
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> model = decoder(gpt.Config(vocab_size=64, num_layers=4, d_model=32, num_heads=4))
        >>> config_of(model, "lstm").d_inner, config_of(model, "eagle3").layers
        (32, (2, 4))
    """
    if not decoder.embeds:
        raise ValueError("speculators: this decoder does not give its hidden states. Use a batch-invariant decoder.")
    if kind == "owl" and decoder.config is None:
        raise ValueError("speculators: [SPEC] tokens need the decoder of a models.gpt. Use the kind 'lstm'.")
    L, E = decoder.depth, decoder.hidden_size if d_inner is None else d_inner
    sizes: dict[str, Any] = {"vocab_size": decoder.vocab, "d_model": decoder.hidden_size, "num_layers": L}
    sizes |= {"d_inner": E, "num_drafts": num_drafts}
    heads = next((n for n in range(max(1, E // 64), 1, -1) if E % (2 * n) == 0), 1)
    if kind == "mtp":
        if draft_vocab is not None:
            raise ValueError(
                f"speculators: draft_vocab must be None for 'mtp', whose head can be the model's, got {draft_vocab}."
            )
        return MTPConfig(**sizes, num_heads=heads, window=window)
    sizes["draft_vocab"] = draft_vocab
    if kind != "eagle3":
        return RecurrentConfig(kind, **sizes)
    wanted = {min(2, L), max(1, L // 2), L - 3 if L >= 12 else L}
    layers = tuple(x for x in sorted(wanted) if x in decoder.hidden_layers) or (L,)
    return EagleConfig(**sizes, layers=layers, num_heads=heads, window=window)


def config_from(fields: Mapping[str, Any]) -> SpeculatorConfig:
    """Returns the shape with these fields, as of `dataclasses.asdict`, lists in place of tuples.

    Raises:
        ValueError: there is no such kind, or fields are missing, unknown or out of range.
    """
    kind = fields.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.40}.{did_you_mean(str(kind), KINDS)}")
    made = {"eagle3": EagleConfig, "mtp": MTPConfig}.get(str(kind), RecurrentConfig)
    known = [x.name for x in dataclasses.fields(made)]
    needed = [x.name for x in dataclasses.fields(made) if x.default is dataclasses.MISSING]
    problems = [f"{name} is missing" for name in needed if name not in fields]
    problems += [f"{name} is unknown.{did_you_mean(name, known)}" for name in fields if name not in known]
    raise_all(ValueError, f"a speculator of kind {kind!r} has other fields:", problems)
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return made(**values)


def list_misfits(config: SpeculatorConfig, decoder: Decoder) -> list[str]:
    """Returns the sizes of the model that differ from the sizes that a speculator was made for, with both values."""
    own: dict[str, Any] = {
        "vocab_size": decoder.vocab,
        "d_model": decoder.hidden_size,
        "num_layers": decoder.depth,
    }
    return [
        f"{name} is {getattr(config, name)}, and the model has {value}"
        for name, value in own.items()
        if value != getattr(config, name)
    ]


def _list_bad_heads(config: EagleConfig | MTPConfig) -> list[str]:
    given = ("num_kv_heads", "d_head", "d_ff")
    problems = _list_bad_sizes(config, tuple(name for name in given if getattr(config, name) is not None))
    problems += _list_bad_vocabularies(config) if isinstance(config, EagleConfig) else []
    if config.d_head is None and config.d_inner % (2 * config.num_heads):
        problems.append(f"num_heads={config.num_heads} must divide d_inner={config.d_inner} into an even width")
    if problems:
        return problems
    if config.head_dim % 2 or config.num_heads % (config.num_kv_heads or 1):
        problems.append(
            f"d_head={config.head_dim} must be even, and num_kv_heads={config.num_kv_heads} must divide"
            f" num_heads={config.num_heads}"
        )
    if not config.rope_base > 0 or not config.norm_eps >= 0:
        problems.append(f"rope_base must be above 0 and norm_eps at least 0, got {config.rope_base}, {config.norm_eps}")
    return problems


def _list_head_shapes(config: RecurrentConfig | EagleConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the head, and of the tokens that it has."""
    tokens = {} if config.draft_vocab is None else {"draft_tokens": (config.draft_vocab,)}
    return {"head": (config.num_outputs, config.d_inner)} | tokens


def _list_bad_vocabularies(config: RecurrentConfig | EagleConfig) -> list[str]:
    most, num = config.vocab_size, config.draft_vocab
    if num is None or (type(num) is int and 1 <= num <= most):
        return []
    return [f"draft_vocab must be None or an integer from 1 to vocab_size={most}, got {num!r}"]


def _list_layer_shapes(config: EagleConfig | MTPConfig, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's weights, whose attention reads vectors of this width."""
    E, F = config.d_inner, config.d_ff or -(-8 * config.d_inner // 192) * 64
    heads = {"q": config.num_heads, "k": config.num_kv_heads or config.num_heads}
    rows = {name: num * config.head_dim for name, num in heads.items()}
    attention = {"wq": (rows["q"], width), "wk": (rows["k"], width), "wv": (rows["k"], width), "wo": (E, rows["q"])}
    return attention | {"w_gate": (F, E), "w_up": (F, E), "w_down": (E, F)}


def _list_bad_sizes(config: Any, names: tuple[str, ...]) -> list[str]:
    return [
        f"{name} must be an integer of at least 1, got {value!r}"
        for name in names
        if type(value := getattr(config, name)) is not int or value < 1
    ]
