"""``make demo``: FedAvg and SCAFFOLD on digits that are split by class, side by side."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedrelay.algorithms import FedAvg, Uniform
from fedrelay.data import OneClassPartitioner
from fedrelay.methods import SCAFFOLD, Plain
from fedrelay.seam.methods import Method
from fedrelay.seam.recipe import Recipe
from fedrelay.simulation.build import simulate

ROUNDS, CLIENTS, COHORT = 100, 40, 8


def main() -> None:
    """Train both, then print a table."""
    console = Console()
    console.print(f"Digits, {CLIENTS} clients with one class each, {COHORT} of them a round, {ROUNDS} rounds.")
    recipe = Recipe(learning_rate=0.05, batch_size=16, epochs=2)
    methods: dict[str, Method[Any]] = {"FedAvg": Plain(), "SCAFFOLD": SCAFFOLD()}
    table = Table("", "accuracy, last 10 rounds", "best", "MB sent", "seconds", title="test accuracy of the global model")
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("accuracy {task.fields[accuracy]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, method in methods.items():
            task = progress.add_task(name, total=ROUNDS, accuracy=0.0)
            fed = simulate("digits", OneClassPartitioner(num_partitions=CLIENTS))
            began = time.perf_counter()
            algorithm = FedAvg(Uniform(count=COHORT), recipe, method)
            run = algorithm.fit(
                fed, ROUNDS, on_round=lambda row, t=task: progress.update(t, advance=1, accuracy=row["global/accuracy"])
            )
            best = max(row["global/accuracy"] for row in run.rounds)
            sent = (fed.ledger.totals["wire down"] + fed.ledger.totals["wire up"]) / 1e6
            table.add_row(
                name, f"{run.mean_accuracy(10):.3f}", f"{best:.3f}", f"{sent:.1f}", f"{time.perf_counter() - began:.1f}"
            )
    console.print(table)


if __name__ == "__main__":
    main()
