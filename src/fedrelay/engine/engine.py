"""The engine: takes flights under way and trains them, chain by chain, with whichever executor suits each kind of visit.

Chains meet here: of one plan, of several flights, of several runs. They are grouped by kind, model and the leaves that do not
train, and no group's bits depend on who else is in it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedrelay.engine.cut import CutVisiting
from fedrelay.engine.examples import Examples
from fedrelay.engine.lanes import Lanes, cannot
from fedrelay.engine.loop import Loop
from fedrelay.engine.visits import Boarding, Site, Tally
from fedrelay.models.model import Model
from fedrelay.seam.folds import Slice
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

log = logging.getLogger("fedrelay")
AHEAD = 3  # how many widths of chains may be under way beyond the first unfinished block: bounds what waits to be folded


@value
class Pick:
    """How a kind of visit is trained; part of a run's record, because bits depend on it."""

    engine: str = "lanes"
    """"lanes", "loop", or "cut" (the loop with the model really cut)."""
    width: int = 16
    """Models side by side in lanes; workers of the loop."""
    channels_last: bool = False
    precision: str = "float32"
    why: str = ""
    """Why it is not the other engine, where that is not a matter of speed."""


class Picker(Protocol):
    """Who decides how a kind is trained."""

    def __call__(self, site: Site, kind: Recipe, queue: Sequence[Boarding]) -> Pick: ...


@dataclass(frozen=True)
class Always:
    """The same pick for every kind."""

    pick: Pick

    def __call__(self, site: Site, kind: Recipe, queue: Sequence[Boarding]) -> Pick:
        return self.pick


class Engine:
    """Trains flights.

    ``stride``: steps between two looks at the boundaries. On a processor 1 is best; more lets lanes idle inside a visit, as a
    captured graph does.
    """

    def __init__(self, picker: Picker | Pick | None = None, stride: int = 1, keep: int = 4) -> None:
        self.picker: Picker = Always(picker or Pick()) if isinstance(picker, Pick | None) else picker
        self.stride, self.keep = stride, keep
        self._cannot: dict[tuple[Model, Examples, int], str | None] = {}
        self._lanes: OrderedDict[Any, Lanes] = OrderedDict()

    def picks(self) -> Mapping[str, Pick]:
        """What a measuring picker has decided; nothing where the pick is fixed."""
        return dict(getattr(self.picker, "picks", {}))

    def use(self, picks: Mapping[str, Pick], told: Callable[[Mapping[str, Pick]], None] | None = None) -> None:
        """Decide as recorded, and tell of every new decision before its first step."""
        if hasattr(self.picker, "use"):
            self.picker.use(picks, told)

    def run(self, tallies: Sequence[Tally]) -> None:
        """Train these flights to their end."""
        Flow(self, tallies).run()

    def pick(self, site: Site, kind: Recipe, queue: Sequence[Boarding]) -> Pick:
        """How this group trains. What was to train in lanes and cannot trains in the loop, with one line that says why."""
        pick = self.picker(site, kind, queue)
        if pick.engine == "lanes":
            here = (site.model, site.data, id(kind))
            if here not in self._cannot:
                self._cannot[here] = cannot(site, kind, untrained(site, kind, queue[0]), queue[0])
                if why := self._cannot[here]:
                    log.warning("%s", why)
            if why := self._cannot[here]:
                return Pick("loop", 1, False, pick.precision, why)
        return pick

    def executor(self, site: Site, kind: Recipe, queue: deque[Boarding]) -> Lanes | Loop:
        """What trains this group; lanes are kept between rounds, with their buffers."""
        pick = self.pick(site, kind, queue)
        if pick.engine != "lanes":
            visiting = {"visiting": CutVisiting} if pick.engine == "cut" else {}
            return Loop(site, pick.width if pick.engine == "loop" else 1, pick.channels_last, pick.precision, **visiting)
        key = (id(site.model), id(site.data), id(kind), pick)
        lanes = self._lanes.pop(key, None)
        frozen = untrained(site, kind, queue[0])
        if lanes is None:
            lanes = Lanes(site, kind, frozen, queue[0], pick.width, self.stride, pick.precision)
        lanes.step.frozen = frozen
        self._lanes[key] = lanes
        while len(self._lanes) > self.keep:
            self._lanes.popitem(last=False)
        return lanes


def untrained(site: Site, kind: Recipe, b: Boarding) -> dict[str, Tensor]:
    """The leaves that this kind of visit does not train."""
    scope = site.trains(kind)
    return {n: b.trip.weights[n] for n in b.trip.weights if n not in scope}


class Flow:
    """Which chains are under way: admitted in order, a window ahead of the first block that is not folded yet."""

    def __init__(self, engine: Engine, tallies: Sequence[Tally]) -> None:
        self.engine, self.tallies = engine, tallies
        self.ready: dict[Any, deque[Boarding]] = {}
        self.admitted = [0] * len(tallies)
        self.window = AHEAD * 32
        self._frozen: dict[Any, Any] = {}

    def run(self) -> None:
        self.admit()
        while self.ready:
            group = max(self.ready, key=lambda g: len(self.ready[g]))
            queue = self.ready[group]
            first = queue[0]
            executor = self.engine.executor(first.trip.tally.site, first.recipe.kind, queue)
            executor.run(queue, self.more)
            if not queue:
                del self.ready[group]

    def more(self, closed: Sequence[Boarding]) -> None:
        """Chains that may go on come first; then new ones are admitted."""
        for b in reversed(closed):
            for boarding in reversed(b.trip.open()):
                self.queue(boarding).appendleft(boarding)
        self.admit()

    def admit(self) -> None:
        for i, tally in enumerate(self.tallies):
            while self.admitted[i] < min(tally.oldest + self.window, len(tally.trips)):
                until = min(tally.oldest + self.window, len(tally.trips))
                new = tally.trips[self.admitted[i] : until]
                self.admitted[i] = until
                new = sorted(new, key=_work, reverse=True)  # longest first leaves few lanes idle at the end
                for trip in reversed(new) if tally.backwards else new:
                    for boarding in trip.open():
                        self.queue(boarding).append(boarding)

    def queue(self, b: Boarding) -> deque[Boarding]:
        site, recipe, w = b.trip.tally.site, b.recipe, b.trip.weights
        whole = recipe.scope is None and (w.base if isinstance(w, Slice) else w).keys() == site.trained
        key = (id(site.model), id(site.data), id(recipe.kind), () if whole else self.frozen(b, w))
        return self.ready.setdefault(key, deque())

    def frozen(self, b: Boarding, w: Mapping[str, Tensor]) -> Any:
        """Where the leaves lie that do not train: lanes share one set of them. (Not their ids: a leaf that an earlier visit
        of the chain trained is a row of something larger, made anew at every look.)"""
        scope = b.trip.tally.site.trains(b.recipe)
        base = w.base if isinstance(w, Slice) and not set(w.stacked) - set(scope) else w
        if base is not b.trip.chain.start:
            return tuple(base[n].data_ptr() for n in base if n not in scope)
        known = id(base), id(b.recipe)  # both live as long as their plan
        if known not in self._frozen:
            self._frozen[known] = tuple(t.data_ptr() for n, t in base.items() if n not in scope)
        return self._frozen[known]


def _work(trip: Any) -> float:
    first, n = trip.first, len(trip.chain.visits)
    return float(sum(trip.tally.sizes[first : first + n]))
