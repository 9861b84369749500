"""Batches: every epoch visits every row once, and a visit's batches depend on its own key alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrelay.engine.batches import batches, permutations, row_keys, total_steps

SHAPE = 6
CALM = settings(max_examples=80, derandomize=True, deadline=None, database=None)
KEYS = st.integers(-(2**63), 2**63 - 1)


def tensor(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@st.composite
def visits(draw):
    """(key, size, batch size, steps) of a few visits, and how many epochs are laid out."""
    n, epochs = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    some = [(draw(KEYS), draw(st.integers(1, 17)), draw(st.integers(1, SHAPE))) for _ in range(n)]
    return [(k, size, b, draw(st.integers(0, epochs * -(-size // b)))) for k, size, b in some], epochs


def lay_out(some, first: int, epochs: int, shape: int = SHAPE):
    keys, sizes, batch, limit = (tensor(column) for column in zip(*some, strict=True))
    return batches(keys, sizes, batch, limit, first, epochs, shape)


def rows_of(laid, v: int) -> list[list[int]]:
    """The batches of visit v: true rows only."""
    return [rows[:n].tolist() for rows, n in zip(laid.rows[v], laid.counts[v].tolist(), strict=True) if n]


@given(visits())
@CALM
def test_every_epoch_visits_every_row_exactly_once(case) -> None:
    some, epochs = case
    unlimited = [(k, size, b, epochs * -(-size // b)) for k, size, b, _ in some]
    laid = lay_out(unlimited, 0, epochs)
    for v, (_, size, b, steps) in enumerate(unlimited):
        mine = rows_of(laid, v)
        per_epoch = -(-size // b)
        assert len(mine) == steps
        assert laid.counts[v, :steps].gt(0).all()  # steps lie together, before whatever is none
        for e in range(epochs):
            of_epoch = mine[e * per_epoch : (e + 1) * per_epoch]
            assert [len(rows) for rows in of_epoch] == [b] * (size // b) + [size % b] * (size % b > 0)
            assert sorted(r for rows in of_epoch for r in rows) == list(range(size))


@given(visits())
@CALM
def test_a_limit_of_steps_cuts_off_what_comes_after(case) -> None:
    some, epochs = case
    limited, whole = lay_out(some, 0, epochs), lay_out([(k, n, b, 10**6) for k, n, b, _ in some], 0, epochs)
    for v, (*_, limit) in enumerate(some):
        assert rows_of(limited, v) == rows_of(whole, v)[:limit]


@given(visits())
@CALM
def test_epochs_can_be_laid_out_in_legs(case) -> None:
    some, epochs = case
    whole = lay_out(some, 0, epochs)
    legs = [lay_out(some, e, 1) for e in range(epochs)]
    for v in range(len(some)):
        assert [rows for leg in legs for rows in rows_of(leg, v)] == rows_of(whole, v)


@given(visits())
@CALM
def test_a_visit_s_batches_do_not_depend_on_its_neighbours(case) -> None:
    some, epochs = case
    together = lay_out(some, 0, epochs)
    for v, visit in enumerate(some):
        alone = lay_out([visit], 0, epochs)
        assert rows_of(alone, 0) == rows_of(together, v)


@given(visits())
@CALM
def test_padding_is_the_batch_s_own_first_row_and_of_no_account(case) -> None:
    """Also where the shape is wider than the batch: the true rows are the same, and every place is a row of this client."""
    some, epochs = case
    laid, wider = lay_out(some, 0, epochs), lay_out(some, 0, epochs, 2 * SHAPE)
    assert laid.rows.shape[2] == SHAPE
    assert wider.rows.shape[2] == 2 * SHAPE
    for v, (_, size, _, _) in enumerate(some):
        assert rows_of(laid, v) == rows_of(wider, v)
        for rows, n in zip(laid.rows[v].tolist(), laid.counts[v].tolist(), strict=True):
            assert all(0 <= r < size for r in rows) or n == 0
            assert n == 0 or rows[n:] == [rows[0]] * (SHAPE - n)


def test_keys_and_epochs_make_different_orders() -> None:
    """100 keys, 3 epochs, 30 rows: 300 permutations and no two of them equal."""
    perms = permutations(torch.arange(100), torch.full((100,), 30), torch.arange(3), 30).reshape(300, 30)
    assert len({tuple(p) for p in perms.tolist()}) == 300


def test_no_row_prefers_a_place() -> None:
    """20,000 keys of 5 rows: every row is as often in every place, within five standard deviations (of 57)."""
    n = 20_000
    perms = permutations(torch.arange(n), torch.full((n,), 5), torch.tensor([0]), 5)[:, 0]
    seen = np.array([[int((perms[:, place] == row).sum()) for row in range(5)] for place in range(5)])
    assert np.abs(seen - n / 5).max() < 5 * (n * 0.2 * 0.8) ** 0.5
    pairs = perms[:, 0] * 5 + perms[:, 1]  # nor does a row prefer what follows it
    counts = torch.bincount(pairs, minlength=25).view(5, 5)
    off = counts[~torch.eye(5, dtype=torch.bool)]
    assert (off - n / 20).abs().max() < 5 * (n * 0.05 * 0.95) ** 0.5


def test_ragged_permutations_begin_with_the_client_s_own_rows() -> None:
    sizes = torch.tensor([1, 4, 9])
    perms = permutations(torch.tensor([7, 8, 9]), sizes, torch.tensor([0, 5]), 9)
    for v, size in enumerate(sizes.tolist()):
        alone = permutations(torch.tensor([7 + v]), sizes[v : v + 1], torch.tensor([0, 5]), size)
        assert perms[v, :, :size].tolist() == alone[0].tolist()


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "steps", "total"),
    [(10, 4, 2, 0, 6), (8, 4, 2, 0, 4), (1, 32, 5, 0, 5), (10, 4, 2, 5, 5), (10, 4, 0, 7, 7), (10, 4, 0, 0, 0)],
)
def test_total_steps(size: int, batch: int, epochs: int, steps: int, total: int) -> None:
    """By epochs, a last partial batch included; or as many as asked for."""
    assert total_steps(*map(tensor, ([size], [batch], [epochs], [steps]))).tolist() == [total]


def test_every_row_of_every_step_has_a_key_of_its_own() -> None:
    """Three visits, 50 steps, 6 rows; a visit's keys are its own whoever is beside it, and shuffling draws others."""
    keys = tensor([3, 4, 2**62])
    made = torch.stack([row_keys(keys, torch.full((3,), step), SHAPE) for step in range(50)])
    assert len(set(made.flatten().tolist())) == 50 * 3 * SHAPE
    assert torch.equal(row_keys(keys[1:2], tensor([9]), SHAPE)[0], made[9, 1])
    steps = tensor([0, 9, 20])
    assert torch.equal(row_keys(keys, steps, SHAPE), torch.stack([made[s, v] for v, s in enumerate(steps.tolist())]))
