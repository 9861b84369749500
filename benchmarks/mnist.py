"""FedAvg on MNIST beside forty lines of plain PyTorch that are handed the same cohorts and batches.

    FEDRELAY_DATA=~/data python benchmarks/mnist.py

100 clients by Dirichlet 0.1, 10 a round, the 784-32-32-32-10 MLP, batch 64, rate 0.05, one epoch, 60 rounds, 3 seeds. Wanted:
the weights after round 1 within 1e-4 (norm per tensor), the accuracy after every round within half a point.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.data import Dataset, DirichletPartitioner, mnist
from fedrelay.models import DigitsMLP
from fedrelay.models.mlp import MLP
from fedrelay.seam.federation import Run
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.build import simulate
from product import Watched

PLAIN = Path(__file__).parents[1] / "tests" / "benchmarks" / "plain_fedavg.py"
CLIENTS, COHORT, ALPHA, BATCH, RATE, ROUNDS, SEEDS = 100, 10, 0.1, 64, 0.05, 60, 3
WEIGHTS_WITHIN, ACCURACY_WITHIN = 1e-4, 0.005


@dataclass(frozen=True)
class Pair:
    """A run of the product and the plain loop's, side by side."""

    weights: float
    """The largest relative norm of a difference over the tensors after round 1."""
    ours: list[float]
    """The product's accuracy after every round."""
    theirs: list[float]
    """The plain loop's."""
    seconds: tuple[float, float]
    """What the product and the plain loop took, evaluation included."""

    @property
    def accuracy(self) -> float:
        """The largest difference of accuracy after a round."""
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def holds(self) -> bool:
        """Whether both are near enough."""
        return self.weights <= WEIGHTS_WITHIN and self.accuracy <= ACCURACY_WITHIN


def compare(
    dataset: Dataset,
    network: MLP,
    *,
    clients: int = CLIENTS,
    cohort: int = COHORT,
    rounds: int = ROUNDS,
    rate: float = RATE,
    seed: int = 0,
    engine: str = "lanes",
) -> Pair:
    """Train with the product; then hand its cohorts and batches to the plain loop."""
    partitioner = DirichletPartitioner(num_partitions=clients, alpha=ALPHA, min_partition_size=1)
    federation = simulate(dataset, partitioner, network, seed=seed, data_seed=seed, engine=engine)
    watched, run = Watched(federation), Run(federation)
    algorithm = FedAvg(Uniform(count=cohort), Recipe(learning_rate=rate, batch_size=BATCH, epochs=1))
    start, began = federation.initial(), time.perf_counter()
    state = algorithm.init(run)
    ours, first = [], start
    for r in range(rounds):
        state = algorithm.round(run, state)
        ours.append(accuracy(federation, state.weights))
        first = state.weights if r == 0 else first
    between = time.perf_counter()
    theirs, plain_first = plain(dataset, network, list(start.values()), watched.rounds(), rate)
    seconds = between - began, time.perf_counter() - between
    return Pair(gap(list(first.values()), plain_first), ours, theirs, seconds)


def plain(dataset: Dataset, network: MLP, start: list[Tensor], rounds: Any, rate: float) -> tuple[list[float], list[Tensor]]:
    """The plain loop's accuracies, and its weights after round 1."""
    script = load(PLAIN)
    x, test_x = (normalised(dataset, part) for part in (dataset.x, dataset.test_x))
    model = script.mlp(network.inputs, *network.hidden, network.classes)
    model.load_state_dict(dict(zip(model.state_dict(), start, strict=True)))
    y, test_y = torch.from_numpy(dataset.y), torch.from_numpy(dataset.test_y)
    made = list(script.fedavg(model, x, y, test_x, test_y, rounds, rate))
    return [accuracy for _, accuracy in made], list(made[0][0].values())


def normalised(dataset: Dataset, x: Any) -> Tensor:
    """What the model sees, computed as everybody does it."""
    z = torch.from_numpy(x).float() * dataset.scale
    return (z - dataset.mean[0]) / dataset.std[0]


def accuracy(federation: Any, weights: Any) -> float:
    """On the server's test rows."""
    return float(federation.test(weights).accuracy)


def gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative norm of a difference over tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def load(script: Path) -> Any:
    """A module from its file."""
    spec = util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(line: str) -> None:
    """Tell whoever waits."""
    print(line, flush=True)


def quiet(line: str) -> None:
    """Say nothing."""


def evidence(rounds: int, seeds: Sequence[int], said: Callable[[str], None] = quiet) -> dict[str, Any]:
    """Every seed's comparison, and whether all of them hold."""
    dataset, pairs = mnist(), {}
    for seed in seeds:
        pair = pairs[seed] = compare(dataset, DigitsMLP(), rounds=rounds, seed=seed)
        last = f"accuracy after round {rounds}: {pair.ours[-1]:.4f} and {pair.theirs[-1]:.4f}"
        near = f"weights after round 1 differ by {pair.weights:.1e}, accuracies by at most {100 * pair.accuracy:.2f} points"
        said(f"seed {seed}: {last}; {near}; {pair.seconds[0]:.1f} and {pair.seconds[1]:.1f} s")
    return {
        "weights": max(p.weights for p in pairs.values()),
        "points": 100 * max(p.accuracy for p in pairs.values()),
        "accuracy": [p.ours[-1] for p in pairs.values()],
        "holds": all(p.holds for p in pairs.values()),
        "seeds": {str(seed): asdict(p) for seed, p in pairs.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # these batches are too small to be shared
    try:
        found = evidence(args.rounds, range(args.seeds), quiet if args.json else say)
    except FileNotFoundError as e:
        print(e, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found))
    else:
        print("holds" if found["holds"] else "does not hold")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
