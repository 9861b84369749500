"""The same run on a processor and on a GPU: equal within 1e-5 by norm, and how much faster than a plain loop there.

    python benchmarks/devices.py

A small smooth network, float32 without TF32, FedAvg with SCAFFOLD over ragged clients: a network with kinks would turn one
flipped ReLU into a difference that says nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.data import Dataset, DirichletPartitioner, Partition, digits
from fedrelay.engine.engine import Engine, Pick
from fedrelay.methods import SCAFFOLD
from fedrelay.models import MLP
from fedrelay.seam.federation import Run
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.build import simulate
from plain import Alone, GradientLoop, How, SGDLoop, Task
from workloads import W2

WITHIN, ROUNDS, TIMED = 1e-5, 3, 10


def trained(device: str, engine: str) -> dict[str, torch.Tensor]:
    """The weights after some rounds on this device."""
    partitioner = DirichletPartitioner(num_partitions=20, alpha=0.3, min_partition_size=1)
    network = MLP(inputs=64, hidden=(16,), activation="tanh")
    federation = simulate(digits(), partitioner, network, engine=engine, width=8, device=device)
    run = Run(federation)
    algorithm = FedAvg(Uniform(count=10), Recipe(learning_rate=0.05, batch_size=16, epochs=2), SCAFFOLD())
    state = algorithm.init(run)
    for _ in range(ROUNDS):
        state = algorithm.round(run, state)
    return {n: t.cpu() for n, t in state.weights.items()}


def gap(device: str, engine: str) -> float:
    """The largest relative norm of a difference between this device and the processor."""
    here, there = trained("cpu", engine), trained(device, engine)
    return max(float((there[n] - here[n]).norm() / here[n].norm()) for n in here)


def milliseconds(device: str, one_round: Callable[[], object]) -> float:
    """Of a round on this device, the median of some."""
    spent = []
    for _ in range(2 + TIMED):
        began = time.perf_counter()
        one_round()
        if device != "cpu":
            torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - began))
    return sorted(spent[2:])[TIMED // 2]


def speed(device: str) -> dict[str, float]:
    """Milliseconds of a round of W2 on this device, by variant."""
    generator = torch.Generator().manual_seed(0)
    n = W2.clients * W2.examples
    x, y = torch.randn(n, *W2.row, generator=generator), torch.randint(10, (n,), generator=generator)
    clients = [(a.to(device), b.to(device)) for a, b in zip(x.split(W2.examples), y.split(W2.examples), strict=True)]
    task = Task(lambda: W2.module().to(device), clients, W2.cohort, W2.batch, W2.epochs, W2.rate)
    made = {
        "sgd": milliseconds(device, Alone(task, How(SGDLoop)).round),
        "best": milliseconds(device, Alone(task, How(GradientLoop)).round),
    }
    offsets = torch.arange(0, n + 1, W2.examples).numpy()
    dealt = Partition(torch.arange(n, dtype=torch.int32).numpy(), offsets)
    federation = simulate(Dataset.of(x, y, classes=10), dealt, W2.network, engine=Engine(Pick("lanes", W2.cohort)), device=device)
    algorithm = FedAvg(Uniform(count=W2.cohort), Recipe(learning_rate=W2.rate, batch_size=W2.batch))
    run = Run(federation)
    state = algorithm.init(run)

    def one_round() -> None:
        nonlocal state
        state = replace(algorithm.round(run, state))

    made["product"] = milliseconds(device, one_round)
    return made


def evidence(device: str = "cuda") -> dict[str, Any]:
    """How near the two devices are, and the first ratios on this one."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    gaps, took = {engine: gap(device, engine) for engine in ("lanes", "loop")}, speed(device)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {
        "device": name,
        "gaps": gaps,
        "milliseconds": took,
        "times": {v: took[v] / took["product"] for v in ("sgd", "best")},
        "holds": max(gaps.values()) <= WITHIN,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("not measured: no GPU", file=sys.stderr)
        return 2
    found = evidence(args.device)
    print(json.dumps(found) if args.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
