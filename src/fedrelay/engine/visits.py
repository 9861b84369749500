"""A flight under way: its chains as trips, what they stage, and the folds over them. Nothing outside changes before it lands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrelay.engine.traffic import COLUMNS, shape, traffic
from fedrelay.seam.folds import Ends, Fold, Slice
from fedrelay.seam.landing import Receipts
from fedrelay.seam.places import child
from fedrelay.seam.plan import Chain, Plan
from fedrelay.seam.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.engine.examples import Examples
    from fedrelay.models.model import Model
    from fedrelay.seam.values import Weights

Kept = Mapping[str, Mapping[str, Any]]
"""What a client keeps: rule -> leaf -> tensor (or what stands for one that lies on disk)."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where visits happen: a model and everybody's data."""

    model: Model
    data: Examples
    block: int = 16
    """Chains that are folded together; a constant of the run, because sums depend on it."""
    buffers: str = "average"
    """What becomes of BatchNorm's running statistics: "average" (they travel) or "local" (they stay on the client)."""

    @cached_property
    def trained(self) -> set[str]:
        """The leaves that train where nothing else is said."""
        return set(self.model.scope())

    def added(self, recipe: Recipe) -> Mapping[str, Tensor]:
        """Leaves that the recipe's rules add to the model."""
        if not recipe.adds:
            return NOTHING
        w = self.model.initial()
        return {n: t for r in recipe.rules for n, t in r.leaves(w).items()}

    def trains(self, recipe: Recipe) -> tuple[str, ...]:
        """The leaves that a visit trains."""
        if recipe.kind not in self._trains:
            self._trains[recipe.kind] = (*self.model.scope(recipe.scope), *self.added(recipe))
        return self._trains[recipe.kind]

    @cached_property
    def _trains(self) -> dict[Recipe, tuple[str, ...]]:
        return {}

    def sends(self, recipe: Recipe) -> tuple[str, ...]:
        """The leaves that travel: those that train, and statistics that are averaged."""
        return self.trains(recipe) + (self.model.buffers(recipe.scope) if self.buffers == "average" else ())

    @cached_property
    def _traffic(self) -> dict[Any, tuple[int, ...]]:
        return {}

    def traffic(self, recipe: Recipe, scope: tuple[str, ...], chain: Chain, along: Any, o: Outcome) -> tuple[int, ...]:
        """What a visit sends; visits that look the same from outside send the same."""
        what = (recipe, len(chain.start), shape(chain.extra), shape(along), shape(o.up), shape(o.along), o.reason is None)
        if what not in self._traffic:
            self._traffic[what] = traffic(recipe, scope, chain, along, o)
        return self._traffic[what]

    @cached_property
    def draws(self) -> bool:
        """Whether a forward pass draws random numbers. It is tried, for a module may drop out without owning such a layer."""
        import torch

        part, generator = self.data.train, torch.default_generator
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = generator.get_state()
            x = self.data.inputs(part.x[part.index[:1].long().repeat(2)])
            self.model.forward({**self.model.initial(), **self.model.counters()}, x, training=True)
            return not torch.equal(before, generator.get_state())

    @property
    def keeps_buffers(self) -> bool:
        """Whether clients keep statistics of their own."""
        return self.buffers == "local" and bool(self.model.buffers())


OPTIMIZER = "optimizer"  # under this name an optimizer's state travels or stays
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Outcome:
    """How one recipe of one visit ended; ``cut`` counts the bytes that crossed a cut."""

    __slots__ = ("along", "cut", "loss", "memory", "reason", "steps", "up", "weights")

    def __init__(self, weights: Weights, loss: float, steps: int, reason: str | None = None, cut: int = 0) -> None:
        self.weights, self.loss, self.steps, self.reason, self.cut = weights, loss, steps, reason, cut
        self.memory: Kept = NOTHING
        self.up: Mapping[str, Weights] = NOTHING
        self.along: Mapping[str, Mapping[str, Tensor]] = NOTHING


class Boarding:
    """One recipe of a trip's next visit, ready to train."""

    __slots__ = ("client", "key", "recipe", "trip", "which")

    def __init__(self, trip: Trip, which: int, client: int, recipe: Recipe, key: int) -> None:
        self.trip, self.which, self.client, self.recipe, self.key = trip, which, client, recipe, key

    @property
    def optimizer_state(self) -> Mapping[str, Tensor]:
        """What the optimizer goes on from; nothing where it starts fresh."""
        where = self.recipe.optimizer_state
        if where == "fresh":
            return NOTHING
        return (self.trip.along if where == "travels" else self.memory).get(OPTIMIZER, NOTHING)

    @property
    def memory(self) -> Kept:
        return self.trip.kept.get(self.client) or self.trip.tally.memory(self.client)


