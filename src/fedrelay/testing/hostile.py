"""The worst federation that is still legal: what runs here runs on clusters that lose workers and devices that answer twice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from fedrelay.seam.codec import Lazy, Store, decode, encode
from fedrelay.seam.landing import Flight, Landing
from fedrelay.seam.places import Place
from fedrelay.seam.plan import Plan
from fedrelay.simulation.simulation import Simulation


class HostileFederation(Simulation):
    """A simulation that sends every plan through the codec, serves every visit from fresh objects, trains twice in other
    orders and slots, answers twice, and is killed and restored while flights are in the air."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.disk = Store()
        self.kills = 0

    def launch(self, place: Place, plan: Plan) -> Flight:
        text = json.dumps(encode((place, plan), self.disk))
        flight = super().launch(*decode(json.loads(text), self.disk))
        self.kill()
        return flight

    def land(self, any_of: Sequence[Flight], also: Sequence[Flight] = ()) -> list[Landing]:
        if any(f.id % 3 == 0 for f in any_of):  # some flights train alone
            self._train([i for i, a in self._air.items() if a.work is None][:1])
        self.kill()
        return super().land(any_of, also)

    def kill(self) -> None:
        """Everything is lost but what the checkpoint holds."""
        data = json.dumps(encode(self.state(), self.disk))
        self.memories.forget(())
        self._air, self._counters, self.now, self._flown = {}, {}, float("nan"), -1
        self.restore(decode(json.loads(data), self.disk))
        self.kills += 1

    def _train(self, flights: Sequence[int]) -> None:
        super()._train(flights)
        first = {i: self._air[i].work for i in flights}
        for i in flights:
            self._air[i] = replace(self._air[i], work=None)
        engine, self.engine = self.engine, Backwards(self.engine)  # type: ignore[assignment]
        super()._train(list(flights)[::-1])  # a worker died: all of it again, beside other neighbours
        self.engine = engine
        for i, work in first.items():
            if not alike(work, self._air[i].work):
                raise AssertionError(f"flight {i} gave another answer when it was trained again")

    def _commit(self, i: int) -> Landing:
        air, ledger = self._air[i], encode(self.ledger.state(), self.disk)
        once = super()._commit(i)
        kept = {c: self.memories.version(air.place.path, c) for c in air.began}
        after, self._air[i] = self.ledger.state(), air  # the answer comes again
        self.ledger.restore(decode(ledger, self.disk))
        super()._commit(i)
        if kept != {c: self.memories.version(air.place.path, c) for c in air.began} or not alike(after, self.ledger.state()):
            raise AssertionError(f"flight {i} committed twice is not flight {i} committed once")
        return once


class Backwards:
    """An engine that takes its work from the other end."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(self, tallies: Sequence[Any]) -> None:
        for t in tallies:
            t.backwards = True
        self.engine.run(list(tallies)[::-1])


def alike(a: Any, b: Any) -> bool:
    """Whether two values are the same bit for bit (a NaN equals itself)."""
    stores = Store(), Store()
    if json.dumps(encode(a, stores[0])) != json.dumps(encode(b, stores[1])) or len(stores[0]) != len(stores[1]):
        return False
    pairs = ((stores[0].get(f"t{i}"), stores[1].get(f"t{i}")) for i in range(len(stores[0])))
    return all(
        x.dtype == y.dtype and x.shape == y.shape and bool(torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7))) for x, y in pairs
    )


TINY = 1e-6
"""Differences are relative to the size of what is compared, but never to less than this."""


def apart(a: Any, b: Any) -> float:
    """How far two values are from each other: the largest relative norm of a difference over their tensors and numbers, and
    infinitely far where they are not built alike (a NaN is next to itself)."""
    a, b = (v.load() if isinstance(v, Lazy) else torch.as_tensor(v) if isinstance(v, np.ndarray | float) else v for v in (a, b))
    if is_dataclass(a) and type(a) is type(b):
        return max((apart(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)), default=0.0)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return max((apart(a[k], b[k]) for k in a), default=0.0) if a.keys() == b.keys() else math.inf
    if isinstance(a, tuple) and isinstance(b, tuple):
        return max(map(apart, a, b), default=0.0) if len(a) == len(b) else math.inf
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return math.inf
        x, y = a.double().nan_to_num(7e7), b.double().nan_to_num(7e7)
        return float((x - y).norm() / y.norm().clamp(min=TINY))
    return 0.0 if type(a) is type(b) and a == b else math.inf
