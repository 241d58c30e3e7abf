"""A speculator as a drafter of an engine."""

import functools
import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from shardfn import kernels
from shardfn.core import make_mesh, raise_all, tree_leaves
from shardfn.engine import BoundCall, sharded
from shardfn.inference import Context, Decoder, DraftTree, Limits, Sampling
from shardfn.transforms import jit

from ._config import RecurrentConfig, list_misfits
from ._recurrent import BATCH_INVARIANT, Params, advance_state, list_shapes, scale_of, start_state

_PRODUCTS = ("first", "later", "head")  # weights that `row_linear` multiplies


class Speculator:
    """Drafter that guesses by a speculator from the last hidden state of the model.

    All sequences of a step are a single batch. A draft is drawn as the engine draws the token of the same
    place, by the same key, position, temperature and filters. Each rank has the whole speculator, and sends nothing.

    Args:
        config: shape.
        params: parameters as from `init`, whole and equal on all ranks.
        digest: digest of the model that the speculator was trained for (`Decoder.digest`). Empty: any model of the
            sizes in `config`.

    Raises:
        ValueError: leaves are missing, unknown, or of another shape.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import Engine, Sampling, decoder
        >>> from shardfn.models import gpt
        >>> from shardfn.speculators import config_of, init
        >>> sizes = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 4, "max_len": 32}
        >>> model = gpt.Config(**sizes, batch_invariant=True)
        >>> config, params = config_of(decoder(model), "mlp"), gpt.init(model, core.key(0))
        >>> engine = Engine(decoder(model), params, drafter=Speculator(config, init(config, core.key(1))))
        >>> how = Sampling(max_tokens=8, temperature=0.0)
        >>> engine.generate([[5, 6, 7]], how) == Engine(decoder(model), params).generate([[5, 6, 7]], how)
        True
        >>> engine.stats.speculation.drafted > 0
        True
    """

    def __init__(self, config: RecurrentConfig, params: Params, *, digest: str = "") -> None:
        check_params(config, params)
        self.config, self._digest = config, digest
        params = {name: x.detach().float() for name, x in params.items()}
        content = hashlib.blake2b(repr((config, digest)).encode(), digest_size=8)
        for x in tree_leaves(params):
            content.update(x.cpu().contiguous().numpy().tobytes())
        self._content = content.digest()
        packed = {name: kernels.pack_rows(params[name]) for name in _PRODUCTS}
        packed["embed"] = params["embed"] * scale_of(config)
        run = functools.partial(_run_heads, config)
        self._program = sharded(jit(run, backend="graph"), mesh=make_mesh({}, alone=True))
        self._held = self._program.init(params | packed)
        self._bound: dict[int, BoundCall] = {}  # by the number of sequences

    @property
    def wants_hidden(self) -> tuple[int, ...]:
        """Returns the number of the model's layers: the state that the head multiplies."""
        return (self.config.num_layers,)

    def describe(self) -> str:
        """Returns the kind and the sizes of the speculator, as a part of a line."""
        size = sum(math.prod(shape) for shape in list_shapes(self.config).values())
        return f"{self.config.kind} speculator, {size:,} parameters, {self.config.num_heads} tokens"

    def check(self, decoder: Decoder, limits: Limits | None = None) -> None:
        """Refuses an engine of another model.

        Raises:
            ValueError: sizes or digests differ. The message lists all.
        """
        del limits
        problems = list_misfits(self.config, decoder)
        if not problems and self._digest and decoder.digest and self._digest != decoder.digest:
            problems = [f"its model has the digest {self._digest}, and this model {decoder.digest}"]
        raise_all(ValueError, "drafter: a speculator of another model. Train one for this model:", problems)

    def warm_up(self, *, extended: bool = False) -> None:
        """Captures the programs for up to 16 sequences."""
        del extended
        for size in (1, 2, 4, 8, 16):
            self._bind(size)

    def propose(self, context: Context, most: int) -> DraftTree:
        """Returns the tokens that the speculator draws after the last token."""
        return self.propose_all([(context, most)])[0]

    def propose_all(self, asks: Sequence[tuple[Context, int]]) -> list[DraftTree]:
        """Returns the proposals of several sequences. A sequence without a hidden state has an empty proposal."""
        seen = [context for context, _ in asks if context.hidden is not None]
        drawn = iter(self._draw_drafts(seen) if seen else ())
        return [
            DraftTree() if context.hidden is None else DraftTree.chain(_cut_draws(next(drawn)[:most], context.sampling))
            for context, most in asks
        ]

    def end(self, context: Context) -> None:
        """Has no effect."""

    def copy(self) -> "Speculator":
        """Returns the drafter itself, as it has no state."""
        return self

    def digest(self) -> bytes:
        """Returns a hash of the shape and the parameters."""
        return self._content

    def _draw_drafts(self, contexts: Sequence[Context]) -> list[list[int]]:
        """Returns n drafts of each sequence with a hidden state. -1 where logits were not finite."""
        size = 1 << (len(contexts) - 1).bit_length()
        with kernels.threads_for_kernels():
            return self._bind(size)(self._held, _make_inputs(contexts, size, self._program.mesh.device)).tolist()

    def _bind(self, size: int) -> BoundCall:
        """Returns the program for a number of sequences, captured at the first call."""
        if size not in self._bound:
            none = Context(0, "", 0, array("q", [0]), 1, hidden=torch.zeros(self.config.d_model))
            inputs = _make_inputs([none], size, self._program.mesh.device)
            self._bound[size] = self._program.bind(self._held, inputs, check_every=0)
        return self._bound[size]


