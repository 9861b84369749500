"""SCAFFOLD (Karimireddy et al., "Stochastic controlled averaging for federated learning", ICML 2020, Algorithm 1).

Clients correct every step by the drift between the server's control variate c and their own c_i:

    y <- y - rate (g(y) - c_i + c)                                     line 10
    c_i+ <- g_i(x)                                        (option I)   line 12
    c_i+ <- c_i - c + (x - y) / (K rate)                  (option II)  line 12
    x <- mean of y,   c <- c + (1/N) sum over the cohort of (c_i+ - c_i)   lines 16-17

K counts *steps*. Option II reads the average gradient off the path x - y, so it assumes plain SGD at a constant rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fedrelay.seam.folds import Fold, Mean, Sum
from fedrelay.seam.landing import Landing
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.recipe import SGD, Constant, Recipe
from fedrelay.seam.rules import ClientView, End, Rule
from fedrelay.seam.values import Tree, minus, plus, value, zeros

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.seam.values import Weights


@value
class ControlVariate(Rule):
    """The client of option II; it keeps c_i."""

    def memory(self, w: Weights) -> Weights:
        return zeros(w)

    def begin(self, see: ClientView) -> Tree:
        return {"c - c_i": minus(see.extra["c"], see.memory)}

    def penalty(self, params: Weights, context: Tree) -> Tensor | float:
        correction: Weights = context["c - c_i"]
        return sum((correction[n] * y).sum() for n, y in params.items())

    def end(self, params: Weights, see: ClientView, context: Tree) -> End:
        x, c, path = see.received, see.extra["c"], see.steps * see.rate
        change = {n: (x[n] - y) / path - c[n] for n, y in params.items()}  # c_i+ - c_i
        return End(params, memory=plus(see.memory, change), up={"change": change})

    def check(self, recipe: Recipe) -> None:
        o, others = recipe.optimizer, [r for r in recipe.rules if r is not self and (r.has("penalty") or r.has("loss"))]
        if not isinstance(o, SGD) or o.momentum or not isinstance(recipe.schedule, Constant):
            raise ValueError("SCAFFOLD reads gradients off the path of plain SGD at a constant rate: no momentum, no schedule")
        if others:
            raise ValueError(f"SCAFFOLD would take {type(others[0]).__name__}'s pull for a gradient of the data: use option=1")
        if not recipe.learning_rate > 0:
            raise ValueError("SCAFFOLD divides by the learning rate: it must be positive")


@value
class GradientVariate(ControlVariate):
    """The client of option I: c_i+ is the gradient of its whole data at the model it received. Any optimizer will do."""

    reads_rows: ClassVar[bool] = True

    def end(self, params: Weights, see: ClientView, context: Tree) -> End:
        from torch.func import grad

        def loss(w: Weights) -> Tensor:
            return see.criterion(see.forward({**see.received, **w}, see.x), see.y).mean()

        change = minus(grad(loss)({n: see.received[n] for n in params}), see.memory)
        return End(params, memory=plus(see.memory, change), up={"change": change})

    def check(self, recipe: Recipe) -> None:
        pass


@value
class SCAFFOLD(Method[Any]):
    """Stochastic controlled averaging; ``option`` 2 (default) or 1."""

    option: int = 2

    @property
    def folds(self) -> tuple[Fold[Any], ...]:
        return (Mean("count"), Sum("change"))

    def init(self, w: Weights, who: Population) -> Any:
        return {"c": zeros(w), "N": who.clients}

    def visit(self, m: Any, base: Recipe) -> tuple[Recipe, Mapping[str, Any]]:
        return base.adding(GradientVariate() if self.option == 1 else ControlVariate()), {"c": m["c"]}

    def merge(self, w: Weights, m: Any, got: Landing) -> tuple[Weights, Any]:
        x, change = got[Mean("count")], got[Sum("change")]
        return {**w, **x}, {**m, "c": plus(m["c"], change, 1 / m["N"])}

    def check(self) -> None:
        if self.option not in (1, 2):
            raise ValueError(f"option = {self.option!r} is neither 1 nor 2")
