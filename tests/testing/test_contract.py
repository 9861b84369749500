"""The contract: a stranger's algorithm and method pass it, and every promise that is broken is named by the check that catches it."""

from __future__ import annotations

import random
import re
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


@value
class SpeaksInRiddles(Broken):
    """Refuses one client in more than one sentence."""

    def round(self, fed, s):
        if len(fed.clients) == 1:
            raise ValueError("too few clients\nsee the manual")
        return super().round(fed, s)


@value
class RemembersBranches(Rule):
    """What a rule does when it is asked for a Python truth."""

    def begin(self, see):
        return {"received": see.received, "mu": 1.0 if see.handed > 0 else 0.5}


@value
class BranchesInPenalty(Rule):
    mu: float = 0.1

    def penalty(self, params, context):
        return sum((w**2).sum() for w in params.values()) if self.mu > 0 else 0.0


@value
class BranchesInEnd(Rule):
    def end(self, params, see, context):
        return End({n: -w if (w > 5).any() else w for n, w in params.items()})


@value
class ReadsItem(Rule):
    def end(self, params, see, context):
        return End({n: w / max(1.0, w.norm().item()) for n, w in params.items()})


@value
class ReadsRowsInSecret(Rule):
    def begin(self, see):
        return {"scale": see.x.mean()}


@value
class StartsFromOnes(Leash):
    def memory(self, w):
        return {n: torch.ones_like(t) for n, t in w.items()}


@value
class KeepsMore(Leash):
    def end(self, params, see, context):
        return End(params, memory={**see.memory, "visits": see.steps})


@value
class KeepsLonger(Leash):
    def end(self, params, see, context):
        return End(params, memory={n: torch.stack([t, t]) for n, t in see.memory.items()})


@value
class KeepsDoubles(Leash):
    def end(self, params, see, context):
        return End(params, memory={n: t.double() for n, t in see.memory.items()})


@value
class SeesThePadding(Rule):
    """A loss that forgets the mask."""

    def loss(self, params, forward, x, y, mask, context):
        return forward(params, x).square().mean() / 10


@value
class SeesTheNeighbours(Rule):
    """Pulls harder, the more visits are under way."""

    reads_rows: ClassVar[bool] = True
    aboard: ClassVar[list[int]] = [0]

    def begin(self, see):
        self.aboard[0] += 1
        return {"pull": see.x.new_tensor(self.aboard[0] / 100)}

    def penalty(self, params, context):
        return context["pull"] * sum((w**2).sum() for w in params.values())

    def end(self, params, see, context):
        self.aboard[0] -= 1
        return End(params)


@value
class ForgetsOnLanes(Rule):
    """Its memory is one thing in lanes, which hand it a tensor of steps, and another in the loop, which hands it a number."""

    def memory(self, w):
        return {"steps": next(iter(w.values())).new_zeros(())}

    def end(self, params, see, context):
        return End(params, memory={"steps": see.memory["steps"] + see.steps * (1 if isinstance(see.steps, int) else 2)})


@value
class NeedsTwoRows(Rule):
    """The deviation of one row is not a number."""

    reads_rows: ClassVar[bool] = True

    def begin(self, see):
        return {"scale": see.x.std(0).mean() / 100}

    def penalty(self, params, context):
        return context["scale"] * sum((w**2).sum() for w in params.values())


@value
class OnlyFirst(Rule):
    """Divides by zero behind the first hand-over of a chain."""

    def end(self, params, see, context):
        return End({n: w / (see.handed != 1) for n, w in params.items()})


@value
class Using(Plain):
    """Plain, with a rule."""

    rule: Rule = Rule()

    def visit(self, m, base):
        return base.adding(self.rule), {}


@value
class CountsReceipts(Plain):
    """Divides by the visits that were planned; sparing those that came back would be right."""

    @property
    def folds(self):
        return (Mean("count"),)

    def merge(self, w, m, got):
        mean, share = got[Mean("count")], got.receipts.ok.sum() / len(got.receipts)
        return {**w, **{n: w[n] + float(1 + share) / 2 * (t - w[n]) for n, t in mean.items()}}, m


@value
class KeepsAClosure(Plain):
    def init(self, w, who):
        return {"schedule": lambda t: 1 / t}


@value
class Centre(Plain):
    """Server state on the object."""

    def init(self, w, who):
        object.__setattr__(self, "centre", w)

    def merge(self, w, m, got):
        new, m = super().merge(w, m, got)
        object.__setattr__(self, "centre", plus(self.centre, new))
        return {**w, **{n: (t + self.centre[n]) / 3 for n, t in new.items()}}, m


