"""A speculator as a drafter of an engine: chains of drafts, or trees.

A tree has, after each of its K most probable chains, the token drawn there and the K most probable tokens. The K most
probable of all longer chains continue, and so on for n tokens. A proposal has the most probable entries under the
speculator, as many as asked for. A chain is never more probable than its beginning, so parents come first.

B sequences, K branches, N = B K chains, M entries of a tree, V vocabulary.

References:
    Li et al., EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, 2024,
    https://arxiv.org/abs/2406.16858
"""

import functools
import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from shardfn import kernels
from shardfn.core import PyTree, make_mesh, raise_all, tree_leaves
from shardfn.engine import BoundCall, sharded
from shardfn.inference import Context, Decoder, DraftTree, Guess, Limits, Sampling
from shardfn.transforms import jit

from ._config import EagleConfig, MTPConfig, RecurrentConfig, SpeculatorConfig, list_misfits
from ._eagle import pack_layers, start_eagle
from ._inputs import DraftInputs, DraftSteps, make_inputs
from ._loss import Params, check_params
from ._mtp import start_mtp
from ._owl import add_spec_token
from ._recurrent import pack_recurrent, start_recurrent

_LEAST_TEMPERATURE = 1e-5  # of a draw that is not greedy


class Speculator:
    """Drafter that proposes the draft tokens of a trained speculator, from the last hidden states of the model.

    All sequences of a step are a single batch. A draft is drawn as the engine draws the token of the same
    place, by the same key, position, temperature and filters. Each rank has the whole speculator, and sends nothing.

    Args:
        config: shape.
        params: parameters as from `init`, whole and equal on all ranks.
        digest: digest of the model that the speculator was trained for (`Decoder.digest`). Empty: any model of the
            sizes in `config`.
        branches: number K of draft tokens of a position that are expanded by further draft tokens. 1 proposes a chain,
            and a larger number a tree.

    Raises:
        ValueError: leaves are missing, unknown, or of another shape, or `branches` is not from 1 to the vocabulary.

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

    def __init__(self, config: SpeculatorConfig, params: Params, *, digest: str = "", branches: int = 1) -> None:
        check_params(config, params)
        if type(branches) is not int or not 1 <= branches <= config.vocab_size:
            raise ValueError(
                f"Speculator: branches must be an integer from 1 to the vocabulary {config.vocab_size}, got"
                f" {branches!r}. 1 proposes chains."
            )
        self.config, self.branches, self._digest = config, branches, digest
        params = {name: x.detach().float() if x.is_floating_point() else x for name, x in params.items()}
        content = hashlib.blake2b(repr((config, digest, branches)).encode(), digest_size=8)
        for x in tree_leaves(params):
            content.update(x.cpu().contiguous().numpy().tobytes())
        self._content = content.digest()
        self._spec = params.get("spec")
        is_recurrent = isinstance(config, RecurrentConfig)
        packed = pack_recurrent(config, params) if is_recurrent else pack_layers(config, params)
        run = functools.partial(_run_drafts, config, branches)
        self._program = sharded(jit(run, backend="graph"), mesh=make_mesh({}, alone=True))
        self._held = self._program.init(packed)
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
        tree = f", trees of {self.branches} branches" if self.branches > 1 else ""
        return f"{self.config.kind} speculator, {size:,} parameters, {self.config.num_drafts} tokens{tree}"

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
        """Captures the programs for up to 8 sequences, the most that `Limits(drafts=15)` asks for at once."""
        del extended
        for size in (1, 2, 4, 8):
            self._bind(size)

    def propose(self, context: Context, most: int) -> DraftTree:
        """Returns the tokens that the speculator draws after the last token, in a tree with other likely tokens."""
        return self.propose_all([(context, most)])[0]

    def propose_all(self, asks: Sequence[tuple[Context, int]]) -> list[DraftTree]:
        """Returns the proposals of several sequences. A sequence without a hidden state has an empty proposal."""
        return [guess.tree for guess in self.guess_all(asks)]

    def guess_all(self, asks: Sequence[tuple[Context, int]]) -> list[Guess]:
        """Returns the proposals of several sequences, and the number of their tokens expected to be accepted.

        The number is the sum of the probabilities of all entries of the tree, as the speculator has them.
        """
        seen = [context for context, _ in asks if context.states]
        drawn = iter(self._draw_trees(seen) if seen else ())
        return [
            _cut_tree(next(drawn), most, context.sampling) if context.states else Guess(0.0, DraftTree())
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

    def _draw_trees(self, contexts: Sequence[Context]) -> list["TreeEntries"]:
        """Returns all entries of each sequence's tree."""
        size = 1 << (len(contexts) - 1).bit_length()
        with kernels.threads_for_kernels():
            found = self._bind(size)(self._held, self._make_inputs(contexts, size))
        return [TreeEntries(*each) for each in zip(*(x.tolist() for x in found), strict=True)]

    def _bind(self, size: int) -> BoundCall:
        """Returns the program for a number of sequences, captured at the first call."""
        if size not in self._bound:
            state = torch.zeros(self.config.d_model * len(self.config.layers))
            one = Context(0, "", 0, array("q", [0]), 1, states=(state,))
            self._bound[size] = self._program.bind(self._held, self._make_inputs([one], size), check_every=0)
        return self._bound[size]

    def _make_inputs(self, contexts: Sequence[Context], size: int) -> DraftInputs:
        return make_inputs(contexts, size, self.hidden_window, self._program.mesh.device)


