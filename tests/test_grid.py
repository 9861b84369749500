"""The grid: every method inside every algorithm. What makes no sense is refused in one sentence; all else keeps the contract.

In every run: two rounds on tiny data, a hostile federation against a plain one and lanes against the loop. With ``-m slow``: the
whole contract of every cell.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fedrelay.algorithms import FedAvg, Then, Uniform
from fedrelay.engine.engine import Pick
from fedrelay.methods import IDA, SCAFFOLD, FedAdagrad, FedAdam, FedAvgM, FedDyn, FedProx, FedYogi, Plain, Proximal
from fedrelay.seam.federation import Run
from fedrelay.seam.recipe import SGD, Adam, Cosine, Recipe
from fedrelay.seam.rules import Rule
from fedrelay.seam.values import value
from fedrelay.testing import contract
from fedrelay.testing.world import HIDDEN, LANES, LOOP, world

from .tracer.systems import EWC, Elastic, Evolve, FedSeq, FedSeqInter, HFedMS, Regulate, Semantic, SplitLearning, TwoStage, Warmup

RECIPE = Recipe(batch_size=8)
SOME = Uniform(count=4)
CLUSTERS = (((0, 1), (2, 3)), ((4, 5, 6), (7, 8, 9, 10, 11)))

METHODS = {
    "Plain, by examples": Plain(),
    "Plain, by count": Plain("count"),
    "FedProx": FedProx(mu=0.1),
    "FedDyn": FedDyn(),
    "SCAFFOLD, option 2": SCAFFOLD(),
    "SCAFFOLD, option 1": SCAFFOLD(option=1),
    "FedAvgM": FedAvgM(),
    "FedAdagrad": FedAdagrad(),
    "FedAdam": FedAdam(),
    "FedAdam, Flower's": FedAdam(variant="flower"),
    "FedYogi": FedYogi(),
    "IDA": IDA(),
    "FedAdam(SCAFFOLD)": FedAdam(SCAFFOLD()),
    "IDA(FedProx)": IDA(FedProx()),
}
ALGORITHMS = {
    "FedAvg": lambda method: FedAvg(SOME, RECIPE, method),
    "Then": lambda method: Then(FedAvg(SOME, RECIPE, method), 1, FedAvg(SOME, RECIPE, method)),
    "Warmup": lambda method: Warmup(SOME, RECIPE, method),
    "FedSeq": lambda method: FedSeq(recipe=RECIPE, method=method),
    "FedSeqInter": lambda method: FedSeqInter(FedSeq(recipe=RECIPE, method=method)),
    "HFedMS": lambda method: HFedMS(store=Semantic(width=HIDDEN), recipe=RECIPE, method=method),
    "2LS": lambda method: TwoStage(CLUSTERS, recipe=RECIPE, method=method),
    "split learning": lambda method: SplitLearning(replace(RECIPE, cut="classifier"), method),
    "Evolve(FedAvg)": lambda method: Evolve(FedAvg(SOME, RECIPE, method)),
    "Evolve(2LS)": lambda method: Evolve(TwoStage(CLUSTERS, recipe=RECIPE, method=method)),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_algorithm = pytest.mark.parametrize("inside", ALGORITHMS.values(), ids=ALGORITHMS)


@every_method
@every_algorithm
def test_a_cell_is_the_same_on_every_engine_and_under_a_hostile_federation(inside, method):
    checks = contract(inside(method))
    checks["engines_agree"]()
    checks["hostile_agrees"]()


@pytest.mark.slow
@every_method
@every_algorithm
def test_a_cell_keeps_the_whole_contract(inside, method):
    checks = contract(inside(method))
    if inside is ALGORITHMS["Evolve(2LS)"]:
        del checks["one_client"]  # its clusters name twelve
    for check in checks.values():
        check()


def test_no_method_is_left_out():
    from fedrelay import methods

    ours = {c for c in vars(methods).values() if isinstance(c, type) and issubclass(c, Plain | SCAFFOLD.__base__)}
    assert ours - {SCAFFOLD.__base__} == {type(m) for m in METHODS.values()}


def test_nothing_of_the_grid_leaves_the_lanes_unseen():
    """What is compared with the loop must have trained in lanes: a cell that fell back would agree with itself."""
    fell_back = []
    for inside in ALGORITHMS.values():
        for method in (Plain(), FedProx(), FedDyn(), SCAFFOLD(), SCAFFOLD(option=1)):  # every rule once
            view, algorithm = Run(fed := world(LANES)), inside(method)
            algorithm.round(view, algorithm.init(view))
            fell_back += [why for why in fed.engine._cannot.values() if why]
    assert not fell_back


# --- cells that make no sense


@value
class Faces(Rule):
    """Looks at the outputs: it needs the whole model."""

    def loss(self, params, forward, x, y, mask, context):
        return (forward(params, x).square().sum(1) * mask).sum() / 100


@value
class Facing(Plain):
    def visit(self, m, base):
        return base.adding(Faces()), {}


STRAIGHT = "SCAFFOLD reads gradients off the path of plain SGD at a constant rate: no momentum, no schedule"
PULLED = "SCAFFOLD would take {}'s pull for a gradient of the data: use option=1"
SERVED = "{} has a server half of its own, which IDA would replace: use a client rule such as FedProx in it"
TWICE = "two {0} rules in one recipe would share their memory and their numbers: keep one of them"
SHARED = "Dynamic.alpha cannot evolve: the server's half of Dynamic needs one value for everybody"
CUT = "Faces needs the whole model, so it cannot be used across a cut: train without `cut`, or without Faces"

REFUSED = {
    "SCAFFOLD with momentum": (FedAvg(SOME, replace(RECIPE, optimizer=SGD(0.9)), SCAFFOLD()), STRAIGHT),
    "SCAFFOLD with Adam": (FedAvg(SOME, replace(RECIPE, optimizer=Adam()), SCAFFOLD()), STRAIGHT),
    "SCAFFOLD with a schedule": (FedAvg(SOME, replace(RECIPE, schedule=Cosine()), SCAFFOLD()), STRAIGHT),
    "FedAdam(SCAFFOLD) with momentum": (FedSeq(recipe=replace(RECIPE, optimizer=SGD(0.9)), method=FedAdam(SCAFFOLD())), STRAIGHT),
    "SCAFFOLD at rate 0": (
        FedAvg(SOME, replace(RECIPE, learning_rate=0.0), SCAFFOLD()),
        "SCAFFOLD divides by the learning rate: it must be positive",
    ),
    "SCAFFOLD beside a penalty": (Warmup(SOME, RECIPE.adding(Proximal()), SCAFFOLD()), PULLED.format("Proximal")),
    "SCAFFOLD beside a second rule's penalty": (Warmup(SOME, RECIPE.adding(Elastic()), SCAFFOLD()), PULLED.format("Elastic")),
    "SCAFFOLD beside a loss": (FedAvg(SOME, RECIPE.adding(Faces()), SCAFFOLD()), PULLED.format("Faces")),
    "IDA(SCAFFOLD)": (FedAvg(SOME, RECIPE, IDA(SCAFFOLD())), SERVED.format("SCAFFOLD")),
    "IDA(FedDyn), second": (Then(FedAvg(SOME, RECIPE), 1, FedSeq(method=IDA(FedDyn()))), SERVED.format("FedDyn")),
    "IDA(FedAdam), evolving": (Evolve(FedAvg(SOME, RECIPE, IDA(FedAdam()))), SERVED.format("FedAdam")),
    "FedProx twice": (FedAvg(SOME, RECIPE.adding(Proximal()), FedProx()), TWICE.format("Proximal")),
    "a second regulator in a warm-up": (Warmup(SOME, RECIPE.adding(Regulate())), TWICE.format("Regulate")),
    "evolving FedDyn's alpha": (Evolve(FedAvg(SOME, RECIPE, FedDyn()), "Dynamic.alpha", (0.1, 0.2)), SHARED),
    "evolving FedDyn's alpha, by its short name": (Evolve(FedAvg(SOME, RECIPE, FedDyn()), "rule.alpha", (0.1, 0.2)), SHARED),
    "evolving FedDyn's alpha around 2LS": (Evolve(TwoStage(CLUSTERS, recipe=RECIPE, method=FedDyn()), "rule.alpha"), SHARED),
    "evolving a number that is not there": (
        Evolve(FedAvg(SOME, RECIPE), "rule.mu"),
        f"no number 'rule.mu' in this recipe: it has {', '.join(RECIPE.numbers)}",
    ),
    "a loss across a cut": (SplitLearning(replace(RECIPE, cut="classifier"), Facing()), CUT),
    "SplitFed with a loss": (FedAvg(SOME, replace(RECIPE, cut="classifier"), Facing()), CUT),
}


PICKS = {"lanes": LANES, "loop": LOOP, "cut": Pick("cut", 1)}
CELLS = [(name, engine) for name in REFUSED for engine in (["cut"] if REFUSED[name][1] == CUT else PICKS)]


@pytest.mark.parametrize(("name", "engine"), CELLS)
def test_a_cell_that_makes_no_sense_is_refused_in_one_sentence(name, engine):
    algorithm, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        algorithm.fit(world(PICKS[engine]), rounds=1)


SENSIBLE = {
    "SCAFFOLD, option 1, with momentum": FedAvg(SOME, replace(RECIPE, optimizer=SGD(0.9)), SCAFFOLD(option=1)),
    "SCAFFOLD, option 1, with Adam": FedAvg(SOME, replace(RECIPE, learning_rate=0.01, optimizer=Adam()), SCAFFOLD(option=1)),
    "SCAFFOLD, option 1, beside a penalty": Warmup(SOME, RECIPE.adding(Proximal()), SCAFFOLD(option=1)),
    "SCAFFOLD beside an end": Warmup(SOME, RECIPE, SCAFFOLD()),
    "SCAFFOLD with weight decay": FedAvg(SOME, replace(RECIPE, optimizer=SGD(decay=0.01)), SCAFFOLD()),
    "FedProx beside FedDyn's rule": FedAvg(SOME, RECIPE.adding(Proximal()), FedDyn()),
    "EWC in a warm-up": Warmup(SOME, RECIPE, EWC()),
    "a loss where nothing is cut": FedAvg(SOME, RECIPE, Facing()),
    "a loss in a warm-up": Warmup(SOME, RECIPE, Facing()),
    "evolving FedProx's mu": Evolve(FedAvg(SOME, RECIPE, FedProx()), "Proximal.mu", (0.1, 1.0)),
    "evolving the rate of FedDyn": Evolve(FedAvg(SOME, RECIPE, FedDyn())),
}


sensible = pytest.mark.parametrize("algorithm", SENSIBLE.values(), ids=SENSIBLE)


@sensible
def test_what_is_near_a_refusal_and_makes_sense_works(algorithm):
    checks = contract(algorithm)
    checks["it_learns_something"]()
    checks["engines_agree"]()
    checks["hostile_agrees"]()


@pytest.mark.slow
@sensible
def test_what_is_near_a_refusal_and_makes_sense_keeps_the_whole_contract(algorithm):
    for check in contract(algorithm).values():
        check()
