"""Federated learning on clients whose data do not look alike: let a model travel before it is averaged.

>>> import fedrelay as fr
>>> fed = fr.simulate("digits", partition=fr.OneClassPartitioner(num_partitions=20), engine="loop")
>>> run = fr.FedAvg(fr.Uniform(count=5), method=fr.SCAFFOLD()).fit(fed, rounds=3)
>>> [row["round"] for row in run.rounds]
[1, 2, 3]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedrelay import models
from fedrelay.algorithms import (
    Available,
    BySize,
    Centralised,
    Everyone,
    FedAvg,
    LocalOnly,
    Sampling,
    Then,
    Uniform,
    fedadagrad,
    fedadam,
    fedavgm,
    feddyn,
    fedprox,
    fedyogi,
    ida,
    named,
    scaffold,
)
from fedrelay.data import CropFlip, Dataset, DirichletPartitioner, IidPartitioner, OneClassPartitioner, Partition
from fedrelay.methods import IDA, SCAFFOLD, FedAdagrad, FedAdam, FedAvgM, FedDyn, FedProx, FedYogi, Plain
from fedrelay.seam.algorithm import Algorithm, State
from fedrelay.seam.federation import Federation, Layer, Run
from fedrelay.seam.folds import Bank, Mean, Moved, Sum
from fedrelay.seam.methods import Method, Population
from fedrelay.seam.plan import Chain, Plan, Visit, chain
from fedrelay.seam.questions import Counts, Evaluate, LabelCounts, Size
from fedrelay.seam.recipe import SGD, Adam, AdamW, Constant, Cosine, Exponential, Recipe
from fedrelay.seam.rules import ClientView, End, Rule
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.records.driver import Record, fit
    from fedrelay.simulation.build import simulate
    from fedrelay.simulation.faults import Dropout, Stall
    from fedrelay.simulation.simulation import Simulation

_LATE = {  # what needs torch is loaded when it is asked for
    "Dropout": "fedrelay.simulation.faults",
    "Record": "fedrelay.records.driver",
    "Simulation": "fedrelay.simulation.simulation",
    "Stall": "fedrelay.simulation.faults",
    "fit": "fedrelay.records.driver",
    "simulate": "fedrelay.simulation.build",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'fedrelay' has no attribute {name!r}")


__all__ = [
    "IDA",
    "SCAFFOLD",
    "SGD",
    "Adam",
    "AdamW",
    "Algorithm",
    "Available",
    "Bank",
    "BySize",
    "Centralised",
    "Chain",
    "ClientView",
    "Constant",
    "Cosine",
    "Counts",
    "CropFlip",
    "Dataset",
    "DirichletPartitioner",
    "Dropout",
    "End",
    "Evaluate",
    "Everyone",
    "Exponential",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedProx",
    "FedYogi",
    "Federation",
    "IidPartitioner",
    "LabelCounts",
    "Layer",
    "LocalOnly",
    "Mean",
    "Method",
    "Moved",
    "OneClassPartitioner",
    "Partition",
    "Plain",
    "Plan",
    "Population",
    "Recipe",
    "Record",
    "Rule",
    "Run",
    "Sampling",
    "Simulation",
    "Size",
    "Stall",
    "State",
    "Sum",
    "Then",
    "Uniform",
    "Visit",
    "chain",
    "fedadagrad",
    "fedadam",
    "fedavgm",
    "feddyn",
    "fedprox",
    "fedyogi",
    "fit",
    "ida",
    "models",
    "named",
    "scaffold",
    "simulate",
    "value",
]
