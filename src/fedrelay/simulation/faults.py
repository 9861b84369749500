"""Clients that fail: layers that lose or delay visits, around any algorithm. What they draw changes no other draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedrelay.seam.federation import Layer
from fedrelay.seam.plan import EVERYBODY, Plan, Visit
from fedrelay.seam.values import value


def each_visit(plan: Plan, change: Callable[[Visit], Visit]) -> Plan:
    """The plan with every client's visit changed; what the server trains itself is left alone."""

    def own(v: Visit) -> Visit:
        return v if v.client == EVERYBODY else change(v)

    return replace(plan, chains=tuple(replace(c, visits=tuple(map(own, c.visits))) for c in plan.chains))


@value
class Dropout(Layer):
    """Each visit is lost with probability ``share``: the chain goes on from the last good hand-over."""

    share: float = 0.1

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        if not 0 <= self.share <= 1:
            raise ValueError(f"Dropout's share = {self.share} is not between 0 and 1")
        draw = rng()
        return each_visit(plan, lambda v: replace(v, lost="dropped out") if draw.random() < self.share else v)


@value
class Stall(Layer):
    """Each visit takes ``seconds`` longer with probability ``share``."""

    share: float = 0.1
    seconds: float = 60.0

    def plan(self, plan: Plan, rng: Callable[[], np.random.Generator]) -> Plan:
        if not 0 <= self.share <= 1 or self.seconds < 0:
            raise ValueError(
                f"Stall needs a share between 0 and 1 and seconds of at least 0, not {self.share} and {self.seconds}"
            )
        draw = rng()
        return each_visit(plan, lambda v: replace(v, wait=v.wait + self.seconds * bool(draw.random() < self.share)))
