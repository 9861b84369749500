"""The ledger: what a run cost and who revealed what to whom, counted once, where visits are committed.

Units: bytes, examples, steps, seconds of the federation's clock, FLOPs (2 per multiply-add). Payload is elements times
width; wire is what the codec serialises, envelope included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedrelay.seam.landing import Receipts


class Ledger:
    """Totals of a run, and a bit per client for everything that was disclosed.

    >>> ledger = Ledger(clients=3)
    >>> ledger.disclose("label counts", [0, 2])
    >>> ledger.who("label counts")
    [0, 2]
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.totals: dict[str, float] = {}
        self._disclosed: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}

    def commit(self, receipts: Receipts) -> None:
        """Add the visits of a landing."""
        self.add("visits", len(receipts))
        self.add("failed", len(receipts.reasons))
        self.add("examples", int(receipts.examples.sum()))
        self.add("steps", int(receipts.steps.sum()))
        for name, column in receipts.traffic.items():
            self.add(name, int(column.sum()))

    def add(self, column: str, amount: float) -> None:
        self.totals[column] = self.totals.get(column, 0) + amount

    def disclose(self, what: str, clients: Iterable[int]) -> None:
        """These clients revealed ``what`` to the server."""
        if what not in self._disclosed:
            self._disclosed[what] = np.zeros(self.clients, bool)
        self._disclosed[what][list(clients)] = True

    def who(self, what: str) -> list[int]:
        """The clients that revealed ``what``."""
        seen = self._disclosed.get(what)
        return [] if seen is None else np.flatnonzero(seen).tolist()

    @property
    def disclosed(self) -> Mapping[str, int]:
        """What was revealed, and by how many clients."""
        return {what: int(seen.sum()) for what, seen in sorted(self._disclosed.items())}

    def state(self) -> Any:
        """As plain data."""
        return {"totals": dict(self.totals), "disclosed": {w: np.packbits(s) for w, s in self._disclosed.items()}}

    def restore(self, state: Any) -> None:
        self.totals = dict(state["totals"])
        unpacked = {w: np.unpackbits(s)[: self.clients].astype(bool) for w, s in state["disclosed"].items()}
        self._disclosed = unpacked
