"""Values: frozen dataclasses that can travel, and the trees of tensors they carry.

Everything that crosses the seam is a *value*: a frozen dataclass known to the codec by its class name. Values never hold
a closure, so the same recipe can be written to TOML, a checkpoint, a Ray worker or a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from torch import Tensor

    Weights = Mapping[str, Tensor]
    """``"segment.leaf" -> tensor``. A leaf that nobody trained keeps its identity."""

T = TypeVar("T")
Tree = Mapping[str, Any]
"""Nested mappings with tensors at the leaves."""

KNOWN: dict[str, type] = {}
"""The codec's allow-list: a name that is not here does not decode."""


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass that the codec knows by its name.

    >>> @value
    ... class Halve:
    ...     rate: float = 0.5
    >>> Halve(), KNOWN["Halve"] is Halve
    (Halve(rate=0.5), True)
    """
    made = dataclass(frozen=True)(cls)
    before = KNOWN.setdefault(cls.__name__, made)
    if before is not made and (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"two values are called {cls.__name__}: {before.__module__} and {cls.__module__}; rename one of them")
    KNOWN[cls.__name__] = made
    return made


def zeros(w: Weights) -> dict[str, Tensor]:
    """A zero for every leaf of ``w``."""
    return {n: t.new_zeros(t.shape) for n, t in w.items()}


def plus(a: Weights, b: Weights, k: Any = 1.0) -> dict[str, Tensor]:
    """``a + k b`` on the leaves of ``b``; the other leaves of ``a`` stay the tensors they are."""
    return {**a, **{n: a[n] + k * t if n in a else k * t for n, t in b.items()}}


def minus(a: Weights, b: Weights) -> dict[str, Tensor]:
    """``a - b`` on the leaves of ``a``."""
    return {n: t - b[n] for n, t in a.items()}


def tmap(f: Callable[..., Any], *trees: Any) -> Any:
    """``f`` over the leaves of trees of the same shape."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {k: tmap(f, *(t[k] for t in trees)) for k in first}
    return f(*trees)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, in the order of its keys."""
    if isinstance(tree, Mapping):
        for v in tree.values():
            yield from leaves(v)
    else:
        yield tree
