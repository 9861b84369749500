"""Folds: what a plan makes of its chains. Frozen values with a monoid, so that parts can be joined anywhere.

A fold sees blocks of hand-overs in the plan's order, never in the order in which they happened to finish. Failed visits and
chains in which everybody failed are not shown, except to a fold that asks for "every end".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from fedrelay.seam.values import plus, value

if TYPE_CHECKING:
    from torch import Tensor

    from fedrelay.seam.values import Weights

R = TypeVar("R", covariant=True)


class Slice(Mapping[str, "Tensor"]):
    """One model out of many that lie stacked: trained leaves are rows of ``stacked``, the others are what was received."""

    __slots__ = ("base", "row", "stacked")

    def __init__(self, base: Weights, stacked: Mapping[str, Tensor], row: int) -> None:
        self.base, self.stacked, self.row = base, stacked, row

    def __getitem__(self, name: str) -> Tensor:
        return self.stacked[name][self.row] if name in self.stacked else self.base[name]

    def __iter__(self) -> Any:
        return iter({**self.base, **self.stacked})

    def __len__(self) -> int:
        return len({**self.base, **self.stacked})

    def settled(self) -> dict[str, Tensor]:
        """The model as tensors of its own, free of its neighbours."""
        return {**self.base, **{n: t[self.row].clone() for n, t in self.stacked.items()}}


def stack(models: Sequence[Weights], name: str) -> Tensor:
    """One leaf of many models as [n, ...], without a copy where it lies stacked already."""
    first = models[0]
    if isinstance(first, Slice) and name in first.stacked:
        whole = first.stacked[name]
        if all(isinstance(m, Slice) and m.stacked.get(name) is whole for m in models):
            rows = [m.row for m in models]  # type: ignore[attr-defined]
            if rows == list(range(rows[0], rows[0] + len(rows))):
                return whole[rows[0] : rows[0] + len(rows)]
            return whole[rows]
    ours = [m[name] for m in models]
    if all(t is ours[0] for t in ours):
        return ours[0].expand(len(ours), *ours[0].shape)
    import torch

    return torch.stack(ours)


@dataclass(frozen=True)
class Ends:
    """A block of hand-overs, in the plan's order: the ends of chains, or what was handed over inside them."""

    starts: Sequence[Weights]
    """What the first visit (for hand-overs: this visit) received."""
    weights: Sequence[Weights]
    scopes: Sequence[tuple[str, ...]]
    """The leaves that may have changed: only these are merged."""
    examples: Sequence[int]
    ups: Sequence[Mapping[str, Weights]]
    spill: Callable[[Weights], Weights] | None = None
    """Where a fold may lay whole models that it keeps; None: they stay in memory."""

    def kept(self, i: int) -> Weights:
        """The model at the end of chain i as something to keep: free of its neighbours, and on disk if it must be."""
        w = self.weights[i]
        if not isinstance(w, Slice):
            return w
        return self.spill(w) if self.spill else w.settled()

    @property
    def scope(self) -> tuple[str, ...]:
        if any(s != self.scopes[0] for s in self.scopes):
            raise ValueError(MIXED)
        return self.scopes[0]

    def end(self, leaf: str) -> Tensor:
        """[n, ...]: this leaf at the end of every chain."""
        return stack(self.weights, leaf)

    def start(self, leaf: str) -> Tensor:
        """[n, ...]: this leaf at the start of every chain."""
        return stack(self.starts, leaf)

    def up(self, name: str) -> Mapping[str, Tensor]:
        """[n, ...] of every leaf that the clients sent up under this name."""
        if any(name not in u for u in self.ups):
            raise LookupError(
                f"a fold sums what clients send up as {name!r}, and a visit's rules sent none: use the method's recipe"
            )
        ups = [u[name] for u in self.ups]
        return {leaf: stack(ups, leaf) for leaf in ups[0]}


