"""The product as the benchmarks drive it. Whatever they know about its inside is known here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.engine.batches import batches
from fedrelay.engine.engine import Engine, Pick
from fedrelay.seam.federation import Run
from fedrelay.seam.landing import Flight
from fedrelay.seam.places import Place, child
from fedrelay.seam.plan import Plan
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.build import simulate
from fedrelay.simulation.simulation import Simulation
from workloads import Workload

PICKS: dict[str, Pick | None] = {
    "auto": None,
    "auto, bf16": None,
    "lanes 25": Pick("lanes", 25),
    "lanes 50": Pick("lanes", 50),
    "lanes 10": Pick("lanes", 10),
    "loop, 2 threads": Pick("loop", 1, channels_last=True),
    "loop, 2 workers": Pick("loop", 2, channels_last=True),
    "loop, 2 threads, bf16": Pick("loop", 1, channels_last=True, precision="bf16"),
    "loop, 2 workers, bf16": Pick("loop", 2, channels_last=True, precision="bf16"),
}
"""How the product may train, by the name it has in a table; None: it decides itself."""


def engine(name: str) -> dict[str, Any]:
    """What ``simulate`` is told about the engine."""
    pick = PICKS[name]
    precision = "bf16" if name.endswith("bf16") else "float32"
    return {"engine": "auto" if pick is None else Engine(pick), "precision": precision}


def product(workload: Workload, name: str) -> Callable[[], Any]:
    """FedAvg on a simulation; what it returns runs one round and says how the engine trained it."""
    dataset, partition = workload.dataset()
    federation = simulate(dataset, partition, workload.network, **engine(name))
    recipe = Recipe(learning_rate=workload.rate, batch_size=workload.batch, epochs=workload.epochs)
    algorithm = FedAvg(Uniform(count=workload.cohort), recipe)
    run = Run(federation)
    state = algorithm.init(run)

    def one_round() -> Any:
        nonlocal state
        state = algorithm.round(run, state)
        return [f"{p.engine} {p.width}" for p in federation.picks().values()] or None

    return one_round


class Watched:
    """A simulation whose launches are written down, so that somebody else can train the very same batches."""

    def __init__(self, federation: Simulation) -> None:
        self.federation = federation
        self.launched: list[tuple[Place, Plan]] = []
        launch = federation.launch

        def watched(place: Place, plan: Plan) -> Flight:
            self.launched.append((place, plan))
            return launch(place, plan)

        federation.launch = watched  # type: ignore[method-assign]

    def rounds(self) -> list[list[list[Tensor]]]:
        """Of every plan so far, of every chain's one visit: the dataset's rows in each batch, in order."""
        return [orders(self.federation, place, plan) for place, plan in self.launched]


def orders(federation: Simulation, place: Place, plan: Plan) -> list[list[Tensor]]:
    """The batches of a plan of chains of one visit: rows of the dataset, by chain and step.

    A visit's key is its place's under (chain, position), and its batches follow from its key: no training is watched.
    """
    part = federation.site.data.train
    chains = torch.arange(len(plan.chains))
    if any(len(c.visits) != 1 for c in plan.chains):
        raise ValueError("only the orders of chains of one visit are known here")
    visits = [c.visits[0] for c in plan.chains]
    recipe = visits[0].recipes[0]
    keys = child(child(torch.tensor([place.key(federation.seed)]), chains), torch.zeros(1, dtype=torch.int64))
    sizes = torch.from_numpy(part.sizes[[v.client for v in visits]])
    size, epochs = int(recipe.batch_size), int(recipe.epochs)
    batch = torch.full_like(sizes, size)
    steps = epochs * ((sizes + batch - 1) // batch)
    laid = batches(keys, sizes, batch, steps, 0, epochs, recipe.shape)
    return [
        [part.rows(v.client)[rows[:n]] for rows, n in zip(laid.rows[i], laid.counts[i].tolist(), strict=True) if n]
        for i, v in enumerate(visits)
    ]
