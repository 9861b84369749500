"""IDA, inverse distance aggregation (Yeganeh et al., 2020): clients far from the mean count less.

    alpha_k = 1 / |w_mean - w_k|_1,   w <- sum_k alpha_k w_k / sum_k alpha_k      (its Eq. 2-4)

The distance is over all leaves in scope, from the *uniform* mean. A chain that ends on the mean itself would weigh
infinitely; distances are floored at a millionth of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedrelay.methods.plain import Plain
from fedrelay.seam.folds import Bank, Fold, Mean
from fedrelay.seam.landing import Landing
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.seam.values import Weights


@value
class IDA(Method[Any]):
    """Inverse distance; ``inner`` gives the client half (its merge is not used)."""

    inner: Method[Any] = Plain()

    @property
    def folds(self) -> tuple[Fold[Any], ...]:
        return (Mean("count"), Bank(at="ends"))

    def init(self, w: Weights, who: Population) -> Any:
        return self.inner.init(w, who)

    def visit(self, m: Any, base: Recipe) -> tuple[Recipe, Mapping[str, Any]]:
        return self.inner.visit(m, base)

    def merge(self, w: Weights, m: Any, got: Landing) -> tuple[Weights, Any]:
        mean, ends = got[Mean("count")], [end for end, _ in got[Bank(at="ends")]]
        if not ends:
            return w, m
        distance = [float(sum((end[n] - t).abs().sum().double() for n, t in mean.items())) for end in ends]
        least = 1e-6 * max(distance) or 1.0  # all equal: the mean
        alpha = [1 / max(d, least) for d in distance]
        merged = {n: sum(a / sum(alpha) * end[n] for a, end in zip(alpha, ends, strict=True)) for n in mean}
        return {**w, **merged}, m

    def check(self) -> None:
        self.inner.check()
        if type(self.inner).merge is not Plain.merge:
            inner = type(self.inner).__name__
            raise ValueError(
                f"{inner} has a server half of its own, which IDA would replace: use a client rule such as FedProx in it"
            )
