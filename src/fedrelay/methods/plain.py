"""Plain descent and the mean: the method of FedAvg (McMahan et al., 2017).

The server merges by examples, w <- sum_k n_k w_k / sum_k n_k, or uniformly over the chains.
"""

from __future__ import annotations

from typing import Any

from fedrelay.seam.folds import Fold, Mean
from fedrelay.seam.methods import Method
from fedrelay.seam.values import value


@value
class Plain(Method[None]):
    """No rule; ``by``: "examples" or "count"."""

    by: str = "examples"

    @property
    def folds(self) -> tuple[Fold[Any], ...]:
        return (Mean(self.by),)

    def check(self) -> None:
        if self.by not in ("examples", "count"):
            raise ValueError(f"by = {self.by!r} is neither 'examples' nor 'count'")