class _Inputs(NamedTuple):
    """Inputs of a program for B sequences. The last four are arguments of `kernels.draw`."""

    hidden_BD: Float32[Tensor, "b d"]
    tokens: Int64[Tensor, " b"]
    keys: Int64[Tensor, " b"]
    places: Int64[Tensor, " b"]
    temperature: Float64[Tensor, " b"]
    top_k: Int64[Tensor, " b"]
    top_p: Float64[Tensor, " b"]
    min_p: Float64[Tensor, " b"]


def _make_inputs(contexts: Sequence[Context], size: int, device: torch.device) -> _Inputs:
    """Returns the inputs of sequences with hidden states, and of padding."""
    hows, padding = [context.sampling for context in contexts], size - len(contexts)
    states = torch.stack([x for context in contexts if (x := context.hidden) is not None])
    integers = {
        "tokens": ([context.tokens[-1] for context in contexts], 0),
        "keys": ([context.key - (context.key >> 63 << 64) for context in contexts], 0),
        "places": ([len(context.tokens) for context in contexts], 0),
        "top_k": ([how.top_k for how in hows], 0),
    }
    floats = {
        "temperature": ([how.temperature for how in hows], 0.0),
        "top_p": ([how.top_p for how in hows], 1.0),
        "min_p": ([how.min_p for how in hows], 0.0),
    }
    columns = {
        name: torch.tensor([*values, *[fill] * padding], dtype=dtype, device=device)
        for dtype, each in ((torch.int64, integers), (torch.float64, floats))
        for name, (values, fill) in each.items()
    }
    return _Inputs(F.pad(states.to(device), (0, 0, 0, padding)), **columns)


def _run_heads(config: RecurrentConfig, params: Params, inputs: _Inputs) -> Int64[Tensor, "b n"]:
    """Returns the drafts of all heads."""

    def multiply(name: str, x: Tensor) -> Tensor:
        return kernels.row_linear(x, params[name], _count_outputs(config, name))

    hidden_BD, tokens_B, keys, places, *how = inputs
    state, found = start_state(BATCH_INVARIANT, hidden_BD), list[Tensor]()
    draws = dict(zip(_Inputs._fields[4:], how, strict=True))
    for i in range(config.num_heads):
        z_BE = params["embed"][tokens_B.clamp(min=0)]
        projected = multiply("later" if i else "first", state.h)
        state = advance_state(config, params, BATCH_INVARIANT, projected, state.c, z_BE)
        tokens_B, _ = kernels.draw(multiply("head", state.h), kernels.draw_uniforms(keys, places + i), **draws)
        found.append(tokens_B)
    return torch.stack(found, 1)


def _count_outputs(config: RecurrentConfig, name: str) -> int:
    return list_shapes(config)[name][0]


def check_params(config: RecurrentConfig, params: Params) -> None:
    """Refuses parameters of another shape.

    Raises:
        ValueError: lists all leaves that are missing, unknown, or of another shape.
    """
    shapes = list_shapes(config)
    problems = [f"{name} is missing" for name in shapes if name not in params]
    problems += [f"{name} is unknown" for name in params if name not in shapes]
    problems += [
        f"{name} is {tuple(params[name].shape)}, and must be {shape}"
        for name, shape in shapes.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    raise_all(ValueError, f"these are not the parameters of {config}:", problems)


def _cut_draws(drawn: list[int], sampling: Sampling) -> list[int]:
    """Returns the drafts up to the first token that ends a sequence, or up to a row without a draw."""
    for i, token in enumerate(drawn):
        if token < 0 or token in sampling.stop_tokens:
            return drawn[: i + (token >= 0)]
    return drawn
