"""One algorithm, then another: each with draws and memories of its own; only the model is passed on."""

from __future__ import annotations

from typing import Any

import pytest

from byhand import ENGINES, HALF, Recorder, federation, model, number
from fedrelay.algorithms import Everyone, FedAvg, Then, Uniform
from fedrelay.methods import SCAFFOLD, FedDyn, Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.federation import Run
from fedrelay.seam.landing import Flight
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

TWICE = Recipe(learning_rate=0.5, batch_size=8, steps=2)


def play(algorithm, fed, rounds):
    s = algorithm.init(fed)
    states = [s]
    for _ in range(rounds):
        s = algorithm.round(fed, s)
        states.append(s)
    return states


def test_the_second_starts_from_the_model_of_the_first():
    """b = 2 and -6: w -> w/2 - 1 for two rounds, then client 0's own w -> w/2 + 1: -1, -1.5, 0.25, 1.125."""

    @value
    class First(FedAvg):
        """Client 0 only."""

        def round(self, fed: Run, s: State) -> State:
            got = fed.train([chain(s.weights, [0], HALF)], *Plain().folds)
            return State(*Plain().merge(s.weights, None, got))

    states = play(Then(FedAvg(Everyone(), HALF), 2, First()), Run(federation([2, -6])), 4)
    assert [number(s.weights) for s in states] == [0, -1, -1.5, 0.25, 1.125]
    assert [s.done for s in states] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("pick", ENGINES, ids=lambda p: p.engine)
def test_variates_are_fresh_on_both_sides(pick):
    """SCAFFOLD for two rounds ends at -1.875 with c = 0.375, c_0 = -3.375, c_1 = 4.125 (b = 2, -6; its own golden test).

    Begun afresh there: -1.875 -> 0.0625 -> 1.03125 and -1.875 -> -3.9375 -> -4.96875, mean -1.96875; c_0 = -1.875 - 1.03125,
    c_1 = -1.875 + 4.96875, so c = 0.09375. The clients' old variates beside a new c would lead to -1.6875; had c survived too,
    it would be another now.
    """
    fed = federation([2, -6], pick=pick)
    states = play(Then(FedAvg(Everyone(), TWICE, SCAFFOLD()), 2, FedAvg(Everyone(), TWICE, SCAFFOLD())), Run(fed), 3)
    assert [number(s.weights) for s in states] == [0, -1.5, -1.875, -1.96875]
    assert [float(s.inner.method["c"]["line.w"]) for s in states[2:]] == [0.375, 0.09375]


def test_the_first_phases_memories_are_forgotten_when_it_is_over_and_not_before():
    fed = federation([2, -6])
    run, algorithm = Run(fed), Then(FedAvg(Everyone(), HALF, FedDyn()), 2, FedAvg(Everyone(), HALF, FedDyn()))
    s = algorithm.init(run)
    kept = []
    for _ in range(4):
        s = algorithm.round(run, s)
        kept.append([[fed.memories.version(path, k) for k in (0, 1)] for path in (("first",), ("after",))])
    assert kept == [[[1, 1], [0, 0]], [[2, 2], [0, 0]], [[0, 0], [1, 1]], [[0, 0], [2, 2]]]


def cohorts(algorithm, path=(), rounds=6, seed=0):
    recorder, base = Recorder(), federation([0.0] * 40)
    base.seed = seed
    play(algorithm, Run(base, path, (recorder,)), rounds)
    return [tuple(k for c in plan for k in c) for plan in recorder.chains]


FIVE = FedAvg(Uniform(count=5), HALF)


def test_the_phases_draw_other_cohorts():
    drawn = cohorts(Then(FIVE, 3, FIVE))
    assert len(set(drawn)) == 6


def test_a_phase_draws_what_it_would_draw_alone_under_its_name():
    """However long the warm-up: the draws of what follows depend on its own path and turns only."""
    first, after = cohorts(FIVE, ("first",)), cohorts(FIVE, ("after",))
    for rounds in (1, 3):
        drawn = cohorts(Then(FIVE, rounds, FIVE))
        assert drawn == [*first[:rounds], *after[: 6 - rounds]]


def test_phases_nest():
    drawn = cohorts(Then(Then(FIVE, 1, FIVE), 3, FIVE))
    assert len(set(drawn)) == 6
    assert drawn[0] == cohorts(FIVE, ("first", "first"))[0]
    assert drawn[1:3] == cohorts(FIVE, ("first", "after"))[:2]
    assert drawn[3:] == cohorts(FIVE, ("after",))[:3]


def test_no_rounds_of_the_first_are_none():
    drawn = cohorts(Then(FIVE, 0, FIVE))
    assert drawn == cohorts(FIVE, ("after",))


@value
class Late(Algorithm[Any]):
    """Sends client 0 out and never waits for it."""

    def init(self, fed: Run, weights: Any = None) -> State:
        return State(weights or fed.initial(), ())

    def round(self, fed: Run, s: State) -> State:
        return State(s.weights, (*s.method, fed.launch([chain(s.weights, [0], HALF)], *Plain().folds)))


def test_what_the_first_left_in_the_air_never_lands():
    run = Run(federation([2, -6]))
    states = play(Then(Late(), 2, FedAvg(Everyone(), HALF)), run, 3)
    assert states[2].inner.method == (Flight(0), Flight(1))
    for flight in states[2].inner.method:
        with pytest.raises(ValueError, match=f"^flight {flight.id} is not in the air$"):
            run.land([flight])


def test_weights_that_are_given_reach_the_first():
    assert number(Then(FIVE, 1, FIVE).init(Run(federation([0.0] * 5)), model(7)).weights) == 7
