"""Functions of transformers' models as ops of the harness, and the architectures that each function serves.

A `ModuleOp` is a definition in plain torch with the tensors of a module as arguments, for example `rms_norm(x, weight,
eps)`. `check`, `swap` and `measure` take these ops as they take kernels. `find_architectures` builds small models of
transformers, records the calls of their modules, and compares each call with the definitions. So an architecture has a
function if its modules give the definition's numbers, and not if their names are alike.
"""

import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._build import SHARED
from ._harness_cases import CASES, OpCases, Size
from ._op import KERNELS, SWAPPED, is_implementation_chosen

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleOp:
    """Function of transformers' models, which candidates replace.

    Attributes:
        name: name of the function.
        argument_names: arguments by position.
        reference: definition in plain torch.
        cases: arguments at any size.
        mapped: number of first tensors that `vmap` maps.
        role: text in the names of classes of modules that have this role, for the list of modules without a match.
    """

    name: str
    argument_names: tuple[str, ...]
    reference: Callable[..., Any]
    cases: OpCases
    mapped: int = 1
    role: str
    source = SHARED
    dtypes = (torch.float32, torch.bfloat16)
    written = ()
    has_derivative = True

    def op(self, *args: Any) -> Any:
        """Calls the candidate in use, or the definition."""
        f = SWAPPED.get(self.name)
        return (self.reference if f is None or is_implementation_chosen() else f)(*args)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim, with the division in float32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last dim."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
    """Returns (act(x gate^T) * (x up^T)) down^T."""
    return F.linear(_ACTIVATIONS[act](F.linear(x, gate)) * F.linear(x, up), down)


def mlp(x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, act: str) -> Tensor:
    """Returns act(x up^T + up_bias) down^T + down_bias."""
    return F.linear(_ACTIVATIONS[act](F.linear(x, up, up_bias)), down, down_bias)


def experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: str) -> Tensor:
    """Returns the sum of weight * gated_mlp over chosen experts: x [N, D], index, weights [N, k], gate_up [E, 2F, D].

    The first F rows of gate_up are the gate.
    """
    y = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        own = (weights * (index == e)).sum(-1, keepdim=True).to(x.dtype)
        gate, up = gate_up[e].chunk(2)
        y = y + own * gated_mlp(x, gate, up, down[e], act)
    return y


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Returns softmax(q k^T scale + mask) v as [B, T, H, K]: q [B, H, T, K], k and v [B, G, S, K], G divides H."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if mask is None else scores + mask
    return (scores.float().softmax(-1).to(q.dtype) @ v).transpose(1, 2).contiguous()


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q and k [B, H, T, K] rotated by angles [B, T, K], where element i is paired with element i + K / 2."""

    def turn(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-other, one], -1) * sin[:, None]

    return turn(q), turn(k)


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of labels [B, T] one place later than logits [B, T, V], without labels of -100."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def _mlp_case(s: Size, num: int) -> tuple[Tensor, ...]:
    wide = 2 * s.width + 3
    return s.normal(s.rows, s.width), *(s.normal(wide, s.width, seed=i) * 0.1 for i in range(num))


def _down(s: Size) -> Tensor:
    return s.normal(s.width, 2 * s.width + 3, seed=9) * 0.1


def _expert_case(s: Size) -> tuple[Any, ...]:
    gate_up, down = s.normal(4, 2 * s.width + 2, s.width, seed=1) * 0.1, s.normal(4, s.width, s.width + 1, seed=2) * 0.1
    index = s.whole(0, 4, s.rows, 2)
    return s.normal(s.rows, s.width), index, s.uniform(s.rows, 2).to(s.dtype), gate_up, down, "silu"


def _attention_case(s: Size) -> tuple[Any, ...]:
    mask = torch.full((s.rows, s.rows), -1e9, dtype=s.dtype, device=s.device).triu(1)
    q, k, v = (s.normal(2, heads, s.rows, s.width, seed=i) for i, heads in enumerate((4, 2, 2)))
    return q, k, v, mask, s.width**-0.5


def _rotary_case(s: Size) -> tuple[Any, ...]:
    q, k = s.normal(2, 4, s.rows, 2 * s.width), s.normal(2, 2, s.rows, 2 * s.width, seed=1)
    return q, k, *(s.normal(2, s.rows, 2 * s.width, seed=i) for i in (2, 3))


def _loss_case(s: Size) -> tuple[Any, ...]:
    return s.normal(s.rows, 9, s.width), s.whole(0, s.width, s.rows, 9)


def _record(reference: Callable[..., Any], role: str, make: Callable[[Size], tuple[Any, ...]], mapped: int = 1) -> Any:
    names = tuple(inspect.signature(reference).parameters)
    cases = OpCases(make, exact=False)
    return ModuleOp(
        name=reference.__name__, argument_names=names, reference=reference, cases=cases, mapped=mapped, role=role
    )


_MODULE_OPS: tuple[ModuleOp, ...] = (
    _record(rms_norm, "Norm", lambda s: (s.normal(s.rows, s.width), s.normal(s.width, seed=1), 1e-6)),
    _record(
        layer_norm,
        "Norm",
        lambda s: (s.normal(s.rows, s.width), s.normal(s.width, seed=1), s.normal(s.width, seed=2), 1e-5),
    ),
    _record(gated_mlp, "MLP", lambda s: (*_mlp_case(s, 2), _down(s), "silu")),
    _record(mlp, "MLP", lambda s: (*_mlp_case(s, 1), s.normal(2 * s.width + 3, seed=8), _down(s), None, "gelu_tanh")),
    _record(experts, "Experts", _expert_case),
    _record(attention, "Attention", _attention_case),
    _record(rotary, "rotary", _rotary_case, 2),
    _record(causal_loss, "loss", _loss_case),
)
# By name.
MODULE_OPS: dict[str, ModuleOp] = {one.name: one for one in _MODULE_OPS}


def find_op(name: str) -> Any:
    """Returns the record of a kernel, or of a function of transformers' models.

    Raises:
        ValueError: there is no such op, or the kernel has no cases.
    """
    if name in KERNELS and name in CASES:
        return KERNELS[name]
    if name in MODULE_OPS:
        return MODULE_OPS[name]
    known = ", ".join(sorted({*CASES, *MODULE_OPS}))
    raise ValueError(f"an op must have a name and cases in the harness, got {name!r}. Known: {known}")


def cases_of(name: str) -> OpCases:
    """Returns the cases of an op.

    Raises:
        ValueError: see `find_op`.
    """
    op = find_op(name)
    return op.cases if isinstance(op, ModuleOp) else CASES[name]


def make_arguments(
    name: str, rows: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Any, ...]:
    """Returns arguments of an op by position. Equal sizes have equal arguments.

    Args:
        name: name of the op.
        rows: number of rows, for example of tokens.
        width: elements of a row.
        dtype: dtype of the first tensor.
        device: device of the tensors.

    Raises:
        ValueError: see `find_op`.

    Example:
        >>> [x.shape for x in make_arguments("gated_silu", 3, 5)]
        [torch.Size([3, 5]), torch.Size([3, 5])]
    """
    return cases_of(name).make(Size(rows, width, dtype, device))


# The calls of small models.


class ArchitectureCoverage(NamedTuple):
    """Functions of an architecture of transformers that are ops of the harness.

    Attributes:
        model_type: name of the architecture, for example "llama".
        calls: number of calls in a forward that give an op's numbers, by name of the op.
        unmatched: classes with the role of an op, but with other numbers.
        problem: the error where no small model could be built or run, else "".
    """

    model_type: str
    calls: dict[str, int]
    unmatched: tuple[str, ...]
    problem: str = ""


class _RecordedCall(NamedTuple):
    """A recorded call: what was called, the op's arguments to try, and the result."""

    what: str
    proposals: list[tuple[str, tuple[Any, ...]]]
    result: Any


