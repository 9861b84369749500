"""An algorithm: who travels with whom. ``init`` and ``round`` over a small frozen state; that is all it is."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedrelay.seam.federation import Federation, Run
from fedrelay.seam.methods import Method
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.records.driver import Record
    from fedrelay.seam.values import Weights

S = TypeVar("S")


@value
class State:
    """What most algorithms carry from round to round: the model and the method's server state."""

    weights: Weights
    method: Any


@value
class Algorithm(Generic[S]):
    """The base of every algorithm: a frozen value with its parameters as fields.

    A state is a value too (frozen, plain data and tensors) with ``weights``, the model to evaluate. Checkpoints, resume,
    engines and devices follow from that; no algorithm writes code for them.
    """

    def init(self, fed: Run, weights: Weights | None = None) -> S:
        """The state before the first round."""
        raise NotImplementedError

    def round(self, fed: Run, s: S) -> S:
        """One round."""
        raise NotImplementedError

    def check(self, fed: Run) -> None:
        """Refuse, in one sentence, parameters that make no sense with this federation; by default, those that a part refuses."""
        for f in fields(self):
            part = getattr(self, f.name)
            if isinstance(part, Algorithm):
                part.check(fed)
            elif isinstance(part, Method):
                part.check()

    def fit(self, fed: Federation, rounds: int, **options: Any) -> Record:
        """Run this algorithm; see :func:`fedrelay.records.driver.fit` for the options."""
        from fedrelay.records.driver import fit  # the one upward import: the driver stands above everything that it drives

        return fit(self, fed, rounds, **options)
