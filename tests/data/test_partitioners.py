"""Partitioners: every example once, the numbers of the definition, the same rows for the same seed, no endless loop."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedrelay.data import DirichletPartitioner, IidPartitioner, OneClassPartitioner, Partition
from fedrelay.seam.values import KNOWN

Y = np.random.default_rng(0).integers(0, 10, 5000)
LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)
SEEDS = st.integers(0, 2**32)


def lists(partition: Partition) -> list[list[int]]:
    return [rows.tolist() for rows in partition]


def each_once(partition: Partition, n: int) -> bool:
    return bool((np.bincount(partition.check(n).index, minlength=n) == 1).all())


@given(LABELS, st.integers(1, 30), st.floats(1e-4, 100), st.booleans(), st.booleans(), SEEDS)
def test_dirichlet_deals_every_example_once(
    y: NDArray[np.int64], k: int, alpha: float, balancing: bool, shuffle: bool, seed: int
) -> None:
    partitioner = DirichletPartitioner(k, alpha, min_partition_size=0, self_balancing=balancing, shuffle=shuffle, seed=seed)
    partition = partitioner.split(y)
    assert len(partition) == k
    assert each_once(partition, len(y))
    assert partition == partitioner.split(y)


@given(LABELS, st.integers(1, 80), SEEDS)
def test_iid_deals_every_example_once_and_evenly(y: NDArray[np.int64], k: int, seed: int) -> None:
    if k > len(y):
        k = len(y)
    partition = IidPartitioner(k, seed=seed).split(y)
    assert each_once(partition, len(y))
    assert partition.sizes.max() - partition.sizes.min() <= 1
    assert partition == IidPartitioner(k, seed=seed).split(y)


@given(st.lists(st.integers(4, 30), min_size=1, max_size=6), st.integers(1, 4), SEEDS)
def test_one_class_per_client(sizes: list[int], each: int, seed: int) -> None:
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 2, sizes))  # every second class is absent
    partition = OneClassPartitioner(each * len(sizes)).split(y)
    counts = partition.label_counts(y, 2 * len(sizes))
    assert each_once(partition, len(y))
    assert ((counts > 0).sum(1) == 1).all()
    assert ((counts > 0).sum(0)[::2] == each).all()
    for c in counts.T[::2]:
        assert np.ptp(c[c > 0]) <= 1


class Shares:
    """In place of a generator: draws what it is told to, and mixes nothing."""

    def __init__(self, *shares: list[float]) -> None:
        self.shares = list(shares)

    def dirichlet(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array(self.shares.pop(0))

    def permutation(self, n: int) -> NDArray[np.int64]:
        return np.arange(n)


def dealt(y: list[int], shares: list[list[float]], **settings: Any) -> list[list[int]]:
    rng: Any = Shares(*shares)
    return lists(DirichletPartitioner(len(shares[0]), 1.0, **{"min_partition_size": 0, **settings}).split(np.array(y), rng))


def test_shares_become_rows() -> None:
    """Class 0 is rows 0 1 2 4 6 (n = 5): cumulated shares 0.25 0.65 1 end at floor(1.25) = 1, floor(3.25) = 3, 5.

    Class 1 is rows 3 5 (n = 2): 0.5 0.5 1 end at 1, 1, 2. So client 0 gets 0 | 3, client 1 gets 1 2, client 2 gets 4 6 | 5.
    """
    assert dealt([0, 0, 0, 1, 0, 1, 0], [[0.25, 0.4, 0.35], [0.5, 0.0, 0.5]]) == [[0, 3], [1, 2], [4, 6, 5]]


def test_draws_again_while_a_client_has_too_few() -> None:
    """First draw: sizes 4, 0; second: 3, 1; third: 2, 2, which is enough."""
    shares = [[1.0, 0.0], [0.75, 0.25], [0.5, 0.5]]
    assert dealt([0, 0, 0, 0], shares, min_partition_size=2) == [[0, 1], [2, 3]]


def test_self_balancing_closes_a_client_above_the_mean() -> None:
    """N = 8, K = 3, N / K = 2.67. Client 0 gets 3 of class 0 and is closed: 0.5 0.25 0.25 becomes 0 0.5 0.5 of class 1."""
    assert dealt([0, 0, 0, 0, 1, 1, 1, 1], [[0.75, 0.25, 0], [0.5, 0.25, 0.25]], self_balancing=True) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]


def test_self_balancing_leaves_a_client_at_the_mean_open() -> None:
    """N = 4, K = 2, N / K = 2: two examples are not more than two."""
    assert dealt([0, 0, 1, 1], [[1.0, 0.0], [0.5, 0.5]], self_balancing=True) == [[0, 1, 2], [3]]


def test_self_balancing_when_the_open_clients_drew_nothing() -> None:
    """Client 0 is closed and drew everything; 0 / 0 would be NaN, so clients 1 and 2 share evenly."""
    assert dealt([0, 0, 0, 1, 1], [[1.0, 0, 0], [1.0, 0, 0]], self_balancing=True) == [[0, 1, 2], [3], [4]]


@given(LABELS, st.integers(2, 8), SEEDS)
def test_a_closed_client_gets_nothing(y: NDArray[np.int64], k: int, seed: int) -> None:
    partition = DirichletPartitioner(k, 0.3, min_partition_size=0, self_balancing=True, seed=seed).split(y)
    counts = partition.label_counts(y, 6)
    before = np.cumsum(counts, axis=1) - counts
    assert (counts[before > len(y) / k] == 0).all()


@pytest.mark.parametrize("alpha", [0.05, 0.5, tuple(np.linspace(0.1, 2, 12).tolist())])
def test_the_same_rows_as_flwr_datasets(alpha: float | tuple[float, ...]) -> None:
    """Its algorithm, class by class and client by client: draw, cumulate, cut the class's rows at the truncated places."""
    rng, k = np.random.default_rng(42), 12
    clients: list[list[int]] = [[] for _ in range(k)]
    for c in range(10):
        rows = np.flatnonzero(c == Y)
        cuts = (np.cumsum(rng.dirichlet(np.full(k, alpha))) * len(rows)).astype(int)[:-1]
        for client, part in zip(clients, np.split(rows, cuts), strict=True):
            client.extend(part.tolist())
    ours = DirichletPartitioner(k, alpha, min_partition_size=0)
    assert [sorted(rows) for rows in lists(ours.split(Y))] == [sorted(rows) for rows in clients]
    unshuffled = DirichletPartitioner(k, alpha, min_partition_size=0, shuffle=False)
    assert lists(unshuffled.split(Y)) == clients


