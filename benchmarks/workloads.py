"""W1 and W2: the two workloads that speed is measured on. Synthetic examples, the same for everybody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrelay.data import Dataset, Partition
from fedrelay.models import MLP, LeNet5, Network
from plain import Task

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A network, rows of a shape, and the numbers of a round."""

    name: str
    network: Network
    row: tuple[int, ...]
    rate: float
    clients: int = 500
    examples: int = 100
    """Of each client."""
    cohort: int = 100
    batch: int = 64
    epochs: int = 1
    classes: int = 10
    folder: str = ""
    """Where the rows lie."""

    def __str__(self) -> str:
        network, row = type(self.network).__name__, "x".join(map(str, self.row))
        data = f"{self.clients} clients x {self.examples} examples, {self.cohort} a round"
        return f"{self.name}: {network} on rows of {row}, {data}, batch {self.batch}, rate {self.rate}, epochs {self.epochs}"

    def written(self, folder: Path) -> Workload:
        """This workload with its rows in files there, which all processes map into their memory."""
        rng, n = np.random.default_rng(0), self.clients * self.examples
        np.save(folder / "x.npy", rng.standard_normal((n, *self.row), np.float32))
        np.save(folder / "y.npy", rng.integers(0, self.classes, n))
        return replace(self, folder=str(folder))

    def rows(self) -> tuple[Array, Array]:
        """All rows and their labels; client k owns the k-th ``examples`` of them."""
        # "r+" rather than "r": torch warns about arrays that cannot be written to. Nobody writes.
        return np.load(Path(self.folder) / "x.npy", "r+"), np.load(Path(self.folder) / "y.npy", "r+")

    def dataset(self) -> tuple[Dataset, Partition]:
        """What the product is given."""
        x, y = self.rows()
        offsets = np.arange(self.clients + 1, dtype=np.int64) * self.examples
        return Dataset.of(x, y, name=self.name, classes=self.classes), Partition(np.arange(len(y), dtype=np.int32), offsets)

    def task(self) -> Task:
        """What a plain loop is given."""
        x, y = map(torch.from_numpy, self.rows())
        clients = list(zip(x.split(self.examples), y.split(self.examples), strict=True))
        return Task(self.module, clients, self.cohort, self.batch, self.epochs, self.rate)

    def module(self) -> nn.Sequential:
        """The network as one flat module."""
        return nn.Sequential(*(layer for segment in self.network.segments().values() for layer in segment.children()))


W1 = Workload("W1", LeNet5(), (3, 32, 32), rate=0.01)
W2 = Workload("W2", MLP(), (784,), rate=0.05)
WORKLOADS = {w.name: w for w in (W1, W2)}
