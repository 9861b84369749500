"""The contract: a stranger's algorithm and method pass it, and whatever breaks a promise is named by a check."""

from __future__ import annotations

import re
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.methods import FedAdam, FedProx, Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.methods import Method
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.rules import End, Rule
from fedrelay.seam.values import minus, plus, value, zeros
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing import ContractError, check_algorithm, check_method, contract
from fedrelay.testing.contract import METHOD_CHECKS
from fedrelay.testing.hostile import apart
from fedrelay.testing.promises import CHECKS
from fedrelay.testing.world import world

from . import broken

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
class Tether(Rule):
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
class Tethered(Plain):
    """Plain, with the tether."""

    pull: float = 0.1

    def visit(self, m, base):
        return base.adding(Tether(self.pull)), {}


@pytest.mark.parametrize("name", contract(Tournament()))
def test_a_strangers_algorithm_passes(name):
    contract(Tournament())[name]()


@pytest.mark.parametrize("name", contract(Tethered()))
def test_a_strangers_method_passes(name):
    contract(Tethered())[name]()


def test_the_two_compose():
    check_algorithm(Tournament(method=Tethered()))


ALGORITHMS = [
    (broken.StateWithAList(), "is_a_value", r"StateWithAList breaks in `is_a_value`: \[\] \(list\) cannot travel: .*"),
    (broken.NotRegistered(), "is_a_value", r"NotRegistered breaks in `is_a_value`: .* \(NotRegistered\) cannot travel: .*"),
    (broken.WithoutWeights(), "is_a_value", "the state of WithoutWeights has no `weights` to evaluate"),
    (broken.DrawsFromNumpy(), "same_seed_same_bits", "DrawsFromNumpy: one seed gave two results"),
    (broken.DrawsFromPython(), "same_seed_same_bits", "DrawsFromPython: one seed gave two results"),
    (broken.DrawsFromTorch(), "same_seed_same_bits", "DrawsFromTorch: one seed gave two results"),
    (broken.SeedsNumpy(), "same_seed_same_bits", r"SeedsNumpy uses a global random generator: draw from `fed.rng\(purpose\)`"),
    (broken.NeverMoves(), "it_learns_something", "NeverMoves: the weights did not move in 2 rounds"),
    (broken.ChangesInPlace(), "leaves_what_it_is_given", "ChangesInPlace changes the state that it is given: make a new one"),
    (broken.Peeks(), "stays_on_the_seam", "Peeks reaches around the seam, for what only a simulation has: .* 'site'"),
    (
        broken.RemembersOnItself(),
        "resume_equals_straight_run",
        "RemembersOnItself: a resumed run ends elsewhere than a straight one",
    ),
    (
        broken.RemembersOnItsClass(),
        "resume_equals_straight_run",
        "RemembersOnItsClass: a resumed run ends elsewhere than a straight one",
    ),
    (
        FedAvg(Uniform(count=4), RECIPE, broken.Using(rule=broken.SeesThePadding())),
        "engines_agree",
        r"FedAvg with Using: the states of lanes and loop are .* apart after a round",
    ),
    (
        FedAvg(Uniform(count=4), RECIPE, broken.Using(rule=broken.ForgetsOnLanes())),
        "engines_agree",
        r"FedAvg with Using: the federations of lanes and loop are .* apart after a round",
    ),
    (
        FedAvg(Uniform(count=6), RECIPE, broken.Using(rule=broken.SeesTheNeighbours())),
        "hostile_agrees",
        r".*: flight 0 gave another answer when it was trained again \(AssertionError\)",
    ),
    (
        broken.CountsThePlanned(),
        "dropouts_survive",
        "CountsThePlanned: lost visits move the model though nobody trained: do not count them",
    ),
    (
        broken.CountsFailedSteps(),
        "dropouts_survive",
        "CountsFailedSteps: a client that trained and failed leaves more than one that was lost",
    ),
    (
        broken.NeedsSomebody(),
        "dropouts_survive",
        r"NeedsSomebody breaks in `dropouts_survive`: tuple index out of range \(IndexError\)",
    ),
    (broken.NeedsTwo(), "one_client", "NeedsTwo with one client: weights that are not finite"),
    (
        broken.SaysTooMuch(),
        "one_client",
        "SaysTooMuch fails with clients of one example: clients with one example cannot be trained",
    ),
    (broken.SpeaksInRiddles(), "one_client", "SpeaksInRiddles refuses one client, but not in one sentence"),
]
METHODS = [
    (
        broken.Using(rule=broken.BranchesInBegin()),
        "vectorises",
        "a vectorised function of BranchesInBegin asks a tensor for a Python truth: use torch.where, or `reads_rows = True`",
    ),
    (
        broken.Using(rule=broken.BranchesInPenalty()),
        "vectorises",
        "a vectorised function of BranchesInPenalty asks a tensor for a Python truth: .*",
    ),
    (
        broken.Using(rule=broken.BranchesInEnd()),
        "vectorises",
        "a vectorised function of BranchesInEnd asks a tensor for a Python truth: .*",
    ),
    (broken.Using(rule=broken.ReadsItem()), "vectorises", "Using cannot be vectorised: .*"),
    (
        broken.Using(rule=broken.ReadsRowsInSecret()),
        "vectorises",
        "Using cannot be vectorised: .*a rule that reads the client's rows must say so: .*",
    ),
    (broken.Using(rule=broken.StartsFromOnes()), "memory_is_fixed", "StartsFromOnes.memory must start from zeros"),
    (
        broken.Using(rule=broken.KeepsMore()),
        "memory_is_fixed",
        "KeepsMore keeps other leaves, types or shapes than its `memory` says",
    ),
    (
        broken.Using(rule=broken.KeepsLonger()),
        "memory_is_fixed",
        "KeepsLonger keeps other leaves, types or shapes than its `memory` says",
    ),
    (
        broken.Using(rule=broken.KeepsDoubles()),
        "memory_is_fixed",
        "KeepsDoubles keeps other leaves, types or shapes than its `memory` says",
    ),
    (broken.CountsReceipts(), "lost_leaves_no_trace", "CountsReceipts: the merge counts a client that was lost"),
    (broken.KeepsAClosure(), "is_a_value, alone", r"FedAvg with KeepsAClosure breaks in `is_a_value`: .* cannot travel: .*"),
    (
        broken.Centre(),
        "resume_equals_straight_run, alone",
        "FedAvg with Centre: a resumed run ends elsewhere than a straight one",
    ),
    (broken.Using(rule=broken.NeedsTwoRows()), "one_client, alone", "FedAvg with Using: visits fail with one client"),
    (
        broken.Using(rule=broken.OnlyFirst()),
        "it_learns_something, in chains",
        "Ring with Using: visits fail, though no client was lost",
    ),
    (
        broken.Using(rule=broken.SeesThePadding()),
        "engines_agree, in chains",
        "Ring with Using: the states of lanes and loop are .*",
    ),
    (
        broken.Using(rule=broken.SeesTheNeighbours()),
        "hostile_agrees, in chains",
        ".* gave another answer when it was trained again .*",
    ),
]