class TreeEntries(NamedTuple):
    """Entries of a tree, or of the trees of B sequences.

    Attributes:
        tokens: tokens. -1 where logits were not finite.
        parents: place of each entry's parent. -1 is the last known token.
        scores: log probability of the chain up to the entry, float64. -inf where a sibling has the same token.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]


_Drafts = tuple[Int64[Tensor, "b m"], Int64[Tensor, "b m"], Float64[Tensor, "b m"]]


def _run_drafts(config: SpeculatorConfig, branches: int, params: Params, inputs: DraftInputs) -> _Drafts:
    """Returns tokens, parents and scores of all entries of each sequence's tree, see `TreeEntries`."""
    if isinstance(config, EagleConfig):
        steps = start_eagle(config, params, inputs)
    elif isinstance(config, MTPConfig):
        steps = start_mtp(config, params, inputs)
    else:
        steps = start_recurrent(config, params, inputs)
    if (ids := params.get("draft_tokens")) is not None:
        steps = steps._replace(find_tokens=lambda found: torch.where(found < 0, found, ids[found.clamp(min=0)]))
    run = _run_chain if branches == 1 else functools.partial(_run_tree, branches)
    return run(config.num_drafts, steps, inputs)


def _run_chain(num: int, steps: DraftSteps, inputs: DraftInputs) -> _Drafts:
    """Returns a chain for each sequence."""
    state, tokens_B, found = steps.state, inputs.last_B, list[tuple[Tensor, Tensor]]()
    for i, places_B in enumerate(inputs.list_places(num)):
        state, logits_BV = steps.advance(i, state, tokens_B)
        drawn_B, logprobs_B = inputs.draw(places_B, logits_BV)
        tokens_B = steps.find_tokens(drawn_B)
        found.append((tokens_B, logprobs_B))
    tokens_BM, logprobs_BM = (torch.stack(each, 1) for each in zip(*found, strict=True))
    parents_BM = torch.arange(-1, num - 1, device=tokens_BM.device).expand_as(tokens_BM)
    return tokens_BM, parents_BM, logprobs_BM.double().cumsum(1)


def _run_tree(branches: int, num: int, steps: DraftSteps, inputs: DraftInputs) -> _Drafts:
    """Returns the entries of a tree for each sequence, with `branches` chains of every length."""
    state, B, tokens_N = steps.state, len(inputs.keys), inputs.last_B
    parents_BK, scores_BK = tokens_N.new_full((B, 1), -1), tokens_N.new_zeros(B, 1, dtype=torch.float64)
    found, first = list[tuple[Tensor, Tensor, Tensor]](), 0
    for i, places_B in enumerate(inputs.list_places(num)):
        state, logits_NV = steps.advance(i, state, tokens_N)
        tokens_NC, logprobs_NC = _pick_tokens(branches, inputs, places_B, logits_NV)
        C, tokens_BM = tokens_NC.shape[1], steps.find_tokens(tokens_NC).view(B, -1)
        scores_BM = (scores_BK.flatten()[:, None] + logprobs_NC).view(B, -1)
        found.append((tokens_BM, parents_BK.repeat_interleave(C, 1), scores_BM))
        order_BM = torch.sort(scores_BM.nan_to_num(-math.inf), dim=-1, descending=True, stable=True).indices
        best_BK, count = order_BM[:, :branches], scores_BM.shape[1]
        tokens_N, scores_BK = tokens_BM.gather(1, best_BK).flatten(), scores_BM.gather(1, best_BK)
        if i + 1 < num:
            offsets_B1 = torch.arange(B, device=best_BK.device)[:, None] * (count // C)
            state = steps.select(state, (offsets_B1 + best_BK // C).flatten())
        parents_BK, first = best_BK + first, first + count
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*found, strict=True))
    return tokens, parents, scores


def _pick_tokens(
    branches: int, inputs: DraftInputs, places_B: Tensor, logits_NV: Tensor
) -> tuple[Int64[Tensor, "n c"], Float64[Tensor, "n c"]]:
    """Returns the drawn token of a draft after each chain, and then others by probability.

    The model draws by the same random number, so that it draws the same token more often than by the token's
    probability p. At a temperature sqrt(p) is taken for the drawn token, and p' / (1 + sqrt(p)) for a token of
    probability p'. These add up to 1 as well.
    """
    drawn_N, logprobs_N = inputs.draw(places_B, logits_NV)
    tokens_NK, others_NK = kernels.top_logprobs(logits_NV, branches)
    others_NK = others_NK.masked_fill(tokens_NK == drawn_N[:, None], -math.inf).double()
    own_N1 = logprobs_N[:, None].double()
    samples_N1 = inputs.temperature.repeat_interleave(len(drawn_N) // len(inputs.keys))[:, None] >= _LEAST_TEMPERATURE
    others_NK = torch.where(samples_N1, others_NK - (own_N1 / 2).exp().log1p(), others_NK)
    own_N1 = torch.where(samples_N1, own_N1 / 2, own_N1)
    return torch.cat([drawn_N[:, None], tokens_NK], 1), torch.cat([own_N1, others_NK], 1)


def _cut_tree(drawn: TreeEntries, most: int, sampling: Sampling) -> Guess:
    """Returns the most probable entries that follow no token that ends a sequence and no place without a draw."""
    tokens, parents, score, places = list[int](), list[int](), list[float](), {-1: -1}
    order = sorted((i for i, x in enumerate(drawn.scores) if x > -math.inf), key=lambda i: -drawn.scores[i])
    for i in order:
        token, parent = drawn.tokens[i], drawn.parents[i]
        if len(tokens) == most or token < 0 or parent not in places:
            continue
        if token not in sampling.stop_tokens:
            places[i] = len(tokens)
        tokens.append(token)
        parents.append(places[parent])
        score.append(math.exp(drawn.scores[i]))
    return Guess(math.fsum(score), DraftTree(tuple(tokens), tuple(parents)))
