"""FedDyn (Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, Algorithm 1).

Client k minimises   F_k(w) - <h_k, w> + alpha/2 |w - received|^2,   then  h_k <- h_k - alpha (w - received).
The server keeps     h <- h - (alpha/m) sum over the cohort of (w_k - received),   and   w <- mean of w_k - h / alpha.

m counts *all* units (clients, or superclients where chains are superclients), also those that were not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fedrelay.seam.folds import Fold, Mean, Moved
from fedrelay.seam.landing import Landing
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import ClientView, End, Rule
from fedrelay.seam.values import Tree, plus, value, zeros

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.seam.values import Weights


@value
class Dynamic(Rule):
    """The client; it keeps h_k."""

    alpha: float = 0.1
    shared: ClassVar[tuple[str, ...]] = ("alpha",)

    def memory(self, w: Weights) -> Weights:
        return zeros(w)

    def begin(self, see: ClientView) -> Tree:
        return {"h_k": dict(see.memory.items()), "received": see.received}

    def penalty(self, params: Weights, context: Tree) -> Tensor | float:
        h_k: Weights = context["h_k"]
        received: Weights = context["received"]
        return sum((self.alpha / 2 * (w - received[n]) ** 2 - h_k[n] * w).sum() for n, w in params.items())

    def end(self, params: Weights, see: ClientView, context: Tree) -> End:
        moved = {n: w - see.received[n] for n, w in params.items()}
        return End(params, memory=plus(see.memory, moved, -self.alpha))


@value
class FedDyn(Method[Any]):
    """Dynamic regularisation with weight ``alpha``, which the server needs too: it cannot evolve per client."""

    alpha: float = 0.1

    @property
    def folds(self) -> tuple[Fold[Any], ...]:
        return (Mean("count"), Moved())

    def init(self, w: Weights, who: Population) -> Any:
        return {"h": zeros(w), "m": who.units}

    def visit(self, m: Any, base: Recipe) -> tuple[Recipe, Mapping[str, Any]]:
        return base.adding(Dynamic(self.alpha)), {}

    def merge(self, w: Weights, m: Any, got: Landing) -> tuple[Weights, Any]:
        h = plus(m["h"], got[Moved()], -self.alpha / m["m"])
        mean = got[Mean("count")]
        return {**w, **{n: t - h[n] / self.alpha for n, t in mean.items()}}, {**m, "h": h}

    def check(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha = {self.alpha} is not above 0")
