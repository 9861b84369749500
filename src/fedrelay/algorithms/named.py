"""The names that everybody uses for FedAvg's way of travelling with another method.

>>> scaffold(option=1) == FedAvg(method=SCAFFOLD(option=1))
True
"""

from __future__ import annotations

from typing import Any

from fedrelay.algorithms.fedavg import FedAvg
from fedrelay.methods import IDA, SCAFFOLD, FedAdagrad, FedAdam, FedAvgM, FedDyn, FedProx, FedYogi
from fedrelay.seam.methods import Method

METHODS: dict[str, type[Method[Any]]] = {
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "ida": IDA,
}
TRAVEL = ("sampling", "recipe")


def named(name: str, **options: Any) -> FedAvg:
    """FedAvg with the method of this name; ``sampling`` and ``recipe`` are FedAvg's, the other options the method's.

    >>> named("fedprox", mu=0.1).method
    FedProx(by='examples', mu=0.1)
    """
    if name not in METHODS:
        raise ValueError(f"no method is called {name!r}: there are {', '.join(METHODS)}")
    travel = {k: options.pop(k) for k in TRAVEL if k in options}
    return FedAvg(method=METHODS[name](**options), **travel)


def fedprox(**options: Any) -> FedAvg:
    """FedAvg with :class:`FedProx`."""
    return named("fedprox", **options)


def scaffold(**options: Any) -> FedAvg:
    """FedAvg with :class:`SCAFFOLD`."""
    return named("scaffold", **options)


def feddyn(**options: Any) -> FedAvg:
    """FedAvg with :class:`FedDyn`."""
    return named("feddyn", **options)


def fedavgm(**options: Any) -> FedAvg:
    """FedAvg with :class:`FedAvgM`."""
    return named("fedavgm", **options)


def fedadagrad(**options: Any) -> FedAvg:
    """FedAvg with :class:`FedAdagrad`."""
    return named("fedadagrad", **options)


def fedadam(**options: Any) -> FedAvg:
    """FedAvg with :class:`FedAdam`."""
    return named("fedadam", **options)


def fedyogi(**options: Any) -> FedAvg:
    """FedAvg with :class:`FedYogi`."""
    return named("fedyogi", **options)


def ida(**options: Any) -> FedAvg:
    """FedAvg with :class:`IDA`."""
    return named("ida", **options)
