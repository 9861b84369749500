"""What any federated run is compared to: all data in one place, and every client for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrelay.methods.plain import Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Bank
from fedrelay.seam.plan import EVERYBODY, chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.seam.values import Weights


@value
class LocalOnly(Algorithm[Any]):
    """Every client trains its own model and nobody merges; ``weights`` is their plain mean, for reference only."""

    recipe: Recipe = Recipe()

    def init(self, fed: Run, weights: Weights | None = None) -> Personal:
        w = weights or fed.initial()
        return Personal(w, {int(k): w for k in fed.clients})

    def round(self, fed: Run, s: Personal) -> Personal:
        got = fed.train((chain(w, [k], self.recipe) for k, w in s.models.items()), *Plain("count").folds, Bank())
        models = {k: w for k, (w, _) in zip(s.models, got[Bank()], strict=True)}
        return Personal({**s.weights, **got[Plain("count").folds[0]]}, models)


@value
class Personal:
    """A model per client, and their mean."""

    weights: Weights
    models: Any


@value
class Centralised(Algorithm[State]):
    """All clients' examples pooled at the server (the ledger says so). A round is one visit: its epochs are over everything."""

    recipe: Recipe = Recipe()

    def init(self, fed: Run, weights: Weights | None = None) -> State:
        return State(weights or fed.initial(), None)

    def round(self, fed: Run, s: State) -> State:
        method = Plain()
        got = fed.train([chain(s.weights, [EVERYBODY], self.recipe)], *method.folds)
        return State(*method.merge(s.weights, None, got))
