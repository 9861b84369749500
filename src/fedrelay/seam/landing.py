"""What comes back from a plan: what the folds made, and a receipt for every visit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedrelay.seam.values import value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedrelay.seam.folds import Fold

R = TypeVar("R")
PLAIN = ("client", "chain", "position", "examples", "steps", "loss", "seconds")


@dataclass(frozen=True)
class Receipt:
    """One visit, as it went."""

    client: int
    chain: int
    position: int
    examples: int
    steps: int
    loss: float
    seconds: float
    numbers: Mapping[str, float]
    traffic: Mapping[str, int]
    reason: str | None
    """Why the visit failed; None: it did not."""


@value
class Receipts:
    """A plan's visits as columns, in the order of (chain, position)."""

    client: NDArray[np.int64]
    chain: NDArray[np.int64]
    position: NDArray[np.int64]
    examples: NDArray[np.int64]
    steps: NDArray[np.int64]
    loss: NDArray[np.float64]
    seconds: NDArray[np.float64]
    numbers: Mapping[str, NDArray[np.float64]]
    """The numbers that each visit trained with."""
    traffic: Mapping[str, NDArray[np.int64]]
    """Bytes: payload "down" and "up", their "wire down" and "wire up", and what crossed a cut."""
    reasons: Mapping[int, str]
    """Row -> why the visit failed."""

    def __len__(self) -> int:
        return len(self.client)

    def __iter__(self) -> Iterator[Receipt]:
        for i in range(len(self)):
            plain: dict[str, Any] = {f: getattr(self, f)[i].item() for f in PLAIN}
            numbers = {n: v[i].item() for n, v in self.numbers.items() if not np.isnan(v[i])}
            traffic = {n: v[i].item() for n, v in self.traffic.items()}
            yield Receipt(**plain, numbers=numbers, traffic=traffic, reason=self.reasons.get(i))

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Which visits succeeded."""
        good = np.ones(len(self), bool)
        good[list(self.reasons)] = False
        return good

    @staticmethod
    def joined(parts: Sequence[Receipts]) -> Receipts:
        """Receipts of several plans, one after another."""
        ends = np.cumsum([0, *(len(p) for p in parts)])

        def column(name: str) -> Any:
            return np.concatenate([getattr(p, name) for p in parts])

        def columns(name: str, missing: float, dtype: type) -> Any:
            keys = dict.fromkeys(k for p in parts for k in getattr(p, name))
            return {k: np.concatenate([getattr(p, name).get(k, np.full(len(p), missing, dtype)) for p in parts]) for k in keys}

        plain = {f: column(f) for f in PLAIN}
        reasons = {int(at) + i: why for at, p in zip(ends, parts, strict=False) for i, why in p.reasons.items()}
        return Receipts(
            **plain, numbers=columns("numbers", np.nan, float), traffic=columns("traffic", 0, np.int64), reasons=reasons
        )


@value
class Flight:
    """A plan under way. What it is belongs to the federation; states hold this number."""

    id: int


@value
class Landing:
    """What a flight brought: ``landing[fold]`` is what that fold made of the chains."""

    flight: Flight
    at: float
    """When, in seconds of the federation's clock."""
    made: Mapping[Any, Any]
    """Fold -> accumulator, so that landings can still be joined."""
    receipts: Receipts

    def __getitem__(self, fold: Fold[R]) -> R:
        if fold not in self.made:
            raise LookupError(f"{fold!r} did not ride on this plan; these did: {', '.join(map(repr, self.made))}")
        return fold.result(self.made[fold])


def join(landings: Sequence[Landing]) -> Landing:
    """Several landings as if their chains had been one plan's."""
    first, *rest = landings
    made = dict(first.made)
    for other in rest:
        made = {f: f.merge(a, other.made[f]) for f, a in made.items()}
    return replace(first, made=made, receipts=Receipts.joined([x.receipts for x in landings]))
