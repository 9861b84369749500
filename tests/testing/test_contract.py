"""The contract: a stranger's algorithm and method pass it, and every promise that is broken is named by the check that catches it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.methods import FedAdam, FedProx, Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.methods import Method
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import ClientView, End, Rule
from fedrelay.seam.values import minus, plus, value, zeros
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing import ContractError, check_algorithm, check_method, contract
from fedrelay.testing import contract as _  # noqa: F401
from fedrelay.testing.contract import CHECKS, METHOD_CHECKS, Ring
from fedrelay.testing.hostile import apart

RECIPE = Recipe(batch_size=8)


# --- a stranger's algorithm, and a stranger's method


@value
class Standings:
    """The model, the speed it moves with, and how often it was beaten."""

    weights: Any
    method: Any
    speed: Any
    beaten: int = 0


@value
class Tournament(Algorithm[Standings]):
    """Two teams of clients train one after another; the model of the better team wins, and the server leans on it."""

    recipe: Recipe = RECIPE
    method: Method[Any] = Plain("count")
    lean: float = 0.5

    def init(self, fed, weights=None):
        w = weights or fed.initial()
        return Standings(w, self.method.init(w, fed.population()), zeros(w))

    def round(self, fed, s):
        recipe, extra = self.method.visit(s.method, self.recipe)
        order = fed.rng("teams").permutation(fed.clients)
        half = (len(order) + 1) // 2
        teams = [t for t in (order[:half], order[half:]) if len(t)]
        flights = [fed.launch([chain(s.weights, t, recipe, extra)], *self.method.folds) for t in teams]
        landings = [fed.land([f])[0] for f in flights]

        def loss(landing):
            seen = landing.receipts.loss[landing.receipts.ok]
            return float(seen.mean()) if len(seen) else float("inf")

        won = min(landings, key=loss)
        w, method = self.method.merge(s.weights, s.method, won)
        speed = {n: self.lean * s.speed[n] + (t - s.weights[n]) for n, t in w.items()}
        return Standings(plus(s.weights, speed), method, speed, s.beaten + (won is landings[-1]))


@value
class Leash(Rule):
    """Pulls towards the mean of the models that this client has ended with."""

    pull: float = 0.1

    def memory(self, w):
        return zeros(w)

    def begin(self, see):
        return {"home": {n: see.received[n] + see.memory[n] for n in see.memory}}

    def penalty(self, params, context):
        return self.pull / 2 * sum(((w - context["home"][n]) ** 2).sum() for n, w in params.items())

    def end(self, params, see, context):
        away = minus(params, see.received)
        return End(params, memory={n: (see.memory[n] + away[n]) / 2 if n in away else t for n, t in see.memory.items()})


@value
class OnALeash(Plain):
    """Plain, with the leash."""

    pull: float = 0.1

    def visit(self, m, base):
        return base.adding(Leash(self.pull)), {}


@pytest.mark.parametrize("name", contract(Tournament()))
def test_a_strangers_algorithm_passes(name):
    contract(Tournament())[name]()


@pytest.mark.parametrize("name", contract(OnALeash()))
def test_a_strangers_method_passes(name):
    contract(OnALeash())[name]()


def test_the_two_compose():
    check_algorithm(Tournament(method=OnALeash()))


def test_there_is_a_test_for_every_check():
    assert {check.__name__ for check in CHECKS} == {name for _, name, _ in ALGORITHMS}
    assert {check.__name__ for check in METHOD_CHECKS} <= {name for _, name, _ in METHODS}


# --- algorithms that break a promise


@value
class Broken(Algorithm[State]):
    """FedAvg with something wrong."""

    def init(self, fed, weights=None):
        return State(weights or fed.initial(), None)

    def cohort(self, fed):
        return fed.rng("cohort").choice(fed.clients, min(4, len(fed.clients)), replace=False)

    def train(self, fed, w):
        return fed.train((chain(w, [k], RECIPE) for k in self.cohort(fed)), Mean(), Bank())

    def round(self, fed, s):
        return State({**s.weights, **self.train(fed, s.weights)[Mean()]}, s.method)


@value
class DrawsFromNumpy(Broken):
    def cohort(self, fed):
        return np.random.choice(fed.clients, min(4, len(fed.clients)), replace=False)


@value
class SeedsNumpy(Broken):
    def cohort(self, fed):
        np.random.seed(0)
        return np.random.choice(fed.clients, min(4, len(fed.clients)), replace=False)


@value
class DrawsFromPython(Broken):
    def cohort(self, fed):
        return random.sample(fed.clients.tolist(), min(4, len(fed.clients)))


@value
class DrawsFromTorch(Broken):
    def round(self, fed, s):
        made = super().round(fed, s)
        return State({n: t + torch.randn_like(t) / 100 for n, t in made.weights.items()}, None)


@value
class RemembersOnItself(Broken):
    """Momentum that is kept on the object."""

    def init(self, fed, weights=None):
        s = super().init(fed, weights)
        object.__setattr__(self, "speed", zeros(s.weights))
        return s

    def round(self, fed, s):
        new = super().round(fed, s).weights
        object.__setattr__(self, "speed", plus(minus(new, s.weights), self.speed, 0.9))
        return State(plus(s.weights, self.speed), None)


@value
class RemembersOnItsClass(Broken):
    """Rounds that are counted on the class; the cohort grows with them."""

    done: ClassVar[list[int]] = [0]

    def init(self, fed, weights=None):
        self.done[0] = 0
        return super().init(fed, weights)

    def cohort(self, fed):
        self.done[0] += 1
        return fed.rng("cohort").choice(fed.clients, min(self.done[0], len(fed.clients)), replace=False)


@value
class StateWithAList(Broken):
    def init(self, fed, weights=None):
        return State(fed.initial(), [])


class NotRegistered(Broken):
    """Without ``@value`` the codec does not know it."""


@value
class WithoutWeights(Broken):
    def round(self, fed, s):
        return (super().round(fed, s),)


@value
class Forgets(Broken):
    """A parameter that the codec turns into something else."""

    clients: Any = frozenset()

    def cohort(self, fed):
        return fed.clients[:3]


@value
class NeverMoves(Broken):
    def round(self, fed, s):
        self.train(fed, s.weights)
        return s


@value
class ChangesInPlace(Broken):
    def round(self, fed, s):
        mean = self.train(fed, s.weights)[Mean()]
        for n, t in mean.items():
            s.weights[n].copy_(t)
        return State(s.weights, None)


@value
class Peeks(Broken):
    """Draws by label without having asked anybody."""

    def cohort(self, fed):
        labels = fed.base.site.data.train.y
        return [int(c) for c in fed.clients if int(labels[fed.base.site.data.train.rows(int(c))[0]]) < 2][:4] or fed.clients[:1]


@value
class CountsThePlanned(Broken):
    """Divides by whom it asked, not by who came back."""

    def round(self, fed, s):
        cohort = self.cohort(fed)
        got = fed.train((chain(s.weights, [k], RECIPE) for k in cohort), Bank(at="ends"))
        total = {n: sum(w[n] for w, _ in got[Bank(at="ends")]) for n in s.weights}
        return State({n: t / len(cohort) + 0 * s.weights[n] for n, t in total.items()}, None)


@value
class NeedsSomebody(Broken):
    def round(self, fed, s):
        return State({**s.weights, **self.train(fed, s.weights)[Bank(at="ends")][0][0]}, None)

    def train(self, fed, w):
        return fed.train((chain(w, [k], RECIPE) for k in self.cohort(fed)), Bank(at="ends"))


@value
class NeedsTwo(Broken):
    """Weighs chains by their distance from each other: with one there is none."""

    def round(self, fed, s):
        ends = [w for w, _ in self.train(fed, s.weights)[Bank()]]
        spread = {n: torch.stack([w[n] for w in ends]).std(0) for n in s.weights}
        return State({n: ends[0][n] - 0.01 * t for n, t in spread.items()}, None)


@value
class SaysTooMuch(Broken):
    def round(self, fed, s):
        if (fed.sizes[fed.clients] == 1).all() and len(fed.clients) > 1:
            raise ValueError("clients with one example cannot be trained")
        return super().round(fed, s)


