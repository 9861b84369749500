"""Everybody's data as one tensor, and clients as stretches of one index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrelay.engine.examples import Examples, Part
from fedrelay.seam.plan import EVERYBODY

X, Y = torch.arange(24.0).view(8, 3), torch.arange(8)


def part(*owned: list[int]) -> Part:
    index = torch.tensor([row for rows in owned for row in rows], dtype=torch.int32)
    return Part(X, Y, index, np.cumsum([0, *map(len, owned)]))


def test_clients_own_the_rows_that_the_index_says() -> None:
    """Not neighbours in the data, of unequal number, and one client without any."""
    data = Examples({"train": part([7, 0], [], [3], [2, 5, 4])})
    assert data.train.sizes.tolist() == [2, 0, 1, 3]
    assert [data.train.rows(c).tolist() for c in range(4)] == [[7, 0], [], [3], [2, 5, 4]]
    x, y = data.of(3)
    assert torch.equal(x, X[[2, 5, 4]])
    assert y.tolist() == [2, 5, 4]
    assert data.of(1)[0].shape == (0, 3)


def test_everybody_is_a_client_who_owns_all() -> None:
    data = Examples({"train": part([7, 0], [], [3], [2, 5, 4])})
    assert data.of(EVERYBODY)[1].tolist() == [7, 0, 3, 2, 5, 4]
    assert data.train.lengths[EVERYBODY] == 6
    assert data.train.starts[[0, 1, 2, 3, EVERYBODY]].tolist() == [0, 2, 2, 3, 0]


def test_a_part_that_is_not_there_is_the_training_part() -> None:
    data = Examples({"train": part([0, 1], [2]), "validation": part([3], [4, 5])})
    assert data.of(1, "validation")[1].tolist() == [4, 5]
    assert data.of(1, "test")[1].tolist() == [2]


def test_the_index_is_all_that_grows_with_clients() -> None:
    """Four bytes a row and eight a client; the rows themselves lie there once."""
    many = part(*([i % 8] for i in range(1000)))
    assert many.nbytes == 4 * 1000 + 8 * 1001
    assert many.x is X


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_have_the_model_s_precision(dtype: torch.dtype) -> None:
    """Whole numbers stay what they are without a transform: they may be words."""
    data = Examples({"train": part([0])}, dtype=dtype)
    assert data.of(0)[0].dtype is dtype
    words = Examples({"train": Part(X.long(), Y, torch.tensor([0], dtype=torch.int32), np.array([0, 1]))}, dtype=dtype)
    assert words.of(0)[0].dtype is torch.int64
    halved = Examples({"train": words.train}, transform=lambda x, keys: x / 2, dtype=dtype)
    assert halved.of(0)[0].dtype is dtype
    assert halved.of(0)[0].tolist() == [[0.0, 0.5, 1.0]]


def test_a_client_s_rows_are_seen_unaugmented() -> None:
    keys = []
    data = Examples({"train": part([0, 1])}, transform=lambda x, k: keys.append(k) or x, augments=True)
    data.of(0)
    data.inputs(X[:2], torch.tensor([5, 6]))
    assert keys[0] is None
    assert keys[1].tolist() == [5, 6]


def test_from_a_list_per_client() -> None:
    xs, ys = [X[:2], X[2:2], X[2:5]], [Y[:2], Y[2:2], Y[2:5]]
    data = Examples.of_lists(xs, ys, held=[(X[5:6], Y[5:6]), (X[6:], Y[6:]), (X[:0], Y[:0])])
    for c in range(3):
        assert torch.equal(data.of(c)[0], xs[c])
        assert torch.equal(data.of(c)[1], ys[c])
    assert [len(data.of(c, "validation")[1]) for c in range(3)] == [1, 2, 0]
    assert "validation" not in Examples.of_lists(xs, ys).parts
    assert Examples.of_lists([x.double() for x in xs], ys).dtype is torch.float64
