"""Algorithms: one way of travelling per file. Who travels with whom is said here, and nothing else."""

from fedrelay.algorithms.baselines import Centralised, LocalOnly
from fedrelay.algorithms.fedavg import FedAvg
from fedrelay.algorithms.named import fedadagrad, fedadam, fedavgm, feddyn, fedprox, fedyogi, ida, named, scaffold
from fedrelay.algorithms.sampling import Available, BySize, Everyone, Sampling, Uniform
from fedrelay.algorithms.then import Then

__all__ = [
    "Available",
    "BySize",
    "Centralised",
    "Everyone",
    "FedAvg",
    "LocalOnly",
    "Sampling",
    "Then",
    "Uniform",
    "fedadagrad",
    "fedadam",
    "fedavgm",
    "feddyn",
    "fedprox",
    "fedyogi",
    "ida",
    "named",
    "scaffold",
]