class Fold(Protocol[R]):
    """A frozen value with a monoid; accumulators are plain data, because they lie in checkpoints."""

    @property
    def at(self) -> str:
        """ "ends" of chains, "visits" (every hand-over), or "every end" (failed chains too, which end at their start)."""
        ...

    def empty(self) -> Any: ...
    def add(self, acc: Any, ends: Ends) -> Any: ...
    def merge(self, a: Any, b: Any) -> Any: ...
    def result(self, acc: Any) -> R: ...


def total(t: Tensor, k: Sequence[float] | None = None) -> Tensor:
    """sum_i k_i t_i over the first dimension."""
    if k is None:
        return t.sum(0)
    ks = t.new_tensor(np.asarray(k, dtype=np.float64))
    return (ks @ t.reshape(len(ks), -1)).reshape(t.shape[1:])


MIXED = "chains of different scope meet in one fold: give each scope a plan of its own"


def joined(a: Weights, b: Weights) -> Weights:
    """The sum of two sums; one that is empty adds nothing."""
    if a and b and a.keys() != b.keys():
        raise ValueError(MIXED)
    return plus(a, b) if a and b else a or b


@value
class Mean:
    """The mean of the leaves in scope, weighted by examples or counted uniformly: a partial model; empty if nothing counts.

    >>> import torch
    >>> w = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([4.0])}]
    >>> ends = Ends(w, w, [("a",), ("a",)], [2, 1], [{}, {}])
    >>> fold = Mean()
    >>> fold.result(fold.add(fold.empty(), ends))
    {'a': tensor([2.])}
    """

    by: str = "examples"
    at: str = "ends"

    def empty(self) -> Any:
        return {"n": 0, "sum": {}}

    def add(self, acc: Any, ends: Ends) -> Any:
        k = ends.examples if self.by == "examples" else [1] * len(ends.weights)
        return self.merge(acc, {"n": int(sum(k)), "sum": {n: total(ends.end(n), k) for n in ends.scope}})

    def merge(self, a: Any, b: Any) -> Any:
        if not a["n"] or not b["n"]:
            return a if a["n"] else b
        return {"n": a["n"] + b["n"], "sum": joined(a["sum"], b["sum"])}

    def result(self, acc: Any) -> dict[str, Tensor]:
        return {n: t / acc["n"] for n, t in acc["sum"].items()} if acc["n"] else {}


@value
class Sum:
    """The sum of what clients sent up beside their weights under a name (SCAFFOLD's control variates)."""

    up: str
    at: str = "visits"

    def empty(self) -> Any:
        return {}

    def add(self, acc: Any, ends: Ends) -> Any:
        return self.merge(acc, {n: total(t) for n, t in ends.up(self.up).items()})

    def merge(self, a: Any, b: Any) -> Any:
        return joined(a, b)

    def result(self, acc: Any) -> dict[str, Tensor]:
        return dict(acc)


@value
class Moved:
    """The sum of (returned - received) over chains."""

    at: str = "ends"

    def empty(self) -> Any:
        return {}

    def add(self, acc: Any, ends: Ends) -> Any:
        return self.merge(acc, {n: total(ends.end(n) - ends.start(n)) for n in ends.scope})

    def merge(self, a: Any, b: Any) -> Any:
        return joined(a, b)

    def result(self, acc: Any) -> dict[str, Tensor]:
        return dict(acc)


@value
class Bank:
    """Every chain's end (or one leaf of it) and the examples it saw, in chain order; a failed chain ends at its start.

    For what needs a second pass (distances, medians) or hands models on as they are.
    """

    leaf: str | None = None
    at: str = "every end"

    def empty(self) -> Any:
        return ()

    def add(self, acc: Any, ends: Ends) -> Any:
        def own(i: int) -> Any:
            return ends.kept(i) if self.leaf is None else ends.weights[i][self.leaf].clone()

        return acc + tuple((own(i), int(k)) for i, k in enumerate(ends.examples))

    def merge(self, a: Any, b: Any) -> Any:
        return a + b

    def result(self, acc: Any) -> tuple[tuple[Any, int], ...]:
        return tuple(acc)
