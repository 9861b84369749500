"""Server optimizers: the cohort's mean step is a pseudo-gradient. FedAvgM (Hsu et al., 2019) and the adaptive three of
Reddi et al., "Adaptive federated optimization" (ICLR 2021, Algorithm 2):

    d = (what the inner method would merge to) - w,   m <- beta1 m + (1 - beta1) d
    v <- v + d^2                                  FedAdagrad
    v <- v - (1 - beta2) d^2 sign(v - d^2)        FedYogi
    v <- beta2 v + (1 - beta2) d^2                FedAdam
    w <- w + eta m / (sqrt(v) + tau),             v starts at tau^2, no bias correction.

``variant = "flower"`` of FedAdam starts v at 0 and corrects both moments, as Flower's strategy does: its rate is
eta sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)) with t counted from 1, and v starts at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedrelay.methods.plain import Plain
from fedrelay.seam.folds import Fold
from fedrelay.seam.landing import Landing
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value, zeros

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.seam.values import Weights


@value
class ServerStep(Method[Any]):
    """The inner method's new model, approached by a step of the server's own. Any client half goes with it."""

    inner: Method[Any] = Plain()
    eta: float = 0.01

    @property
    def folds(self) -> tuple[Fold[Any], ...]:
        return self.inner.folds

    def visit(self, m: Any, base: Recipe) -> tuple[Recipe, Mapping[str, Any]]:
        return self.inner.visit(m["inner"], base)

    def direction(self, w: Weights, m: Any, got: Landing) -> tuple[dict[str, Tensor], Any]:
        """The pseudo-gradient d on the leaves that moved, and the inner method's new state."""
        target, inner = self.inner.merge(w, m["inner"], got)
        return {n: t - w[n] for n, t in target.items() if t is not w[n]}, inner

    def check(self) -> None:
        self.inner.check()
        if not self.eta > 0:
            raise ValueError(f"eta = {self.eta} is not above 0")


@value
class FedAvgM(ServerStep):
    """Server momentum: v <- beta v + d, w <- w + eta v."""

    eta: float = 1.0
    beta: float = 0.9

    def init(self, w: Weights, who: Population) -> Any:
        return {"inner": self.inner.init(w, who), "v": zeros(w)}

    def merge(self, w: Weights, m: Any, got: Landing) -> tuple[Weights, Any]:
        d, inner = self.direction(w, m, got)
        v = {n: self.beta * m["v"][n] + t for n, t in d.items()}
        return {**w, **{n: w[n] + self.eta * t for n, t in v.items()}}, {"inner": inner, "v": {**m["v"], **v}}


@value
class Adaptive(ServerStep):
    """What FedAdagrad, FedAdam and FedYogi share."""

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def init(self, w: Weights, who: Population) -> Any:
        v = {n: t + self.tau**2 for n, t in zeros(w).items()}
        return {"inner": self.inner.init(w, who), "m": zeros(w), "v": v, "t": 0}

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """v from the square of the pseudo-gradient."""
        raise NotImplementedError

    def rate(self, t: int) -> float:
        """The step's size in round t, counted from 1."""
        return self.eta

    def merge(self, w: Weights, m: Any, got: Landing) -> tuple[Weights, Any]:
        d, inner = self.direction(w, m, got)
        mean = {n: self.beta1 * m["m"][n] + (1 - self.beta1) * t for n, t in d.items()}
        v = {n: self.second(m["v"][n], t * t) for n, t in d.items()}
        rate = self.rate(m["t"] + 1)
        new = {n: w[n] + rate * mean[n] / (v[n].sqrt() + self.tau) for n in d}
        return {**w, **new}, {"inner": inner, "m": {**m["m"], **mean}, "v": {**m["v"], **v}, "t": m["t"] + 1}


@value
class FedAdagrad(Adaptive):
    """v accumulates; m is the pseudo-gradient itself unless ``beta1`` is set."""

    beta1: float = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@value
class FedYogi(Adaptive):
    """v follows the square additively."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@value
class FedAdam(Adaptive):
    """v is a moving average; ``variant``: "reddi" or "flower"."""

    variant: str = "reddi"

    def init(self, w: Weights, who: Population) -> Any:
        made = super().init(w, who)
        return {**made, "v": zeros(w)} if self.variant == "flower" else made

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square

    def rate(self, t: int) -> float:
        if self.variant == "flower":
            return float(self.eta * (1 - self.beta2 ** (t + 1)) ** 0.5 / (1 - self.beta1 ** (t + 1)))
        return self.eta

    def check(self) -> None:
        super().check()
        if self.variant not in ("reddi", "flower"):
            raise ValueError(f"variant = {self.variant!r} is neither 'reddi' nor 'flower'")
