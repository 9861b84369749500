"""A simulation: its clock, its landings in time order, what it answers, and what its ledger adds up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrelay.algorithms import Centralised, FedAvg, Uniform
from fedrelay.engine.engine import Pick
from fedrelay.methods import SCAFFOLD, FedProx
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Mean
from fedrelay.seam.landing import Flight
from fedrelay.seam.plan import EVERYBODY, Chain, Plan, Visit, chain
from fedrelay.seam.questions import Evaluate, LabelCounts, Size
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.build import simulate
from fedrelay.simulation.faults import Stall
from fedrelay.testing import alike
from fedrelay.testing.world import SIZES, world

RECIPE = Recipe(batch_size=8)


def fly(fed, *chains, recipe=RECIPE, path=()):
    """Launch a plan of chains of clients."""
    w = fed.initial()
    return Run(fed, path).launch([chain(w, c, recipe) for c in chains], Mean())


# --- the clock


@pytest.mark.parametrize(
    ("chains", "seconds"),
    [
        ([[2]], 30),
        ([[2], [3]], 30),  # side by side: the longest
        ([[2, 3]], 30 + 12),  # one after another: the sum
        ([[2, 3], [7, 5], [0]], 25 + 18),
        ([[4, 4, 4]], 15),
        ([[EVERYBODY]], sum(SIZES)),
    ],
)
def test_chains_add_and_branches_take_the_longest(chains, seconds):
    """Client k goes through SIZES[k] examples at one a second: 30, 12, 5, 18, ... from client 2 on."""
    fed = world()
    [landing] = fed.land([fly(fed, *chains)])
    assert landing.at == fed.now == seconds
    assert landing.receipts.seconds.sum() == sum(SIZES[c] if c >= 0 else sum(SIZES) for own in chains for c in own)


@pytest.mark.parametrize(
    ("recipe", "seconds"),
    [
        (Recipe(batch_size=8, epochs=3), 90),
        (Recipe(batch_size=8, steps=2), 16),  # two batches of 8
        (Recipe(batch_size=8, steps=4), 30),  # 8 + 8 + 8 + 6: an epoch
        (Recipe(batch_size=8, steps=9), 68),  # two epochs, and 8
        (Recipe(batch_size=64, steps=3), 90),
    ],
)
def test_work_is_counted_in_the_examples_that_a_visit_goes_through(recipe, seconds):
    """Client 2 has 30 examples."""
    fed = world()
    fed.land([fly(fed, [2], recipe=recipe)])
    assert fed.now == seconds


def test_alternatives_are_all_trained():
    fed = world()
    tries = Visit(3, (RECIPE, Recipe(batch_size=8, epochs=2)))
    Run(fed).train([Chain(fed.initial(), (tries,))], Mean())
    assert fed.now == 3 * 12


def test_time_passes_from_flight_to_flight():
    fed = world()
    for at in (12, 24, 36):
        assert fed.land([fly(fed, [3])])[0].at == at


def test_clients_have_their_own_speed():
    fed = world(clock=lambda clients, examples: examples / np.where(clients == 2, 10.0, 0.5))
    fed.land([fly(fed, [2], [4])])
    assert fed.now == max(30 / 10, 5 / 0.5)


def test_a_stall_takes_longer():
    fed = world()
    FedAvg(Uniform(count=12), RECIPE).fit(fed, 1, layers=[Stall(share=1.0, seconds=100)])
    assert fed.now == max(SIZES) + 100


# --- landings


def test_landings_come_in_time_order():
    """Client 2 needs 30 s, 3 needs 12 s, 4 needs 5 s, 8 needs 3 s: the first of those waited for, and what is down by then."""
    fed = world()
    slow, middle, quick, quickest = (fly(fed, [c]) for c in (2, 3, 4, 8))
    assert [(x.flight, x.at) for x in fed.land([middle, slow], also=[quick])] == [(quick, 5), (middle, 12)]
    assert fed.now == 12
    assert [(x.flight, x.at) for x in fed.land([quickest])] == [(quickest, 3)]  # it was down long ago
    assert fed.now == 12
    assert [x.at for x in fed.land([slow])] == [30]


def test_what_lands_at_one_time_lands_in_the_order_in_which_it_left():
    fed = world()
    flights = [fly(fed, [c]) for c in (4, 3, 4)]
    assert [x.flight for x in fed.land([flights[2]], also=flights[:2])] == [flights[0], flights[2]]


def test_also_does_not_wait():
    fed = world()
    quick, slow = fly(fed, [4]), fly(fed, [2])
    assert [x.flight for x in fed.land([quick], also=[slow])] == [quick]
    assert fed.now == 5


def test_a_flight_leaves_when_it_is_launched():
    """Launched at 5 s, 12 s of work: down at 17 s, before what left at 0 and takes 30 s."""
    fed = world()
    slow = fly(fed, [2])
    fed.land([fly(fed, [4])])
    later = fly(fed, [3])
    assert [(x.flight, x.at) for x in fed.land([slow, later])] == [(later, 17)]


@pytest.mark.parametrize("flights", [[Flight(0), Flight(1)], [Flight(7)]])
def test_what_is_not_in_the_air_cannot_land(flights):
    fed = world()
    fly(fed, [3])
    with pytest.raises(ValueError, match=rf"^flight {flights[-1].id} is not in the air$"):
        fed.land(flights)
    assert fed.now == 0


def test_waiting_for_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^there is no flight to wait for$"):
        world().land([])


def test_what_is_trained_does_not_depend_on_when_it_lands():
    """Three flights landed one by one, together, and in another order: the same bits."""
    made = []
    for waits in ([[0], [1], [2]], [[2], [1], [0]], [[2], [0, 1], [0]]):
        fed = world()
        flights = [fly(fed, [c, (c + 5) % 12], path=(str(c),)) for c in (2, 3, 4)]
        landed = {}
        for wait in waits:
            for x in fed.land([flights[i] for i in wait]):
                landed[x.flight.id] = x[Mean()]
        made.append(tuple(landed[i] for i in range(3)))
    assert alike(made[0], made[1])
    assert alike(made[0], made[2])


def test_forgetting_takes_flights_and_memories_below_a_path():
    fed = world()
    algorithm = FedAvg(Uniform(count=4), RECIPE, SCAFFOLD())
    for path in (("a",), ("b",)):
        view = Run(fed, path)
        algorithm.round(view, algorithm.init(view))
    gone, stays = fly(fed, [3], path=("a", "inner")), fly(fed, [4], path=("b",))
    assert fed.forget(("a",)) == (gone,)
    assert {path for path, *_ in fed.state()["memory"]} == {("b",)}
    with pytest.raises(ValueError, match="is not in the air"):
        fed.land([gone])
    assert fed.land([stays])[0].flight == stays
    assert fed.forget(("a",)) == ()


def test_places_are_numbered_by_path_and_purpose():
    fed = world()
    asked = [fed.place(p, w).number for p, w in [((), "x"), ((), "x"), (("a",), "x"), ((), "y"), ((), "x")]]
    assert asked == [0, 1, 0, 0, 2]


@pytest.mark.parametrize("client", [12, -2, 99])
def test_a_client_that_does_not_exist(client):
    sentence = rf"^client {client} does not exist: there are clients 0 ... 11$"
    fed = world()
    with pytest.raises(ValueError, match=sentence):
        fly(fed, [3, client])
    with pytest.raises(ValueError, match=sentence):
        fed.ask([3, client], Size())
    assert fed.ledger.disclosed == {}


# --- asking


def test_clients_answer_and_that_is_known():
    fed = world()
    assert fed.ask([2, 5], Size()) == {2: 30, 5: 18}
    counts = fed.ask(np.array([1]), LabelCounts(4))
    assert sum(counts[1]) == 7
    assert set(np.flatnonzero(counts[1])) <= {1, 2}
    assert fed.ledger.disclosed == {"label counts": 1, "size": 2}
    assert fed.ledger.who("size") == [2, 5]


def test_everybody_is_nobody_to_be_asked():
    with pytest.raises(ValueError, match=r"^client -1 does not exist"):
        world().ask([EVERYBODY], Size())


def test_an_evaluation_of_all_clients_is_that_of_their_rows_together():
    fed = world()
    answers = fed.ask(range(12), Evaluate(4, part="train"), fed.initial())
    total = sum(list(answers.values())[1:], answers[0])
    z = fed.site.model.forward(fed.initial(), fed.site.data.train.x)
    assert total.n == sum(SIZES)
    assert total.accuracy == pytest.approx(float((z.argmax(1) == fed.site.data.train.y).float().mean()))
    assert total.loss == pytest.approx(float(torch.nn.functional.cross_entropy(z, fed.site.data.train.y)), rel=1e-5)


def test_a_part_that_clients_do_not_have_is_refused():
    """Else an evaluation on test rows would be one on the rows that were trained on."""
    sentence = r"^clients have no 'test' part: they have train$"
    with pytest.raises(ValueError, match=sentence):
        world().ask([1], Evaluate(4), world().initial())
    assert simulate("digits", held_out=0.2, engine="loop").ask([0], Size(part="validation")) == {0: 29}


def test_an_evaluation_does_not_depend_on_its_batches():
    fed = world()
    whole, parts = fed.test(fed.initial()), fed.test(fed.initial(), batch=7)
    assert np.array_equal(whole.confusion, parts.confusion)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-6)
    assert whole.n == sum(SIZES)


# --- the ledger


def test_totals_of_a_plan_by_hand():
    """Clients 3, 4 (12 and 5 examples, one of which is lost) and 1 (7, whose rows are NaN), batches of 8, two epochs.

    Steps: client 3: 2 per epoch, 4; client 1: 1 per epoch, 2; client 4: none.
    The model has 11 x 5 + 5 + 5 x 4 + 4 = 84 floats of 4 bytes, 336 down for each and 336 up from whom there was something.
    """
    fed = world(broken=(1,))
    recipe = Recipe(batch_size=8, epochs=2)
    visits = [Visit(3, (recipe,)), Visit(4, (recipe,), lost="asleep"), Visit(1, (recipe,))]
    [landing] = [Run(fed).train([Chain(fed.initial(), (v,)) for v in visits], Mean())]
    expected = {"visits": 3, "failed": 2, "examples": 24, "steps": 6, "down": 3 * 336, "up": 336, "cut": 0}
    assert {k: v for k, v in fed.ledger.totals.items() if not k.startswith("wire")} == expected
    assert fed.ledger.totals["wire down"] == landing.receipts.traffic["wire down"].sum() > 3 * 336
    assert fed.ledger.totals["wire up"] == landing.receipts.traffic["wire up"].sum() > 336
    assert landing.receipts.reasons == {1: "asleep", 2: "not finite"}


def test_SCAFFOLD_sends_twice_as_much():
    plain, scaffold = world(), world()
    FedAvg(Uniform(count=4), RECIPE).fit(plain, 2)
    FedAvg(Uniform(count=4), RECIPE, SCAFFOLD()).fit(scaffold, 2)
    for way in ("down", "up"):
        assert scaffold.ledger.totals[way] == 2 * plain.ledger.totals[way] == 2 * 8 * 336


def test_a_part_of_the_model_costs_a_part():
    fed = world()
    FedAvg(Uniform(count=4), Recipe(batch_size=8, scope=("classifier",))).fit(fed, 1)
    assert fed.ledger.totals["up"] == 4 * (5 * 4 + 4) * 4
    assert fed.ledger.disclosed == {"weights of classifier": 4}


def test_who_handed_nothing_on_disclosed_nothing():
    fed = world(broken=(1,))
    Run(fed).train([chain(fed.initial(), c, RECIPE) for c in ([1], [3], [5, 6])], Mean())
    assert fed.ledger.who("weights") == [3, 5, 6]


def test_what_flies_has_disclosed_nothing_yet():
    fed = world()
    flight = fly(fed, [3])
    assert (fed.ledger.totals, fed.ledger.disclosed) == ({}, {})
    fed.land([flight])
    assert fed.ledger.who("weights") == [3]


def test_centralised_training_takes_the_raw_data_of_everybody():
    fed = world()
    Centralised(RECIPE).fit(fed, 1)
    assert fed.ledger.disclosed == {"raw data": 12}
    assert fed.ledger.totals["examples"] == sum(SIZES)
    assert fed.ledger.totals["steps"] == -(-sum(SIZES) // 8)


# --- how it trains


def test_a_fixed_pick_is_not_a_measured_one():
    fed = world(Pick("loop", 1))
    FedAvg(Uniform(count=2), RECIPE).fit(fed, 1)
    assert fed.picks() == {}


def test_memories_beyond_the_budget_change_no_bit():
    algorithm = FedAvg(Uniform(count=6), RECIPE, SCAFFOLD())
    rich, poor = world(), world(memory_budget=600)
    assert alike(algorithm.fit(rich, 4).state, algorithm.fit(poor, 4).state)
    assert poor.memories.spill.resident <= 600 < rich.memories.spill.resident


def test_a_plan_is_checked_before_it_leaves():
    fed = world()
    plan = Plan((chain(fed.initial(), [3], FedProx().visit(None, Recipe(batch_size=0.5))[0]),), (Mean(),))
    with pytest.raises(ValueError, match=r"^batch_size 0.5 is not a whole number$"):
        fed.launch(fed.place((), "plan"), plan)
    assert fed.state()["air"] == {}
