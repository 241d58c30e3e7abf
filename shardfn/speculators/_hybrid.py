"""A speculator and a suffix tree in one drafter, with the better proposal first."""

from collections.abc import Sequence

from shardfn.core import PyTree
from shardfn.inference import Context, Decoder, DraftTree, Limits, Suffix

from ._drafter import Speculator


class Hybrid:
    """Drafter that joins the proposals of a speculator and of a suffix tree in one tree.

    The proposal with more tokens expected to be accepted comes first, for example 5.2 and 3.1 tokens. Drafts of the
    other proposal take the places that are left. A sequence without a hidden state has only the suffix tree's proposal.

    Args:
        speculator: speculator of any kind. OWL's hybrid, HOWL, has the kind "owl".
        suffix: drafter by suffixes. The drafter takes a copy.

    Example:
        >>> from shardfn import core
        >>> from shardfn.inference import decoder
        >>> from shardfn.models import gpt
        >>> from shardfn.speculators import config_of, init
        >>> model = gpt.Config(vocab_size=64, num_layers=2, d_model=32, num_heads=4)
        >>> config = config_of(decoder(model), "owl")
        >>> Hybrid(Speculator(config, init(config, core.key(0)))).wants_spec_token
        True
    """

    def __init__(self, speculator: Speculator, suffix: Suffix | None = None) -> None:
        self.speculator, self._suffix = speculator, Suffix() if suffix is None else suffix.copy()

    @property
    def wants_hidden(self) -> tuple[int, ...]:
        """Returns the layers of the model that the speculator reads states after."""
        return self.speculator.wants_hidden

    @property
    def hidden_window(self) -> int:
        """Returns the most states that a proposal takes."""
        return self.speculator.hidden_window

    @property
    def wants_spec_token(self) -> bool:
        """Returns whether the speculator reads the state of a [SPEC] token."""
        return self.speculator.wants_spec_token

    def prepare(self, decoder: Decoder, params: PyTree) -> tuple[Decoder, PyTree]:
        """Returns decoder and parameters for an engine with the drafter, as `Speculator.prepare`.

        Args:
            decoder: decoder of the model.
            params: parameters of the model.
        """
        return self.speculator.prepare(decoder, params)

    def describe(self) -> str:
        """Returns the parts of the drafter, as a part of a line."""
        return f"{self.speculator.describe()}, with suffixes"

    def check(self, decoder: Decoder, limits: Limits | None = None) -> None:
        """Refuses an engine of another model.

        Raises:
            ValueError: sizes or digests differ. The message lists all.
        """
        self.speculator.check(decoder, limits)

    def warm_up(self, *, extended: bool = False) -> None:
        """Captures the speculator's programs."""
        self.speculator.warm_up(extended=extended)

    def propose(self, context: Context, most: int) -> DraftTree:
        """Returns the tree of both proposals."""
        return self.propose_all([(context, most)])[0]

    def propose_all(self, asks: Sequence[tuple[Context, int]]) -> list[DraftTree]:
        """Returns the trees of several sequences."""
        found = list[DraftTree]()
        for (context, most), chain in zip(asks, self.speculator.guess_all(asks), strict=True):
            tree = self._suffix.guess(context, most)
            first, second = (tree, chain) if tree.score > chain.score else (chain, tree)
            found.append(first.tree.merge(second.tree, most))
        return found

    def end(self, context: Context) -> None:
        """Keeps the tokens that the sequence has drawn, for later suffixes."""
        self._suffix.end(context)

    def copy(self) -> "Hybrid":
        """Returns a separate drafter, equal to this drafter."""
        return Hybrid(self.speculator, self._suffix)

    def digest(self) -> bytes:
        """Returns a hash of the speculator, and of the suffix tree's texts."""
        return self.speculator.digest() + self._suffix.digest()
