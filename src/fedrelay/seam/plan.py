"""A round is a plan of chains: who trains what, after whom, and what is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from fedrelay.seam.recipe import Recipe
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from fedrelay.seam.folds import Fold
    from fedrelay.seam.values import Weights

EVERYBODY = -1
"""The client that stands for all clients' examples pooled at the server: raw data leave their owners."""


@value
class Visit:
    """One client trains the model it is handed."""

    client: int
    recipes: tuple[Recipe, ...]
    """Several: the client trains each and keeps the one whose loss on its own held-out part is least."""
    lost: str | None = None
    """A layer's word: the visit will fail, and why."""
    wait: float = 0.0
    """A layer's word: seconds that the visit takes beyond its own."""


@value
class Chain:
    """Visits one after another; the model is passed on."""

    start: Weights
    visits: tuple[Visit, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What goes down beside the weights."""
    seen: int = 0
    """Examples that this model saw before and was not yet merged for."""


@value
class Plan:
    """Chains side by side, and the folds over them."""

    chains: tuple[Chain, ...]
    folds: tuple[Fold[Any], ...]


def chain(start: Weights, clients: Iterable[int], recipe: Recipe, extra: Mapping[str, Any] | None = None, seen: int = 0) -> Chain:
    """The same recipe at every client, in this order.

    >>> [v.client for v in chain({}, [3, 1], Recipe()).visits]
    [3, 1]
    """
    alone = (recipe,)
    return Chain(start, tuple(Visit(int(c), alone) for c in clients), {} if extra is None else extra, seen)
