"""FedAvg (McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017).

Algorithm 1: each round a cohort S_t trains the server's model, every client alone, and the server merges what came back.
What is minimised and how it is merged is the method's affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrelay.algorithms.sampling import Sampling, Uniform
from fedrelay.methods.plain import Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.federation import Run
from fedrelay.seam.methods import Method
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.seam.values import Weights


@value
class FedAvg(Algorithm[State]):
    """Many chains of one visit."""

    sampling: Sampling = Uniform()
    recipe: Recipe = Recipe()
    method: Method[Any] = Plain()

    def init(self, fed: Run, weights: Weights | None = None) -> State:
        w = weights or fed.initial()
        return State(w, self.method.init(w, fed.population()))

    def round(self, fed: Run, s: State) -> State:
        recipe, extra = self.method.visit(s.method, self.recipe)
        cohort = self.sampling.draw(fed)  # S_t
        got = fed.train((chain(s.weights, [k], recipe, extra) for k in cohort), *self.method.folds)
        return State(*self.method.merge(s.weights, s.method, got))
