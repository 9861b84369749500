"""The view that an algorithm is handed: paths, layers and their order, and draws that nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.landing import Flight
from fedrelay.seam.methods import Population
from fedrelay.seam.places import Place
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe


class Desk:
    """A federation that only writes down what it is asked."""

    def __init__(self, seed: int = 5) -> None:
        self.seed, self.sizes = seed, np.array([3, 0, 2])
        self.numbers: Counter = Counter()
        self.launched: list = []
        self.calls: list = []

    def initial(self):
        return "the initial model"

    def place(self, path, purpose):
        self.numbers[path, purpose] += 1
        return Place(path, purpose, self.numbers[path, purpose] - 1)

    def launch(self, place, plan):
        self.launched.append((place, plan))
        return Flight(len(self.launched) - 1)

    def land(self, any_of, also):
        self.calls.append((any_of, also))
        return [f"landing of {f.id}" for f in (*any_of, *also)]

    def ask(self, clients, question, weights=None):
        return dict.fromkeys(clients, (question, weights))

    def forget(self, path):
        return ("forgot", path)


CHAINS = [chain({}, [0, 2], Recipe()), chain({}, [2], Recipe())]


class Note(Layer):
    """Appends its mark to every visit's word, draws once, and overhears."""

    def __init__(self, mark: str, log: list | None = None) -> None:
        self.mark, self.log, self.drawn = mark, [] if log is None else log, []

    def plan(self, plan, rng):
        self.log.append(f"plan {self.mark}")
        self.drawn.append(rng().random())
        chains = (replace(c, visits=tuple(replace(v, lost=(v.lost or "") + self.mark) for v in c.visits)) for c in plan.chains)
        return replace(plan, chains=tuple(chains))

    def landed(self, landing):
        self.log.append(f"{self.mark} hears {landing}")


class Other(Note):
    """A layer of another name."""


def test_a_view_shows_the_federation():
    fed = Run(Desk())
    assert fed.sizes.tolist() == [3, 0, 2]
    assert fed.clients.tolist() == [0, 2]
    assert fed.initial() == "the initial model"
    assert fed.ask([2], "size?", "w") == {2: ("size?", "w")}
    assert (fed.population(), fed.population(7)) == (Population(2, 2), Population(2, 7))


def test_paths_grow_by_phases_and_reach_places_and_forgetting():
    desk = Desk()
    outer = Run(desk).under("warmup")
    inner = outer.under("inner")
    assert (outer.path, inner.path) == (("warmup",), ("warmup", "inner"))
    inner.launch(CHAINS)
    assert desk.launched[0][0] == Place(("warmup", "inner"), "plan", 0)
    assert inner.forget() == ("forgot", ("warmup", "inner"))
    assert outer.forget() == ("forgot", ("warmup",))


def test_numbers_are_counted_per_path_and_purpose():
    desk = Desk()
    a, b = Run(desk).under("a"), Run(desk).under("b")
    for fed in (a, b, a):
        fed.rng("cohort")
        fed.launch(CHAINS)
    assert [place for place, _ in desk.launched] == [Place(("a",), "plan", 0), Place(("b",), "plan", 0), Place(("a",), "plan", 1)]
    assert desk.numbers[("a",), "cohort"] == 2


def test_a_generator_is_named_by_seed_path_purpose_and_number():
    def drawn(seed=5, path=(), purpose="cohort", before=0):
        fed = Run(Desk(seed), path)
        for _ in range(before):
            fed.rng(purpose)
        return fed.rng(purpose).random()

    assert drawn() == drawn() == Place((), "cohort", 0).rng(5).random()
    assert drawn(before=1) == Place((), "cohort", 1).rng(5).random()
    assert len({drawn(), drawn(seed=6), drawn(path=("a",)), drawn(purpose="order"), drawn(before=1)}) == 5


