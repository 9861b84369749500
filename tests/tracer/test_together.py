"""Several runs in one batch: each has the bits that it has alone, and none waits for one that is over."""

from __future__ import annotations

import threading

import pytest

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.engine.engine import Engine
from fedrelay.engine.lanes import Lanes
from fedrelay.engine.together import Together, side_by_side
from fedrelay.methods import SCAFFOLD
from fedrelay.testing.hostile import HostileFederation, alike

from .systems import RECIPE, Evolve, FedSeq, HFedMS, TwoStage
from .world import CLUSTERS, LANES, LOOP, digits, run

SYSTEMS = [
    FedSeq(method=SCAFFOLD()),
    Evolve(TwoStage(CLUSTERS, method=SCAFFOLD())),
    HFedMS(),
    FedAvg(Uniform(count=10), RECIPE, SCAFFOLD()),
]


def finish(system, fed, rounds: int):
    return run(system, fed, rounds), fed.state()


def sharing(engine, seed: int, site, **options):
    """The world of the tracer with an engine that it shares."""
    fed = digits(seed=seed, site=site, **options)
    fed.engine = engine
    return fed


def test_runs_side_by_side_have_the_bits_they_have_alone(monkeypatch) -> None:
    """Four systems and seeds with six, six, five and three rounds on one site."""
    site, rounds, met = digits().site, (6, 6, 5, 3), []
    alone = [finish(s, digits(seed=i, site=site), n) for i, (s, n) in enumerate(zip(SYSTEMS, rounds, strict=True))]
    seen = []

    def drive(i: int):
        def go(shared: Together):
            seen.append(shared)
            return finish(SYSTEMS[i], sharing(shared, i, site), rounds[i])

        return go

    leave = Lanes._leave

    def leaving(self, ended):
        met.append({id(b.trip.tally) for b in self.on if b})
        return leave(self, ended)

    monkeypatch.setattr(Lanes, "_leave", leaving)
    beside = side_by_side(Engine(LANES, 3), [drive(i) for i in range(4)])
    assert all(alike(a, b) for a, b in zip(alone, beside, strict=True))
    assert seen[0].turns < sum(books["flown"] for _, books in alone)
    assert max(map(len, met)) > 2  # lanes held chains of three flights at once


def test_seeds_differ_side_by_side() -> None:
    """The same system three times with two seeds: equal seeds give equal bits, others do not."""
    site = digits().site
    runs = [lambda shared, seed=seed: finish(FedSeq(), sharing(shared, seed, site), 2) for seed in (5, 6, 5)]
    a, b, c = side_by_side(Engine(LANES), runs)
    assert alike(a, c)
    assert not alike(a[0].weights, b[0].weights)


def test_hostile_runs_side_by_side() -> None:
    site = digits().site
    system = FedSeq(method=SCAFFOLD())
    alone = [finish(system, digits(seed=i, site=site), 2) for i in range(2)]
    runs = [lambda shared, i=i: finish(system, sharing(shared, i, site, kind=HostileFederation), 2) for i in range(2)]
    assert all(alike(a, b) for a, b in zip(alone, side_by_side(Engine(LANES), runs), strict=True))


def test_a_run_that_fails_holds_nobody_up() -> None:
    """One raises before its second round; the others end, and then the exception comes out."""
    site, ended = digits().site, []

    def fails(shared):
        run(FedSeq(), sharing(shared, 1, site), 1)
        raise ZeroDivisionError("a mistake in a run")

    def works(shared):
        ended.append(run(FedSeq(), sharing(shared, 2, site), 3))

    with pytest.raises(ZeroDivisionError, match="a mistake"):
        side_by_side(Engine(LANES), [works, fails, works])
    assert len(ended) == 2


class Fragile:
    """An engine that breaks at its second batch."""

    def __init__(self) -> None:
        self.turns = 0

    def run(self, tallies) -> None:
        self.turns += 1
        if self.turns == 2:
            raise ValueError("out of luck")
        Engine(LANES).run(tallies)


def test_a_batch_that_cannot_train_is_heard_of_by_all_its_runs() -> None:
    """And by them only: the run that left before goes out unharmed."""
    site, heard = digits().site, []

    def drive(rounds: int):
        def go(shared):
            try:
                return run(FedAvg(Uniform(count=4), RECIPE), sharing(shared, rounds, site), rounds)
            except RuntimeError as e:
                heard.append(e)
                return None

        return go

    short, *others = side_by_side(Fragile(), [drive(1), drive(3), drive(4)])
    assert short is not None
    assert others == [None, None]
    assert len(heard) == 2
    assert all("out of luck" in str(e) and isinstance(e.__cause__, ValueError) for e in heard)


def test_a_run_that_outlives_a_failed_batch_trains_on() -> None:
    site, system = digits().site, FedAvg(Uniform(count=4), RECIPE)

    def persists(shared):
        fed = sharing(shared, 1, site)
        run(system, fed, 1)
        with pytest.raises(RuntimeError, match="out of luck"):
            run(system, fed, 1)
        return run(system, fed, 1).weights

    a, b = side_by_side(Fragile(), [persists, persists])
    assert alike(a, b)


def test_nobody_trains_before_all_are_here() -> None:
    """Two runs of three have come: nothing trains. The third leaves: now it does."""
    together, batches = Together(Engine(LANES), 3), []
    together.trainer = type("Notes", (), {"run": lambda self, tallies: batches.append(list(tallies))})()
    threads = [threading.Thread(target=together.run, args=([i],), daemon=True) for i in range(2)]
    for t in threads:
        t.start()
    threads[0].join(0.2)
    assert not batches
    assert all(t.is_alive() for t in threads)
    together.leave()
    for t in threads:
        t.join(10)
    assert [sorted(b) for b in batches] == [[0, 1]]
    assert together.turns == 1


class Recorded(Engine):
    """An engine that decides as it goes, as a measuring picker does."""

    def __init__(self) -> None:
        super().__init__(LANES)
        self.known, self.told = {}, None

    def picks(self):
        return self.known

    def use(self, picks, told=None) -> None:
        self.known |= picks
        self.told = told


def test_every_run_is_told_what_was_decided_for_all() -> None:
    engine, heard = Recorded(), []
    together = Together(engine, 3)
    together.use({"a": LANES}, lambda picks: heard.append((0, picks)))
    together.use({}, lambda picks: heard.append((1, picks)))
    together.use({"a": LANES, "b": LOOP})
    engine.told({"c": LOOP})
    assert heard == [(0, {"c": LOOP}), (1, {"c": LOOP})]
    assert together.picks() == {"a": LANES, "b": LOOP}
    with pytest.raises(ValueError, match="on record with another engine"):
        together.use({"a": LOOP})