def test_the_mean_and_variance_of_the_shares() -> None:
    """A client's share of a class has mean 1 / K and variance (1 / K) (1 - 1 / K) / (K alpha + 1).

    K = 5, alpha = 0.5: mean 0.2, variance 0.2 * 0.8 / 3.5 = 0.0457. 400 splits of 2 classes are 4000 shares.
    """
    y, k = np.repeat([0, 1], 1000), 5
    rng = np.random.default_rng(7)
    partitioner = DirichletPartitioner(k, 0.5, min_partition_size=0, shuffle=False)
    shares = np.stack([partitioner.split(y, rng).label_counts(y, 2) / 1000 for _ in range(400)])
    assert shares.mean(0) == pytest.approx(np.full((k, 2), 0.2), abs=4 * (0.0457 / 400) ** 0.5)
    assert shares.var() == pytest.approx(0.0457, rel=0.1)


def test_shuffling_mixes_the_classes_of_a_client_evenly() -> None:
    """Client after client the labels lie in no order: the first half of a client's rows has half of each class."""
    y = np.repeat([0, 1], 5000)
    for rows in DirichletPartitioner(4, 100.0).split(y):
        assert y[rows[: len(rows) // 2]].mean() == pytest.approx(y[rows].mean(), abs=0.06)


def test_a_concentration_for_each_client() -> None:
    """The mean share of client k is alpha_k / sum(alpha): 0.1 and 0.9."""
    y, rng = np.zeros(1000, np.int64), np.random.default_rng(3)
    partitioner = DirichletPartitioner(2, (1.0, 9.0), min_partition_size=0)
    shares = [partitioner.split(y, rng).sizes[0] / 1000 for _ in range(300)]
    assert np.mean(shares) == pytest.approx(0.1, abs=0.02)


def test_seeds() -> None:
    for partitioner in (IidPartitioner, lambda k, seed=42: DirichletPartitioner(k, 0.5, seed=seed)):
        assert partitioner(7).split(Y) == partitioner(7, seed=42).split(Y)
        assert partitioner(7).split(Y) != partitioner(7, seed=43).split(Y)
        assert partitioner(7, seed=1).split(Y, np.random.default_rng(42)) == partitioner(7, seed=42).split(Y)


def test_one_class_when_it_does_not_come_out_even() -> None:
    """Five clients for three classes: one each, and one more for the two largest, classes 2 (7 examples) and 0 (5)."""
    y = np.repeat([0, 1, 2], [5, 4, 7])
    assert OneClassPartitioner(5).split(y).sizes.tolist() == [3, 2, 4, 4, 3]


def test_labels_of_any_integer_type() -> None:
    for dtype in (np.uint8, np.int16, np.uint64):
        assert DirichletPartitioner(4, 0.5).split(Y.astype(dtype)) == DirichletPartitioner(4, 0.5).split(Y)


def test_they_are_values() -> None:
    for cls in (IidPartitioner, DirichletPartitioner, OneClassPartitioner):
        assert KNOWN[cls.__name__] is cls


def dirichlet(k: Any = 10, alpha: Any = 0.5, **settings: Any) -> Callable[[], object]:
    return lambda: DirichletPartitioner(k, alpha, **settings).split(Y)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (dirichlet(0), "DirichletPartitioner: num_partitions must be a whole number of at least 1, not 0"),
        (dirichlet(2.5), "DirichletPartitioner: num_partitions must be a whole number of at least 1, not 2.5"),
        (dirichlet(seed=-1), "DirichletPartitioner: seed must be a whole number of at least 0, not -1"),
        (dirichlet(alpha=0), "DirichletPartitioner: alpha must be a number above 0, or one per partition, not 0"),
        (dirichlet(alpha="label"), "DirichletPartitioner: alpha must be a number above 0, or one per partition, not 'label'"),
        (dirichlet(alpha=float("nan")), "DirichletPartitioner: alpha must be a number above 0, or one per partition, not nan"),
        (dirichlet(alpha=1e308), "DirichletPartitioner: NumPy cannot draw from alpha = 1e+308"),
        (dirichlet(alpha=(0.1, 0.2)), "DirichletPartitioner: alpha has 2 numbers for 10 partitions"),
        (
            dirichlet(partition_by="colour"),
            "DirichletPartitioner: partition_by must be 'label', not 'colour': a row has one label",
        ),
        (
            dirichlet(min_partition_size=-1),
            "DirichletPartitioner: min_partition_size must be a whole number of at least 0, not -1",
        ),
        (
            dirichlet(600),
            "DirichletPartitioner: 5000 examples cannot give each of 600 partitions 10; set min_partition_size to 8 or less",
        ),
        (lambda: IidPartitioner(4).split(np.arange(3)), "IidPartitioner: 3 examples are too few for 4 partitions"),
        (
            lambda: OneClassPartitioner(8).split(Y),
            "OneClassPartitioner: 8 clients of one class each cannot cover 10 classes; set num_partitions to at least 10",
        ),
        (
            lambda: OneClassPartitioner(6).split(np.array([0, 0, 0, 1])),
            "OneClassPartitioner: class 1 has 1 examples for 3 clients; lower num_partitions",
        ),
        (
            lambda: OneClassPartitioner(2).split(np.zeros(3)),  # type: ignore[arg-type]
            "OneClassPartitioner: labels must be a flat array of integers, not float64 of shape (3,)",
        ),
        (lambda: OneClassPartitioner(2).split(np.array([1, -2])), "OneClassPartitioner: labels start at 0, but y[1] is -2"),
    ],
)
def test_errors(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(sentence)) as error:
        call()
    assert "\n" not in str(error.value)


