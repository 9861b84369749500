"""One algorithm, then another: a warm-up before anything. Only this file knows of phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedrelay.seam.algorithm import Algorithm
from fedrelay.seam.federation import Run
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.seam.values import Weights


@value
class Phase:
    """Rounds done in all, and the state of the algorithm whose turn it is."""

    done: int
    inner: Any

    @property
    def weights(self) -> Weights:
        result: Weights = self.inner.weights
        return result


@value
class Then(Algorithm[Phase]):
    """``rounds`` rounds of ``first``, then ``after`` for the rest. Each has its own randomness and its own client memories;
    the second starts from the model that the first evaluates."""

    first: Algorithm[Any] = Algorithm()
    rounds: int = 1
    after: Algorithm[Any] = Algorithm()

    def init(self, fed: Run, weights: Weights | None = None) -> Phase:
        return Phase(0, self.first.init(fed.under("first"), weights))

    def round(self, fed: Run, s: Phase) -> Phase:
        if s.done < self.rounds:
            return Phase(s.done + 1, self.first.round(fed.under("first"), s.inner))
        inner = s.inner
        if s.done == self.rounds:
            fed.under("first").forget()
            inner = self.after.init(fed.under("after"), s.weights)
        return Phase(s.done + 1, self.after.round(fed.under("after"), inner))
