"""FedProx (Li et al., "Federated optimization in heterogeneous networks", MLSys 2020).

The client minimises  F_k(w) + mu/2 |w - w^t|^2  (its Eq. 2), where w^t is the model that this client *received*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedrelay.methods.plain import Plain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import ClientView, Rule
from fedrelay.seam.values import Tree, value

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.seam.values import Weights


@value
class Proximal(Rule):
    """mu/2 |w - received|^2"""

    mu: float = 0.01

    def begin(self, see: ClientView) -> Tree:
        return {"received": see.received}

    def penalty(self, params: Weights, context: Tree) -> Tensor | float:
        received: Weights = context["received"]
        return self.mu / 2 * sum(((w - received[n]) ** 2).sum() for n, w in params.items())


@value
class FedProx(Plain):
    """Plain with a proximal term of weight ``mu``."""

    mu: float = 0.01

    def visit(self, m: None, base: Recipe) -> tuple[Recipe, Mapping[str, Any]]:
        return base.adding(Proximal(self.mu)), {}

    def check(self) -> None:
        super().check()
        if not self.mu >= 0:
            raise ValueError(f"mu = {self.mu} is not at least 0")
