"""The driver of a run: what its rows say, and that a run goes on where it was stopped, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.engine.engine import Pick
from fedrelay.methods import IDA, SCAFFOLD, FedDyn, Plain
from fedrelay.records.checkpoint import Checkpoints
from fedrelay.records.driver import Record
from fedrelay.seam.algorithm import State
from fedrelay.seam.federation import Layer
from fedrelay.seam.folds import Mean
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value
from fedrelay.simulation.faults import Dropout
from fedrelay.testing import alike
from fedrelay.testing.world import world

from . import killed

RECIPE = Recipe(batch_size=8)
FOUR = FedAvg(Uniform(count=4), RECIPE)


def told(rows):
    """Rows without what a clock on the wall says."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


# --- rows


def test_a_row_per_round():
    fed, seen = world(), []
    record = FOUR.fit(fed, 3, on_round=seen.append)
    assert seen == record.rounds
    assert [row["round"] for row in record.rounds] == [1, 2, 3]
    assert [row["visits"] for row in record.rounds] == [4, 4, 4]
    assert record.rounds[-1]["time"] == fed.now
    assert all(row["seconds"] > 0 for row in record.rounds)
    assert record.weights is record.state.weights
    for column, total in fed.ledger.totals.items():
        assert sum(row[column] for row in record.rounds) == total


def test_on_round_is_told_in_time():
    """A row is told when its round is over, before the next one begins."""
    fed, rounds = world(), []
    FOUR.fit(fed, 3, on_round=lambda row: rounds.append((row["round"], fed.ledger.totals["visits"])))
    assert rounds == [(1, 4), (2, 8), (3, 12)]


@pytest.mark.parametrize(
    ("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5]), (0, [])], ids=lambda v: str(v)
)
def test_evaluations(every, evaluated):
    record = FOUR.fit(world(), 5, evaluate_every=every)
    assert [row["round"] for row in record.rounds if "global/accuracy" in row] == evaluated
    assert [row["round"] for row in record.rounds if "global/loss" in row] == evaluated
    assert isnan(record.accuracy) == (not evaluated)


def test_the_accuracy_of_a_row_is_that_of_its_weights():
    fed, twin = world(), world()
    record = FOUR.fit(fed, 2)
    counts = twin.test(record.weights)
    assert (record.rounds[-1]["global/accuracy"], record.rounds[-1]["global/loss"]) == (counts.accuracy, counts.loss)
    assert record.rounds[0]["global/accuracy"] != record.accuracy == counts.accuracy


def test_a_federation_without_test_rows_is_not_evaluated():
    fed = world()
    fed.site = replace(fed.site, data=replace(fed.site.data, server=None))
    assert "global/accuracy" not in FOUR.fit(fed, 1).rounds[0]


def test_the_mean_of_the_last_accuracies():
    rows = [{"global/accuracy": a} if a else {} for a in (0.1, 0.5, None, 0.7)]
    record = Record({}, None, rows)
    assert record.accuracy == 0.7
    assert record.mean_accuracy(2) == pytest.approx(0.6)
    assert record.mean_accuracy(9) == pytest.approx(1.3 / 3)


def test_failures_stand_in_their_row():
    record = FOUR.fit(world(broken=(1, 2, 3)), 6, layers=[Dropout(0.3)])
    rows = record.rounds
    assert [len(row.get("failures", ())) for row in rows] == [row["failed"] for row in rows]
    assert {f["reason"] for row in rows for f in row.get("failures", ())} == {"not finite", "dropped out"}
    assert {f["client"] for row in rows for f in row.get("failures", ()) if f["reason"] == "not finite"} <= {1, 2, 3}


@value
class PreTrained(FedAvg):
    """FedAvg whose start trains everybody once."""

    def init(self, fed, weights=None):
        s = super().init(fed, weights)
        got = fed.train((chain(s.weights, [k], self.recipe) for k in fed.clients), Mean())
        return State({**s.weights, **got[Mean()]}, s.method)


def test_what_the_start_costs_stands_in_the_first_row():
    fed = world(broken=(4,))
    record = PreTrained(Uniform(count=4), RECIPE).fit(fed, 2)
    assert [row["visits"] for row in record.rounds] == [12 + 4, 4]
    assert 4 in [f["client"] for f in record.rounds[0]["failures"]]
    assert record.rounds[1]["time"] == fed.now


def test_no_rounds():
    fed = world()
    record = FOUR.fit(fed, 0)
    assert record.rounds == []
    assert isnan(record.accuracy)
    assert all(record.weights[n] is t for n, t in fed.initial().items())


def test_fewer_than_no_rounds():
    with pytest.raises(ValueError, match=r"^rounds = -1 is not at least 0$"):
        FOUR.fit(world(), -1)


def test_a_start_of_ones_own():
    fed, mine = world(), {n: t + 1 for n, t in world().initial().items()}
    assert alike(FOUR.fit(fed, 0, weights=mine).weights, mine)
    trained = FOUR.fit(world(), 1, weights=mine).weights
    assert min(float(t.mean()) for t in trained.values()) > 0.5
    assert alike(world().initial(), fed.initial())


def test_layers_stand_around_the_run():
    plans = []

    class Watch(Layer):
        def plan(self, plan, rng):
            plans.append(len(plan.chains))
            return plan

    FOUR.fit(world(), 3, layers=[Watch()])
    assert plans == [4, 4, 4]


def test_parameters_that_make_no_sense_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"^by = 'size' is neither 'examples' nor 'count'$"):
        FedAvg(method=Plain("size")).fit(world(), 1, folder=tmp_path / "run")
    with pytest.raises(ValueError, match=r"^FedDyn has a server half of its own"):
        FedAvg(method=IDA(FedDyn())).fit(world(), 1)
    assert not (tmp_path / "run").exists()


