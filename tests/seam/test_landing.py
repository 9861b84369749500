"""Landings: visits as columns and one by one, several plans as one, and folds that did not ride along."""

import math

import numpy as np
import pytest
import torch

from fedrelay.seam.folds import Bank, Mean
from fedrelay.seam.landing import Flight, Landing, Receipt, Receipts, join


def receipts(clients, numbers, traffic, reasons):
    n = len(clients)
    whole = np.arange(n)
    plain = [np.array(clients, np.int64), whole, 0 * whole, 10 + whole, 2 * whole, whole / 4, whole * 1.5]
    return Receipts(
        *plain, {k: np.array(v, float) for k, v in numbers.items()}, {k: np.array(v) for k, v in traffic.items()}, reasons
    )


FIRST = receipts(
    [5, 3], {"learning_rate": [0.1, 0.2], "Proximal.mu": [math.nan, 1.0]}, {"down": [8, 9], "up": [8, 0]}, {1: "lost"}
)
SECOND = receipts([7], {"learning_rate": [0.3], "Dynamic.alpha": [2.0]}, {"down": [4], "cut": [6]}, {0: "not finite"})


def test_a_visit_at_a_time():
    """A number that a visit did not train with is missing, not NaN."""
    assert len(FIRST) == 2
    assert list(FIRST) == [
        Receipt(5, 0, 0, 10, 0, 0.0, 0.0, {"learning_rate": 0.1}, {"down": 8, "up": 8}, None),
        Receipt(3, 1, 0, 11, 2, 0.25, 1.5, {"learning_rate": 0.2, "Proximal.mu": 1.0}, {"down": 9, "up": 0}, "lost"),
    ]
    one = next(iter(FIRST))
    assert (type(one.client), type(one.loss), type(one.numbers["learning_rate"]), type(one.traffic["up"])) == (
        int,
        float,
        float,
        int,
    )


@pytest.mark.parametrize(
    ("made", "ok"), [(FIRST, [True, False]), (SECOND, [False]), (receipts([1, 2], {}, {}, {}), [True, True])]
)
def test_who_succeeded(made, ok):
    assert made.ok.tolist() == ok


def test_joined_receipts_follow_each_other():
    """Reasons move on by the rows before them; a column that a part lacks is NaN (numbers) or 0 (bytes) there."""
    both = Receipts.joined([FIRST, SECOND, FIRST])
    assert both.client.tolist() == [5, 3, 7, 5, 3]
    assert both.examples.tolist() == [10, 11, 10, 10, 11]
    assert both.reasons == {1: "lost", 2: "not finite", 4: "lost"}
    assert both.ok.tolist() == [True, False, False, True, False]
    assert {k: v.tolist() for k, v in both.traffic.items()} == {
        "down": [8, 9, 4, 8, 9],
        "up": [8, 0, 0, 8, 0],
        "cut": [0, 0, 6, 0, 0],
    }
    assert {k: [None if math.isnan(x) else x for x in v] for k, v in both.numbers.items()} == {
        "learning_rate": [0.1, 0.2, 0.3, 0.1, 0.2],
        "Proximal.mu": [None, 1.0, None, None, 1.0],
        "Dynamic.alpha": [None, None, 2.0, None, None],
    }
    assert [r.numbers for r in both] == [r.numbers for part in (FIRST, SECOND, FIRST) for r in part]
    assert (both.client.dtype, both.loss.dtype, both.traffic["cut"].dtype) == (np.int64, np.float64, np.int64)


def test_joining_one_changes_nothing():
    assert list(Receipts.joined([FIRST])) == list(FIRST)


def landing(flight, at, made, rows=FIRST):
    return Landing(Flight(flight), at, made, rows)


def test_a_landing_gives_what_its_folds_made():
    w = {"a": torch.tensor(6.0)}
    got = landing(0, 1.0, {Mean(): {"n": 3, "sum": w}, Bank(): ((w, 3),)})
    assert float(got[Mean()]["a"]) == 2
    assert got[Bank()] == ((w, 3),)


def test_a_fold_that_did_not_ride_is_named_and_so_are_those_that_did():
    got = landing(0, 1.0, {Mean(): Mean().empty(), Bank("a"): ()})
    sentence = (
        r"^Mean\(by='count', at='ends'\) did not ride on this plan; these did: "
        r"Mean\(by='examples', at='ends'\), Bank\(leaf='a', at='every end'\)$"
    )
    with pytest.raises(LookupError, match=sentence):
        got[Mean("count")]


def test_landings_join_as_if_their_chains_had_been_one_plans():
    """Means of 2 (3 examples) and 5 (1 example) join to 11/4; a third part with 2 (4 examples) brings 19/8."""
    parts = [
        landing(i, float(i), {Mean(): {"n": n, "sum": {"a": torch.tensor(s)}}}, rows)
        for i, (n, s, rows) in enumerate([(3, 6.0, FIRST), (1, 5.0, SECOND), (4, 8.0, FIRST)])
    ]
    assert float(join(parts[:2])[Mean()]["a"]) == 11 / 4
    joined = join(parts)
    assert float(joined[Mean()]["a"]) == 19 / 8
    assert joined.receipts.client.tolist() == [5, 3, 7, 5, 3]
    assert (joined.flight, joined.at) == (Flight(0), 0.0)
    assert float(parts[0][Mean()]["a"]) == 2  # what was joined is as it was
