"""Who takes part in a round: a fraction or a number of clients, uniformly, by size, or by availability."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedrelay.seam.federation import Run
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from collections.abc import Sequence


@value
class Sampling:
    """How a cohort is drawn."""

    def draw(self, fed: Run) -> Sequence[int]:
        """The clients of one round, each at most once."""
        raise NotImplementedError


def _count(count: int, fraction: float, of: int) -> int:
    if count < 0 or not 0 <= fraction <= 1:
        raise ValueError(
            f"count = {count} and fraction = {fraction}: the first must be at least 0, the second a share of at most 1"
        )
    wanted = count or max(1, int(fraction * of + 1e-9))
    if wanted > of:
        raise ValueError(f"{wanted} clients a round were asked for, and {of} have examples: lower `count` (or `fraction`)")
    return wanted


@value
class Uniform(Sampling):
    """``count`` clients, or ``fraction`` of those that have examples, without replacement."""

    count: int = 0
    fraction: float = 0.1

    def draw(self, fed: Run) -> Sequence[int]:
        clients: list[int] = (
            fed.rng("cohort").choice(fed.clients, _count(self.count, self.fraction, len(fed.clients)), replace=False).tolist()
        )
        return clients


@value
class BySize(Sampling):
    """Clients drawn in proportion to their number of examples, without replacement."""

    count: int = 0
    fraction: float = 0.1

    def draw(self, fed: Run) -> Sequence[int]:
        sizes = fed.sizes[fed.clients]
        n = _count(self.count, self.fraction, len(sizes))
        clients: list[int] = fed.rng("cohort").choice(fed.clients, n, replace=False, p=sizes / sizes.sum()).tolist()
        return clients


@value
class Everyone(Sampling):
    """Every client that has examples, in order."""

    def draw(self, fed: Run) -> Sequence[int]:
        clients: list[int] = fed.clients.tolist()
        return clients


@value
class Available(Sampling):
    """The cohort that ``inner`` draws, less those who are not there: each is with probability ``share``. If nobody of the cohort
    is, the one with the lowest number is waited for."""

    inner: Sampling = Uniform()
    share: float = 0.8

    def draw(self, fed: Run) -> Sequence[int]:
        there = fed.rng("availability").random(len(fed.sizes)) < self.share
        drawn = self.inner.draw(fed)
        kept = [k for k in drawn if there[k]]
        return kept or [int(np.min(drawn))]
