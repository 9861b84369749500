"""Methods: what a client minimises and how the server merges, one file each. None knows who travels."""

from fedrelay.methods.feddyn import Dynamic, FedDyn
from fedrelay.methods.fedprox import FedProx, Proximal
from fedrelay.methods.ida import IDA
from fedrelay.methods.plain import Plain
from fedrelay.methods.scaffold import SCAFFOLD, ControlVariate, GradientVariate
from fedrelay.methods.server import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "IDA",
    "SCAFFOLD",
    "ControlVariate",
    "Dynamic",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedDyn",
    "FedProx",
    "FedYogi",
    "GradientVariate",
    "Plain",
    "Proximal",
]
