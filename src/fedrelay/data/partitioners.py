"""Partitioners: how the rows of one dataset are dealt to clients.

Names, parameters and meaning are those of flwr-datasets (https://flower.ai/docs/datasets), so that a split described there
is the same split here. A partitioner is a value: it fits into a TOML file, and the same seed gives the same rows.

They deal by *owner*: one number per row, then one linear sort. Nothing here loops over clients.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedrelay.data.partition import Ints, Partition
from fedrelay.seam.values import value


class Partitioner(Protocol):
    """Anything that deals rows to ``num_partitions`` clients by their labels."""

    @property
    def num_partitions(self) -> int: ...

    def split(self, y: Ints, rng: np.random.Generator | None = None) -> Partition:
        """Who owns which row; ``rng`` takes the place of the partitioner's own seed."""
        ...


@value
class IidPartitioner:
    """Every client a random share of the same size, or one example more: clients that look alike.

    (flwr-datasets cuts the dataset as it lies; a dataset stored class by class is then not IID at all. Here it is shuffled.)

    >>> partition = IidPartitioner(3).split(np.zeros(10, np.int64))
    >>> partition.sizes
    array([4, 3, 3])
    """

    num_partitions: int
    """K, the number of clients."""
    seed: int = 42

    def split(self, y: Ints, rng: np.random.Generator | None = None) -> Partition:
        """Who owns which row; only the length of ``y`` matters."""
        _check_number(self, "num_partitions", self.num_partitions, 1)
        if self.num_partitions > len(y):
            raise ValueError(f"IidPartitioner: {len(y)} examples are too few for {self.num_partitions} partitions")
        rows = _generator(self, self.seed, rng).permutation(len(y))
        sizes = _even(len(y), np.array([self.num_partitions]))
        return Partition(rows.astype(np.int32), np.concatenate([[0], np.cumsum(sizes)]))


@value
class OneClassPartitioner:
    """One class per client, the limit of a Dirichlet split as alpha goes to 0. Nothing is drawn.

    The rows sorted by label are cut into contiguous shards, equal within a class. Every class gets as many clients as every
    other; where that does not come out even, the largest classes get one more.

    >>> partition = OneClassPartitioner(4).split(np.array([0, 1, 0, 1, 1, 1, 0]))
    >>> [rows.tolist() for rows in partition]
    [[0, 2], [6], [1, 3], [4, 5]]
    """

    num_partitions: int
    """K, the number of clients."""

    def split(self, y: Ints, rng: np.random.Generator | None = None) -> Partition:
        """Who owns which row; ``rng`` is not used."""
        _check_number(self, "num_partitions", self.num_partitions, 1)
        by_class = _by_class(self, y)
        present = np.flatnonzero(by_class.sizes)
        sizes = by_class.sizes[present]
        if self.num_partitions < len(present):
            raise ValueError(
                f"OneClassPartitioner: {self.num_partitions} clients of one class each cannot cover {len(present)} classes;"
                f" set num_partitions to at least {len(present)}"
            )
        clients, left = np.divmod(np.full(len(present), self.num_partitions), len(present))
        clients[np.argsort(-sizes, kind="stable")[: left[0]]] += 1
        if (short := sizes < clients).any():
            c = int(short.argmax())
            raise ValueError(
                f"OneClassPartitioner: class {present[c]} has {sizes[c]} examples for {clients[c]} clients; lower num_partitions"
            )
        return Partition(by_class.index, np.concatenate([[0], np.cumsum(_even(sizes, clients))]))


