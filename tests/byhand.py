"""Federations whose training can be worked out by hand: client k has the loss (a_k w - b_k)^2 / 2.

With a = 1 a step at rate 1/2 goes half of the way: w becomes w/2 + b/2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedrelay.algorithms import Sampling
from fedrelay.engine.engine import Engine, Pick
from fedrelay.engine.examples import Examples
from fedrelay.engine.visits import Site
from fedrelay.models.model import Model, squared_error
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.folds import Ends, Fold
from fedrelay.seam.landing import PLAIN, Flight, Landing, Receipts
from fedrelay.seam.methods import Method
from fedrelay.seam.plan import Plan, chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value
from fedrelay.simulation.simulation import Simulation

if TYPE_CHECKING:
    from fedrelay.seam.values import Weights

LEAF = "line.w"
ENGINES = [Pick("lanes", 3), Pick("loop", 1)]
HALF = Recipe(learning_rate=0.5, batch_size=8)
"""One step over all of a client's (up to eight) rows."""


class Line(nn.Module):
    """w times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def federation(
    b: Sequence[float], a: Sequence[float] | None = None, sizes: Sequence[int] | None = None, pick: Pick = ENGINES[0]
) -> Simulation:
    """Client k owns ``sizes[k]`` equal rows (a_k, b_k). A NaN as b_k is a client that always fails."""
    a, sizes = a or [1.0] * len(b), sizes or [1] * len(b)
    xs, ys = ([torch.full((n, 1), v, dtype=torch.float64) for n, v in zip(sizes, vs, strict=True)] for vs in (a, b))
    return Simulation(Site(Model({"line": Line()}, squared_error), Examples.of_lists(xs, ys), block=2), Engine(pick))


def model(w: float) -> dict[str, Tensor]:
    return {LEAF: torch.tensor(w, dtype=torch.float64)}


def number(w: Weights) -> float:
    return float(w[LEAF])


@value
class These(Sampling):
    """Always the same clients."""

    clients: tuple[int, ...] = ()

    def draw(self, fed: Run) -> Sequence[int]:
        return self.clients


class Recorder(Layer):
    """Keeps who was sent out, plan by plan."""

    def __init__(self) -> None:
        self.chains: list[list[list[int]]] = []

    def plan(self, plan: Plan, rng: object) -> Plan:
        self.chains.append([[v.client for v in c.visits] for c in plan.chains])
        return plan


def play(method: Method, fed: Simulation, w: Weights, m: object, groups: Iterable[Sequence[int]], recipe: Recipe = HALF):
    """One round of a method: a chain per group of clients, merged into (weights, state)."""
    made, extra = method.visit(m, recipe)
    got = Run(fed).train([chain(w, group, made, extra) for group in groups], *method.folds)
    return method.merge(w, m, got)


def no_receipts() -> Receipts:
    whole = {f: np.zeros(0, np.int64) for f in PLAIN}
    return Receipts(**{**whole, "loss": np.zeros(0), "seconds": np.zeros(0)}, numbers={}, traffic={}, reasons={})


def landed(
    folds: Iterable[Fold], start: Weights, ends: Sequence[Mapping[str, Tensor]], examples: Sequence[int] | None = None
) -> Landing:
    """What chains that ended like this bring back; they also sent their ends up as "change"."""
    scope = tuple(ends[0]) if ends else ()
    shown = Ends([start] * len(ends), ends, [scope] * len(ends), examples or [1] * len(ends), [{"change": end} for end in ends])
    made = {f: f.add(f.empty(), shown) if ends else f.empty() for f in folds}
    return Landing(Flight(0), 0.0, made, no_receipts())
