"""Peak memory with 10,000 and with 100,000 clients, and after 20 and after 100 rounds.

    python benchmarks/memory.py

Clients are offsets into one shared array of 60,000 rows of 784 float32, 20 examples each. SCAFFOLD (every client that was
visited keeps a control variate of the model's size), MLP 784-32-10, 100 clients a round, 64 MB for client memories. Wanted:
the two peaks differ by less than 10 %, the index of who owns which rows left out; so do those of rounds 20 and 100.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POPULATIONS = (10_000, 100_000)
ROWS, WIDTH, EXAMPLES, COHORT, BUDGET = 60_000, 784, 20, 100, 64 << 20
MARKS = (20, 100)
WITHIN = 0.1


def peak() -> int:
    """The most memory that this process has had resident so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not say what a process's peak memory was")


def train(clients: int, marks: Sequence[int] = MARKS, budget: int = BUDGET, engine: str = "lanes") -> dict[str, Any]:
    """Train with so many clients in this process; its peak memory before the first round and after the rounds in ``marks``."""
    import numpy as np
    import torch

    from fedrelay.algorithms import FedAvg, Uniform
    from fedrelay.data import Dataset, Partition
    from fedrelay.methods import SCAFFOLD
    from fedrelay.models import MLP
    from fedrelay.seam.federation import Run
    from fedrelay.seam.recipe import Recipe
    from fedrelay.simulation.build import simulate

    torch.set_num_threads(1)  # this is about memory: no thread should wait for what else the machine does
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((ROWS, WIDTH), np.float32), rng.integers(0, 10, ROWS)
    index = np.arange(clients * EXAMPLES, dtype=np.int32)
    index %= ROWS  # rows are shared: there are more clients than disjoint sets of rows
    partition = Partition(index, np.arange(clients + 1, dtype=np.int64) * EXAMPLES)
    federation = simulate(Dataset.of(x, y, classes=10), partition, MLP(), engine=engine, memory_budget=budget)
    algorithm = FedAvg(Uniform(count=COHORT), Recipe(learning_rate=0.05, batch_size=EXAMPLES, epochs=1), SCAFFOLD())
    run = Run(federation)
    state = algorithm.init(run)
    began, peaks = time.perf_counter(), {0: peak()}
    for r in range(1, max(marks) + 1):
        state = algorithm.round(run, state)
        if r in marks:
            peaks[r] = peak()
    return {
        "clients": clients,
        "index": federation.site.data.train.nbytes,
        "peaks": {str(r): bytes_ for r, bytes_ in peaks.items()},
        "visited": len(federation.memories),
        "unspilled": len(federation.memories) * sum(t.nbytes for t in state.weights.values()),
        "resident": federation.memories.spill.resident,
        "seconds": time.perf_counter() - began,
    }


def alone(clients: int, engine: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--clients", str(clients), "--engine", engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training with {clients} clients failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def evidence(said: Callable[[str], None], engine: str = "lanes") -> dict[str, Any]:
    """Peaks of every population, how much they differ, and whether that holds; ``said`` is told of each."""
    found = {}
    for clients in POPULATIONS:
        f = found[clients] = alone(clients, engine)
        at = ", ".join(f"{mb(p)} after {r}" for r, p in f["peaks"].items())
        memories = f"{f['visited']:,} clients' memories ({mb(f['unspilled'])}, of which {mb(f['resident'])} resident)"
        said(f"{clients:,} clients: peak {at} rounds; index {mb(f['index'])}; {memories}; {f['seconds']:.0f} s")
    few, many = (found[c] for c in POPULATIONS)
    first, last = map(str, MARKS)
    own = {c: f["peaks"][last] - f["index"] for c, f in found.items()}
    populations = own[POPULATIONS[1]] / own[POPULATIONS[0]] - 1
    rounds = {c: f["peaks"][last] / f["peaks"][first] - 1 for c, f in found.items()}
    return {
        "between populations": populations,
        "between rounds": max(rounds.values(), key=abs),
        "index": [few["index"], many["index"]],
        "holds": all(abs(v) < WITHIN for v in (populations, *rounds.values())),
        "runs": [few, many],
    }


def say(line: str) -> None:
    """Tell whoever waits."""
    print(line, flush=True)


def quiet(line: str) -> None:
    """Say nothing."""


def mb(n: float) -> str:
    """Bytes in MB."""
    return f"{n / 2**20:.1f} MB"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, help="train with so many clients here, and print what that took as JSON")
    parser.add_argument("--engine", default="lanes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.clients:
        print(json.dumps(train(args.clients, engine=args.engine)))
        return 0
    found = evidence(quiet if args.json else say, args.engine)
    if args.json:
        print(json.dumps(found))
    else:
        differ = f"{found['between populations']:+.1%} between populations, {found['between rounds']:+.1%} between rounds"
        print(f"peaks differ by {differ}")
        print("holds" if found["holds"] else "does not hold")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