def test_retries_are_bounded() -> None:
    """At alpha = 0.01 three classes never reach 100 clients; eleven draws, then a sentence that says what could be had."""
    drawn: list[int] = []

    class Counting:
        rng = np.random.default_rng(0)

        def dirichlet(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
            drawn.append(len(alpha))
            return self.rng.dirichlet(alpha)

    rng: Any = Counting()
    sentence = (
        "DirichletPartitioner: in 11 draws the smallest of 100 partitions had at most 0 examples, but min_partition_size is 10;"
        " lower it, or raise alpha (now 0.01)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        DirichletPartitioner(100, 0.01).split(np.arange(6000) % 3, rng)
    assert len(drawn) == 11 * 3


def test_a_million_examples_over_ten_thousand_clients_cost_little_more_than_a_sort() -> None:
    y = np.random.default_rng(0).integers(0, 10, 1_000_000)
    partitioner = DirichletPartitioner(10_000, 0.1, min_partition_size=0)

    def seconds(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    sorts, splits = [], []
    for _ in range(7):  # in turns, so that both meet the same neighbours; the minimum is what the work itself takes
        sorts.append(seconds(lambda: np.argsort(y.astype(np.int64), kind="stable")))
        splits.append(seconds(lambda: partitioner.split(y)))
    assert min(splits) < 3 * min(sorts)
