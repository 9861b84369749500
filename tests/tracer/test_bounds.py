"""Memory is bounded by how many models train side by side, never by how many chains or clients there are."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fedrelay.engine.engine import Engine, Pick
from fedrelay.engine.examples import Examples
from fedrelay.engine.visits import Site
from fedrelay.methods import SCAFFOLD
from fedrelay.models import Model
from fedrelay.seam.federation import Run
from fedrelay.seam.folds import Ends, Mean, Moved
from fedrelay.seam.plan import Chain, Visit, chain
from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value
from fedrelay.simulation.simulation import Simulation


@pytest.fixture(autouse=True)
def only_what_is_new():
    """What was there before a test is not counted, nor looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def tensor_bytes() -> int:
    """What all tensors hold that are alive and new, each storage once."""
    held = {}
    for t in gc.get_objects():
        if type(t) is torch.Tensor or type(t) is nn.Parameter:
            storage = t.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


PEAKS: list[int] = []


@value
class Weigh:
    """A fold that weighs what is alive whenever a block of chains is folded."""

    at: str = "ends"

    def empty(self):
        return 0

    def add(self, acc, ends: Ends):
        PEAKS.append(tensor_bytes())
        return acc + len(ends.weights)

    def merge(self, a, b):
        return a + b

    def result(self, acc):
        return acc


def wide(pick: Pick, clients: int = 40, budget: int = 1 << 30) -> Simulation:
    """A model of 0.3 MB, small clients of unequal size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {"extractor": nn.Linear(64, 1024), "classifier": nn.Linear(1024, 10)}
    xs = [torch.ones(1 + k % 3, 64) for k in range(clients)]
    site = Site(Model(layers), Examples.of_lists(xs, [torch.zeros(len(x), dtype=torch.long) for x in xs]), block=16)
    return Simulation(site, Engine(pick), memory_budget=budget)


def peak(fed: Simulation, chains: Sequence[Chain]) -> float:
    """The most that tensors held beyond what they held before, in models."""
    PEAKS.clear()
    gc.collect()
    before = tensor_bytes()
    got = Run(fed).train(chains, Mean("count"), Moved(), Weigh())
    assert got[Weigh()] == len(chains)
    size = sum(t.nbytes for t in fed.initial().values())
    return (max(PEAKS) - before) / size


RECIPES = {
    "plain": (Recipe(batch_size=4),) * 2,
    "changing scope": (Recipe(batch_size=4), Recipe(batch_size=4, scope=("classifier",))),
}


@pytest.mark.parametrize("pick", [Pick("lanes", 6), Pick("loop", 1)], ids=["lanes", "loop"])
@pytest.mark.parametrize("recipes", RECIPES.values(), ids=RECIPES)
def test_memory_depends_on_the_width_not_on_the_number_of_chains(pick: Pick, recipes: tuple[Recipe, Recipe]) -> None:
    peaks = []
    for n in (150, 400):
        fed = wide(pick)
        w = fed.initial()
        chains = [Chain(w, tuple(Visit((i + j) % 40, (r,)) for j, r in enumerate(recipes[: 1 + i % 2]))) for i in range(n)]
        peaks.append(peak(fed, chains))
    assert peaks[1] < peaks[0] + 10
    assert peaks[1] < 200


def test_memory_grows_with_the_width() -> None:
    """What the test above measures is there to be measured."""
    fed = wide(Pick("lanes", 40))
    assert peak(fed, [chain(fed.initial(), [i % 40], Recipe(batch_size=4)) for i in range(200)]) > 40


def test_what_clients_keep_beyond_the_budget_lies_on_disk() -> None:
    """120 clients keep a variate of one model's size; the budget holds five."""
    sizes = []
    for budget in (5 * 306_216, 1 << 30):
        fed = wide(Pick("lanes", 6), 120, budget)
        w = fed.initial()
        recipe, extra = SCAFFOLD().visit({"c": {n: torch.zeros_like(t) for n, t in w.items()}}, Recipe(batch_size=4))
        gc.collect()
        before = tensor_bytes()
        for first in range(0, 120, 12):
            Run(fed).train([chain(w, [k], recipe, extra) for k in range(first, first + 12)], Mean("count"))
        gc.collect()
        sizes.append((tensor_bytes() - before) / sum(t.nbytes for t in w.values()))
        assert len(fed.memories) == 120
        assert fed.memories.spill.resident <= budget
    lanes = 6 * 8
    assert sizes[0] < 5 + lanes
    assert sizes[1] > 120
