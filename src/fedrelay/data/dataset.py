"""A dataset is NumPy arrays, checked once, when it is made: what passed here needs no further `if` on the way to a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedrelay.data.augment import Normalise

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Labelled examples, with a test part that may be empty.

    The arrays stay as they are stored (uint8 images take a quarter of the memory of floats); what a model sees is made of
    them on the device by `normalise`.

    Attributes:
        name: What it is called in messages, run folders and reports.
        x: Training examples, a row each: ``[n, channels, height, width]`` for images, ``[n, features]`` for tables.
            uint8 means 0..255 and is scaled by 1/255 before anything else; every other type is taken as it is (so integers
            may be the tokens of a text).
        y: Their labels, integers from 0 to ``classes - 1``.
        test_x: Test examples, rows like those of ``x``.
        test_y: Their labels.
        classes: How many classes there are, whether or not each of them occurs.
        mean: What is subtracted from each channel after scaling: a number per channel, one for all, or none.
        std: What each channel is divided by after that.
        groups: To whom each training example belongs by nature (a writer, a speaker, a site), where that is known.

    >>> Dataset.of(np.zeros((4, 2)), [0, 1, 2, 1], name="tiny")
    Dataset('tiny': 4 train, 0 test, 2 float64, 3 classes)
    >>> Dataset.of(np.zeros((4, 2)), [0, 1, 2], name="tiny")
    Traceback (most recent call last):
    ...
    ValueError: tiny: x has 4 rows, but y has 3 labels
    """

    name: str
    x: Array
    y: NDArray[np.int64]
    test_x: Array
    test_y: NDArray[np.int64]
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    groups: Array | None = None

    @classmethod
    def of(
        cls,
        x: object,
        y: object,
        test_x: object = None,
        test_y: object = None,
        *,
        name: str = "data",
        classes: int | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        groups: object = None,
    ) -> Dataset:
        """A dataset from anything that is an array: NumPy, lists, torch tensors on any device.

        Without ``classes`` there are as many as the largest label says.
        """
        if (test_x is None) != (test_y is None):
            given, missing = ("test_x", "test_y") if test_y is None else ("test_y", "test_x")
            raise ValueError(f"{name}: {given} is given without {missing}; give both or neither")
        rows, labels = _array(x), _array(y)
        test_rows, test_labels = (rows[:0], labels[:0]) if test_x is None else (_array(test_x), _array(test_y))
        if classes is None:
            whole = [part for part in (labels, test_labels) if part.size and part.dtype.kind in "iu"]
            classes = max((int(part.max()) + 1 for part in whole), default=1)
        owners = None if groups is None else _array(groups)
        return cls(name, rows, labels, test_rows, test_labels, classes, tuple(mean), tuple(std), owners)

    def __post_init__(self) -> None:
        for field in ("x", "test_x"):
            # In a layout that torch takes without a copy. A boolean feature is 0 or 1: as uint8 it would be scaled by 1/255.
            rows = getattr(self, field)
            dtype = np.dtype(np.float32) if rows.dtype == bool else rows.dtype.newbyteorder("=")
            object.__setattr__(self, field, np.ascontiguousarray(rows, dtype))
        if len(self.x) == 0 and len(self.y) == 0:
            raise ValueError(f"{self.name}: there are no training examples")
        self._check_rows("x", self.x, "y", self.y)
        self._check_rows("test_x", self.test_x, "test_y", self.test_y)
        if self.test_x.shape[1:] != self.x.shape[1:]:
            raise ValueError(f"{self.name}: a row of x is {_shape(self.x)}, but a row of test_x is {_shape(self.test_x)}")
        if (self.test_x.dtype == np.uint8) != (self.x.dtype == np.uint8):
            raise ValueError(
                f"{self.name}: x is {self.x.dtype} and test_x is {self.test_x.dtype}, but uint8 is scaled and the rest is not;"
                " give both the same type"
            )
        for field in ("y", "test_y"):
            object.__setattr__(self, field, np.ascontiguousarray(getattr(self, field), np.int64))
        self._check_normalisation()
        if self.groups is not None and self.groups.shape != self.y.shape:
            raise ValueError(f"{self.name}: groups has shape {self.groups.shape}, but there are {len(self)} rows of x")

    def _check_rows(self, x_name: str, x: Array, y_name: str, y: Array) -> None:
        """One part, train or test: the first thing that is wrong with it, in one sentence."""
        if x.ndim < 2 or y.ndim != 1:
            raise ValueError(
                f"{self.name}: {x_name} needs shape [rows, ...] and {y_name} shape [rows], but they are {x.shape} and {y.shape}"
            )
        if len(x) != len(y):
            raise ValueError(f"{self.name}: {x_name} has {len(x)} rows, but {y_name} has {len(y)} labels")
        if x.dtype.kind not in "iuf":
            raise ValueError(f"{self.name}: {x_name} must hold numbers, but is {x.dtype}")
        if len(y) == 0:
            return
        if y.dtype.kind not in "iu":
            raise ValueError(f"{self.name}: labels must be integers, but {y_name} is {y.dtype}")
        if len(bad := np.flatnonzero((y < 0) | (y >= self.classes))):
            row = int(bad[0])
            raise ValueError(f"{self.name}: {y_name}[{row}] is {y[row]}, but labels run from 0 to {self.classes - 1}")
        # min and max see every NaN and infinity and, unlike isfinite(x), need no second array of the size of the data.
        if x.dtype.kind == "f" and not (np.isfinite(x.min(initial=0)) and np.isfinite(x.max(initial=0))):
            row = int(np.isfinite(x.reshape(len(x), -1)).all(1).argmin())
            raise ValueError(f"{self.name}: {x_name}[{row}] holds a NaN or an infinity; drop or fill such rows first")

    def _check_normalisation(self) -> None:
        channels = self.x.shape[1]
        for field, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (0, 1, channels):
                raise ValueError(f"{self.name}: {field} has {len(numbers)} numbers, but x has {channels} channels")
            if not all(math.isfinite(v) for v in numbers):
                raise ValueError(f"{self.name}: {field} must hold finite numbers, not {numbers}")
        if any(v <= 0 for v in self.std):
            raise ValueError(f"{self.name}: std must be above 0, not {self.std}; leave a constant channel at 1")

    def __len__(self) -> int:
        """How many training examples there are."""
        return len(self.y)

    def __repr__(self) -> str:
        parts = f"{len(self)} train, {len(self.test_y)} test, {_shape(self.x)} {self.x.dtype}, {self.classes} classes"
        return f"Dataset({self.name!r}: {parts})"

    @property
    def scale(self) -> float:
        """What a stored number is multiplied by first: 1/255 for uint8, otherwise 1."""
        return 1 / 255 if self.x.dtype == np.uint8 else 1.0

    @property
    def normalise(self) -> Normalise:
        """How stored rows become what a model sees."""
        from fedrelay.data.augment import Normalise

        return Normalise(self.mean, self.std, self.scale)


def _array(a: object) -> Array:
    """``a`` as a NumPy array. A torch tensor is known by its `detach`, so that torch need not be loaded to ask."""
    if hasattr(a, "detach"):
        a = a.detach().cpu().numpy()
    return np.asarray(a)


def _shape(x: Array) -> str:
    """The shape of one row.

    >>> _shape(np.zeros((7, 3, 32, 32)))
    '3x32x32'
    """
    return "x".join(map(str, x.shape[1:]))
