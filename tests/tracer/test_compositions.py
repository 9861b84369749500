"""Methods inside systems, phases after phases, numbers that evolve around a method: what each keeps, and where it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedrelay.algorithms import Everyone, FedAvg, Then, Uniform
from fedrelay.engine.engine import Engine
from fedrelay.methods import SCAFFOLD
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Bank
from fedrelay.seam.plan import Plan, chain
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation

from .systems import RECIPE, Evolve, FedSeq, HFedMS, TwoStage, Warmup
from .world import CLUSTERS, LANES, LOOP, digits, gap, run

CLIENTS = 30


def mean_variate(fed, like, path=()):
    """The mean of c_k over *all* clients; one that never trained has a zero."""
    kept = fed.memories.clients(path)
    return {n: sum(m["ControlVariate"][n] for m in kept.values()) / CLIENTS for n in like}, len(kept)


@pytest.mark.parametrize("kind", [Simulation, HostileFederation])
def test_SCAFFOLD_inside_FedSeq_keeps_c_the_mean_of_all_c_k(kind) -> None:
    fed = digits(dtype=torch.float64, kind=kind)
    s = run(FedSeq(method=SCAFFOLD()), fed, 4)
    mean, clients = mean_variate(fed, s.weights)
    assert 5 < clients < CLIENTS
    assert gap(mean, s.method["c"]) < 1e-10
    assert max(float(t.norm()) for t in s.method["c"].values()) > 0.01


def test_SCAFFOLD_after_a_SCAFFOLD_warm_up_starts_from_fresh_variates() -> None:
    """Variates of the warm-up beside the second phase's c = 0 would be wrong for good, and nothing would say so."""
    fed = digits(dtype=torch.float64)
    system = Then(Warmup(method=SCAFFOLD()), 3, FedAvg(Uniform(count=10), RECIPE, SCAFFOLD()))
    s = run(system, fed, 8)
    mean, clients = mean_variate(fed, s.weights, ("after",))
    assert clients > 5
    assert gap(mean, s.inner.method["c"]) < 1e-10


class Watched(Simulation):
    """Remembers every plan with its place, and every landing with what the clients kept then."""

    def launch(self, place, plan):
        flight = super().launch(place, plan)
        self.__dict__.setdefault("plans", {})[flight.id] = place, plan
        return flight

    def _commit(self, i):
        landing = super()._commit(i)
        place, _ = self.plans[i]
        kept = {c: self.memories.read(place.path, c)["ControlVariate"] for c in landing.receipts.client.tolist()}
        self.__dict__.setdefault("landed", []).append((i, landing.receipts, kept))
        return landing


def again_without_rules(fed, flight):
    """The same visits at the same places with plain SGD in the loop engine: the models that they end with."""
    place, plan = fed.plans[flight]

    def bare(v):
        return replace(v, recipes=tuple(replace(r, rules=()) for r in v.recipes))

    chains = tuple(replace(c, visits=tuple(map(bare, c.visits))) for c in plan.chains)
    alone = digits(LOOP, torch.float64)
    alone.restore({**alone.state(), "counters": fed.state()["counters"]})
    [landing] = alone.land([alone.launch(place, Plan(chains, (Bank(),)))])
    return [w for w, _ in landing[Bank()]]


@pytest.mark.parametrize(
    "inner",
    [FedAvg(Everyone(), RECIPE, SCAFFOLD()), TwoStage(CLUSTERS, share=1.0, method=SCAFFOLD())],
    ids=["FedAvg", "2LS"],
)
def test_a_gene_trains_and_divides_the_variate(inner) -> None:
    """As long as c and c_k are zero, c_k+ = (received - returned) / (steps rate), where the rate is the client's own gene."""
    fed = digits(dtype=torch.float64, kind=Watched)
    system = Evolve(inner)
    s = system.init(Run(fed))
    genes = s.genes
    run(system, fed, 1, s)
    rates = set()
    for flight, receipts, kept in fed.landed:
        _, plan = fed.plans[flight]
        if any(t.any() for t in plan.chains[0].extra["c"].values()):
            continue  # this cohort left when c had moved
        ends = again_without_rules(fed, flight)
        for r in receipts:
            rates.add(r.numbers["learning_rate"])
            start, end = plan.chains[r.chain].start, ends[r.chain]
            wanted = {n: (start[n] - end[n]) / (r.steps * genes[r.client]) for n in end}
            assert r.numbers["learning_rate"] == genes[r.client]
            assert gap(kept[r.client], wanted) < 1e-8
    assert len(rates) > 1