class CountsTwice(Simulation):
    def _commit(self, i):
        landing = super()._commit(i)
        self.ledger.add("steps", 1)
        return landing


class SaysNothing(Simulation):
    def _disclosed(self, air):
        pass


class SendsNothing(Simulation):
    def _commit(self, i):
        landing = super()._commit(i)
        for column in ("up", "wire up"):
            landing.receipts.traffic[column][:] = 0
            self.ledger.totals[column] = 0
        return landing


class LosesTime(Simulation):
    def restore(self, state):
        super().restore({**state, "now": 0.0})


FEDERATIONS = [
    (CountsTwice, "ledger_adds_up", "FedAvg with Plain: the ledger's 'steps' is not the sum of the receipts"),
    (SendsNothing, "ledger_adds_up", "FedAvg with Plain: nothing was sent"),
    (SaysNothing, "ledger_adds_up", "FedAvg with Plain: clients trained, and the ledger knows of no disclosure"),
    (LosesTime, "resume_equals_straight_run", "FedAvg with Plain: clock or ledger are lost by a resume"),
]


@pytest.mark.parametrize(("thing", "check", "sentence"), ALGORITHMS + METHODS, ids=lambda v: v if isinstance(v, str) else None)
def test_what_is_broken_is_caught(thing, check, sentence):
    with pytest.raises(ContractError) as said:
        contract(thing)[check]()
    assert re.fullmatch(sentence, str(said.value))


@pytest.mark.parametrize(("kind", "check", "sentence"), FEDERATIONS)
def test_a_broken_federation_is_caught(kind, check, sentence, monkeypatch):
    monkeypatch.setattr("fedrelay.testing.promises.world", partial(world, kind=kind))
    with pytest.raises(ContractError, match=f"^{sentence}$"):
        contract(FedAvg(Uniform(count=4), RECIPE))[check]()


def test_every_check_has_caught_something():
    caught = {check.partition(",")[0] for _, check, _ in [*ALGORITHMS, *METHODS, *FEDERATIONS]}
    assert caught == {check.__name__ for check in (*CHECKS, *METHOD_CHECKS)}


@pytest.mark.parametrize(("check", "thing"), [(check_algorithm, broken.NeverMoves()), (check_method, broken.CountsReceipts())])
def test_the_whole_contract_raises_what_its_checks_raise(check, thing):
    with pytest.raises(ContractError):
        check(thing)


def test_a_method_of_parameters_that_make_no_sense_is_refused_in_its_own_words():
    with pytest.raises(ValueError, match=r"^mu = -1 is not at least 0$"):
        check_method(FedProx(mu=-1))


def test_a_method_is_checked_alone_and_in_chains():
    once = [c.__name__ for c in METHOD_CHECKS]
    assert [*contract(FedAdam())] == once + [f"{c.__name__}, {where}" for where in ("alone", "in chains") for c in CHECKS]


class Lazily:
    """Stands for a tensor that lies elsewhere."""

    key = "elsewhere"

    def load(self):
        return torch.ones(3)


ONE = {"w": torch.tensor([3.0, 4.0])}


@pytest.mark.parametrize(
    ("a", "b", "far"),
    [
        (ONE, ONE, 0),
        (ONE, {"w": torch.tensor([3.0, 4.5])}, 0.5 / (9 + 4.5**2) ** 0.5),
        (ONE, {"w": torch.tensor([3.0, 4.0]).double()}, inf),
        (ONE, {"w": torch.tensor([3.0])}, inf),
        (ONE, {"v": ONE["w"]}, inf),
        ((1.0, 2.0), (1.0, 2.5), 0.2),
        ((1.0, nan), (1.0, nan), 0),
        ((1.0, nan), (1.0, 1.0), 7e7 - 1),
        ((1, "a"), (1, "b"), inf),
        ((1,), (True,), inf),
        ((1,), (1, 2), inf),
        (State(ONE, 1.0), State(ONE, 2.0), 0.5),
        (State(ONE, 1.0), ONE, inf),
        (np.array([1, 2]), np.array([1, 4]), 2 / 17**0.5),
        (Lazily(), torch.ones(3), 0),
        (0.0, 1e-9, 1e-3),  # relative to a millionth at least
    ],
)
def test_how_far_apart_two_values_are(a, b, far):
    assert apart(a, b) == pytest.approx(far)