class Trip:
    """A chain under way. It hands its model on, and only its latest model is alive."""

    __slots__ = (
        "along",
        "chain",
        "examples",
        "first",
        "handed",
        "kept",
        "keys",
        "made",
        "number",
        "position",
        "scope",
        "start",
        "tally",
        "trying",
        "up",
        "weights",
    )

    def __init__(self, tally: Tally, number: int, chain: Chain, first: int, keys: list[int]) -> None:
        self.tally, self.number, self.chain, self.first, self.keys = tally, number, chain, first, keys
        self.start: Weights = chain.start
        self.weights: Weights = chain.start
        self.along: Mapping[str, Mapping[str, Tensor]] = NOTHING
        self.kept: Mapping[int, Kept] = {}
        self.up: Mapping[str, Weights] = NOTHING
        self.scope: tuple[str, ...] = ()
        self.position = self.handed = self.examples = 0
        self.trying: list[Outcome | None] = []
        self.made: dict[Fold[Any], Any] | None = None

    def open(self) -> list[Boarding]:
        """What trains next: the recipes of the next visit, which share its place; nothing when the chain has ended."""
        visits = self.chain.visits
        while self.position < len(visits) and visits[self.position].lost is not None:
            self.settle(Outcome(self.weights, math.nan, 0, visits[self.position].lost), visits[self.position].recipes[0])
        if self.position == len(visits):
            self.tally.take(self)
            return []
        visit, key = visits[self.position], self.keys[self.position]
        for r in visit.recipes:
            if missing := {n: t for n, t in self.tally.site.added(r).items() if n not in self.weights}:
                self.weights = {**self.weights, **missing}
                self.start = self.start if self.handed else self.weights
        if len(visit.recipes) == 1:
            return [Boarding(self, 0, visit.client, visit.recipes[0], key)]
        self.trying = [None] * len(visit.recipes)
        return [Boarding(self, i, visit.client, r, key) for i, r in enumerate(visit.recipes)]

    def close(self, which: int, outcome: Outcome) -> bool:
        """Take one recipe's outcome; True when the visit is over and the chain may go on."""
        recipes = self.chain.visits[self.position].recipes
        if len(recipes) > 1:
            self.trying[which] = outcome
            if any(o is None for o in self.trying):
                return False
            done = [o for o in self.trying if o is not None]
            which = min(range(len(done)), key=lambda i: (done[i].reason is not None, done[i].loss))
            outcome, self.trying = done[which], []
        self.settle(outcome, recipes[which])
        return True

    def settle(self, o: Outcome, recipe: Recipe) -> None:
        """Commit a visit to the trip: a failed one leaves the last good hand-over as it is."""
        tally, visit, row = self.tally, self.chain.visits[self.position], self.first + self.position
        n = tally.sizes[row]
        tally.receipt(row, o, recipe, self)
        self.position += 1
        if o.reason is not None:
            return
        received, self.weights = self.weights, o.weights
        scope = tally.scope(recipe)
        self.scope = scope if scope == self.scope or not self.scope else tuple(dict.fromkeys(self.scope + scope))
        self.examples += n
        self.handed += 1
        if o.memory:
            before = self.kept.get(visit.client) or tally.memory(visit.client)
            self.kept = {**self.kept, visit.client: {**before, **o.memory}}
        if o.along:
            self.along = {**self.along, **o.along}
        if tally.alone(self.number):
            self.up = o.up  # folded with its neighbours when the block is complete
        elif tally.at_visits:
            ends = Ends([received], [self.weights], [scope], [n], [o.up], tally.spill)
            made = self.made or {f: f.empty() for f in tally.at_visits}
            self.made = {f: f.add(made[f], ends) for f in tally.at_visits}