def find_architectures(model_types: Sequence[str] | None = None) -> list[ArchitectureCoverage]:
    """Returns the ops whose numbers the modules of causal language models of transformers give.

    A model of each type is made small by the names of the fields of its config, gets random weights, and runs once.

    Args:
        model_types: types such as "llama". Default: all causal language models of transformers, which takes minutes.

    Raises:
        ImportError: transformers is missing.

    Example:
        >>> [found] = find_architectures(["llama"])
        >>> found.calls
        {'attention': 2, 'causal_loss': 1, 'gated_mlp': 2, 'rms_norm': 5, 'rotary': 2}
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [
        _cover(name) for name in (sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if model_types is None else model_types)
    ]


def _cover(model_type: str) -> ArchitectureCoverage:
    counts, missed = dict[str, int](), set[str]()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            calls = _record_calls(model_type)
            for call in calls:
                name = _find_match(call)
                if name:
                    counts[name] = counts.get(name, 0) + 1
                elif any(op.role in call.what for op in _MODULE_OPS):
                    missed.add(call.what)
            # An attention module is matched through the function that it calls.
            missed -= {call.what.split()[0] for call in calls if call.what.endswith(" Attention")}
    except Exception as error:  # of a model of transformers
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return ArchitectureCoverage(model_type, {}, (), text[:120])
    return ArchitectureCoverage(model_type, dict(sorted(counts.items())), tuple(sorted(missed)))


def _find_match(call: _RecordedCall) -> str:
    for name, args in call.proposals:
        try:
            got = MODULE_OPS[name].reference(*args)
        except (RuntimeError, IndexError, ValueError, TypeError):  # shapes of another function
            continue
        if _is_close(got, call.result):
            return name
    return ""


def _is_close(got: Any, wanted: Any) -> bool:
    if isinstance(got, tuple):
        return isinstance(wanted, tuple) and all(map(_is_close, got, wanted))
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    if not isinstance(wanted, Tensor) or got.shape != wanted.shape:
        return False
    return bool((got - wanted).abs().max() <= 1e-4 * wanted.abs().max().clamp(min=1e-3))


def _record_calls(model_type: str) -> list[_RecordedCall]:
    import transformers

    torch.manual_seed(0)
    config = _make_small(transformers.CONFIG_MAPPING[model_type])
    _check_size(config)
    calls: list[_RecordedCall] = []
    with _attention_recorded(calls) as attention_name:
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention_name)
        except (ValueError, ImportError):  # a model with attention of a single kind
            model = transformers.AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            p.normal_(std=0.2)
        handles = [m.register_forward_hook(_hook(calls), with_kwargs=True) for m in model.modules() if m is not model]
        tokens = torch.randint(3, 32, (2, 6))
        with _rotary_recorded(calls, sys.modules[type(model).__module__]):
            logits = model.eval()(input_ids=tokens, use_cache=False).logits
        for handle in handles:
            handle.remove()
    loss = model.loss_function(logits=logits, labels=tokens, vocab_size=logits.shape[-1])
    return [*calls, _RecordedCall(f"loss {model.loss_type}", [("causal_loss", (logits, tokens))], loss)]


def _check_size(config: Any) -> None:
    """Refuses a model that is large by parts of the config that `_make_small` leaves.

    Raises:
        ValueError: the model has more parameters than the limit.
    """
    import transformers

    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # a model that needs values is built only once, with these
        return
    num = sum(p.numel() for p in model.parameters())
    if num > _MOST_PARAMETERS:
        raise ValueError(f"a small model must have at most {_MOST_PARAMETERS:,} parameters, got {num:,}")


def _hook(calls: list[_RecordedCall]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if tensors:
            proposals = [*_propose_norms(module, *tensors), *_propose_mlps(module, *tensors)]
            calls.append(_RecordedCall(type(module).__name__, proposals, result))

    return record


_Proposals = Iterator[tuple[str, tuple[Any, ...]]]


def _propose_norms(module: nn.Module, x: Tensor, *rest: Tensor) -> _Proposals:
    own = dict(module.named_parameters())
    if rest or not own.keys() <= {"weight", "bias"} or any(p.shape != x.shape[-1:] for p in own.values()):
        return
    weight = own.get("weight", torch.ones(x.shape[-1]))
    found = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2} or {1e-5, 1e-6}
    for eps in found:
        for scale in (weight, 1 + weight):
            if "bias" not in own:
                yield "rms_norm", (x, scale, eps)
            yield "layer_norm", (x, scale, own.get("bias"), eps)


def _propose_mlps(module: nn.Module, x: Tensor, *rest: Tensor) -> _Proposals:
    own, D = list(module.parameters()), x.shape[-1]
    matrices, biases = [p for p in own if p.ndim == 2], [p for p in own if p.ndim == 1]
    if len(rest) == 2 and [p.ndim for p in own] == [3, 3]:
        for a, b in itertools.permutations((own[0], own[0].mT, own[1], own[1].mT), 2):
            if a.shape[2] == b.shape[1] == D and a.shape[1] == 2 * b.shape[2]:
                yield from (("experts", (x, *rest, a, b, act)) for act in _ACTIVATIONS)
    if len(matrices) + len(biases) < len(own) or not 2 <= len(matrices) <= 3 or len(matrices) + len(biases) > 4:
        return
    ups, downs = [p for p in matrices if p.shape[1] == D], [p for p in matrices if p.shape[0] == D]
    for act in _ACTIVATIONS:
        if len(ups) == 2 and len(downs) == 1 and not biases:
            yield from (("gated_mlp", (x, gate, up, downs[0], act)) for gate, up in (ups, ups[::-1]))
        if len(ups) == len(downs) == 1:
            for up, down in ((ups[0], downs[0]), (downs[0].mT, ups[0].mT)):
                if not biases and up.shape[0] == 2 * down.shape[1]:
                    yield from (("gated_mlp", (x, *pair, down, act)) for pair in (up.chunk(2), up.chunk(2)[::-1]))
                bias = {len(b): b for b in biases}
                yield "mlp", (x, up, bias.get(up.shape[0]), down, bias.get(D), act)


@contextlib.contextmanager
def _attention_recorded(calls: list[_RecordedCall]) -> Iterator[str]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def record(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, scaling: Any = None, **more: Any
    ) -> Any:
        mask = attention_mask
        given = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        given = given or ALL_ATTENTION_FUNCTIONS["sdpa"]
        result = given(module, q, k, v, mask, scaling=scaling, **more)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        calls.append(
            _RecordedCall(f"{type(module).__name__} Attention", [("attention", (q, k, v, mask, scale))], result)
        )
        return result

    name = "shardfn_recorded"
    ALL_ATTENTION_FUNCTIONS[name] = record
    ALL_MASK_ATTENTION_FUNCTIONS[name] = eager_mask
    try:
        yield name
    finally:
        del ALL_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS[name]


@contextlib.contextmanager
def _rotary_recorded(calls: list[_RecordedCall], modeling: Any) -> Iterator[None]:
    given = getattr(modeling, "apply_rotary_pos_emb", None)

    def record(*args: Any, **kwargs: Any) -> Any:
        result = given(*args, **kwargs)  # type: ignore[misc]
        calls.append(_RecordedCall("rotary", [("rotary", args[:4])], result))
        return result

    if given is not None:
        modeling.apply_rotary_pos_emb = record
    try:
        yield
    finally:
        if given is not None:
            modeling.apply_rotary_pos_emb = given


# The first pattern found in the name of a field gives the size.
_MOST_PARAMETERS = 10_000_000
_SMALL = {
    r"(^|_)vocab_size|^vocabulary_size": 32,
    r"(max|n)_(position|ctx)|max_seq_len|^n_positions": 64,
    r"num_experts_per_tok|moe_k$|moe_topk|top_k$|n_activated": 2,
    r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts": 4,
    r"^n_group|topk_group|n_shared_experts|num_shared_experts": 1,
    r"num_key_value_heads|num_kv_heads|num_global_key_value": 2,
    r"num_attention_heads|(^|_)n_heads?$|num_heads|attention_heads$|^n_head$": 4,
    r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|(^|_)head_dim|d_kv$": 8,
    r"lora_rank$": 8,
    r"num_hidden_layers|(^|_)n?_?layers?$|^num_blocks$|^depth$": 2,
    r"intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff$|mlp_dim": 48,
    r"hidden_size|d_model|n_embd$|embed_dim$|embedding_size|word_embed": 32,
    r"rotary_dim$": 4,
    r"sliding_window|window_size": 4,
    r"d_state|state_size": 8,
}


def _make_small(kind: Any) -> Any:
    """Returns a config of a class with small sizes. Lists of layers follow from the number of layers."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if not field.init or isinstance(field.default, bool) or not isinstance(field.default, int):
            continue
        if re.search(r"token_id$", field.name):
            given[field.name] = 1
        for pattern, size in _SMALL.items():
            if re.search(pattern, field.name):
                given[field.name] = min(size, field.default) if field.default > 0 else field.default
                break
    heads = {name: getattr(kind, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    if len({*heads.values()}) == 1:  # a model without groups of queries
        given |= dict.fromkeys((name for name in heads if name in given), 4)
    return kind(**given)
