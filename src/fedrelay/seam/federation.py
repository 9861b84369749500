"""The seam: a federation runs plans. An algorithm is handed a view of one, from its own path and through its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from fedrelay.seam.folds import Fold
from fedrelay.seam.landing import Flight, Landing
from fedrelay.seam.methods import Population
from fedrelay.seam.places import Place
from fedrelay.seam.plan import Chain, Plan
from fedrelay.seam.questions import Question

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedrelay.seam.values import Weights

T = TypeVar("T")


class Federation(Protocol):
    """Who runs plans: a simulator, a cluster, or devices. Three verbs (launch, land, ask), and forgetting."""

    @property
    def seed(self) -> int: ...
    @property
    def sizes(self) -> NDArray[np.int64]:
        """Training examples of each client."""
        ...

    def initial(self) -> Weights:
        """The model before anybody trained it."""
        ...

    def place(self, path: tuple[str, ...], purpose: str) -> Place:
        """The next place for (path, purpose); no place is handed out twice."""
        ...

    def launch(self, place: Place, plan: Plan) -> Flight:
        """Send a plan on its way."""
        ...

    def land(self, any_of: Sequence[Flight], also: Sequence[Flight] = ()) -> list[Landing]:
        """Wait for the earliest of ``any_of``; with it comes whatever else of both is down by then, in time order."""
        ...

    def ask(self, clients: Sequence[int], question: Question[T], weights: Weights | None = None) -> Mapping[int, T]:
        """Ask clients; who refuses is missing from the answers."""
        ...

    def forget(self, path: tuple[str, ...]) -> tuple[Flight, ...]:
        """A phase that is over leaves no flights and no memories; what was still in the air is returned."""
        ...


class Layer:
    """What stands around a federation: it sees every plan before launch and every landing, so layers stack.

    Its randomness is the plan's place under its own name: adding a layer changes no other draw. State that must last is kept
    by whoever made the layer.
    """

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        """Rewrite a plan: other numbers, lost visits, an additional rule."""
        return plan

    def landed(self, landing: Landing) -> None:
        """Overhear a landing."""


@dataclass(frozen=True)
class Run:
    """A federation seen from one path and through layers: what an algorithm is handed as ``fed``."""

    base: Federation
    path: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    """The innermost algorithm's first."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Training examples of each client."""
        return self.base.sizes

    @property
    def clients(self) -> NDArray[np.int64]:
        """The clients that can train: those with at least one example."""
        return np.flatnonzero(self.base.sizes)

    def initial(self) -> Weights:
        return self.base.initial()

    def population(self, units: int | None = None) -> Population:
        """All clients that can train, and the units that a server counts (superclients, else clients)."""
        return Population(len(self.clients), units or len(self.clients))

    def under(self, name: str) -> Run:
        """The same federation for a phase or a part called ``name``: with memories and randomness of its own."""
        return replace(self, path=(*self.path, name))

    def around(self, layer: Layer) -> Run:
        """The same federation with a layer around it."""
        return replace(self, layers=(layer, *self.layers))

    def forget(self) -> tuple[Flight, ...]:
        return self.base.forget(self.path)

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator for this purpose, new at every call."""
        return self.base.place(self.path, purpose).rng(self.base.seed)

    def launch(self, chains: Iterable[Chain], *folds: Fold[Any]) -> Flight:
        """Send chains on their way under these folds."""
        plan = Plan(tuple(chains), tuple(dict.fromkeys(folds)))
        place = self.base.place(self.path, "plan")
        met = Counter[str]()
        for layer in self.layers:
            name = type(layer).__name__
            met[name] += 1
            own = (name,) if met[name] == 1 else (name, str(met[name]))  # two of one class draw apart
            plan = layer.plan(plan, partial(place.rng, self.base.seed, *own))
        return self.base.launch(place, plan)

    def land(self, any_of: Iterable[Flight], also: Iterable[Flight] = ()) -> list[Landing]:
        """The earliest of ``any_of``, and whatever else is down by then."""
        landings = self.base.land(list(any_of), list(also))
        for landing in landings:
            for layer in self.layers:
                layer.landed(landing)
        return landings

    def train(self, chains: Iterable[Chain], *folds: Fold[Any]) -> Landing:
        """Launch, then land."""
        return self.land([self.launch(chains, *folds)])[0]

    def ask(self, clients: Sequence[int], question: Question[T], weights: Weights | None = None) -> Mapping[int, T]:
        return self.base.ask(clients, question, weights)