def test_a_late_loss_counts_for_the_gene_that_earned_it() -> None:
    """Around 2LS a flight lands rounds after it left; what breeds is only a loss of the gene that a client has by then."""
    fed = digits(kind=Watched)
    system = Evolve(TwoStage(CLUSTERS, method=SCAFFOLD()))
    view, s = Run(fed), system.init(Run(fed))
    late = 0
    for _ in range(12):
        before, seen = s.genes, len(fed.__dict__.get("landed", []))
        s = system.round(view, s)
        for _, receipts, _ in fed.landed[seen:]:
            for r in receipts:
                if r.numbers["learning_rate"] != before[r.client]:
                    late += 1
                    assert s.losses.get(r.client) != r.loss
    assert late > 0


def test_Then_draws_other_cohorts_than_its_warm_up() -> None:
    fed = digits(kind=Watched)
    run(Then(FedAvg(Uniform(count=10), RECIPE, SCAFFOLD()), 6, FedAvg(Uniform(count=10), RECIPE, SCAFFOLD())), fed, 12)
    cohorts = [tuple(v.client for c in plan.chains for v in c.visits) for _, plan in fed.plans.values()]
    assert len(cohorts) == 12
    assert len({frozenset(c) for c in cohorts}) == 12


def test_what_ended_leaves_no_flights_and_no_memories() -> None:
    fed = digits()
    during = run(Then(TwoStage(CLUSTERS, method=SCAFFOLD()), 4, FedSeq()), fed, 4)
    assert fed.state()["air"]
    assert len(fed.memories) > 0
    run(Then(TwoStage(CLUSTERS, method=SCAFFOLD()), 4, FedSeq()), fed, 1, during)
    assert not fed.state()["air"]
    assert len(fed.memories) == 0


def test_a_part_forgets_only_its_own() -> None:
    """Forgetting a path takes what lies below it, not what has a name that begins alike, nor what lies above."""
    fed, aloft = digits(), {}
    for path in ((), ("first",), ("first", "inner"), ("first too",)):
        view = Run(fed, path)
        system = FedAvg(Uniform(count=3), RECIPE, SCAFFOLD())
        s = system.round(view, system.init(view))
        recipe, extra = system.method.visit(s.method, RECIPE)
        aloft[path] = view.launch([chain(s.weights, [5], recipe, extra)], *system.method.folds)
    assert len(fed.memories) == 12
    assert Run(fed, ("first",)).forget() == (aloft["first",], aloft["first", "inner"])
    assert {path for path, *_ in fed.state()["memory"]} == {(), ("first too",)}
    assert [*fed.state()["air"]] == [aloft[()].id, aloft["first too",].id]


class Keys(Engine):
    """Notes the key of every visit that it trains."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.keys = []

    def run(self, tallies) -> None:
        self.keys += [k for t in tallies for trip in t.trips for k in trip.keys]
        super().run(tallies)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_visit_of_a_run_has_a_place_of_its_own(seed: int) -> None:
    engine = Keys(LANES, 3)
    run(Then(Evolve(TwoStage(CLUSTERS)), 5, HFedMS()), digits(engine, seed=seed), 10)
    assert len(engine.keys) == len(set(engine.keys)) > 100


def test_seeds_share_no_place() -> None:
    engines = [Keys(LANES, 3) for _ in range(2)]
    for seed, engine in enumerate(engines):
        run(FedSeq(), digits(engine, seed=seed), 2)
    assert not set(engines[0].keys) & set(engines[1].keys)


def test_the_drawers_know_no_method_and_the_methods_no_drawer() -> None:
    """Two axes: no algorithm of the tracer branches on a method (it is a default at most), and no method on who travels."""
    import ast
    import inspect

    from fedrelay.methods import feddyn, fedprox, ida, scaffold, server

    from . import systems

    methods = {"SCAFFOLD", "FedDyn", "FedProx", "FedAdam", "IDA", "ControlVariate", "Dynamic", "Proximal"}
    travellers = {"FedAvg", "FedSeq", "FedSeqInter", "HFedMS", "TwoStage", "Warmup", "SplitLearning", "Then"}
    for module, others in [(systems, methods), *((m, travellers) for m in (feddyn, fedprox, ida, scaffold, server))]:
        names = {node.id for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Name)}
        assert not names & others
