"""A speculator as a drafter of an engine."""

import functools
import hashlib
import itertools
import math
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shardfn import kernels
from shardfn.core import PyTree, make_mesh, raise_all, tree_leaves
from shardfn.engine import BoundCall, sharded
from shardfn.inference import Context, Decoder, DraftTree, Guess, Limits, Sampling
from shardfn.transforms import jit

from ._config import EagleConfig, MTPConfig, SpeculatorConfig, list_misfits
from ._eagle import draft_eagle
from ._inputs import DraftInputs, make_inputs
from ._loss import Params, check_params
from ._mtp import draft_mtp
from ._owl import add_spec_token
from ._recurrent import draft_recurrent


class Speculator:
    """Drafter that guesses by a speculator from the last hidden states of the model.

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

    def __init__(self, config: SpeculatorConfig, params: Params, *, digest: str = "") -> None:
        check_params(config, params)
        self.config, self._digest = config, digest
        params = {name: x.detach().float() for name, x in params.items()}
        content = hashlib.blake2b(repr((config, digest)).encode(), digest_size=8)
        for x in tree_leaves(params):
            content.update(x.cpu().contiguous().numpy().tobytes())
        self._content = content.digest()
        self._spec = params.get("spec")
        packed = {name: kernels.pack_rows(params[name]) for name in config.products}
        run = functools.partial(_run_drafts, config)
        self._program = sharded(jit(run, backend="graph"), mesh=make_mesh({}, alone=True))
        self._held = self._program.init(params | packed)
        self._bound: dict[int, BoundCall] = {}  # by the number of sequences

    @property
    def wants_hidden(self) -> tuple[int, ...]:
        """Returns the layers of the model that the speculator reads states after."""
        return self.config.layers

    @property
    def hidden_window(self) -> int:
        """Returns the most states that a proposal takes."""
        return self.config.hidden_window

    @property
    def wants_spec_token(self) -> bool:
        """Returns whether the speculator reads the state of a [SPEC] token."""
        return self.config.kind == "owl"

    def prepare(self, decoder: Decoder, params: PyTree) -> tuple[Decoder, PyTree]:
        """Returns decoder and parameters for an engine with the speculator: as given, or with a [SPEC] token.

        Args:
            decoder: decoder of the model.
            params: parameters of the model.
        """
        return (decoder, params) if self._spec is None else add_spec_token(decoder, params, self._spec)

    def describe(self) -> str:
        """Returns the kind and the sizes of the speculator, as a part of a line."""
        size = sum(math.prod(shape) for shape in self.config.shapes.values())
        return f"{self.config.kind} speculator, {size:,} parameters, {self.config.num_drafts} tokens"

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
        return [guess.tree for guess in self.guess_all(asks)]

    def guess_all(self, asks: Sequence[tuple[Context, int]]) -> list[Guess]:
        """Returns the proposals of several sequences, and the number of their tokens expected to be accepted.

        The number is the sum of the probabilities of the chain's beginnings, as the speculator has them.
        """
        seen = [context for context, _ in asks if context.states]
        drawn = iter(self._draw_drafts(seen) if seen else ())
        found = list[Guess]()
        for context, most in asks:
            if not context.states:
                found.append(Guess(0.0, DraftTree()))
                continue
            tokens, logprobs = next(drawn)
            tokens = _cut_draws(tokens[:most], context.sampling)
            begins = itertools.accumulate(logprobs[: len(tokens)])
            found.append(Guess(math.fsum(map(math.exp, begins)), DraftTree.chain(tokens)))
        return found

    def end(self, context: Context) -> None:
        """Has no effect."""

    def copy(self) -> "Speculator":
        """Returns the drafter itself, as it has no state."""
        return self

    def digest(self) -> bytes:
        """Returns a hash of the shape and the parameters."""
        return self._content

    def _draw_drafts(self, contexts: Sequence[Context]) -> list[tuple[list[int], list[float]]]:
        """Returns n drafts of each sequence, and their log probabilities. -1 where logits were not finite."""
        size = 1 << (len(contexts) - 1).bit_length()
        with kernels.threads_for_kernels():
            tokens, logprobs = self._bind(size)(self._held, self._make_inputs(contexts, size))
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def _bind(self, size: int) -> BoundCall:
        """Returns the program for a number of sequences, captured at the first call."""
        if size not in self._bound:
            state = torch.zeros(self.config.d_model * len(self.config.layers))
            one = Context(0, "", 0, array("q", [0]), 1, states=(state,))
            self._bound[size] = self._program.bind(self._held, self._make_inputs([one], size), check_every=0)
        return self._bound[size]

    def _make_inputs(self, contexts: Sequence[Context], size: int) -> DraftInputs:
        return make_inputs(contexts, size, self.hidden_window, self._program.mesh.device)


def _run_drafts(
    config: SpeculatorConfig, params: Params, inputs: DraftInputs
) -> tuple[Int64[Tensor, "b n"], Float[Tensor, "b n"]]:
    """Returns all drafts of each sequence, and their log probabilities."""
    logprobs = list[Tensor]()

    def multiply(name: str, x: Tensor) -> Tensor:
        return kernels.row_linear(x, params[name], config.shapes[name][0])

    def draw(i: int, logits_BV: Tensor) -> Tensor:
        tokens_B, logprobs_B = inputs.draw(i, logits_BV)
        logprobs.append(logprobs_B)
        return tokens_B

    if isinstance(config, EagleConfig):
        found = draft_eagle(config, params, multiply, inputs, draw)
    elif isinstance(config, MTPConfig):
        found = draft_mtp(config, params, multiply, inputs, draw)
    else:
        found = draft_recurrent(config, params, multiply, inputs, draw)
    return torch.stack(found, 1), torch.stack(logprobs, 1)


def _cut_draws(drawn: list[int], sampling: Sampling) -> list[int]:
    """Returns the drafts up to the first token that ends a sequence, or up to a row without a draw."""
    for i, token in enumerate(drawn):
        if token < 0 or token in sampling.stop_tokens:
            return drawn[: i + (token >= 0)]
    return drawn