@value
class DirichletPartitioner:
    """Label skew: the shares of each *class* over the clients are drawn from a Dirichlet distribution.

    Per class over clients, as Yurochkin et al. (https://arxiv.org/abs/1905.12022) and flwr-datasets do: sizes differ as much
    as labels do. (Per client over classes, with sizes given, is another split: flwr-datasets' InnerDirichletPartitioner.)
    With the same seed every client gets the rows that it gets in flwr-datasets (when self-balancing, but for a row here and
    there); the order in which it holds them differs, because here all clients are shuffled at once.

    >>> y = np.repeat([0, 1], 500)
    >>> partition = DirichletPartitioner(num_partitions=4, alpha=0.3).split(y)
    >>> partition.label_counts(y, classes=2).sum(0)
    array([500, 500])
    """

    num_partitions: int
    """K, the number of clients."""
    alpha: float | tuple[float, ...]
    """Concentration, one for all clients or one each: at 0.1 a client has one or two classes, at 100 all of them evenly."""
    partition_by: str = "label"
    """What is split by. A dataset here has one label per row, so nothing but ``"label"`` can be meant."""
    min_partition_size: int = 10
    """The shares are drawn again, at most ten times, until every client has so many examples. At 0 clients may be empty."""
    self_balancing: bool = False
    """A client that has more than N / K examples gets nothing of the classes that follow."""
    shuffle: bool = True
    """Mix each client's rows; otherwise they lie class by class."""
    seed: int = 42

    RETRIES = 10
    """As in flwr-datasets: a setting that failed eleven times is not going to succeed."""

    def split(self, y: Ints, rng: np.random.Generator | None = None) -> Partition:
        """Who owns which row: every row has one owner."""
        alpha = self._check()
        rng = _generator(self, self.seed, rng)
        by_class = _by_class(self, y)
        if self.min_partition_size * self.num_partitions > len(y):
            raise ValueError(
                f"DirichletPartitioner: {len(y)} examples cannot give each of {self.num_partitions} partitions"
                f" {self.min_partition_size}; set min_partition_size to {len(y) // self.num_partitions} or less"
            )
        rows: Ints = by_class.index
        owner = self._owners(by_class.sizes[by_class.sizes > 0], alpha, rng)
        if self.shuffle:
            # Rows in random order, then grouped by a sort that keeps the order within a group: every client is mixed.
            mixed = rng.permutation(len(rows))
            rows, owner = rows[mixed], owner[mixed]
        return Partition.by_owner(owner, self.num_partitions, rows)

    def _owners(self, classes: NDArray[np.int64], alpha: NDArray[np.float64], rng: np.random.Generator) -> Ints:
        """The owner of every row, the rows class by class; ``classes`` are the sizes of the classes that occur."""
        k, total = self.num_partitions, int(classes.sum())
        ids: Ints = np.arange(k).astype(np.uint16 if k <= 1 << 16 else np.int32)  # small numbers are sorted faster
        owner, best = np.zeros(total, ids.dtype), -1
        for _ in range(1 + self.RETRIES):
            held, start = np.zeros(k, np.int64), 0
            for n in classes.tolist():
                share, last = rng.dirichlet(alpha), k - 1
                if not abs(share.sum() - 1) < 1e-6:  # true of NaN too
                    raise ValueError(f"DirichletPartitioner: NumPy cannot draw from alpha = {self.alpha}; at 1e6 shares are even")
                if self.self_balancing:
                    is_open = held <= total / k
                    share, last = _balanced(share, is_open), int(np.flatnonzero(is_open)[-1])
                # The shares add up to a hair more or less than 1: no client ends beyond the class, the last one ends with it.
                ends = np.minimum((np.cumsum(share) * n).astype(np.int64), n)
                ends[last:] = n
                given = np.diff(ends, prepend=0)
                owner[start : start + n] = np.repeat(ids, given)
                held, start = held + given, start + n
            if (best := max(best, int(held.min()))) >= self.min_partition_size:
                return owner
        raise ValueError(
            f"DirichletPartitioner: in {1 + self.RETRIES} draws the smallest of {k} partitions had at most {best} examples, but"
            f" min_partition_size is {self.min_partition_size}; lower it, or raise alpha (now {self.alpha})"
        )

    def _check(self) -> NDArray[np.float64]:
        """The concentration of each client, if all numbers make sense."""
        _check_number(self, "num_partitions", self.num_partitions, 1)
        _check_number(self, "min_partition_size", self.min_partition_size, 0)
        if self.partition_by != "label":
            raise ValueError(
                f"DirichletPartitioner: partition_by must be 'label', not {self.partition_by!r}: a row has one label"
            )
        alpha = np.asarray(self.alpha)
        if alpha.dtype.kind not in "iuf" or alpha.ndim > 1 or not (np.isfinite(alpha).all() and (alpha > 0).all()):
            raise ValueError(f"DirichletPartitioner: alpha must be a number above 0, or one per partition, not {self.alpha!r}")
        if alpha.ndim == 1 and len(alpha) != self.num_partitions:
            raise ValueError(f"DirichletPartitioner: alpha has {len(alpha)} numbers for {self.num_partitions} partitions")
        return np.broadcast_to(alpha.astype(np.float64), self.num_partitions)


def _balanced(share: NDArray[np.float64], is_open: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The shares of the clients that still take examples, adding up to 1. (Some client always does: not all exceed N / K.)"""
    share = np.where(is_open, share, 0.0)
    # At a small alpha all open clients may have drawn exactly 0; dividing by their sum would give NaN, so they share evenly.
    left = share if share.any() else is_open.astype(np.float64)
    return np.asarray(left / left.sum(), np.float64)


def _by_class(who: object, y: Ints) -> Partition:
    """The rows of each class, as a partition with classes for clients."""
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) == 0:
        raise ValueError(f"{type(who).__name__}: labels must be a flat array of integers, not {y.dtype} of shape {y.shape}")
    if y.min() < 0:
        raise ValueError(f"{type(who).__name__}: labels start at 0, but y[{int(y.argmin())}] is {y.min()}")
    return Partition.by_owner(y, int(y.max()) + 1)


def _even(rows: int | NDArray[np.int64], parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sizes of ``parts[c]`` equal parts of ``rows[c]`` rows, group after group; the first of a group may have one more.

    >>> _even(np.array([7, 4]), np.array([3, 2]))
    array([3, 2, 2, 2, 2])
    """
    size, left = np.divmod(rows, parts)
    rank = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.repeat(size, parts) + (rank < np.repeat(left, parts))


def _generator(who: object, seed: int, rng: np.random.Generator | None) -> np.random.Generator:
    if rng is not None:
        return rng
    _check_number(who, "seed", seed, 0)
    return np.random.default_rng(seed)


def _check_number(who: object, name: str, number: Any, at_least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < at_least:
        raise ValueError(f"{type(who).__name__}: {name} must be a whole number of at least {at_least}, not {number!r}")
