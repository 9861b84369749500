"""Clients that drop out, stall or send NaN: a failure is a value, reported with its reason, and it touches nobody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.engine.engine import Engine
from fedrelay.methods import SCAFFOLD, FedProx, Proximal
from fedrelay.seam.federation import Layer, Run
from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.plan import Chain, Visit, chain
from fedrelay.seam.recipe import SGD, Adam
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation, alike

from .systems import RECIPE, Evolve, FedSeq, FedSeqInter, Fleet, Genetic, HFedMS, TwoStage
from .world import CLUSTERS, LANES, LOOP, accuracy, digits, run

BROKEN = (0, 7, 21)
TEN = Uniform(count=10)
FAILING = {
    "FedAvg": FedAvg(TEN, RECIPE),
    "FedSeq x SCAFFOLD": FedSeq(method=SCAFFOLD()),
    "FedSeqInter": FedSeqInter(),
    "HFedMS": HFedMS(),
    "2LS": TwoStage(CLUSTERS),
    "Genetic": Genetic(),
}


class Overheard(Layer):
    """Keeps the receipts of every landing."""

    def __init__(self) -> None:
        self.receipts = []

    def landed(self, landing) -> None:
        self.receipts += landing.receipts


@pytest.mark.parametrize("name", FAILING)
def test_clients_with_NaN_poison_nothing(name: str) -> None:
    """Three of thirty clients own nothing but NaN, under the worst legal federation."""
    heard, fed = Overheard(), digits(broken=BROKEN, kind=HostileFederation)
    s = run(FAILING[name], fed, 2, layers=[heard])
    assert all(bool(t.isfinite().all()) for t in s.weights.values())
    assert not any(client in BROKEN and kept for _, client, _, kept in fed.state()["memory"])
    plain, healthy = digits(broken=BROKEN), digits()
    ill, well = (accuracy(f, run(FAILING[name], f, 30, layers=[heard] if f is plain else []).weights) for f in (plain, healthy))
    assert ill > well - 0.15
    assert {r.client for r in heard.receipts if r.reason} == {r.client for r in heard.receipts if r.client in BROKEN}
    assert {r.reason for r in heard.receipts if r.reason} == {"not finite"}


@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.9), Adam()], ids=["written out", "momentum", "Adam"])
@pytest.mark.parametrize("rules", [(), (Proximal(0.1),)], ids=["", "prox"])
@pytest.mark.parametrize("stride", [1, 5])
def test_NaN_stays_in_its_lane(optimizer, rules, stride: int) -> None:
    """Every other client ends with the bits it has where everybody is healthy; the broken end where they began."""
    ends = []
    for broken in ((), BROKEN):
        fed = digits(broken=broken, stride=stride)
        recipe = replace(RECIPE, learning_rate=0.01, optimizer=optimizer, rules=rules)
        ends.append((fed, Run(fed).train((chain(fed.initial(), [c], recipe) for c in range(30)), Bank())))
    (_, a), (fed, b) = ends
    same = [alike(x, y) for x, y in zip(a[Bank()], b[Bank()], strict=True)]
    assert [c for c in range(30) if not same[c]] == [*BROKEN]
    assert b.receipts.reasons == dict.fromkeys(BROKEN, "not finite")
    assert not a.receipts.reasons
    for c in BROKEN:
        end, seen = b[Bank()][c]
        assert seen == 0
        assert all(end[n] is t for n, t in fed.initial().items())


@pytest.mark.parametrize("pick", [LANES, LOOP])
def test_a_chain_goes_on_from_the_last_good_hand_over(pick) -> None:
    """A chain through (3, 7, 5), of which 7 fails, is the chain through (3, lost, 5), bit for bit: same places, same batches."""
    ends = []
    for broken, lost in (((7,), None), ((), "dropped out")):
        fed = digits(pick, broken=broken)
        visits = tuple(Visit(c, (RECIPE,), lost=lost if c == 7 else None) for c in (3, 7, 5))
        got = Run(fed).train([Chain(fed.initial(), visits)], Bank(), Mean(), Mean("count", at="visits"))
        ends.append((got[Bank()], got[Mean()], got[Mean("count", at="visits")]))
        assert got.receipts.reasons == {1: lost or "not finite"}
        sizes = fed.sizes[[3, 5]]
        assert got[Bank()][0][1] == sizes.sum()
    assert alike(*ends)


def test_a_chain_in_which_everybody_fails_weighs_nothing() -> None:
    fed = digits(broken=BROKEN)
    w = fed.initial()
    got = Run(fed).train([chain(w, BROKEN, RECIPE), chain(w, [3], RECIPE)], Mean(), Mean("count"), Bank())
    alone = Run(digits(broken=BROKEN)).train([chain(w, BROKEN, RECIPE), chain(w, [3], RECIPE)], Bank())[Bank()][1][0]
    for fold in (Mean(), Mean("count")):
        assert all(torch.allclose(got[fold][n], alone[n], rtol=1e-6, atol=0) for n in w)
    (end, seen), _ = got[Bank()]
    assert seen == 0
    assert all(end[n] is w[n] for n in w)
    nobody = Run(fed).train([chain(w, BROKEN, RECIPE)], Mean(), Mean("count"))
    assert nobody[Mean()] == nobody[Mean("count")] == {}


def test_a_round_in_which_everybody_fails_changes_nothing() -> None:
    fed = digits(broken=range(30))
    system = FedAvg(TEN, RECIPE, FedProx(mu=0.1))
    s = run(system, fed, 2)
    assert all(s.weights[n] is t for n, t in fed.initial().items())
    assert fed.ledger.totals["failed"] == fed.ledger.totals["visits"] == 20


def test_a_failed_client_keeps_the_memory_it_had() -> None:
    """Client 7 trains once; then its model overflows, and what it keeps is what it kept, at the next version."""
    fed = digits()
    recipe, extra = SCAFFOLD().visit({"c": {n: torch.zeros_like(t) for n, t in fed.initial().items()}}, RECIPE)
    Run(fed).train([chain(fed.initial(), [7], recipe, extra)], Mean())
    before = {n: t.clone() for n, t in fed.memories.clients()[7]["ControlVariate"].items()}
    wild = {n: t * 1e38 for n, t in fed.initial().items()}
    got = Run(fed).train([chain(wild, [7], recipe, extra)], Mean())
    assert got.receipts.reasons == {0: "not finite"}
    assert alike(before, dict(fed.memories.clients()[7]["ControlVariate"]))
    assert Run(fed).train([chain(fed.initial(), [7], recipe, extra)], Mean()).receipts.ok.all()


@pytest.mark.parametrize("system", [FedSeq(method=SCAFFOLD()), Evolve(TwoStage(CLUSTERS))], ids=["FedSeq", "2LS, evolving"])
def test_a_fleet_that_drops_and_stalls(system) -> None:
    """Whoever is lost is reported, hostile equals plain, and nobody trains who was lost."""
    fleet, feds, heard = Fleet(lost=0.3), [digits(), digits(kind=HostileFederation)], [Overheard(), Overheard()]
    a, b = (run(system, f, 8, layers=[h, fleet]) for f, h in zip(feds, heard, strict=True))
    assert alike(a, b)
    lost = [r for r in heard[0].receipts if r.reason]
    assert len(lost) > 5
    assert {r.reason for r in lost} == {"dropped out"}
    assert all(r.steps == 0 and np.isnan(r.loss) and r.traffic["up"] == 0 < r.traffic["down"] for r in lost)
    assert max(r.seconds for r in heard[0].receipts) > 1000  # somebody stalled


def test_a_fleet_changes_no_other_place() -> None:
    """A fleet draws under its own name: who is not lost trains as without it."""
    heard = [Overheard(), Overheard()]
    for h, layers in zip(heard, ([], [Fleet(lost=0.5)]), strict=True):
        fed = digits()
        Run(fed, layers=(h, *layers)).train((chain(fed.initial(), [c], RECIPE) for c in range(30)), Mean())
    losses = [(a.loss, b.loss) for a, b in zip(heard[0].receipts, heard[1].receipts, strict=True) if not b.reason]
    assert 5 < len(losses) < 25
    assert all(a == b for a, b in losses)


def test_who_is_late_lands_late() -> None:
    """A wait is added to the visit's own time, and an earlier flight lands first whenever it left."""
    fed = digits()
    times = [Visit(3, (RECIPE,), wait=500.0), Visit(4, (RECIPE,)), Visit(5, (RECIPE,), wait=1e6)]
    flights = [Run(fed).launch([Chain(fed.initial(), (v,))], Mean()) for v in times]
    own = fed.clock(np.array([3, 4, 5]), fed.sizes[[3, 4, 5]])
    first = fed.land(flights)
    assert [x.flight for x in first] == [min(flights[:2], key=lambda f: own[f.id] + times[f.id].wait)]
    assert fed.now == first[0].at
    landed = fed.land([flights[2]], also=[f for f in flights[:2] if f != first[0].flight])
    assert [x.flight for x in landed] == [f for f in flights if f != first[0].flight]  # with the late one, whoever was down
    assert fed.now == own[2] + 1e6


def test_lanes_that_idle_inside_a_visit_do_not_move() -> None:
    """The engine looks at its boundaries every step or every nine: the bits are the same."""
    ends = []
    for stride in (1, 9):
        fed = digits(Engine(LANES, stride))
        recipe = replace(RECIPE, learning_rate=0.01, optimizer=Adam(), epochs=2)
        ends.append(Run(fed).train((chain(fed.initial(), [c], recipe) for c in range(30)), Bank())[Bank()])
    assert alike(*ends)


def test_a_simulation_is_not_hostile() -> None:
    """The two kinds that these tests compare are two."""
    assert issubclass(HostileFederation, Simulation)
    assert digits(kind=HostileFederation).kills == 0
