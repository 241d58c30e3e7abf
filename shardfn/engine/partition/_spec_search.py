"""Chooses which leaves of a program to cut along an axis, and where: for the fewest bytes sent, within a rank's memory.

Forms of leaves cost the bytes that the plan of `partition` with these forms sends (`_search.py`). The forms are found
in two steps. First leaves are free, and a byte that a rank holds has a price: the search for a plan then chooses forms
on the way. At a low price all leaves are whole and no bytes are sent, at a high price all leaves are cut. Another
starting point is columns and rows in turn (`_spec_rules.py`). Then the cheapest forms are improved, leaf by leaf and
two by two, as long as a change sends less and fits.

Leaves at the same place of equal layers have the same form (`_spec_rules.py`), for example the first weight of each
MLP.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from shardfn.graph import WHOLE, Form, cut

from ._graph import WIDTH, initial_form
from ._search import Search
from ._spec_rules import alternate, free_leaf, leaves_of_loops, settled, tie_equal_layers
from ._states import SearchedPlan, count_elements
from ._values import PlannedValue, scope_of


class HeldBytes(NamedTuple):
    """Bytes kept for a leaf, including the optimizer state.

    Attributes:
        per_element: bytes an element, of values that are cut with the leaf.
        fixed: bytes of values that each rank has whole.
    """

    per_element: float
    fixed: float = 0.0


class Proposal(NamedTuple):
    """Proposed cuts of leaves.

    Attributes:
        forms: forms by leaf.
        held: bytes of leaves kept by the rank with the most.
        sent: bytes that a rank sends, forward and backward, and operations, if operations have a price.
    """

    forms: dict[Node, Form]
    held: float
    sent: float


# The bounds of the price of a byte that a rank holds in the first step, in bytes that are sent.
_LEAST_PRICE, _MOST_PRICE, _HALVINGS = 1e-4, 1e6, 5
# States that searches keep: with free leaves, and with given ones.
_FREE_WIDTH, _NARROW = 24, 4
# A form of a loop's carry is dropped if its greedy plan is dearer than another's by more than this factor.
_LOOP_MARGIN = 1.5
# How many results of the first step are improved.
_IMPROVED = 2
# The tight limit of held bytes, with almost no leaf whole, as a multiple of the least possible.
_TIGHT = 1.1
# Among proposals that send equally much the proposal that holds less wins.
_PER_HELD_BYTE = 1e-9


Change = Sequence[tuple[int, Form]]


class Proposer:
    """Proposes forms for the leaves of a program.

    Args:
        graph: captured forward, as `partition_graph` takes a forward.
        num: number of ranks along the axis.
        leaves: inputs with forms to be found, with the bytes kept for each.
        trained: function that returns whether a gradient may arrive at an input.
        constants: function that returns the tensor of a `get_attr`.
        tied: whether leaves at the same place of equal layers have the same form.
        rows: leaves whose dim 0 is not to be cut, in addition to leaves of a loop.
        work_price: price of a floating-point operation of a rank, in bytes that are sent.
    """

    def __init__(
        self,
        graph: Graph,
        num: int,
        leaves: Mapping[Node, HeldBytes],
        trained: Callable[[Node], bool],
        constants: Callable[[Node], Tensor],
        *,
        tied: bool = True,
        rows: Collection[Node] = (),
        work_price: float = 0.0,
    ) -> None:
        self._num, self._scope = num, scope_of(graph, trained, constants)
        outputs: Sequence[Node] = next(n for n in graph.nodes if n.op == "output").args[0]  # pyright: ignore[reportAssignmentType]
        self._ends = [(self._scope.one(n), WHOLE) for n in outputs if isinstance(n, Node)]
        by_node = {v.node: v for v in self._scope.inputs}
        self._kept = {by_node[n]: kept for n, kept in leaves.items()}
        self._layers = leaves_of_loops(self._scope)
        self._rows = self._layers | {by_node[n] for n in rows}
        groups = tie_equal_layers(self._scope, [v for v, _ in self._ends]) if tied else []
        groups = [g for g in groups if all(v in self._kept for v in g)]
        own = {v for g in groups for v in g}
        self._groups = [*groups, *([v] for v in self._kept if v not in own)]
        read = {v: k for k, n in reversed(list(enumerate(self._scope.nodes))) for v in self._scope.operands[n]}
        first = [min((read[v] for v in g if v in read), default=0) for g in self._groups]
        self._in_order = sorted(range(len(first)), key=first.__getitem__)
        self._work_price = work_price
        self._search = Search(num, WIDTH, work_price=work_price)
        self._narrow = Search(num, _NARROW, margin=_LOOP_MARGIN, work_price=work_price)
        self._narrow.offers = self._search.offers
        self._priced: dict[tuple[Form, ...], float] = {}

    # The costs of forms.

    def least(self) -> list[Form]:
        """Returns for each group the form with the fewest bytes on a rank."""
        return [min(self._leaf_forms(i), key=lambda f: self._leaf_bytes(i, f)) for i in range(len(self._groups))]

    def least_held(self) -> float:
        """Returns the least bytes, over all forms, that the rank with the most keeps."""
        return self._resident_bytes(self.least())

    def proposal(self, forms: Sequence[Form]) -> Proposal:
        """Returns the groups' forms by leaf, with their costs."""
        by_leaf = {v.node: f for g, f in zip(self._groups, forms, strict=True) for v in g}
        return Proposal(by_leaf, self._resident_bytes(forms), self._search_plan(self._search, forms).total)

    def _leaf_forms(self, i: int) -> list[Form]:
        first = self._groups[i][0]
        shape, rows = first.seen.shape, first in self._rows
        return [WHOLE, *(cut(d, n, self._num) for d, n in enumerate(shape) if n > 1 and not (rows and d == 0))]

    def _leaf_bytes(self, i: int, form: Form) -> float:
        return sum(
            self._kept[v].per_element * count_elements(v, form, self._num) + self._kept[v].fixed
            for v in self._groups[i]
        )

    def _resident_bytes(self, forms: Sequence[Form]) -> float:
        return sum(self._leaf_bytes(i, f) for i, f in enumerate(forms))

    def _search_plan(self, search: Search, forms: Sequence[Form]) -> SearchedPlan:
        start = {v: initial_form(WHOLE) for v in self._scope.inputs}
        start |= {v: initial_form(f) for g, f in zip(self._groups, forms, strict=True) for v in g}
        return search.best(self._scope, start, self._ends)

    def _traffic_cost(self, forms: Sequence[Form]) -> float:
        key = tuple(forms)
        if key not in self._priced:
            self._priced[key] = self._search_plan(self._narrow, forms).total
        return self._priced[key]

    def _cost_of(self, forms: Sequence[Form], limit: float) -> tuple[float, float]:
        held = self._resident_bytes(forms)
        return max(0.0, held - limit), self._traffic_cost(forms) + _PER_HELD_BYTE * held

    # The search.

    def best(self, limit: float) -> Proposal:
        """Returns the cheapest proposal found with which no rank keeps more than `limit` bytes."""
        whole = [WHOLE] * len(self._groups)
        if self._resident_bytes(whole) <= limit and not self._work_price:
            return self.proposal(self._improve_forms(whole, limit))
        begun = self._find_starts(limit)
        # The best forms under a tight limit are a good starting point for a looser limit.
        tight = min(limit, _TIGHT * self.least_held())
        alternated = self._release_leaves(self._fit_forms(self._alternate_forms(), limit), limit)
        found = [alternated, self._improve_forms(self._sort_by_cost(begun, tight)[0], tight)]
        found = [self._improve_forms(x, limit) for x in self._sort_by_cost([*found, *begun], limit)[:_IMPROVED]]
        return min(map(self.proposal, [alternated, *found]), key=lambda p: (max(0.0, p.held - limit), p.sent))

    def _find_starts(self, limit: float) -> list[list[Form]]:
        """Returns starting points.

        The least, columns and rows in turn, and results at prices that approach the limit.
        """
        found = [self.least(), self._alternate_forms()]
        low, high = _LEAST_PRICE, _MOST_PRICE
        for _ in range(_HALVINGS):
            price = (low * high) ** 0.5
            found.append(self._forms_at_price(price))
            low, high = (low, price) if self._resident_bytes(found[-1]) <= limit else (price, high)
        return found

    def _alternate_forms(self) -> list[Form]:
        found = alternate(self._scope, self._num)
        for loop in self._scope.loops.values():
            inner = alternate(loop.scope, self._num)
            for v, x in zip(loop.given[loop.num_carry :], loop.layers[0], strict=True):
                leaf, form = self._layers_leaf(x), inner.get(v, WHOLE)
                if leaf is not None:
                    found[leaf] = form._replace(dim=form.dim + 1) if form.kind == "cut" else WHOLE
        return [next((found[v] for v in g if v in found), WHOLE) for g in self._groups]

    def _sort_by_cost(self, begun: Sequence[list[Form]], limit: float) -> list[list[Form]]:
        """Returns starting points made to fit, without repetitions, the cheapest first."""
        fitted = dict.fromkeys(tuple(self._fit_forms(x, limit)) for x in begun)
        return [list(x) for x in sorted(fitted, key=lambda x: self._cost_of(x, limit))]

    def _fit_forms(self, forms: list[Form], limit: float) -> list[Form]:
        """Gives leaves the least forms until all leaves fit, leaves with the largest excess of bytes first."""
        forms, least = list(forms), self.least()
        excess = {i: self._leaf_bytes(i, f) - self._leaf_bytes(i, least[i]) for i, f in enumerate(forms)}
        for i in sorted(excess, key=excess.__getitem__, reverse=True):
            if self._resident_bytes(forms) <= limit:
                break
            forms[i] = least[i]
        return forms

    def _improve_forms(self, forms: list[Form], limit: float) -> list[Form]:
        while True:
            before, forms = forms, self._release_leaves(forms, limit)
            for changes in (self._single_changes, self._double_changes):
                for change in changes():
                    tried = _apply_change(forms, change)
                    # A change that does not fit is not worth a search.
                    fits = tried != forms and self._resident_bytes(tried) <= max(limit, self._resident_bytes(forms))
                    if fits and self._cost_of(tried, limit) < self._cost_of(forms, limit):
                        forms = tried
            if forms == before:
                return forms

    def _release_leaves(self, forms: list[Form], limit: float) -> list[Form]:
        """Makes leaves whole for which there is room: first leaves that save most per byte, or most in all."""
        saved: dict[int, float] = {}
        a_byte: dict[int, float] = {}
        for i, form in enumerate(forms):
            tried = _apply_change(forms, [(i, WHOLE)])
            if (
                form != WHOLE
                and self._resident_bytes(tried) <= limit
                and self._traffic_cost(tried) < self._traffic_cost(forms)
            ):
                saved[i] = self._traffic_cost(forms) - self._traffic_cost(tried)
                a_byte[i] = saved[i] / max(self._resident_bytes(tried) - self._resident_bytes(forms), 1.0)
        found = [self._released_by(gain, forms, limit) for gain in (a_byte, saved)]
        return min(found, key=lambda x: self._cost_of(x, limit))

    def _released_by(self, gain: dict[int, float], forms: list[Form], limit: float) -> list[Form]:
        for i in sorted(gain, key=gain.__getitem__, reverse=True):
            tried = _apply_change(forms, [(i, WHOLE)])
            if self._resident_bytes(tried) <= limit and self._traffic_cost(tried) < self._traffic_cost(forms):
                forms = tried
        return forms

    def _single_changes(self) -> Iterator[Change]:
        return ([(i, form)] for i in range(len(self._groups)) for form in self._leaf_forms(i))

    def _double_changes(self) -> Iterator[Change]:
        """Returns changes of two leaves read in sequence: in the same way, or where a leaf makes room for the other."""
        least = self.least()
        for i, j in itertools.pairwise(self._in_order):
            ways = [WHOLE, WHOLE], [WHOLE, least[j]], [least[i], WHOLE]
            for one, other in ways:
                yield [(i, one), (j, other)]

    # The first step.

    def _forms_at_price(self, price: float) -> list[Form]:
        """Returns the forms that a search chooses when a byte that a rank holds has this price."""
        search = Search(self._num, _FREE_WIDTH, price, work_price=self._work_price)
        search.offers = self._search.offers
        found: dict[PlannedValue, Form] = {}
        for loop in self._scope.loops.values():
            body = {v: initial_form(WHOLE) for v in loop.scope.inputs}
            own = {v: self._layers_leaf(x) for v, x in zip(loop.given[loop.num_carry :], loop.layers[0], strict=True)}
            body |= {v: free_leaf() for v, leaf in own.items() if leaf is not None}
            ends = [(v, WHOLE if k < loop.num_carry else None) for k, v in enumerate(loop.ends)]
            for v, form in settled(
                search.searched(loop.scope, body, ends, _FREE_WIDTH), loop.scope, body, self._num
            ).items():
                leaf = own[v]
                assert leaf is not None
                found[leaf] = form._replace(dim=form.dim + 1) if form.kind == "cut" else WHOLE
        start = {v: initial_form(WHOLE) for v in self._scope.inputs}
        start |= {v: initial_form(found[v]) if v in found else free_leaf() for v in self._kept}
        found |= settled(search.searched(self._scope, start, self._ends, _FREE_WIDTH), self._scope, start, self._num)
        # The second of equal layers decides for the other layers. Leaves that no operation reads get the least form.
        least = self.least()
        return [next((found[v] for v in reversed(g) if v in found), least[i]) for i, g in enumerate(self._groups)]

    def _layers_leaf(self, x: PlannedValue) -> PlannedValue | None:
        leaf = x.part_of
        return leaf if leaf in self._layers and leaf in self._kept else None


def _apply_change(forms: Sequence[Form], change: Change) -> list[Form]:
    changed = list(forms)
    for i, form in change:
        changed[i] = form
    return changed
