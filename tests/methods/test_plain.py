"""Plain: the mean by examples or by count, by hand."""

import pytest

from byhand import LEAF, landed, model, number
from fedrelay.methods import Plain


@pytest.mark.parametrize(("by", "merged"), [("examples", 4.25), ("count", 3.0)])
def test_the_mean_by_hand(by, merged):
    """Ends 1 and 5 of 3 and 13 examples: (3 + 65)/16 = 4.25, or (1 + 5)/2 = 3."""
    method, w = Plain(by), model(0)
    new, state = method.merge(w, None, landed(method.folds, w, [model(1), model(5)], [3, 13]))
    assert (number(new), state) == (merged, None)
    assert number(w) == 0
    assert list(new) == [LEAF]
