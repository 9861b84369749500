"""Questions: answers by hand, evaluations that add, and what an answer discloses."""

import numpy as np
import pytest
import torch

from byhand import federation, model
from fedrelay.models.model import cross_entropy
from fedrelay.seam.federation import Run
from fedrelay.seam.questions import Counts, Evaluate, LabelCounts, Size
from fedrelay.seam.rules import Rows

Y = torch.tensor([2, 0, 2, 2])
Z = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 2.0], [9.0, 1.0, 2.0], [0.0, 9.0, 2.0]])
ROWS = Rows(Z, Y, lambda w, x: w["scale"] * x, cross_entropy)


@pytest.mark.parametrize(("classes", "counts"), [(3, (1, 0, 3)), (5, (1, 0, 3, 0, 0))])
def test_label_counts_count_absent_classes_too(classes, counts):
    made = LabelCounts(classes).answer(ROWS, None)
    assert made == counts
    assert all(type(n) is int for n in made)


def test_size():
    assert Size().answer(ROWS, None) == 4


def test_an_evaluation_by_hand():
    """Predicted 2, 0, 0, 1 for the true 2, 0, 2, 2: two of four are right. At scale 0 all tie: ln 3 a row."""
    made = Evaluate(3).answer(ROWS, {"scale": torch.tensor(1.0)})
    assert made.confusion.tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert (made.n, made.accuracy) == (4, 0.5)
    flat = Evaluate(3).answer(ROWS, {"scale": torch.tensor(0.0)})
    assert flat.loss_sum == pytest.approx(4 * np.log(3), rel=1e-6)
    assert flat.loss == pytest.approx(np.log(3), rel=1e-6)


def test_evaluating_needs_weights():
    with pytest.raises(ValueError, match=r"^Evaluate needs weights: ask\(clients, Evaluate\(classes\), weights\)$"):
        Evaluate(3).answer(ROWS, None)


def test_the_counts_of_a_union_are_the_sum_of_the_parts():
    """3 of 4 right at a loss of 2 and 1 of 6 right at 8: 4 of 10 right, mean loss 1; not the mean of 0.75 and 1/6."""
    a, b = Counts(np.array([[2, 1], [0, 1]]), 2.0), Counts(np.array([[1, 3], [2, 0]]), 8.0)
    both = a + b
    assert both.confusion.tolist() == [[3, 4], [2, 1]]
    assert (both.n, both.accuracy, both.loss) == (10, 0.4, 1.0)
    assert (a.n, b.n) == (4, 6)


def test_parts_of_a_batch_add_to_the_batch():
    losses = torch.tensor([0.25, 0.5, 1.0, 2.0])
    whole = Counts.of(Z, Y, losses, 3)
    parts = Counts.of(Z[:1], Y[:1], losses[:1], 3) + Counts.of(Z[1:], Y[1:], losses[1:], 3)
    assert whole.confusion.tolist() == parts.confusion.tolist()
    assert whole.loss_sum == parts.loss_sum == 3.75
    assert type(whole.loss_sum) is float


def test_nothing_evaluated_is_zero_rather_than_an_error():
    nothing = Counts(np.zeros((2, 2), np.int64), 0.0)
    assert (nothing.n, nothing.accuracy, nothing.loss) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("question", "what"), [(LabelCounts(2), "label counts"), (Size(), "size"), (Evaluate(2), "evaluation")], ids=repr
)
def test_a_question_says_what_its_answer_discloses(question, what):
    assert question.discloses == what


def test_asking_enters_the_ledger_for_those_asked():
    fed = federation([2, 6, 10], sizes=[1, 3, 2])
    assert Run(fed).ask([2, 1], Size(), model(0)) == {2: 2, 1: 3}
    assert fed.ledger.who("size") == [1, 2]
    assert list(fed.ledger.disclosed) == ["size"]