ALGORITHMS = [
    (StateWithAList(), "is_a_value", r"StateWithAList breaks in `is_a_value`: \[\] \(list\) cannot travel: .*"),
    (NotRegistered(), "is_a_value", r"NotRegistered breaks in `is_a_value`: .* \(NotRegistered\) cannot travel: .*"),
    (WithoutWeights(), "is_a_value", "the state of WithoutWeights has no `weights` to evaluate"),
    (DrawsFromNumpy(), "same_seed_same_bits", "DrawsFromNumpy: one seed gave two results"),
    (DrawsFromPython(), "same_seed_same_bits", "DrawsFromPython: one seed gave two results"),
    (DrawsFromTorch(), "same_seed_same_bits", "DrawsFromTorch: one seed gave two results"),
    (SeedsNumpy(), "same_seed_same_bits", r"SeedsNumpy uses a global random generator: draw from `fed.rng\(purpose\)`"),
    (NeverMoves(), "it_learns_something", "NeverMoves: the weights did not move in 2 rounds"),
    (ChangesInPlace(), "leaves_what_it_is_given", "ChangesInPlace changes the state that it is given: make a new one"),
    (Peeks(), "stays_on_the_seam", "Peeks reaches around the seam, for what only a simulation has: .* 'site'"),
    (RemembersOnItself(), "resume_equals_straight_run", "RemembersOnItself: a resumed run ends elsewhere than a straight one"),
    (RemembersOnItsClass(), "resume_equals_straight_run", "RemembersOnItsClass: a resumed run ends elsewhere than a straight one"),
    (FedAvg(Uniform(count=4), RECIPE, Using(rule=SeesThePadding())), "engines_agree", r"FedAvg with Using: the states of lanes and loop are .* apart after a round"),
    (FedAvg(Uniform(count=4), RECIPE, Using(rule=ForgetsOnLanes())), "engines_agree", r"FedAvg with Using: the federations of lanes and loop are .* apart after a round"),
    (FedAvg(Uniform(count=6), RECIPE, Using(rule=SeesTheNeighbours())), "hostile_agrees", r".*: flight 0 gave another answer when it was trained again \(AssertionError\)"),
    (CountsThePlanned(), "dropouts_survive", "CountsThePlanned: lost visits move the model though nobody trained: do not count them"),
    (NeedsSomebody(), "dropouts_survive", r"NeedsSomebody breaks in `dropouts_survive`: tuple index out of range \(IndexError\)"),
    (NeedsTwo(), "one_client", "NeedsTwo with one client: weights that are not finite"),
    (SaysTooMuch(), "one_client", "SaysTooMuch fails with clients of one example: clients with one example cannot be trained"),
    (SpeaksInRiddles(), "one_client", "SpeaksInRiddles breaks in `one_client`: .*"),
]
METHODS = [
    (Using(rule=RemembersBranches()), "vectorises", "a vectorised function of RemembersBranches asks a tensor for a Python truth: use torch.where, or `reads_rows = True`"),
    (Using(rule=BranchesInPenalty()), "vectorises", "a vectorised function of BranchesInPenalty asks a tensor for a Python truth: .*"),
    (Using(rule=BranchesInEnd()), "vectorises", "a vectorised function of BranchesInEnd asks a tensor for a Python truth: .*"),
    (Using(rule=ReadsItem()), "vectorises", "Using cannot be vectorised: .*"),
    (Using(rule=ReadsRowsInSecret()), "vectorises", "Using cannot be vectorised: .*a rule that reads the client's rows must say so: .*"),
    (Using(rule=StartsFromOnes()), "memory_is_fixed", "StartsFromOnes.memory must start from zeros"),
    (Using(rule=KeepsMore()), "memory_is_fixed", "KeepsMore keeps other leaves, types or shapes than its `memory` says"),
    (Using(rule=KeepsLonger()), "memory_is_fixed", "KeepsLonger keeps other leaves, types or shapes than its `memory` says"),
    (Using(rule=KeepsDoubles()), "memory_is_fixed", "KeepsDoubles keeps other leaves, types or shapes than its `memory` says"),
    (CountsReceipts(), "lost_leaves_no_trace", "CountsReceipts: the merge counts a client that was lost"),
    (KeepsAClosure(), "is_a_value, alone", r"FedAvg with KeepsAClosure breaks in `is_a_value`: .* cannot travel: .*"),
    (Centre(), "resume_equals_straight_run, alone", "FedAvg with Centre: a resumed run ends elsewhere than a straight one"),
    (Using(rule=NeedsTwoRows()), "one_client, alone", "FedAvg with Using: visits fail with one client"),
    (Using(rule=OnlyFirst()), "it_learns_something, in chains", "Ring with Using: visits fail, though no client was lost"),
    (Using(rule=SeesThePadding()), "engines_agree, in chains", "Ring with Using: the states of lanes and loop are .*"),
    (Using(rule=SeesTheNeighbours()), "hostile_agrees, in chains", ".* gave another answer when it was trained again .*"),
]


@pytest.mark.parametrize(("broken", "check", "sentence"), ALGORITHMS, ids=lambda v: v if isinstance(v, str) else None)
def test_a_broken_algorithm_is_caught(broken, check, sentence):
    with pytest.raises(ContractError) as said:
        contract(broken)[check]()
    assert re.fullmatch(sentence, str(said.value))


@pytest.mark.parametrize(("broken", "check", "sentence"), METHODS, ids=lambda v: v if isinstance(v, str) else None)
def test_a_broken_method_is_caught(broken, check, sentence):
    with pytest.raises(ContractError) as said:
        contract(broken)[check]()
    assert re.fullmatch(sentence, str(said.value))