# --- going on


@pytest.mark.parametrize("stops", [(1, 5), (2, 3, 5), (5, 5), (0, 5)])
def test_a_resumed_run_is_a_straight_one(tmp_path, stops):
    algorithm, straight = FedAvg(Uniform(count=4), RECIPE, SCAFFOLD()), world()
    want = algorithm.fit(straight, 5, layers=[Dropout(0.2)])
    for rounds in stops:
        fed = world()
        record = algorithm.fit(fed, rounds, folder=tmp_path, layers=[Dropout(0.2)])
        assert len(record.rounds) == rounds
    assert alike(record.state, want.state)
    assert alike(fed.state(), straight.state())
    assert told(record.rounds) == told(want.rounds)


def test_a_run_that_is_over_is_not_run_again(tmp_path):
    FOUR.fit(world(), 3, folder=tmp_path)
    fed = world()
    record = FOUR.fit(fed, 2, folder=tmp_path, on_round=pytest.fail)
    assert len(record.rounds) == 3
    assert fed.ledger.totals["visits"] == 12


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FOUR.fit(world(), 2)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, [1, 2, 3, 4]), (1e9, [4])], ids=["after every round", "at the end, always"])
def test_when_checkpoints_are_written(tmp_path, monkeypatch, seconds, saved):
    rounds, real = [], Checkpoints.save

    def save(self, name, state):
        rounds.extend([len(state["rounds"])] if name == "last" else [])
        real(self, name, state)

    monkeypatch.setattr(Checkpoints, "save", save)
    FOUR.fit(world(), 4, folder=tmp_path, checkpoint_seconds=seconds)
    assert rounds == saved


OTHERS = {
    "sampling": (FedAvg(Uniform(count=5), RECIPE), {}),
    "rate": (FedAvg(Uniform(count=4), replace(RECIPE, learning_rate=0.2)), {}),
    "method": (FedAvg(Uniform(count=4), RECIPE, Plain("count")), {}),
    "algorithm": (PreTrained(Uniform(count=4), RECIPE), {}),
}


@pytest.mark.parametrize("other", [a for a, _ in OTHERS.values()], ids=OTHERS)
def test_a_run_with_other_parameters_is_refused(tmp_path, other):
    FOUR.fit(world(), 1, folder=tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    sentence = f"^{tmp_path} holds a run with other parameters: resume it with the same algorithm, or choose another folder$"
    with pytest.raises(ValueError, match=sentence):
        other.fit(world(), 2, folder=tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_run_of_another_seed_is_refused(tmp_path):
    FOUR.fit(world(seed=1), 1, folder=tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path} holds a run of seed 1, not 0: resume it with its own seed$"):
        FOUR.fit(world(), 2, folder=tmp_path)


# --- killed


def kill(folder: Path, how: str, **environment: str) -> None:
    """Run until it dies."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, killed.__file__, str(folder), how], env=env, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return killed.run(tmp_path_factory.mktemp("straight"))


@pytest.mark.parametrize(
    ("hows", "done"),
    [
        (["after round 1"], 0),  # before its first checkpoint
        (["after round 3", "after round 5"], 4),
        (["in save 1", "in save 3"], 2),
    ],
)
def test_a_run_killed_anywhere_ends_with_the_bits_of_one_that_was_not(tmp_path, straight, hows, done):
    for how in hows:
        kill(tmp_path, how)
    if done:
        assert len(Checkpoints(tmp_path).load("last")["rounds"]) == done
    else:
        assert not (tmp_path / "last.json").exists()
    (record, fed), (want, unharmed) = killed.run(tmp_path), straight
    assert alike(record.state, want.state)
    assert alike(fed.state(), unharmed.state())
    assert told(record.rounds) == told(want.rounds)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of picks of this test's own."""
    monkeypatch.setenv("FEDRELAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "picks.json"


def test_picks_are_written_before_the_first_step_and_kept_whatever_the_cache_says(tmp_path, cache):
    """Killed at its first step, a run has no checkpoint, but it has its picks: the cache then claims something else, in vain."""
    run = tmp_path / "run"
    kill(run, "at its first step", FEDRELAY_CACHE=str(cache.parent))
    assert not (run / "last.json").exists()
    ((key, pick),) = Checkpoints(run).load("engine").items()
    known = json.loads(cache.read_text())
    other = Pick("lanes", 7) if pick.engine == "loop" else Pick("loop", 1)
    cache.write_text(json.dumps({k: vars(other) for k in known}))
    _, fed = killed.automatic(run)
    assert fed.picks() == {key: pick}
    _, elsewhere = killed.automatic(tmp_path / "another run")
    assert elsewhere.picks() == {key: other}


def test_a_run_records_its_picks_though_its_federation_knew_them(tmp_path, cache):
    """Two runs one after another on one federation: the second measures nothing, and is recorded all the same."""
    _, fed = killed.automatic(tmp_path / "first")
    FOUR.fit(fed, 1, folder=tmp_path / "second")
    first, second = (Checkpoints(tmp_path / run).load("engine") for run in ("first", "second"))
    assert first == second == fed.picks() != {}


def test_a_run_writes_into_its_own_folder_only(tmp_path, cache):
    _, fed = killed.automatic(tmp_path / "first")
    before = (tmp_path / "first" / "engine.json").read_bytes()
    FedAvg(Uniform(count=4), Recipe(batch_size=9)).fit(fed, 1)
    assert len(fed.picks()) == 2
    assert (tmp_path / "first" / "engine.json").read_bytes() == before
