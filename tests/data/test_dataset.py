"""Dataset: what is kept, what is refused and in which words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from fedrelay.data import Dataset


def test_of_lists_counts_the_classes_of_both_parts() -> None:
    d = Dataset.of([[0.0], [1.0]], [0, 1], [[2.0]], [4])
    assert (len(d), d.classes, d.test_y.tolist()) == (2, 5, [4])
    assert d.y.dtype == np.int64


def test_without_test_part_it_is_empty_and_of_the_same_shape() -> None:
    d = Dataset.of(np.zeros((3, 2, 4, 4)), [0, 0, 1])
    assert d.test_x.shape == (0, 2, 4, 4)
    assert d.test_y.shape == (0,)


def test_torch_tensors_in_any_state() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    d = Dataset.of(x, torch.tensor([0, 2, 1], dtype=torch.int32))
    assert isinstance(d.x, np.ndarray)
    assert d.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert d.y.dtype == np.int64


def test_what_torch_takes_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    odd = np.arange(6, dtype=">f4").reshape(3, 2)[::-1]
    d = Dataset.of(odd, [0, 1, 0])
    assert torch.from_numpy(d.x).tolist() == [[4, 5], [2, 3], [0, 1]]


def test_only_bytes_are_scaled() -> None:
    y = [0, 1]
    assert Dataset.of(np.zeros((2, 1), np.uint8), y).scale == 1 / 255
    assert Dataset.of(np.zeros((2, 1), np.float32), y).scale == 1
    assert Dataset.of(np.zeros((2, 1), np.int64), y).scale == 1
    booleans = Dataset.of(np.array([[True], [False]]), y)
    assert (booleans.scale, booleans.x.tolist()) == (1, [[1.0], [0.0]])


def test_normalise_carries_the_numbers() -> None:
    d = Dataset.of(np.zeros((2, 3, 1, 1), np.uint8), [0, 1], mean=[0.1, 0.2, 0.3], std=[1.0])
    assert (d.normalise.mean, d.normalise.std, d.normalise.scale) == ((0.1, 0.2, 0.3), (1.0,), 1 / 255)


X = np.zeros((3, 2), np.float32)
Y = [0, 1, 2]
HOLE = np.array([[0, 0], [1, np.nan], [np.nan, 0]], np.float32)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"x": X[:0], "y": []}, "own: there are no training examples"),
        ({"x": X, "y": Y[:2]}, "own: x has 3 rows, but y has 2 labels"),
        ({"x": X, "y": Y, "test_x": X, "test_y": Y[:1]}, "own: test_x has 3 rows, but test_y has 1 labels"),
        ({"x": X, "y": Y, "test_x": X}, "own: test_x is given without test_y; give both or neither"),
        ({"x": X, "y": Y, "test_y": Y}, "own: test_y is given without test_x; give both or neither"),
        ({"x": X, "y": [0, 1, 3], "classes": 3}, "own: y[2] is 3, but labels run from 0 to 2"),
        ({"x": X, "y": [0, -1, 3]}, "own: y[1] is -1, but labels run from 0 to 3"),
        ({"x": X, "y": Y, "test_x": X[:1], "test_y": [5], "classes": 3}, "own: test_y[0] is 5, but labels run from 0 to 2"),
        ({"x": X, "y": [0.0, 1.0, 2.0]}, "own: labels must be integers, but y is float64"),
        ({"x": X, "y": np.eye(3)}, "own: x needs shape [rows, ...] and y shape [rows], but they are (3, 2) and (3, 3)"),
        ({"x": X[:, 0], "y": Y}, "own: x needs shape [rows, ...] and y shape [rows], but they are (3,) and (3,)"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, "own: x must hold numbers, but is <U1"),
        ({"x": HOLE, "y": Y}, "own: x[1] holds a NaN or an infinity; drop or fill such rows first"),
        ({"x": X + np.array([[0], [0], [np.inf]]), "y": Y}, "own: x[2] holds a NaN or an infinity; drop or fill such rows first"),
        ({"x": X, "y": Y, "test_x": HOLE[::-1] + np.inf, "test_y": Y}, "own: test_x[0] holds a NaN or an infinity; drop or fill"),
        ({"x": X, "y": Y, "test_x": X[:, :1], "test_y": Y}, "own: a row of x is 2, but a row of test_x is 1"),
        (
            {"x": X, "y": Y, "test_x": X.astype(np.uint8), "test_y": Y},
            "own: x is float32 and test_x is uint8, but uint8 is scaled",
        ),
        ({"x": X, "y": Y, "mean": [0.0] * 3}, "own: mean has 3 numbers, but x has 2 channels"),
        ({"x": X, "y": Y, "std": [0.0]}, "own: std must be above 0, not (0.0,); leave a constant channel at 1"),
        ({"x": X, "y": Y, "mean": [np.nan]}, "own: mean must hold finite numbers, not (nan,)"),
        ({"x": X, "y": Y, "groups": [1, 2]}, "own: groups has shape (2,), but there are 3 rows of x"),
    ],
)
def test_errors(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^" + re.escape(sentence)) as error:
        Dataset.of(name="own", **given)
    assert "\n" not in str(error.value)
