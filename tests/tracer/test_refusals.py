"""What a federation refuses, and what it keeps to itself until a flight lands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedrelay.methods import SCAFFOLD, Proximal
from fedrelay.seam.codec import Store, encode
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Mean
from fedrelay.seam.landing import Flight
from fedrelay.seam.places import Place
from fedrelay.seam.plan import Plan, chain
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation, alike

from .systems import RECIPE
from .world import digits

KINDS = pytest.mark.parametrize("kind", [Simulation, HostileFederation])


def keeping(fed):
    """A recipe and an extra whose visits write a memory."""
    return SCAFFOLD().visit({"c": fed.initial()}, RECIPE)


@KINDS
def test_memory_is_committed_on_landing_only(kind) -> None:
    """Two flights train together, one lands: nothing of the other is to be seen before it lands too."""
    fed = digits(kind=kind)
    recipe, extra = keeping(fed)
    late, early = (Run(fed).launch([chain(fed.initial(), [c], recipe, extra)], Mean()) for c in (3, 4))
    fed.land([early])
    assert fed.state()["air"][late.id].work is not None
    assert [*fed.memories.clients()] == [4]
    assert fed.memories.version((), 3) == 0
    assert fed.ledger.who("weights") == [4]
    visits = fed.ledger.totals["visits"]
    fed.land([late])
    assert sorted(fed.memories.clients()) == [3, 4]
    assert fed.memories.version((), 3) == 1
    assert fed.ledger.totals["visits"] == visits + 1


@KINDS
def test_a_client_whose_memory_is_in_the_air_is_refused(kind) -> None:
    fed = digits(kind=kind)
    recipe, extra = keeping(fed)
    plan = [chain(fed.initial(), [3], recipe, extra)]
    flight = Run(fed).launch(plan, Mean())
    with pytest.raises(ValueError, match="client 3 is under way"):
        Run(fed).launch([chain(fed.initial(), [8, 3], recipe, extra)], Mean())
    Run(fed).launch([chain(fed.initial(), [3], RECIPE)], Mean())  # this recipe writes no memory
    Run(fed, ("elsewhere",)).launch(plan, Mean())  # and this one writes another
    fed.land([flight])
    Run(fed).launch(plan, Mean())


def test_two_chains_that_write_one_memory_are_refused() -> None:
    fed = digits()
    recipe, extra = keeping(fed)
    with pytest.raises(ValueError, match="memory of client 1"):
        Run(fed).launch([chain(fed.initial(), [0, 1], recipe, extra), chain(fed.initial(), [1], recipe, extra)], Mean())
    Run(fed).train([chain(fed.initial(), [0, 1], RECIPE), chain(fed.initial(), [1], RECIPE)], Mean())


@KINDS
def test_a_repeated_place_is_an_error(kind) -> None:
    fed = digits(kind=kind)
    plan = Plan((chain(fed.initial(), [0], RECIPE),), (Mean(),))
    place = fed.place(("x",), "plan")
    fed.launch(place, plan)
    with pytest.raises(ValueError, match="in the air already"):
        fed.launch(place, plan)
    assert fed.place(("x",), "plan") != place


def test_a_place_that_was_not_handed_out_is_an_error() -> None:
    fed = digits()
    plan = Plan((chain(fed.initial(), [0], RECIPE),), (Mean(),))
    fed.place(("x",), "plan")
    for made_up in (Place(("x",), "plan", 1), Place(("y",), "plan", 0), Place(("x",), "other", 0)):
        with pytest.raises(ValueError, match="not handed out"):
            fed.launch(made_up, plan)
    assert not fed.state()["air"]


def test_a_client_that_does_not_exist_is_refused() -> None:
    fed = digits()
    for client in (30, -2):
        with pytest.raises(ValueError, match=r"clients 0 \.\.\. 29"):
            Run(fed).launch([chain(fed.initial(), [client], RECIPE)], Mean())


def test_a_plan_without_chains_is_refused() -> None:
    with pytest.raises(ValueError, match="no chains"):
        Run(digits()).launch([], Mean())


def test_a_flight_lands_once() -> None:
    fed = digits()
    flight = Run(fed).launch([chain(fed.initial(), [0], RECIPE)], Mean())
    fed.land([flight])
    for unknown in (flight, Flight(17)):
        with pytest.raises(ValueError, match=f"flight {unknown.id} is not in the air"):
            fed.land([unknown])


def test_a_refused_plan_leaves_nothing_behind() -> None:
    """Neither a flight nor a memory; the next plan trains as if nobody had asked."""
    fed = digits()
    recipe, extra = keeping(fed)
    before = fed.state()
    with pytest.raises(ValueError, match="two Proximal rules"):
        fed.launch(
            fed.place((), "other"),
            Plan((chain(fed.initial(), [0], replace(recipe, rules=(*recipe.rules, Proximal(), Proximal())), extra),), (Mean(),)),
        )
    assert alike({**fed.state(), "counters": 0}, {**before, "counters": 0})


def test_a_closure_does_not_travel() -> None:
    for cannot in (replace(RECIPE, scope=lambda: 0), {"f": print}, [1, 2], {1, 2}, np.float64(1), np.int64(1), object()):
        with pytest.raises(TypeError, match="cannot travel"):
            encode(cannot, Store())


def test_a_fold_that_did_not_ride_is_missed_by_name() -> None:
    fed = digits()
    got = Run(fed).train([chain(fed.initial(), [0], RECIPE)], Mean())
    with pytest.raises(LookupError, match="did not ride"):
        got[Mean("count")]
