"""What a server may ask clients. A question says what its answer discloses; a device may refuse, and is then missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np

from fedrelay.seam.values import value

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedrelay.seam.rules import Rows
    from fedrelay.seam.values import Weights

A = TypeVar("A", covariant=True)


class Question(Protocol[A]):
    """A value that is answered where the data is."""

    discloses: ClassVar[str]
    part: str
    """Which of the client's parts is asked about: train, validation or test."""

    def answer(self, rows: Rows, w: Weights | None) -> A: ...


@value
class LabelCounts:
    """How many examples of each class a client has."""

    classes: int
    part: str = "train"
    discloses: ClassVar[str] = "label counts"

    def answer(self, rows: Rows, w: Weights | None) -> tuple[int, ...]:
        import torch

        return tuple(torch.bincount(rows.y, minlength=self.classes).tolist())


@value
class Size:
    """How many examples a client has."""

    part: str = "train"
    discloses: ClassVar[str] = "size"

    def answer(self, rows: Rows, w: Weights | None) -> int:
        return len(rows.y)


@value
class Counts:
    """An evaluation as sums, so that accuracy, F1 and fairness of any union of clients follow by adding.

    >>> a = Counts(np.array([[3, 1], [0, 4]]), 2.0)
    >>> a.n, a.accuracy, a.loss
    (8, 0.875, 0.25)
    """

    confusion: NDArray[np.int64]
    """[true class, predicted class]."""
    loss_sum: float

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.confusion + other.confusion, self.loss_sum + other.loss_sum)

    @property
    def n(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(np.trace(self.confusion) / max(self.n, 1))

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.n, 1)

    @staticmethod
    def of(outputs: Tensor, y: Tensor, losses: Tensor, classes: int) -> Counts:
        """Of a batch of outputs."""
        import torch

        table = torch.bincount(y * classes + outputs.argmax(1), minlength=classes**2).reshape(classes, classes)
        return Counts(table.cpu().numpy(), float(losses.double().sum()))


@value
class Evaluate:
    """How well these weights do on a client's part."""

    classes: int
    part: str = "test"
    discloses: ClassVar[str] = "evaluation"

    def answer(self, rows: Rows, w: Weights | None) -> Counts:
        if w is None:
            raise ValueError("Evaluate needs weights: ask(clients, Evaluate(classes), weights)")
        outputs = rows.forward(w, rows.x)
        return Counts.of(outputs, rows.y, rows.criterion(outputs, rows.y), self.classes)


Answering = Callable[[int, Question[Any], "Weights | None"], Any]
