"""A method: what is minimised (the client's half, a rule) and how it is merged (the server's). It never knows who travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedrelay.seam.folds import Fold, Mean
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.seam.landing import Landing
    from fedrelay.seam.values import Weights

M = TypeVar("M")


@value
class Population:
    """Who there is: ``clients`` (SCAFFOLD's N) and ``units`` (FedDyn's m: clients, or superclients if those are the chains)."""

    clients: int
    units: int


@value
class Method(Generic[M]):
    """A client rule with its server half. The base trains without a rule and lays the mean by examples over the old model."""

    @property
    def folds(self) -> tuple[Fold[Any], ...]:
        """What ``merge`` needs of the chains."""
        return (Mean(),)

    def init(self, w: Weights, who: Population) -> M:
        """The server's state before the first round."""
        return None  # type: ignore[return-value]

    def visit(self, m: M, base: Recipe) -> tuple[Recipe, Mapping[str, Any]]:
        """The client's half: the recipe with this method's rule, and what goes down beside the weights."""
        return base, {}

    def merge(self, w: Weights, m: M, got: Landing) -> tuple[Weights, M]:
        """The server's half: new weights and state. Leaves that nobody trained stay the tensors they are."""
        return {**w, **got[self.folds[0]]}, m

    def check(self) -> None:
        """Refuse, in one sentence, parameters that make no sense."""
