"""HFedMS: a calibration sends and merges the classifier only, and stored rows move with the extractor's drift."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedrelay.engine.engine import Engine
from fedrelay.engine.examples import Examples
from fedrelay.engine.visits import Site
from fedrelay.methods import FedDyn, Plain
from fedrelay.models import Model
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Mean
from fedrelay.seam.plan import chain
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.simulation import Simulation
from fedrelay.testing.hostile import HostileFederation

from .systems import HFedMS, Semantic
from .world import LANES, LOOP, digits, run

KINDS = pytest.mark.parametrize("kind", [Simulation, HostileFederation])


@KINDS
@pytest.mark.parametrize("method", [Plain("count"), FedDyn()], ids=["plain", "FedDyn"])
def test_a_calibration_leaves_the_extractor_s_leaves_the_same_objects(kind, method) -> None:
    """Not equal ones: a weighted mean of equal tensors changes a third of their bits."""
    system, fed = HFedMS(method=method), digits(kind=kind)
    s = full = run(system, fed, 1)
    for _ in range(2):
        s = system.round(Run(fed), s)
        assert [n for n in s.weights if s.weights[n] is full.weights[n]] == [n for n in s.weights if n.startswith("extractor")]
    s = system.round(Run(fed), s)  # the next block's full round moves everything
    assert not any(s.weights[n] is full.weights[n] for n in s.weights)


def test_a_calibration_sends_only_the_classifier() -> None:
    """10 x 32 weights and 10 biases of 4 bytes go up; down come these and the extractor of every block so far."""
    system, fed = HFedMS(), digits()
    s = run(system, fed, 1)
    before = dict(fed.ledger.totals)
    s = system.round(Run(fed), s)
    visits = fed.ledger.totals["visits"] - before["visits"]
    assert fed.ledger.totals["up"] - before["up"] == visits * 4 * (320 + 10)
    assert fed.ledger.who("weights of classifier")
    assert set(fed.ledger.who("weights of classifier")) <= set(range(30))


class Shift(nn.Module):
    """x + s"""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.s


ROWS, LABELS = torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3


def shifted(kind, pick):
    model = Model({"extractor": Shift(), "classifier": nn.Linear(4, 3)})
    return kind(Site(model, Examples.of_lists([ROWS], [LABELS])), Engine(pick))


@KINDS
@pytest.mark.parametrize("pick", [LANES, LOOP], ids=["lanes", "loop"])
@pytest.mark.parametrize(("T", "missing"), [(2, ()), (3, ()), (5, ()), (5, (1,)), (3, (0,)), (3, (0, 1))])
def test_every_stored_row_is_a_row_of_today_s_extractor(T: int, missing: tuple[int, ...], pick, kind) -> None:
    """The extractor is x + s with s = 0, 10, 100, -3 in successive blocks of T rounds, so a stored row z of block b is some
    x + s_b, exactly, for x and s are whole numbers; also for a client that missed a block."""
    rounds, fed = 0, shifted(kind, pick)
    w, past = fed.initial(), {}
    for block, s in enumerate((0.0, 10.0, 100.0, -3.0)):
        w = {**w, "extractor.s": torch.tensor(s)}
        past[block] = {"extractor.s": w["extractor.s"]}
        for step in range(1, T if block not in missing else 1):
            rule = Semantic(q=6, width=4, keep=int(step == T - 1))
            recipe = Recipe(learning_rate=1e-3, scope=("classifier",), rules=(rule,))
            got = Run(fed).train([chain(w, [0], recipe, {"block": block, "past": dict(past)})], Mean())
            w, rounds = {**w, **got[Mean()]}, rounds + 1
            store = fed.memories.clients()[0]["Semantic"]
            n = int(store["n"])
            assert int(store["block"]) == block
            assert n == (0 if rounds < T - 1 else 6)
            assert all(
                bool(((row - s) == x).all() and label == y)
                for row, label in zip(store["z"][:n], store["y"][:n], strict=True)
                for x, y in [(ROWS[int((row - s)[0]) // 4], LABELS[int((row - s)[0]) // 4])]
            )
    assert n == 6


def test_the_store_trains() -> None:
    """The same client with and without what it stored: another classifier."""
    ends = []
    for forget in (False, True):
        fed = shifted(Simulation, LANES)
        w, extra = fed.initial(), {"block": 0, "past": {0: {"extractor.s": torch.tensor(0.0)}}}
        for keep in (1, 0):
            recipe = Recipe(learning_rate=1e-3, scope=("classifier",), rules=(Semantic(q=6, width=4, keep=keep),))
            if not keep and forget:
                Run(fed).forget()
            got = Run(fed).train([chain(w, [0], recipe, extra)], Mean())
        ends.append(got)
    assert [int(e.receipts.steps[0]) for e in ends] == [1, 1]
    assert not torch.equal(ends[0][Mean()]["classifier.weight"], ends[1][Mean()]["classifier.weight"])
