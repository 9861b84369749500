"""Partition: flat, small, checked."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrelay.data import Partition
from fedrelay.data.partition import _stable_order


def test_rows_of_each_client() -> None:
    p = Partition.of([[3, 1], [], np.array([0], np.uint8), (2, 3)])
    assert [rows.tolist() for rows in p] == [[3, 1], [], [0], [2, 3]]
    assert [p[k].tolist() for k in range(len(p))] == [[3, 1], [], [0], [2, 3]]
    assert p[-1].tolist() == [2, 3]
    assert p.sizes.tolist() == [2, 0, 1, 2]
    assert p.index.dtype == np.int32
    assert p.offsets.dtype == np.int64
    assert p.nbytes == 5 * 4 + 5 * 8
    assert p.check(4) is p
    assert p[0].base is not None  # a view


def test_equality_is_of_contents() -> None:
    assert Partition.of([[1], [2]]) == Partition.of([[1], [2]])
    assert Partition.of([[1], [2]]) != Partition.of([[1, 2], []])
    assert Partition.of([[1]]) != "something else"


def test_label_counts_by_hand() -> None:
    """Client 0 owns rows 0, 1, 3 with labels 2, 0, 2; client 1 nothing; client 2 row 1 as well, label 0."""
    p = Partition.of([[0, 1, 3], [], [1]])
    y = np.array([2, 0, 1, 2])
    assert p.label_counts(y, 3).tolist() == [[1, 0, 2], [0, 0, 0], [1, 0, 0]]
    assert p.label_counts(y.astype(np.uint8), 4).shape == (3, 4)


OWNERS = st.integers(1, 12).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k - 1), max_size=40)))


@given(OWNERS)
def test_by_owner_equals_a_plain_loop(drawn: tuple[int, list[int]]) -> None:
    clients, owners = drawn
    p = Partition.by_owner(np.array(owners, np.int64), clients)
    assert [r.tolist() for r in p] == [[i for i, o in enumerate(owners) if o == k] for k in range(clients)]
    rows = np.arange(len(owners))[::-1] * 2
    moved = Partition.by_owner(np.array(owners, np.int64), clients, rows)
    assert [r.tolist() for r in moved] == [[int(rows[i]) for i in r] for r in p]


@pytest.mark.parametrize("clients", [200, 257, 60_000, 1 << 16, (1 << 16) + 1, 1_000_000])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_stable_order_at_every_width(clients: int, dtype: type[np.int32 | np.int64]) -> None:
    owner = np.random.default_rng(clients).integers(0, clients, 3000, dtype)
    owner[:2] = clients - 1
    assert np.array_equal(_stable_order(owner, clients), np.argsort(owner, kind="stable"))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Partition.of([]), "a partition needs at least one client"),
        (lambda: Partition.of([[0], [0.5]]), "client 1's rows must be a flat list of integers, not float64 of shape (1,)"),
        (lambda: Partition.of([[[0]]]), "client 0's rows must be a flat list of integers, not int64 of shape (1, 1)"),
        (lambda: Partition.of([[0, 1], [], [4, 5]]).check(5), "client 2 owns row 5, but the rows run from 0 to 4"),
        (lambda: Partition.of([[0], [-1]]).check(5), "client 1 owns row -1, but the rows run from 0 to 4"),
        (lambda: Partition.of([[2**31]]), "a partition numbers rows in 32 bits, and row 2147483648 does not fit"),
        (
            lambda: Partition(np.arange(3, dtype=np.int32), np.array([0, 2])),
            "a partition's offsets must rise from 0 to the length",
        ),
        (lambda: Partition(np.arange(3, dtype=np.int32), np.array([0, 4, 3])), "a partition's offsets must rise from 0"),
        (lambda: Partition(np.zeros(3), np.array([0, 3])), "a partition's index must be a flat array of integers, not float64"),  # type: ignore[arg-type]
        (lambda: Partition.by_owner(np.array([0, 3]), 3), "owners must be from 0 to 2, but they run from 0 to 3"),
        (
            lambda: Partition.of([[0, 1]]).label_counts(np.array([0, 2]), 2),
            "labels must be from 0 to 1, but they run from 0 to 2",
        ),
    ],
)
def test_errors(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(sentence)):
        call()


def test_no_such_client() -> None:
    with pytest.raises(IndexError, match=r"^there is no client 2: this partition has 2$"):
        Partition.of([[0], [1]])[2]