def test_other_draws_and_plans_move_no_generator():
    quiet, busy = Run(Desk()), Run(Desk())
    busy.rng("order")
    busy.launch(CHAINS)
    busy.under("phase").rng("cohort")
    assert quiet.rng("cohort").random() == busy.rng("cohort").random()


def test_a_plan_takes_its_chains_and_every_fold_once():
    desk = Desk()
    Run(desk).launch(iter(CHAINS), Mean(), Bank(), Mean(), Mean("count"))
    plan = desk.launched[0][1]
    assert plan.chains == tuple(CHAINS)
    assert plan.folds == (Mean(), Bank(), Mean("count"))


def test_the_innermost_algorithms_layer_sees_the_plan_first():
    """What an outer layer does is the last word on a visit; whoever overhears does so in the same order."""
    desk, log = Desk(), []
    outermost, outer, inner = (Note(mark, log) for mark in "xyz")
    fed = Run(desk, layers=(outermost,)).around(outer).under("inner").around(inner)
    fed.train(CHAINS)
    assert log == ["plan z", "plan y", "plan x", "z hears landing of 0", "y hears landing of 0", "x hears landing of 0"]
    assert [v.lost for c in desk.launched[0][1].chains for v in c.visits] == ["zyx"] * 3
    assert CHAINS[0].visits[0].lost is None


def test_a_layer_around_one_view_is_not_around_another():
    desk, note = Desk(), Note("x")
    fed = Run(desk)
    fed.around(note).launch(CHAINS)
    fed.launch(CHAINS)
    assert [plan.chains[0].visits[0].lost for _, plan in desk.launched] == ["x", None]


@pytest.mark.parametrize("path", [(), ("warmup",)])
def test_adding_a_layer_changes_no_other_draw(path):
    """Not another layer's, not the cohort's, and not the plan's place, from which all of training draws."""

    def drawn(*others):
        desk, note = Desk(), Note("x")
        fed = Run(desk, path, (*others[:1], note, *others[1:]))
        cohorts = []
        for _ in range(3):
            cohorts.append(fed.rng("cohort").random())
            fed.launch(CHAINS)
        return note.drawn, cohorts, [place for place, _ in desk.launched]

    alone = drawn()
    assert drawn(Other("a")) == drawn(Other("a"), Other("b")) == alone
    assert len(set(alone[0])) == 3


def test_a_layers_draws_depend_on_seed_path_plan_and_its_name():
    def drawn(note, seed=5, path=(), plans=1):
        fed = Run(Desk(seed), path, (note,))
        for _ in range(plans):
            fed.launch(CHAINS)
        return note.drawn[-1]

    first = drawn(Note("x"))
    assert first == drawn(Note("y")) == Place((), "plan", 0).rng(5, "Note").random()
    others = drawn(Other("x")), drawn(Note("x"), seed=6), drawn(Note("x"), path=("a",)), drawn(Note("x"), plans=2)
    assert len({first, *others}) == 5


def test_each_of_several_layers_draws_under_its_own_name():
    note, other = Note("x"), Other("y")
    Run(Desk(), layers=(note, other)).launch(CHAINS)
    assert note.drawn == [Place((), "plan", 0).rng(5, "Note").random()]
    assert other.drawn == [Place((), "plan", 0).rng(5, "Other").random()]


def test_the_base_layer_changes_nothing():
    desk = Desk()
    assert Run(desk, layers=(Layer(),)).train(CHAINS) == "landing of 0"
    assert desk.launched[0][1].chains == tuple(CHAINS)


def test_landing_hands_both_lists_on_and_layers_hear_everything():
    desk, note = Desk(), Note("x")
    made = Run(desk, layers=(note,)).land(iter([Flight(1)]), also=iter([Flight(2)]))
    assert desk.calls == [([Flight(1)], [Flight(2)])]
    assert made == ["landing of 1", "landing of 2"]
    assert note.log == ["x hears landing of 1", "x hears landing of 2"]