class Tally:
    """What one flight makes: receipts, staged memories, and folds over blocks of consecutive chains, merged in block order."""

    def __init__(
        self,
        site: Site,
        plan: Plan,
        key: int,
        sizes: Sequence[int],
        seconds: Sequence[float],
        memory: Callable[[int], Kept],
        stage: Callable[[Kept], Kept],
        spill: Callable[[Weights], Weights],
    ) -> None:
        self.spill = spill
        self.site, self.plan, self.sizes, self.memory, self.stage = site, plan, sizes, memory, stage
        self.backwards = False  # a test's word: admit chains in another order, which no bit may depend on
        self.at_visits = [f for f in plan.folds if f.at == "visits"]
        self.made = {f: f.empty() for f in plan.folds}
        self.kept: dict[int, Kept] = {}
        self._scopes: dict[int, tuple[str, ...]] = {}
        self._traffic: dict[Any, tuple[int, ...]] = {}
        n = len(sizes)
        self.seconds = seconds
        self._loss, self._steps, self._reasons = [math.nan] * n, [0] * n, dict[int, str]()
        self._recipes: list[Recipe | None] = [None] * n
        self._bytes: list[tuple[int, ...]] = [(0,) * len(COLUMNS)] * n
        self.trips = self._trips(key)
        self._blocks = [self.trips[i : i + site.block] for i in range(0, len(self.trips), site.block)]
        self._alone = [all(len(t.chain.visits) <= 1 for t in b) for b in self._blocks]
        self._open = [len(b) for b in self._blocks]
        self._ready: dict[int, dict[Fold[Any], Any]] = {}
        self._merged = 0

    def _trips(self, key: int) -> list[Trip]:
        chains = self.plan.chains
        lengths = np.array([len(c.visits) for c in chains], np.int64)
        first = np.cumsum(lengths) - lengths
        position = np.arange(lengths.sum()) - np.repeat(first, lengths)
        keys = child(np.repeat(child(np.array([key]), np.arange(len(chains))), lengths), position).tolist()
        return [
            Trip(self, i, c, f, keys[f : f + len(c.visits)]) for i, (c, f) in enumerate(zip(chains, first.tolist(), strict=True))
        ]

    @property
    def oldest(self) -> int:
        """The first chain of the first block that is not folded yet: how far ahead others may run is counted from here."""
        return self._merged * self.site.block

    def alone(self, number: int) -> bool:
        """Whether this chain's block holds only chains of one visit, which are folded together."""
        return self._alone[number // self.site.block]

    def scope(self, recipe: Recipe) -> tuple[str, ...]:
        """The leaves that a visit may change and that travel."""
        if id(recipe) not in self._scopes:
            self._scopes[id(recipe)] = self.site.sends(recipe)
        return self._scopes[id(recipe)]

    def receipt(self, row: int, o: Outcome, recipe: Recipe, trip: Trip) -> None:
        self._loss[row], self._steps[row], self._recipes[row] = o.loss, o.steps, recipe
        if o.reason is not None:
            self._reasons[row] = o.reason
        what = (id(recipe), id(trip.chain.extra), bool(trip.along), o.reason is None)
        known = self._traffic.get(what)
        if known is None:
            known = self._traffic[what] = self.site.traffic(recipe, self.scope(recipe), trip.chain, trip.along, o)
        self._bytes[row] = (*known[:-1], o.cut) if o.cut else known

    def take(self, trip: Trip) -> None:
        """A chain has ended. When its whole block has, the block is folded; blocks are merged in order."""
        b = trip.number // self.site.block
        self._open[b] -= 1
        if self._open[b]:
            return
        self._ready[b] = self._fold(self._blocks[b], self._alone[b])
        for t in self._blocks[b]:
            for client, kept in t.kept.items():
                self.kept[client] = self.stage(kept)
            t.weights, t.up, t.along, t.kept, t.made = NOTHING, NOTHING, NOTHING, {}, None
        while self._merged in self._ready:
            part = self._ready.pop(self._merged)
            self.made = {f: f.merge(acc, part[f]) for f, acc in self.made.items()}
            self._merged += 1

    def _fold(self, trips: list[Trip], alone: bool) -> dict[Fold[Any], Any]:
        good = [t for t in trips if t.handed]
        part = {}
        for f in self.plan.folds:
            part[f] = f.empty()
            if f.at == "visits" and not alone:
                for t in good:
                    part[f] = f.merge(part[f], t.made[f]) if t.made else part[f]
            elif shown := trips if f.at == "every end" else good:
                part[f] = f.add(part[f], _ends(shown, f.at == "visits", self.spill))
        return part

    def receipts(self) -> Receipts:
        """The visits as columns."""
        visits = [v for c in self.plan.chains for v in c.visits]
        lengths = [len(c.visits) for c in self.plan.chains]
        first = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
        sent = np.array(self._bytes, np.int64).reshape(len(visits), len(COLUMNS))
        return Receipts(
            client=np.fromiter((v.client for v in visits), np.int64, len(visits)),
            chain=np.repeat(np.arange(len(lengths)), lengths),
            position=np.arange(len(visits)) - first,
            examples=np.array(self.sizes, np.int64),
            steps=np.array(self._steps, np.int64),
            loss=np.array(self._loss),
            seconds=np.array(self.seconds, float),
            numbers=_numbers([r or v.recipes[0] for r, v in zip(self._recipes, visits, strict=True)]),
            traffic={name: sent[:, i] for i, name in enumerate(COLUMNS)},
            reasons=dict(sorted(self._reasons.items())),  # not in the order in which they happened to fail
        )


def _ends(trips: list[Trip], handovers: bool, spill: Callable[[Weights], Weights]) -> Ends:
    return Ends(
        [t.start for t in trips],
        [t.weights for t in trips],
        [t.scope for t in trips],
        [t.examples + (0 if handovers else t.chain.seen) for t in trips],
        [t.up for t in trips],
        spill,
    )


def _numbers(recipes: list[Recipe]) -> dict[str, Any]:
    distinct = {id(r): r for r in recipes}
    if len(distinct) == 1:
        return {p: np.full(len(recipes), v, float) for p, v in recipes[0].numbers.items()}
    paths = dict.fromkeys(p for r in distinct.values() for p in r.numbers)
    return {p: np.array([r.numbers.get(p, math.nan) for r in recipes], float) for p in paths}


def settled(kept: Kept) -> Kept:
    """Memories as tensors of their own."""
    return {rule: m.settled() if isinstance(m, Slice) else m for rule, m in kept.items()}
